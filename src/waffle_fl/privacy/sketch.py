"""Secret sketches: few numbers per agent from which the server computes the distance of two updates, and nothing else.

Two steps lead from a vector of d numbers to words that only the pair of them can be read from:

    compress   a count sketch that all agents and the server know: every number is added to one of k sums with a random
               sign. The squared length is kept on average, with a relative variance of 2 / k. Not needed if d <= k.
    mask       by random words a, b and p that only the two compared agents know

    agent  x   sends x + a and |x|^2 + 2 <x + a, b> + p
    Alice  y   sends y + b and |y|^2 + 2 <a, y> - p

All numbers are integers modulo 2^48. The sum of the two products, minus 2 <x + a, y + b>, is |x - y|^2: the server
computes it exactly. Whatever x and y are, three of the four messages are independent and uniform, and the fourth
follows from them and the distance. So the server learns the distance and nothing else (private simultaneous messages:
Feige, Kilian and Naor 1994).
"""

from __future__ import annotations

import numpy as np

from waffle_fl.privacy.masks import stream
from waffle_fl.privacy.ring import LONGEST, LongWords, Numbers, wrap

BITS = 15  # binary digits after the point, in units: squared distances up to 4 LONGEST^2 are below 2^48 steps


def compress(vector: Numbers, size: int, public_key: bytes) -> Numbers:
    """Return the count sketch of a vector with `size` sums, or the vector itself if it is not longer."""
    if len(vector) <= size:
        return vector
    words = stream(public_key, len(vector)).astype(np.uint64)
    places = ((words >> np.uint64(1)) * np.uint64(size) >> np.uint64(31)).astype(np.int64)
    signs = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
    return np.bincount(places, weights=signs * vector, minlength=size).astype(np.float64)


def fits(vector: Numbers, unit: float) -> bool:
    """Return whether a distance of this vector could be read."""
    return bool(np.linalg.norm(vector) <= LONGEST * unit)


def words_of(vector: Numbers, unit: float, secret: bytes, hers: bool) -> LongWords:
    """Return what an agent sends, or Alice for that agent (`hers`): a word per number, and the masked products."""
    x = np.rint(vector * (2.0**BITS / unit)).astype(np.int64).view(np.uint64)
    masks = stream(secret, 2 * (2 * len(x) + 1)).view(np.uint64)
    a, b, p = masks[: len(x)], masks[len(x) : -1], masks[-1:]
    if hers:
        return wrap(np.concatenate([x + b, _dot(x, x) + np.uint64(2) * _dot(a, x) - p]))
    return wrap(np.concatenate([x + a, _dot(x, x) + np.uint64(2) * _dot(x + a, b) + p]))


def distance(own: LongWords, hers: LongWords, unit: float) -> float:
    """Return the distance from what an agent and Alice have sent."""
    squared = wrap(own[-1:] + hers[-1:] - np.uint64(2) * _dot(own[:-1], hers[:-1]))
    return float(int(squared[0]) ** 0.5 * unit * 2.0**-BITS)


def _dot(a: LongWords, b: LongWords) -> LongWords:
    """Return the inner product modulo 2^64 as an array of one word, for which numpy wraps without a warning."""
    total: LongWords = np.multiply(a, b).sum(dtype=np.uint64, keepdims=True)
    return total
