"""The exact squared distance of two agents' updates, with a third agent as dealer.

The dealer gives random vectors a to the agent and b to Alice, and random words to both whose sum is <a, b> (Beaver
1991). Both then exchange their vectors, masked by these, and send one word each to the server:

    agent  x        sends x + a to Alice       and |x|^2 - 2 (<x, y + b> + s) + p    to the server
    Alice  y        sends y + b to the agent   and |y|^2 - 2 (t - <x + a, b>) - p    to the server,   s + t = <a, b>

All numbers are words of the ring modulo 2^64, and p is a random word that both know. The sum of the two words is
|x - y|^2; each word alone is uniform. Alice and the server together learn nothing else; the dealer and the server
together would learn both vectors, so the dealer is an agent, never the server. The vectors are streams of keys that
the dealer shares with both, so it sends one word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from waffle_fl.privacy.masks import stream
from waffle_fl.privacy.ring import LongWords, Numbers

BITS = 20  # binary digits after the point, in units: squared distances up to 4 LONGEST^2 are below 2^64 steps


class Dealt(NamedTuple):
    """What one party holds before the exchange."""

    mask: LongWords  # a or b
    share: LongWords  # (1,): s or t


def dealer_for(agent: int, alice: int, group: Sequence[int]) -> int:
    """Return the agent that deals for a pair: the next one in the group, so that all agents deal equally often."""
    others = sorted(i for i in group if i not in (agent, alice))
    return next((i for i in others if i > agent), others[0])


def encode(numbers: Numbers, unit: float) -> LongWords:
    """Return numbers as words of the ring modulo 2^64, rounded to the nearest step."""
    return np.rint(numbers * (2.0**BITS / unit)).astype(np.int64).view(np.uint64)


def mask_of(key: bytes, count: int) -> LongWords:
    """Return the mask that the dealer and the holder of this key derive."""
    return stream(key, 2 * count).view(np.uint64)


def alice_of(alice_key: bytes, count: int) -> Dealt:
    """Return what Alice holds: her mask, and a random word as her share."""
    words = mask_of(alice_key, count + 1)
    return Dealt(words[:-1], words[-1:])


def dealer_word(agent_key: bytes, alice_key: bytes, count: int) -> LongWords:
    """Return the word that the dealer sends to the agent, masked for it."""
    words, hers = mask_of(agent_key, count + 1), alice_of(alice_key, count)
    return product(words[:-1], hers.mask) - hers.share + words[-1:]


def agent_of(agent_key: bytes, count: int, word: LongWords) -> Dealt:
    """Return what the agent holds after it has received the dealer's word."""
    words = mask_of(agent_key, count + 1)
    return Dealt(words[:-1], word - words[-1:])


def agent_word(x: LongWords, from_alice: LongWords, own: Dealt, pair_key: bytes) -> LongWords:
    """Return the word that the agent sends to the server."""
    return product(x, x) - np.uint64(2) * (product(x, from_alice) + own.share) + mask_of(pair_key, 1)


def alice_word(y: LongWords, from_agent: LongWords, own: Dealt, pair_key: bytes) -> LongWords:
    """Return the word that Alice sends to the server."""
    return product(y, y) - np.uint64(2) * (own.share - product(from_agent, own.mask)) - mask_of(pair_key, 1)


def distance(agent_word: LongWords, alice_word: LongWords, unit: float) -> float:
    """Return |x - y| from the two words that the server has received."""
    return float(int((agent_word + alice_word)[0]) ** 0.5 * unit * 2.0**-BITS)


def product(a: LongWords, b: LongWords) -> LongWords:
    """Return the inner product modulo 2^64 as an array of one word, for which numpy wraps without a warning."""
    wrapped: LongWords = np.multiply(a, b).sum(dtype=np.uint64, keepdims=True)
    return wrapped
