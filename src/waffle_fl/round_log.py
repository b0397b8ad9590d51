"""rounds.jsonl: one JSON line per round, appended during the run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from waffle_fl.atomic_files import check_regular
from waffle_fl.errors import readable_errors
from waffle_fl.manifest import Digest


class RoundLog:
    """A log open for appending, with the digest of its content."""

    def __init__(self, path: Path) -> None:
        content = _read(path)
        self.stream = path.open("ab")
        self._hash, self._size = hashlib.sha256(content), len(content)

    def append(self, line: bytes) -> None:
        self.stream.write(line)
        self.stream.flush()
        self._hash.update(line)
        self._size += len(line)

    @property
    def digest(self) -> Digest:
        return Digest(self._size, self._hash.hexdigest())

    def sync(self) -> None:
        os.fsync(self.stream.fileno())

    def close(self) -> None:
        self.stream.close()


def json_line(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n").encode()


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log in order. A partial last line, left by a crash, is ignored."""
    rounds: list[dict[str, Any]] = []
    for line in _read(path).splitlines(keepends=True):
        try:
            content = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or content.get("round") != len(rounds) + 1:
            break
        rounds.append(content)
    return rounds


def _read(path: Path) -> bytes:
    """Return the content of a file, empty if it does not exist."""
    with readable_errors(path.parent), contextlib.suppress(FileNotFoundError):
        return check_regular(path).read_bytes()
    return b""
