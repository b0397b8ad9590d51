"""Convolution, ReLU and max-pooling as one matrix product over pooling windows, for small images on a CPU.

The S x S outputs of one pooling window read a patch of (K+S-1) x (K+S-1) pixels. So each pooling window is one column,
the kernel is laid out once for each of the S x S positions, and the product has one row per position and channel. This
gives fewer patches, larger products, and a maximum over contiguous memory. The batch is the innermost dimension of
every tensor, so that all copies are of whole rows and the next convolution can read the result without a copy. Bias and
ReLU are applied after the maximum, with which they commute.

A convolution is called before its ReLU and pooling are known. `Rewriting` therefore returns a `DeferredConv`, which is
computed when it is read: together with a ReLU and a pooling if these follow, otherwise by the library.

The products are oneDNN's in float32 on CPUs with AVX-512. `torch.mm` calls MKL, which uses only AVX2 on CPUs of other
vendors than Intel: on an AMD EPYC (Zen 5) these products take half the time.

What it gains  1.2 x on LeNet-5
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]

RELU = (torch.relu, F.relu, Tensor.relu)
RELU_IN_PLACE = (torch.relu_, Tensor.relu_)
MAX_POOL = (torch.max_pool2d, F.max_pool2d)
WEIGHTS = 400  # largest number of weights per output channel for which the product pays
LANES = 16  # float32 lanes of the library's vectors
BATCH = 16  # smallest batch for which the product pays
NOTHING = torch.empty(0, device="meta")
aten = torch.ops.aten
HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # whether torch was built with it
USES_ONEDNN = HAS_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512"


class Rewriting(TorchFunctionMode):
    """While active, convolutions that train are deferred until their result is read.

    Call backward at most once between two entries: each pass overwrites the saved tensors of the previous one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = self.products = 0  # in this pass: all, and those computed together with their pooling
        self._windows: dict[int, Windows] = {}

    def __enter__(self) -> Rewriting:
        self.convolutions = self.products = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.conv2d:
            self.convolutions += 1
            if conv := _convolution(*args, **kwargs):
                return DeferredConv(self, conv)
        if args and type(args[0]) is DeferredConv:
            return DeferredConv.__torch_function__(func, types, args, kwargs)
        if func is Tensor.view and not isinstance(args[1], torch.dtype):
            func = Tensor.reshape  # a window product has other strides than the library's result
        return func(*args, **kwargs)

    def product(self, conv: Convolution, window: Pair, rectified: bool) -> Tensor | None:
        """Compute convolution, ReLU and pooling in one product if that is faster; buffers are reused between passes."""
        signature = conv.x.shape, conv.weight.shape, conv.padding, window, conv.x.dtype
        windows = self._windows.get(self.products)
        if windows is None or windows.signature != signature:
            if not _pays(conv, window):
                return None
            windows = self._windows[self.products] = Windows(*signature)
        self.products += 1
        return WindowProduct.apply(conv.x, conv.weight, conv.bias, windows, rectified)  # type: ignore


class Convolution(NamedTuple):
    """The arguments of a convolution of stride 1."""

    x: Tensor  # (B, C, H, W)
    weight: Tensor  # (O, C, KH, KW)
    bias: Tensor | None  # (O,)
    padding: Pair

    @property
    def outputs(self) -> Pair:
        """Height and width of the result."""
        sizes = zip(self.x.shape[2:], self.weight.shape[2:], self.padding, strict=True)
        height, width = (size - kernel + 1 + 2 * padding for size, kernel, padding in sizes)
        return height, width


class DeferredConv(Tensor):
    """A convolution, possibly with its ReLU, that is computed when it is read."""

    rewriting: Rewriting
    conv: Convolution
    rectified: bool
    value: Tensor | None  # None until it is computed

    def __new__(cls, rewriting: Rewriting, conv: Convolution, rectified: bool = False) -> DeferredConv:
        deferred = Tensor._make_subclass(cls, NOTHING)
        deferred.rewriting, deferred.conv, deferred.rectified, deferred.value = rewriting, conv, rectified, None
        return deferred

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], DeferredConv) and args[0].value is None:
            deferred = args[0]
            if func in RELU_IN_PLACE or (func in RELU and kwargs.get("inplace")):
                deferred.rectified = True
                return deferred
            if func in RELU:
                return DeferredConv(deferred.rewriting, deferred.conv, rectified=True)
            if func in MAX_POOL and (window := _window(*args, **kwargs)):
                pooled = deferred.rewriting.product(deferred.conv, window, deferred.rectified)
                if pooled is not None:
                    return pooled
        return func(*_resolve(args), **_resolve(kwargs))

    def resolve(self) -> Tensor:
        """Compute it with the library, with gradients, as if the convolution had not been deferred."""
        if self.value is None:
            with torch.enable_grad():
                x, weight, bias, padding = self.conv
                y = F.conv2d(x, weight, bias, padding=padding)
                self.value = F.relu(y, inplace=True) if self.rectified else y
        return self.value


