"""How sure a figure is: chance in the test samples and in training, paired between methods. Pure NumPy.

A resample draws as many test samples as there are, with replacement; a difference between two methods is that on the
same draws. The figure of a method is the mean over its seeds. Balanced accuracy and AUC are drawn class by class, so
that no draw lacks a class. A small test set on which all samples agree would look certain: so the draws of an accuracy
know two imagined samples more, one that is won and one that is lost, in the manner of Agresti and Coull (1998) for a
share and of Agresti and Min (2005) for a paired difference; the classes of a balanced accuracy share the two. The draws
of an AUC or an RMSE are spread as a normal distribution must be to become Student's, with the samples of the smallest
group.

To each resample chance in training is added: the standard error over the seeds, times a draw from Student's
distribution (the sum of Behrens and Fisher). Drawing the seeds themselves anew would not do: where there is no
difference, three seeds still agree in sign one time in four. Of one seed, an interval knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waffle_fl.randomness import generator

Metric: TypeAlias = Literal["accuracy", "balanced_accuracy", "auc", "rmse"]
Array: TypeAlias = NDArray[np.float64]
Target: TypeAlias = NDArray[np.generic]
Seeds: TypeAlias = Mapping[int, Array]  # seed -> what its model says of every test sample
RESAMPLES, LEVEL = 2000, 0.95
FEW = 10  # test samples, or those of a class, below which an AUC or an error has no verdict
BLOCK = 4_000_000  # numbers in a block of resamples at most


class Interval(NamedTuple):
    """A figure, and the bounds between which 95 of 100 resamples find it."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 where the whole interval lies on one side of 0; else 0."""
        return int(self.low > 0) - int(self.high < 0)


class Hint(Interval):
    """An interval from too few samples for a verdict."""

    @property
    def sign(self) -> int:
        return 0


def metrics_of(target: Target, classes: int) -> list[Metric]:
    """What can be measured on these samples; the first is the headline."""
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
    """The metric of each seed's model."""
    if in_percent(metric):
        groups = _groups(metric, target)
        right = {seed: _right([output], target) for seed, output in outputs.items()}
        return {seed: fmean(float(share[at].mean()) for at in groups) for seed, share in right.items()}
    whole = np.ones((1, len(target)))
    return {seed: float(_scores(metric, output, target, whole)[0]) for seed, output in outputs.items()}


def estimate(metric: Metric, outputs: Seeds, target: Target) -> Interval:
    """A method's figure."""
    if in_percent(metric):
        draws = _means(_right([*outputs.values()], target), _groups(metric, target), (0.0, 1.0))
    else:
        (draws,) = _drawn(metric, [outputs], target)
    found = figures(metric, outputs, target)
    draws = np.clip(draws + _training([*found.values()]), 0, _most(metric))
    return _interval(fmean(found.values()), draws)


def gain(metric: Metric, ours: Seeds, theirs: Seeds, target: Target) -> Interval:
    """How much better ours is than theirs on the same samples; above 0 is better, whatever the metric."""
    sign, most = -1.0 if better_if_lower(metric) else 1.0, _most(metric)
    if in_percent(metric):
        won = _right([*ours.values()], target) - _right([*theirs.values()], target)
        draws = _means(won, _groups(metric, target), (-1.0, 1.0))
    else:
        first, second = _drawn(metric, [ours, theirs], target)
        draws = sign * (first - second)
    mine, others = figures(metric, ours, target), figures(metric, theirs, target)
    if mine.keys() == others.keys():  # the same seeds begin alike: what they share is no chance in the difference
        draws += _training([mine[seed] - others[seed] for seed in mine])
    else:
        draws += _training([*mine.values()], "ours") + _training([*others.values()], "theirs")
    found = _interval(sign * (fmean(mine.values()) - fmean(others.values())), np.clip(draws, -most, most))
    return found if in_percent(metric) or min(map(len, _groups(metric, target))) >= FEW else Hint(*found)


def _most(metric: Metric) -> float:
    return np.inf if better_if_lower(metric) else 1.0


