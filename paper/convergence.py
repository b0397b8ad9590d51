"""Rounds that a method needs to converge, and a paired test of two methods over seeds: the paper's headline claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from waffle_fl.results import FinishedRun, rows_of

SHARE = 0.99


@dataclass(frozen=True)
class Comparison:
    """Mean rounds of two methods over runs with the same split and seed, and the p-value of their difference."""

    splits: str
    ours: float
    theirs: float
    pairs: int
    p_value: float


def rounds_needed(run: FinishedRun, share: float = SHARE) -> int:
    """Return the first round whose accuracy is at least this share of the last round's."""
    goal = share * float(run.rounds[-1]["accuracy"])
    return next(int(line["round"]) for line in run.rounds if line["accuracy"] >= goal)


def compare(runs: Sequence[FinishedRun], ours: str, theirs: str) -> list[Comparison]:
    """Return one comparison per split, and one over all splits."""
    needed = {
        (run.row, run.config.settings.seed, run.config.method): rounds_needed(run)
        for run in runs
        if run.config.method in (ours, theirs) and run.rounds
    }
    pairs = {
        (row, seed): (rounds, needed[row, seed, theirs])
        for (row, seed, method), rounds in needed.items()
        if method == ours and (row, seed, theirs) in needed
    }
    groups = {row: [pair for (where, _), pair in pairs.items() if where == row] for row in rows_of(runs)}
    groups["all"] = list(pairs.values())
    return [
        Comparison(
            name, mean(a for a, _ in group), mean(b for _, b in group), len(group), p_value([a - b for a, b in group])
        )
        for name, group in groups.items()
        if group
    ]


def p_value(differences: Sequence[int]) -> float:
    """Return the p-value of the exact two-sided sign-flip test: how often random signs give a sum as far from 0.

    The differences are integers, so the distribution of their signed sum is counted, not sampled. n pairs
    cannot give a p-value below 2 / 2^n.
    """
    counts = {0: 1}
    for difference in differences:
        flipped: dict[int, int] = {}
        for total, ways in counts.items():
            for signed in (total + difference, total - difference):
                flipped[signed] = flipped.get(signed, 0) + ways
        counts = flipped
    seen = abs(sum(differences))
    far = sum(ways for total, ways in counts.items() if abs(total) >= seen)
    return float(far / 2 ** len(differences))
