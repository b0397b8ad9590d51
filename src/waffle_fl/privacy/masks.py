"""Keys derived from secrets, and masks: streams of words that only the holders of a secret can compute.

    secret of two agents in a job, or of one agent in a round
    -> key for one round and one purpose   (HKDF)
    -> words                               (ChaCha20)

Every key is used for one stream, or for messages with random nonces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from waffle_fl.privacy.ring import Residues, Words

KEY_BYTES = 32
PROTOCOL = b"waffle-fl private rounds, version 1"
NONCE = bytes(16)  # of ChaCha20: every key is used for one stream
ONCE = bytes(12)  # of ChaCha20-Poly1305 with a key that encrypts one message


def derive(secret: bytes, purpose: str, context: bytes = b"") -> bytes:
    """Return a key for one purpose."""
    info = b"\n".join([PROTOCOL, purpose.encode(), context])
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def stream(key: bytes, length: int) -> Words:
    """Return uniform words that depend only on the key."""
    return next(blocks(key, [length]))


def blocks(key: bytes, lengths: Iterable[int]) -> Iterator[Words]:
    """Yield consecutive parts of a stream; small ones stay in the CPU's cache."""
    cipher = Cipher(algorithms.ChaCha20(key, NONCE), mode=None).encryptor()
    for length in lengths:
        words = bytearray(4 * length)
        cipher.update_into(bytes(4 * length), words)
        yield np.frombuffer(words, dtype="<u4").astype(np.uint32, copy=False)


def entropy_of(secret: bytes) -> Callable[[int], bytes]:
    """Return a source of random bytes that depends only on the secret: SHAKE-256 of it and a counter."""
    draws = count()

    def draw(length: int) -> bytes:
        return hashlib.shake_256(secret + f"/{next(draws)}".encode()).digest(length)

    return draw


def self_mask(secret: bytes, context: bytes, length: int, moduli: Residues | None = None) -> Any:
    """Return the mask that an agent adds alone, so that a sum that arrives late stays masked.

    Masks are words modulo 2^32, or residues modulo `moduli`.
    """
    return _mask(derive(secret, "self mask", context), length, moduli)


def pair_mask(seed: bytes, agent: int, other: int, context: bytes, length: int, moduli: Residues | None = None) -> Any:
    """Return what `agent` adds for its pair with `other`: the opposite of what the other adds."""
    words = _mask(derive(seed, "pair mask", context), length, moduli)
    return words if agent < other else np.negative(words)


def _mask(key: bytes, length: int, moduli: Residues | None) -> Any:
    if moduli is None:
        return stream(key, length)
    return (stream(key, 2 * length).view(np.uint64) % moduli.view(np.uint64)).view(np.int64)


def seal_seeds(secret: bytes, seeds: Mapping[int, bytes], context: bytes) -> bytes:
    """Return the seeds of an agent's pair masks, encrypted; the secret gives the pair masks of this round."""
    plain = b"".join(seeds[other] for other in sorted(seeds))
    return ChaCha20Poly1305(derive(secret, "seal")).encrypt(ONCE, plain, context)


def open_seeds(secret: bytes, sealed: bytes, others: Sequence[int], context: bytes) -> dict[int, bytes]:
    """Return the sealed seeds by agent, or raise InvalidTag."""
    plain = ChaCha20Poly1305(derive(secret, "seal")).decrypt(ONCE, sealed, context)
    return {other: plain[KEY_BYTES * k :][:KEY_BYTES] for k, other in enumerate(sorted(others))}
