"""Backend part: runs that can share one training are trained once and evaluated separately.

What it does   trains the first run of each group; the others reuse its states and evaluate their own Alice's model
When           runs of the same agents differ only in Alice, and the method's `aggregate` does not depend on her; or a
               run's method is the helper that the agents of another run train anyway, as FedAvg is for APFL
What it gains  2.0 x on a model for each agent
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from waffle_fl.algorithms import Net
from waffle_fl.engines.arithmetic import one_thread, products
from waffle_fl.engines.evaluation import Evaluator, evaluate_runs
from waffle_fl.engines.outcomes import to_numbers
from waffle_fl.engines.run_spec import Measured, Outcome, RunSpec, State, scored_net
from waffle_fl.models import FlatModel

RoundsOf = Callable[[Sequence[RunSpec], int], Iterator[list[Outcome]]]  # (specs, rounds already done) -> their rounds


def groups_of(specs: Sequence[RunSpec]) -> list[list[int]]:
    """Group the runs that train the same rows in the same way from the same start; the first of a group trains."""
    carried = carriers(specs)
    groups: dict[Any, list[int]] = {}
    for i in sorted(range(len(specs)), key=carried.__contains__):  # carriers come before the runs they carry
        spec = specs[carried.get(i, i)]
        same = (spec.algorithm, id(spec.state), _training_inputs(spec))
        groups.setdefault(i if _trains_alone(spec) else same, []).append(i)
    return list(groups.values())


def carriers(specs: Sequence[RunSpec]) -> dict[int, int]:
    """Map each run whose method is the helper of another run's method to that other run, its carrier.

    The agents of the carrier train the helper anyway. If several runs could carry it, the first one does.
    """
    possible: dict[Any, list[int]] = {}
    for i, spec in enumerate(specs):
        algorithm = spec.algorithm
        if hasattr(algorithm, "helper") and not _trains_alone(spec):
            possible.setdefault((algorithm.helper(), _training_inputs(spec)), []).append(i)
    found = {}
    for i, spec in enumerate(specs):
        others = () if _trains_alone(spec) else possible.get((spec.algorithm, _training_inputs(spec)), ())
        found[i] = next((other for other in others if _same_state(spec.state, specs[other].state)), None)
    return {i: carrier for i, carrier in found.items() if carrier is not None}


def _trains_alone(spec: RunSpec) -> bool:
    """Whether the training depends on which agent is Alice, or on changes to the updates in transit."""
    return bool(getattr(spec.algorithm, "for_alice", False) or spec.tamper or spec.transport or spec.store)


def _training_inputs(spec: RunSpec) -> tuple[Any, ...]:
    """Everything the training depends on except the algorithm and the state."""
    f = spec.federation
    rows = tuple(map(id, f.train))  # equal coalitions of one federation share their rows
    labels = tuple(None if part is None else tuple(part.flatten().tolist()) for part in (f.relabel, f.later))
    return spec.seed, spec.attackers, id(f.x), id(f.y), id(f.turn), rows, labels, f.ids


def _same_state(one: State | None, other: State | None) -> bool:
    """Whether a helper's run and its possible carrier resume from the same state."""
    if one is None or other is None:
        return one is other
    pairs = [*zip(one.server, other.server, strict=True)]
    pairs += [(value, getattr(other.agents, name)) for name, value in one.agents._asdict().items()]
    return all(torch.equal(a, b) for a, b in pairs)


