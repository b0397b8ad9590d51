"""The adaptive degree of personalisation: computed from the agents' gradients instead of the round number.

A control variate c_i is the mean gradient of agent i over its last round, without the correction that makes all updates
similar. So the server can compare agents without any data. In every round it computes two cosines:

    s_r   mean over the other agents of max(cos(c_i, c_A), 0), A being Alice
    t_r   cosine of the mean of the others' gradients with Alice's gradient

and from them two statistics and the degree, which is used for both Omega and Psi:

    kinship   k = sum s_r^3 / sum s_r^2        similarity of the agents; rounds dominated by noise have little weight
    strife    z = sum max(1/2 - t_r, 0)        accumulated disagreement of the others with Alice
    degree    k + (1 - k) exp(-z)              near 1 while the others help, then falls towards k

The degree starts at 1 and never increases.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import TINY, Round, Rows, cosines, row_of, uniform, weighted_sum

HELPFUL = 0.5  # cosine of the others' mean gradient with Alice's; disagreement accumulates below it


class GradientStatistics(NamedTuple):
    """Statistics of the rounds so far: four numbers, kept by the server."""

    squares: Tensor  # sum of s_r^2
    cubes: Tensor  # sum of s_r^3
    strife: Tensor
    degree: Tensor


def start(device: torch.device) -> GradientStatistics:
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return GradientStatistics(zero, zero, zero, zero + 1)


def observe(previous: GradientStatistics, c_i: Rows, now: Round) -> GradientStatistics:
    """Return the statistics after a round, given the agents' new control variates c_i."""
    is_alice = torch.arange(len(c_i), device=c_i.device) == now.alice
    others = now.intact & ~is_alice & (now.samples > 0)
    alice_c = row_of(c_i, now.alice).double()
    s = (cosines(c_i, alice_c).clamp(min=0) * uniform(others)).sum()
    t = cosines(weighted_sum(uniform(others), c_i)[None], alice_c).squeeze(0)
    squares, cubes = previous.squares + s**2, previous.cubes + s**3
    kinship = cubes / squares.clamp(min=TINY)
    strife = previous.strife + (HELPFUL - t).clamp(min=0)
    degree = kinship + (1 - kinship) * torch.exp(-strife)
    return GradientStatistics(squares, cubes, strife, torch.minimum(previous.degree, degree))
