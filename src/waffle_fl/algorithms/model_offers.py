"""Selection of the other agents' models that each agent receives: at most M per agent."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from waffle_fl.algorithms.contract import Rows
from waffle_fl.randomness import noise


class Offer(NamedTuple):
    """Models offered to each agent: M places per row, of which unused ones have `offered` False."""

    ids: Tensor  # (N, M)
    offered: Tensor  # (N, M), bool


def best_others(score: Tensor, available: Tensor, models: int, explore: float, r: Tensor) -> Offer:
    """Select for each agent the others with the highest score; a share `explore` is drawn at random."""
    agents = len(score)
    numbers = torch.arange(agents, device=score.device)
    able = available & (numbers != numbers[:, None])
    draws = noise(r * agents + numbers, agents).double() / 2.0**63
    drawn = draws < explore * models / max(1, agents - 1)
    score = torch.where(able, torch.where(drawn, torch.inf, score), -torch.inf)
    ids = score.argsort(dim=1, descending=True, stable=True)[:, :models]
    padding = models - ids.shape[1]
    return Offer(F.pad(ids, (0, padding)), F.pad(able.gather(1, ids), (0, padding)))


def packed(rows: Tensor, offer: Offer) -> Tensor:
    """Return (N, M, ...): the rows of the offered agents, and zeros in unused places."""
    held = offer.offered.view(*offer.offered.shape, *[1] * (rows.ndim - 1))
    return torch.where(held, rows[offer.ids], 0.0)


def spread(values: Tensor, offer: Offer) -> Tensor:
    """Return (N, N) from (N, M): each value moved to the column of the agent that it belongs to."""
    agents = len(values)
    zeros = torch.zeros(agents, agents, dtype=values.dtype, device=values.device)
    return zeros.scatter_add(1, offer.ids, torch.where(offer.offered, values, 0.0))


def mixed(weights: Tensor, own: Rows, others: Tensor) -> Rows:
    """Return weights_0 own + sum_j weights_j others_j, added one model at a time so that rows stay independent."""
    share = weights.to(own.dtype).unbind(1)
    total = share[0][:, None] * own
    for w, other in zip(share[1:], others.unbind(1), strict=True):
        total = torch.addcmul(total, w[:, None], other)
    return total
