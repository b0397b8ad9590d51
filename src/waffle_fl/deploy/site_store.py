"""A site's persistent data: its states of the last rounds, and a ledger of everything that has left the site."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from waffle_fl.atomic_files import remove, write_atomically
from waffle_fl.config import check_name
from waffle_fl.engines.flower.messages import Version
from waffle_fl.errors import WaffleError
from waffle_fl.tensorfile import read_tensors, write_tensors

OLDER = 3  # older states that are kept, because the server may resume from an older checkpoint
PRIVATE = 0o600


class Store:
    """A site's states, by job, run label and version. Files are written atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, run: str, label: str, version: Version, like: Any) -> Any | None:
        """Return a stored state, or None if it is missing or damaged."""
        template: dict[str, Tensor] = like._asdict()
        path = self._path(run, label, version)
        try:
            _, tensors = read_tensors(path, template)
        except WaffleError:
            return None
        return type(like)(*(tensors[name] for name in template))

    def save(self, run: str, label: str, version: Version, base: Version, state: Any) -> None:
        """Store a new state; delete states that are neither its base nor among the `OLDER` states before the base."""
        path = self._path(run, label, version)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        tensors: Mapping[str, Tensor] = state._asdict()
        write_tensors(path, {"round": str(version.round), "attempt": str(version.attempt)}, tensors)
        path.chmod(PRIVATE)
        known = sorted((_version(p), p) for p in path.parent.glob("*.safetensors"))
        older = [p for v, p in known if v < base]
        stale = [p for v, p in known if base < v and v != version]
        remove(*older[:-OLDER], *stale)

    def _path(self, run: str, label: str, version: Version) -> Path:
        return self.folder / check_name(run) / check_name(label) / f"{version.round:08d}-{version.attempt}.safetensors"


def _version(path: Path) -> Version:
    return Version(*(int(part) for part in path.stem.split("-")))


class Ledger:
    """One line for everything that has left the site, each with the hash of the previous line.

    `asked` holds a hash of each question, by kind: a repeated question gets the same reply, which reveals nothing
    new. A second file, the head, holds the last hash: without it, a deleted or truncated ledger would look like a new
    one, and all budgets would be reset.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.head = path, path.with_name(f".{path.name}.head")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the ledger across processes: concurrent replies would each be counted without the other."""
        lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def check(self) -> None:
        """Raise if lines were changed, truncated or removed since they were written."""
        lines, head = [(line, json.loads(line)) for line in self._raw()], self._stored_head()
        previous, hashes, intact = "", {""}, True
        for line, content in lines:
            follows = content.get("previous", previous) == previous  # earlier versions wrote no hashes
            intact = "accepted" in content or (intact and follows)
            previous = _hash(line)
            hashes.add(previous)
        if not intact:
            raise WaffleError(f"{self.path}: {self._damage('a line does not follow the one before it')}")
        chained = any("previous" in content for _, content in lines[-1:])
        if chained if head is None else head not in hashes:
            raise WaffleError(f"{self.path}: {self._damage('lines are missing' if lines else 'it is missing')}")

    def accept(self) -> None:
        """Accept the ledger as it is, and record that."""
        self.note(
            accepted="the administrator of this site accepts the ledger as it was found; lines before may be missing"
        )

    def different(self, kind: str, question: str) -> int:
        """Number of different questions of a kind, including this one."""
        return len({line["asked"][kind] for line in self.lines() if kind in line.get("asked", {})} | {question})

    def nonces(self) -> set[str]:
        """The nonces of all answered requests."""
        return {line["nonce"] for line in self.lines() if isinstance(line.get("nonce"), str)}

    def note(self, **what: Any) -> None:
        """Append a line and sync it to disk."""
        lines = self._raw()
        stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        line = json.dumps({**stamp, **what, "previous": _hash(lines[-1]) if lines else ""}).encode()
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE), "a+b") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(-min(1, stream.tell()), os.SEEK_END)
            truncated = stream.read() not in (b"", b"\n")
            stream.write(b"\n" * truncated + line + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        write_atomically(self.head, _hash(line).encode() + b"\n")
        self.head.chmod(PRIVATE)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield all complete lines."""
        for line in self._raw():
            yield json.loads(line)

    def _raw(self) -> list[bytes]:
        """Return the readable lines. A line truncated by a power failure is skipped: its reply was never sent."""
        found = self.path.read_bytes().splitlines() if self.path.exists() else []
        return [line for line in found if _is_record(line)]

    def _stored_head(self) -> str | None:
        return self.head.read_text(encoding="ascii").strip() if self.head.exists() else None

    def _damage(self, what: str) -> str:
        return (
            f"{what}, so it is unknown what has left this site: restore the ledger from a backup, or accept it with "
            "waffle deploy site FOLDER --accept-ledger"
        )


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
