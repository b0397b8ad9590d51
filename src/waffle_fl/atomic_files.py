"""Files that survive a crash: written whole or not at all, removed for good, and read only where they are files."""

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
    """Either the old content or the new one is there, whenever the process dies or the power fails."""
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
    """Remove files; a power cut does not bring them back."""
    for path in paths:
        path.unlink()
    for folder in dict.fromkeys(path.parent for path in paths):
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Write a folder's own entries to disk: what was renamed or removed in it stays so."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do it for folders
            raise
    finally:
        os.close(handle)


def check_regular(path: Path) -> Path:
    """Return the path; refuse a FIFO, which would block for ever, and a device, which may have no end.

    What cannot be looked at is left to the one who opens it."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):
        return path
    if kind in KINDS:
        raise WaffleError(f"expected a regular file, {path} is {KINDS[kind]}: copy its content to a file")
    return path
