"""The server's side of a private round: it relays shares, multiplies sketches and adds masked sums.

It learns one distance per pair of an agent with Alice, and one weighted sum per part. Its messages hold no keys, and
this module imports none of the agents' key pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag

from waffle_fl.errors import WaffleError
from waffle_fl.privacy import exact_product, ring, rotation, shamir, sketch
from waffle_fl.privacy.masks import open_seeds, pair_mask, self_mask
from waffle_fl.privacy.messages import (
    CHECK_WORDS,
    Announcement,
    Delivery,
    MaskedSketch,
    MaskedSums,
    Opening,
    ProductWord,
    Revealed,
    RevealRequest,
    RoundId,
    transcript_of,
)
from waffle_fl.privacy.ring import Numbers, Residues, Words


class MaskingServer:
    """The server in one round. `parts` gives the length and the unit of each part of the sum.

    Of a rotated sum only the length of each part can be read.
    """

    def __init__(
        self, group: Sequence[int], at: RoundId, parts: Mapping[str, tuple[int, float]], rotated: bool = False
    ) -> None:
        self.group, self.at, self.parts, self.rotated = tuple(group), at, dict(parts), rotated
        self.threshold = shamir.threshold_for(len(self.group))
        self.liars: list[int] = []  # holders of false shares
        self._openings: dict[int, Opening] = {}
        self._sums: dict[int, Words] = {}
        self._announced: Announcement | None = None

    def deliver(self, openings: Iterable[Opening]) -> dict[int, Delivery]:
        """Return what each agent that has opened the round receives."""
        self._openings = {opening.agent: opening for opening in openings if opening.agent in self.group}
        if len(self._openings) < self.threshold:
            raise WaffleError(f"expected {self.threshold} agents in the round, got {len(self._openings)}: retry it")
        salts = {i: opening.salt for i, opening in self._openings.items()}
        return {
            i: Delivery(salts, {j: sent.shares[i] for j, sent in self._openings.items() if i in sent.shares})
            for i in self._openings
        }

    def distances(self, sketches: Iterable[MaskedSketch], alice: int, unit: float) -> dict[int, float]:
        """Return the distance of each agent's update from Alice's, for the agents whose two sketches have arrived."""
        sent = {(one.agent, one.partner): one.content for one in sketches}
        found = {}
        for agent, partner in sent:
            own, hers = sent[agent, partner], sent.get((alice, agent), b"")
            if partner == alice and len(own) == len(hers):
                found[agent] = sketch.distance(ring.unpacked(own), ring.unpacked(hers), unit)
        return found

    def exact_distances(self, words: Iterable[ProductWord], alice: int, unit: float) -> dict[int, float]:
        """Return the distances of the agents for which both words of the squared distance have arrived."""
        sent = {(word.agent, word.partner): word.words for word in words}
        pairs = {i: (sent[i, alice], sent[alice, i]) for i, partner in sent if partner == alice and (alice, i) in sent}
        return {i: exact_product.distance(*pair, unit) for i, pair in pairs.items()}

    def announce(self, weights: Mapping[str, Mapping[int, float]]) -> Announcement:
        """Return the weights, which all agents receive. A part that they do not name is not summed."""
        self.parts = {name: self.parts[name] for name in weights}
        self._announced = Announcement(weights)
        return self._announced

    def request(self, sums: Iterable[MaskedSums]) -> RevealRequest:
        """Return which contributors' sums have arrived; the first of an agent counts."""
        for masked in sums:
            fits = len(masked.words) == self._count
            if masked.agent in self._contributors and fits and masked.agent not in self._sums:
                self._sums[masked.agent] = masked.words
        missing = tuple(i for i in self._contributors if i not in self._sums)
        return RevealRequest(tuple(sorted(self._sums)), missing)

    def sums(self, revealed: Sequence[Revealed]) -> dict[str, Numbers]:
        """Return the sum of each part over the contributors whose sums have arrived; its length if it is rotated."""
        assert self._announced is not None
        salts = {i: opening.salt for i, opening in self._openings.items()}
        context = self._announced.binding(transcript_of(self.at, self.group, salts))
        count, moduli = self._count, self._moduli
        total: Any = np.zeros(count, dtype=np.uint32 if moduli is None else np.int64)
        for words in self._sums.values():
            total = total + words
        for agent in self._sums:
            digests = self._openings[agent].self_digests
            secret = self._secret(digests, {r.holder: r.self_shares.get(agent) for r in revealed}, agent)
            total = total - self_mask(secret, context, count, moduli)
        for agent in self._contributors:
            if agent not in self._sums:
                seeds = self._seeds_of(agent, revealed)
                for other in self._sums:
                    total = total - pair_mask(seeds[other], other, agent, context, count, moduli)
        total = total if moduli is None else total % moduli
        if total[-CHECK_WORDS:].any():
            raise WaffleError(
                f"the masks of round {self.at.round} do not cancel: at least one agent has sent a false sum or uses "
                "other weights; the round is rejected, and nothing can be read"
            )
        return self._decoded(total)

    @property
    def _contributors(self) -> tuple[int, ...]:
        assert self._announced is not None
        return self._announced.contributors

    def _seeds_of(self, agent: int, revealed: Sequence[Revealed]) -> dict[int, bytes]:
        """Return the seeds of the pair masks of an agent whose sum has not arrived."""
        opening = self._openings[agent]
        secret = self._secret(opening.key_digests, {r.holder: r.key_shares.get(agent) for r in revealed}, agent)
        others = [i for i in self.group if i != agent]
        try:
            return open_seeds(secret, opening.sealed_seeds, others, self.at.context)
        except InvalidTag:
            raise WaffleError(f"agent {agent} has sealed other seeds than it shared: the round is rejected") from None

    def _secret(self, digests: Mapping[int, bytes], shares: Mapping[int, bytes | None], agent: int) -> bytes:
        """Return a shared secret from the shares that agree with their digests."""
        sound = {}
        for holder, share in shares.items():
            if share is not None and hashlib.sha256(share).digest() == digests.get(holder):
                sound[holder] = share
            elif share is not None and holder not in self.liars:
                self.liars.append(holder)
        if len(sound) < self.threshold:
            raise WaffleError(
                f"expected {self.threshold} shares of the secret of agent {agent}, got {len(sound)}: the round is "
                "rejected, and nothing can be read"
            )
        return shamir.combine({holder: sound[holder] for holder in sorted(sound)[: self.threshold]})

    @property
    def _moduli(self) -> Residues | None:
        return rotation.moduli_of_sum(length for length, _ in self.parts.values()) if self.rotated else None

    @property
    def _count(self) -> int:
        """How many words a masked sum has."""
        if self.rotated:
            return sum(len(rotation.moduli_of(length)) for length, _ in self.parts.values()) + CHECK_WORDS
        return sum(length for length, _ in self.parts.values()) + CHECK_WORDS

    def _decoded(self, total: Any) -> dict[str, Numbers]:
        start, found = 0, {}
        for name, (length, unit) in self.parts.items():
            if self.rotated:
                end = start + len(rotation.moduli_of(length))
                found[name] = np.array([rotation.length_of(total[start:end], unit)])
            else:
                end = start + length
                found[name] = ring.decode(total[start:end], unit, ring.SUM_BITS)
            start = end
        return found
