"""The claims of the paper, each checked against scores; a verdict has the numbers that decide it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan, nan, sqrt

from scipy.stats import ttest_ind_from_stats

from paper.printed_table import GLOBAL, METHODS, PAPER_SEEDS, PERSONAL, SPLITS, TABLE
from waffle_fl.algorithms import TITLES
from waffle_fl.claims.verdict import Verdict
from waffle_fl.results import FinishedRun, Score, scores

Scores = Mapping[tuple[str, str], Score]

FAR = 20  # points between personalised and global models on A* and B*
LEVEL = 0.05  # of the tests

EXPLANATIONS = {
    ("mnist", "WAFFLE within one standard deviation of our best method on every split"): "B*: WE has a p_d chosen for "
    "this split and trains Alice's model alone from round 50 on; WAFFLE has one slope for all splits and averages "
    "updates with other labels into it until round 70",
    (
        "cifar10",
        "WAFFLE within 2 points of the paper on every split",
    ): "with momentum kept between rounds and all 5,000 "
    "samples the differences are smaller: `results/cifar10-kept.jsonl`, which is not complete yet",
}
"""(data set, claim that does not hold) -> the best explanation that was measured. It changes no verdict."""


def verdicts(study: str, runs: Sequence[FinishedRun]) -> list[Verdict]:
    """Check every claim about a study, by the paper's protocol; `runs` are those of its main experiment."""
    cells = scores(runs, "best")
    return list({"mnist": _mnist, "cifar10": _cifar10}[study](cells))


def _mnist(cells: Scores) -> Iterator[Verdict]:
    yield within_the_paper(cells)
    yield waffle_above(cells)
    yield personalised_above(cells)
    others = ("local", "fedavg", "scaffold", "apfl")
    yield above("WAFFLE and WE above Local, FedAvg, SCAFFOLD and APFL on B and C",
                cells, ("B", "C"), ("waffle", "weight-erosion"), others)  # fmt: skip
    yield near_the_best(cells)
    yield agreement(cells, "mnist")


def _cifar10(cells: Scores) -> Iterator[Verdict]:
    yield complete(cells)
    yield close_to_paper(cells, "cifar10", 2)
    yield waffle_above(cells)
    yield personalised_above(cells)


def waffle_above(cells: Scores) -> Verdict:
    """Check that WAFFLE is above Local and the global methods."""
    claim, others = "WAFFLE above Local, FedAvg and SCAFFOLD on B, C, A* and B*", ("local", *GLOBAL)
    return replace(above(claim, cells, ("B", "C", "A*", "B*"), ("waffle",), others), main=True)


def personalised_above(cells: Scores) -> Verdict:
    """Check that personalised methods are far above global ones where the labels of other agents are permuted."""
    personal = tuple(method for method in PERSONAL if any((split, method) in cells for split in SPLITS))
    claim = f"on A* and B* every personalised method at least {FAR} points above FedAvg and SCAFFOLD"
    return replace(above(claim, cells, ("A*", "B*"), personal or PERSONAL, GLOBAL, by=FAR), main=True)


def complete(cells: Scores) -> Verdict:
    """Check that all cells of the paper's table exist."""
    missing = [f"{split} {TITLES[m]}" for split in SPLITS for m in METHODS if isnan(percent(cells, split, m))]
    numbers = f"missing: {', '.join(missing)}" if missing else "30 of 30"
    return Verdict("all 30 cells of the paper's table exist", not missing, numbers)


def above(
    claim: str, cells: Scores, splits: Sequence[str], winners: Sequence[str], losers: Sequence[str], by: float = 0.0
) -> Verdict:
    """Check that the mean of each winner is above that of each loser, by at least `by` points if given.

    The claim is undecided if it fails only where Welch's test cannot tell the difference from `by`.
    """
    cases = [(split, a, b) for split in splits for a in winners for b in losers]
    missing = [case for case in cases if isnan(_difference(cells, *case))]
    if missing:
        return Verdict(claim, False, _missing(missing[0][0], missing[0][1:], cells))
    failed = [case for case in cases if not (_difference(cells, *case) >= by if by else _difference(cells, *case) > 0)]
    shown = failed[:4] or [min(cases, key=lambda case: _difference(cells, *case))]
    undecided = bool(failed) and all(welch(cells[s, a], cells[s, b], by) >= LEVEL for s, a, b in failed)
    numbers = f"{len(cases) - len(failed)} of {len(cases)}; " + "; ".join(_case(cells, *case, by) for case in shown)
    return Verdict(claim, not failed, numbers, undecided)


