"""Confidence intervals of metrics and of paired differences between methods. Pure NumPy.

The intervals cover two sources of randomness: the test samples and training.

Test samples: a resample draws as many test samples as there are, with replacement. Differences between two methods use
the same draws. The value of a method is the mean over its seeds. For balanced accuracy and AUC, samples are drawn
within each class, so every resample contains every class. When all samples of a small test set agree, a percentile
interval has no width. The draws of an accuracy therefore include two added samples, one for and one against, as in
Agresti and Coull (1998) for a proportion and Agresti and Min (2005) for a paired difference; the classes of a balanced
accuracy share the two. The draws of an AUC or an RMSE are widened by the factor that turns a normal distribution into
Student's, with the number of samples in the smallest group.

Training: each resample adds the standard error over the seeds times a draw from Student's distribution (the sum of
Behrens and Fisher). Resampling the seeds is not enough: without any difference, three seeds agree in sign one time in
four. With one seed, the interval does not cover training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean, stdev
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waffle_fl.randomness import generator

Metric: TypeAlias = Literal["accuracy", "balanced_accuracy", "auc", "rmse"]
Array: TypeAlias = NDArray[np.float64]
Target: TypeAlias = NDArray[np.generic]
Seeds: TypeAlias = Mapping[int, Array]  # seed -> its model's outputs for all test samples
RESAMPLES, LEVEL = 2000, 0.95
NORMAL = 1.96  # half the width of a 95 % interval of a normal distribution, in standard errors
FEW = 10  # test samples, or test samples of a class, below which an AUC or an RMSE has no verdict
BLOCK = 4_000_000  # maximum number of values in a block of resamples


class Interval(NamedTuple):
    """A value and the bounds that contain 95 % of its resamples."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 when the whole interval lies on one side of 0, else 0."""
        return int(self.low > 0) - int(self.high < 0)

    @property
    def standard_error(self) -> float:
        """The standard error of a normal distribution with this interval."""
        return (self.high - self.low) / (2 * NORMAL)


class Hint(Interval):
    """An interval from too few samples for a verdict."""

    @property
    def sign(self) -> int:
        return 0


def metrics_of(target: Target, classes: int) -> list[Metric]:
    """Return the metrics that are defined on these samples; the first is the main one."""
    if np.issubdtype(target.dtype, np.floating):
        return ["rmse"]
    metrics: list[Metric] = ["accuracy"]
    if len(np.unique(target)) > 1:
        metrics += ["balanced_accuracy"]
        metrics += ["auc"] if classes == 2 else []
    return metrics


def better_if_lower(metric: Metric) -> bool:
    return metric == "rmse"


def in_percent(metric: Metric) -> bool:
    return metric in ("accuracy", "balanced_accuracy")


def figures(metric: Metric, outputs: Seeds, target: Target) -> dict[int, float]:
    """Return the metric of each seed's model."""
    if in_percent(metric):
        groups = _groups(metric, target)
        right = {seed: _right([output], target) for seed, output in outputs.items()}
        return {seed: fmean(float(share[at].mean()) for at in groups) for seed, share in right.items()}
    once = np.ones((1, len(target)))
    return {seed: float(_scores(metric, output, target, once)[0]) for seed, output in outputs.items()}


def estimate(metric: Metric, outputs: Seeds, target: Target) -> Interval:
    """Return the metric of a method, the mean over its seeds, with its interval."""
    if in_percent(metric):
        draws = _means(_right([*outputs.values()], target), _groups(metric, target), (0.0, 1.0))
    else:
        (draws,) = _drawn(metric, [outputs], target)
    found = figures(metric, outputs, target)
    draws = np.clip(draws + _training([*found.values()]), 0, _most(metric))
    return _interval(fmean(found.values()), draws)


