"""Aggregation of rounds in which the server sees no single update, with all agents in one process.

The agents' and the server's part are those of a deployment; every message of a round is made and read. Keys and random
bytes derive from the run's seed: a simulation has no secrets, and the same config gives the same numbers.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from waffle_fl.algorithms import Net
from waffle_fl.algorithms.contract import row_of
from waffle_fl.engines.aggregation import Aggregated, Registered, recorded
from waffle_fl.engines.masked_agent import RoundAgent, UpdateReader, round_agent
from waffle_fl.engines.masked_parts import TrainedRow, sizes_of
from waffle_fl.engines.masked_round import MaskedRound
from waffle_fl.engines.run_spec import RoundSettings, RunSpec
from waffle_fl.engines.tree import where_rows
from waffle_fl.privacy.agent import MaskingAgent
from waffle_fl.privacy.keys import pair_secrets, public_bytes
from waffle_fl.privacy.masks import entropy_of
from waffle_fl.privacy.messages import RoundId
from waffle_fl.privacy.shamir import Entropy
from waffle_fl.randomness import derive


class MaskedRounds:
    """The private rounds of one run."""

    def __init__(self, spec: RunSpec, settings: RoundSettings) -> None:
        self.algorithm, self.federation, self.seed = spec.algorithm, spec.federation, spec.seed
        self.settings = settings
        self._reader = UpdateReader(spec.algorithm, settings, spec.seed)
        self._floors = [settings.min_contributors] * spec.federation.agents

    def aggregate(
        self,
        r: int,
        attempt: int,
        server: Any,
        before: Any,
        agents: Any,
        up: Any,
        present: Tensor,
        known: Registered,
    ) -> Aggregated:
        """A2.13-16 for one round, from distances and sums; every agent checks its own update before it sends any."""
        algorithm, everyone = self.algorithm, len(present)
        down: Any = algorithm.broadcast(server, everyone)
        states = down, before, up
        sizes = sizes_of(algorithm, TrainedRow.of(0, states, known))
        at = RoundId(self.job, r, attempt)
        one_round = MaskedRound(algorithm, self.settings, server, known, at, sizes, self._floors)
        sides: dict[int, RoundAgent] = {}
        for i in one_round.group:
            numbers = self._reader.read(TrainedRow.of(i, states, known), self.federation.ids[i], r, attempt)
            sides[i] = round_agent(algorithm, numbers, at, int(known.alice), partial(self._side, i, one_round.group))
        while one_round.phase != "done":
            for i, request in one_round.requests.items():
                one_round.receive(i, sides[i].answer(request))
            one_round.advance()
        server, now, codes, facts = one_round.settled()
        if one_round.usable:
            method: Any = algorithm
            server = method.combine(server, one_round.sums, now)
        agents = where_rows(now.intact, agents, before)
        net = algorithm.personal(server, agents, everyone)
        own = Net(row_of(net.params, known.alice), row_of(net.stats, known.alice))
        measured = {**recorded(facts, known.alice), "received": now.received, "codes": codes}
        return Aggregated(server, agents, own, measured)

    def _side(self, agent: int, group: tuple[int, ...], at: RoundId) -> MaskingAgent:
        draw = self.entropy(agent, at.round, at.attempt, at.part)
        return MaskingAgent(agent, group, at, self.secrets[agent], self.settings.min_contributors, draw)

    def entropy(self, agent: int, *words: int | str) -> Entropy:
        """Return an agent's source of random bytes, which depends only on the run's seed and the words."""
        return entropy_of(str(derive(self.seed, "masked", self.federation.ids[agent], *words)).encode())

    @cached_property
    def secrets(self) -> list[dict[int, bytes]]:
        """The pairwise secrets of each agent."""
        agents = range(self.federation.agents)
        keys = [X25519PrivateKey.from_private_bytes(self.entropy(i, "key")(32)) for i in agents]
        publics = {i: public_bytes(key) for i, key in enumerate(keys)}
        return [pair_secrets(self.job, i, keys[i], publics) for i in agents]

    @property
    def job(self) -> str:
        return f"simulation {self.seed}"
