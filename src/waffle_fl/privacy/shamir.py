"""Shares of a secret (Shamir 1979): any `threshold` of them give the secret, fewer give nothing.

The secret is the constant term of a random polynomial over the integers modulo PRIME, and a share is its value at the
number of its holder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

PRIME = 2**255 - 19
SHARE_BYTES = 32
SECRET_BYTES = 31  # below PRIME
WIDE = 48  # bytes of a draw, reduced modulo PRIME: a bias of 2^-129

Entropy = Callable[[int], bytes]  # number of bytes -> random bytes


def threshold_for(agents: int) -> int:
    """Return how many shares give a secret.

    With two thirds, a server that reports an agent as arrived to some and as missing to others cannot collect enough
    shares of both its secrets, unless a third of the agents help it.
    """
    return math.ceil(2 * agents / 3)


def split(secret: bytes, holders: Sequence[int], threshold: int, entropy: Entropy) -> dict[int, bytes]:
    """Return the share of each holder."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(holders):
        raise ValueError(f"expected {SECRET_BYTES} bytes and at least {threshold} holders, got {len(holders)}")
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [int.from_bytes(entropy(WIDE), "big") % PRIME for _ in range(threshold - 1)]
    return {holder: _value(coefficients, holder + 1).to_bytes(SHARE_BYTES, "big") for holder in holders}


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of exactly `threshold` shares."""
    total = 0
    for holder, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != holder:
                above = above * (other + 1) % PRIME
                below = below * (other - holder) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    return (total % PRIME).to_bytes(SHARE_BYTES, "big")[-SECRET_BYTES:]


def _value(coefficients: Sequence[int], at: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * at + coefficient) % PRIME
    return total
