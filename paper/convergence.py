"""Rounds that two methods need to reach a common accuracy: the paper's claim of faster convergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from paper.cells import value_of
from waffle_fl.results import FinishedRun, rows_of


@dataclass(frozen=True)
class Comparison:
    """Rounds of two methods to a common target, over runs with the same split and seed."""

    splits: str
    target: float | None  # accuracy; None over several splits, each with its own
    ours: float  # mean rounds; a run that never reaches the target counts as one round more than it has
    theirs: float
    our_reached: int  # runs that reach the target
    their_reached: int
    pairs: int
    p_value: float


def rounds_needed(run: FinishedRun, target: float) -> int | None:
    """Return the first round whose accuracy is at least the target; None if there is none (censored)."""
    return next((int(line["round"]) for line in run.rounds if line["accuracy"] >= target), None)


def common_target(ours: Sequence[FinishedRun], theirs: Sequence[FinishedRun]) -> float:
    """Return the best of both methods' worst ends: the end of a run is its mean accuracy over the last ten rounds.

    The method that sets the target reaches it with every seed.
    """
    return max(min(_end(run) for run in method) for method in (ours, theirs))


def _end(run: FinishedRun) -> float:
    return value_of(run, "late") or 0.0  # a run that diverged has no end


def compare(runs: Sequence[FinishedRun], ours: str, theirs: str) -> list[Comparison]:
    """Return one comparison per split, and one over all splits."""
    found, every = [], list[tuple[int | None, int | None, int]]()
    for row in rows_of(runs):
        methods = {m: {run.config.settings.seed: run for run in runs if run.row == row and run.config.method == m
                       and run.rounds} for m in (ours, theirs)}  # fmt: skip
        seeds = sorted(methods[ours].keys() & methods[theirs].keys())
        if not seeds:
            continue
        target = common_target(*([methods[m][seed] for seed in seeds] for m in (ours, theirs)))
        pairs = [
            (*(rounds_needed(methods[m][seed], target) for m in (ours, theirs)),
             methods[ours][seed].config.settings.rounds)
            for seed in seeds
        ]  # fmt: skip
        found.append(_comparison(row, target, pairs))
        every += pairs
    return [*found, _comparison("all", None, every)] if every else []


def _comparison(splits: str, target: float | None, pairs: Sequence[tuple[int | None, int | None, int]]) -> Comparison:
    """Return the comparison of some pairs of rounds; censored ones count as one round more than the run has."""
    counted = [(a or limit + 1, b or limit + 1) for a, b, limit in pairs]
    return Comparison(
        splits,
        target,
        mean(a for a, _ in counted),
        mean(b for _, b in counted),
        sum(a is not None for a, _, _ in pairs),
        sum(b is not None for _, b, _ in pairs),
        len(pairs),
        p_value([a - b for a, b in counted]),
    )


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


def mean_change(runs: Sequence[FinishedRun], first: int, last: int) -> float:
    """Return the mean change of the accuracy from one round to the next, in points, over some rounds of all runs."""
    changes = [
        100 * abs(after["accuracy"] - before["accuracy"])
        for run in runs
        for before, after in zip(run.rounds, run.rounds[1:], strict=False)
        if first <= after["round"] <= last
    ]
    return mean(changes)
