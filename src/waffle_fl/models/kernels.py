"""Stacked convolution and pooling on a GPU, in Triton: row r of the weights is applied to the images of row r.

The library's grouped convolutions are slow when every row has its own few channels. Here a convolution is an implicit
matrix product: patches are gathered on the fly and never written to memory. All sums have a fixed order, so results are
deterministic. The kernels work for any convolution with stride 1 and without dilation or groups.

What it gains  82 x on the MNIST table
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 8192  # parts of a weight gradient, summed at the end; more of them fill the GPU better
FEW, MANY = (
    128,
    512,
)  # row counts by which the number of parts is chosen: two values, so that stacks share a compilation


@triton.jit  # type: ignore[untyped-decorator]
def _corners(  # type: ignore[no-untyped-def]
    m, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Offset in a row's images of the patch of output pixel m; of S x S pixels pooled into one, of the first."""
    pixel = m % (HP * WP)
    return (m // (HP * WP)) * (C * H * W) + (pixel // WP) * (S * W) + (pixel % WP) * S


@triton.jit  # type: ignore[untyped-decorator]
def _patches(  # type: ignore[no-untyped-def]
    x, corner, inside, k, EVEN: tl.constexpr, BEYOND: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """A tile of a row's patch matrix: one line per corner, k runs over the patch, BEYOND is the value outside."""
    offset = (k // (KH * KW)) * (H * W) + ((k // KW) % KH) * W + k % KW
    held = (k < C * KH * KW)[None, :]
    if not EVEN:  # if the blocks cover the pixels exactly, no test per element is needed
        held = held & inside[:, None]
    return tl.load(x + corner[:, None] + offset[None, :], mask=held, other=BEYOND)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    x, weight, bias, y, chosen, IMAGES: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr, RECTIFIED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolution; with S > 1 also the maximum (RECTIFIED: or 0) of each S x S pixels, and its position."""
    K: tl.constexpr = C * KH * KW
    HP: tl.constexpr = (H - KH + 1) // S
    WP: tl.constexpr = (W - KW + 1) // S
    EVEN: tl.constexpr = (IMAGES * HP * WP) % BM == 0
    row = tl.program_id(2).to(tl.int64)
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    x += row * (IMAGES * C * H * W)
    weight += row * (OUT * K)
    corner, inside = _corners(m, C, H, W, HP, WP, S), m < IMAGES * HP * WP
    best = tl.full((BM, BN), float("-inf"), tl.float32)
    where = tl.zeros((BM, BN), tl.int32)
    for position in tl.static_range(S * S):
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            patch = _patches(x, corner + (position // S) * W + position % S, inside, k, EVEN, 0.0, C, H, W, KH, KW)
            taps = (k < K)[:, None] & (n < OUT)[None, :]
            kernel = tl.load(weight + n[None, :] * K + k[:, None], mask=taps, other=0.0)
            total = tl.dot(patch, kernel, total, input_precision=PRECISION)
        if S == 1:
            best = total
        else:
            better = (total > best) | (total != total)
            best = tl.where(better, total, best)
            where = tl.where(better, position, where)
    if BIAS:
        best += tl.load(bias + row * OUT + n, mask=n < OUT, other=0.0)[None, :]
    target = (row * IMAGES + m // (HP * WP)) * (OUT * HP * WP) + m % (HP * WP)
    held = inside[:, None] & (n < OUT)[None, :]
    if S > 1:
        if RECTIFIED:
            where = tl.where(best <= 0, S * S, where)  # no pixel is chosen: no gradient flows back
            best = tl.where(best <= 0, 0.0, best)
        tl.store(chosen + target[:, None] + n[None, :] * (HP * WP), where.to(tl.uint8), mask=held)
    tl.store(y + target[:, None] + n[None, :] * (HP * WP), best, mask=held)


@triton.jit  # type: ignore[untyped-decorator]
def _weight_gradient(  # type: ignore[no-untyped-def]
    x, dy, chosen, partial, CHUNK: tl.constexpr, IMAGES: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = C * KH * KW
    HP: tl.constexpr = (H - KH + 1) // S
    WP: tl.constexpr = (W - KW + 1) // S
    EVEN: tl.constexpr = (IMAGES * HP * WP) % CHUNK == 0
    K_BLOCKS: tl.constexpr = (K + BK) // BK
    part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    k = (tl.program_id(1) % K_BLOCKS) * BK + tl.arange(0, BK)
    n = (tl.program_id(1) // K_BLOCKS) * BN + tl.arange(0, BN)
    x += row * (IMAGES * C * H * W)
    dy += row * (IMAGES * OUT * HP * WP)
    chosen += row * (IMAGES * OUT * HP * WP)
    total = tl.zeros((BN, BK), tl.float32)  # in column K the patches are ones: the gradient of the bias
    for start in range(0, CHUNK, BM):
        m = part * CHUNK + start + tl.arange(0, BM)
        corner, inside = _corners(m, C, H, W, HP, WP, S), m < IMAGES * HP * WP
        source = ((m // (HP * WP)) * (OUT * HP * WP) + m % (HP * WP))[None, :] + n[:, None] * (HP * WP)
        held = (n < OUT)[:, None]
        if not EVEN:
            held = held & inside[None, :]
        gradient = tl.load(dy + source, mask=held, other=0.0)
        if S == 1:
            patch = _patches(x, corner, inside, k, EVEN, 1.0, C, H, W, KH, KW)
            total = tl.dot(gradient, patch, total, input_precision=PRECISION)
        else:
            winner = tl.load(chosen + source, mask=held, other=255)
            for position in tl.static_range(S * S):
                patch = _patches(x, corner + (position // S) * W + position % S, inside, k, EVEN, 1.0, C, H, W, KH, KW)
                total = tl.dot(tl.where(winner == position, gradient, 0.0), patch, total, input_precision=PRECISION)
    position = ((part * tl.num_programs(2) + row) * OUT + n[:, None]) * (K + 1) + k[None, :]
    tl.store(partial + position, total, mask=(n < OUT)[:, None] & (k <= K)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _pool(  # type: ignore[no-untyped-def]
    x, y, chosen, TOTAL, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, RECTIFIED: tl.constexpr, BM: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(INDEX) * BM + tl.arange(0, BM)
    HO: tl.constexpr = H // S
    WO: tl.constexpr = W // S
    corner = (m // (HO * WO)) * (H * W) + ((m // WO) % HO) * (S * W) + (m % WO) * S
    best = tl.load(x + corner, mask=m < TOTAL, other=0.0)
    where = tl.zeros((BM,), tl.uint8)
    for position in tl.static_range(1, S * S):
        value = tl.load(x + corner + (position // S) * W + position % S, mask=m < TOTAL, other=0.0)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        where = tl.where(better, position, where).to(tl.uint8)
    if RECTIFIED:
        where = tl.where(best <= 0, S * S, where).to(tl.uint8)  # no pixel is chosen: no gradient flows back
        best = tl.where(best <= 0, 0.0, best)
    tl.store(y + m, best, mask=m < TOTAL)
    tl.store(chosen + m, where, mask=m < TOTAL)


@triton.jit  # type: ignore[untyped-decorator]
def _pool_gradient(  # type: ignore[no-untyped-def]
    dy, chosen, dx, TOTAL, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, INDEX: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(INDEX) * BM + tl.arange(0, BM)
    HO: tl.constexpr = H // S
    WO: tl.constexpr = W // S
    h, w = (m // W) % H, m % W
    covered = (m < TOTAL) & (h // S < HO) & (w // S < WO)
    source = (m // (H * W)) * (HO * WO) + (h // S) * WO + w // S
    mine = tl.load(chosen + source, mask=covered, other=255) == (h % S) * S + w % S
    tl.store(dx + m, tl.load(dy + source, mask=covered & mine, other=0.0), mask=m < TOTAL)


@triton.jit  # type: ignore[untyped-decorator]
def _add_patches(  # type: ignore[no-untyped-def]
    patches, dx, TOTAL, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(INDEX) * BM + tl.arange(0, BM)
    plane, h, w = m // (H * W), (m // W) % H + PH, m % W + PW
    total = tl.zeros((BM,), tl.float32)
    for tap in tl.static_range(KH * KW):
        ho, wo = h - tap // KW, w - tap % KW
        covered = (m < TOTAL) & (ho >= 0) & (ho < HO) & (wo >= 0) & (wo < WO)
        total += tl.load(patches + (plane * (KH * KW) + tap) * (HO * WO) + ho * WO + wo, mask=covered, other=0.0).to(
            tl.float32
        )
    tl.store(dx + m, total, mask=m < TOTAL)


def _index(largest: Tensor) -> tl.dtype:
    """Return the index type: 32-bit indices are several times faster to divide."""
    return tl.int32 if largest.numel() < 2**31 else tl.int64


def _width(channels: int) -> int:
    return min(32, max(16, int(triton.next_power_of_2(channels))))


def valid_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, precision: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """x (R*B, C, H, W), weight (R, O, C, KH, KW), bias (R, O) -> (R*B, O, HO, WO), without padding."""
    y = x.new_empty(len(x), weight.shape[1], *_outputs(x, weight, 1), dtype=dtype)
    block = 256 if weight[0, 0].numel() <= 32 else 128
    _launch_forward(x, weight, bias, y, y, 1, False, block, precision)
    return y


def valid_conv2d_pooled(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: int, rectified: bool, precision: str
) -> tuple[Tensor, Tensor]:
    """The same, pooled in the same pass: the maximum of each window, and the position of its pixel."""
    y = x.new_empty(len(x), weight.shape[1], *_outputs(x, weight, size))
    chosen = torch.empty_like(y, dtype=torch.uint8)
    _launch_forward(x, weight, bias, y, chosen, size, rectified, 128, precision)
    return y, chosen


def _outputs(x: Tensor, weight: Tensor, size: int) -> tuple[int, int]:
    return (x.shape[2] - weight.shape[3] + 1) // size, (x.shape[3] - weight.shape[4] + 1) // size


def _launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, chosen: Tensor, size: int, rectified: bool, block: int,
    precision: str,
) -> None:  # fmt: skip
    rows, out, channels, kh, kw = weight.shape
    x, weight, images = x.contiguous(), weight.contiguous(), len(x) // rows
    depth, wide = min(32, _width(channels * kh * kw)), 8 if out <= 8 else _width(out)
    _forward[(triton.cdiv(images * y.shape[2] * y.shape[3], block), triton.cdiv(out, wide), rows)](
        x, weight, x if bias is None else bias.contiguous(), y, chosen, images, channels, *x.shape[2:], out, kh, kw,
        S=size, RECTIFIED=rectified, BM=block, BN=wide, BK=depth, BIAS=bias is not None, PRECISION=precision,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def conv2d_input_gradient(
    dy: Tensor, weight: Tensor, size: tuple[int, int], padding: tuple[int, int], precision: str
) -> Tensor:
    """Return the gradient of the input: each output pixel's gradient times its kernel is a patch; patches are summed.

    With precision TF32 patches are stored as bfloat16, to halve their memory; their sum is float32.
    """
    by_patch = weight.flatten(2).transpose(1, 2)[..., None, None]  # (R, K, O, 1, 1): a convolution of size 1
    patches = valid_conv2d(dy, by_patch, None, precision, torch.bfloat16 if precision == "tf32" else torch.float32)
    dx = dy.new_empty(len(dy), weight.shape[2], *size)
    blocks, geometry = (triton.cdiv(dx.numel(), 256),), (*size, *dy.shape[2:], *padding, *weight.shape[3:])
    _add_patches[blocks](patches, dx, dx.numel(), *geometry, BM=256, INDEX=_index(patches), num_warps=4)
    return dx


def valid_conv2d_weight_gradient(
    x: Tensor, dy: Tensor, chosen: Tensor | None, size: int, weight: Tensor, precision: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias from output gradients, pooled or not; long sums are split in parts."""
    rows, out, channels, kh, kw = weight.shape
    x, dy = x.contiguous(), dy.contiguous()
    images, patch, total = len(x) // rows, channels * kh * kw, len(x) // rows * dy.shape[2] * dy.shape[3]
    block, warps, depth, wide = 64 if size == 1 else 32, 2 if size == 1 else 1, 32, _width(out)
    blocks = triton.cdiv(patch + 1, depth) * triton.cdiv(out, wide)
    parts = max(1, min(triton.cdiv(PROGRAMS, (FEW if rows <= FEW else MANY) * blocks), triton.cdiv(total, 4 * block)))
    if total % block == 0:  # parts of equal length need no bounds test
        parts = max(p for p in range(1, parts + 1) if total // block % p == 0)
    chunk = triton.cdiv(triton.cdiv(total, parts), block) * block
    partial = x.new_empty(parts, rows, out, patch + 1)
    _weight_gradient[(parts, blocks, rows)](
        x, dy, dy if chosen is None else chosen, partial, chunk, images, channels, *x.shape[2:], out, kh, kw, S=size,
        BM=block, BN=wide, BK=depth, PRECISION=precision, num_warps=warps, num_stages=1,
    )  # fmt: skip
    both = partial.sum(dim=0) if parts > 1 else partial[0]
    return both[..., :patch].reshape(weight.shape), both[..., patch]


class Conv2d(torch.autograd.Function):
    """Stacked convolution with gradients; the input is padded first, so that the kernels need no bounds tests."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, precision):  # type: ignore[no-untyped-def]
        ctx.size, ctx.padding, ctx.precision = x.shape[2:], padding, precision
        x = _padded(x, padding)
        ctx.save_for_backward(x, weight)
        return valid_conv2d(x, weight, bias, precision)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def,override]
        x, weight = ctx.saved_tensors
        dw, db = valid_conv2d_weight_gradient(x, dy, None, 1, weight, ctx.precision)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = conv2d_input_gradient(dy, weight, ctx.size, ctx.padding, ctx.precision)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None, None


class PooledConv2d(torch.autograd.Function):
    """Convolution, ReLU if `rectified`, and maximum over non-overlapping windows, in one pass."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, size, rectified, precision):  # type: ignore[no-untyped-def]
        ctx.shape, ctx.padding, ctx.size, ctx.precision = x.shape[2:], padding, size, precision
        x = _padded(x, padding)
        y, chosen = valid_conv2d_pooled(x, weight, bias, size, rectified, precision)
        ctx.save_for_backward(x, weight, chosen)
        ctx.mark_non_differentiable(chosen)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def,override]
        x, weight, chosen = ctx.saved_tensors
        dw, db = valid_conv2d_weight_gradient(x, dy, chosen, ctx.size, weight, ctx.precision)
        dx = None
        if ctx.needs_input_grad[0]:
            spread = _spread(dy, chosen, (*dy.shape[:2], *_outputs(x, weight, 1)), ctx.size)
            dx = conv2d_input_gradient(spread, weight, ctx.shape, ctx.padding, ctx.precision)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None, None, None, None


class MaxPool2d(torch.autograd.Function):
    """Maximum over non-overlapping windows, of the input or of its ReLU."""

    @staticmethod
    def forward(ctx, x, size, rectified):  # type: ignore[no-untyped-def]
        x = x.contiguous()
        height, width = x.shape[2:]
        y = x.new_empty(*x.shape[:2], height // size, width // size)
        chosen = torch.empty_like(y, dtype=torch.uint8)
        _pool[(triton.cdiv(y.numel(), 1024),)](
            x, y, chosen, y.numel(), height, width, size, rectified, BM=1024, INDEX=_index(x)
        )
        ctx.save_for_backward(chosen)
        ctx.shape, ctx.size = x.shape, size
        ctx.mark_non_differentiable(chosen)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def,override]
        (chosen,) = ctx.saved_tensors
        return _spread(dy, chosen, ctx.shape, ctx.size), None, None


def _spread(dy: Tensor, chosen: Tensor, shape: tuple[int, ...], size: int) -> Tensor:
    """Pass the gradient of each window to its maximal pixel."""
    dx = dy.new_empty(shape)
    blocks = (triton.cdiv(dx.numel(), 1024),)
    _pool_gradient[blocks](dy.contiguous(), chosen, dx, dx.numel(), *shape[2:], size, BM=1024, INDEX=_index(dx))
    return dx


def _padded(x: Tensor, padding: tuple[int, int]) -> Tensor:
    (ph, pw) = padding
    return F.pad(x, (pw, pw, ph, ph)) if ph or pw else x
