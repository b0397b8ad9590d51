"""An agent's part of a private round: the numbers that it computes from its update, and its reply in each phase.

The simulator calls it for every agent, and a site of a deployment for itself; `masked_round.py` is the server's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from waffle_fl.algorithms import Net
from waffle_fl.algorithms.contract import Rows, lengths
from waffle_fl.engines.masked_parts import FIRST, GUARD, TrainedRow, rotated_size, unit_of
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.errors import WaffleError
from waffle_fl.guard import OK, TOO_LONG, screen
from waffle_fl.privacy import ring, sketch
from waffle_fl.privacy.agent import MaskingAgent, Numbered
from waffle_fl.privacy.masks import KEY_BYTES
from waffle_fl.privacy.messages import MaskedSketch, Opening, RoundId
from waffle_fl.privacy.phases import (
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
from waffle_fl.privacy.ring import Numbers
from waffle_fl.randomness import derive, noise


class UpdateNumbers(NamedTuple):
    """What an agent has computed from its update."""

    code: int  # OK, or why the update cannot be used
    summed: Mapping[str, Numbered] = {}  # by part
    first: Mapping[str, Numbered] = {}  # of the sum before it, of which the length is read
    sketched: Mapping[str, tuple[Numbers, float]] = {}  # by purpose: a count sketch of what is compared, and its unit
    exact: tuple[tuple[Numbers, float], ...] = ()  # the same without a sketch, for distances with a dealer
    length: float = 0.0
    pull: float = 0.0  # length of the control variate; 0 without one
    lengths: tuple[float, ...] = ()  # of the rows that are compared, if directions are


def server_seen_by(algorithm: Any, down: Any, agents: Any) -> Any:
    """Return a server's state with what one agent knows of it: the broadcast, and a copy of its own state."""
    start = algorithm.init(Net(down.x[0], down.stats[0]), 1)[0]
    known = {name: value[0] for name, value in down._asdict().items()} | agents._asdict()
    return start._replace(**{name: value for name, value in known.items() if name in start._fields})


class UpdateReader:
    """Reads what a private round needs from an agent's update. `ident` numbers the agent in the federation's data."""

    def __init__(self, algorithm: Any, settings: RoundSettings, seed: int) -> None:
        self.algorithm, self.settings, self.seed = algorithm, settings, seed

    def read(self, trained: TrainedRow, ident: int, r: int, attempt: int) -> UpdateNumbers:
        """Return the numbers of an agent in a round."""
        dy, algorithm = trained.up.dy, self.algorithm
        here = torch.ones(1, dtype=torch.bool, device=dy.device)
        code = int(screen(trained.up, torch.zeros_like(here, dtype=torch.int64)[0], here)[2][0])
        if code != OK:
            return UpdateNumbers(code)
        summed = self._summed(_numbers(algorithm.summed_rows(*trained)), ident, r, attempt)
        rows = _numbers(algorithm.compared_rows(*trained))
        key, unit = count_sketch_key(self.seed, r, attempt), unit_of(algorithm, "dy", r)
        first: dict[str, Numbered] = {}
        measured: tuple[float, ...] = ()
        if hasattr(algorithm, "first_weights"):
            most = rotated_size(self.settings)
            first = {name: Numbered(sketch.compress(row, most, key), unit) for name, row in rows.items()}
        if getattr(algorithm, "compares_directions", False):
            measured = tuple(float(np.linalg.norm(numbers)) for numbers in rows.values())
            rows = {name: numbers / (size or 1.0) for (name, numbers), size in zip(rows.items(), measured, strict=True)}
        compared = {name: (numbers, unit_of(algorithm, name, r)) for name, numbers in rows.items()}
        dealt = bool(rows) and self.settings.masked_distances == "dealer"
        vectors = {} if dealt else {**compared}
        if self.settings.guard != "off" and (dealt or "dy" not in rows):
            vectors[GUARD] = _row(dy), unit
        size = self.settings.sketch_size
        sketched = {why: (sketch.compress(numbers, size, key), step) for why, (numbers, step) in vectors.items()}
        exact = tuple(compared.values()) if dealt else ()
        fits = all(ring.holds(part.numbers, part.unit, ring.SUM_BITS) for part in summed.values())
        bounded = [(part.numbers, part.unit) for part in first.values()]
        fits = fits and all(sketch.fits(*one) for one in (*sketched.values(), *exact, *bounded))
        length, pull = float(lengths(dy)[0]), 0.0
        if hasattr(algorithm, "new_control_variates"):
            server = server_seen_by(algorithm, trained.down, trained.agents)
            pull = float(lengths(algorithm.new_control_variates(server, trained.up, trained.steps))[0])
        return UpdateNumbers(OK if fits else TOO_LONG, summed, first, sketched, exact, length, pull, measured)

    def _summed(self, parts: Mapping[str, Numbers], ident: int, r: int, attempt: int) -> dict[str, Numbered]:
        """Return the parts with the draws that round them. These need not be secret."""
        key = torch.tensor([derive(self.seed, "masked rounding", ident, r, attempt)])
        sizes = [len(numbers) for numbers in parts.values()]
        draws = np.split(noise(key, sum(sizes))[0].numpy() * 2.0**-63, np.cumsum(sizes)[:-1])
        units = (unit_of(self.algorithm, name, r) for name in parts)
        return {
            name: Numbered(numbers, unit, some)
            for (name, numbers), unit, some in zip(parts.items(), units, draws, strict=True)
        }


