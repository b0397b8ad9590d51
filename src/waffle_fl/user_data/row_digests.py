"""Digests of rows as arrays of 16 bytes per row, to find equal rows with little memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint64]  # (rows, 2)


def digests_of(contents: Iterable[bytes], salt: bytes = b"") -> Digests:
    """Return the digest of each content."""
    found = bytearray()
    for content in contents:
        found += hashlib.blake2b(content, digest_size=16, salt=salt).digest()
    return np.frombuffer(found, ">u8").astype(np.uint64).reshape(-1, 2)


def sorted_order(digests: Digests) -> NDArray[np.int64]:
    """Return the rows in the order of their digests; equal ones keep their order."""
    return np.lexsort((digests[:, 1], digests[:, 0]))


def first_of_each(ordered: Digests) -> NDArray[np.bool_]:
    """Return which of the sorted digests differ from the one before."""
    first = np.ones(len(ordered), np.bool_)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return first


def groups_of(parts: Sequence[Digests]) -> list[NDArray[np.int64]]:
    """Return a number per row, the same for equal rows of any part."""
    digests = np.concatenate([np.empty((0, 2), np.uint64), *parts])
    order = sorted_order(digests)
    group = np.empty(len(digests), np.int64)
    group[order] = np.cumsum(first_of_each(digests[order])) - 1
    return np.split(group, np.cumsum([len(part) for part in parts])[:-1])
