"""Backend part: whole runs divided among worker processes (`workers.py`).

What it does   each process trains, aggregates and evaluates its share of the runs; states are in shared memory
When           on a CPU, with at least as many stacked runs as cores, if nothing changes the updates in transit
What it gains  1.6 x on the digits grid, with two cores
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from waffle_fl.engines.aggregation import Aggregated
from waffle_fl.engines.backend import Compute, Work
from waffle_fl.engines.run_spec import RunSpec, State
from waffle_fl.engines.tree import tree_map
from waffle_fl.engines.workers import WorkerPolicy, Workers, shared
from waffle_fl.models import FlatModel


def applies(specs: Sequence[RunSpec], model: FlatModel, cores: int) -> bool:
    honest = not any(spec.tamper or spec.transport for spec in specs)
    return honest and model.stacked and len(specs) >= cores > 1


class RunWorkers:
    """Computes a round, divided among processes once that is faster."""

    def __init__(self, compute: Compute, cores: int, rounds: int) -> None:
        self._compute, self._cores, self._rounds = compute, cores, rounds
        self._runs: tuple[int, ...] = ()  # the runs that the workers compute
        self._policy = WorkerPolicy(1)
        self._workers: Workers | None = None
        self._states: list[State] = []  # in shared memory
        self._results: list[Aggregated] = []

    def __call__(self, work: Work) -> list[Aggregated]:
        if work.attempt and work.runs != self._runs:  # a retry of a few runs
            return self._compute(work)
        if work.runs != self._runs:  # the first round, or a run has diverged
            self.close()
            self._runs, self._policy = work.runs, WorkerPolicy(min(self._cores, len(work.runs)))
        if not self._workers and self._policy.pays(self._rounds - work.r + 1):
            self._start_workers(work)
        if not self._workers:
            with self._policy.timed():
                self._results = self._compute(work)
            return self._results
        for target, state in zip(self._states, work.states, strict=True):
            tree_map(Tensor.copy_, target, state)
        self._workers(work.r, work.attempt)
        return [
            run._replace(server=_copied(run.server), agents=_copied(run.agents))
            for run in self._results  # other fields are read before the workers write again
        ]

    def _start_workers(self, work: Work) -> None:
        """Start the workers; from now on states and results are in shared memory."""
        states, results = [shared(state) for state in work.states], [shared(run) for run in self._results]
        cores = self._policy.cores

        def compute_share(share: int, r: int, attempt: int) -> None:
            own = slice(cores - 1 - share, None, cores)
            done = self._compute(Work(work.runs[own], tuple(states[own]), r, attempt))
            for target, result in zip(results[own], done, strict=True):
                tree_map(Tensor.copy_, target, result)

        self._states, self._results, self._workers = states, results, Workers(compute_share, cores)

    def close(self) -> None:
        if self._workers:
            self._workers.close()
        self._workers = None


def _copied(state: Any) -> Any:
    return tree_map(torch.clone, state)
