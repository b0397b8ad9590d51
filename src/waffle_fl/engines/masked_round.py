"""The server's part of a private round, phase by phase: distances and weighted sums, and no single update.

It makes the requests of a phase, takes the replies, and goes on once enough have arrived; it sends nothing itself. The
simulator and a deployment call it in the same way; `masked_agent.py` is the agent's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from waffle_fl.algorithms import Round
from waffle_fl.algorithms.contract import Seen, Weights, row_of
from waffle_fl.engines.aggregation import Registered
from waffle_fl.engines.masked_guard import screened
from waffle_fl.engines.masked_parts import FIRST, GUARD, MessageSizes, is_well_formed, rotated_size, unit_of
from waffle_fl.engines.masked_sums import MaskedSum
from waffle_fl.engines.masked_weights import angles_of, may_be_summed, overall, respected, respected_by_layer
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.errors import WaffleError
from waffle_fl.guard import ABSENT, NOT_ASKED, OK, REASONS, TOO_LONG
from waffle_fl.privacy import ring
from waffle_fl.privacy.contributors import effective
from waffle_fl.privacy.exact_product import dealer_for
from waffle_fl.privacy.messages import Delivery, RoundId
from waffle_fl.privacy.phases import (
    REPLIES,
    AloneReply,
    AloneRequest,
    CompareRequest,
    DealRequest,
    OpenRequest,
    PhaseReply,
    PhaseRequest,
    ProductRequest,
    SketchReply,
)

Phase: TypeAlias = Literal["open", "compare", "deal", "product", "first", "unmask", "sum", "reveal", "alone", "done"]


class Present(NamedTuple):
    """Who takes part, and why the others do not."""

    now: Round
    codes: Tensor  # reasons of the guard


class Opened(NamedTuple):
    """The agents that have opened the round, the shares that they receive, and what they report."""

    agents: list[int]
    deliveries: Mapping[int, Delivery]
    lengths: Weights  # of updates
    pulls: Weights  # of control variates
    measured: Tensor  # (N, L): of what is compared, if directions are
    floors: Sequence[float]  # of all agents: their smallest effective number of contributors
    seen: Seen  # what the method learns of the updates


class RoundWeights(NamedTuple):
    """The weights of the round, and the server's state and diagnostics that follow from them."""

    weights: Mapping[str, Weights]
    server: Any
    info: Mapping[str, Any]