def _resolve(value: Any) -> Any:
    """Return the arguments with all deferred convolutions computed."""
    if isinstance(value, DeferredConv):
        return value.resolve()
    if isinstance(value, dict):
        return {key: _resolve(item) for key, item in value.items()}
    return type(value)(_resolve(item) for item in value) if type(value) in (tuple, list) else value


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Convolution | None:
    """Return the convolution if it may be deferred.

    That needs inputs under autograd, which cannot change before they are read: the gradient needs them unchanged.
    """
    if isinstance(input, DeferredConv):
        input = input.resolve()
    trains = torch.is_grad_enabled() and weight.requires_grad and not torch.is_autocast_enabled("cpu")
    usual = input.ndim == 4 and not isinstance(padding, str) and _pair(stride) == _pair(dilation) == (1, 1)
    return Convolution(input, weight, bias, _pair(padding)) if trains and usual and groups == 1 else None


def _window(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Pair | None:
    """Return the window of a pooling whose windows are adjacent, otherwise None."""
    window, plain = _pair(kernel_size), _pair(padding) == (0, 0) and _pair(dilation) == (1, 1)
    adjacent = plain and _pair(stride or kernel_size) == window and not ceil_mode and not return_indices
    return window if adjacent else None


def _pays(conv: Convolution, window: Pair) -> bool:
    """Whether the product is faster, as measured: few weights per channel, and in float32 fewer channels than LANES.

    The kernel must span whole windows, and the batch, the innermost dimension of every copy, must not be tiny.
    """
    (batch, channels, _, _), (out, _, *kernel) = conv.x.shape, conv.weight.shape
    whole = all((k - 1) % size == 0 <= side - size for k, size, side in zip(kernel, window, conv.outputs, strict=True))
    if conv.x.dtype == torch.float32:
        first, following = channels == 1 and out < LANES, 2 * channels < LANES >= out and conv.x.stride(0) == 1
        few = first or following
    else:
        few = conv.x.dtype == torch.float64
    return whole and few and batch >= BATCH and channels * prod(kernel) <= WEIGHTS


def _pair(value: Any) -> Pair:
    first, *rest = (value,) if isinstance(value, int) else value
    return first, rest[0] if rest else first


class Windows:
    """Buffers and views of one window product, created once and used in every step."""

    def __init__(self, image: torch.Size, weight: torch.Size, padding: Pair, window: Pair, dtype: torch.dtype) -> None:
        self.signature = image, weight, padding, window, dtype
        self.padding, self.window, self.steps = padding, window, 0
        (batch, channels, height, width), (out, _, kh, kw) = image, weight
        (ph, pw), (sh, sw) = padding, window
        hp, wp = (height + 2 * ph - kh + 1) // sh, (width + 2 * pw - kw + 1) // sw
        eh, ew = kh + sh - 1, kw + sw - 1  # the pixels that one window reads

        self.padded = torch.zeros(channels, height + 2 * ph, width + 2 * pw, batch, dtype=dtype)
        self.image = self.padded[:, ph : ph + height, pw : pw + width]
        c, h, w, b = self.padded.stride()
        self.view = (eh, ew, channels, hp, wp, batch), (h, w, c, sh * h, sw * w, b)
        self.patches = torch.empty(self.view[0], dtype=dtype)
        self.columns = self.patches.view(eh * ew * channels, hp * wp * batch)

        kernels = torch.zeros(sh, sw, out, eh, ew, channels, dtype=dtype)
        self.kernel, self.shape = (kh, kw), kernels.shape
        self.taps = _taps(kernels, kh, kw)
        self.kernels = kernels.view(sh * sw * out, eh * ew * channels)
        self.dpositions = torch.zeros(sh * sw * out, hp * wp * batch, dtype=dtype)
        self.dimage = self.as_image(self.dpositions)
        self.pooled = F.max_pool2d(self.dimage, window, return_indices=True)  # maxima and their positions
        self.largest = self.pooled[0].view(out, hp, wp, batch)

        above, left = eh // sh, ew // sw  # windows that a patch spans
        self.dpatches = above, sh, left, sw, channels, hp, wp, batch
        self.phases = torch.empty(sh, sw, channels, hp + above - 1, wp + left - 1, batch, dtype=dtype)
        self.shifted = [self.phases[:, :, :, i : i + hp, j : j + wp] for i in range(above) for j in range(left)]
        self.reach = channels, (hp + above - 1) * sh, (wp + left - 1) * sw, batch
        self.border = (0, 0, -pw, width + pw - self.reach[2], -ph, height + ph - self.reach[1])

    def as_image(self, positions: Tensor) -> Tensor:
        """View the positions of each window as an image of its size, channels last: the library pools these fastest."""
        return positions.view(1, *self.window, -1).permute(0, 3, 1, 2)


def _taps(kernels: Tensor, kh: int, kw: int) -> Tensor:
    """View of the weights (SH, SW, O, KH, KW, C) inside the positions' kernels (SH, SW, O, KH+SH-1, KW+SW-1, C)."""
    sh, sw, out, _, _, channels = kernels.shape
    i, j, o, h, w, c = kernels.stride()
    return kernels.as_strided((sh, sw, out, kh, kw, channels), (i + h, j + w, o, h, w, c))


class WindowProduct(torch.autograd.Function):
    """max_pool2d(conv2d(x, weight, bias)), with a ReLU between them if `rectified`."""

    @staticmethod
    def forward(ctx, x, weight, bias, windows, rectified):  # type: ignore[no-untyped-def]
        image = x.permute(1, 2, 3, 0)
        if windows.padding != (0, 0) or image.stride() != windows.image.stride():
            windows.image.copy_(image)
            image = windows.padded
        windows.patches.copy_(image.as_strided(*windows.view))
        windows.taps.copy_(weight.permute(0, 2, 3, 1))
        positions = windows.as_image(_product(windows.kernels, windows.columns))
        aten.max_pool2d_with_indices.out(positions, windows.window, out=windows.pooled[0], indices=windows.pooled[1])
        y = windows.largest.clone() if bias is None else windows.largest + bias[:, None, None, None]
        if rectified:
            y.relu_()
        windows.steps += 1
        ctx.windows, ctx.step = windows, windows.steps
        ctx.save_for_backward(y if rectified else None)
        return y.permute(3, 0, 1, 2)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def,override]
        windows, (y,) = ctx.windows, ctx.saved_tensors
        if ctx.step != windows.steps:
            raise RuntimeError("a later pass has overwritten the buffers of this one: call backward before it")
        dy = dy.permute(1, 2, 3, 0)
        dy = dy.contiguous() if y is None else aten.threshold_backward.default(dy, y, 0)
        dbias = dy.sum(dim=(1, 2, 3)) if ctx.needs_input_grad[2] else None
        size = windows.window
        aten.max_pool2d_with_indices_backward.grad_input(
            dy.view(1, 1, 1, -1).permute(0, 3, 1, 2),
            windows.dimage,  # only its shape is read
            *(size, size, (0, 0), (1, 1), False),
            windows.pooled[1],
            grad_input=windows.dimage,
        )
        dkernels = _product(windows.columns, windows.dpositions.t()).t().view(windows.shape)
        dtaps = [tap for row in _taps(dkernels, *windows.kernel).unbind() for tap in row.unbind()]
        dweight = reduce(torch.add, dtaps).permute(0, 3, 1, 2)
        dx = _input_gradient(windows) if ctx.needs_input_grad[0] else None
        return dx, dweight, dbias, None, None


def _input_gradient(windows: Windows) -> Tensor:
    """Sum the gradients of the patches, which overlap by whole windows."""
    dpatches = _product(windows.kernels.t(), windows.dpositions).view(windows.dpatches)
    windows.phases.zero_()
    parts = [part for row in dpatches.unbind() for part in row.unbind(1)]
    for phases, part in zip(windows.shifted, parts, strict=True):
        phases += part
    image = windows.phases.permute(2, 3, 0, 4, 1, 5).reshape(windows.reach)
    return (F.pad(image, windows.border) if any(windows.border) else image).permute(3, 0, 1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if USES_ONEDNN and a.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")  # type: ignore[no-any-return]
    return a @ b
