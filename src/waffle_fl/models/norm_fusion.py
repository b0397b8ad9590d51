"""Rewrites a module so that batch normalisation, the addition of a shortcut and ReLU are one operation."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

ADDITIONS = {operator.add, torch.add}
RELUS = {F.relu, torch.relu}
CHANNELS = 8  # a GPU's matrix units multiply bfloat16 images whose channels are a multiple of this


class FusedNorm(nn.Module):
    """A BatchNorm2d layer of a module, joined with what follows it."""

    def __init__(self, norm: nn.BatchNorm2d, rectified: bool, uses: int) -> None:
        super().__init__()
        self.norm, self.rectified, self.uses = norm, rectified, uses

    def forward(self, x: Tensor, shortcut: Tensor | None) -> tuple[Tensor, ...]:
        """Return the output once for each of its uses."""
        from waffle_fl.models.norm_kernels import NormRelu  # triton is there only with a GPU

        norm = self.norm
        statistics = (norm.running_mean, norm.running_var, norm.momentum, norm.eps)
        apply: Callable[..., tuple[Tensor, ...]] = NormRelu.apply
        return apply(x, shortcut, norm.weight, norm.bias, *statistics, self.rectified, self.uses)


def with_fused_norms(module: nn.Module) -> nn.Module | None:
    """Return a graph of the module with fused normalisation, which shares its tensors; None where that is impossible.

    A module without BatchNorm2d gains nothing, and one whose forward pass depends on values has no graph.
    """
    if not any(_is_fusible(part) for part in module.modules()):
        return None
    try:
        traced = fx.symbolic_trace(module)
    except Exception:  # a forward pass may fail in any way when it is traced
        return None
    parts = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        if node.op == "call_module" and _is_fusible(parts[node.target]):
            _fuse(traced, node, parts)
    traced.graph.lint()
    traced.recompile()
    return traced


def first_convolutions(traced: nn.Module) -> dict[str, int]:
    """Return the weights of convolutions that alone read the images, and the channels that a GPU multiplies well."""
    assert isinstance(traced, fx.GraphModule)
    parts, (images, *_) = dict(traced.named_modules()), traced.graph.nodes
    if len(images.users) != 1:
        return {}
    (node,) = images.users
    conv = parts.get(str(node.target))
    if type(conv) is not nn.Conv2d or conv.groups > 1 or conv.in_channels % CHANNELS == 0:
        return {}
    return {f"{node.target}.weight": -(-conv.in_channels // CHANNELS) * CHANNELS}


def _is_fusible(part: nn.Module) -> bool:
    return type(part) is nn.BatchNorm2d and part.affine and part.track_running_stats


def _fuse(traced: fx.GraphModule, node: fx.Node, parts: dict[str, nn.Module]) -> None:
    """Replace the layer and the addition and ReLU after it, as far as nothing else reads what is between them."""
    last, shortcut = node, None
    added = _only_user(node)
    if added is not None and _calls(added, ADDITIONS) and len(added.args) == 2 and not added.kwargs:
        others = [argument for argument in added.args if argument is not node]
        rectified = _only_user(added)
        if len(others) == 1 and isinstance(others[0], fx.Node) and rectified and _is_relu(rectified, parts):
            last, shortcut = rectified, others[0]
    elif added is not None and _is_relu(added, parts):
        last = added
    name, users = f"fused_norm_{node.name}", list(last.users)
    traced.add_module(name, FusedNorm(parts[node.target], last is not node, len(users)))  # type: ignore[index, arg-type]
    with traced.graph.inserting_before(last):
        fused = traced.graph.call_module(name, (node.args[0], shortcut))
        outputs = [traced.graph.call_function(operator.getitem, (fused, i)) for i in range(len(users))]
    for user, output in zip(users, outputs, strict=True):
        user.replace_input_with(last, output)
    for replaced in dict.fromkeys((last, added, node)):
        if replaced is not None and not replaced.users:
            traced.graph.erase_node(replaced)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _calls(node: fx.Node, functions: set[Any]) -> bool:
    return node.op == "call_function" and node.target in functions


def _is_relu(node: fx.Node, parts: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return type(parts.get(str(node.target))) is nn.ReLU
    return _calls(node, RELUS) or (node.op == "call_method" and node.target == "relu")
