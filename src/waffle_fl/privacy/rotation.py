"""Secret rotations: of a sum of rotated vectors only the length is known.

All agents rotate by the same matrix, which the server does not know. It is uniform among all rotations and reflections,
so the rotated sum is a vector of the same length in a uniformly random direction, whatever the sum is.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from waffle_fl.privacy.masks import blocks
from waffle_fl.privacy.ring import Numbers

LONGEST_ROTATED = 1024  # numbers; longer vectors are reduced by a count sketch, because rotating takes their square


def rotated(vector: Numbers, key: bytes) -> Numbers:
    """Return the vector rotated by the matrix of this key.

    A product of reflections, each of which takes a unit vector to a random point of the sphere, in one dimension more
    than the one before (Diaconis and Shahshahani 1987).
    """
    result = vector.copy()
    for normal in _normals(key, len(vector)):
        part = result[len(vector) - len(normal) :]
        part -= (2.0 * (normal @ part)) * normal
    return result


@lru_cache(maxsize=16)  # a simulation rotates the vectors of all agents by one matrix
def _normals(key: bytes, size: int) -> list[Numbers]:
    """Return the unit normals of the reflections in 1, 2, ... dimensions."""
    found = []
    for count, words in enumerate(blocks(key, [2 * n for n in range(1, size + 1)]), 1):
        first, second = (words.astype(np.float64) + 0.5).reshape(2, count) * 2.0**-32
        point = np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)
        normal = -point / np.linalg.norm(point)
        normal[0] += 1.0
        length = np.linalg.norm(normal)
        found.append(normal / length if length > 0 else normal)  # 0 if the point is the unit vector itself
    return found