def gain(metric: Metric, ours: Seeds, theirs: Seeds, target: Target) -> Interval:
    """Return how much better `ours` is than `theirs` on the same samples; above 0 is better for every metric."""
    sign, most = -1.0 if better_if_lower(metric) else 1.0, _most(metric)
    if in_percent(metric):
        won = _right([*ours.values()], target) - _right([*theirs.values()], target)
        draws = _means(won, _groups(metric, target), (-1.0, 1.0))
    else:
        first, second = _drawn(metric, [ours, theirs], target)
        draws = sign * (first - second)
    mine, others = figures(metric, ours, target), figures(metric, theirs, target)
    if mine.keys() == others.keys():  # runs of one seed start alike, so their difference is paired
        draws += _training([mine[seed] - others[seed] for seed in mine])
    else:
        draws += _training([*mine.values()], "ours") + _training([*others.values()], "theirs")
    found = _interval(sign * (fmean(mine.values()) - fmean(others.values())), np.clip(draws, -most, most))
    return found if in_percent(metric) or min(map(len, _groups(metric, target))) >= FEW else Hint(*found)


def contrasts(
    metric: Metric,
    methods: Sequence[Seeds],
    coefficients: Sequence[Sequence[float]],
    target: Target,
    errors: Sequence[float] = (),
    training: bool = True,
) -> list[Interval]:
    """Return sums over methods of a coefficient times the metric, each with its interval; above 0 is better.

    `methods` have the same seeds. `coefficients` has one row per sum; its positive part adds up to at most 1. `errors`
    are further standard errors, one per sum, which widen the intervals. Without `training`, the intervals cover the
    samples only.
    """
    sign, most = -1.0 if better_if_lower(metric) else 1.0, _most(metric)
    table = sign * np.asarray(coefficients, dtype=np.float64)
    singles = np.array([[*figures(metric, outputs, target).values()] for outputs in methods])
    if in_percent(metric):
        right = np.array([_right([*outputs.values()], target) for outputs in methods])
        draws = [_means(row, _groups(metric, target), (-1.0, 1.0)) for row in table @ right]
    else:
        draws = list(table @ np.array(_drawn(metric, methods, target)))
    found = []
    for k, row in enumerate(table):
        draw = draws[k] + _training([*(row @ singles)]) if training else draws[k]
        if errors:
            draw = draw + errors[k] * generator(0, "contrast", k).standard_normal(RESAMPLES)
        one = _interval(float(row @ singles.mean(axis=1)), np.clip(draw, -most, most))
        enough = in_percent(metric) or min(map(len, _groups(metric, target))) >= FEW
        found.append(one if enough else Hint(*one))
    return found


def share_above_zero(gains: Sequence[Interval]) -> Interval:
    """Return the share of gains above 0. The interval covers the uncertainty of each gain, taken as independent."""
    values = np.array([found.value for found in gains])
    errors = np.array([found.standard_error for found in gains])
    draws = values + errors * generator(0, "share").standard_normal((RESAMPLES, len(gains)))
    return _interval(float((values > 0).mean()), (draws > 0).mean(axis=1))


def _most(metric: Metric) -> float:
    return np.inf if better_if_lower(metric) else 1.0


def _training(singles: Sequence[float], *purpose: str) -> Array:
    """Return the random term of training for each resample, from the values of the single seeds."""
    seeds = len(singles)
    if seeds == 1:
        return np.zeros(RESAMPLES)
    draws = generator(0, "training", *purpose).standard_t(seeds - 1, RESAMPLES)
    return np.asarray(draws * stdev(singles) / seeds**0.5)


def _interval(found: float, draws: Array) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(found, min(float(low), found), max(float(high), found))


def _right(outputs: Sequence[Array], target: Target) -> Array:
    """Return for each sample the fraction of seeds whose model classifies it correctly."""
    return np.asarray(np.mean([output.argmax(axis=1) == target for output in outputs], axis=0), dtype=np.float64)


