"""The adaptive degree of personalisation: what the agents' gradients say of Alice, in place of the clock.

A control variate c_i is the mean gradient of agent i over its last round, free of the correction that makes all updates
alike; so the server can compare agents without any data. Of every round it takes two cosines:

    s_r   of each other agent's gradient with Alice's, negative ones as 0: their mean
    t_r   of the mean of the others' gradients with Alice's

and from them two numbers and the degree of both Omega and Psi:

    kinship   k = sum s_r^3 / sum s_r^2        how much alike the agents are: rounds in which all is noise say little
    strife    z = sum max(1/2 - t_r, 0)        how long and how much the others have been of little help to Alice
    degree    k + (1 - k) exp(-z)              global while they help, then as personal as the agents are unlike

The degree begins at 1 and only ever falls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import TINY, Round, Rows, cosines, row_of, uniform, weighted_sum

HELPFUL = 0.5  # cosine of the others' mean gradient with Alice's


class GradientStatistics(NamedTuple):
    """What the server remembers of the rounds so far: four numbers."""

    squares: Tensor  # sum of s_r^2
    cubes: Tensor  # sum of s_r^3
    strife: Tensor
    degree: Tensor


def start(device: torch.device) -> GradientStatistics:
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return GradientStatistics(zero, zero, zero, zero + 1)


def observe(previous: GradientStatistics, c_i: Rows, now: Round) -> GradientStatistics:
    """The witness after a round that left the agents with the control variates c_i."""
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
