"""The claims of the paper, each checked against scores; a verdict has the numbers that decide it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan, nan, sqrt

from scipy.stats import t, ttest_ind_from_stats

from paper.cells import AS_PRINTED, Cells, our_runs, permutes, printed_cell, study_cells
from paper.convergence import compare
from paper.printed_table import GLOBAL, METHODS, PAPER_SEEDS, PERSONAL, SPLITS, TABLE, TITLES
from waffle_fl.claims.record_files import Part
from waffle_fl.claims.verdict import Verdict
from waffle_fl.results import FinishedRun, Score

FAR = 20  # points between personalised and global models on A* and B*
LEVEL = 0.05  # of the tests
RIVALS = ("weight-erosion", "apfl")  # that the paper says WAFFLE converges faster than


def verdicts(study: str, parts: Mapping[str, Part]) -> list[Verdict]:
    """Check every claim about a study, by the paper's protocol; `parts` are its records by name."""
    found = study_cells(study, parts)
    return [*{"mnist": _mnist, "cifar10": _cifar10}[study](found), *_speed(our_runs(parts[study]))]


def _mnist(cells: Cells) -> Iterator[Verdict]:
    yield within_the_paper(cells)
    yield waffle_above(cells)
    yield personalised_above(cells)
    others = ("local", "fedavg", "scaffold", "apfl")
    yield above("in the mean, WAFFLE and WE above Local, FedAvg, SCAFFOLD and APFL on B and C",
                cells, ("B", "C"), ("waffle-paper", "weight-erosion"), others)  # fmt: skip
    yield near_the_best(cells)
    yield agreement(cells, "mnist")


def _cifar10(cells: Cells) -> Iterator[Verdict]:
    yield complete(cells)
    yield close_to_paper(cells, "cifar10", 2)
    yield waffle_above(cells)
    yield personalised_above(cells)
    yield agreement(cells, "cifar10")
    printed = {
        (split, "waffle-paper" if m == AS_PRINTED else m): s for (split, m), s in cells.items() if m != "waffle-paper"
    }
    for verdict in (close_to_paper(printed, "cifar10", 2), waffle_above(printed)):
        yield replace(verdict, claim=f"{verdict.claim}, with the printed distances", main=False)


def _speed(runs: Sequence[FinishedRun]) -> Iterator[Verdict]:
    """Check that WAFFLE reaches a common accuracy in fewer rounds than its rivals, over all splits."""
    for rival in RIVALS:
        claim = f"WAFFLE reaches a common accuracy in fewer rounds than {TITLES[rival]}, over all splits"
        *splits, overall = compare(runs, "waffle-paper", rival) or [None]
        if overall is None:
            yield Verdict(claim, False, f"no record of WAFFLE and {TITLES[rival]}")
            continue
        fewer = sum(c.ours < c.theirs for c in splits if c)
        numbers = (
            f"{fewer} of {len(splits)} splits; {overall.ours:.1f} and {overall.theirs:.1f} rounds, difference "
            f"{overall.ours - overall.theirs:+.1f}, p = {overall.p_value:.2g}, {overall.pairs} pairs"
        )
        significant = overall.p_value < LEVEL
        yield Verdict(claim, significant and overall.ours < overall.theirs, numbers, undecided=not significant)


def waffle_above(cells: Cells) -> Verdict:
    """Check that WAFFLE is above Local and the global methods."""
    claim, others = "in the mean, WAFFLE above Local, FedAvg and SCAFFOLD on B, C, A* and B*", ("local", *GLOBAL)
    return replace(above(claim, cells, ("B", "C", "A*", "B*"), ("waffle-paper",), others), main=True)


def personalised_above(cells: Cells) -> Verdict:
    """Check that personalised methods are far above global ones where the labels of other agents are permuted."""
    personal = tuple(method for method in PERSONAL if any((split, method) in cells for split in SPLITS))
    claim = f"in the mean, on A* and B* every personalised method at least {FAR} points above FedAvg and SCAFFOLD"
    return replace(above(claim, cells, ("A*", "B*"), personal or PERSONAL, GLOBAL, by=FAR), main=True)


