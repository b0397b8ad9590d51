"""What a simulation is asked for and what it gives: a Cell is a run, an Outcome is what one round brought it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from waffle_fl.algorithms import Algorithm, Net, for_model
from waffle_fl.errors import Diverged
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel

Tamper = Callable[[Any, int], Any]  # (updates of a federation, round) -> what arrives at the server
Post = Callable[[int, int, bytes], Iterable[bytes]]  # (agent, round, its reply) -> what arrives under its name


class State(NamedTuple):
    """Everything a federation carries from round to round."""

    server: Any
    agents: Any


@dataclass(frozen=True)
class Cell:
    """One federation, one algorithm, one seed: a run."""

    algorithm: Algorithm
    federation: Federation
    seed: int
    state: State | None = None  # where to go on from; None is the start
    tamper: Tamper | None = None  # what happens to the updates on their way, as tensors
    post: Post | None = None  # and as bytes: then every update is packed, posted and unpacked
    attackers: tuple[int, ...] = ()  # whose weight the record tells
    asked: frozenset[int] | None = None  # the agents whose own models are of use; None: all


@dataclass(frozen=True)
class Outcome:
    """What one round brought one cell: measurements for the record, and the state after it."""

    cell: int
    round: int
    measured: dict[str, Any]
    state: State
    attempt: int = 0  # how many were refused before this one
    error: Diverged | None = None


def fitted(cell: Cell, model: FlatModel) -> Cell:
    """The cell, its algorithm knowing the model's layers if it asks for them."""
    return replace(cell, algorithm=for_model(cell.algorithm, model.layers))


def own_net(cell: Cell, state: State, model: FlatModel) -> Net:
    """Alice's model in this state."""
    alice, algorithm = cell.federation.alice, fitted(cell, model).algorithm
    net = algorithm.personal(state.server, state.agents, cell.federation.agents)
    return Net(net.params[alice], net.stats[alice])


def on_device(cells: Sequence[Cell], model: FlatModel) -> list[Cell]:
    """The cells with their data where the model is; what some of them share is moved once and goes on being shared."""
    moved: dict[int, Any] = {}
    return [replace(cell, federation=cell.federation.to(model.device, model.dtype, moved)) for cell in cells]
