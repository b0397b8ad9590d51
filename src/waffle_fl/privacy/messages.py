"""The messages of a private round. None of them holds a key, so no function of them alone can unmask an update.

    1  Opening       agent -> server   shares of its secrets, encrypted for each agent; relayed as Delivery
    2  MaskedSketch  agent -> server   with Alice: the server learns one distance per pair
    3  Announcement  server -> agents  the weights of all agents
    4  MaskedSums    agent -> server   its weighted numbers, masked
    5  RevealRequest server -> agents  whose sums arrived; each agent sends shares: Revealed

`phases` combines them into one request and one reply per agent and phase.

FedAvg and SCAFFOLD need no distances, so they have no step 2. Exact distances have three messages instead: DealerWord
dealer -> agent, MaskedVector agent <-> Alice, ProductWord agent -> server.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from waffle_fl.privacy.ring import LongWords, Words

SALT_BYTES = 16
FEWEST = 4  # agents in a private round
CHECK_WORDS = 4  # zeros at the end of the sums: masks that do not cancel are recognised


@dataclass(frozen=True)
class RoundId:
    """The round to which masks belong. Another attempt, with other batches, and another session have other masks."""

    job: str
    round: int
    attempt: int = 0
    session: int = 0  # one more for each time that a server begins the round; an agent never takes part in it twice
    received: str = ""  # a digest of the settings and the model that it has received; others must have the same
    part: str = ""  # the sum, if a round has more than one: each has secrets of its own

    @property
    def context(self) -> bytes:
        return f"{self.job}\n{self.round}\n{self.attempt}\n{self.session}\n{self.received}\n{self.part}".encode()


@dataclass(frozen=True)
class Opening:
    """An agent's secrets of a round, as shares that only their recipients can read, and digests of these shares."""

    agent: int
    salt: bytes
    sealed_seeds: bytes  # the seeds of its pair masks, encrypted with a key that is shared, too
    shares: Mapping[int, bytes]  # by recipient, encrypted: shares of the self mask's secret and of that key; a secret
    self_digests: Mapping[int, bytes]  # of the shares by holder, so that a false share is recognised
    key_digests: Mapping[int, bytes]

    @property
    def size(self) -> int:
        tables = (self.shares, self.self_digests, self.key_digests)
        return len(self.salt) + len(self.sealed_seeds) + sum(len(v) for table in tables for v in table.values())


@dataclass(frozen=True)
class Delivery:
    """What the server relays to one agent: who takes part, and the encrypted shares for this agent."""

    salts: Mapping[int, bytes]  # by agent
    shares: Mapping[int, bytes]  # by sender


@dataclass(frozen=True)
class MaskedSketch:
    """The sketch of an agent's update for one partner, under masks that the two share. Alice has one per partner."""

    agent: int
    partner: int
    content: bytes  # `ring.packed` words; the last one holds the products

    @property
    def size(self) -> int:
        return len(self.content)


@dataclass(frozen=True)
class DealerWord:
    """What the dealer of an agent's exact distance sends to it, masked for it."""

    dealer: int
    agent: int
    words: LongWords

    @property
    def size(self) -> int:
        return self.words.nbytes


@dataclass(frozen=True)
class MaskedVector:
    """An agent's update for one partner, under a mask that the dealer has given it; relayed to the partner."""

    agent: int
    partner: int
    words: LongWords
    tag: bytes  # HMAC with a key of the two: an inner product with a vector of the server would show a number of x

    @property
    def size(self) -> int:
        return self.words.nbytes + len(self.tag)


@dataclass(frozen=True)
class ProductWord:
    """One of the two words whose sum is the squared distance of an agent and Alice."""

    agent: int
    partner: int
    words: LongWords

    @property
    def size(self) -> int:
        return self.words.nbytes


@dataclass(frozen=True)
class Announcement:
    """The weights of all agents, by part of the sum. Masks are bound to them."""

    weights: Mapping[str, Mapping[int, float]]

    @property
    def contributors(self) -> tuple[int, ...]:
        """The agents with a weight in any part, in order."""
        return tuple(sorted({i for table in self.weights.values() for i, weight in table.items() if weight > 0}))

    def binding(self, transcript: bytes) -> bytes:
        """Return a digest of the round so far: agents that received other weights add masks that do not cancel."""
        digest = hashlib.sha256(transcript)
        for part, table in self.weights.items():
            name = part.encode()
            digest.update(struct.pack("<qq", len(name), len(table)) + name)  # other weights never have the same bytes
            for agent, weight in sorted(table.items()):
                digest.update(struct.pack("<qd", agent, weight))
        return digest.digest()


@dataclass(frozen=True)
class MaskedSums:
    """One agent's weighted numbers, masked. Only the sum over all contributors can be read."""

    agent: int
    words: Words

    @property
    def size(self) -> int:
        return self.words.nbytes


@dataclass(frozen=True)
class RevealRequest:
    """The contributors whose sums arrived, and the others."""

    arrived: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Revealed:
    """One holder's shares: of the self masks of agents whose sums arrived, of the keys of those whose sums did not."""

    holder: int
    self_shares: Mapping[int, bytes]
    key_shares: Mapping[int, bytes]

    @property
    def size(self) -> int:
        return sum(len(share) for table in (self.self_shares, self.key_shares) for share in table.values())

    @property
    def senders(self) -> set[int]:
        return {self.holder}


def transcript_of(at: RoundId, group: Sequence[int], salts: Mapping[int, bytes]) -> bytes:
    """Return a digest of the agents that were asked, and of who opened the round, with which salts."""
    digest = hashlib.sha256(at.context + struct.pack(f"<q{len(group)}q", len(group), *group))
    for agent, salt in sorted(salts.items()):
        digest.update(struct.pack("<q", agent) + salt)
    return digest.digest()
