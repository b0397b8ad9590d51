"""Crash-safe file operations: atomic writes, durable removal, and a check that a path is a regular file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from waffle_fl.errors import WaffleError

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a crash or power failure leaves either the old or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove(*paths: Path) -> None:
    """Remove files durably: they do not reappear after a power failure."""
    for path in paths:
        path.unlink()
    for folder in dict.fromkeys(path.parent for path in paths):
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk, so that renames and removals in it are durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def check_regular(path: Path) -> Path:
    """Return the path. Reject a FIFO, which would block forever, and a device, which may be endless.

    If the path cannot be inspected, return it: opening it raises the error."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):
        return path
    if kind in KINDS:
        raise WaffleError(f"expected a regular file, {path} is {KINDS[kind]}: copy its content to a file")
    return path
