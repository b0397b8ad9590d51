"""Backend part: the agents of many federations as rows of one stack, trained one round at a time.

What it does   trains all rows together, step by step; large models and convolutions on a CPU one row after another;
               divides the rows of long rounds among worker processes
When           always; `FlatModel.stacked` says whether rows are stacked, `workers` limits the number of processes
What it gains  5.3 x on the digits grid
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch

from waffle_fl.algorithms import Algorithm
from waffle_fl.batches import Batches, RowNumbers, select
from waffle_fl.engines import cuda_graphs
from waffle_fl.engines.candidate_losses import CandidateLosses
from waffle_fl.engines.cuda_graphs import Graphs, one_step
from waffle_fl.engines.private_gradients import step_grad
from waffle_fl.engines.tree import rows_of, stack, stack_into, tree_map, where_rows
from waffle_fl.engines.workers import WorkerPolicy, Workers, shared
from waffle_fl.models import FlatModel

Selection: TypeAlias = Callable[[int], list[int]]  # round -> its rows
CHUNK_BYTES = {"cpu": 2 << 30, "cuda": 24 << 30}


class RowTraining:
    """Trains a fixed set of rows, so that each worker process can own some of them.

    With partial participation `selection` maps a round to its rows, numbered as in `batches`, always equally many.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: FlatModel,
        batches: Batches,
        graphs: Graphs,
        sizes: Sequence[int],
        cores: int,
        losses: CandidateLosses,
        selection: Selection | None = None,
    ) -> None:
        self.algorithm, self.model, self.batches, self._graphs = algorithm, model, batches, graphs
        self._losses, self._selection = losses, selection
        self._run_slices = _run_slices(sizes)
        self._policy = WorkerPolicy(min(cores, sum(sizes)))
        self._templates: list[Any] = []  # states with a round's shapes: down, agents, agents afterwards, up
        self._shared: list[Any] = []
        self._workers: Workers | None = None

    def round(self, given: Sequence[tuple[Any, Any]], r: int, attempt: int, rounds_left: int) -> list[tuple[Any, Any]]:
        """A2.5-12: for each federation, map (down, agents' states) to (agents' states afterwards, updates).

        Workers overwrite the results of the previous round.
        """
        if not self._workers and self._policy.pays(rounds_left):
            self._start_workers()
        if self._workers:
            for target, states in zip(self._shared, zip(*given, strict=True), strict=False):
                stack_into(target, states)
            self._workers(r, attempt)
            agents, up = self._shared[2:]
        else:
            with self._policy.timed():
                down, before = (stack(states) for states in zip(*given, strict=True))
                trained = [self._train(down, before, r, attempt, chunk) for chunk in self._chunks(1, down, r)]
                agents, up = (stack(states) for states in zip(*trained, strict=True))
                self._templates = [down, before, agents, up]
        return [(rows_of(agents, rows), rows_of(up, rows)) for rows in self._run_slices]

    def close(self) -> None:
        if self._workers:
            self._workers.close()

    def _start_workers(self) -> None:
        self._shared = [shared(state) for state in self._templates]
        down, agents, *made = self._shared
        shares = self._policy.cores

        def work(share: int, r: int, attempt: int) -> None:
            for chunk in self._chunks(shares, down, r)[share::shares]:
                for target, state in zip(made, self._train(down, agents, r, attempt, chunk), strict=True):
                    tree_map(lambda out, rows: out.copy_(rows), rows_of(target, chunk), state)

        self._workers = Workers(work, shares)

    def _train(self, down: Any, agents: Any, r: int, attempt: int, chunk: slice) -> tuple[Any, Any]:
        """A2.5-12 for the rows of one chunk."""
        down, agents = rows_of(down, chunk), rows_of(agents, chunk)
        rows = self._selection(r)[chunk] if self._selection else chunk
        down = self._losses.into(down, agents, rows, r)
        local = self.algorithm.begin(down, agents)  # A2.5
        if hasattr(self.algorithm, "rehearse") and hasattr(self.algorithm, "rehearsed"):
            local = self._rehearse(self.algorithm.rehearse, self.algorithm.rehearsed, local, r, attempt, rows)
        local = self._steps(local, r, attempt, rows)  # A2.6-8
        return self.algorithm.finish(down, agents, local)  # A2.9-12

    def _rehearse(
        self, rehearse: Callable[..., Any], share: float, local: Any, r: int, attempt: int, rows: RowNumbers
    ) -> Any:
        """Run `rehearse` on the round's first mini-batches: the algorithm adapts its starting point, nothing trains."""
        plan, sizes = self.batches.plan(r, attempt, rows), self.batches.sizes(rows, padded=self.model.stacked)
        epochs = zip(select(self.batches.per_epoch, rows), select(self.batches.steps, rows), strict=True)
        counts = [min(math.ceil(share * epoch), steps) for epoch, steps in epochs]
        last = torch.tensor(counts, device=self.model.device)
        for t, size in zip(torch.arange(max(counts), device=self.model.device)[:, None], sizes, strict=False):
            grad = step_grad(self.model, self.batches, plan, t, size)
            local = where_rows(t < last, rehearse(local, grad), local)
        return local

    def _steps(self, local: Any, r: int, attempt: int, rows: RowNumbers) -> Any:
        """Train the rows of one chunk on all mini-batches of a round."""
        plan, steps = self.batches.plan(r, attempt, rows), select(self.batches.steps, rows)
        sizes, together = self.batches.sizes(rows, padded=self.model.stacked), min(steps)
        if cuda_graphs.applies(self.model):
            varying = self._selection is not None
            return self._graphs.run(self.algorithm, self.batches, local, plan, sizes, steps, varying)
        for t, size in enumerate(sizes):
            step = torch.tensor([t], device=self.model.device)
            local = one_step(self.algorithm, self.model, self.batches, local, plan, step, size, t < together)
        return local

    def _chunks(self, shares: int, down: Any, r: int) -> list[slice]:
        """Return the chunks of rows that train together.

        Stacked: one share, or as many rows as fit in memory. Unstacked: up to `model.parallel_rows` equally long rows.
        """
        lengths = self.batches.lengths
        lengths = select(lengths, self._selection(r)) if self._selection else lengths
        if not self.model.stacked:
            equal_lengths = _run_slices([len(list(group)) for _, group in groupby(lengths)])
            return [chunk for rows in equal_lengths for chunk in _split(rows, self.model.parallel_rows)]
        row_bytes = max(16 * self.model.size * self.model.dtype.itemsize, 4 * sum(field[0].nbytes for field in down))
        most = max(1, CHUNK_BYTES[self.model.device.type] // row_bytes)
        return _split(slice(0, len(lengths)), min(most, -(-len(lengths) // shares)))


def _run_slices(sizes: Sequence[int]) -> list[slice]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _split(rows: slice, size: int) -> list[slice]:
    return [slice(i, min(i + size, rows.stop)) for i in range(rows.start, rows.stop, size)]