class RoundAgent:
    """One agent in one private round, after it has trained.

    A site answers each request in another process: `recall` repeats what the earlier ones have changed, and nothing
    that depends on the update alone. With the same random bytes every reply is the same again.

    A second side has the secrets of a sum before the round's sum, for methods that need one.
    """

    def __init__(self, own: UpdateNumbers, side: MaskingAgent, first: MaskingAgent | None, alice: int) -> None:
        self.own, self._side, self._first = own, side, first
        self._is_alice, self._alice = side.agent == alice, alice

    def answer(self, request: PhaseRequest) -> PhaseReply:
        """Return the reply to the request of a phase."""
        match request:
            case OpenRequest(measured):
                return self._open(measured)
            case CompareRequest():
                return self._compare(request)
            case DealRequest():
                return self._deal(request)
            case ProductRequest():
                dealt = next(iter(request.words), None)
                return Products(tuple(self._side.product_word(vector, dealt) for vector in request.vectors))
            case SumRequest():
                return self._sum(request)
            case UnmaskRequest(announced, reveal, first):
                return self._side_of(first).reveal(reveal, announced)
            case AloneRequest():
                return self._alone()
        raise WaffleError(f"expected a request of a private round, got {type(request).__name__}")

    def recall(self, request: PhaseRequest) -> None:
        """Restore the state after an earlier request of this round, which was answered."""
        match request:
            case OpenRequest() if self.own.code == OK:
                self._openings()
            case CompareRequest(delivery):
                self._side.receive(delivery)
            case DealRequest():
                self._deal(request)
            case SumRequest(announced, deliveries, first):
                side = self._side_of(first)
                for delivery in deliveries:
                    side.receive(delivery)
                if side.agent in announced.contributors:
                    side.accept(announced)
            case UnmaskRequest(announced, reveal, first):
                self._side_of(first).reveal(reveal, announced)

    def _open(self, measured: bool) -> OpenReply:
        floor = self._side.floor
        if self.own.code != OK:
            return OpenReply(self.own.code, 0.0, 0.0, floor, (), ())
        lengths = (self.own.length, self.own.pull) if measured else (0.0, 0.0)
        return OpenReply(OK, *lengths, floor, self.own.lengths, self._openings())

    def _openings(self) -> tuple[Opening, ...]:
        return tuple(side.open() for side in (self._side, self._first) if side)

    def _side_of(self, first: bool) -> MaskingAgent:
        side = self._first if first else self._side
        if side is None:
            raise WaffleError(
                "expected a request for the only sum of the round, got one for a sum before it: refuse it"
            )
        return side

    def _alone(self) -> AloneReply:
        if not self._is_alice:
            raise WaffleError("expected Alice, the only agent whose update may be a sum: refuse the round")
        return AloneReply(self.own.code, {name: ring.plain_bytes(one.numbers) for name, one in self.own.summed.items()})

    def _compare(self, request: CompareRequest) -> SketchReply:
        self._side.receive(request.delivery)
        found: dict[str, tuple[MaskedSketch, ...]] = {}
        for purpose in request.purposes:
            one = *self.own.sketched[purpose], self._alice, purpose
            found[purpose] = tuple(self._side.sketch(partner, *one) for partner in request.partners)
        return SketchReply(found)

    def _deal(self, request: DealRequest) -> DealtReply:
        sketches = self._compare(request.compare)
        ((numbers, unit),) = self.own.exact
        vectors = [
            self._side.mask_vector(partner, numbers, unit, dealer, self._is_alice)
            for partner, dealer in request.dealers.items()
        ]
        words = [self._side.deal(agent, self._alice, len(numbers)) for agent in request.deals_for]
        return DealtReply(sketches, tuple(vectors), tuple(words))

    def _sum(self, request: SumRequest) -> SumReply:
        side = self._side_of(request.first)
        for delivery in request.deliveries:
            side.receive(delivery)
        if side.agent not in request.announced.contributors:
            return SumReply(())
        if request.first:
            return SumReply((side.contribute_rotated(request.announced, self.own.first, self._alice),))
        return SumReply((side.contribute(request.announced, self.own.summed),))


def round_agent(
    algorithm: Any, own: UpdateNumbers, at: RoundId, alice: int, side_at: Callable[[RoundId], MaskingAgent]
) -> RoundAgent:
    """Return an agent of a round; `side_at` makes its side of each sum."""
    first = side_at(replace(at, part=FIRST)) if hasattr(algorithm, "first_weights") else None
    return RoundAgent(own, side_at(at), first, alice)


def count_sketch_key(seed: int, r: int, attempt: int) -> bytes:
    """Return the public key of a round's count sketch, the same for all agents of a run."""
    return derive(seed, "count sketch", r, attempt).to_bytes(8, "little") * (KEY_BYTES // 8)


def _numbers(parts: Mapping[str, Rows]) -> dict[str, Numbers]:
    return {name: _row(rows) for name, rows in parts.items()}


def _row(rows: Rows) -> Any:
    """Return the only row in float64."""
    return rows[0].double().cpu().numpy()
