"""Numbers as words of a ring of integers: masks that are added to words cancel exactly.

A word counts steps of a power of two. The steps are relative to a unit, the size of usual numbers, which is a power of
two that all agents know:

    sums       modulo 2^32, 2^-24 of a unit, so that a sum holds numbers below 128 units
    sketches   modulo 2^48, 2^-15 of a unit, for vectors no longer than 250 units

Rounding is stochastic, so a sum is unbiased: with N agents its error per number has a standard deviation of at most
sqrt(N) / 2 steps. For ten agents and LeNet-5 (61,706 numbers, unit 1) the error of the whole sum has the length 2.3e-5,
for updates whose length is near 1. A ring of 2^64 would halve nothing else and double the messages.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint32]
LongWords: TypeAlias = NDArray[np.uint64]  # of the rings modulo 2^48 (`sketch`) and 2^64 (`exact_product`)
Residues: TypeAlias = NDArray[np.int64]  # modulo primes (`rotation`)
Numbers: TypeAlias = NDArray[np.float64]

SUM_BITS = 24  # binary digits after the point, in units
LONGEST = 250.0  # units: longest vector that is compared
WORD_BITS, SKETCH_BYTES = 32, 6


def unit_for(size: float) -> float:
    """Return the smallest power of two that is at least `size`."""
    return float(2.0 ** math.ceil(math.log2(size)))


def largest(bits: int) -> float:
    """Return the number of units below which a sum must stay; a sixty-fourth is left for rounding."""
    return 2.0 ** (WORD_BITS - 1 - bits) * (63 / 64)


def holds(numbers: Numbers, unit: float, bits: int) -> bool:
    """Return whether all numbers are finite and small enough for a sum; weights sum to at most 1."""
    return bool(np.abs(numbers).max(initial=0.0) <= largest(bits) * unit)


def encode(numbers: Numbers, unit: float, bits: int, draws: Numbers | float = 0.5) -> Words:
    """Return numbers as words; `draws` in [0, 1) round stochastically, 0.5 rounds to the nearest step."""
    steps = np.floor(numbers * (2.0**bits / unit) + draws)
    return steps.astype(np.int64).astype(np.uint32)


def decode(words: Words, unit: float, bits: int) -> Numbers:
    """Return the numbers of words, of which the upper half are negative."""
    return words.view(np.int32).astype(np.float64) * (unit * 2.0**-bits)


def plain_bytes(numbers: Numbers) -> bytes:
    """Return numbers that are not masked: as float32 if that is exact, else as float64."""
    short = numbers.astype("<f4")
    return (short if np.array_equal(short, numbers) else numbers.astype("<f8")).tobytes()


def plain_numbers(content: bytes, count: int) -> Numbers:
    """Return the numbers of `plain_bytes`; raise ValueError if they are not `count` finite ones."""
    numbers = np.frombuffer(content, dtype="<f8" if len(content) == 8 * count else "<f4").astype(np.float64)
    if len(numbers) != count or not np.isfinite(numbers).all():
        raise ValueError(f"expected {count} finite numbers")
    return numbers


def wrap(words: LongWords) -> LongWords:
    """Return words modulo 2^48."""
    return words & np.uint64((1 << 8 * SKETCH_BYTES) - 1)


def packed(words: LongWords) -> bytes:
    """Return words modulo 2^48 as six bytes each."""
    return words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :SKETCH_BYTES].tobytes()


def unpacked(content: bytes) -> LongWords:
    """Return the words of `packed`."""
    filled = np.zeros((len(content) // SKETCH_BYTES, 8), dtype=np.uint8)
    filled[:, :SKETCH_BYTES] = np.frombuffer(content, dtype=np.uint8).reshape(-1, SKETCH_BYTES)
    return filled.reshape(-1).view("<u8").astype(np.uint64)
