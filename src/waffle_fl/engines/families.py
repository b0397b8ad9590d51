"""Runs that differ in Alice alone, under a method that does not look at her: trained once, judged for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from waffle_fl.engines.cells import Cell, Outcome, State, own_net
from waffle_fl.engines.closing import Examiner, to_numbers
from waffle_fl.models import FlatModel

Each = Callable[[Sequence[Cell], int], Iterator[list[Outcome]]]  # (cells, rounds that are done) -> their rounds


def families_of(cells: Sequence[Cell]) -> list[list[int]]:
    """Cells that train the same rows in the same way, from the same start."""
    families: dict[Any, list[int]] = {}
    for i, cell in enumerate(cells):
        f = cell.federation
        alone = getattr(cell.algorithm, "for_alice", False) or cell.tamper or cell.post
        same = (
            cell.algorithm,
            cell.seed,
            id(cell.state),
            *(id(part) for part in (f.x, f.y, f.train, f.relabel, f.later, f.turn)),
            f.ids,
        )
        families.setdefault(i if alone else same, []).append(i)
    return list(families.values())


def once_a_family(
    each: Each, families: Sequence[Sequence[int]], cells: Sequence[Cell], model: FlatModel, start: int, rounds: int
) -> Iterator[list[Outcome]]:
    """Train the first of each family; the others share its rounds as long as their own Alice could train in them."""
    followers = {family[0]: list(family[1:]) for family in families}
    leaders, states = list(followers), {first: cells[first].state for first in followers}
    asked = [_united([cells[i].asked for i in family]) for family in families]
    stream = each([replace(cells[first], asked=all_of) for first, all_of in zip(leaders, asked, strict=True)], start)
    examiner = Examiner(model)
    strays: dict[int, Iterator[list[Outcome]]] = {}
    for r in range(start + 1, rounds + 1):
        done: list[Outcome] = []
        for outcome in next(stream, []):
            first = leaders[outcome.cell]
            done.append(replace(outcome, cell=first))
            shared, lost = _shared(outcome, followers[first], cells, model, examiner, r / rounds)
            done += shared
            for i in lost:  # it goes on by itself from where the family stood
                strays[i] = each([replace(cells[i], state=states[first])], r - 1)
                followers[first].remove(i)
            states[first] = outcome.state
        for i, own in strays.items():
            done += [replace(outcome, cell=i) for outcome in next(own, [])]
        if not done:
            return
        yield sorted(done, key=lambda outcome: outcome.cell)


def _united(asked: Sequence[frozenset[int] | None]) -> frozenset[int] | None:
    """The agents that any of a family asks for."""
    sets = [some for some in asked if some is not None]
    return frozenset().union(*sets) if len(sets) == len(asked) else None


def _shared(
    outcome: Outcome,
    followers: Sequence[int],
    cells: Sequence[Cell],
    model: FlatModel,
    examiner: Examiner,
    moment: float,
) -> tuple[list[Outcome], list[int]]:
    """What a family's round is to each of the others, and those to whom it is nothing."""
    screened = outcome.measured.get("screened", {})
    names = {i: cells[i].federation.names[cells[i].federation.alice] for i in followers}
    able = [i for i in followers if not outcome.error and names[i] not in screened]
    nets = [own_net(cells[i], outcome.state, model) for i in able]
    algorithms, federations = [cells[i].algorithm for i in able], [cells[i].federation for i in able]
    scores = to_numbers(examiner.examine(algorithms, federations, nets, moment)) if able else []
    shared = {
        i: replace(outcome, cell=i, measured={**outcome.measured, **found, **_weights(cells[i], outcome.state)})
        for i, found in zip(able, scores, strict=True)
        if math.isfinite(found["loss"])
    }
    return list(shared.values()), [i for i in followers if i not in shared]


def _weights(cell: Cell, state: State) -> dict[str, list[float]]:
    """Her own, where each agent's model takes the others' in proportions of its own."""
    relations = getattr(cell.algorithm, "relations", None)
    return {"weights": relations(state.server)[cell.federation.alice].tolist()} if relations else {}
