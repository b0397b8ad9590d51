"""Deep Layer Aggregation (Yu et al. 2018) for 32x32 images: 16,291,386 parameters, 43 BatchNorm layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn_relu(inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Tree(nn.Module):
    """A binary tree of residual blocks whose root aggregates every node on the way."""

    def __init__(self, inputs: int, outputs: int, depth: int, stride: int) -> None:
        super().__init__()
        self.depth = depth
        if depth > 1:
            self.entry = Residual(inputs, outputs, stride)
            self.subtrees = nn.ModuleList([Tree(inputs, outputs, d, stride) for d in range(depth - 1, 0, -1)])
        self.left = Residual(outputs if depth > 1 else inputs, outputs, 1 if depth > 1 else stride)
        self.right = Residual(outputs, outputs)
        self.root = conv_bn_relu((depth + 2 if depth > 1 else 2) * outputs, outputs, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        nodes = []
        if self.depth > 1:
            nodes.append(self.entry(x))
            for subtree in self.subtrees:
                x = subtree(x)
                nodes.append(x)
        left = self.left(x)
        right = self.right(left)
        return self.root(torch.cat([*nodes, left, right], dim=1))  # type: ignore[no-any-return]


class DLA(nn.Module):
    """Three plain layers, four trees of 64 to 512 channels, a linear classifier."""

    def __init__(self, shape: Sequence[int] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv_bn_relu(shape[0], 16),
            conv_bn_relu(16, 16),
            conv_bn_relu(16, 32),
            Tree(32, 64, depth=1, stride=1),
            Tree(64, 128, depth=2, stride=2),
            Tree(128, 256, depth=2, stride=2),
            Tree(256, 512, depth=1, stride=2),
        )
        self.classify = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(F.avg_pool2d(self.features(x), 4).flatten(1))  # type: ignore[no-any-return]
