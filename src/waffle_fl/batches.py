"""Batches: the mini-batches of every row in every round; a row's order does not depend on what else is stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from waffle_fl.augment import darkest, shift_and_flip
from waffle_fl.federation import Federation
from waffle_fl.models.flat import Batch
from waffle_fl.randomness import derive, shuffle

T = TypeVar("T")
Remainder: TypeAlias = Literal["spread", "keep", "drop"]
"""What happens to the samples that do not fill a mini-batch: see `batch_sizes`."""


RowNumbers: TypeAlias = slice | list[int]
"""Rows of a stack: a slice, or single rows in any order."""


def select(values: Sequence[T], rows: RowNumbers) -> list[T]:
    """Return the values of these rows."""
    return list(values[rows]) if isinstance(rows, slice) else [values[i] for i in rows]


def batches_per_epoch(samples: int, batch_size: int, remainder: Remainder) -> int:
    """Return the number of mini-batches in one pass over an agent's samples."""
    if remainder == "drop" and samples >= batch_size:
        return samples // batch_size
    return -(-samples // batch_size)


def batch_sizes(samples: int, batch_size: int, remainder: Remainder) -> list[int]:
    """Return the sizes of the mini-batches in one pass over an agent's samples.

    `spread` makes ceil(n / batch_size) batches whose sizes differ by at most one, the larger ones first. `keep` fills
    all batches but the last, as a PyTorch loader does; the last one may be tiny. `drop` leaves the last one out, unless
    it is the only one.
    """
    batches = batches_per_epoch(samples, batch_size, remainder)
    if remainder == "spread":
        return [samples // batches + (b < samples % batches) for b in range(batches)]
    return [min(batch_size, samples - b * batch_size) for b in range(batches)]


def steps_of(samples: int, batch_size: int, epochs: int, remainder: Remainder, steps_per_round: int = 0) -> int:
    """Return K_i: the mini-batches of one round at an agent; `steps_per_round` of them unless it is 0."""
    return min(samples, 1) * steps_per_round or epochs * batches_per_epoch(samples, batch_size, remainder)


class BatchPlan(NamedTuple):
    """The mini-batches of one round: the samples of each row and step, and which of them are padding."""

    samples: Tensor  # (rows, steps, batch), into the pool
    weight: Tensor  # (rows, steps, batch), 0 for padding
    active: Tensor  # (rows, steps), False after a row's K_i steps
    steps: Tensor  # (rows,), K_i
    relabel: Tensor  # (rows, classes); with concept drift (rows, 2 classes), the later concepts last
    keys: Tensor  # (rows,), the seeds of this round's dropout
    drifted: Tensor  # (rows, steps, batch): whether the sample has its later label; empty without concept drift
    noise_keys: Tensor  # (rows,), the seeds of this round's noise
    noise: Tensor  # (rows, 2): deviation of the noise, expected batch size; (rows, 0) without differential privacy


class Batches:
    """Mini-batches for the rows of one or many federations."""

    def __init__(
        self,
        federations: Sequence[Federation],
        seeds: Sequence[int],
        batch_size: int,
        epochs: int,
        dtype: torch.dtype,
        augment: bool = False,
        flips: bool = True,
        rounds: int = 1,
        agents: Sequence[Sequence[int]] | None = None,  # of each federation; None: all
        remainder: Remainder = "spread",
        steps_per_round: int = 0,
    ) -> None:
        agents = agents or [range(f.agents) for f in federations]
        self.batch_size, self.dtype, self.remainder = batch_size, dtype, remainder
        self.x, self.y, offsets = _pooled(federations)
        self._border, self._flips = darkest(self.x) if augment else None, flips
        self.device = self.x.device
        rows = [
            (f, seed, offset, i)
            for f, seed, offset, some in zip(federations, seeds, offsets, agents, strict=True)
            for i in some
        ]
        self._agent_keys = [(seed, f.ids[i]) for f, seed, _, i in rows]
        self.lengths = [len(f.train[i]) for f, _, _, i in rows]
        samples = [f.train[i] + offset for f, _, offset, i in rows]
        self._table = _padded(samples)
        self._relabel = torch.stack([f.relabel[i] for f, _, _, i in rows])
        self._classes, self._rounds = self._relabel.shape[1], rounds
        self._drift_times: Tensor | None = None
        if any(f.later is not None for f in federations):
            turns = [_drift_times(f, i) for f, _, _, i in rows]
            self._drift_times = torch.nn.utils.rnn.pad_sequence(turns, batch_first=True)
            later = torch.stack([(f.relabel if f.later is None else f.later)[i] for f, _, _, i in rows])
            self._relabel = torch.cat([self._relabel, later], dim=1)
        self.per_epoch = [batches_per_epoch(n, batch_size, remainder) for n in self.lengths]
        self.steps = [steps_of(n, batch_size, epochs, remainder, steps_per_round) for n in self.lengths]
        self._largest = max(self.lengths, default=0), max(self.steps, default=0)  # of 100,000 agents it takes a while

    def sizes(self, rows: RowNumbers, padded: bool) -> list[int]:
        """Return the batch size of each step: the full one if rows are padded; unpadded rows must be equally long."""
        if padded:
            return [self.batch_size] * max(select(self.steps, rows))
        (length,) = set(select(self.lengths, rows))
        steps, per_epoch = select(self.steps, rows)[0], max(1, select(self.per_epoch, rows)[0])
        return (batch_sizes(length, self.batch_size, self.remainder) * -(-steps // per_epoch))[:steps]

    def plan(self, r: int, attempt: int, rows: RowNumbers) -> BatchPlan:
        """Return the order of the samples in round r, for these rows.

        A plan of single rows is as long as that of all rows: cohorts of one size have plans of one shape.
        """
        lengths, steps = select(self.lengths, rows), select(self.steps, rows)
        alike = isinstance(rows, list)
        longest, most = self._largest if alike else (max(lengths), max(steps))
        table, length = self._table[rows, :longest], torch.tensor(lengths, device=self.device)
        batches = [max(1, count) for count in select(self.per_epoch, rows)]
        epochs = max(1, *(-(-k // count) for k, count in zip(steps, batches, strict=True)))
        orders = [shuffle(self._keys("batches", rows, r, epoch, attempt), length, longest) for epoch in range(epochs)]
        t = torch.arange(most, device=self.device)
        per_epoch = torch.tensor(batches, device=self.device)[:, None]
        first, end = self._edges(t % per_epoch, per_epoch, length[:, None])
        within = first[:, :, None] + torch.arange(self.batch_size, device=self.device)
        epoch_of = (t // per_epoch).clamp(max=epochs - 1)
        position = (epoch_of[:, :, None] * longest + within.clamp(max=max(longest - 1, 0))).flatten(1)
        order = torch.cat(orders, dim=1).gather(1, position)
        samples = table.gather(1, order).view(within.shape)
        count = torch.tensor(steps, device=self.device)
        active = t < count[:, None]
        weight = ((within < end[:, :, None]) & active[:, :, None]).to(self.dtype)
        drifted = weight[:, :, :0].bool()
        if self._drift_times is not None:
            drifted = (self._drift_times[rows].gather(1, order) < r / self._rounds).view(within.shape)
        keys = self._keys("dropout", rows, r, attempt)
        return BatchPlan(samples, weight, active, count, self._relabel[rows], keys, drifted, keys, weight[:, :0, 0])

    def _edges(self, batch: Tensor, batches: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Where the mini-batches of these numbers begin and end among a row's shuffled samples: see `batch_sizes`."""
        if self.remainder == "spread":
            size, larger = length // batches, length % batches
            first = batch * size + torch.minimum(batch, larger)
            return first, first + size + (batch < larger)
        first = batch * self.batch_size
        return first, torch.minimum(first + self.batch_size, length)

    def _keys(self, purpose: str, rows: RowNumbers, *words: int) -> Tensor:
        keys = [derive(seed, purpose, agent, *words) for seed, agent in select(self._agent_keys, rows)]
        return torch.tensor(keys, device=self.device)

    def batch(self, plan: BatchPlan, t: Tensor, size: int) -> Batch:
        """Gather the samples of step t (a tensor of one element, so that a CUDA graph can increment it)."""
        samples = plan.samples.index_select(1, t)[:, 0, :size]
        labels = self.y[samples]
        if self._drift_times is not None:
            labels = labels + self._classes * plan.drifted.index_select(1, t)[:, 0, :size]
        y = labels if labels.is_floating_point() else plan.relabel.gather(1, labels)
        x = self.x.index_select(0, samples.flatten()).view(*samples.shape, *self.x.shape[1:])
        keys = plan.keys + (t << 16)
        if self._border is not None:
            x = shift_and_flip(x, keys, self._border, self._flips)
        return Batch(x, y, plan.weight.index_select(1, t)[:, 0, :size], keys)


def _padded(samples: Sequence[Tensor]) -> Tensor:
    """Return the samples of each row, padded with its own first sample: NaN of another row would survive weight 0."""
    table = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=-1)
    first = table[:, :1].clamp(min=0) if table.shape[1] else table
    return torch.where(table < 0, first, table)


def _drift_times(federation: Federation, agent: int) -> Tensor:
    rows = federation.train[agent]
    if federation.turn is None:
        return torch.full((len(rows),), torch.inf, dtype=torch.float64, device=rows.device)
    return federation.turn[rows]


def _pooled(federations: Sequence[Federation]) -> tuple[Tensor, Tensor, list[int]]:
    """Return one pool of samples, labels and each federation's offset; federations that share tensors share a part."""
    pools: dict[int, tuple[Federation, int]] = {}
    offset, offsets = 0, []
    for f in federations:
        if id(f.x) not in pools:
            pools[id(f.x)] = (f, offset)
            offset += len(f.x)
        offsets.append(pools[id(f.x)][1])
    distinct = [f for f, _ in pools.values()]
    if len(distinct) == 1:
        return distinct[0].x, distinct[0].y, offsets
    return torch.cat([f.x for f in distinct]), torch.cat([f.y for f in distinct]), offsets