def complete(cells: Cells) -> Verdict:
    """Check that all cells of the paper's table exist."""
    missing = [f"{split} {TITLES[m]}" for split in SPLITS for m in METHODS if isnan(percent(cells, split, m))]
    numbers = f"missing: {', '.join(missing)}" if missing else "30 of 30"
    return Verdict("all 30 cells of the paper's table exist", not missing, numbers)


def above(
    claim: str, cells: Cells, splits: Sequence[str], winners: Sequence[str], losers: Sequence[str], by: float = 0.0
) -> Verdict:
    """Check that the mean of each winner is above that of each loser, by at least `by` points if given.

    The claim is undecided if it fails only where Welch's test cannot tell the difference from `by`. The numbers count
    the cases that are above in the mean, and those in which the test can tell.
    """
    cases = [(split, a, b) for split in splits for a in winners for b in losers]
    missing = [case for case in cases if isnan(_difference(cells, *case))]
    if missing:
        return Verdict(claim, False, _missing(missing[0][0], missing[0][1:], cells))
    failed = [case for case in cases if not (_difference(cells, *case) >= by if by else _difference(cells, *case) > 0)]
    shown = failed[:4] or [min(cases, key=lambda case: _difference(cells, *case))]
    tested = [case for case in cases if _tests(cells, *case)]
    unclear = [case for case in tested if welch(*_scores(cells, *case), by) >= LEVEL]
    undecided = bool(failed) and set(failed) <= set(unclear)
    counts = f"{len(cases) - len(failed)} of {len(cases)}"
    if tested:
        counts += f", {len(set(tested) - set(failed) - set(unclear))} significantly"
    numbers = f"{counts}; " + "; ".join(_case(cells, *case, by) for case in shown)
    return Verdict(claim, not failed, numbers, undecided)


def _scores(cells: Cells, split: str, a: str, b: str) -> tuple[Score, Score]:
    return cells[split, a], cells[split, b]


def _tests(cells: Cells, split: str, a: str, b: str) -> bool:
    """Return whether both cells have the two seeds that a test needs."""
    return min(score.seeds for score in _scores(cells, split, a, b)) >= 2


def welch(left: Score, right: Score, by: float = 0.0) -> float:
    """Return the two-sided p-value of Welch's test that the means differ by `by` points; 0 without two seeds each."""
    if min(left.seeds, right.seeds) < 2 or not (left.std or right.std):
        return 0.0
    means, deviations = (left.mean - by / 100, right.mean), (left.std or 0.0, right.std or 0.0)
    test = ttest_ind_from_stats(means[0], deviations[0], left.seeds, means[1], deviations[1], right.seeds, False)
    return float(test.pvalue)


def within_the_paper(cells: Cells) -> Verdict:
    """Check that WAFFLE is on no split further below the paper's WAFFLE than the paper's own standard deviation."""
    printed = {split: TABLE["mnist"][split, "waffle-paper"] for split in SPLITS}
    gaps = {split: percent(cells, split, "waffle-paper") - printed[split].mean for split in SPLITS}
    held = [split for split, gap in gaps.items() if gap >= -(printed[split].std or 0.0)]
    claim = "WAFFLE within the paper's own spread, or better, on every split"
    return Verdict(claim, len(held) == len(SPLITS), f"{len(held)} of {len(SPLITS)}; {_gaps(gaps)}", main=True)


def close_to_paper(cells: Cells, data: str, points: float) -> Verdict:
    """Check that WAFFLE is within `points` of the paper on every split."""
    gaps = {split: percent(cells, split, "waffle-paper") - TABLE[data][split, "waffle-paper"].mean for split in SPLITS}
    held = [split for split, gap in gaps.items() if abs(gap) <= points]
    claim = f"WAFFLE within {points} points of the paper on every split"
    return Verdict(claim, len(held) == len(SPLITS), f"{len(held)} of {len(SPLITS)}; {_gaps(gaps)}", main=True)


