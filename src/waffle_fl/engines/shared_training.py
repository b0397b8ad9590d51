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

Each = Callable[[Sequence[RunSpec], int], Iterator[list[Outcome]]]  # (cells, rounds that are done) -> their rounds


def families_of(cells: Sequence[RunSpec]) -> list[list[int]]:
    """Cells that train the same rows in the same way, from the same start; the first of a family trains for all."""
    carried = carriers(cells)
    families: dict[Any, list[int]] = {}
    for i in sorted(range(len(cells)), key=carried.__contains__):  # those that carry come before those that are carried
        cell = cells[carried.get(i, i)]
        same = (cell.algorithm, id(cell.state), _ground(cell))
        families.setdefault(i if _alone(cell) else same, []).append(i)
    return list(families.values())


def carriers(cells: Sequence[RunSpec]) -> dict[int, int]:
    """Cells whose algorithm is the helper that another cell's agents run anyway, and that other: the first such one."""
    able: dict[Any, list[int]] = {}
    for i, cell in enumerate(cells):
        algorithm = cell.algorithm
        if hasattr(algorithm, "helper") and not _alone(cell):
            able.setdefault((algorithm.helper(), _ground(cell)), []).append(i)
    found = {}
    for i, cell in enumerate(cells):
        others = () if _alone(cell) else able.get((cell.algorithm, _ground(cell)), ())
        found[i] = next((other for other in others if _same_state(cell.state, cells[other].state)), None)
    return {i: carrier for i, carrier in found.items() if carrier is not None}


def _alone(cell: RunSpec) -> bool:
    """Does its training depend on who Alice is, or on what happens to updates on their way?"""
    return bool(getattr(cell.algorithm, "for_alice", False) or cell.tamper or cell.post)


def _ground(cell: RunSpec) -> tuple[Any, ...]:
    """What its training depends on besides the algorithm and the state."""
    f = cell.federation
    parts = (f.x, f.y, f.train, f.relabel, f.later, f.turn)
    return cell.seed, cell.attackers, *map(id, parts), f.ids


def _same_state(one: State | None, other: State | None) -> bool:
    """Do a helper's run and the run that may carry it stand at the same point?"""
    if one is None or other is None:
        return one is other
    pairs = [*zip(one.server, other.server, strict=True)]
    pairs += [(value, getattr(other.agents, name)) for name, value in one.agents._asdict().items()]
    return all(torch.equal(a, b) for a, b in pairs)


def once_per_family(
    each: Each, families: Sequence[Sequence[int]], cells: Sequence[RunSpec], model: FlatModel, start: int, rounds: int
) -> Iterator[list[Outcome]]:
    """Train the first of each family; the others share its rounds as long as their own Alice could train in them."""
    followers = {family[0]: list(family[1:]) for family in families}
    leaders, states = list(followers), [cell.state for cell in cells]
    asked = [_asked([cells[i] for i in family]) for family in families]
    stream = each([replace(cells[first], asked=all_of) for first, all_of in zip(leaders, asked, strict=True)], start)
    evaluator = Evaluator(model)
    strays: dict[int, Iterator[list[Outcome]]] = {}
    for r in range(start + 1, rounds + 1):
        done: list[Outcome] = []
        for trained in next(stream, []):
            first = leaders[trained.cell]
            outcome = replace(trained, cell=first)
            with one_thread(), products(model.precision):
                shared, lost = _shared(outcome, followers[first], cells, model, evaluator, r / rounds)
            done += [outcome, *shared]
            for i in lost:  # it goes on by itself from where the family stood
                strays[i] = each([replace(cells[i], state=states[i])], r - 1)
                followers[first].remove(i)
            for follower in shared:
                states[follower.cell] = follower.state
        for i, own in strays.items():
            done += [replace(outcome, cell=i) for outcome in next(own, [])]
        if not done:
            return
        yield sorted(done, key=lambda outcome: outcome.cell)


def _asked(family: Sequence[RunSpec]) -> frozenset[int] | None:
    """The agents that any of a family asks for; to a helper's run nobody's own model is of use."""
    asked = [cell.asked for cell in family if cell.algorithm == family[0].algorithm]
    sets = [some for some in asked if some is not None]
    return frozenset().union(*sets) if len(sets) == len(asked) else None


def _shared(
    outcome: Outcome,
    followers: Sequence[int],
    cells: Sequence[RunSpec],
    model: FlatModel,
    evaluator: Evaluator,
    moment: float,
) -> tuple[list[Outcome], list[int]]:
    """What a family's round is to each of the others, and those to whom it is nothing.

    A round that was tried again is only the first one's: the others might have been content with the first try.
    """
    screened = outcome.measured.get("screened", {})
    names = {i: cells[i].federation.names[cells[i].federation.alice] for i in followers}
    able = [i for i in followers if not outcome.error and not outcome.attempt and names[i] not in screened]
    states = {i: _held(cells[i], cells[outcome.cell], outcome.state) for i in able}
    nets = [own_net(cells[i], states[i], model) for i in able]
    algorithms, federations = [cells[i].algorithm for i in able], [cells[i].federation for i in able]
    scores = to_numbers(evaluator.evaluate(algorithms, federations, nets, moment)) if able else []
    common = {key: value for key, value in outcome.measured.items() if not _examined(key)}
    lines = {i: {**common, **found, **_weights(cells[i], states[i])} for i, found in zip(able, scores, strict=True)}
    shared = {
        i: replace(outcome, cell=i, measured=cast(Measured, lines[i]), state=states[i])
        for i, found in zip(able, scores, strict=True)
        if math.isfinite(found["loss"])
    }
    return list(shared.values()), [i for i in followers if i not in shared]


def _examined(key: str) -> bool:
    """Is that told by an Alice's own held-out data?"""
    return key.removeprefix("validation_") in ("accuracy", "rmse", "loss", "backdoor")


def _held(cell: RunSpec, first: RunSpec, state: State) -> State:
    """The family's state as the cell's own algorithm has it: a helper's run holds some fields of its carrier's."""
    if cell.algorithm == first.algorithm:
        return state
    server, agents = cell.algorithm.init(Net(*state.server), cell.federation.agents)
    return State(server, agents._replace(**{name: getattr(state.agents, name) for name in agents._fields}))


def _weights(cell: RunSpec, state: State) -> dict[str, Any]:
    """Her own, where each agent's model takes the others' in proportions of its own."""
    relations = getattr(cell.algorithm, "relations", None)
    if relations is None:
        return {}
    weights = relations(state.server)[cell.federation.alice].tolist()
    theirs = {"attackers_weight": sum(weights[agent] for agent in cell.attackers)} if cell.attackers else {}
    return {"weights": weights, **theirs}
