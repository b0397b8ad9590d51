"""Partial participation: the agents that take part in a round.

The cohort of a round depends only on the run's seed, the round and the agents that have samples. Its size is constant,
so every round trains a stack of the same shape. Alice always takes part where the training depends on her; a method
that trains the same for every Alice samples without regard to her, so that it still trains once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from waffle_fl.algorithms import Algorithm
from waffle_fl.engines.aggregation import Registered
from waffle_fl.engines.run_spec import RoundSettings, RunSpec
from waffle_fl.engines.tree import replace_rows, tree_map
from waffle_fl.randomness import derive, noise

FEWEST = 2  # agents in a cohort: with one there is no federation


def cohort_size(able: int, share: float) -> int:
    """Return the number of agents per round, of `able` agents with samples: the share, rounded, and at least two."""
    return min(able, max(FEWEST, math.floor(share * able + 0.5)))


class Cohorts:
    """The agents of one run that take part in each round; a method may have rounds of all agents (`asks_all`)."""

    def __init__(
        self,
        algorithm: Algorithm,
        samples: Sequence[int],
        ids: Sequence[int],
        alice: int,
        seed: int,
        rounds: int,
        share: float,
        needs_alice: bool = False,
    ) -> None:
        self.agents, self._seed, self._rounds, self._all = len(samples), seed, rounds, share == 1
        self._asks_all = getattr(algorithm, "asks_all", None)
        self._able = torch.tensor([i for i, n in enumerate(samples) if n], dtype=torch.int64)
        self._ids = torch.tensor(ids)[self._able]
        needs_alice = needs_alice or getattr(algorithm, "for_alice", False)
        self._alice = self._able == alice if needs_alice else torch.zeros_like(self._able, dtype=torch.bool)
        self._size = cohort_size(len(self._able), share)
        self._latest: tuple[int, tuple[int, ...]] = 0, ()

    def __call__(self, r: int) -> tuple[int, ...]:
        """Return the agents of round r, in order; the latest round is kept."""
        if self._latest[0] != r:
            self._latest = r, self._drawn(r)
        return self._latest[1]

    def _drawn(self, r: int) -> tuple[int, ...]:
        if self._all or (self._asks_all and self._asks_all(r, self._rounds, self.agents)):
            return tuple(range(self.agents))
        key = torch.tensor([derive(self._seed, "participation", r)])
        draws = noise(key, int(self._ids.max()) + 1)[0][self._ids].masked_fill(self._alice, -1)
        drawn = draws.argsort(stable=True)[: self._size]
        return tuple(self._able[drawn].sort().values.tolist())


def cohorts_of(spec: RunSpec, settings: RoundSettings) -> Cohorts:
    """Return the agents that take part in each round of a run."""
    f, s = spec.federation, settings
    facts = spec.algorithm, f.samples.tolist(), f.ids, f.alice, spec.seed
    return Cohorts(*facts, s.rounds, s.participation, s.needs_alice)


def asking(known: Registered, cohort: Sequence[int]) -> Registered:
    """Return what the server knows in a round of these agents."""
    if len(cohort) == len(known.samples):
        return known
    rows = torch.tensor(cohort, device=known.asked.device)
    return known._replace(asked=torch.zeros_like(known.asked).index_fill(0, rows, True))


def expecting(algorithm: Algorithm, server: Any, cohort: Sequence[int], known: Registered) -> Any:
    """Return the server's state before a round of these agents."""
    if len(cohort) == len(known.samples) or not hasattr(algorithm, "expect"):
        return server
    return algorithm.expect(server, asking(known, cohort).asked)


def for_all_agents(cohort: Sequence[int], before: Any, agents: Any, up: Any, known: Registered) -> tuple[Any, Any]:
    """Return states and updates of all agents from those of the cohort: the others keep their state and send zeros."""
    if len(cohort) == len(known.samples):
        return agents, up
    rows = torch.tensor(cohort, device=known.asked.device)
    sent = tree_map(lambda field: field.new_zeros(len(known.samples), *field.shape[1:]).index_copy(0, rows, field), up)
    return replace_rows(before, rows, agents), sent
