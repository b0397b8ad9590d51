"""Hold out some of an agent's rows, determined by a seed and the rows' content only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waffle_fl.randomness import derive

Rows = NDArray[np.int64]


def hold_out(
    keys: Sequence[bytes], classes: NDArray[Any] | None, share: float, seed: int, purpose: str
) -> tuple[Rows, Rows]:
    """Return (held out, kept) rows: hold out a share of each class, and keep at least one row of each.

    Rows with equal keys stay together. The order of the rows and the agent do not matter: equal files split equally.
    """
    salt = derive(seed, "hold out", purpose).to_bytes(8, "big")
    rank = [hashlib.blake2b(key, digest_size=16, salt=salt).digest() for key in keys]
    strata = np.zeros(len(keys), np.int64) if classes is None else np.unique(classes, return_inverse=True)[1]
    rows = [
        sorted(np.flatnonzero(strata == k).tolist(), key=lambda i: rank[i]) for k in range(strata.max(initial=-1) + 1)
    ]
    counts = _quotas([len(part) for part in rows], share)
    cuts = [_between_keys([rank[i] for i in part], count) for part, count in zip(rows, counts, strict=True)]
    held = [i for part, cut in zip(rows, cuts, strict=True) for i in part[:cut]]
    kept = [i for part, cut in zip(rows, cuts, strict=True) for i in part[cut:]]
    return np.sort(np.array(held, np.int64)), np.sort(np.array(kept, np.int64))


def _quotas(sizes: Sequence[int], share: float) -> list[int]:
    """Return the number to hold out per class: the largest remainders round up, and one row of each class stays."""
    total = max(1, round(share * sum(sizes))) if share else 0
    exact = np.array(sizes) * share
    room = np.maximum(np.array(sizes) - 1, 0)
    quotas = np.minimum(np.floor(exact).astype(int), room)
    for k in np.argsort(quotas - exact, kind="stable"):
        quotas[k] += int(quotas.sum() < total and quotas[k] < room[k])
    return [int(count) for count in quotas]


def _between_keys(ranks: Sequence[bytes], cut: int) -> int:
    """Return the nearest cut that does not separate equal rows: before them, or after them if they come first."""
    if not cut:
        return 0
    edges = [i for i in range(1, len(ranks)) if ranks[i] != ranks[i - 1]]
    return max((edge for edge in edges if edge <= cut), default=min(edges, default=0))
