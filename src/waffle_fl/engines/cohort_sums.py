"""The server's part of a round of a cohort, A2.13-16, from the cohort's rows alone.

All agents are weighed by vectors of N numbers, and only the rows of the cohort are summed, so the time and the memory
of an aggregation hardly grow with the federation.

Methods with the hook `AggregatesSums` get weights of all agents from `weigh` and weighted sums in `combine`, so the
server needs no row of an absent agent and no copy of the agents' states. Any other method whose server's state does not
depend on the number of agents aggregates as if the cohort were the federation.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net, Round
from waffle_fl.algorithms.contract import BLOCK, Rows, Seen, Vector, Weights, lengths, row_of
from waffle_fl.algorithms.hooks import AggregatesSums
from waffle_fl.engines.aggregation import Registered, recorded
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.errors import WaffleError


class Cohort(NamedTuple):
    """The agents of one round and the rows that they sent."""

    agents: Tensor  # (C,), ascending
    alice: Tensor  # her place among them; 0 if she takes no part
    down: Any
    before: Any
    up: Any
    received: Tensor  # (C,) bool


def server_of(algorithm: Algorithm) -> Algorithm:
    """Return the method that aggregates: of a method with a helper the helper, whose server is the same."""
    return algorithm.helper() if hasattr(algorithm, "helper") else algorithm


def sums_rows(algorithm: Algorithm) -> bool:
    """Whether the server needs nothing but distances and one weighted sum of each part."""
    several = hasattr(algorithm, "first_weights")
    return isinstance(algorithm, AggregatesSums) and not several and not algorithm.needs_updates()


def check_method(algorithm: Algorithm, net: Net) -> None:
    """Raise a WaffleError if a round of the method needs more than the rows of a cohort."""
    name = type(getattr(algorithm, "unwrapped", algorithm)).__name__
    if hasattr(algorithm, "asks_all"):
        raise WaffleError(f"states on disk: expected a method without rounds of all agents, got {name}")
    if sums_rows(server_of(algorithm)):
        return
    one, two = (algorithm.init(net, agents)[0] for agents in (1, 2))
    if any(a.shape != b.shape for a, b in zip(one, two, strict=True)):
        option = getattr(algorithm, "needs_updates", lambda: "")()
        reason = f"needs each update by itself with {option}" if option else "keeps a row per agent"
        raise WaffleError(f"states on disk: expected a method whose server keeps no rows, got {name}, which {reason}")


def aggregate(
    algorithm: Algorithm, server: Any, cohort: Cohort, r: int, known: Registered, settings: RoundSettings
) -> tuple[Any, dict[str, Tensor]]:
    """A2.13-16: return the server's state and the measurements of the cohort."""
    method: Any = server_of(algorithm)
    if not sums_rows(method):
        now = _round(r, settings, cohort.alice, cohort.received, cohort.agents, known, len(cohort.agents))
        server, info = algorithm.aggregate(server, cohort.up, now)
        return server, recorded(info._asdict(), known.alice)
    everyone = torch.zeros_like(known.asked).index_copy(0, cohort.agents, cohort.received)
    now = _round(r, settings, known.alice, everyone, cohort.agents, known, 0)
    steps = known.steps[cohort.agents]
    compared = method.compared_rows(cohort.down, cohort.before, cohort.up, steps)
    distances = torch.zeros(len(known.samples), dtype=torch.float64, device=known.samples.device)
    for rows in compared.values():
        distances = distances.index_copy(0, cohort.agents, lengths(rows, row_of(rows, cohort.alice)))
    reads_length = getattr(method, "reads_length", False)
    length = row_of(cohort.up.dy, cohort.alice).double().norm() if reads_length else None
    server, weights, info = method.weigh(server, Seen(distances, length), now)
    summed = method.summed_rows(cohort.down, cohort.before, cohort.up, steps)
    server = method.combine(server, _sums(weights, summed, cohort), now)
    facts = recorded(info._asdict(), known.alice)
    return server, {name: fact[cohort.agents] if fact.ndim else fact for name, fact in facts.items()}


def _round(
    r: int,
    settings: RoundSettings,
    alice: Tensor,
    received: Tensor,
    agents: Tensor,
    known: Registered,
    size: int,
) -> Round:
    """Return the facts of a round about `size` agents of a cohort alone, or with 0 about all agents."""
    samples, steps = (known.samples[agents], known.steps[agents]) if size else (known.samples, known.steps)
    asked = torch.ones_like(received) if size else torch.zeros_like(received).index_fill(0, agents, True)
    return Round(r, settings.rounds, alice, received, received, samples, steps, settings.batch_size, None, asked)


def _sums(weights: Mapping[str, Weights], rows: Mapping[str, Rows], cohort: Cohort) -> dict[str, Vector]:
    """Return the weighted sum of each part, with the bits of a sum over all agents.

    That sum goes by blocks of agents. Rows of weight 0 change no bit within a block, so they are left out, but a block
    of the cohort must not span two of those blocks.
    """
    sums = {}
    for name, part in rows.items():
        w = torch.where(cohort.received, weights[name][cohort.agents], 0.0)
        part = torch.where(w[:, None] != 0, part, 0.0)
        total = torch.zeros(part.shape[1], dtype=torch.float64, device=part.device)
        sizes = [len(part)]
        if not part.is_cuda:
            block = max(1, BLOCK // max(1, part.shape[1]))
            sizes = [len(list(same)) for _, same in groupby((cohort.agents // block).tolist())]
        for share, some in zip(torch.split(w, sizes), torch.split(part, sizes), strict=True):
            total = total + share @ some.double()
        sums[name] = total
    return sums
