"""Poisson batches: each sample is in each mini-batch with one fixed probability, as DP-SGD requires.

Shuffled epochs are not Poisson sampling, and the accounting of one does not hold for the other. An epoch has as many
batches as without differential privacy, and the expected size of a batch is their mean size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from waffle_fl.batches import Batches, BatchPlan, RowNumbers, batch_sizes, select
from waffle_fl.randomness import LARGEST, Draw, noise


class RowNoise(NamedTuple):
    """How gradients are made private."""

    clip: float  # largest norm of a sample's gradient
    deviations: Sequence[float]  # of the noise in the sum of clipped gradients, per row
    gradients: int  # gradients of different models that a step of the method computes


def sampling_rate(samples: int, batch_size: int, remainder: Any) -> float:
    """Return the probability of a sample to be in a batch: the mean batch size of an epoch as a share of them."""
    sizes = batch_sizes(samples, batch_size, remainder) if samples else []
    return sum(sizes) / len(sizes) / samples if sizes else 0.0


def room_for(batch_size: int) -> int:
    """Return the number of samples that a batch has room for: more are drawn with a probability below 1e-13."""
    return batch_size + math.ceil(8 * math.sqrt(batch_size)) + 8


class PoissonBatches(Batches):
    """Mini-batches that are Poisson samples; `draw` replaces the random numbers that must be secret."""

    def __init__(self, *data: Any, noise_of: RowNoise, **options: Any) -> None:
        super().__init__(*data, **options)
        self.noise_of, self.room = noise_of, room_for(self.batch_size)
        self.draw: Draw = noise
        self._rates = [sampling_rate(n, self.batch_size, self.remainder) for n in self.lengths]

    def sizes(self, rows: RowNumbers, padded: bool) -> list[int]:
        """Return the room of each step: the sizes of the batches are random."""
        return [self.room] * max(select(self.steps, rows))

    def plan(self, r: int, attempt: int, rows: RowNumbers) -> BatchPlan:
        """Return the samples of each step; the places that are not filled are padding."""
        plan, lengths, rates = super().plan(r, attempt, rows), select(self.lengths, rows), select(self._rates, rows)
        device, table = self.device, self._table[rows]
        longest = max(self.room, table.shape[1])
        beyond = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device)[:, None]
        limit = torch.tensor([min(int(rate * LARGEST), LARGEST) for rate in rates], device=device)[:, None]
        keys, chosen, weights = self._keys("poisson", rows, r, attempt), [], []
        for t in range(plan.active.shape[1]):
            draws = self.draw(keys + (t << 16), longest).to(device).masked_fill(beyond, LARGEST)
            least, places = draws.topk(self.room, dim=1, largest=False, sorted=True)
            chosen.append(places)
            weights.append((least < limit) & plan.active[:, t : t + 1])
        if not chosen:
            return plan
        places, weight = torch.stack(chosen, dim=1), torch.stack(weights, dim=1).to(self.dtype)
        order = places.clamp(max=max(table.shape[1] - 1, 0)).flatten(1)
        drifted = weight[:, :, :0].bool()
        if self._drift_times is not None:
            drifted = (self._drift_times[rows].gather(1, order) < r / self._rounds).view(places.shape)
        deviation = torch.tensor(select(self.noise_of.deviations, rows), dtype=torch.float64, device=device)
        expected = torch.tensor(rates, dtype=torch.float64, device=device) * torch.tensor(lengths, device=device)
        return plan._replace(
            samples=table.gather(1, order).view(places.shape),
            weight=weight,
            drifted=drifted,
            noise_keys=self._keys("noise", rows, r, attempt),
            noise=torch.stack([deviation, expected], dim=1).to(self.dtype),
        )
