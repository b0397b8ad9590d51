"""The server's part of a private round, phase by phase: distances and weighted sums, and no single update.

It makes the requests of a phase, takes the replies, and goes on once enough have arrived; it sends nothing itself. The
simulator and a deployment call it in the same way; `masked_agent.py` is the agent's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from waffle_fl.algorithms import Round
from waffle_fl.algorithms.contract import Seen, Weights, row_of
from waffle_fl.engines.aggregation import Registered
from waffle_fl.engines.masked_guard import screened
from waffle_fl.engines.masked_parts import GUARD, WEIGHTS, MessageSizes, unit_of
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.errors import WaffleError
from waffle_fl.guard import ABSENT, NOT_ASKED, OK, REASONS
from waffle_fl.privacy import ring
from waffle_fl.privacy.contributors import effective, respect_floors
from waffle_fl.privacy.exact_product import dealer_for
from waffle_fl.privacy.messages import Announcement, Delivery, RevealRequest, RoundId
from waffle_fl.privacy.phases import (
    REPLIES,
    AloneReply,
    AloneRequest,
    CompareRequest,
    DealRequest,
    DealtReply,
    OpenReply,
    OpenRequest,
    PhaseReply,
    PhaseRequest,
    ProductRequest,
    Products,
    SketchReply,
    SumReply,
    SumRequest,
    UnmaskRequest,
)
from waffle_fl.privacy.server import MaskingServer

Phase: TypeAlias = Literal["open", "compare", "deal", "product", "sum", "reveal", "alone", "done"]


class Unreadable(WaffleError):
    """The masks of a round do not cancel, or too few sums or shares have arrived. The round can be tried again."""


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
    floors: Sequence[float]  # of all agents: their smallest effective number of contributors


class RoundWeights(NamedTuple):
    """The weights of the round, and the server's state and diagnostics that follow from them."""

    weights: Mapping[str, Weights]
    server: Any
    info: Mapping[str, Any]
    announced: Announcement


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
        self._hub = MaskingServer(
            self.group, at, {name: (size, unit_of(algorithm, name, at.round)) for name, size in sizes.parts.items()}
        )
        facts = known.samples, known.steps, settings.batch_size, None, known.asked
        now = Round(at.round, settings.rounds, known.alice, asked, asked, *facts)
        self._admitted = Present(now, torch.where(known.asked, torch.full_like(known.samples, OK), NOT_ASKED))
        self._opened = Opened([], {}, self._zeros, self._zeros, floors)
        self._sketches: Mapping[int, SketchReply] = {}  # of the phase `deal`
        self._decided = RoundWeights({"dy": self._zeros}, server, {}, Announcement({}))
        self.sums: Mapping[str, Tensor] = {}
        self.uploaded = 0
        self.phase: Phase = "open"
        self._requests: Mapping[int, PhaseRequest] = {i: OpenRequest(self._measures(i)) for i in self.group}
        self._replies: dict[int, PhaseReply] = {}
        if self._alone_already():
            self._weigh(self._zeros, torch.ones_like(self._zeros[0]))

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
        self._check_sizes(reply)
        self._replies[agent] = reply
        self.uploaded += reply.size

    def blocking(self) -> list[int]:
        """Return the agents without whose reply the phase cannot end: Alice, or all that lack if they are too many."""
        absent = list(self.requests)
        if self._alice in absent and self.phase != "reveal":
            return [self._alice]
        spare = len(self.group) - self._hub.threshold
        needed = {"product": 0, "sum": len(self._requests) - spare, "alone": 1}.get(self.phase, self._hub.threshold)
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
            case "sum":
                self._sum(replies)
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
        facts = {"contributors": effective(decided.weights["dy"].tolist()), "uploaded": float(self.uploaded)}
        return decided.server, *self._admitted, {**decided.info, "weights": decided.weights["dy"], **facts}

    def _open(self, replies: Mapping[int, Any]) -> None:
        lengths, pulls, floors = self._zeros, self._zeros, list(self._opened.floors)
        for i in self.group:
            self._note(i, replies[i].code if i in replies else ABSENT)
        for i, reply in replies.items():
            lengths[i], pulls[i] = reply.length, reply.pull
            floors[i] = max(floors[i], reply.floor)
        opened = [i for i in self.group if self._admitted.now.received[i]]
        if not self.usable:  # the round is tried again with other batches
            self.phase, self._requests = "done", {}
            return
        deliveries = self._hub.deliver(opening for i in opened for opening in replies[i].openings)
        self._opened = Opened(opened, deliveries, lengths, pulls, floors)
        if not self._purposes:
            self._weigh(self._zeros)
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
        words = {word.agent: word for reply in replies.values() for word in reply.words}
        ready = [i for i in self._opened.agents if (i, self._alice) in vectors and (self._alice, i) in vectors]
        ready = [i for i in ready if i in words]
        requests = {i: ProductRequest((vectors[self._alice, i],), (words[i],)) for i in ready}
        requests[self._alice] = ProductRequest(tuple(vectors[i, self._alice] for i in ready), ())
        self.phase, self._requests = "product", requests

    def _compare(self, replies: Mapping[int, Any]) -> None:
        """Compute the distances; an agent without one is absent."""
        found: dict[str, Weights] = {}
        for purpose in self._purposes:
            name = "dy" if purpose == GUARD else next(iter(self._sizes.compared))
            unit = unit_of(self.algorithm, name, self.at.round)
            if purpose == WEIGHTS and self._deals:
                words = [word for reply in replies.values() for word in reply.words]
                distances = self._hub.exact_distances(words, self._alice, unit)
            else:
                sent = self._sketches if self._deals else replies
                sketches = [one for reply in sent.values() for one in reply.sketches.get(purpose, ())]
                distances = self._hub.distances(sketches, self._alice, unit)
            for i in self._opened.agents:
                if i != self._alice and i not in distances:
                    self._note(i, ABSENT)
            found[purpose] = self._zeros.new_tensor([distances.get(i, 0.0) for i in range(len(self._zeros))])
        if self.settings.guard != "off":
            force = self._opened.pulls if hasattr(self.algorithm, "new_control_variates") else None
            directions = min(self._sizes.update, self.settings.sketch_size)
            of_updates = found[GUARD if GUARD in found else WEIGHTS]
            now, codes = screened(self._opened.lengths, force, of_updates, directions, *self._admitted)
            self._admitted = Present(now, codes)
        self._weigh(found.get(WEIGHTS, self._zeros))

    def _weigh(self, distances: Weights, length: Tensor | None = None) -> None:
        """Compute the weights, and announce them unless Alice holds all weight."""
        if getattr(self.algorithm, "reads_length", False) and length is None:
            length = row_of(self._opened.lengths, self._known.alice)
        server, given, info = self.algorithm.weigh(self.server, Seen(distances, length), self._admitted.now)
        weights = self._respected(given)
        opened, shares = self._opened.agents, weights["dy"].tolist()
        tables = {name: dict(enumerate(weights[name].tolist())) for name in self._sizes.parts}
        announced = self._hub.announce({name: {i: table[i] for i in opened} for name, table in tables.items()})
        self._decided = RoundWeights(weights, server, info._asdict(), announced)
        if getattr(self.algorithm, "for_alice", False) and shares.count(0.0) >= len(shares) - 1:
            self.phase, self._requests = "alone", {self._alice: AloneRequest()}
            return
        delivered = self.phase != "open"
        asked = [i for i in opened if i in announced.contributors or not delivered]
        deliveries = self._opened.deliveries
        self._requests = {i: SumRequest(announced, () if delivered else (deliveries[i],)) for i in asked}
        self.phase = "sum"

    def _sum(self, replies: Mapping[int, Any]) -> None:
        announced = self._decided.announced
        reveal = self._hub.request(one for reply in replies.values() for one in reply.sums)
        for i in reveal.missing:
            self._note(i, ABSENT)
        floor = max(self._opened.floors[i] for i in announced.contributors)
        for table in announced.weights.values():
            number = effective([table[i] for i in reveal.arrived])
            if len(reveal.arrived) < 2 or number < floor:
                raise Unreadable(
                    f"expected at least {max(floor, 2):g} effective contributors in round {self.at.round}, got "
                    f"{number:.2f}: the sums of {len(reveal.missing)} agents have not arrived"
                )
        self.phase, self._requests = "reveal", dict.fromkeys(self._opened.agents, UnmaskRequest(announced, reveal))

    def _apply_alone(self, reply: AloneReply) -> None:
        """Take Alice's own numbers as the sums; nobody else has taken part."""
        self._note(self._alice, reply.code)
        now = self._admitted.now
        is_alice = torch.arange(len(now.samples), device=now.samples.device) == now.alice
        self._admitted = self._admitted._replace(now=now._replace(intact=now.intact & is_alice))
        if reply.code == OK:
            found = {name: ring.plain_numbers(reply.sums[name], count) for name, count in self._sizes.parts.items()}
            self.sums = {name: torch.from_numpy(numbers).to(is_alice.device) for name, numbers in found.items()}
        self.phase, self._requests = "done", {}

    def _check_sizes(self, reply: PhaseReply) -> None:
        """Raise if a reply has not the parts and lengths that an agent would send."""
        (*_, compared) = (0, *self._sizes.compared.values())
        short = ring.SKETCH_BYTES * (1 + min(self.settings.sketch_size, compared or self._sizes.update))
        match reply:
            case OpenReply(code, length, pull, floor, openings):
                sound = code in range(len(REASONS)) and len(openings) == (code == OK)
                sound = sound and min(length, pull) >= 0 and floor >= 1
            case SketchReply(sketches):
                sound = all(sketch.size == short for some in sketches.values() for sketch in some)
            case DealtReply(sketches, vectors, words):
                self._check_sizes(sketches)
                sound = all(len(v.words) == compared for v in vectors) and all(len(word.words) == 1 for word in words)
            case Products(words):
                sound = all(len(word.words) == 1 for word in words)
            case SumReply(sums):
                sound = len(sums) <= 1
            case AloneReply(code, own) if code == OK:
                sound = own.keys() == self._sizes.parts.keys()
                for name, content in own.items() if sound else ():
                    try:
                        ring.plain_numbers(content, self._sizes.parts[name])
                    except ValueError:
                        sound = False
            case _:
                sound = True
        if not sound:
            raise WaffleError(f"the reply in the phase {self.phase} has parts that an agent would not send")

    def _reveal(self, replies: Mapping[int, Any]) -> None:
        (request,) = {id(one): one for one in self._requests.values()}.values()
        assert isinstance(request, UnmaskRequest)
        try:
            found = self._hub.sums(list(replies.values()))
        except WaffleError as error:
            raise Unreadable(str(error)) from None
        device = self._zeros.device
        scales = self._scales(request.reveal)
        self.sums = {name: torch.from_numpy(total).to(device) * scales[name] for name, total in found.items()}
        self.phase, self._requests = "done", {}

    def _scales(self, reveal: RevealRequest) -> dict[str, float]:
        """Return the factors of the sums, and divide the weights by what has arrived, if agents have dropped out."""
        tables = self._decided.announced.weights
        if not reveal.missing:
            return dict.fromkeys(tables, 1.0)
        arrived = torch.zeros_like(self._zeros, dtype=torch.bool)
        arrived[list(reveal.arrived)] = True
        left = {name: torch.where(arrived, one, 0.0) for name, one in self._decided.weights.items()}
        self._decided = self._decided._replace(weights={name: one / one.sum() for name, one in left.items()})
        kept = getattr(self.algorithm, "sums_of_changes", ())
        return {
            name: 1.0 if name in kept else sum(table.values()) / sum(table[i] for i in reveal.arrived)
            for name, table in tables.items()
        }

    def _respected(self, weights: Mapping[str, Weights]) -> Mapping[str, Weights]:
        """Return the weights without agents whose floor is not reached."""
        given = weights["dy"].tolist()
        alice = self._alice if getattr(self.algorithm, "for_alice", False) else None
        allowed = respect_floors(given, self._opened.floors, alice)
        if any(given) and not any(allowed):
            raise WaffleError(
                f"min_contributors: expected at most {effective(given):.2f}, the effective number of agents in round "
                f"{self.at.round}, got {max(self._opened.floors):g}"
            )
        if not any(w != 0 and a == 0 for w, a in zip(given, allowed, strict=True)):
            return weights
        return dict.fromkeys(weights, weights["dy"].new_tensor(allowed))

    def _alone_already(self) -> bool:
        """Whether Alice holds all weight, even if all updates were equal to hers: then none is needed."""
        if not getattr(self.algorithm, "for_alice", False):
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
    def _purposes(self) -> tuple[str, ...]:
        """What distances are needed for."""
        for_weights = (WEIGHTS,) if self._sizes.compared else ()
        guarded = self.settings.guard != "off" and (self._deals or "dy" not in self._sizes.compared)
        return (*for_weights, *((GUARD,) if guarded else ()))

    @property
    def _zeros(self) -> Weights:
        return torch.zeros_like(self._known.samples, dtype=torch.float64)
