"""The server's part of a round, A2.13-16: admit the received updates, aggregate them, select Alice's model.

What it does   `aggregate_together` aggregates many runs in one batched computation (torch.vmap)
When           on a GPU, for runs of one algorithm and one number of agents; a CPU aggregates one run after another
What it gains  1.2 x on the MNIST table, 4.7 x on the digits grid
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net, Round
from waffle_fl.algorithms.contract import lengths, row_of
from waffle_fl.batches import steps_of
from waffle_fl.engines.run_spec import RoundSettings, RunSpec
from waffle_fl.engines.tree import tree_map, where_rows
from waffle_fl.federation import Federation
from waffle_fl.guard import NOT_ASKED, OK, REASONS, screen
from waffle_fl.models import FlatModel
from waffle_fl.update_encoding import Header, UpdateCollector, seal


class Registered(NamedTuple):
    """What the server knows about a federation before any update arrives; tensors, so that many can be stacked."""

    samples: Tensor  # (N,)
    steps: Tensor  # (N,), K_i as planned
    alice: Tensor  # ()
    asked: Tensor  # (N,) bool: the agents that take part in the round


class Arrived(NamedTuple):
    """The updates of one run as they reached the server."""

    up: Any
    present: Tensor  # (N,) bool: the agents that sent one
    refused: list[tuple[int, str]]  # messages that could not be read: agent, reason


class Aggregated(NamedTuple):
    """One run after aggregation, its measurements still on the device."""

    server: Any
    agents: Any
    own: Net  # Alice's model
    measured: dict[str, Any]


def registered(federation: Federation, settings: RoundSettings, device: torch.device) -> Registered:
    """Return sample counts, planned steps and Alice's index, on the device."""
    samples = federation.samples.to(device)
    shape = (settings.batch_size, settings.epochs, settings.remainder, settings.steps_per_round)
    steps = torch.tensor([steps_of(n, *shape) for n in federation.samples.tolist()], device=device)
    return Registered(samples, steps, torch.tensor(federation.alice, device=device), torch.ones_like(samples) > 0)


def receive(spec: RunSpec, model: FlatModel, up: Any, r: int, known: Registered) -> Arrived:
    """Return the updates as the server receives them: after the run's attack and its transport, if it has any."""
    present = known.asked & (known.samples > 0)
    if spec.tamper:
        up = spec.tamper(tree_map(torch.clone, up), r)  # cloned: it may keep tensors that workers overwrite
    if not spec.transport:
        return Arrived(up, present, [])
    steps = known.steps.tolist()
    header = Header(f"simulation {spec.seed}", r, model.fingerprint())
    collector = UpdateCollector({name: value[0].cpu() for name, value in up._asdict().items()}, header, steps)
    for agent in known.asked.nonzero().flatten().tolist():
        for reply in spec.transport(agent, r, seal(up, agent, header, steps[agent])):
            collector.deliver(agent, reply)
    received, arrived = collector.updates(type(up))
    up = type(up)(*(value.to(model.device) for value in received))
    return Arrived(up, present & arrived.to(model.device), collector.log)


def admit(
    algorithm: Algorithm, server: Any, up: Any, present: Tensor, known: Registered, r: int, settings: RoundSettings
) -> tuple[Any, Round, Tensor]:
    """Return the updates without the rejected ones, the facts of the round, and a reason code per agent."""
    guard = settings.guard
    c_new = None
    if guard != "off" and hasattr(algorithm, "new_control_variates"):
        c_new = algorithm.new_control_variates(server, up, known.steps)
    up, received, codes = screen(up, known.alice, present, guard, c_new)
    intact = received & (codes == OK)
    codes = torch.where(known.asked, codes, NOT_ASKED)
    suspect = present & ~received if guard != "off" else None
    now = Round(
        r,
        settings.rounds,
        known.alice,
        received,
        intact,
        known.samples,
        known.steps,
        settings.batch_size,
        suspect,
        known.asked,
    )
    return up, now, codes


def diagnostics(algorithm: Algorithm, server: Any, up: Any, info: Any, known: Registered) -> dict[str, Tensor]:
    """Return what is recorded about an aggregation: the algorithm's `info`, Alice's weights, norms of the updates.

    An agent that does not take part in the round has distance 0: nothing of it is compared.
    """
    measured = recorded(info._asdict(), known.alice)
    if "distances" in measured:
        measured["distances"] = torch.where(known.asked, measured["distances"], 0.0)
    if hasattr(algorithm, "relations"):
        measured["weights"] = row_of(algorithm.relations(server), known.alice)
    if hasattr(up, "dy"):
        measured["norms"] = lengths(up.dy)
    return measured


def recorded(facts: Mapping[str, Any], alice: Tensor) -> dict[str, Tensor]:
    """Return diagnostics as tensors on Alice's device."""
    return {name: torch.as_tensor(fact, dtype=torch.float64, device=alice.device) for name, fact in facts.items()}


def aggregate(
    algorithm: Algorithm,
    r: int,
    settings: RoundSettings,
    server: Any,
    before: Any,
    agents: Any,
    up: Any,
    present: Tensor,
    known: Registered,
) -> Aggregated:
    """A2.13-16 for one run; an agent whose update was rejected or clipped keeps its previous state."""
    up, now, codes = admit(algorithm, server, up, present, known, r, settings)
    server, info = algorithm.aggregate(server, up, now)
    agents = where_rows(now.intact, agents, before)
    net = algorithm.personal(server, agents, len(present))
    own = Net(row_of(net.params, known.alice), row_of(net.stats, known.alice))
    measured = diagnostics(algorithm, server, up, info, known)
    return Aggregated(server, agents, own, {**measured, "received": now.received, "codes": codes})


def applies(model: FlatModel) -> bool:
    """Whether one batched aggregation is faster than one after another."""
    return model.device.type == "cuda"


def aggregate_together(
    algorithm: Algorithm, r: int, settings: RoundSettings, runs: Sequence[tuple[Any, ...]]
) -> list[Aggregated]:
    """Run `aggregate` for runs of one algorithm and size as a single batched computation."""
    stacked = [tree_map(lambda *fields: torch.stack(fields), *states) for states in zip(*runs, strict=True)]
    done = torch.vmap(partial(aggregate, algorithm, r, settings))(*stacked)
    return [tree_map(itemgetter(i), done) for i in range(len(runs))]


def screened_of(codes: Sequence[float], names: Sequence[str], samples: Sequence[int]) -> dict[str, str]:
    """Return, by agent, why its update was rejected or clipped.

    Agents without samples send none and are left out, as are agents that do not take part in the round.
    """
    found = zip(names, codes, samples, strict=True)
    return {name: REASONS[int(code)] for name, code, count in found if code not in (OK, NOT_ASKED) and count}


def participants_of(codes: Sequence[float], names: Sequence[str]) -> list[str]:
    """Return the agents that took part in the round, or an empty list if all did."""
    asked = [name for name, code in zip(names, codes, strict=True) if code != NOT_ASKED]
    return asked if len(asked) < len(names) else []
