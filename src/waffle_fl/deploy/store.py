"""What a site must not lose: its own states, a few rounds back, and a ledger of all that has left it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from waffle_fl.config import check_name
from waffle_fl.engines.flower.messages import Version
from waffle_fl.errors import WaffleError
from waffle_fl.tensorfile import read_tensors, write_tensors

OLDER = 3  # states before the one in use that are kept: a server may go back to a checkpoint of that age


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
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors: Mapping[str, Tensor] = state._asdict()
        write_tensors(path, {"round": str(version.round), "attempt": str(version.attempt)}, tensors)
        known = sorted((_version(p), p) for p in path.parent.glob("*.safetensors"))
        older = [p for v, p in known if v < base]
        stale = [p for v, p in known if base < v and v != version]
        for old in (*older[:-OLDER], *stale):
            old.unlink()

    def _path(self, run: str, course: str, version: Version) -> Path:
        return self.folder / check_name(run) / check_name(course) / f"{version.round:08d}-{version.attempt}.safetensors"


def _version(path: Path) -> Version:
    return Version(*(int(part) for part in path.stem.split("-")))


class Ledger:
    """One line for everything that has left the site.

    `asked` holds what was asked, by kind and as a hash: the same question again is answered in the same bits, which
    tell nothing new.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One answer at a time, also of several processes: two at once would each be counted without the other."""
        with self.path.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def different(self, kind: str, question: str) -> int:
        """How many different questions of a kind the site would have been asked with this one."""
        return len({line["asked"][kind] for line in self._lines() if kind in line.get("asked", {})} | {question})

    def note(self, **what: Any) -> None:
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **what}) + "\n"
        with self.path.open("a+b") as stream:
            stream.seek(-min(1, stream.tell()), os.SEEK_END)
            torn = stream.read() not in (b"", b"\n")
            stream.write(b"\n" * torn + line.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The lines that can be read; of one that a power cut has torn the answer has never left."""
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                yield json.loads(line)