def near_the_best(cells: Cells) -> Verdict:
    """Check that WAFFLE is within one standard deviation of our best method on each split."""
    gaps, held = {}, []
    for split in SPLITS:
        row = [score for (where, _), score in cells.items() if where == split and not isnan(score.mean)]
        best = max(row, key=lambda score: score.mean, default=Score(nan, None, 0, 0))
        gaps[split] = percent(cells, split, "waffle-paper") - 100 * best.mean
        if gaps[split] >= -100 * (best.std or 0.0):
            held.append(split)
    claim = "WAFFLE within one standard deviation of our best method on every split"
    return Verdict(claim, len(held) == len(SPLITS), f"{len(held)} of {len(SPLITS)}; {_gaps(gaps)}")


def agreement(cells: Cells, study: str) -> Verdict:
    """Check that no cell differs from the paper's by a two-sided test with both spreads."""
    values = {
        (split, method): p
        for split in SPLITS
        for method in METHODS
        if not isnan(p := agreement_test(cells, study, split, method))
    }
    agreeing = [key for key, p in values.items() if p >= LEVEL]
    claim = "no cell differs from the paper's (two-sided test with both spreads, 5 %)"
    untested = f"; {len(TABLE[study]) - len(values)} cannot be tested" if len(values) < len(TABLE[study]) else ""
    numbers = f"{len(agreeing)} of {len(values)} cells agree{untested}"
    return Verdict(claim, 0 < len(agreeing) == len(TABLE[study]), numbers, len(agreeing) == len(values))


def agreement_test(cells: Cells, study: str, split: str, method: str) -> float:
    """Return the p-value that a cell and the paper's have one mean; NaN if it cannot be tested.

    Welch's test where both vary the seed. On A* and B*, and on CIFAR-10, the paper has one draw, a permutation of the
    labels or a seed, and Student's test tells whether it can be a further draw of ours; this needs two of ours.
    """
    score, printed = cells.get((split, method)), printed_cell(study, split, method)
    if score is None or printed is None or score.seeds < 2 or isnan(score.mean):
        return nan
    if printed.std is not None and not permutes(split, method):
        return welch(score, Score(printed.mean / 100, printed.std / 100, PAPER_SEEDS, 0))
    error = (score.std or 0.0) * sqrt(1 + 1 / score.seeds)
    return float(2 * t.sf(abs(score.mean - printed.mean / 100) / error, score.seeds - 1)) if error else nan


def _difference(cells: Cells, split: str, a: str, b: str) -> float:
    return percent(cells, split, a) - percent(cells, split, b)


def _case(cells: Cells, split: str, a: str, b: str, by: float) -> str:
    """Return one case in words: both means, their difference with its standard error, and the test."""
    left, right = _scores(cells, split, a, b)
    text = f"{split}: {TITLES[a]} {100 * left.mean:.2f}, {TITLES[b]} {100 * right.mean:.2f}"
    if not _tests(cells, split, a, b):
        return text
    error = 100 * sqrt((left.std or 0.0) ** 2 / left.seeds + (right.std or 0.0) ** 2 / right.seeds)
    p = welch(left, right, by)
    return f"{text}, difference {_difference(cells, split, a, b):+.2f} ± {error:.2f}, p = {p:.2g}"


def percent(cells: Cells, split: str, method: str) -> float:
    """Return a cell's mean in percent, NaN if it is missing or diverged in the first round."""
    return 100 * cells[split, method].mean if (split, method) in cells else nan


def _missing(split: str, methods: Sequence[str], cells: Cells) -> str:
    names = [TITLES[m] for m in methods if isnan(percent(cells, split, m))]
    return f"no record of {' and '.join(names)} on {split}"


def _gaps(gaps: Mapping[str, float]) -> str:
    return ", ".join(f"{split} {_shown(gap, '+')}" for split, gap in gaps.items())


def _shown(value: float, sign: str = "") -> str:
    return "missing" if isnan(value) else f"{value:{sign}.2f}"
