"""The accountant of differential privacy: noise for a given epsilon, and the epsilon of what was released.

A release is a number of steps of DP-SGD: a Poisson sample of the rows, and the sum of their clipped gradients with
normal noise. Two tables are neighbours if one has one row more than the other. Epsilon is that of the privacy loss
distribution (PLD) of `dp-accounting`, in its pessimistic estimate, so that the true value is never above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from waffle_fl.errors import WaffleError

LEAST_NOISE = 0.2  # a noise multiplier below which accounting takes minutes
PRECISION = 1e-3  # relative, of the epsilon of a noise multiplier
SEARCHES = 50
COARSEST, FINEST = 1e-3, 1e-5  # width of the intervals into which privacy losses are divided


class Release(NamedTuple):
    """Steps of DP-SGD at one agent."""

    rate: float  # probability of a row to be in a batch
    multiplier: float  # standard deviation of the noise / largest norm of a row's gradient
    steps: int


def epsilon_of(releases: Iterable[Release], delta: float, width: float = COARSEST) -> float:
    """Return the epsilon at this delta of all releases together."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    total: dict[tuple[float, float], int] = {}
    for rate, multiplier, steps in releases:
        total[rate, multiplier] = total.get((rate, multiplier), 0) + steps
    accountant: Any = PLDAccountant(value_discretization_interval=width)
    for (rate, multiplier), steps in total.items():
        if steps:
            step = GaussianDpEvent(multiplier)
            sampled = PoissonSampledDpEvent(rate, step) if rate < 1 else step
            accountant.compose(SelfComposedDpEvent(sampled, steps))
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=4096)
def cached_epsilon(release: Release, delta: float, width: float) -> float:
    """Return the epsilon of one release."""
    return epsilon_of([release], delta, width)


def width_for(epsilon: float) -> float:
    """Return the width of intervals with which epsilons of this size are computed."""
    return min(COARSEST, max(FINEST, epsilon / 1000))


@lru_cache(maxsize=4096)
def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the noise multiplier with which so many steps cost this epsilon, and at most a thousandth less.

    A search in steps that would be exact if epsilon were a power of the multiplier.
    """
    if not steps or not rate:
        return 0.0
    width = width_for(epsilon)
    multiplier, slope = 1.0, 1.0
    before: tuple[float, float] | None = None
    for _ in range(SEARCHES):
        cost = epsilon_of([Release(rate, multiplier, steps)], delta, width)
        if (1 - PRECISION) * epsilon <= cost <= epsilon or (cost <= epsilon and multiplier == LEAST_NOISE):
            return math.ceil(multiplier * 10_000) / 10_000  # the same on any machine
        if before and before[0] != multiplier and 0 < cost < math.inf:
            slope = math.log(before[1] / cost) / math.log(multiplier / before[0])
        before = (multiplier, cost) if 0 < cost < math.inf else before
        factor = (cost / (1 - PRECISION / 2) / epsilon) ** (1 / min(max(slope, 0.3), 3.0))
        multiplier = max(multiplier * min(max(factor, 0.6), 4.0), LEAST_NOISE)
    raise WaffleError(f"epsilon: no noise is enough for {steps} steps with epsilon {epsilon:g} and delta {delta:g}")