def welch(left: Score, right: Score, by: float = 0.0) -> float:
    """Return the two-sided p-value of Welch's test that the means differ by `by` points; 0 without two seeds each."""
    if min(left.seeds, right.seeds) < 2 or not (left.std or right.std):
        return 0.0
    means, deviations = (left.mean - by / 100, right.mean), (left.std or 0.0, right.std or 0.0)
    test = ttest_ind_from_stats(means[0], deviations[0], left.seeds, means[1], deviations[1], right.seeds, False)
    return float(test.pvalue)


def within_the_paper(cells: Scores) -> Verdict:
    """Check that WAFFLE is on no split further below the paper's WAFFLE than the paper's own standard deviation."""
    printed = {split: TABLE["mnist"][split, "waffle"] for split in SPLITS}
    gaps = {split: percent(cells, split, "waffle") - printed[split].mean for split in SPLITS}
    held = [split for split, gap in gaps.items() if gap >= -(printed[split].std or 0.0)]
    claim = "WAFFLE within the paper's own spread, or better, on every split"
    return Verdict(claim, len(held) == len(SPLITS), f"{len(held)} of {len(SPLITS)}; {_gaps(gaps)}", main=True)


def close_to_paper(cells: Scores, data: str, points: float) -> Verdict:
    """Check that WAFFLE is within `points` of the paper on every split."""
    gaps = {split: percent(cells, split, "waffle") - TABLE[data][split, "waffle"].mean for split in SPLITS}
    held = [split for split, gap in gaps.items() if abs(gap) <= points]
    claim = f"WAFFLE within {points} points of the paper on every split"
    return Verdict(claim, len(held) == len(SPLITS), f"{len(held)} of {len(SPLITS)}; {_gaps(gaps)}", main=True)


def near_the_best(cells: Scores) -> Verdict:
    """Check that WAFFLE is within one standard deviation of our best method on each split."""
    gaps, held = {}, []
    for split in SPLITS:
        row = [score for (where, _), score in cells.items() if where == split and not isnan(score.mean)]
        best = max(row, key=lambda score: score.mean, default=Score(nan, None, 0, 0))
        gaps[split] = percent(cells, split, "waffle") - 100 * best.mean
        if gaps[split] >= -100 * (best.std or 0.0):
            held.append(split)
    claim = "WAFFLE within one standard deviation of our best method on every split"
    return Verdict(claim, len(held) == len(SPLITS), f"{len(held)} of {len(SPLITS)}; {_gaps(gaps)}")


def agreement(cells: Scores, data: str) -> Verdict:
    """Check that no cell differs from the paper's by a two-sided test with both spreads."""
    values = {
        (split, method): welch(cells[split, method], printed_score(data, split, method))
        for split in SPLITS
        for method in METHODS
        if (split, method) in cells
    }
    agreeing = [key for key, p in values.items() if p >= LEVEL]
    claim = "no cell differs from the paper's (Welch's test with both spreads, 5 %)"
    return Verdict(claim, 0 < len(agreeing) == len(values), f"{len(agreeing)} of {len(values)} cells agree")


def printed_score(data: str, split: str, method: str) -> Score:
    """Return the paper's number as a score over its five seeds."""
    printed = TABLE[data][split, method]
    return Score(printed.mean / 100, (printed.std or 0.0) / 100, PAPER_SEEDS, 0)


def _difference(cells: Scores, split: str, a: str, b: str) -> float:
    return percent(cells, split, a) - percent(cells, split, b)


def _case(cells: Scores, split: str, a: str, b: str, by: float) -> str:
    """Return one case in words: both means, their difference with its standard error, and the test."""
    left, right = cells[split, a], cells[split, b]
    text = f"{split}: {TITLES[a]} {100 * left.mean:.2f}, {TITLES[b]} {100 * right.mean:.2f}"
    if min(left.seeds, right.seeds) < 2:
        return text
    error = 100 * sqrt((left.std or 0.0) ** 2 / left.seeds + (right.std or 0.0) ** 2 / right.seeds)
    p = welch(left, right, by)
    return f"{text}, difference {_difference(cells, split, a, b):+.2f} ± {error:.2f}, p = {p:.2g}"


def percent(cells: Scores, split: str, method: str) -> float:
    """Return a cell's mean in percent, NaN if it is missing or diverged in the first round."""
    return 100 * cells[split, method].mean if (split, method) in cells else nan


def _missing(split: str, methods: Sequence[str], cells: Scores) -> str:
    names = [TITLES[m] for m in methods if isnan(percent(cells, split, m))]
    return f"no record of {' and '.join(names)} on {split}"


def _gaps(gaps: Mapping[str, float]) -> str:
    return ", ".join(f"{split} {_shown(gap, '+')}" for split, gap in gaps.items())


def _shown(value: float, sign: str = "") -> str:
    return "missing" if isnan(value) else f"{value:{sign}.2f}"
