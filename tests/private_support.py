"""A private round in one process, with faults: used by the tests of `waffle_fl.privacy`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from waffle_fl.privacy.agent import MaskingAgent, Numbered
from waffle_fl.privacy.keys import pair_secrets, public_bytes
from waffle_fl.privacy.messages import Announcement, MaskedSums, Opening, Revealed, RoundId
from waffle_fl.privacy.server import MaskingServer


def entropy_of(*words: Any) -> Any:
    """Return a source of bytes for tests: the same for the same words."""
    count = 0

    def draw(length: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_256(repr((words, count)).encode()).digest(length)

    return draw


@cache
def secrets_of(job: str, agents: int) -> tuple[Mapping[int, bytes], ...]:
    """Return the pairwise secrets of each agent."""
    keys = [X25519PrivateKey.from_private_bytes(entropy_of(job, i)(32)) for i in range(agents)]
    publics = {i: public_bytes(key) for i, key in enumerate(keys)}
    return tuple(pair_secrets(job, i, key, publics) for i, key in enumerate(keys))


@dataclass
class PrivateRound:
    """The agents and the server of one round, and every message that the server has received."""

    agents: int
    at: RoundId = RoundId("test", 1)
    floors: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        group, secrets = range(self.agents), secrets_of(self.at.job, self.agents)
        self.sides = [
            MaskingAgent(
                i, group, self.at, secrets[i], self.floors.get(i, 1.0), entropy_of(self.seed, self.at, "agent", i)
            )
            for i in group
        ]
        self.openings: list[Opening] = []
        self.masked: list[MaskedSums] = []
        self.revealed: list[Revealed] = []

    def open(self, length: int, absent: Collection[int] = (), unit: float = 1.0) -> MaskingServer:
        """Exchange the shares of all agents but the absent ones."""
        self.server = MaskingServer(range(self.agents), self.at, {"dy": (length, unit)})
        self.openings = [side.open() for side in self.sides if side.agent not in absent]
        for agent, delivery in self.server.deliver(self.openings).items():
            self.sides[agent].receive(delivery)
        return self.server

    def contribute(
        self, rows: np.ndarray, weights: Mapping[int, float], silent: Collection[int] = (), unit: float = 1.0
    ) -> Announcement:
        """Collect the masked sums of all contributors but the silent ones."""
        announced = self.server.announce({"dy": dict(weights)})
        self.masked = [
            self.sides[i].contribute(announced, {"dy": Numbered(rows[i], unit)})
            for i in announced.contributors
            if i not in silent
        ]
        return announced

    def unmask(self, announced: Announcement, gone: Collection[int] = ()) -> np.ndarray:
        """Return the sum, with the shares of all agents but those that are gone."""
        request = self.server.request(self.masked)
        opened = {opening.agent for opening in self.openings}
        self.revealed = [
            side.reveal(request, announced) for side in self.sides if side.agent in opened and side.agent not in gone
        ]
        return self.server.sums(self.revealed)["dy"]


def rows_of(agents: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(agents, length)) / length**0.5


def words_of(rows: np.ndarray, weights: Mapping[int, float], arrived: Collection[int]) -> np.ndarray:
    """Return the sum that the server should read: the rounded, weighted rows of the agents that have arrived."""
    steps = sum(np.floor(weights[i] * rows[i] * 2.0**24 + 0.5) for i in arrived)
    return np.asarray(steps * 2.0**-24)
