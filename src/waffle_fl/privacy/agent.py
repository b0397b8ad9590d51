"""The agent's side of a private round: what it sends in each step, and what it refuses."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from waffle_fl.errors import WaffleError
from waffle_fl.privacy import contributors, exact_product, ring, rotation, shamir, sketch
from waffle_fl.privacy.exact_product import dealer_for
from waffle_fl.privacy.masks import KEY_BYTES, derive, pair_mask, seal_seeds, self_mask
from waffle_fl.privacy.messages import (
    CHECK_WORDS,
    FEWEST,
    SALT_BYTES,
    Announcement,
    DealerWord,
    Delivery,
    MaskedSketch,
    MaskedSums,
    MaskedVector,
    Opening,
    ProductWord,
    Revealed,
    RevealRequest,
    RoundId,
    transcript_of,
)
from waffle_fl.privacy.ring import LongWords, Numbers, Residues, Words

NONCE_BYTES = 12


class Numbered(NamedTuple):
    """Numbers of one agent, their unit, and the draws that round them."""

    numbers: Numbers
    unit: float
    draws: Numbers | float = 0.5


class DealtVector(NamedTuple):
    """An agent's own update for one partner."""

    words: LongWords
    key: bytes  # of its dealer
    hers: bool  # whether this agent is Alice


