"""Shifts of what a label means: agents that swap labels, and agents that change their mind during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from waffle_fl.errors import WaffleError
from waffle_fl.randomness import generator
from waffle_fl.shifts.groups import check_groups, groups_of
from waffle_fl.shifts.labels import Indices, Shares


@dataclass(frozen=True)
class Swap:
    """Concept shift: each group but Alice's passes `k` labels of its own choice round among themselves."""

    k: int
    groups: int = 2

    def __post_init__(self) -> None:
        if self.k < 2:
            raise WaffleError(f"swap: expected at least 2 labels, got {self.k}")
        check_groups("swap", self.groups)

    def concepts(self, agents: int, classes: int, alice: int, seed: int) -> Indices:
        """(agents, classes): agents of one group share a concept."""
        own = np.arange(classes)
        return np.stack(
            [
                cycle(classes, self.k, seed, "swap", group) if group else own
                for group in groups_of(agents, alice, self.groups)
            ]
        )


@dataclass(frozen=True)
class Drift:
    """Concept drift: from the share `at` of the rounds on, `k` labels (0: all) mean others.

    Suddenly all samples, or gradually a share of them that grows until `until`. `who` drifts: the others than Alice's
    group, Alice's group alone, or all groups, each to a concept of its own.
    """

    kind: Literal["sudden", "gradual"] = "sudden"
    at: float = 0.5
    until: float = 1.0
    k: int = 0
    groups: int = 2
    who: Literal["others", "alice", "all"] = "others"

    def __post_init__(self) -> None:
        if not 0 <= self.at <= 1 or (self.kind == "gradual" and not self.at < self.until <= 1):
            raise WaffleError(f"drift: expected 0 <= at < until <= 1, got {self.at:g} and {self.until:g}")
        if self.k < 0 or self.k == 1:
            raise WaffleError(f"drift: expected k of 2 or more labels, or 0 for all, got {self.k}")
        check_groups("drift", self.groups, 1 if self.who == "all" else 2)

    def concepts(self, agents: int, classes: int, alice: int, seed: int) -> Indices:
        """(agents, classes): what each agent calls a class once it has drifted."""
        own = np.arange(classes)
        return np.stack(
            [
                cycle(classes, self.k or classes, seed, "drift", group) if self.drifts(group) else own
                for group in groups_of(agents, alice, self.groups)
            ]
        )

    def drifts(self, group: int) -> bool:
        return self.who == "all" or (group == 0) == (self.who == "alice")

    def turns(self, samples: int, seed: int) -> Shares:
        """For each sample the share of the rounds after which it is called by the new concept."""
        if self.kind == "sudden":
            return np.full(samples, self.at)
        return self.at + (self.until - self.at) * generator(seed, "drift").random(samples)


def cycle(classes: int, k: int, seed: int, *words: str | int) -> Indices:
    """A permutation that moves exactly k classes, each to the place of the next."""
    if k > classes:
        raise WaffleError(f"{words[0]}: expected at most the {classes} labels that there are, got {k}")
    moved = generator(seed, *words).choice(classes, k, replace=False)
    permutation = np.arange(classes)
    permutation[moved] = np.roll(moved, 1)
    return permutation
