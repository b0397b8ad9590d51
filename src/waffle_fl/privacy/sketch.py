"""Secret sketches: few numbers per agent from which the server computes the distance of two updates, and nothing else.

Two steps reduce a vector of d numbers to k:

    compress   a count sketch that all agents and the server know: every number is added to one of k sums with a random
               sign. The squared length is kept on average, with a relative variance of 2 / k. Not needed if d <= k.
    rotate     by a unitary matrix that only the two compared agents know, drawn uniformly (Haar)

A uniform rotation moves a vector to a uniformly distributed vector of the same length. So the rotated difference of two
updates has one property that the server can know: its length. A dense Gaussian matrix has the same law and the same
error, but needs k d secret numbers per pair of agents and round. The rotation needs k^2 / 4: 60 times fewer for LeNet-5
and k = 4,096. Where d <= k the distance is exact.

The matrix is never built: it is a product of reflections (Stewart 1980, in its complex form), and the vector is read
as k / 2 complex numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from waffle_fl.privacy.masks import blocks, stream
from waffle_fl.privacy.ring import Numbers

Complex: TypeAlias = NDArray[Any]

BLOCK = 1 << 14  # complex numbers that are drawn at once, so that they stay in the CPU's cache


def compress(vector: Numbers, size: int, public_key: bytes) -> Numbers:
    """Return the count sketch of a vector with `size` sums, or the vector itself if it is not longer."""
    if len(vector) <= size:
        return vector
    words = stream(public_key, len(vector)).astype(np.uint64)
    places = ((words >> np.uint64(1)) * np.uint64(size) >> np.uint64(31)).astype(np.int64)
    signs = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
    return np.bincount(places, weights=signs * vector, minlength=size).astype(np.float64)


def rotate(vector: Numbers, secret_key: bytes) -> Numbers:
    """Return the vector rotated by a uniformly distributed unitary matrix; one of odd length gets a zero at the end."""
    padded = np.concatenate([vector, np.zeros(len(vector) % 2)])
    rotated = padded.view(np.complex128).copy()
    n = len(rotated)
    normals, starts, phases, ends, scales = _reflections(secret_key, n)
    for j in range(n):  # a reflection of the last j + 1 numbers, in place
        part, normal = rotated[n - 1 - j :], normals[starts[j] : starts[j] + j + 1].astype(np.complex128)
        normal[0] += ends[j]
        part[0] *= phases[j]
        normal *= np.vdot(normal, part) * scales[j]
        part -= normal
    return rotated.view(np.float64)


@lru_cache(maxsize=1)  # Alice and her partner use the same in turn, where one process simulates both
def _reflections(key: bytes, n: int) -> tuple[Complex, ...]:
    """Return vectors of 1 to n complex normal numbers, and what turns each into a reflection.

    With theta the phase of x_1, a turn of the first coordinate by theta and then the reflection at
    x + e^(i theta) |x| e_1 map e_1 to -x / |x| and the complement of e_1 to the complement of x.
    """
    starts = np.arange(n) * (np.arange(n) + 1) // 2
    normals = _normal(key, n * (n + 1) // 2)
    squares = np.add.reduceat(normals.real**2 + normals.imag**2, starts).astype(np.float64)
    first = normals[starts].astype(np.complex128)
    sizes, lengths = np.abs(first), np.sqrt(squares)
    phases = np.where(sizes > 0, first, 1) / np.where(sizes > 0, sizes, 1)
    return normals, starts, phases, phases * lengths, 1 / (squares + lengths * sizes)


def _normal(key: bytes, count: int) -> Complex:
    """Return complex normal numbers in single precision. The matrix is unitary to 1e-8, whatever these numbers are."""
    numbers = torch.empty(count, 2)
    parts: tuple[torch.Tensor, ...] = torch.split(numbers, BLOCK)
    for part, block in zip(parts, blocks(key, (2 * len(part) for part in parts)), strict=True):
        words = torch.from_numpy(block.view(np.int32)).view(2, -1).float()
        radius = words[0].mul_(2.0**-32).add_(0.5 + 2.0**-25).clamp_(2.0**-33, 1.0).log_().neg_().sqrt_()
        angle = words[1].mul_(np.pi * 2.0**-31)
        torch.mul(torch.cos(angle), radius, out=part[:, 0])
        torch.mul(torch.sin(angle), radius, out=part[:, 1])
    return torch.view_as_complex(numbers).numpy()
