"""Aggregation of rounds in which the server sees no single update, with all agents in one process.

The agents' and the server's side are those of `waffle_fl.privacy`; every message of a round is made and read. Keys and
random bytes derive from the run's seed: a simulation has no secrets, and the same config gives the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from waffle_fl.algorithms import Net, Round
from waffle_fl.algorithms.contract import Rows, Seen, Weights, lengths, row_of, sums_of
from waffle_fl.engines.aggregation import Aggregated, Registered, admit, recorded
from waffle_fl.engines.masked_guard import screened
from waffle_fl.engines.run_spec import RoundSettings, RunSpec
from waffle_fl.engines.tree import where_rows
from waffle_fl.errors import WaffleError
from waffle_fl.guard import OK, TOO_LONG
from waffle_fl.privacy import ring
from waffle_fl.privacy.agent import MaskingAgent, Numbered
from waffle_fl.privacy.contributors import effective, respect_floors
from waffle_fl.privacy.exact_product import dealer_for
from waffle_fl.privacy.keys import pair_secrets, public_bytes
from waffle_fl.privacy.messages import ProductWord, RoundId
from waffle_fl.privacy.server import MaskingServer
from waffle_fl.privacy.shamir import Entropy
from waffle_fl.randomness import derive, noise

USUAL = {"stats": 256.0}  # the size of usual numbers of a part, if not 1; `MaskedRounds.unit_of` has that of updates


class MaskedRounds:
    """The private rounds of one run."""

    def __init__(self, spec: RunSpec, settings: RoundSettings) -> None:
        self.algorithm, self.federation, self.seed, self.settings = (
            spec.algorithm,
            spec.federation,
            spec.seed,
            settings,
        )
        self._own_checks = replace(settings, guard="off")  # those that an agent makes of its own update
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
        up, now, codes = admit(algorithm, server, up, present, known, r, self._own_checks)
        down: Any = algorithm.broadcast(server, everyone)
        method: Any = algorithm
        compared = method.compared_rows(down, before, up, now.steps)
        summed = method.summed_rows(down, before, up, now.steps)
        now, codes = self._only_what_fits(now, codes, summed, compared)
        exchange = Exchange(self, now, attempt, {name: _numpy(rows) for name, rows in summed.items()})
        usable = bool(now.received[known.alice])  # otherwise the round is repeated
        sends = usable and not self._alone(server, now)
        distances = self._distances(exchange, compared if sends else {}, now)
        if sends and self.settings.guard != "off":
            of_updates = distances if "dy" in compared else self._distances(exchange, {"dy": up.dy}, now, "guard")
            directions = min(up.dy.shape[1], self.settings.sketch_size)
            now, codes = screened(algorithm, server, before, up, of_updates, directions, now, codes)
        length = row_of(up.dy, known.alice).double().norm() if getattr(algorithm, "reads_length", False) else None
        server, weights, info = method.weigh(server, Seen(distances, length), now)
        weights = self._respected(weights, now)
        shares = weights["dy"].tolist()
        if not usable or shares.count(0.0) >= everyone - 1:  # Alice trains on alone; nothing is sent
            sums = sums_of(weights, summed)
        else:
            sums = exchange.sums(weights, present.device)
        server, agents = method.combine(server, sums, now), where_rows(now.intact, agents, before)
        net = algorithm.personal(server, agents, everyone)
        own = Net(row_of(net.params, known.alice), row_of(net.stats, known.alice))
        facts = {"contributors": effective(shares), "uploaded": float(exchange.uploaded)}
        measured = recorded({**info._asdict(), "weights": weights["dy"], **facts}, known.alice)
        return Aggregated(server, agents, own, {**measured, "received": now.received, "codes": codes})

    def unit_of(self, name: str, r: int) -> float:
        """Return the unit of a part: updates are as large as the learning rate makes them."""
        sgd = self.algorithm.sgd
        return ring.unit_for(10 * sgd.lr * sgd.lr_decay ** (r - 1) if name == "dy" else USUAL.get(name, 1.0))

    def entropy(self, agent: int, *words: int | str) -> Entropy:
        """Return an agent's source of random bytes, which depends only on the run's seed and the words."""
        draws, start = count(), derive(self.seed, "masked", self.federation.ids[agent], *words)
        return lambda length: hashlib.shake_256(f"{start}/{next(draws)}".encode()).digest(length)

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

    def _only_what_fits(
        self, now: Round, codes: Tensor, summed: Mapping[str, Rows], compared: Mapping[str, Rows]
    ) -> tuple[Round, Tensor]:
        """Return the round without the agents whose numbers a sum or a distance could not hold."""
        fits = torch.ones_like(now.received)
        for name, rows in summed.items():
            largest = rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(len(rows))
            fits &= largest <= ring.largest(ring.SUM_BITS) * self.unit_of(name, now.r)
        for name, rows in compared.items():
            fits &= lengths(rows) <= ring.LONGEST * self.unit_of(name, now.r)
        codes = torch.where(now.received & ~fits & (codes == OK), TOO_LONG, codes)
        return now._replace(received=now.received & fits, intact=now.intact & fits), codes

    def _alone(self, server: Any, now: Round) -> bool:
        """Whether Alice holds all weight, even if all updates were equal to hers: then none is compared."""
        if not getattr(self.algorithm, "for_alice", False):
            return False
        equal = Seen(torch.zeros_like(now.samples, dtype=torch.float64), torch.ones_like(now.alice).double())
        method: Any = self.algorithm
        return bool(method.weigh(server, equal, now)[1]["dy"][now.alice] == 1)

    def _distances(
        self, exchange: Exchange, compared: Mapping[str, Rows], now: Round, purpose: str = "weights"
    ) -> Weights:
        """Return the distance of each agent from Alice, as the server learns it."""
        distances = torch.zeros(len(now.received), dtype=torch.float64)
        for name, rows in compared.items():
            unit, numbers = self.unit_of(name, now.r), _numpy(rows)
            if self.settings.masked_distances == "dealer" and purpose == "weights":
                found = exchange.exact_distances(numbers, unit)
            else:
                found = exchange.distances(numbers, unit, self.settings.sketch_size, purpose)
            for agent, distance in found.items():
                distances[agent] = distance
        return distances.to(now.received.device)

    def _respected(self, weights: Mapping[str, Weights], now: Round) -> Mapping[str, Weights]:
        """Return the weights without agents whose floor is not reached."""
        given = weights["dy"].tolist()
        alice = int(now.alice) if getattr(self.algorithm, "for_alice", False) else None
        allowed = respect_floors(given, self._floors, alice)
        if any(given) and not any(allowed):
            raise WaffleError(
                f"min_contributors: expected at most {effective(given):.2f}, the effective number of agents in round "
                f"{now.r}, got {self.settings.min_contributors:g}"
            )
        if not any(w != 0 and a == 0 for w, a in zip(given, allowed, strict=True)):
            return weights
        return dict.fromkeys(weights, weights["dy"].new_tensor(allowed))


class Exchange:
    """The messages of one round, from the first to the sums; `uploaded` counts the bytes that the agents send."""

    def __init__(self, run: MaskedRounds, now: Round, attempt: int, parts: Mapping[str, Any]) -> None:
        self._run, self._now, self._attempt, self._parts = run, now, attempt, parts
        self._alice, self.uploaded = int(now.alice), 0
        asked = now.samples > 0 if now.asked is None else now.asked & (now.samples > 0)
        self._group: list[int] = asked.nonzero().flatten().tolist()
        self._open = [i for i in self._group if now.received[i]]

    @cached_property
    def _sides(self) -> tuple[MaskingServer, dict[int, MaskingAgent]]:
        """The server and the agents after the exchange of shares."""
        run, at = self._run, RoundId(self._run.job, self._now.r, self._attempt)
        layout = {name: (rows.shape[1], run.unit_of(name, self._now.r)) for name, rows in self._parts.items()}
        server, words = MaskingServer(self._group, at, layout), (self._now.r, self._attempt)
        floor, secrets = run.settings.min_contributors, run.secrets
        agents = {i: MaskingAgent(i, self._group, at, secrets[i], floor, run.entropy(i, *words)) for i in self._open}
        openings = [side.open() for side in agents.values()]
        self.uploaded += sum(opening.size for opening in openings)
        for agent, delivery in server.deliver(openings).items():
            agents[agent].receive(delivery)
        return server, agents

    def distances(self, rows: Any, unit: float, size: int, purpose: str) -> dict[int, float]:
        """Return the distance of each agent from Alice, as the server reads it from sketches."""
        server, agents = self._sides
        sketches = []
        for i in self._open:
            if i != self._alice:
                sketches.append(agents[i].sketch(self._alice, rows[i], unit, size, purpose))
                sketches.append(agents[self._alice].sketch(i, rows[self._alice], unit, size, purpose))
        self.uploaded += sum(sketch.size for sketch in sketches)
        return server.distances(sketches, self._alice, unit)

    def exact_distances(self, rows: Any, unit: float) -> dict[int, float]:
        """Return the distance of each agent from Alice, as the server reads it from products with a dealer."""
        server, agents = self._sides
        hers, count = agents[self._alice], rows.shape[1]
        sent: list[ProductWord] = []
        for i in self._open:
            if i != self._alice:
                dealer = dealer_for(i, self._alice, self._open)
                dealt = agents[dealer].deal(i, self._alice, count)
                to_alice = agents[i].mask_vector(self._alice, rows[i], unit, dealer, hers=False)
                to_agent = hers.mask_vector(i, rows[self._alice], unit, dealer, hers=True)
                words = agents[i].product_word(to_agent, dealt), hers.product_word(to_alice, None)
                self.uploaded += sum(m.size for m in (dealt, to_alice, to_agent)) + sum(w.size for w in words)
                sent.extend(words)
        return server.exact_distances(sent, self._alice, unit)

    def sums(self, weights: Mapping[str, Weights], device: torch.device) -> dict[str, Tensor]:
        """Return the weighted sums that the server reads."""
        server, agents = self._sides
        tables = {name: dict(enumerate(table.tolist())) for name, table in weights.items()}
        sent = {name: {i: tables[name][i] for i in self._open} for name in self._parts}
        announced = server.announce(sent)
        masked = [agents[i].contribute(announced, self._numbered(i)) for i in announced.contributors]
        request = server.request(masked)
        revealed = [side.reveal(request, announced) for side in agents.values()]
        self.uploaded += sum(message.size for message in masked) + sum(shares.size for shares in revealed)
        return {name: torch.from_numpy(total).to(device) for name, total in server.sums(revealed).items()}

    def _numbered(self, agent: int) -> dict[str, Numbered]:
        """Return an agent's parts with the draws that round them. These need not be secret."""
        run, r = self._run, self._now.r
        key = torch.tensor([derive(run.seed, "masked rounding", run.federation.ids[agent], r, self._attempt)])
        lengths = [rows.shape[1] for rows in self._parts.values()]
        draws = np.split(noise(key, sum(lengths))[0].numpy() * 2.0**-63, np.cumsum(lengths)[:-1])
        return {
            name: Numbered(rows[agent], run.unit_of(name, r), some)
            for (name, rows), some in zip(self._parts.items(), draws, strict=True)
        }


def _numpy(rows: Rows) -> Any:
    return rows.double().cpu().numpy()
