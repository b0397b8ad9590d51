"""The interface of a fast backend, and the order in which a round calls it.

A backend trains the rows of some runs, aggregates the runs and evaluates their models. Each optimisation is a separate
module; its docstring says what it does, when it applies and what it gains:

row_training      agents as rows of one stack     helper_agents    agents whose own model is not needed
cuda_graphs       a round's steps, replayed       shared_training  runs that can share one training
aggregation       many runs in one computation    workers          processes, by runs or by rows
evaluation        many models in one pass

Most have a function `applies`; `benchmarks/ablation.py` switches each one off in turn. All agree with `loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from waffle_fl.engines.aggregation import Aggregated
from waffle_fl.engines.run_spec import State


class TrainedAgents(NamedTuple):
    """The agents of a run that took part: what they received, their states before and after, and their updates."""

    down: Any
    before: Any
    after: Any
    up: Any


class Work(NamedTuple):
    """One round of some runs."""

    runs: tuple[int, ...]
    states: tuple[State, ...]  # of these runs, before the round
    r: int
    attempt: int = 0


class Backend(Protocol):
    """How rounds are computed. Backends differ in speed; on a CPU they give the same bits."""

    def train(self, work: Work) -> list[TrainedAgents]: ...  # A2.3-12
    def aggregate(self, work: Work, trained: Sequence[TrainedAgents]) -> list[Aggregated]: ...  # A2.13-16
    def evaluate(self, work: Work, aggregated: Sequence[Aggregated]) -> list[Aggregated]: ...  # adds measurements
    def close(self) -> None: ...


Compute: TypeAlias = Callable[[Work], list[Aggregated]]


def round_of(backend: Backend) -> Compute:
    """Return the function that computes a whole round with this backend."""

    def compute(work: Work) -> list[Aggregated]:
        trained = backend.train(work)
        return backend.evaluate(work, backend.aggregate(work, trained))

    return compute