def _training(singles: Sequence[float], *purpose: str) -> Array:
    """What chance in training adds to each resample, as the figures of single seeds tell it."""
    seeds = len(singles)
    if seeds == 1:
        return np.zeros(RESAMPLES)
    draws = generator(0, "training", *purpose).standard_t(seeds - 1, RESAMPLES)
    return np.asarray(draws * stdev(singles) / seeds**0.5)


def _interval(found: float, draws: Array) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(found, min(float(low), found), max(float(high), found))


def _right(outputs: Sequence[Array], target: Target) -> Array:
    """The share of the seeds whose model recognises each sample."""
    return np.asarray(np.mean([output.argmax(axis=1) == target for output in outputs], axis=0), dtype=np.float64)


def _groups(metric: Metric, target: Target) -> list[NDArray[np.intp]]:
    """The samples that are drawn among each other: all of them, or those of each class."""
    if metric in ("balanced_accuracy", "auc"):
        return [np.flatnonzero(target == k) for k in np.unique(target)]
    return [np.arange(len(target))]


def _means(values: Array, groups: Sequence[NDArray[np.intp]], imagined: tuple[float, float]) -> Array:
    """The mean over groups of each group's mean, resample by resample; the groups share the two imagined samples."""
    total, part = np.zeros(RESAMPLES), 1 / len(groups)
    for k, at in enumerate(groups):
        known, n = np.append(values[at], imagined), len(at)
        for rows in _blocks(n):
            draws = generator(0, "bootstrap", k, rows.start).uniform(0, n + 2 * part, (len(rows), round(n + 2 * part)))
            picked = np.where(draws < n, draws, n + (draws >= n + part)).astype(np.intp)
            total[rows.start : rows.stop] += known[picked].mean(axis=1) * part
    return total


def _drawn(metric: Metric, methods: Sequence[Seeds], target: Target) -> list[Array]:
    """Each method's figure on every resample, the same for all of them; the fewer the samples, the wider spread."""
    draws = [np.empty(RESAMPLES) for _ in methods]
    for rows in _blocks(len(target)):
        counts = np.zeros((len(rows), len(target)))
        for k, at in enumerate(_groups(metric, target)):
            picked = generator(0, "bootstrap", k, rows.start).integers(0, len(at), (len(rows), len(at)))
            places = picked + len(at) * np.arange(len(rows))[:, None]
            counts[:, at] = np.bincount(places.ravel(), minlength=places.size).reshape(places.shape)
        for draw, outputs in zip(draws, methods, strict=True):
            scores = [_scores(metric, output, target, counts) for output in outputs.values()]
            draw[rows.start : rows.stop] = np.mean(scores, axis=0)
    fewest = min(map(len, _groups(metric, target)))
    wider = np.sqrt(fewest / generator(0, "few").chisquare(max(1, fewest - 1), RESAMPLES))
    found = [fmean(figures(metric, outputs, target).values()) for outputs in methods]
    return [middle + (draw - middle) * wider for middle, draw in zip(found, draws, strict=True)]


def _blocks(samples: int) -> list[range]:
    size = max(1, min(RESAMPLES, BLOCK // max(1, samples)))
    return [range(start, min(start + size, RESAMPLES)) for start in range(0, RESAMPLES, size)]


def _scores(metric: Metric, output: Array, target: Target, counts: Array) -> Array:
    """A model's AUC or RMSE of each row of `counts`: how often that resample holds each sample."""
    if metric == "auc":
        return _areas(output[:, 1] - output[:, 0], target == 1, counts)
    squares = (output.reshape(-1) - target.astype(np.float64)) ** 2
    return np.asarray(np.sqrt(counts @ squares / counts.sum(axis=1)))


def _areas(score: Array, positive: NDArray[np.bool_], counts: Array) -> Array:
    """The area under the ROC curve of every resample: how often a positive sample is above a negative, ties half."""
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.diff(score[order], prepend=-np.inf) > 0)  # where a new value begins
    up = np.add.reduceat(counts[:, order] * positive[order], starts, axis=1)
    down = np.add.reduceat(counts[:, order] * ~positive[order], starts, axis=1)
    below = np.cumsum(down, axis=1) - down
    return np.asarray((up * (below + down / 2)).sum(axis=1) / (up.sum(axis=1) * down.sum(axis=1)))
