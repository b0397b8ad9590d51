"""One forward pass for many models: every row has parameters of its own, and the rows are folded into the batch.

Only a function that takes parameters needs to know of rows: `linear`, `conv2d`, and dropout for its seed. All others
see a larger batch. A module that does anything else with its parameters, or mixes the samples of a batch, does not fit;
FlatModel finds that out by comparing one result with vmap's, and then uses vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from waffle_fl.randomness import noise

RELU = (torch.relu, F.relu)


class Stacking(TorchFunctionMode):
    """While active, weights with one dimension too many are read as one weight a row."""

    def __init__(self, keys: Tensor, precision: str) -> None:
        super().__init__()
        self.keys, self.rows, self.precision, self.dropouts = keys, len(keys), precision, 0
        self._to_rectify: dict[int, Tensor] = {}  # by identity: a ReLU whose turn comes with what reads it

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.max_pool2d and not kwargs.pop("return_indices", False):
            return max_pool2d(*args, rectified=id(args[0]) in self._to_rectify, **kwargs)
        args = tuple(self.settled(a) for a in args)
        if func in RELU and args[0].is_cuda and args[0].ndim == 4 and not kwargs.get("inplace"):
            later = args[0].view_as(args[0])
            self._to_rectify[id(later)] = later
            return later
        if func is F.linear and args[1].ndim == 3:
            return linear(self.rows, *args, **kwargs)
        if func is F.conv2d and args[1].ndim == 5:
            return conv2d(self.rows, self.precision, *args, **kwargs)
        if func is F.dropout:
            self.dropouts += 1
            return dropout(self.keys + self.dropouts, *args, **kwargs)
        return func(*args, **kwargs)

    def settled(self, value: Any) -> Any:
        """The value, its ReLU done if that was put off so that pooling could do both in one pass."""
        pending = isinstance(value, Tensor) and id(value) in self._to_rectify
        return torch.relu(value) if pending else value


class SeededDropout(TorchFunctionMode):
    """The same for a single row: only dropout needs to know its key."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.dropouts = key, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        self.dropouts += 1
        return dropout((self.key + self.dropouts)[None], *args, **(kwargs or {}))


def linear(rows: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (R*B, ..., in), weight (R, out, in), bias (R, out) -> (R*B, ..., out)."""
    y = _Linear.apply(x.reshape(rows, -1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight.shape[1])  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """A product a row, whose gradients come as they lie: the library's own would be transposed and copied."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        across = weight.transpose(1, 2)
        return torch.bmm(x, across) if bias is None else torch.baddbmm(bias[:, None], x, across)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def,override]
        x, weight = ctx.saved_tensors
        dx = torch.bmm(dy, weight) if ctx.needs_input_grad[0] else None
        dbias = dy.sum(dim=1) if ctx.needs_input_grad[2] else None
        return dx, torch.bmm(dy.transpose(1, 2), x), dbias


def conv2d(
    rows: int,
    precision: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """x (R*B, C, H, W), weight (R, O, C, KH, KW), bias (R, O) -> (R*B, O, HO, WO)."""
    if groups != 1 or isinstance(padding, str):
        raise NotImplementedError("grouped or named-padding convolution in a stack")
    stride, padding, dilation = (_pair(v) for v in (stride, padding, dilation))
    if x.is_cuda and x.dtype == torch.float32 and stride == dilation == (1, 1):
        from waffle_fl.models import kernels

        return kernels.Conv2d.apply(x, weight, bias, padding, precision)  # type: ignore[no-any-return,no-untyped-call]
    return _patch_product(rows, x, weight, bias, stride, padding, dilation)


def _patch_product(
    rows: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    """Convolution as one batched matrix product over explicit patches: any device, any precision."""
    _, out, _, kh, kw = weight.shape
    height, width = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], (kh, kw), stride, padding, dilation, strict=True)
    )
    patches = F.unfold(x, (kh, kw), dilation, padding, stride)  # (R*B, K, L)
    columns = patches.view(rows, -1, *patches.shape[1:]).transpose(1, 2).flatten(2)  # (R, K, B*L)
    y = torch.bmm(weight.flatten(2), columns)
    if bias is not None:
        y = y + bias[:, :, None]
    return y.view(rows, out, -1, height * width).transpose(1, 2).reshape(len(x), out, height, width)


def max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    rectified: bool = False,
) -> Tensor:
    """Square windows that do not overlap have a kernel of their own on a GPU, which does a ReLU before them too."""
    window, steps = _pair(kernel_size), _pair(stride or kernel_size)
    plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not ceil_mode
    if plain and x.is_cuda and x.dtype == torch.float32 and steps == window and window[0] == window[1]:
        from waffle_fl.models import kernels

        return kernels.MaxPool2d.apply(x, window[0], rectified)  # type: ignore[no-any-return,no-untyped-call]
    x = torch.relu(x) if rectified else x
    return torch.max_pool2d(x, kernel_size, steps, padding, dilation, ceil_mode)


def dropout(keys: Tensor, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout whose mask depends on the row's key and on nothing that runs beside it."""
    if not training or p == 0:
        return x
    draws = noise(keys, x.numel() // len(keys)).view(x.shape)
    return torch.where(draws < int(p * 2**63), 0.0, x / (1 - p))


def _pair(value: Any) -> tuple[int, int]:
    first, *rest = (value,) if isinstance(value, int) else value
    return first, rest[0] if rest else first
