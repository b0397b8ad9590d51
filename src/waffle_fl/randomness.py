"""Random numbers derived from (seed, purpose, agent, round, ...), so that no draw depends on what else runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit integer
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
LARGEST = torch.iinfo(torch.int64).max

Draw: TypeAlias = Callable[[Tensor, int], Tensor]  # as `noise`: (keys, length) -> (rows, length) 63-bit integers


def derive(seed: int, *words: str | int) -> int:
    """Return a 63-bit hash of the seed and the words."""
    text = "/".join(str(word) for word in (seed, *words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *words: str | int) -> np.random.Generator:
    """Return a NumPy generator for draws on the CPU (splits, permutations, synthetic data)."""
    return np.random.default_rng(derive(seed, *words))


def noise(keys: Tensor, length: int) -> Tensor:
    """SplitMix64: row i holds `length` non-negative 63-bit integers that depend only on keys[i], on any device."""
    positions = torch.arange(1, length + 1, device=keys.device)
    z = keys[:, None] + positions * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return _shift_right(z ^ _shift_right(z, 31), 1)


def shuffle(keys: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Row i starts with a random permutation of range(lengths[i]); the rest is padding."""
    draws = noise(keys, longest)
    padding = torch.arange(longest, device=keys.device) >= lengths[:, None]
    return draws.masked_fill(padding, LARGEST).argsort(dim=1, stable=True)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's int64 is signed, so the sign bits are masked."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def normal(keys: Tensor, length: int, draw: Draw = noise) -> Tensor:
    """Row i holds `length` standard normal draws that depend only on keys[i] (Box-Muller)."""
    radius, angle = (draw(keys, 2 * length).double() / LARGEST).clamp(min=1e-300).chunk(2, dim=1)
    return (-2 * radius.log()).sqrt() * (2 * torch.pi * angle).cos()
