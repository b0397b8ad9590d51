"""Read the idx format of MNIST, gzipped: a magic number, the dimensions, then bytes."""

from __future__ import annotations

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError

UNSIGNED_BYTE = 8


def read_idx(path: Path, expected: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the array in the file, which must have the expected dimensions; no larger array is allocated."""
    try:
        with gzip.open(path, "rb") as stream:
            header = stream.read(4 + 4 * len(expected))
            _check_header(path, header, expected)
            size = prod(expected)
            body = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise WaffleError(
            f"{path} is damaged ({error}; expected {prod(expected)} bytes of data): delete it and fetch it again"
        ) from None
    if len(body) != size:
        found = f"{len(body)} bytes" if len(body) < size else "more"
        raise WaffleError(
            f"{path} is damaged: expected {size} bytes of data, read {found}; delete it and fetch it again"
        )
    return np.frombuffer(body, np.uint8).reshape(expected)


def _check_header(path: Path, header: bytes, expected: tuple[int, ...]) -> None:
    if len(header) < 4 + 4 * len(expected):
        raise WaffleError(f"{path} is damaged: its header ends after {len(header)} bytes; delete it and fetch it again")
    zeros, kind, rank = struct.unpack(">HBB", header[:4])
    if zeros or kind != UNSIGNED_BYTE:
        raise WaffleError(f"{path}: expected the magic number 0x0000080{len(expected)}, got 0x{header[:4].hex()}")
    if rank != len(expected):
        raise WaffleError(f"{path}: expected rank {len(expected)}, got {rank}")
    shape = struct.unpack(f">{rank}I", header[4:])
    if shape != expected:
        raise WaffleError(f"{path}: expected the dimensions {expected}, got {shape}")
