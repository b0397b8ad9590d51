"""Batch normalisation, the addition of a shortcut and ReLU in few passes over memory, in Triton, with gradients.

Images are in channels-last layout: M pixels of C channels. A pass over the pixels writes partial sums, a small kernel
adds them up in a fixed order, and a second pass applies them, so results are deterministic. Sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 256  # parts of the sums over all channels: enough to fill the GPU
PIXELS, CHANNELS = 64, 64  # a tile


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    x, partial, M, C, CHUNK: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Partial sums of x and x^2 for each channel, relative to its first pixel, so that nothing cancels."""
    part, c = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    total, squares = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in tl.range(0, CHUNK, BM, num_stages=3):
        m = part * CHUNK + start + tl.arange(0, BM)
        held = (m < M)[:, None] & (c < C)[None, :]
        value = tl.load(x + m[:, None] * C + c[None, :], mask=held, other=0.0).to(tl.float32)
        value = tl.where(held, value - first, 0.0)
        total += value
        squares += value * value
    position = part * C + c
    tl.store(partial + position, tl.sum(total, axis=0), mask=c < C)
    tl.store(partial + tl.num_programs(0) * C + position, tl.sum(squares, axis=0), mask=c < C)


@triton.jit  # type: ignore[untyped-decorator]
def _total(partial, c, PARTS: tl.constexpr, C, BP: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the parts of one sum."""
    total = tl.zeros((BP, BC), tl.float32)
    for start in range(0, PARTS, BP):
        part = start + tl.arange(0, BP)
        held = (part < PARTS)[:, None] & (c < C)[None, :]
        total += tl.load(partial + part[:, None] * C + c[None, :], mask=held, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    x, partial, PARTS: tl.constexpr, moments, running_mean, running_var, M, C, momentum, eps, BP: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / standard deviation of each channel; the running statistics move towards them."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)
    shift = _total(partial, c, PARTS, C, BP, BC) / M
    square = _total(partial + PARTS * C, c, PARTS, C, BP, BC) / M
    mean, var = first + shift, tl.maximum(square - shift * shift, 0.0)
    tl.store(moments + c, mean, mask=c < C)
    tl.store(moments + C + c, tl.rsqrt(var + eps), mask=c < C)
    old_mean = tl.load(running_mean + c, mask=c < C, other=0.0)
    old_var = tl.load(running_var + c, mask=c < C, other=0.0)
    unbiased = var * (M / (M - 1.0))
    tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), mask=c < C)
    tl.store(running_var + c, old_var + momentum * (unbiased - old_var), mask=c < C)


@triton.jit  # type: ignore[untyped-decorator]
def _normalise(  # type: ignore[no-untyped-def]
    x, shortcut, moments, gamma, beta, y, M, C, ADDED: tl.constexpr, RECTIFIED: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    mean, scale = tl.load(moments + c, mask=inside), tl.load(moments + C + c, mask=inside)
    slope, offset = tl.load(gamma + c, mask=inside) * scale, tl.load(beta + c, mask=inside)
    position, held = m[:, None] * C + c[None, :], (m < M)[:, None] & inside[None, :]
    value = tl.load(x + position, mask=held).to(tl.float32)
    value = (value - mean[None, :]) * slope[None, :] + offset[None, :]
    if ADDED:
        value += tl.load(shortcut + position, mask=held).to(tl.float32)
    if RECTIFIED:
        value = tl.where(value <= 0, 0.0, value)  # keeps NaN
    tl.store(y + position, value, mask=held)


@triton.jit  # type: ignore[untyped-decorator]
def _before_relu(  # type: ignore[no-untyped-def]
    gradient, centred, y, position, held, scale, offset, RECTIFIED: tl.constexpr, ADDED: tl.constexpr
):  # fmt: skip
    """The gradient of the input of ReLU. Without a shortcut x tells where ReLU cut off, so y need not be read."""
    if RECTIFIED:
        if ADDED:
            value = tl.load(y + position, mask=held, other=0.0).to(tl.float32)
        else:
            value = centred * scale[None, :] + offset[None, :]
        gradient = tl.where(value <= 0, 0.0, gradient)
    return gradient


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_sums(  # type: ignore[no-untyped-def]
    dy, dy2, y, x, moments, gamma, beta, dz, partial, M, C, STRIDE, STRIDE2, CHUNK: tl.constexpr, TWO: tl.constexpr,
    KEPT: tl.constexpr, RECTIFIED: tl.constexpr, ADDED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Partial sums of dz and dz x_hat, where dz is the gradient before ReLU.

    TWO: the output was used twice, and its gradients are added. KEPT: write dz.
    """
    part, c = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    mean, scale = tl.load(moments + c, mask=inside), tl.load(moments + C + c, mask=inside)
    slope, offset = tl.load(gamma + c, mask=inside) * scale, tl.load(beta + c, mask=inside)
    total, products = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in tl.range(0, CHUNK, BM, num_stages=3):
        m = part * CHUNK + start + tl.arange(0, BM)
        held = (m < M)[:, None] & inside[None, :]
        position = m[:, None] * C + c[None, :]
        centred = tl.load(x + position, mask=held, other=0.0).to(tl.float32) - mean[None, :]
        gradient = tl.load(dy + m[:, None] * STRIDE + c[None, :], mask=held, other=0.0).to(tl.float32)
        if TWO:
            gradient += tl.load(dy2 + m[:, None] * STRIDE2 + c[None, :], mask=held, other=0.0).to(tl.float32)
        gradient = _before_relu(gradient, centred, y, position, held, slope, offset, RECTIFIED, ADDED)
        if KEPT:
            tl.store(dz + position, gradient, mask=held)
        total += gradient
        products += tl.where(held, gradient * centred * scale[None, :], 0.0)
    position = part * C + c
    tl.store(partial + position, tl.sum(total, axis=0), mask=inside)
    tl.store(partial + tl.num_programs(0) * C + position, tl.sum(products, axis=0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _affine_gradients(  # type: ignore[no-untyped-def]
    partial, PARTS: tl.constexpr, dgamma, dbeta, C, BP: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    tl.store(dbeta + c, _total(partial, c, PARTS, C, BP, BC), mask=c < C)
    tl.store(dgamma + c, _total(partial + PARTS * C, c, PARTS, C, BP, BC), mask=c < C)


@triton.jit  # type: ignore[untyped-decorator]
def _input_gradient(  # type: ignore[no-untyped-def]
    dy, x, moments, gamma, beta, dgamma, dbeta, dx, M, C, STRIDE, RECTIFIED: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    mean, scale = tl.load(moments + c, mask=inside), tl.load(moments + C + c, mask=inside)
    slope, offset = tl.load(gamma + c, mask=inside) * scale, tl.load(beta + c, mask=inside)
    mean_gradient = tl.load(dbeta + c, mask=inside) / M
    mean_product = tl.load(dgamma + c, mask=inside) / M
    position, held = m[:, None] * C + c[None, :], (m < M)[:, None] & inside[None, :]
    centred = tl.load(x + position, mask=held).to(tl.float32) - mean[None, :]
    gradient = tl.load(dy + m[:, None] * STRIDE + c[None, :], mask=held).to(tl.float32)
    gradient = _before_relu(gradient, centred, dy, position, held, slope, offset, RECTIFIED, False)
    normal = centred * scale[None, :]
    value = slope[None, :] * (gradient - mean_gradient[None, :] - normal * mean_product[None, :])
    tl.store(dx + position, value, mask=held)


class _Tiles:
    """How the pixels and channels of an image tensor are divided among programs."""

    def __init__(self, x: Tensor) -> None:
        self.channels, self.pixels = x.shape[1], x.numel() // x.shape[1]
        self.wide = min(CHANNELS, max(16, int(triton.next_power_of_2(self.channels))))
        self.high = PIXELS * CHANNELS // self.wide
        across = triton.cdiv(self.channels, self.wide)
        most = triton.cdiv(PROGRAMS, across)
        self.chunk = triton.cdiv(triton.cdiv(self.pixels, most), self.high) * self.high
        self.parts = triton.cdiv(self.pixels, self.chunk)
        self.sums, self.tiles = (self.parts, across), (triton.cdiv(self.pixels, self.high), across)
        self.totals = (triton.cdiv(self.channels, 16),)
        self.shape = {"BM": self.high, "BC": self.wide, "num_warps": 4}
        self.total_shape = {"BP": 256, "BC": 16, "num_warps": 8}


class NormRelu(torch.autograd.Function):
    """BatchNorm2d in training mode, plus a shortcut if there is one, and ReLU if `rectified`.

    Returns the output `uses` times, so that the gradients of its uses are added here and not by kernels of their own.
    The running statistics are updated in place.
    """

    @staticmethod
    def forward(ctx, x, shortcut, gamma, beta, running_mean, running_var, momentum, eps, rectified, uses):  # type: ignore[no-untyped-def]
        x = x.contiguous(memory_format=torch.channels_last)
        tiles = _Tiles(x)
        size = tiles.pixels, tiles.channels
        added = shortcut is not None
        if added:
            shortcut = shortcut.contiguous(memory_format=torch.channels_last)
        partial = x.new_empty(2, tiles.parts, tiles.channels, dtype=torch.float32)
        moments = x.new_empty(2, tiles.channels, dtype=torch.float32)
        y = torch.empty_like(x)
        _sums[tiles.sums](x, partial, *size, tiles.chunk, **tiles.shape)
        _statistics[tiles.totals](
            x, partial, tiles.parts, moments, running_mean, running_var, *size, momentum, eps, **tiles.total_shape
        )
        _normalise[tiles.tiles](
            x, shortcut if added else x, moments, gamma, beta, y, *size, ADDED=added, RECTIFIED=rectified, **tiles.shape
        )
        ctx.save_for_backward(x, y if added and rectified else x, gamma, beta, moments)
        ctx.rectified, ctx.added = rectified, added
        return y, *(y.view_as(y) for _ in range(uses - 1))

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def,override]
        x, y, gamma, beta, moments = ctx.saved_tensors
        tiles = _Tiles(x)
        size = tiles.pixels, tiles.channels
        dy, *others = gradients
        two = bool(others)
        kept = two or (ctx.added and ctx.rectified)  # dz is the shortcut's gradient, and the second pass reads it
        (dy, stride), (dy2, stride2) = _with_pixel_stride(dy), _with_pixel_stride(sum(others) if two else dy)
        partial = x.new_empty(2, tiles.parts, tiles.channels, dtype=torch.float32)
        dz = torch.empty_like(x) if kept else dy
        _gradient_sums[tiles.sums](
            dy, dy2, y, x, moments, gamma, beta, dz, partial, *size, stride, stride2, tiles.chunk, TWO=two, KEPT=kept,
            RECTIFIED=ctx.rectified, ADDED=ctx.added, **tiles.shape,
        )  # fmt: skip
        dgamma, dbeta = torch.empty_like(gamma), torch.empty_like(gamma)
        _affine_gradients[tiles.totals](partial, tiles.parts, dgamma, dbeta, tiles.channels, **tiles.total_shape)
        dx = torch.empty_like(x)
        _input_gradient[tiles.tiles](
            dz, x, moments, gamma, beta, dgamma, dbeta, dx, *size, tiles.channels if kept else stride,
            RECTIFIED=ctx.rectified and not kept, **tiles.shape,
        )  # fmt: skip
        return dx, dz if ctx.added else None, dgamma, dbeta, *[None] * 6


def _with_pixel_stride(dy: Tensor) -> tuple[Tensor, int]:
    """Return the gradient in channels-last layout and the distance of its pixels, more than C if it is a slice."""
    _, channels, height, width = dy.shape
    stride = dy.stride(3)
    if stride >= channels and dy.stride() == (height * width * stride, 1, width * stride, stride):
        return dy, stride
    return dy.contiguous(memory_format=torch.channels_last), channels
