"""Compare methods over the tasks of a tournament.

A task is a column, a partition and an Alice; its score is the mean over the seeds. A run that diverged counts as the
worst score of its task. Points below LOWEST, such as those of a regression that is about to diverge, count as LOWEST.
A column's score is the mean over its tasks, and every column counts the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, TypeAlias

from waffle_fl.tournament.record import Line

Protocol: TypeAlias = Literal["selected", "last"]
Column: TypeAlias = tuple[str, str]  # (data set, name of the column)
TaskKey: TypeAlias = tuple[int, str]  # (partition, Alice)
DECILE = 0.1
LOWEST = -100.0  # points: an error of twice the targets' standard deviation
BASELINE = "local"


@dataclass(frozen=True)
class Scores:
    """The score of every method on every task of every column."""

    columns: Mapping[Column, Mapping[str, Mapping[TaskKey, float]]]

    @property
    def methods(self) -> list[str]:
        """All methods; a method that is not defined for a data set lacks its columns."""
        return list(dict.fromkeys(method for found in self.columns.values() for method in found))


class MethodStanding(NamedTuple):
    """One method over all columns; points are means over columns."""

    method: str
    gap: float  # points behind the best method of each column
    largest: float  # the largest gap
    near: int  # columns within one standard error of the best method
    columns: int
    worst: float  # points of the worst tenth of the tasks behind the best method's worst tenth
    gains: float  # share of the tasks whose score is above Local's
    rank: float  # mean rank over the columns


def scores_of(lines: Mapping[str, Iterable[Line]], protocol: Protocol = "selected") -> Scores:
    """Return the scores by column and method, from the table lines of each data set."""
    raw: dict[Column, dict[str, dict[TaskKey, list[float | None]]]] = {}
    for data, some in lines.items():
        for line in some:
            if line["stage"] != "table":
                continue
            tasks = raw.setdefault((data, line["column"]), {}).setdefault(line["method"], {})
            for k, alice in enumerate(alices_of(line)):
                tasks[line["partition"], alice] = [_floored(seed[k]) for seed in line[protocol]]
    return Scores({column: _completed(found) for column, found in raw.items()})


def _floored(points: float | None) -> float | None:
    return None if points is None else max(points, LOWEST)


def alices_of(line: Line) -> list[str]:
    """Return the names of the Alices of a line of the table."""
    given = line["alices"]
    return [f"agent {i}" for i in range(given)] if isinstance(given, int) else list(given)


def _completed(found: Mapping[str, Mapping[TaskKey, list[float | None]]]) -> dict[str, dict[TaskKey, float]]:
    """Return the mean over seeds of each task; a diverged run counts as the worst of the task.

    A task without any score, such as an AUC on one class, is left out for every method.
    """
    known: dict[TaskKey, list[float]] = {}
    for tasks in found.values():
        for key, values in tasks.items():
            known.setdefault(key, []).extend(value for value in values if value is not None)
    worst = {key: min(values) for key, values in known.items() if values}
    return {
        method: {
            key: fmean(worst[key] if value is None else value for value in values)
            for key, values in tasks.items()
            if key in worst
        }
        for method, tasks in found.items()
    }


def standings(scores: Scores) -> list[MethodStanding]:
    """Return the methods, the one with the smallest mean gap first. Each counts the columns that it has."""
    found = [
        _standing(method, [column for column in scores.columns.values() if method in column])
        for method in scores.methods
    ]
    return sorted(found, key=lambda standing: standing.gap)


def _standing(method: str, columns: Sequence[Mapping[str, Mapping[TaskKey, float]]]) -> MethodStanding:
    gaps, near, worst, gains, ranks = [], 0, [], list[bool](), []
    for column in columns:
        means = {m: fmean(tasks.values()) for m, tasks in column.items()}
        best = max(means, key=means.__getitem__)
        gaps.append(means[best] - means[method])
        near += gaps[-1] <= _standard_error(column[best], column[method])
        tails = {m: lowest(tasks.values()) for m, tasks in column.items()}
        worst.append(max(tails.values()) - tails[method])
        ranks.append(_rank(means, method))
        if BASELINE in column:
            gains += [column[method][key] > column[BASELINE][key] for key in column[method]]
    share = fmean(gains) if gains else math.nan
    return MethodStanding(method, fmean(gaps), max(gaps), near, len(columns), fmean(worst), share, fmean(ranks))


def lowest(values: Iterable[float]) -> float:
    """Return the mean of the lowest tenth of the values, of at least one."""
    ordered = sorted(values)
    return fmean(ordered[: max(1, math.ceil(DECILE * len(ordered)))])


def _standard_error(best: Mapping[TaskKey, float], other: Mapping[TaskKey, float]) -> float:
    """Return the standard error of the mean difference of two methods over the tasks."""
    differences = [best[key] - other[key] for key in best if key in other]
    return stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0


def _rank(means: Mapping[str, float], method: str) -> float:
    """Return the rank of a method in a column, 1 for the best; equal scores share a mean rank."""
    ordered = sorted(means.values(), reverse=True)
    return ordered.index(means[method]) + 1 + (ordered.count(means[method]) - 1) / 2


class Comparison(NamedTuple):
    """The difference of two methods over the tasks of all columns."""

    difference: float  # mean over the tasks, in points
    error: float  # standard error over the tasks
    tasks: int
    p: float  # two-sided, of the paired t test over the columns' means

    def __str__(self) -> str:
        return f"{self.difference:+.2f} ± {self.error:.2f} (n = {self.tasks} tasks, p = {self.p:.2g})"


def compare(scores: Scores, one: str, other: str) -> Comparison:
    """Compare two methods: the unit of the test is a column, because tasks of a column share their data."""
    from scipy.stats import ttest_1samp  # not on every machine that makes records

    per_column = [
        [column[one][key] - column[other][key] for key in column[one] if key in column[other]]
        for column in scores.columns.values()
        if one in column and other in column
    ]
    differences = [value for some in per_column for value in some]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    means = [fmean(some) for some in per_column]
    p = float(ttest_1samp(means, 0.0).pvalue) if len(means) > 1 and any(means) else math.nan
    return Comparison(fmean(differences), error, len(differences), p)


def critical_difference(methods: int, columns: int, level: float = 0.05) -> float:
    """Return Nemenyi's critical difference of mean ranks: two methods further apart differ significantly."""
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(1 - level, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * columns))


def mean_loss(lines: Iterable[Line], method: str) -> float:
    """Return the mean log loss on test data in the selected round; NaN without a classification."""
    found: list[Any] = [
        value
        for line in lines
        if line["stage"] == "table" and line["method"] == method
        for value in line["loss"]
        if value is not None
    ]
    return fmean(found) if found else math.nan