def train_once_per_group(
    train: RoundsOf,
    groups: Sequence[Sequence[int]],
    specs: Sequence[RunSpec],
    model: FlatModel,
    start: int,
    rounds: int,
) -> Iterator[list[Outcome]]:
    """Train the first run of each group; the others share its rounds as long as their own Alice's update is taken."""
    followers = {group[0]: list(group[1:]) for group in groups}
    leaders, states = list(followers), [spec.state for spec in specs]
    requested = [_requested_agents([specs[i] for i in group]) for group in groups]
    stream = train(
        [replace(specs[first], requested=all_of) for first, all_of in zip(leaders, requested, strict=True)], start
    )
    evaluator = Evaluator(model)
    separate: dict[int, Iterator[list[Outcome]]] = {}
    for r in range(start + 1, rounds + 1):
        done: list[Outcome] = []
        for trained in next(stream, []):
            first = leaders[trained.index]
            outcome = replace(trained, index=first)
            with one_thread(), products(model.precision):
                shared, unshared = _shared(outcome, followers[first], specs, model, evaluator, r / rounds)
            done += [outcome, *shared]
            for i in unshared:  # continues alone from the group's last shared state
                separate[i] = train([replace(specs[i], state=states[i])], r - 1)
                followers[first].remove(i)
            for follower in shared:
                states[follower.index] = follower.state
        for i, own in separate.items():
            done += [replace(outcome, index=i) for outcome in next(own, [])]
        if not done:
            return
        yield sorted(done, key=lambda outcome: outcome.index)


def _requested_agents(group: Sequence[RunSpec]) -> frozenset[int] | None:
    """Return the agents whose own model any run of the group needs; a helper's run needs none."""
    requested = [spec.requested for spec in group if spec.algorithm == group[0].algorithm]
    sets = [some for some in requested if some is not None]
    return frozenset().union(*sets) if len(sets) == len(requested) else None


def _shared(
    outcome: Outcome,
    followers: Sequence[int],
    specs: Sequence[RunSpec],
    model: FlatModel,
    evaluator: Evaluator,
    progress: float,
) -> tuple[list[Outcome], list[int]]:
    """Return the outcomes of the followers that share this round, and the followers that cannot.

    A repeated round is not shared: it was repeated for the first run's Alice, and the first attempt may be valid for
    the others.
    """
    screened = outcome.measured.get("screened", {})
    names = {i: specs[i].federation.names[specs[i].federation.alice] for i in followers}
    possible = [i for i in followers if not outcome.error and not outcome.attempt and names[i] not in screened]
    states = {i: _state_for(specs[i], specs[outcome.index], outcome.state) for i in possible}
    nets = [scored_net(specs[i], states[i], model) for i in possible]
    scores = to_numbers(evaluate_runs(evaluator, [specs[i] for i in possible], nets, progress)) if possible else []
    common = {key: value for key, value in outcome.measured.items() if not _is_score(key)}
    lines = {i: {**common, **found, **_weights(specs[i], states[i])} for i, found in zip(possible, scores, strict=True)}
    shared = {
        i: replace(outcome, index=i, measured=cast(Measured, lines[i]), state=states[i])
        for i, found in zip(possible, scores, strict=True)
        if math.isfinite(found["loss"])
    }
    return list(shared.values()), [i for i in followers if i not in shared]


def _is_score(key: str) -> bool:
    """Whether this measurement depends on Alice's held-out data."""
    return key.removeprefix("validation_") in ("accuracy", "rmse", "loss", "backdoor", "by_agent")


def _state_for(spec: RunSpec, first: RunSpec, state: State) -> State:
    """Return the group's state as the run's own algorithm has it: a helper's state has some of its carrier's fields."""
    if spec.algorithm == first.algorithm:
        return state
    _, agents = spec.algorithm.init(Net(state.server.x, state.server.stats), spec.federation.agents)
    return State(state.server, agents._replace(**{name: getattr(state.agents, name) for name in agents._fields}))


def _weights(spec: RunSpec, state: State) -> dict[str, Any]:
    """Return the weights in this Alice's model, for methods with a weight vector per agent."""
    relations = getattr(spec.algorithm, "relations", None)
    if relations is None:
        return {}
    weights = relations(state.server)[spec.federation.alice].tolist()
    extra = {"attackers_weight": sum(weights[agent] for agent in spec.attackers)} if spec.attackers else {}
    return {"weights": weights, **extra}
