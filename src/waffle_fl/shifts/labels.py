"""Shifts of sample counts and label distributions: functions of the share matrix (agent x label)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError
from waffle_fl.randomness import generator

Indices = NDArray[np.int64]
Shares = NDArray[np.float64]
HALF = 0.5


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: an agent's labels are drawn from Dir(alpha K p) with p of the split; small alpha means few labels."""

    alpha: float

    def __post_init__(self) -> None:
        if not 1e-3 <= self.alpha <= 1e6:
            raise WaffleError(f"dirichlet: expected alpha from 0.001 to 1e6, got {self.alpha:g}")

    def skewed(self, shares: Shares, seed: int) -> Shares:
        """Return the skewed shares: one draw per agent, without rejection, so that it ends for any data."""
        rows = np.zeros_like(shares)
        for agent, row in enumerate(shares):
            held = row > 0
            concentration = self.alpha * len(row) * row[held] / row.sum()
            rows[agent, held] = row.sum() * generator(seed, "dirichlet", agent).dirichlet(concentration)
        return rows


@dataclass(frozen=True)
class Quantity:
    """Quantity skew: sizes are log-normal, exp(sigma z)."""

    sigma: float

    def __post_init__(self) -> None:
        if not 0 <= self.sigma <= 5:
            raise WaffleError(f"quantity: expected sigma from 0 to 5, got {self.sigma:g}")

    def sizes(self, agents: int, seed: int) -> Shares:
        """Return the sizes relative to their mean."""
        drawn = [generator(seed, "quantity", agent).standard_normal() for agent in range(agents)]
        return _relative(np.exp(self.sigma * np.asarray(drawn)))


@dataclass(frozen=True)
class Sizes:
    """Quantity skew with given relative sizes; the list is repeated as needed."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values or not all(0 < value <= 1e6 for value in self.values):
            raise WaffleError("sizes: expected numbers above 0 and up to 1e6, as in sizes(4, 1, 1)")

    def sizes(self, agents: int, seed: int) -> Shares:
        """Return the sizes relative to their mean."""
        return _relative(np.resize(np.asarray(self.values, np.float64), agents))


@dataclass(frozen=True)
class Prior:
    """Prior shift: label distributions of an agent's test and training data differ by `amount` in total variation."""

    amount: float

    def __post_init__(self) -> None:
        if not 0 <= self.amount <= 1:
            raise WaffleError(f"prior: expected an amount from 0 to 1, got {self.amount:g}")

    def moved(self, shares: Shares, seed: int) -> Shares:
        """Return the shares of the test data: mass moves from some labels to the others, both in proportion."""
        return np.stack([self._moved(row, generator(seed, "prior", agent)) for agent, row in enumerate(shares)])

    def _moved(self, row: Shares, rng: np.random.Generator) -> Shares:
        """Move `amount`, or as much as the labels of the row allow; a row with a single label does not change."""
        order = rng.permutation(np.flatnonzero(row))
        if len(order) < 2:
            return row
        p = row / row.sum()
        losers = _shortest(order, p, max(self.amount, HALF))
        if len(losers) == len(order):  # the last label is so common that it must be the one to lose
            losers = _shortest(order[::-1], p, max(self.amount, HALF))
        if len(losers) == len(order):  # one label must gain: the rarest
            losers = order[order != order[p[order].argmin()]]
        lost = np.zeros(len(row), bool)
        lost[losers] = True
        amount = min(self.amount, p[lost].sum())
        moved: Shares = row * np.where(lost, 1 - amount / p[lost].sum(), 1 + amount / p[~lost].sum())
        return moved


def _relative(sizes: Shares) -> Shares:
    found: Shares = sizes / sizes.mean()
    return found


def _shortest(order: Indices, p: Shares, mass: float) -> Indices:
    """Return the first labels that together have at least this mass."""
    return order[: int(np.searchsorted(np.cumsum(p[order]), mass - 1e-12)) + 1]


def serve(parts: list[list[Indices]], labels: Indices, shares: Shares) -> list[list[Indices]]:
    """Give every agent at least one sample.

    An agent without samples takes an unused one, of its most probable label, or else one of the largest agent's.
    """
    if len(labels) < len(parts):
        raise WaffleError(f"expected at least one training sample per agent, got {len(labels)} for {len(parts)} agents")
    parts = [list(part) for part in parts]
    used = np.concatenate([samples for part in parts for samples in part])
    spare = set(np.setdiff1d(np.arange(len(labels)), used).tolist())
    for agent, part in enumerate(parts):
        if any(map(len, part)):
            continue
        if spare:
            taken = max(sorted(spare), key=lambda sample: shares[agent, labels[sample]])
            spare.remove(taken)
        else:
            fullest = parts[int(np.argmax([sum(map(len, other)) for other in parts]))]
            commonest = int(np.argmax([len(samples) for samples in fullest]))
            taken, fullest[commonest] = int(fullest[commonest][-1]), fullest[commonest][:-1]
        part[labels[taken]] = np.array([taken], np.int64)
    return parts


def caps(samples_per_agent: int, sizes: Sequence[float] | Shares) -> list[int]:
    """Return how many samples each agent keeps, `samples_per_agent` on average; 0 keeps all."""
    return [max(1, round(samples_per_agent * size)) if samples_per_agent else 0 for size in sizes]