def _groups(metric: Metric, target: Target) -> list[NDArray[np.intp]]:
    """Return the groups of samples to resample within: all samples, or those of each class."""
    if metric in ("balanced_accuracy", "auc"):
        return [np.flatnonzero(target == k) for k in np.unique(target)]
    return [np.arange(len(target))]


def _means(values: Array, groups: Sequence[NDArray[np.intp]], added: tuple[float, float]) -> Array:
    """Return for each resample the mean over groups of the group means; the groups share the two added samples."""
    total, part = np.zeros(RESAMPLES), 1 / len(groups)
    for k, at in enumerate(groups):
        known, n = np.append(values[at], added), len(at)
        for rows in _blocks(n):
            total[rows.start : rows.stop] += known[_picked(n, part, k, rows)].mean(axis=1) * part
    return total


@lru_cache(maxsize=2)  # all comparisons on one test set draw alike
def _picked(n: int, part: float, k: int, rows: range) -> NDArray[np.intp]:
    """Return the indices that each resample draws from a group of n samples, followed by the two added ones."""
    draws = generator(0, "bootstrap", k, rows.start).uniform(0, n + 2 * part, (len(rows), round(n + 2 * part)))
    return np.where(draws < n, draws, n + (draws >= n + part)).astype(np.intp)


def _drawn(metric: Metric, methods: Sequence[Seeds], target: Target) -> list[Array]:
    """Return each method's metric on the same resamples, widened when there are few samples."""
    draws = [np.empty(RESAMPLES) for _ in methods]
    for rows in _blocks(len(target)):
        counts = np.zeros((len(rows), len(target)))
        for k, at in enumerate(_groups(metric, target)):
            counts[:, at] = _counted(len(at), k, rows)
        for draw, outputs in zip(draws, methods, strict=True):
            scores = [_scores(metric, output, target, counts) for output in outputs.values()]
            draw[rows.start : rows.stop] = np.mean(scores, axis=0)
    fewest = min(map(len, _groups(metric, target)))
    wider = np.sqrt(fewest / generator(0, "few").chisquare(max(1, fewest - 1), RESAMPLES))
    found = [fmean(figures(metric, outputs, target).values()) for outputs in methods]
    return [middle + (draw - middle) * wider for middle, draw in zip(found, draws, strict=True)]


@lru_cache(maxsize=2)
def _counted(n: int, k: int, rows: range) -> NDArray[np.intp]:
    """Return how often each resample draws each of a group's n samples."""
    picked = generator(0, "bootstrap", k, rows.start).integers(0, n, (len(rows), n))
    places = picked + n * np.arange(len(rows))[:, None]
    return np.bincount(places.ravel(), minlength=places.size).reshape(places.shape)


def _blocks(samples: int) -> list[range]:
    size = max(1, min(RESAMPLES, BLOCK // max(1, samples)))
    return [range(start, min(start + size, RESAMPLES)) for start in range(0, RESAMPLES, size)]


def _scores(metric: Metric, output: Array, target: Target, counts: Array) -> Array:
    """Return a model's AUC or RMSE per row of `counts`, which holds how often a resample contains each sample."""
    if metric == "auc":
        return _areas(output[:, 1] - output[:, 0], target == 1, counts)
    squares = (output.reshape(-1) - target.astype(np.float64)) ** 2
    return np.asarray(np.sqrt(counts @ squares / counts.sum(axis=1)))


def _areas(score: Array, positive: NDArray[np.bool_], counts: Array) -> Array:
    """Return the AUC of every resample: how often a positive sample scores above a negative one, ties counting half."""
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.diff(score[order], prepend=-np.inf) > 0)  # first position of each distinct score
    ordered = counts[:, order]
    up = np.add.reduceat(ordered * positive[order], starts, axis=1)
    down = np.add.reduceat(ordered, starts, axis=1) - up  # exact: counts are whole numbers
    below = np.cumsum(down, axis=1) - down
    return np.asarray((up * (below + down / 2)).sum(axis=1) / (up.sum(axis=1) * down.sum(axis=1)))
