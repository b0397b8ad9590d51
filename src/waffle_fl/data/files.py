"""Verify and download the official files."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from waffle_fl.atomic_files import check_regular, remove, sync_folder
from waffle_fl.data.sources import File
from waffle_fl.data_folder import data_dir as data_dir
from waffle_fl.errors import WaffleError

Progress = Callable[[str, int, int], None]  # (file, bytes so far, bytes in all)


def checksum(path: Path, algorithm: str) -> str:
    check_regular(path)
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, algorithm).hexdigest()
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None


def is_official(path: Path, expected: str) -> bool:
    """Return whether the file has the checksum `algorithm:digest`; False if `expected` is empty."""
    algorithm, _, digest = expected.partition(":")
    return bool(digest) and checksum(path, algorithm) == digest


def verify(path: Path, expected: str, allow_unverified: bool) -> bool:
    """Return True for the official file; for another, return False if `allow_unverified`, else raise WaffleError."""
    if is_official(path, expected):
        return True
    if allow_unverified:
        return False
    found = "no official checksum is published for this file alone" if not expected else "its checksum differs"
    raise WaffleError(
        f"{path} is not the official file ({found}): delete it and fetch it again, or pass --allow-unverified"
    )


def download(file: File, folder: Path, progress: Progress = lambda name, done, total: None) -> Path:
    """Download one official file into the folder. An interrupted download leaves `.part`; the next call resumes it."""
    target, part = folder / file.name, folder / f"{file.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(file, part, progress)
    except (OSError, HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", None) or error).split())
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise WaffleError(
            f"cannot download {file.url} ({reason}); download it on another machine and put it at {target}"
        ) from None
    if not is_official(part, file.checksum):
        remove(part)
        raise WaffleError(f"{file.url} returned a file with a wrong checksum; it was deleted, try again later")
    part.replace(target)
    sync_folder(folder)
    return target


def _fetch(file: File, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have >= file.size:
        remove(part)
        have = 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=30) as response:
        resumed = response.status == 206
        have = have if resumed else 0
        with part.open("ab" if resumed else "wb") as stream:
            while block := response.read(1 << 16):
                have += len(block)
                if have > file.size:
                    raise OSError(f"longer than the official {file.size} bytes")
                stream.write(block)
                progress(file.name, have, file.size)
    if have < file.size:
        raise OSError(f"cut off after {have} of {file.size} bytes; run the same command again to resume")
