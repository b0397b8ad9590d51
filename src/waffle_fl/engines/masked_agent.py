"""An agent's part of a private round: the numbers that it computes from its update, and its reply in each phase.

The simulator calls it for every agent, and a site of a deployment for itself; `masked_round.py` is the server's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from waffle_fl.algorithms import Net
from waffle_fl.algorithms.contract import Rows, lengths
from waffle_fl.engines.masked_parts import GUARD, WEIGHTS, TrainedRow, unit_of
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.errors import WaffleError
from waffle_fl.guard import OK, TOO_LONG, screen
from waffle_fl.privacy import ring, sketch
from waffle_fl.privacy.agent import MaskingAgent, Numbered
from waffle_fl.privacy.masks import KEY_BYTES
from waffle_fl.privacy.messages import MaskedSketch
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
    summed: Mapping[str, Numbered]  # by part
    sketched: Mapping[str, tuple[Numbers, float]]  # by purpose: a count sketch of what is compared, and its unit
    exact: tuple[tuple[Numbers, float], ...]  # the same without a sketch, for distances with a dealer
    length: float
    pull: float  # length of the control variate; 0 without one


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
            return UpdateNumbers(code, {}, {}, (), 0.0, 0.0)
        summed = self._summed(_numbers(algorithm.summed_rows(*trained)), ident, r, attempt)
        rows = _numbers(algorithm.compared_rows(*trained))
        compared = [(numbers, unit_of(algorithm, name, r)) for name, numbers in rows.items()]
        dealt = bool(rows) and self.settings.masked_distances == "dealer"
        vectors = dict(zip((WEIGHTS,), [] if dealt else compared, strict=False))
        if self.settings.guard != "off" and (dealt or "dy" not in rows):
            vectors[GUARD] = _row(dy), unit_of(algorithm, "dy", r)
        key = count_sketch_key(self.seed, r, attempt)
        size = self.settings.sketch_size
        sketched = {why: (sketch.compress(numbers, size, key), unit) for why, (numbers, unit) in vectors.items()}
        fits = all(ring.holds(part.numbers, part.unit, ring.SUM_BITS) for part in summed.values())
        fits = fits and all(sketch.fits(*one) for one in (*sketched.values(), *(compared if dealt else ())))
        length, pull = float(lengths(dy)[0]), 0.0
        if hasattr(algorithm, "new_control_variates"):
            server = server_seen_by(algorithm, trained.down, trained.agents)
            pull = float(lengths(algorithm.new_control_variates(server, trained.up, trained.steps))[0])
        exact = tuple(compared) if dealt else ()
        return UpdateNumbers(OK if fits else TOO_LONG, summed, sketched, exact, length, pull)

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
    """

    def __init__(self, own: UpdateNumbers, side: MaskingAgent, alice: int) -> None:
        self.own, self._side, self._is_alice, self._alice = own, side, side.agent == alice, alice

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
            case UnmaskRequest(announced, reveal):
                return self._side.reveal(reveal, announced)
            case AloneRequest():
                return self._alone()
        raise WaffleError(f"expected a request of a private round, got {type(request).__name__}")

    def recall(self, request: PhaseRequest) -> None:
        """Restore the state after an earlier request of this round, which was answered."""
        match request:
            case OpenRequest() if self.own.code == OK:
                self._side.open()
            case CompareRequest(delivery):
                self._side.receive(delivery)
            case DealRequest():
                self._deal(request)
            case SumRequest(announced, deliveries):
                for delivery in deliveries:
                    self._side.receive(delivery)
                if self._side.agent in announced.contributors:
                    self._side.accept(announced)

    def _open(self, measured: bool) -> OpenReply:
        floor = self._side.floor
        if self.own.code != OK:
            return OpenReply(self.own.code, 0.0, 0.0, floor, ())
        lengths = (self.own.length, self.own.pull) if measured else (0.0, 0.0)
        return OpenReply(OK, *lengths, floor, openings=(self._side.open(),))

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
        for delivery in request.deliveries:
            self._side.receive(delivery)
        if self._side.agent not in request.announced.contributors:
            return SumReply(())
        return SumReply((self._side.contribute(request.announced, self.own.summed),))


def count_sketch_key(seed: int, r: int, attempt: int) -> bytes:
    """Return the public key of a round's count sketch, the same for all agents of a run."""
    return derive(seed, "count sketch", r, attempt).to_bytes(8, "little") * (KEY_BYTES // 8)


def _numbers(parts: Mapping[str, Rows]) -> dict[str, Numbers]:
    return {name: _row(rows) for name, rows in parts.items()}


def _row(rows: Rows) -> Any:
    """Return the only row in float64."""
    return rows[0].double().cpu().numpy()
