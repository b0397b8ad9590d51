"""What a site must not lose: its own states, a few rounds back, and a ledger of all that has left it."""

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

OLDER = 3  # states before the one in use that are kept: a server may go back to a checkpoint of that age
PRIVATE = 0o600


class Store:
    """A site's states, by run, course and version. Every file is written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, run: str, course: str, version: Version, like: Any) -> Any | None:
        """A state that the site held, or None if it is lost or damaged."""
        template: dict[str, Tensor] = like._asdict()
        path = self._path(run, course, version)
        try:
            _, tensors = read_tensors(path, template)
        except WaffleError:
            return None
        return type(like)(*(tensors[name] for name in template))

    def save(self, run: str, course: str, version: Version, base: Version, state: Any) -> None:
        """Keep a new state beside the one it was made from; what neither we nor an older checkpoint need goes."""
        path = self._path(run, course, version)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        tensors: Mapping[str, Tensor] = state._asdict()
        write_tensors(path, {"round": str(version.round), "attempt": str(version.attempt)}, tensors)
        path.chmod(PRIVATE)
        known = sorted((_version(p), p) for p in path.parent.glob("*.safetensors"))
        older = [p for v, p in known if v < base]
        stale = [p for v, p in known if base < v and v != version]
        remove(*older[:-OLDER], *stale)

    def _path(self, run: str, course: str, version: Version) -> Path:
        return self.folder / check_name(run) / check_name(course) / f"{version.round:08d}-{version.attempt}.safetensors"


def _version(path: Path) -> Version:
    return Version(*(int(part) for part in path.stem.split("-")))


class Ledger:
    """One line for everything that has left the site, each with the hash of the line before.

    `asked` holds what was asked, by kind and as a hash: the same question again is answered in the same bits, which
    tell nothing new. A second file, the head, holds the last hash: without it, a ledger that was deleted or cut would
    look like a new one, and all budgets would start again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.head = path, path.with_name(f".{path.name}.head")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One answer at a time, also of several processes: two at once would each be counted without the other."""
        lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def check(self) -> None:
        """Raise if lines were changed, cut off or removed since they were written."""
        lines, anchor = [(line, json.loads(line)) for line in self._raw()], self._anchor()
        previous, hashes, whole = "", {""}, True
        for line, content in lines:
            follows = content.get("previous", previous) == previous  # earlier versions wrote no hashes
            whole = "accepted" in content or (whole and follows)
            previous = _hash(line)
            hashes.add(previous)
        if not whole:
            raise WaffleError(f"{self.path}: {self._damage('a line does not follow the one before it')}")
        chained = any("previous" in content for _, content in lines[-1:])
        if chained if anchor is None else anchor not in hashes:
            raise WaffleError(f"{self.path}: {self._damage('lines are missing' if lines else 'it is missing')}")

    def accept(self) -> None:
        """Go on with the ledger as it is, and put that on record."""
        self.note(
            accepted="the administrator of this site accepts the ledger as it was found; lines before may be missing"
        )

    def different(self, kind: str, question: str) -> int:
        """How many different questions of a kind the site would have been asked with this one."""
        return len({line["asked"][kind] for line in self.lines() if kind in line.get("asked", {})} | {question})

    def nonces(self) -> set[str]:
        """The nonces of all requests that were answered."""
        return {line["nonce"] for line in self.lines() if isinstance(line.get("nonce"), str)}

    def note(self, **what: Any) -> None:
        """Append a line; it is on the disk when this returns."""
        lines = self._raw()
        stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        line = json.dumps({**stamp, **what, "previous": _hash(lines[-1]) if lines else ""}).encode()
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE), "a+b") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(-min(1, stream.tell()), os.SEEK_END)
            torn = stream.read() not in (b"", b"\n")
            stream.write(b"\n" * torn + line + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        write_atomically(self.head, _hash(line).encode() + b"\n")
        self.head.chmod(PRIVATE)

    def lines(self) -> Iterator[dict[str, Any]]:
        """All lines that were written whole."""
        for line in self._raw():
            yield json.loads(line)

    def _raw(self) -> list[bytes]:
        """The lines that can be read; of one that a power cut has torn the answer has never left."""
        found = self.path.read_bytes().splitlines() if self.path.exists() else []
        return [line for line in found if _is_record(line)]

    def _anchor(self) -> str | None:
        return self.head.read_text(encoding="ascii").strip() if self.head.exists() else None

    def _damage(self, what: str) -> str:
        return (
            f"{what}, so what has left this site is not known: restore it from a backup, or go on with "
            "waffle deploy site FOLDER --accept-ledger"
        )


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
