"""Standardise arrays and images. The scaling is fitted on training samples from summaries; no sample leaves its agent.

Agents share the number of their training samples and, per feature (samples with one axis) or per channel (the first of
several axes), the mean and the sum of squared deviations; for a regression the same of the target. With local
preprocessing only the target's are shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from math import prod
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.preprocessing import CLIP, ROUNDING, Moments, Scope, clipped, is_bound, joined_moments

Floats64 = NDArray[np.float64]
BLOCK = 1 << 20  # numbers that are converted to float64 at once
LARGEST = 1e100  # largest accepted mean and deviation; the square is still finite


@dataclass(frozen=True)
class ArrayScaling:
    """Conversion of one agent's arrays to standardised inputs and targets; saved with a run and used by predict."""

    mean: tuple[float, ...]  # per feature or channel; empty: the inputs are used as given
    deviation: tuple[float, ...]  # 0: constant in the training data, the feature becomes 0
    rows: int  # number of training samples behind them
    target_mean: float = 0.0
    target_deviation: float = 1.0  # the unit in which a regression is trained
    scope: Scope = "federated"
    clip: float | None = None  # largest distance of a standardised input from 0; None: unlimited, as in earlier runs

    @property
    def divisor(self) -> tuple[float, ...]:
        """The deviations, infinite instead of 0, so that a constant feature becomes 0."""
        return tuple(deviation or float("inf") for deviation in self.deviation)

    def transform(self, x: NDArray[Any], name: str) -> NDArray[Any]:
        """Return (value - mean) / deviation, clipped, as float32; `name` is the agent's, for an error message."""
        if not self.mean:
            return x
        made = np.empty(x.shape, np.float32)
        mean, divisor = np.array(self.mean)[:, None], np.array(self.divisor)[:, None]
        for rows in _blocks(np.arange(len(x)), x):
            with np.errstate(over="ignore"):
                scaled = (_channels(x[rows]) - mean) / divisor
                block = scaled.astype(np.float32)
            bad = np.flatnonzero(~np.isfinite(block).all(axis=(1, 2)))
            if len(bad):
                raise WaffleError(
                    f"{name}: a value of the sample at index {rows[bad[0]]} is too far from the training samples for "
                    "float32: repair it or drop the sample"
                )
            made[rows] = clipped(scaled, self.clip).reshape(len(rows), *x.shape[1:])
        return made

    def targets(self, y: NDArray[Any]) -> Floats64:
        """Return the standardised targets of a regression."""
        return (y.astype(np.float64) - self.target_mean) / self.target_deviation

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ArrayScaling:
        try:
            found = cls(**{**content, "mean": tuple(content["mean"]), "deviation": tuple(content["deviation"])})
        except (KeyError, TypeError) as error:
            raise WaffleError(f"expected a scaling as saved in a run folder, fields differ: {error}") from None
        if not found._is_valid():
            raise WaffleError("expected a scaling as saved in a run folder, got a field of the wrong type or value")
        return found

    def _is_valid(self) -> bool:
        """Return whether every field has its type and a possible value; the JSON may come from an untrusted file."""
        values = [*self.mean, *self.deviation, self.target_mean, self.target_deviation]
        return (
            all(type(value) in (int, float) and abs(value) <= LARGEST for value in values)
            and len(self.mean) == len(self.deviation)
            and all(deviation >= 0 for deviation in self.deviation)
            and self.target_deviation > 0
            and type(self.rows) is int
            and self.rows >= 0
            and self.scope in get_args(Scope)
            and is_bound(self.clip)
        )


class FeatureMoments(NamedTuple):
    """The Moments of all features or channels of an array, one entry each; n is the number of samples.

    A channel's squared deviations are averaged over its positions, so that squares / n is its variance.
    """

    n: int
    mean: Floats64
    squares: Floats64

    @property
    def deviation(self) -> Floats64:
        found = np.sqrt(self.squares / max(1, self.n))
        return np.where(found > ROUNDING * np.abs(self.mean), found, 0.0)

    def joined(self, other: FeatureMoments) -> FeatureMoments:
        """Return the moments of both together, by the formula of Moments."""
        return FeatureMoments(*Moments.joined(self, other))  # type: ignore[arg-type]


def feature_moments(x: NDArray[Any], rows: NDArray[Any]) -> FeatureMoments:
    """Return the moments of each feature or channel over these samples.

    Deviations from the first sample are added up instead of the values, so that a constant has a deviation of 0.
    """
    count, positions = _sides(x)
    if not len(rows):
        return FeatureMoments(0, np.zeros(count), np.zeros(count))
    first = _channels(x[rows[:1]])[0, :, :1]
    total, squares = np.zeros(count), np.zeros(count)
    for part in _blocks(rows, x):
        total += (_channels(x[part]) - first).sum(axis=(0, 2))
    mean = first[:, 0] + total / (len(rows) * max(1, positions))
    for part in _blocks(rows, x):
        squares += ((_channels(x[part]) - mean[:, None]) ** 2).sum(axis=(0, 2))
    return FeatureMoments(len(rows), mean, squares / max(1, positions))


def clip_of(axes: int) -> float | None:
    """Return the bound of standardised inputs: CLIP for features, none for the channels of a series or an image."""
    return CLIP if axes == 1 else None


def common_scaling(
    features: Sequence[FeatureMoments], targets: Sequence[Moments], scope: Scope, axes: int
) -> ArrayScaling:
    """Return the scaling common to all agents, from their moments in the agents' order.

    `features` is empty for local preprocessing, `targets` for a classification. `axes` are those of a sample.
    """
    goal = joined_moments(targets)
    common = ArrayScaling((), (), goal.n, goal.mean, goal.deviation or 1.0, scope, clip_of(axes))
    return _with_features(common, reduce(FeatureMoments.joined, features)) if features else common


def own_scaling(common: ArrayScaling, x: NDArray[Any], rows: NDArray[Any]) -> ArrayScaling:
    """Return one agent's scaling; with scope "local" it uses the agent's own means and deviations."""
    return common if common.scope == "federated" else _with_features(common, feature_moments(x, rows))


def _with_features(scaling: ArrayScaling, found: FeatureMoments) -> ArrayScaling:
    mean, deviation = tuple(found.mean.tolist()), tuple(found.deviation.tolist())
    return replace(scaling, mean=mean, deviation=deviation, rows=found.n)


def _sides(x: NDArray[Any]) -> tuple[int, int]:
    """Return the number of features or channels of a sample, and of positions per channel."""
    return (x.shape[1] if x.ndim > 1 else 1), prod(x.shape[2:])


def _channels(x: NDArray[Any]) -> Floats64:
    """Return samples as (samples, channels, positions) in float64; a feature is a channel with one position."""
    return x.reshape(len(x), *_sides(x)).astype(np.float64)


def _blocks(rows: NDArray[Any], x: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the rows in blocks whose samples have at most BLOCK numbers, which bounds the memory."""
    size = max(1, BLOCK // max(1, prod(x.shape[1:])))
    return (rows[start : start + size] for start in range(0, len(rows), size))
