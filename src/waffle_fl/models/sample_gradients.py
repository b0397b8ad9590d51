"""Gradients of single samples, clipped and summed: what DP-SGD needs instead of the mean gradient of a batch.

Where rows are stacked, each sample becomes a row of its own, with a batch of one. Other models take one row after
another under `torch.func.vmap`, which shares the row's parameters among its samples. On a CPU padding is left out; on a
GPU it is computed, so that a step has fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from waffle_fl.models.batch import Batch
from waffle_fl.models.folded import SeededDropout
from waffle_fl.models.passes import Passes

BLOCK_BYTES = {"cpu": 256 << 20, "cuda": 8 << 30}  # memory for gradients of single samples

StackedGrad: TypeAlias = Callable[[Tensor, Batch], Tensor]  # gradients of rows, each with its own parameters


def sums_of_stack(gradient: StackedGrad, params: Tensor, batch: Batch, clip: float) -> Tensor:
    """Return, per row, the sum of its samples' gradients, each scaled down to a norm of at most `clip`.

    `gradient` computes the gradients of a stack of rows.
    """
    flat, weight = _as_rows(batch), batch.weight.flatten()
    row = torch.arange(len(params), device=params.device).repeat_interleave(batch.weight.shape[1])
    sums = torch.zeros_like(params)
    places = torch.arange(len(row), device=row.device) if params.is_cuda else weight.nonzero().flatten()
    for some in _blocks(places, params):
        gradients = gradient(params[row[some]], Batch(*(part[some] for part in flat)))
        sums.index_add_(0, row[some], _clipped(gradients, weight[some], clip))
    return sums


def sums_of_rows(passes: Passes, params: Tensor, stats: Tensor, batch: Batch, clip: float) -> Tensor:
    """The same for one row after another, each with one set of parameters for all its samples."""
    gradient, sums = torch.func.grad(partial(_loss, passes)), torch.zeros_like(params)
    for i in range(len(params)):
        flat, weight = _as_rows(Batch(*(part[i : i + 1] for part in batch))), batch.weight[i]
        carried = passes.stats.unflatten(stats[i])
        places = torch.arange(len(weight), device=weight.device) if params.is_cuda else weight.nonzero().flatten()
        for some in _blocks(places, params):
            of_samples = torch.vmap(gradient, in_dims=(None, None, 0, 0, 0), randomness="error")
            gradients = of_samples(params[i], carried, flat.x[some], flat.y[some], flat.key[some])
            sums[i] += _clipped(gradients, weight[some], clip).sum(dim=0)
    return sums


def plain_sums(passes: Passes, params: Tensor, stats: Tensor, batch: Batch, clip: float) -> Tensor:
    """The same for one sample after another, by autograd on the module: the reference for the faster ways."""
    sums = torch.zeros_like(params)
    for i in range(len(params)):
        flat = _as_rows(Batch(*(part[i : i + 1] for part in batch)))
        for j in batch.weight[i].nonzero().flatten().tolist():
            g = passes.plain(params[i], stats[i], Batch(*(part[j] for part in flat))).params
            if g.norm().isfinite():
                sums[i] += g * (clip / g.norm().clamp(min=clip))
    return sums


def _loss(passes: Passes, params: Tensor, carried: dict[str, Tensor], x: Tensor, y: Tensor, key: Tensor) -> Tensor:
    """Return the loss of one sample, as a batch of one."""
    with SeededDropout(key):
        output = passes._call({**passes.params.unflatten(params), **carried}, x)
    return passes.loss(output, y).sum()


def _as_rows(batch: Batch) -> Batch:
    """Return a batch whose rows are the samples of this one; each has a key of its own."""
    rows, size = batch.weight.shape
    keys = batch.key[:, None] + (torch.arange(1, size + 1, device=batch.key.device) << 40)
    x, y = (part.reshape(rows * size, 1, *part.shape[2:]) for part in (batch.x, batch.y))
    return Batch(x, y, torch.ones_like(batch.weight).view(-1, 1), keys.flatten())


def _blocks(places: Tensor, params: Tensor) -> tuple[Tensor, ...]:
    """Divide places into blocks whose gradients fit in memory."""
    size = BLOCK_BYTES[params.device.type] // (3 * params.shape[1] * params.element_size())
    return torch.split(places, max(1, size)) if len(places) else ()


def _clipped(gradients: Tensor, weight: Tensor, clip: float) -> Tensor:
    """Return each gradient scaled down to a norm of at most `clip`; 0 for padding, and where the norm is not finite."""
    norms = gradients.norm(dim=1, keepdim=True)
    counted = norms.isfinite() & (weight[:, None] > 0)
    return torch.where(counted, gradients * (clip / norms.clamp(min=clip)), 0.0)
