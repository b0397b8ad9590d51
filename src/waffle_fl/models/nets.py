"""The built-in networks. Any other `torch.nn.Module` works the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 2048  # largest number of features that the linear layer of `cnn_pooled_gn` sees
POOLED = 4  # largest height and width of the features that the linear layer of `cnn_gn` sees


class LeNet5(nn.Module):
    """LeNet-5 on 28x28 images padded to 32x32: 61,706 parameters for one channel and ten classes."""

    def __init__(
        self,
        shape: Sequence[int] = (1, 28, 28),
        classes: int = 10,
        activation: Literal["relu", "tanh"] = "relu",
        pooling: Literal["max", "average"] = "max",
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.activation = torch.relu if activation == "relu" else torch.tanh
        self.pool = F.max_pool2d if pooling == "max" else F.avg_pool2d
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.activation(self.conv1(x)), 2)
        x = self.pool(self.activation(self.conv2(x)), 2)
        x = self.activation(self.fc1(x.flatten(1)))
        x = self.activation(self.fc2(x))
        return self.fc3(x)  # type: ignore[no-any-return]


def mlp(shape: Sequence[int], classes: int, hidden: int = 64) -> nn.Module:
    """One hidden layer of rectified units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))


def linear(shape: Sequence[int], classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """A small network for images of any size: three convolutions, their mean over the image, one linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), Mean()),
        nn.Linear(64, classes),
    )


def cnn_pooled_gn(shape: Sequence[int], classes: int) -> nn.Module:
    """Convolutions with group normalisation for images of any size, pooled to at most 2,048 features, one linear layer.

    Group normalisation has no statistics that agents would have to share. It follows the pooling: it then sees a
    quarter of the numbers, which saves up to half of a step on a CPU. Unlike the mean of `cnn`, the linear layer sees
    where in the image a feature is.
    """
    return _pooled_convolutions(
        shape, classes, lambda number, features: number > 1 and prod(features) <= FEATURES, pooled_first=True
    )


def cnn_gn(shape: Sequence[int], classes: int) -> nn.Module:
    """Like `cnn_pooled_gn`, but pooled to at most 4 x 4, and normalised before pooling.

    Earlier versions trained it on the user's own images; it is kept so that these models can be read.
    """
    return _pooled_convolutions(shape, classes, lambda _, features: max(features[1:]) <= POOLED, pooled_first=False)


def _pooled_convolutions(
    shape: Sequence[int], classes: int, ends: Callable[[int, Sequence[int]], bool], pooled_first: bool
) -> nn.Module:
    """Convolutions, each pooled, until `ends` of their number and the shape of the features, and one linear layer."""
    layers: list[nn.Module] = []
    for number, outputs in enumerate((16, 32, *[64] * 16), start=1):
        pool, norm = nn.MaxPool2d(2, ceil_mode=True), nn.GroupNorm(8, outputs)
        layers += [nn.Conv2d(shape[0], outputs, 3, padding=1), *((pool, norm) if pooled_first else (norm, pool))]
        layers += [nn.ReLU()]  # after pooling, with which it commutes: on fewer numbers
        shape = (outputs, *(-(-size // 2) for size in shape[1:]))
        if ends(number, shape):
            break
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(prod(shape), classes))


def cnn_1d_gn(shape: Sequence[int], classes: int) -> nn.Module:
    """A network like `cnn_gn` for signals (channels, length) of any length, pooled to at most 8 positions."""
    channels, length = shape
    layers: list[nn.Module] = []
    for outputs in (32, *[64] * 16):
        layers += [nn.Conv1d(channels, outputs, 5, padding=2), nn.GroupNorm(8, outputs)]
        layers += [nn.MaxPool1d(2, ceil_mode=True), nn.ReLU()]
        channels, length = outputs, -(-length // 2)
        if length <= 2 * POOLED:
            break
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * length, classes))


def cnn_1d(shape: Sequence[int], classes: int) -> nn.Module:
    """A small network like `cnn`, with two convolutions, for signals (channels, length) of any length."""
    return nn.Sequential(
        *(nn.Conv1d(shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2, ceil_mode=True)),
        *(nn.Conv1d(32, 64, 5, padding=2), nn.ReLU(), Mean()),
        nn.Linear(64, classes),
    )


class Mean(nn.Module):
    """The mean over all axes but samples and channels; unlike adaptive pooling it is deterministic on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(dim=2)


class Quadratic(nn.Module):
    """A point theta whose loss at a sample b is 1/2 sum_j h_j (theta_j - b_j)^2, so every optimum is known."""

    def __init__(self, curvature: Tensor) -> None:
        super().__init__()
        self.curvature = curvature
        self.theta = nn.Parameter(torch.zeros_like(curvature))

    def forward(self, b: Tensor) -> Tensor:
        return 0.5 * (self.curvature * (self.theta - b) ** 2).sum(dim=-1)
