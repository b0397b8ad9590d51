"""What both sides of a private round know: the parts of a sum, their units and sizes. Nothing here holds a key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from waffle_fl.engines.aggregation import Registered
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.engines.tree import rows_of
from waffle_fl.guard import OK, REASONS
from waffle_fl.privacy import ring
from waffle_fl.privacy.messages import DealerWord, ProductWord
from waffle_fl.privacy.phases import (
    AloneReply,
    DealtReply,
    OpenReply,
    PhaseReply,
    Products,
    SketchReply,
    SumReply,
)
from waffle_fl.privacy.rotation import LONGEST_ROTATED

USUAL = {"stats": 256.0}  # the size of usual numbers of a part, if not 1; `unit_of` has that of updates
GUARD = "guard"  # the purpose of a comparison of updates for the guard alone; others are named after what is compared
FIRST = "first"  # the part of a `RoundId` of the sum with `first_weights`


class TrainedRow(NamedTuple):
    """What an agent knows after it has trained; every state has one row."""

    down: Any
    agents: Any  # its state before the round
    up: Any
    steps: Tensor

    @classmethod
    def of(cls, i: int, states: tuple[Any, Any, Any], known: Registered) -> TrainedRow:
        """Return what agent i knows, from the broadcast, the states and the updates of all."""
        row = slice(i, i + 1)
        down, agents, up = (rows_of(state, row) for state in states)
        return cls(down, agents, up, known.steps[row])


class MessageSizes(NamedTuple):
    """How many numbers a method's messages have."""

    parts: Mapping[str, int]  # of the sums, by part
    compared: Mapping[str, int]  # of what distances compare, by name
    update: int
    directions: bool  # whether directions are compared, and agents report lengths
    first: bool  # whether there is a sum before the round's sum


def sizes_of(algorithm: Any, trained: TrainedRow) -> MessageSizes:
    """Return the sizes of a method's messages, from any agent's state and update."""
    parts = {name: rows.shape[1] for name, rows in algorithm.summed_rows(*trained).items()}
    compared = {name: rows.shape[1] for name, rows in algorithm.compared_rows(*trained).items()}
    directions = getattr(algorithm, "compares_directions", False)
    return MessageSizes(parts, compared, trained.up.dy.shape[1], directions, hasattr(algorithm, "first_weights"))


def unit_of(algorithm: Any, name: str, r: int) -> float:
    """Return the unit of a part: updates are as large as the learning rate makes them."""
    sgd = algorithm.sgd
    return ring.unit_for(10 * sgd.lr * sgd.lr_decay ** (r - 1) if name == "dy" else USUAL.get(name, 1.0))


def rotated_size(settings: RoundSettings) -> int:
    """Return the most numbers of a part of a first sum; more are reduced by a count sketch."""
    return min(settings.sketch_size, LONGEST_ROTATED)


def is_well_formed(reply: PhaseReply, sizes: MessageSizes, sketch_size: int) -> bool:
    """Return whether a reply has the parts and lengths that an agent would send."""
    match reply:
        case OpenReply(code, length, pull, floor, measured, openings):
            known = code in range(len(REASONS)) and len(openings) == (code == OK) * (1 + sizes.first)
            count = len(sizes.compared) * (code == OK and sizes.directions)
            return known and min(length, pull, *measured) >= 0 and floor >= 1 and len(measured) == count
        case SketchReply(sketches):
            counts = {**sizes.compared, GUARD: sizes.update}
            return sketches.keys() <= counts.keys() and all(
                sketch.size == ring.SKETCH_BYTES * (1 + min(sketch_size, counts[purpose]))
                for purpose, some in sketches.items()
                for sketch in some
            )
        case DealtReply(sketches, vectors, words):
            compared = next(iter(sizes.compared.values()))
            vectors_fit = all(len(vector.words) == compared for vector in vectors)
            return is_well_formed(sketches, sizes, sketch_size) and vectors_fit and _are_single(words)
        case Products(words):
            return _are_single(words)
        case SumReply(sums):
            return len(sums) <= 1
        case AloneReply(code, own) if code == OK:
            return own.keys() == sizes.parts.keys() and all(_are_numbers(own[k], n) for k, n in sizes.parts.items())
    return True


def _are_single(words: Iterable[DealerWord | ProductWord]) -> bool:
    return all(len(word.words) == 1 for word in words)


def _are_numbers(content: bytes, count: int) -> bool:
    try:
        ring.plain_numbers(content, count)
    except ValueError:
        return False
    return True
