"""Backend part: runs that can share one training are trained once and evaluated for each.

What it does   trains the first run of each group; the others take over its states and evaluate their own Alice's model
When           runs differ in Alice alone, under a method that does not use her in `aggregate`; or a run's method is the
               helper that another run's agents train anyway, as FedAvg is APFL's
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
from waffle_fl.engines.evaluation import Evaluator
from waffle_fl.engines.outcomes import to_numbers
from waffle_fl.engines.run_spec import Measured, Outcome, RunSpec, State, own_net
from waffle_fl.models import FlatModel

RoundsOf = Callable[[Sequence[RunSpec], int], Iterator[list[Outcome]]]  # (cells, rounds that are done) -> their rounds


def groups_of(specs: Sequence[RunSpec]) -> list[list[int]]:
    """Cells that train the same rows in the same way, from the same start; the first of a family trains for all."""
    carried = carriers(specs)
    groups: dict[Any, list[int]] = {}
    for i in sorted(range(len(specs)), key=carried.__contains__):  # those that carry come before those that are carried
        spec = specs[carried.get(i, i)]
        same = (spec.algorithm, id(spec.state), _training_inputs(spec))
        groups.setdefault(i if _trains_alone(spec) else same, []).append(i)
    return list(groups.values())


def carriers(specs: Sequence[RunSpec]) -> dict[int, int]:
    """Cells whose algorithm is the helper that another cell's agents run anyway, and that other: the first such one."""
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
    """Does its training depend on who Alice is, or on what happens to updates on their way?"""
    return bool(getattr(spec.algorithm, "for_alice", False) or spec.tamper or spec.post)


def _training_inputs(spec: RunSpec) -> tuple[Any, ...]:
    """What its training depends on besides the algorithm and the state."""
    f = spec.federation
    parts = (f.x, f.y, f.train, f.relabel, f.later, f.turn)
    return spec.seed, spec.attackers, *map(id, parts), f.ids


def _same_state(one: State | None, other: State | None) -> bool:
    """Do a helper's run and the run that may carry it stand at the same point?"""
    if one is None or other is None:
        return one is other
    pairs = [*zip(one.server, other.server, strict=True)]
    pairs += [(value, getattr(other.agents, name)) for name, value in one.agents._asdict().items()]
    return all(torch.equal(a, b) for a, b in pairs)


def train_once_per_group(
    rounds_of: RoundsOf,
    groups: Sequence[Sequence[int]],
    specs: Sequence[RunSpec],
    model: FlatModel,
    start: int,
    rounds: int,
) -> Iterator[list[Outcome]]:
    """Train the first of each family; the others share its rounds as long as their own Alice could train in them."""
    followers = {group[0]: list(group[1:]) for group in groups}
    leaders, states = list(followers), [spec.state for spec in specs]
    requested = [_requested_agents([specs[i] for i in group]) for group in groups]
    stream = rounds_of(
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
            for i in unshared:  # it goes on by itself from where the family stood
                separate[i] = rounds_of([replace(specs[i], state=states[i])], r - 1)
                followers[first].remove(i)
            for follower in shared:
                states[follower.index] = follower.state
        for i, own in separate.items():
            done += [replace(outcome, index=i) for outcome in next(own, [])]
        if not done:
            return
        yield sorted(done, key=lambda outcome: outcome.index)


def _requested_agents(group: Sequence[RunSpec]) -> frozenset[int] | None:
    """The agents that any of a family asks for; to a helper's run nobody's own model is of use."""
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
    """What a family's round is to each of the others, and those to whom it is nothing.

    A round that was tried again is only the first one's: the others might have been content with the first try.
    """
    screened = outcome.measured.get("screened", {})
    names = {i: specs[i].federation.names[specs[i].federation.alice] for i in followers}
    possible = [i for i in followers if not outcome.error and not outcome.attempt and names[i] not in screened]
    states = {i: _state_for(specs[i], specs[outcome.index], outcome.state) for i in possible}
    nets = [own_net(specs[i], states[i], model) for i in possible]
    algorithms, federations = [specs[i].algorithm for i in possible], [specs[i].federation for i in possible]
    scores = to_numbers(evaluator.evaluate(algorithms, federations, nets, progress)) if possible else []
    common = {key: value for key, value in outcome.measured.items() if not _is_score(key)}
    lines = {i: {**common, **found, **_weights(specs[i], states[i])} for i, found in zip(possible, scores, strict=True)}
    shared = {
        i: replace(outcome, index=i, measured=cast(Measured, lines[i]), state=states[i])
        for i, found in zip(possible, scores, strict=True)
        if math.isfinite(found["loss"])
    }
    return list(shared.values()), [i for i in followers if i not in shared]


def _is_score(key: str) -> bool:
    """Is that told by an Alice's own held-out data?"""
    return key.removeprefix("validation_") in ("accuracy", "rmse", "loss", "backdoor")


def _state_for(spec: RunSpec, first: RunSpec, state: State) -> State:
    """The family's state as the cell's own algorithm has it: a helper's run holds some fields of its carrier's."""
    if spec.algorithm == first.algorithm:
        return state
    server, agents = spec.algorithm.init(Net(*state.server), spec.federation.agents)
    return State(server, agents._replace(**{name: getattr(state.agents, name) for name in agents._fields}))


def _weights(spec: RunSpec, state: State) -> dict[str, Any]:
    """Her own, where each agent's model takes the others' in proportions of its own."""
    relations = getattr(spec.algorithm, "relations", None)
    if relations is None:
        return {}
    weights = relations(state.server)[spec.federation.alice].tolist()
    extra = {"attackers_weight": sum(weights[agent] for agent in spec.attackers)} if spec.attackers else {}
    return {"weights": weights, **extra}
