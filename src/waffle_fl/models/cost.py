"""The counted cost of a network: multiply-adds of its forward pass, a measure that does not depend on the machine."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def multiply_adds(module: nn.Module, sample: Tensor) -> int:
    """Return the multiply-adds of a forward pass per sample, in convolutions and linear layers.

    `sample` is a batch of one. Other layers with parameters count each parameter once.
    """
    module, found = copy.deepcopy(module).eval(), []

    def count(layer: nn.Module, _: Any, output: Any) -> None:
        weights = sum(p.numel() for p in layer.parameters(recurse=False))
        if isinstance(layer, nn.Linear):
            weights = layer.weight.numel() * (output.numel() // layer.out_features)
        elif isinstance(layer, nn.modules.conv._ConvNd):
            weights = layer.weight.numel() * (output.numel() // layer.out_channels)
        found.append(weights)

    for layer in module.modules():
        layer.register_forward_hook(count)
    module(sample)
    return sum(found)
