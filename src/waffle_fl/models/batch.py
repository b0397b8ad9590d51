"""Rows of parameters, mini-batches and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch.nn.functional as F
from torch import Tensor

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (output, target) -> one loss per sample


class Net(NamedTuple):
    """One model per row: trained parameters, and running statistics with frozen parameters (may be empty)."""

    params: Tensor
    stats: Tensor


class Batch(NamedTuple):
    """One mini-batch per row. Rows with fewer samples are padded; padding has weight 0."""

    x: Tensor  # (N, B, ...)
    y: Tensor  # (N, B)
    weight: Tensor  # (N, B)
    key: Tensor  # (N,): the seed of this step's random draws


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """For regression: one number per sample, as (n, 1) or (n,)."""
    return (output.reshape(target.shape) - target) ** 2


def output_is_loss(output: Tensor, target: Tensor) -> Tensor:
    """For modules, such as Quadratic, that compute their own loss."""
    return output
