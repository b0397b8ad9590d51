"""Stacked convolution on a GPU: one small convolution a row, as an implicit matrix product in Triton.

The library's grouped convolutions are slow when every row has its own few channels. Here row r of the weights meets the
images of row r; patches are gathered on the fly and never written to memory. Sums are in a fixed order, so a run
repeats bit for bit. Nothing here knows a network: any convolution with stride 1 and no dilation or groups fits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_K = 128, 32
PROGRAMS = 2048  # enough to fill a large GPU


@triton.jit  # type: ignore[untyped-decorator]
def _patches(  # type: ignore[no-untyped-def]
    x, m, k, images: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """The (m, k) tile of one row's patch matrix: m runs over output pixels, k over the patch; padding reads as 0."""
    image, pixel = m // (HO * WO), m % (HO * WO)
    channel, i, j = k // (KH * KW), (k // KW) % KH, k % KW
    h = (pixel // WO)[:, None] + i[None, :] - PH
    w = (pixel % WO)[:, None] + j[None, :] - PW
    inside = (image < images)[:, None] & (channel < C)[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    return tl.load(x + (image[:, None] * C + channel[None, :]) * H * W + h * W + w, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    x, weight, bias, y, images: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OUT: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    K: tl.constexpr = C * KH * KW
    x += row * images * C * H * W
    weight += row * OUT * K
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        patch = _patches(x, m, k, images, C, H, W, HO, WO, PH, PW, KH, KW)
        kernel = tl.load(weight + n[None, :] * K + k[:, None], mask=(k < K)[:, None] & (n < OUT)[None, :], other=0.0)
        total = tl.dot(patch, kernel, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + row * OUT + n, mask=n < OUT, other=0.0)[None, :]
    image, pixel = m // (HO * WO), m % (HO * WO)
    place = ((row * images + image[:, None]) * OUT + n[None, :]) * HO * WO + pixel[:, None]
    tl.store(y + place, total, mask=(image < images)[:, None] & (n < OUT)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _weight_gradient(  # type: ignore[no-untyped-def]
    x, dy, partial, chunk: tl.constexpr, images: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OUT: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    k, n = tl.program_id(1) * BK + tl.arange(0, BK), tl.arange(0, BN)
    K: tl.constexpr = C * KH * KW
    M: tl.constexpr = images * HO * WO
    x += row * images * C * H * W
    dy += row * images * OUT * HO * WO
    total = tl.zeros((BN, BK), tl.float32)
    for start in range(0, chunk, BM):
        m = part * chunk + start + tl.arange(0, BM)
        here = m < M
        patch = _patches(x, m, k, images, C, H, W, HO, WO, PH, PW, KH, KW)
        patch = tl.where((k == K)[None, :] & here[:, None], 1.0, patch)  # one more column: the bias
        image, pixel = m // (HO * WO), m % (HO * WO)
        place = (image[None, :] * OUT + n[:, None]) * HO * WO + pixel[None, :]
        slope = tl.load(dy + place, mask=here[None, :] & (n < OUT)[:, None], other=0.0)
        total = tl.dot(slope, patch, total, input_precision=PRECISION)
    place = ((part * tl.num_programs(2) + row) * OUT + n[:, None]) * (K + 1) + k[None, :]
    tl.store(partial + place, total, mask=(n < OUT)[:, None] & (k <= K)[None, :])


def _width(channels: int) -> int:
    return max(16, int(triton.next_power_of_2(channels)))


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], precision: str) -> Tensor:
    """x (R*B, C, H, W), weight (R, O, C, KH, KW), bias (R, O) -> (R*B, O, HO, WO)."""
    rows, out, channels, kh, kw = weight.shape
    x, weight = x.contiguous(), weight.contiguous()
    images, (height, width) = len(x) // rows, x.shape[2:]
    ho, wo = height + 2 * padding[0] - kh + 1, width + 2 * padding[1] - kw + 1
    y = x.new_empty(len(x), out, ho, wo)
    _forward[(triton.cdiv(images * ho * wo, BLOCK_M), rows)](
        x, weight, x if bias is None else bias.contiguous(), y, images, channels, height, width, out, ho, wo, *padding,
        kh, kw, BM=BLOCK_M, BN=_width(out), BK=BLOCK_K, BIAS=bias is not None, PRECISION=precision,
    )  # fmt: skip
    return y


def conv2d_input_gradient(dy: Tensor, weight: Tensor, padding: tuple[int, int], precision: str) -> Tensor:
    """The same convolution backwards: flipped kernels, channels exchanged, the complementary padding."""
    flipped = weight.flip(3, 4).transpose(1, 2)
    return conv2d(dy, flipped, None, (weight.shape[3] - 1 - padding[0], weight.shape[4] - 1 - padding[1]), precision)


def conv2d_weight_gradient(
    x: Tensor, dy: Tensor, weight: Tensor, padding: tuple[int, int], precision: str
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias; long sums are split into parts that are added in order."""
    rows, out, channels, kh, kw = weight.shape
    x, dy = x.contiguous(), dy.contiguous()
    images, (height, width), (ho, wo) = len(x) // rows, x.shape[2:], dy.shape[2:]
    size, total = channels * kh * kw, images * ho * wo
    blocks = triton.cdiv(size + 1, BLOCK_K)
    parts = max(1, min(triton.cdiv(PROGRAMS, rows * blocks), triton.cdiv(total, 4 * BLOCK_M)))
    chunk = triton.cdiv(triton.cdiv(total, parts), BLOCK_M) * BLOCK_M
    partial = x.new_empty(parts, rows, out, size + 1)
    _weight_gradient[(parts, blocks, rows)](
        x, dy, partial, chunk, images, channels, height, width, out, ho, wo, *padding,
        kh, kw, BM=BLOCK_M, BN=_width(out), BK=BLOCK_K, PRECISION=precision,
    )  # fmt: skip
    both = partial.sum(dim=0) if parts > 1 else partial[0]
    return both[..., :size].reshape(weight.shape), both[..., size]


class Conv2d(torch.autograd.Function):
    """The kernels above as one differentiable function."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, precision):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.precision = padding, precision
        return conv2d(x, weight, bias, padding, precision)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def,override]
        x, weight = ctx.saved_tensors
        dx = conv2d_input_gradient(dy, weight, ctx.padding, ctx.precision) if ctx.needs_input_grad[0] else None
        dw, db = conv2d_weight_gradient(x, dy, weight, ctx.padding, ctx.precision)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None, None
