"""Hold out some of an agent's rows, determined by a seed and the rows' content only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waffle_fl.randomness import derive
from waffle_fl.user_data.row_digests import digests_of, first_of_each, sorted_order

Rows = NDArray[np.int64]


class SelectedKeys(Collection[bytes]):
    """The keys of some rows, computed when they are needed."""

    def __init__(self, keys: Sequence[bytes], rows: Rows) -> None:
        self._keys, self._rows = keys, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[bytes]:
        return (self._keys[row] for row in self._rows)

    def __contains__(self, key: object) -> bool:
        return any(key == other for other in self)


def hold_out(
    keys: Collection[bytes], classes: NDArray[Any] | None, share: float, seed: int, purpose: str
) -> tuple[Rows, Rows]:
    """Return (held out, kept) rows: hold out a share of each class, and keep at least one row of each.

    Rows with equal keys stay together. The order of the rows and the agent do not matter: equal files split equally.
    """
    if not share:
        return np.empty(0, np.int64), np.arange(len(keys))
    rank = digests_of(keys, derive(seed, "hold out", purpose).to_bytes(8, "big"))
    strata = np.zeros(len(keys), np.int64) if classes is None else np.unique(classes, return_inverse=True)[1]
    order = sorted_order(rank)
    parts = [order[strata[order] == k] for k in range(strata.max(initial=-1) + 1)]
    counts = _quotas([len(part) for part in parts], share)
    cuts = [_between_keys(first_of_each(rank[part]), count) for part, count in zip(parts, counts, strict=True)]
    held = [part[:cut] for part, cut in zip(parts, cuts, strict=True)]
    kept = [part[cut:] for part, cut in zip(parts, cuts, strict=True)]
    none = np.empty(0, np.int64)
    return np.sort(np.concatenate([none, *held])), np.sort(np.concatenate([none, *kept]))


def _quotas(sizes: Sequence[int], share: float) -> list[int]:
    """Return the number to hold out per class: the largest remainders round up, and one row of each class stays."""
    total = max(1, round(share * sum(sizes)))
    exact = np.array(sizes) * share
    room = np.maximum(np.array(sizes) - 1, 0)
    quotas = np.minimum(np.floor(exact).astype(int), room)
    for k in np.argsort(quotas - exact, kind="stable"):
        quotas[k] += int(quotas.sum() < total and quotas[k] < room[k])
    return [int(count) for count in quotas]


def _between_keys(first: NDArray[np.bool_], cut: int) -> int:
    """Return the nearest cut that does not separate equal rows: before them, or after them if they come first.

    `first` marks the rows that differ from the one before.
    """
    edges = np.flatnonzero(first)[1:]
    below = edges[edges <= cut]
    return 0 if not cut or not len(edges) else int(below[-1] if len(below) else edges[0])
