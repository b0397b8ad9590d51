"""Synthetic problems with a known solution: Gaussian classes, and quadratics with a closed-form optimum."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from waffle_fl.randomness import generator

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


def gaussian_classes(
    seed: int, classes: int = 10, dimensions: int = 20, train: int = 2000, test: int = 1000, spread: float = 1.0
) -> tuple[Floats, Labels, Floats, Labels]:
    """Return Gaussian classes around random centres; a larger `spread` increases their overlap."""
    rng = generator(seed, "gaussian classes")
    centres = 2 * rng.standard_normal((classes, dimensions))
    y = np.concatenate([np.arange(train) % classes, np.arange(test) % classes])
    x = (centres[y] + spread * rng.standard_normal((train + test, dimensions))).astype(np.float32)
    return x[:train], y[:train], x[train:], y[train:]


class SyntheticQuadratics(NamedTuple):
    """Agent i minimises the mean over its samples b of 1/2 sum_j h_j (theta_j - b_j)^2."""

    curvature: Tensor  # (D,), h
    samples: list[Tensor]  # per agent (n_i, D)

    def optimum(self, weights: Tensor) -> Tensor:
        """Return the minimiser of sum_i weights_i f_i: the weighted mean of the agents' sample means."""
        means = torch.stack([b.mean(dim=0) for b in self.samples])
        return (weights / weights.sum()) @ means


def quadratics(
    seed: int, agents: int = 5, dimensions: int = 4, samples: int = 32, distance: float = 1.0, noise: float = 0.1
) -> SyntheticQuadratics:
    """Return agents whose optima are about `distance` apart and whose samples have this `noise`."""
    rng = generator(seed, "quadratics")
    curvature = torch.from_numpy(np.linspace(0.5, 1.5, dimensions))
    centres = distance * rng.standard_normal((agents, 1, dimensions))
    drawn = centres + noise * rng.standard_normal((agents, samples, dimensions))
    return SyntheticQuadratics(curvature, [torch.from_numpy(b) for b in drawn])
