"""Secret rotations: of a sum of rotated vectors only the length is known, and that exactly.

All agents rotate by the same secret matrix, which the server does not know. Numbers are integers modulo a prime p, and
the matrix is a product of reflections by random vectors v:

    x -> x - 2 v <v, x> / <v, v>

It keeps <x, x>. For all x and y of the same <x, x> whose difference has not the length 0, one direction v takes x to y.
So one reflection takes x to an almost uniform point among those of its length, and two in a row reach every point with
a probability of at least (1 - 4/p) times that of uniform points. After 2 n of them the distance from the uniform
distribution is at most (4/p)^n. The lengths modulo three primes give the squared length of any vector of integers below
2^72. Masks are taken modulo the primes, too, so that nothing but the rotated sum can be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt, prod

import numpy as np

from waffle_fl.privacy.masks import derive, stream
from waffle_fl.privacy.messages import CHECK_WORDS
from waffle_fl.privacy.ring import SUM_BITS, Numbers, Residues

PRIMES = (16777213, 16777199, 16777183)  # the largest below 2^24: sums of 2^14 products are below 2^62
REFLECTIONS = 12
PADDING = 4  # zeros before rotating: a reflection of a single number could change its sign alone
LONGEST_ROTATED = (1 << 14) - PADDING


def moduli_of(length: int) -> Residues:
    """Return the modulus of each residue of a rotated vector of so many numbers."""
    return np.repeat(np.array(PRIMES), length + PADDING)


def moduli_of_sum(lengths: Iterable[int]) -> Residues:
    """Return the modulus of each word of a sum of rotated vectors, with the words that check its masks."""
    return np.concatenate([*map(moduli_of, lengths), np.full(CHECK_WORDS, PRIMES[0])])


def rotated(numbers: Numbers, unit: float, key: bytes) -> Residues:
    """Return a vector, in steps of a sum, rotated modulo each prime."""
    steps = np.pad(np.rint(numbers * (2.0**SUM_BITS / unit)).astype(np.int64), (0, PADDING))
    return np.concatenate([_reflected(steps % p, p, derive(key, f"modulo {p}")) for p in PRIMES])


def length_of(residues: Residues, unit: float) -> float:
    """Return the length of a vector from its rotated residues."""
    parts = zip(residues.reshape(len(PRIMES), -1), PRIMES, strict=True)
    squares = [_product(part, part, p) for part, p in parts]
    whole = prod(PRIMES)
    total = sum(r * (whole // p) * pow(whole // p, -1, p) for r, p in zip(squares, PRIMES, strict=True)) % whole
    return float(isqrt(total << 32)) * 2.0**-16 * unit * 2.0**-SUM_BITS


def _reflected(vector: Residues, p: int, key: bytes) -> Residues:
    directions = stream(key, 2 * REFLECTIONS * len(vector)).view(np.uint64).reshape(REFLECTIONS, -1) % np.uint64(p)
    for v in directions.view(np.int64):
        square = _product(v, v, p)
        if square:  # otherwise there is no reflection by v
            factor = -2 * _product(v, vector, p) * pow(square, -1, p) % p
            vector = (vector + factor * v) % p
    return vector


def _product(a: Residues, b: Residues, p: int) -> int:
    """Return the inner product modulo p."""
    return int(np.multiply(a, b).sum()) % p