class MaskedRound:
    """One attempt at one round. After the last phase, `sums` are the weighted sums, or empty if there is none."""

    def __init__(
        self,
        algorithm: Any,
        settings: RoundSettings,
        server: Any,
        known: Registered,
        at: RoundId,
        sizes: MessageSizes,
        floors: Sequence[float],
    ) -> None:
        self.algorithm, self.settings, self.server, self.at = algorithm, settings, server, at
        self._known, self._sizes = known, sizes
        self._alice = int(known.alice)
        asked = known.asked & (known.samples > 0)
        self.group: tuple[int, ...] = tuple(asked.nonzero().flatten().tolist())
        parts = {name: (size, unit_of(algorithm, name, at.round)) for name, size in sizes.parts.items()}
        unit = unit_of(algorithm, "dy", at.round)
        most = rotated_size(settings)
        first = {name: (min(size, most), unit) for name, size in sizes.compared.items()}
        self._sum = MaskedSum(self.group, at, parts, first=False)
        self._first_sum = MaskedSum(self.group, replace(at, part=FIRST), first, first=True)
        facts = known.samples, known.steps, settings.batch_size, None, known.asked
        now = Round(at.round, settings.rounds, known.alice, asked, asked, *facts)
        self._admitted = Present(now, torch.where(known.asked, torch.full_like(known.samples, OK), NOT_ASKED))
        rows = self._zeros[:, None].expand(-1, len(sizes.compared))
        self._opened = Opened([], {}, self._zeros, self._zeros, rows, floors, Seen(self._zeros))
        self._sketches: Mapping[int, SketchReply] = {}  # of the phase `deal`
        self._decided = RoundWeights({"dy": self._zeros}, server, {})
        self.sums: Mapping[str, Tensor] = {}
        self.uploaded = 0
        self.phase: Phase = "open"
        self._requests: Mapping[int, PhaseRequest] = {i: OpenRequest(self._measures(i)) for i in self.group}
        self._replies: dict[int, PhaseReply] = {}
        if self._alone_already():
            self._weigh(Seen(self._zeros, torch.ones_like(self._zeros[0])))

    @property
    def requests(self) -> dict[int, PhaseRequest]:
        """The requests of the current phase to agents that have not replied."""
        return {i: request for i, request in self._requests.items() if i not in self._replies}

    def receive(self, agent: int, reply: PhaseReply) -> None:
        """Take an agent's reply to the current phase; the first counts."""
        if agent not in self.requests:
            return
        if not isinstance(reply, REPLIES[type(self._requests[agent])]):
            raise WaffleError(f"expected another reply in the phase {self.phase}, got {type(reply).__name__}")
        if reply.senders - {agent}:  # the transport knows who sent it
            raise WaffleError("the reply names another agent as its sender")
        if not is_well_formed(reply, self._sizes, self.settings.sketch_size):
            raise WaffleError(f"the reply in the phase {self.phase} has parts that an agent would not send")
        self._replies[agent] = reply
        self.uploaded += reply.size

    def blocking(self) -> list[int]:
        """Return the agents without whose reply the phase cannot end: Alice, or all that lack if they are too many."""
        absent = list(self.requests)
        if self._alice in absent and self.phase not in ("unmask", "reveal"):
            return [self._alice]
        threshold = self._sum.hub.threshold
        of_sums = len(self._requests) - (len(self.group) - threshold)
        needed = {"product": 0, "first": of_sums, "sum": of_sums, "alone": 1}.get(self.phase, threshold)
        return absent if len(self._replies) < needed else []

    def advance(self) -> None:
        """End the phase with the replies that have arrived. `Unreadable` says that this attempt has failed."""
        replies: dict[int, Any] = {**self._replies}
        self._replies = {}
        match self.phase:
            case "open":
                self._open(replies)
            case "deal":
                self._deal(replies)
            case "compare" | "product":
                self._compare(replies)
            case "first":
                self._close(self._first_sum, replies, "unmask")
            case "unmask":
                self._measure(replies)
            case "sum":
                self._close(self._sum, replies, "reveal")
            case "reveal":
                self._reveal(replies)
            case "alone":
                self._apply_alone(replies[self._alice])

    @property
    def begun(self) -> bool:
        """Whether the first phase has ended, in which agents train."""
        return bool(self._opened.agents) or self.phase == "done"

    @property
    def usable(self) -> bool:
        """Whether Alice's own update could be used, if she takes part."""
        return bool(self._admitted.now.received[self._alice]) or self._alice not in self.group

    def settled(self) -> tuple[Any, Round, Tensor, dict[str, Any]]:
        """Return the weighed server's state, the round, the reason codes and what is recorded."""
        decided = self._decided
        numbers = [effective(table.tolist()) for table in decided.weights.values() if table.any()]
        facts = {"contributors": min(numbers, default=0.0), "uploaded": float(self.uploaded)}
        layers = decided.weights, self._sizes.compared, self._known.alice, len(self._zeros)
        weights = overall(*layers) if self._by_layer else decided.weights["dy"]
        return decided.server, *self._admitted, {**decided.info, "weights": weights, **facts}

    def _open(self, replies: Mapping[int, Any]) -> None:
        lengths, pulls, floors = self._zeros, self._zeros, list(self._opened.floors)
        measured = self._opened.measured.clone()
        longest = ring.LONGEST * unit_of(self.algorithm, "dy", self.at.round)
        for i in self.group:
            code = replies[i].code if i in replies else ABSENT
            fits = code != OK or max(replies[i].lengths, default=0.0) <= longest  # as an agent's own check ensures
            self._note(i, code if fits else TOO_LONG)
        for i, reply in replies.items():
            lengths[i], pulls[i] = reply.length, reply.pull
            floors[i] = max(floors[i], reply.floor)
            if reply.lengths:
                measured[i] = measured.new_tensor(reply.lengths)
        opened = [i for i in self.group if self._admitted.now.received[i]]
        if not self.usable:  # the round is tried again with other batches
            self.phase, self._requests = "done", {}
            return
        deliveries = self._sum.open(replies[i].openings[0] for i in opened)
        if self._sizes.first:
            self._first_sum.open(replies[i].openings[1] for i in opened)
        self._opened = Opened(opened, deliveries, lengths, pulls, measured, floors, Seen(self._zeros))
        if not self._purposes:
            self._weigh(Seen(self._zeros))
            return
        others = tuple(i for i in opened if i != self._alice)
        sketched = tuple(purpose for purpose in self._purposes if purpose == GUARD or not self._deals)
        requests = {
            i: CompareRequest(deliveries[i], others if i == self._alice else (self._alice,), sketched) for i in opened
        }
        self.phase, self._requests = "compare", requests
        if self._deals:
            dealers = {i: dealer_for(i, self._alice, opened) for i in others}
            self.phase = "deal"
            self._requests = {
                i: DealRequest(
                    request,
                    dealers if i == self._alice else {self._alice: dealers[i]},
                    tuple(j for j, dealer in dealers.items() if dealer == i),
                )
                for i, request in requests.items()
            }

    def _deal(self, replies: Mapping[int, Any]) -> None:
        self._sketches = {i: reply.sketches for i, reply in replies.items()}
        vectors = {(v.agent, v.partner): v for reply in replies.values() for v in reply.vectors}
        words = {
            word.agent: word
            for i, reply in replies.items()
            for word in reply.words
            if i in self._requests and word.agent in self._requests[i].deals_for  # type: ignore[union-attr]
        }
        ready = [i for i in self._opened.agents if (i, self._alice) in vectors and (self._alice, i) in vectors]
        ready = [i for i in ready if i in words]
        requests = {i: ProductRequest((vectors[self._alice, i],), (words[i],)) for i in ready}
        requests[self._alice] = ProductRequest(tuple(vectors[i, self._alice] for i in ready), ())
        self.phase, self._requests = "product", requests

    def _compare(self, replies: Mapping[int, Any]) -> None:
        """Compute the distances; an agent without one is absent."""
        found = {purpose: self._distances(purpose, replies) for purpose in self._purposes}
        if self.settings.guard != "off":
            force = self._opened.pulls if hasattr(self.algorithm, "new_control_variates") else None
            directions = min(self._sizes.update, self.settings.sketch_size)
            of_updates = found[GUARD if GUARD in found else "dy"]
            now, codes = screened(self._opened.lengths, force, of_updates, directions, *self._admitted)
            self._admitted = Present(now, codes)
        compared = [found[name] for name in self._sizes.compared]
        if self._sizes.directions:
            seen = Seen(self._zeros, angles=angles_of(compared, self._opened.measured, self._known.alice))
        else:
            reads = getattr(self.algorithm, "reads_length", False)
            length = row_of(self._opened.lengths, self._known.alice) if reads else None
            seen = Seen(compared[0] if compared else self._zeros, length)
        self._opened = self._opened._replace(seen=seen)
        weights = self._first_weights()
        if not weights:
            self._weigh(seen)
            return
        self.phase, self._requests = "first", self._first_sum.requests(weights, self._opened.agents, delivered=False)

    def _distances(self, purpose: str, replies: Mapping[int, Any]) -> Weights:
        """Return the distance of each agent from Alice for one purpose; an agent without one is absent."""
        unit, hub = unit_of(self.algorithm, "dy" if purpose == GUARD else purpose, self.at.round), self._sum.hub
        if purpose != GUARD and self._deals:
            words = [word for reply in replies.values() for word in reply.words]
            distances = hub.exact_distances(words, self._alice, unit)
        else:
            sent = self._sketches if self._deals else replies
            sketches = [one for reply in sent.values() for one in reply.sketches.get(purpose, ())]
            distances = hub.distances(sketches, self._alice, unit)
        for i in self._opened.agents:
            if i != self._alice and i not in distances:
                self._note(i, ABSENT)
        return self._zeros.new_tensor([distances.get(i, 0.0) for i in range(len(self._zeros))])

    def _first_weights(self) -> dict[str, Weights]:
        """Return the weights in the sum before the round's sum, of the parts whose contributors' floors are reached."""
        if not self._sizes.first:
            return {}
        wanted = self.algorithm.first_weights(self.server, self._opened.seen, self._admitted.now)
        return {name: table for name, table in wanted.items() if may_be_summed(table, self._opened.floors)}

    def _measure(self, replies: Mapping[int, Any]) -> None:
        """Read the lengths of the first sum, and compute the weights of the round's sum."""
        found, scales = self._first_sum.read(replies.values()), self._first_sum.scales
        totals = {name: float(length[0]) * scales[name] for name, length in found.items()}
        self._weigh(self._opened.seen._replace(totals=totals))

    def _weigh(self, seen: Seen) -> None:
        """Compute the weights, and announce them unless Alice holds all weight."""
        server, given, info = self.algorithm.weigh(self.server, seen, self._admitted.now)
        floors, alice = self._opened.floors, self._alice if self._for_alice else None
        weights = (respected_by_layer if self._by_layer else respected)(given, floors, alice, self.at.round)
        self._decided = RoundWeights(weights, server, info._asdict())
        if not weights:
            self.phase, self._requests = "done", {}
            return
        shares = next(iter(weights.values())).tolist()
        if not self._by_layer and self._for_alice and shares.count(0.0) >= len(shares) - 1:
            self.phase, self._requests = "alone", {self._alice: AloneRequest()}
            return
        summed = {name: weights[name] for name in self._sizes.parts if name in weights}
        delivered = self.phase != "open"
        self.phase, self._requests = "sum", self._sum.requests(summed, self._opened.agents, delivered)

    def _close(self, of: MaskedSum, replies: Mapping[int, Any], phase: Literal["unmask", "reveal"]) -> None:
        """Ask for the shares that unmask what has arrived of a sum."""
        request = of.close(replies, self._opened.floors)
        for i in request.reveal.missing:
            self._note(i, ABSENT)
        self.phase, self._requests = phase, dict.fromkeys(self._opened.agents, request)

    def _apply_alone(self, reply: AloneReply) -> None:
        """Take Alice's own numbers as the sums; no other agent has taken part."""
        self._note(self._alice, reply.code)
        now = self._admitted.now
        is_alice = torch.arange(len(now.samples), device=now.samples.device) == now.alice
        self._admitted = self._admitted._replace(now=now._replace(intact=now.intact & is_alice))
        if reply.code == OK:
            found = {name: ring.plain_numbers(reply.sums[name], count) for name, count in self._sizes.parts.items()}
            self.sums = {name: torch.from_numpy(numbers).to(is_alice.device) for name, numbers in found.items()}
        self.phase, self._requests = "done", {}

    def _reveal(self, replies: Mapping[int, Any]) -> None:
        found, device = self._sum.read(replies.values()), self._zeros.device
        kept, scales = getattr(self.algorithm, "sums_of_changes", ()), self._sum.scales
        self.sums = {
            name: torch.from_numpy(total).to(device) * (1.0 if name in kept else scales[name])
            for name, total in found.items()
        }
        if self._sum.missing:  # the weights of the record are those of what has arrived
            arrived = torch.ones_like(self._zeros).index_fill(0, torch.tensor(self._sum.missing, device=device), 0.0)
            left = {name: table * arrived for name, table in self._decided.weights.items()}
            self._decided = self._decided._replace(weights={name: one / one.sum() for name, one in left.items()})
        self.phase, self._requests = "done", {}

    def _alone_already(self) -> bool:
        """Whether Alice holds all weight, even if all updates were equal to hers: then none is needed."""
        if not self._for_alice or self._sizes.directions:
            return False
        equal = Seen(self._zeros, torch.ones_like(self._zeros[0]))
        return bool(self.algorithm.weigh(self.server, equal, self._admitted.now)[1]["dy"][self._alice] == 1)

    def _note(self, agent: int, code: int) -> None:
        """Note why an agent takes no part from now on, unless the code is OK."""
        if code == OK:
            return
        now, codes = self._admitted
        received, intact, codes = now.received.clone(), now.intact.clone(), codes.clone()
        received[agent] = intact[agent] = False
        codes[agent] = code if code in range(len(REASONS)) else ABSENT
        self._admitted = Present(now._replace(received=received, intact=intact), codes)

    def _measures(self, agent: int) -> bool:
        """Whether this agent reports lengths: to the guard, or Alice to a method that reads hers."""
        reads = agent == self._alice and getattr(self.algorithm, "reads_length", False)
        return self.settings.guard != "off" or reads

    @property
    def _deals(self) -> bool:
        return self.settings.masked_distances == "dealer" and bool(self._sizes.compared)

    @property
    def _for_alice(self) -> bool:
        return getattr(self.algorithm, "for_alice", False)

    @property
    def _by_layer(self) -> bool:
        """Whether parts of the sum have different contributors."""
        return getattr(self.algorithm, "sums_by_layer", False)

    @property
    def _purposes(self) -> tuple[str, ...]:
        """What distances are needed for: rows that the method compares, by name, and the guard."""
        guarded = self.settings.guard != "off" and (self._deals or "dy" not in self._sizes.compared)
        return (*self._sizes.compared, *((GUARD,) if guarded else ()))

    @property
    def _zeros(self) -> Weights:
        return torch.zeros_like(self._known.samples, dtype=torch.float64)
