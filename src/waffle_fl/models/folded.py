"""One forward pass for many models: every row has its own parameters, and the rows are folded into the batch.

Only functions that take parameters (`linear`, `conv1d`, `conv2d`), and dropout for its seed, handle rows. All others
see a larger batch. This does not work for a module that does anything else with its parameters or mixes the samples of
a batch; `stacking_trial` detects that, and FlatModel then uses vmap or trains row by row.

What it gains  5.0 x on the MNIST table
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from waffle_fl.randomness import noise

RELU = (torch.relu, F.relu)
SMALL_PATCH = 32  # convolutions with patches up to this size are faster when pooled in the same pass


class _Pending(NamedTuple):
    """A deferred convolution, ReLU, or both, which pooling may compute in the same pass."""

    stand_in: Tensor  # a meta tensor of the right shape; replaced by the result when it is used
    source: Tensor | StackedConvolution
    rectified: bool

    def compute(self) -> Tensor:
        source = self.source.compute() if isinstance(self.source, StackedConvolution) else self.source
        return torch.relu(source) if self.rectified else source


class Stacking(TorchFunctionMode):
    """While active, weights with one extra dimension are treated as one weight per row."""

    def __init__(self, keys: Tensor, precision: str) -> None:
        super().__init__()
        self.keys, self.rows, self.precision, self.dropouts = keys, len(keys), precision, 0
        self._pending: dict[int, _Pending] = {}  # by the identity of the stand-in

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.max_pool2d and not kwargs.pop("return_indices", False):
            pending = self._known(args[0])
            return max_pool2d(pending.source, pending.rectified, *args[1:], **kwargs)
        if func in RELU and not kwargs.get("inplace") and self._can_defer(args[0]):
            return self._stand_in(args[0].shape, self._known(args[0]).source, rectified=True)
        args, kwargs = self.resolve(args), self.resolve(kwargs)
        if func is F.linear and args[1].ndim == 3:
            return linear(self.rows, *args, **kwargs)
        if func is F.conv2d and args[1].ndim == 5:
            convolution = StackedConvolution(self.rows, self.precision, *args, **kwargs)
            fuses = convolution.has_kernel and convolution.weight[0, 0].numel() <= SMALL_PATCH
            return self._stand_in(convolution.shape, convolution, False) if fuses else convolution.compute()
        if func is F.conv1d and args[1].ndim == 4:
            return StackedConvolution(self.rows, self.precision, *args, **kwargs).of_signals()
        if func is F.dropout:
            self.dropouts += 1
            return dropout(self.keys + self.dropouts, *args, **kwargs)
        return func(*args, **kwargs)

    def resolve(self, value: Any) -> Any:
        """Return the value with every stand-in replaced by the computed result."""
        if type(value) in (list, tuple):
            return type(value)(self.resolve(part) for part in value)
        if type(value) is dict:
            return {key: self.resolve(part) for key, part in value.items()}
        if id(value) not in self._pending:
            return value
        compute = self._pending[id(value)].compute()
        self._pending[id(value)] = _Pending(value, compute, rectified=False)
        return compute

    def _known(self, value: Tensor) -> _Pending:
        return self._pending.get(id(value)) or _Pending(value, value, rectified=False)

    def _can_defer(self, value: Tensor) -> bool:
        return id(value) in self._pending or (has_kernels(value) and value.ndim == 4)

    def _stand_in(self, shape: Sequence[int], source: Tensor | StackedConvolution, rectified: bool) -> Tensor:
        stand_in = torch.empty(shape, device="meta")
        self._pending[id(stand_in)] = _Pending(stand_in, source, rectified)
        return stand_in


class SeededDropout(TorchFunctionMode):
    """The same for a single row: only dropout needs the row's key."""

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
    """One matrix product per row; its gradients need no copy, unlike the library's, which are transposed."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        across = weight.transpose(1, 2)
        return torch.bmm(x, across) if bias is None else torch.baddbmm(bias[:, None], x, across)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def,override]
        x, weight = ctx.saved_tensors
        x, dy = x.to(weight.dtype), dy.to(weight.dtype)  # autocast may have lowered their precision
        dx = torch.bmm(dy, weight) if ctx.needs_input_grad[0] else None
        dbias = dy.sum(dim=1) if ctx.needs_input_grad[2] else None
        return dx, torch.bmm(dy.transpose(1, 2), x), dbias


class StackedConvolution(NamedTuple):
    """One convolution per row: x (R*B, C, H, W), weight (R, O, C, KH, KW), bias (R, O) -> (R*B, O, HO, WO)."""

    rows: int
    precision: str
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    @property
    def has_kernel(self) -> bool:
        plain = self.groups == 1 and not isinstance(self.padding, str)
        return plain and has_kernels(self.x) and _pair(self.stride) == _pair(self.dilation) == (1, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        extents = zip(
            self.x.shape[2:],
            self.weight.shape[3:],
            _pair(self.stride),
            _pair(self.padding),
            _pair(self.dilation),
            strict=True,
        )
        return (
            len(self.x),
            self.weight.shape[1],
            *((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in extents),
        )

    def compute(self) -> Tensor:
        if self.groups != 1 or isinstance(self.padding, str):
            raise NotImplementedError("grouped or named-padding convolution in a stack")
        if not self.has_kernel:
            return _patch_product(self)
        from waffle_fl.models import kernels

        return kernels.Conv2d.apply(self.x, self.weight, self.bias, _pair(self.padding), self.precision)  # type: ignore[no-any-return,no-untyped-call]

    def of_signals(self) -> Tensor:
        """Convolve signals, x (R*B, C, L) and weight (R, O, C, K), as images of height 1."""
        if isinstance(self.padding, str):
            raise NotImplementedError("named padding of a convolution in a stack")
        stride, padding, dilation = (_pair(value)[0] for value in (self.stride, self.padding, self.dilation))
        lines = self._replace(x=self.x.unsqueeze(2), weight=self.weight.unsqueeze(3), stride=(1, stride))
        return lines._replace(padding=(0, padding), dilation=(1, dilation)).compute().squeeze(2)

    def pooled(self, size: int, rectified: bool) -> Tensor:
        """Convolve, apply ReLU if `rectified`, and max-pool in one pass."""
        from waffle_fl.models import kernels

        return kernels.PooledConv2d.apply(  # type: ignore[no-any-return,no-untyped-call]
            self.x, self.weight, self.bias, _pair(self.padding), size, rectified, self.precision
        )


def _patch_product(of: StackedConvolution) -> Tensor:
    """Compute the convolution as one batched matrix product over explicit patches: any device, any precision."""
    images, out, height, width = of.shape
    patches = F.unfold(of.x, of.weight.shape[3:], of.dilation, of.padding, of.stride)  # (R*B, K, L)
    columns = patches.view(of.rows, -1, *patches.shape[1:]).transpose(1, 2).flatten(2)  # (R, K, B*L)
    y = torch.bmm(of.weight.flatten(2), columns)
    if of.bias is not None:
        y = y + of.bias[:, :, None]
    return y.view(of.rows, out, -1, height * width).transpose(1, 2).reshape(images, out, height, width)


def max_pool2d(
    of: Tensor | StackedConvolution,
    rectified: bool,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Max-pool; non-overlapping square windows on a GPU use kernels that also compute the deferred operations."""
    window, steps = _pair(kernel_size), _pair(stride or kernel_size)
    plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not ceil_mode
    plain = plain and steps == window and window[0] == window[1]
    if isinstance(of, StackedConvolution):
        if plain:
            return of.pooled(window[0], rectified)
        of = of.compute()
    if plain and has_kernels(of):
        from waffle_fl.models import kernels

        return kernels.MaxPool2d.apply(of, window[0], rectified)  # type: ignore[no-any-return,no-untyped-call]
    return torch.max_pool2d(torch.relu(of) if rectified else of, kernel_size, steps, padding, dilation, ceil_mode)


def has_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels apply: float32 on a GPU."""
    return x.is_cuda and x.dtype == torch.float32


def dropout(keys: Tensor, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout whose mask depends only on the row's key, not on what else is in the stack."""
    if not training or p == 0:
        return x
    draws = noise(keys, x.numel() // len(keys)).view(x.shape)
    return torch.where(draws < int(p * 2**63), 0.0, x / (1 - p))


def _pair(value: Any) -> tuple[int, int]:
    first, *rest = (value,) if isinstance(value, int) else value
    return first, rest[0] if rest else first
