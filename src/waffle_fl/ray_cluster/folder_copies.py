"""Run folders of workers that share no disk with the driver: what changed at the worker, and writing it at the driver.

A worker sends a folder when its manifest has changed, so at each checkpoint and at the end. The driver lists the digest
of each file before it writes the file, as a run does, so its copy can be resumed after a kill at any time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from waffle_fl.atomic_files import remove, write_atomically
from waffle_fl.errors import WaffleError, readable_errors
from waffle_fl.manifest import (
    CHECKPOINTS,
    LARGE,
    LOG,
    NAME,
    RESULT,
    SMALL,
    Digest,
    Finding,
    Journal,
    inspect,
    refuse,
    seal,
)

Stamps = dict[str, tuple[int, int]]  # name -> modification time and size of a file that was sent
ORDER = ("provenance.json", "config.json", LOG)  # written first: a checkpoint needs the rounds before it
CHECKPOINT = re.compile(r"checkpoint-[0-9]{8}\.safetensors")


def read_folder(folder: Path, sent: Stamps | None = None) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a run folder that were not sent yet, and the names of all; `sent` is updated."""
    known = {} if sent is None else sent
    stamps = _stamps(folder)
    changed = {name: (folder / name).read_bytes() for name, stamp in stamps.items() if known.get(name) != stamp}
    known.clear()
    known.update(stamps)
    return changed, list(stamps)


def has_news(folder: Path, sent: Stamps) -> bool:
    """Return whether the manifest of a folder has changed since its files were sent."""
    return _stamps(folder, (NAME,)).get(NAME) != sent.get(NAME)


def _stamps(folder: Path, names: Collection[str] = (NAME, *SMALL, LOG, *LARGE)) -> Stamps:
    paths = [folder / name for name in names] + (list(folder.glob(CHECKPOINTS)) if len(names) > 1 else [])
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths if path.is_file()}


def fill_folder(folder: Path, files: Mapping[str, bytes], force: bool) -> None:
    """Write all files of a run folder into a new folder of a worker, check them, and sign them with its key."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / _checked(name)).write_bytes(content)
    found, journal = inspect(folder), Journal.opened(folder)
    changes = [journal.difference(path) for path in (folder / LOG, *folder.glob(CHECKPOINTS))]
    refuse([*([found] if found else []), *(Finding("changed", folder, text) for text in changes if text)], force)
    seal(folder)


def write_changes(folder: Path, files: Mapping[str, bytes], present: Collection[str]) -> None:
    """Write the changes of a worker into the driver's run folder; checkpoints that are not present are deleted."""
    with readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        journal = Journal.opened(folder)
        new = {_checked(name): content for name, content in files.items() if name != NAME}
        ranks = {name: k for k, name in enumerate((*ORDER, "", RESULT))}
        with journal.replacing({name: Digest.of(content) for name, content in new.items()}):
            for name in sorted(new, key=lambda name: (ranks.get(name, len(ORDER)), name)):
                write_atomically(folder / name, new[name])
        gone = [path for path in folder.glob(CHECKPOINTS) if path.name not in present]
        remove(*gone)
        journal.forget(*(path.name for path in gone))
        journal.compact()


def _checked(name: str) -> str:
    """Return a name that a run folder may have; a worker writes no other files at the driver."""
    if name not in (NAME, *SMALL, LOG, *LARGE) and not CHECKPOINT.fullmatch(name):
        raise WaffleError(f"expected a file of a run folder from the worker, got {name!r}")
    return name
