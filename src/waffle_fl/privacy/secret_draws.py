"""Secret random numbers of a site: a ChaCha20 stream under a key that only the site can compute.

The numbers of a simulation derive from its seed. A server that knew a site's random numbers could subtract the noise,
and it would know which rows are in a batch. So a site draws from a stream that depends on a secret of its own and on
everything that determines its reply: a repeated request gets the same bits, any other request gets other noise.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

SECRET_BYTES = 32


class SecretDraws:
    """A replacement of `randomness.noise`: the keys are public, the numbers are not."""

    def __init__(self, secret: bytes, question: str) -> None:
        """Derive the stream's key from the site's secret and a digest of the whole question."""
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"expected a secret of at least {SECRET_BYTES} bytes, got {len(secret)}")
        self._key = HKDF(SHA256(), SECRET_BYTES, salt=None, info=f"waffle noise {question}".encode()).derive(secret)

    def __call__(self, keys: Tensor, length: int) -> Tensor:
        """Row i holds `length` non-negative 63-bit integers."""
        rows = [self._integers(int(key), length) for key in keys]
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, length, dtype=torch.int64)

    def _integers(self, key: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        start = hashlib.blake2b(key.to_bytes(8, "big", signed=True), digest_size=16, key=self._key).digest()
        stream = Cipher(ChaCha20(self._key, bytes(4) + start[4:]), mode=None).encryptor().update(bytes(8 * length))
        return (np.frombuffer(stream, dtype="<u8") >> np.uint64(1)).astype(np.int64)
