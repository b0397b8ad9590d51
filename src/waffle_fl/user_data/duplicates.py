"""Equal rows: in training and test data, at two agents, or repeated at one agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.row_digests import Digests, first_of_each, groups_of, sorted_order

Rows = NDArray[np.int64]
Duplicates: TypeAlias = Literal["error", "keep", "drop"]


class AgentRows(NamedTuple):
    """The digests of an agent's rows, its rows for training and validation, and its test rows."""

    digests: Digests
    train: Rows
    test: Rows


class Settled(NamedTuple):
    """The test rows of each agent, and notes for the user."""

    test: dict[str, Rows]
    notes: tuple[str, ...] = ()


def unrepeated(digests: Digests) -> Rows:
    """Return the first of each group of equal rows."""
    order = sorted_order(digests)
    return np.sort(order[first_of_each(digests[order])])


def settle(agents: Mapping[str, AgentRows], given: bool, policy: Duplicates) -> Settled:
    """Find test rows that an agent trains on, and agents with the same training data; refuse, keep or drop them.

    With "error" test rows are checked only if test data are given: the automatic split never tests an agent on its own
    training rows, and equal rows of two agents may be chance.
    """
    groups = dict(zip(agents, groups_of([own.digests for own in agents.values()]), strict=True))
    same = _same_training(agents, groups)
    if same and policy != "keep":
        raise WaffleError(
            f"{same[0][0]} and {same[0][1]} hold the same training data: remove one of them, or set --duplicates keep"
        )
    notes = [f"{one} and {other} hold the same training data" for one, other in same]
    leaks = _leaks(agents, groups) if given or policy != "error" else {}
    if leaks and policy == "error":
        raise _leak_error(agents, groups, leaks)
    test = {name: own.test for name, own in agents.items()}
    if leaks:
        counts = ", ".join(f"{name} {leak.sum()} of {len(leak)}" for name, leak in leaks.items())
        total = sum(int(leak.sum()) for leak in leaks.values())
        what = f"{total} test sample{'s are' if total > 1 else ' is'} also training data ({counts})"
        notes.append(f"{what}: dropped" if policy == "drop" else f"{what}: kept, and the test score may be too good")
    if policy == "drop":
        test |= {name: test[name][~leak] for name, leak in leaks.items()}
    return Settled(test, tuple(notes))


def dropped_note(dropped: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note on repeated rows that were dropped, by agent."""
    counts = {name: count for name, count in dropped.items() if count}
    if not counts:
        return ()
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    return (f"{sum(counts.values())} repeated samples dropped ({listed})",)


def _same_training(agents: Mapping[str, AgentRows], groups: Mapping[str, Rows]) -> list[tuple[str, str]]:
    owner: dict[bytes, str] = {}
    found = []
    for name, own in agents.items():
        content = np.unique(groups[name][own.train]).tobytes()
        if content and content in owner:
            found.append((name, owner[content]))
        owner.setdefault(content, name)
    return found


def _leaks(agents: Mapping[str, AgentRows], groups: Mapping[str, Rows]) -> dict[str, NDArray[np.bool_]]:
    """Return, for each agent that has any, which of its test rows are training rows of an agent."""
    trained = np.concatenate([np.empty(0, np.int64), *(groups[name][own.train] for name, own in agents.items())])
    found = {name: np.isin(groups[name][own.test], trained) for name, own in agents.items()}
    return {name: leak for name, leak in found.items() if leak.any()}


def _leak_error(
    agents: Mapping[str, AgentRows], groups: Mapping[str, Rows], leaks: Mapping[str, NDArray[np.bool_]]
) -> WaffleError:
    name, leak = next(iter(leaks.items()))
    first = int(np.flatnonzero(leak)[0])
    group = groups[name][agents[name].test[first]]
    trainer = [other for other, own in agents.items() if (groups[other][own.train] == group).any()][-1]
    they = "samples are" if leak.sum() > 1 else "sample is"
    return WaffleError(
        f"{name}: {leak.sum()} test {they} also training data of {trainer}, the first at index {first}: "
        "the test score would be too good; remove them, or set --duplicates drop (or keep, if they are natural)"
    )
