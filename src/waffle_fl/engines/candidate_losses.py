"""Losses of several models on an agent's own samples before it trains, for methods that choose among models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm
from waffle_fl.batches import Batches, RowNumbers, select
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel

SAMPLES = 512  # at most so many samples of an agent evaluate its candidates
WIDTH = 128  # fixed batch size, so that a row's bits do not depend on the sample counts of other rows


class CandidateLosses:
    """Evaluates candidate models on samples of each row, by loss or by errors.

    The samples are training data, or validation data if the method says so.

    Does nothing for a method without `candidates`.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: FlatModel,
        federations: Sequence[Federation],
        seeds: Sequence[int],
        rounds: int = 1,
    ) -> None:
        self.model, self._candidates = model, getattr(algorithm, "candidates", None)
        if self._candidates is None:
            return
        by_error = getattr(algorithm, "scored_by", "loss") == "error"
        self._scores = model.batch_errors if by_error else model.batch_losses
        held_out = getattr(algorithm, "scored_on", "training") == "validation"
        scored = [replace(f, train=tuple(_subsample(part) for part in _scored(f, held_out))) for f in federations]
        self._batches = Batches(scored, seeds, WIDTH, 1, model.dtype, rounds=rounds)

    def into(self, down: Any, agents: Any, rows: RowNumbers, r: int) -> Any:
        """Return `down` with each candidate's mean score under the labels of round r in its field `losses`."""
        if self._candidates is None or not any(select(self._batches.lengths, rows)):
            return down
        nets = self._candidates(down, agents)
        total = torch.zeros(nets.params.shape[:2], dtype=torch.float64, device=self.model.device)
        count = total[:, :1]
        plan = self._batches.plan(r, 0, rows)
        for t in torch.arange(plan.samples.shape[1], device=self.model.device)[:, None]:
            batch = self._batches.batch(plan, t, WIDTH)
            losses = [
                self._scores(*net, batch).double().sum(dim=1)
                for net in zip(nets.params.unbind(1), nets.stats.unbind(1), strict=True)
            ]
            total, count = total + torch.stack(losses, dim=1), count + batch.weight.double().sum(dim=1, keepdim=True)
        return down._replace(losses=total / count.clamp(min=1))


def _scored(federation: Federation, held_out: bool) -> list[Tensor]:
    pairs = zip(federation.train, federation.validation, strict=True)
    return [validation if held_out and len(validation) else train for train, validation in pairs]


def _subsample(rows: Tensor) -> Tensor:
    """Return at most SAMPLES of the rows, evenly spaced."""
    return rows[:: max(1, -(-len(rows) // SAMPLES))]
