"""Messages as bytes: a JSON header with the structure and all numbers, then the contents of all byte strings.

`read` accepts exactly the fields and types of the expected class, whatever the sender has written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np

from waffle_fl.errors import WaffleError

T = TypeVar("T")
MAX_HEADER = 1 << 24


def written(message: Any) -> bytes:
    """Return a message as bytes."""
    blobs: list[bytes] = []
    header = json.dumps(_plain(message, blobs), separators=(",", ":"), allow_nan=False).encode()
    return b"".join([struct.pack("<I", len(header)), header, *blobs])


def read(content: bytes, kind: type[T]) -> T:
    """Return a message of this class, or raise a WaffleError."""
    try:
        (length,) = struct.unpack("<I", content[:4])
        if length > min(MAX_HEADER, len(content) - 4):
            raise ValueError
        left = _Blobs(content, 4 + length)
        message: T = _typed(json.loads(content[4 : 4 + length]), kind, left)
        if left.position != len(content):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error):
        raise WaffleError(f"not a message of a private round: expected {kind.__name__}") from None
    return message


@dataclasses.dataclass
class _Blobs:
    """The byte strings of a message, read one after another."""

    content: bytes
    position: int

    def next(self, length: Any) -> bytes:
        if type(length) is not int or not 0 <= length <= len(self.content) - self.position:
            raise ValueError
        self.position += length
        return self.content[self.position - length : self.position]


def _plain(value: Any, blobs: list[bytes]) -> Any:
    """Return a value as JSON; byte strings and arrays become their lengths, and their contents go to `blobs`."""
    if isinstance(value, np.ndarray):
        value = value.astype(value.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, bytes):
        blobs.append(value)
        return len(value)
    if isinstance(value, Mapping):
        return [[key, _plain(one, blobs)] for key, one in value.items()]
    if isinstance(value, tuple):
        return [_plain(one, blobs) for one in value]
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name), blobs) for field in dataclasses.fields(value)]
    return value


def _typed(value: Any, hint: Any, left: _Blobs) -> Any:
    """Return a JSON value as the type that the hint names."""
    inside = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if hint is bytes:
        return left.next(value)
    if origin is np.ndarray:
        (kind,) = typing.get_args(inside[1])
        return np.frombuffer(left.next(value), dtype=np.dtype(kind).newbyteorder("<")).astype(kind)
    if origin is tuple:
        return tuple(_typed(one, inside[0], left) for one in _list(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = [(_typed(key, inside[0], left), _typed(one, inside[1], left)) for key, one in _list(value)]
        if len(dict(pairs)) < len(pairs):
            raise ValueError
        return dict(pairs)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = _hints(hint)
        values = [_typed(one, kind, left) for one, kind in zip(_list(value), hints, strict=True)]
        return hint(*values)
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value) is not hint or hint not in (int, str, bool):
        raise ValueError
    return value


@cache
def _hints(kind: Any) -> tuple[Any, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(hints[field.name] for field in dataclasses.fields(kind))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError
    return value
