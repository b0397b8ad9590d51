"""What both sides of a private round know: the parts of a sum, their units and sizes. Nothing here holds a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from waffle_fl.engines.aggregation import Registered
from waffle_fl.engines.tree import rows_of
from waffle_fl.privacy import ring

USUAL = {"stats": 256.0}  # the size of usual numbers of a part, if not 1; `unit_of` has that of updates
WEIGHTS, GUARD = "weights", "guard"  # what distances are for


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
    compared: Mapping[str, int]  # of what distances compare, by name; at most one
    update: int


def sizes_of(algorithm: Any, trained: TrainedRow) -> MessageSizes:
    """Return the sizes of a method's messages, from any agent's state and update."""
    parts = {name: rows.shape[1] for name, rows in algorithm.summed_rows(*trained).items()}
    compared = {name: rows.shape[1] for name, rows in algorithm.compared_rows(*trained).items()}
    return MessageSizes(parts, compared, trained.up.dy.shape[1])


def unit_of(algorithm: Any, name: str, r: int) -> float:
    """Return the unit of a part: updates are as large as the learning rate makes them."""
    sgd = algorithm.sgd
    return ring.unit_for(10 * sgd.lr * sgd.lr_decay ** (r - 1) if name == "dy" else USUAL.get(name, 1.0))