class MaskingAgent:
    """One agent in one round. Each step is taken once, so no update is sent under two sets of weights or shares."""

    def __init__(
        self,
        agent: int,
        group: Sequence[int],
        at: RoundId,
        pair_secrets: Mapping[int, bytes],
        floor: float = 1.0,
        entropy: shamir.Entropy = secrets.token_bytes,
    ) -> None:
        if len(group) < FEWEST:
            raise WaffleError(f"expected at least {FEWEST} agents in a private round, got {len(group)}")
        self.agent, self.group, self.at, self.floor = agent, tuple(group), at, floor
        self._pairs, self._entropy = pair_secrets, entropy
        self._salt, self._self_secret, self._key_secret, self._common = (
            entropy(n) for n in (SALT_BYTES, shamir.SECRET_BYTES, shamir.SECRET_BYTES, KEY_BYTES)
        )
        self._seeds = {other: derive(pair_secrets[other], "mask seed", at.context) for other in self._others()}
        self._held: dict[int, bytes] = {}  # by sender: a share of its self secret, one of its key, and a common secret
        self._vectors: dict[int, DealtVector] = {}  # by partner
        self._taken: set[str] = set()
        self._opened: frozenset[int] = frozenset()
        self._transcript = b""
        self._announced: Announcement | None = None

    def open(self) -> Opening:
        """Return the shares of this agent's secrets, each encrypted for its holder."""
        self._take("open")
        threshold = shamir.threshold_for(len(self.group))
        own = shamir.split(self._self_secret, self.group, threshold, self._entropy)
        key = shamir.split(self._key_secret, self.group, threshold, self._entropy)
        self._held[self.agent] = own[self.agent] + key[self.agent] + self._common
        return Opening(
            self.agent,
            self._salt,
            seal_seeds(self._key_secret, self._seeds, self.at.context),
            {other: self._encrypt(own[other] + key[other] + self._common, other) for other in self._others()},
            {holder: hashlib.sha256(share).digest() for holder, share in own.items()},
            {holder: hashlib.sha256(share).digest() for holder, share in key.items()},
        )

    def receive(self, delivery: Delivery) -> None:
        """Keep the shares of the other agents. A share that cannot be read is not kept."""
        self._take("receive")
        own = delivery.salts.get(self.agent) == self._salt and set(delivery.salts) <= set(self.group)
        if not own or any(len(salt) != SALT_BYTES for salt in delivery.salts.values()):
            raise WaffleError("expected this agent's own salt among those of its group, got another: refuse the round")
        if len(delivery.salts) < shamir.threshold_for(len(self.group)):
            raise WaffleError(f"expected more agents in the round, got {len(delivery.salts)} of {len(self.group)}")
        self._opened, self._transcript = frozenset(delivery.salts), transcript_of(self.at, self.group, delivery.salts)
        for sender in delivery.salts.keys() & delivery.shares.keys() - {self.agent}:
            try:
                self._held[sender] = self._decrypt(delivery.shares[sender], sender)
            except InvalidTag:
                continue

    def sketch(self, partner: int, numbers: Numbers, unit: float, alice: int, purpose: str = "dy") -> MaskedSketch:
        """Return the masked sketch of an update for one partner. Two agents that both act as Alice use other masks."""
        self._take(f"sketch {purpose} for {partner}")
        _check_length(numbers, unit)
        if alice not in (self.agent, partner):
            raise WaffleError("expected Alice among the two compared agents: refuse the round")
        secret = derive(self._pairs[partner], f"sketch {purpose} for {alice}", self._transcript)
        words = sketch.words_of(numbers, unit, secret, hers=self.agent == alice)
        return MaskedSketch(self.agent, partner, ring.packed(words))

    def common_secret(self, agent: int, purpose: str) -> bytes:
        """Return a secret that this agent has given to all agents of the round, and not to the server."""
        if agent not in self._held:
            raise WaffleError(f"expected a secret that all agents have from agent {agent}, got none: refuse the round")
        return derive(self._held[agent][2 * shamir.SHARE_BYTES :], purpose, self._transcript)

    def deal(self, agent: int, alice: int, count: int) -> DealerWord:
        """Return what this agent sends as the dealer of a pair; it does not depend on any update."""
        self._take(f"deal for {agent}")
        self._check_dealer(agent, alice, self.agent)
        own, hers = (self._dealt_key(self._pairs[party], agent) for party in (agent, alice))
        return DealerWord(self.agent, agent, exact_product.dealer_word(own, hers, count))

    def mask_vector(self, partner: int, numbers: Numbers, unit: float, dealer: int, hers: bool) -> MaskedVector:
        """Return this agent's update for its partner; `hers` says that this agent is Alice."""
        self._take(f"vector for {partner}")
        _check_length(numbers, unit)
        agent, alice = (partner, self.agent) if hers else (self.agent, partner)
        self._check_dealer(agent, alice, dealer)
        key = self._dealt_key(self._pairs[dealer], agent)
        dealt = exact_product.alice_of(key, len(numbers)).mask if hers else exact_product.mask_of(key, len(numbers))
        self._vectors[partner] = DealtVector(exact_product.encode(numbers, unit), key, hers)
        words = self._vectors[partner].words + dealt
        return MaskedVector(self.agent, partner, words, self._tag(self.agent, partner, words))

    def product_word(self, received: MaskedVector, dealt: DealerWord | None) -> ProductWord:
        """Return one word of a squared distance, for the partner whose vector was received; Alice needs no `dealt`.

        A server that could choose the vector, or who acts as Alice, would learn inner products with the update.
        """
        partner = received.agent
        self._take(f"word for {partner}")
        own, key, hers = self._vectors[partner]
        if not hmac.compare_digest(received.tag, self._tag(partner, self.agent, received.words)):
            raise WaffleError(f"expected the vector that agent {partner} has sent, got another one: refuse the round")
        if hers != (dealt is None):
            raise WaffleError("expected a dealer's word unless this agent is Alice: refuse the round")
        pair_key = derive(self._pairs[partner], "product", self._transcript)
        if dealt is None:
            words = exact_product.alice_word(own, received.words, exact_product.alice_of(key, len(own)), pair_key)
        else:
            party = exact_product.agent_of(key, len(own), dealt.words)
            words = exact_product.agent_word(own, received.words, party, pair_key)
        return ProductWord(self.agent, partner, words)

    def _check_dealer(self, agent: int, alice: int, dealer: int) -> None:
        """Refuse a dealer that the server has chosen: with it, the server could read both updates."""
        if len(self._opened - {agent, alice}) < 1 or dealer_for(agent, alice, sorted(self._opened)) != dealer:
            raise WaffleError(f"expected another dealer for agent {agent}, got agent {dealer}: refuse the round")

    def _tag(self, sender: int, recipient: int, words: LongWords) -> bytes:
        other = recipient if sender == self.agent else sender
        key = derive(self._pairs[other], f"vector from {sender}", self._transcript)
        return hmac.digest(key, words.astype("<u8").tobytes(), "sha256")

    def _dealt_key(self, secret: bytes, agent: int) -> bytes:
        """Return the key of what a dealer and its partner share for the distance of this agent from Alice."""
        return derive(secret, f"dealt for {agent}", self._transcript)

    def accept(self, announced: Announcement) -> None:
        """Bind this agent to the weights of its only sum; refuse them if it has no part in it or too large a one."""
        self._take("contribute")
        self._check_weights(announced)
        if self.agent not in announced.contributors:
            raise WaffleError(f"agent {self.agent} has no weight in this round, so it sends nothing")
        if "reveal" in self._taken:  # the secrets of the round may be known by now
            raise WaffleError("expected a request for a sum before that for shares: refuse the round")
        self._check_floor(announced, announced.contributors)
        self._announced = announced

    def contribute(self, announced: Announcement, parts: Mapping[str, Numbered]) -> MaskedSums:
        """Return this agent's weighted numbers, masked; refuse weights with too few effective contributors."""
        self.accept(announced)
        words = [
            self._weighted(parts[name], announced.weights[name].get(self.agent, 0.0)) for name in announced.weights
        ]
        total = np.concatenate([*words, np.zeros(CHECK_WORDS, dtype=np.uint32)])
        return MaskedSums(self.agent, total + self._masks(announced, len(total), None))

    def contribute_rotated(self, announced: Announcement, parts: Mapping[str, Numbered], alice: int) -> MaskedSums:
        """Return the same, rotated by a secret of Alice that all agents have: only the lengths of sums can be read."""
        self.accept(announced)
        residues = [
            rotation.rotated(
                announced.weights[name].get(self.agent, 0.0) * parts[name].numbers,
                parts[name].unit,
                self.common_secret(alice, f"rotation of {name}"),
            )
            for name in announced.weights
        ]
        moduli = rotation.moduli_of_sum([len(parts[name].numbers) for name in announced.weights])
        total = np.concatenate([*residues, np.zeros(CHECK_WORDS, dtype=np.int64)])
        total = (total + self._masks(announced, len(total), moduli)) % moduli
        return MaskedSums(self.agent, total.astype(np.uint32))

    def _masks(self, announced: Announcement, length: int, moduli: Residues | None) -> Any:
        """Return the sum of all masks of this agent."""
        context = announced.binding(self._transcript)
        total = self_mask(self._self_secret, context, length, moduli)
        for other in announced.contributors:
            if other != self.agent:
                total = total + pair_mask(self._seeds[other], self.agent, other, context, length, moduli)
        return total

    def reveal(self, request: RevealRequest, announced: Announcement) -> Revealed:
        """Return shares for either the self mask or the key of each contributor, never for both.

        `announced` is known to an agent without a weight, too; a contributor refuses other weights than its own.
        """
        self._take("reveal")
        self._check_weights(announced)
        both = set(request.arrived) & set(request.missing)
        if both or {*request.arrived, *request.missing} != set(announced.contributors):
            raise WaffleError("expected each contributor either among the arrived or the missing: refuse the round")
        if self._announced is not None and self._announced != announced:
            raise WaffleError("expected the weights that this agent has used, got others: refuse the round")
        most = len(self.group) - shamir.threshold_for(len(self.group))
        if len(request.missing) > most:
            raise WaffleError(f"expected at most {most} missing agents, got {len(request.missing)}: refuse the round")
        self._check_floor(announced, request.arrived)
        self._announced = announced
        size = shamir.SHARE_BYTES
        return Revealed(
            self.agent,
            {i: self._held[i][:size] for i in request.arrived if i in self._held},
            {i: self._held[i][size : 2 * size] for i in request.missing if i in self._held},
        )

    def _weighted(self, part: Numbered, weight: float) -> Words:
        if not ring.holds(part.numbers, part.unit, ring.SUM_BITS):
            limit = ring.largest(ring.SUM_BITS) * part.unit
            raise WaffleError(f"expected numbers of an update up to {limit:g}, got larger ones: lower lr, or set clip")
        return ring.encode(weight * part.numbers, part.unit, ring.SUM_BITS, part.draws)

    def _check_weights(self, announced: Announcement) -> None:
        """Refuse weights that are not shares of the agents that have opened the round."""
        for table in announced.weights.values():
            shares = all(0 <= weight <= 1 for weight in table.values()) and sum(table.values()) <= 1 + 1e-9
            if not shares or not set(announced.contributors) <= self._opened:
                raise WaffleError("expected weights from 0 to 1 of agents in the round, got others: refuse the round")

    def _check_floor(self, announced: Announcement, arrived: Sequence[int]) -> None:
        """Refuse a sum in which this agent could be recognised. Also a server that lies is held to the floor."""
        for table in announced.weights.values():
            floor = self.floor if table.get(self.agent, 0.0) > 0 else 1.0
            number = contributors.effective([table.get(i, 0.0) for i in arrived])
            if sum(table.get(i, 0.0) > 0 for i in arrived) < 2 or number < floor:
                raise WaffleError(
                    f"expected at least {max(floor, 2):g} effective contributors, got {number:.2f}: this agent "
                    "takes no part in the round"
                )

    def _take(self, step: str) -> None:
        if step in self._taken:
            raise WaffleError(f"expected each step of a private round once, got a second request to {step}")
        if step not in ("open", "receive") and "receive" not in self._taken:
            raise WaffleError(f"expected the shares of the other agents first, got a request to {step}")
        self._taken.add(step)

    def _others(self) -> list[int]:
        return [i for i in self.group if i != self.agent]

    def _encrypt(self, shares: bytes, recipient: int) -> bytes:
        nonce = self._entropy(NONCE_BYTES)
        sealed = self._channel(recipient).encrypt(nonce, shares, f"{self.agent} to {recipient}".encode())
        return nonce + sealed

    def _decrypt(self, message: bytes, sender: int) -> bytes:
        nonce, sealed = message[:NONCE_BYTES], message[NONCE_BYTES:]
        return self._channel(sender).decrypt(nonce, sealed, f"{sender} to {self.agent}".encode())

    def _channel(self, other: int) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(derive(self._pairs[other], "shares", self.at.context))


def _check_length(numbers: Numbers, unit: float) -> None:
    """Raise if a distance of this vector could not be read."""
    if not sketch.fits(numbers, unit):
        limit = ring.LONGEST * unit
        raise WaffleError(f"expected an update of a length up to {limit:g}, got a longer one: lower lr, or set clip")
