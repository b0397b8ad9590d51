"""The phases of a private round: one request to an agent and one reply of it per phase. They hold no keys.

open     the agent has trained; it reports whether its update can be used, and sends shares of its secrets
compare  it receives the others' shares, and sends its sketch for Alice, or Alice hers for each agent
deal     instead, with exact distances: masked vectors for each other, and the words of dealers
product  then the words whose sums are the squared distances
first    for a method with `first_weights`: weights, and a masked sum of rotated sketches, of which the length is read
unmask   it receives whose first sums have arrived, and sends shares
sum      it receives the weights of all agents, and sends its masked sum
reveal   it receives whose sums have arrived, and sends shares
alone    Alice holds all weight: the sum is her update, which she sends; no other agent sends anything

No reply of an agent but Alice's last one has a field for numbers that are not masked, except lengths that the guard,
Weight Erosion and WAFFLE read. No reply of any type can be unmasked by itself: the server needs shares of two
thirds of the agents, and gets them for one sum of a kind per round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from waffle_fl.privacy.messages import (
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
)


@dataclass(frozen=True)
class OpenRequest:
    """Asks an agent to open the round; `measured` asks for the lengths of its update and control variate."""

    measured: bool


@dataclass(frozen=True)
class OpenReply:
    """Whether the agent's update can be used (0, or a reason code of the guard), and its opening."""

    code: int
    length: float  # of its update; 0 if not asked for
    pull: float  # the length of its control variate; 0 if not asked for, or without control variates
    floor: float  # the smallest effective number of contributors that it accepts
    lengths: tuple[float, ...]  # of the rows that the method compares, if it compares directions
    openings: tuple[Opening, ...]  # one per sum; none if the update cannot be used

    @property
    def size(self) -> int:
        return sum(opening.size for opening in self.openings)

    @property
    def senders(self) -> set[int]:
        return {opening.agent for opening in self.openings}


@dataclass(frozen=True)
class CompareRequest:
    """The shares for this agent, and the agents for which it sends sketches of what each purpose compares."""

    delivery: Delivery
    partners: tuple[int, ...]
    purposes: tuple[str, ...]


@dataclass(frozen=True)
class SketchReply:
    """An agent's sketches by purpose."""

    sketches: Mapping[str, tuple[MaskedSketch, ...]]

    @property
    def size(self) -> int:
        return sum(sketch.size for some in self.sketches.values() for sketch in some)

    @property
    def senders(self) -> set[int]:
        return {sketch.agent for some in self.sketches.values() for sketch in some}


@dataclass(frozen=True)
class DealRequest:
    """The sketches that are still needed, the dealers of an agent's pairs, and the pairs for which it deals itself."""

    compare: CompareRequest
    dealers: Mapping[int, int]  # by partner
    deals_for: tuple[int, ...]


@dataclass(frozen=True)
class DealtReply:
    """An agent's sketches, its vectors for its partners, and its words as a dealer."""

    sketches: SketchReply
    vectors: tuple[MaskedVector, ...]
    words: tuple[DealerWord, ...]

    @property
    def size(self) -> int:
        return self.sketches.size + sum(v.size for v in self.vectors) + sum(word.size for word in self.words)

    @property
    def senders(self) -> set[int]:
        return self.sketches.senders | {v.agent for v in self.vectors} | {word.dealer for word in self.words}


@dataclass(frozen=True)
class ProductRequest:
    """The vectors of an agent's partners, and the dealers' words for it."""

    vectors: tuple[MaskedVector, ...]
    words: tuple[DealerWord, ...]


@dataclass(frozen=True)
class Products:
    """An agent's words of the squared distances."""

    words: tuple[ProductWord, ...]

    @property
    def size(self) -> int:
        return sum(word.size for word in self.words)

    @property
    def senders(self) -> set[int]:
        return {word.agent for word in self.words}


@dataclass(frozen=True)
class SumRequest:
    """The weights of all agents. `deliveries` holds the shares for this agent if it has not received them before."""

    announced: Announcement
    deliveries: tuple[Delivery, ...]
    first: bool


@dataclass(frozen=True)
class SumReply:
    """An agent's masked sum; none if it has no weight."""

    sums: tuple[MaskedSums, ...]

    @property
    def size(self) -> int:
        return sum(one.size for one in self.sums)

    @property
    def senders(self) -> set[int]:
        return {one.agent for one in self.sums}


@dataclass(frozen=True)
class UnmaskRequest:
    """Whose sums have arrived, and the weights that agents without a sum have not received."""

    announced: Announcement
    reveal: RevealRequest
    first: bool


@dataclass(frozen=True)
class AloneRequest:
    """Tells Alice that she holds all weight."""


@dataclass(frozen=True)
class AloneReply:
    """The sums of a round in which Alice holds all weight, or why she cannot use her own update."""

    code: int  # 0, or a reason code of the guard
    sums: Mapping[str, bytes]  # by part: float32 if that is exact, else float64

    @property
    def size(self) -> int:
        return sum(map(len, self.sums.values()))

    @property
    def senders(self) -> set[int]:
        return set()


PhaseRequest: TypeAlias = (
    OpenRequest | CompareRequest | DealRequest | ProductRequest | SumRequest | UnmaskRequest | AloneRequest
)
PhaseReply: TypeAlias = OpenReply | SketchReply | DealtReply | Products | SumReply | Revealed | AloneReply
REPLIES: Mapping[type[PhaseRequest], type[PhaseReply]] = {
    OpenRequest: OpenReply,
    CompareRequest: SketchReply,
    DealRequest: DealtReply,
    ProductRequest: Products,
    SumRequest: SumReply,
    UnmaskRequest: Revealed,
    AloneRequest: AloneReply,
}
REQUESTS: Mapping[str, type[PhaseRequest]] = {
    "open": OpenRequest,
    "compare": CompareRequest,
    "deal": DealRequest,
    "product": ProductRequest,
    "first": SumRequest,
    "unmask": UnmaskRequest,
    "sum": SumRequest,
    "reveal": UnmaskRequest,
    "alone": AloneRequest,
}
