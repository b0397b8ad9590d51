"""Concept shifts: groups of agents that swap labels, and agents whose labels change during training (drift)."""

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
    """Concept shift: each group but Alice's permutes `k` labels in a cycle, drawn per group."""

    k: int
    groups: int = 2

    def __post_init__(self) -> None:
        if self.k < 2:
            raise WaffleError(f"swap: expected at least 2 labels, got {self.k}")
        check_groups("swap", self.groups)

    def concepts(self, agents: int, classes: int, alice: int, seed: int) -> Indices:
        """Return (agents, classes): the label of each class; agents of one group share a concept."""
        own = np.arange(classes)
        return np.stack(
            [
                cycle(classes, self.k, seed, "swap", group) if group else own
                for group in groups_of(agents, alice, self.groups)
            ]
        )


@dataclass(frozen=True)
class Drift:
    """Concept drift: after the share `at` of the rounds, `k` labels (0: all) change their meaning.

    "sudden" changes all samples at once, "gradual" a share of them that grows until `until`. `who` selects the groups
    that drift, each to its own concept: all but Alice's ("others"), hers only ("alice"), or "all".
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
        """Return (agents, classes): each agent's label of a class after the drift."""
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
        """Return for each sample the share of the rounds after which it has its new label."""
        if self.kind == "sudden":
            return np.full(samples, self.at)
        return self.at + (self.until - self.at) * generator(seed, "drift").random(samples)


def cycle(classes: int, k: int, seed: int, *words: str | int) -> Indices:
    """Return a permutation that moves exactly k classes in a cycle."""
    if k > classes:
        raise WaffleError(f"{words[0]}: expected at most {classes} labels, as many as the data has, got {k}")
    moved = generator(seed, *words).choice(classes, k, replace=False)
    permutation = np.arange(classes)
    permutation[moved] = np.roll(moved, 1)
    return permutation
