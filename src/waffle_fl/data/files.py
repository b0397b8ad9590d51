"""Finding, verifying and downloading the official files."""

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
    """Does the file have the checksum `algorithm:digest`? An empty expectation is never met."""
    algorithm, _, digest = expected.partition(":")
    return bool(digest) and checksum(path, algorithm) == digest


def verify(path: Path, expected: str, allow_unverified: bool) -> bool:
    """True for the official file; an error for another one, unless the user allows it."""
    if is_official(path, expected):
        return True
    if allow_unverified:
        return False
    found = "no official checksum is published for this file alone" if not expected else "its checksum is another"
    raise WaffleError(
        f"{path} is not the official file ({found}): delete it and fetch it again, or pass --allow-unverified"
    )


def download(file: File, folder: Path, progress: Progress = lambda name, done, total: None) -> Path:
    """Fetch one official file into the folder. A broken download leaves `.part`; the next try goes on from there."""
    target, part = folder / file.name, folder / f"{file.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(file, part, progress)
    except (OSError, HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", None) or error).split())
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise WaffleError(
            f"cannot download {file.url} ({reason}); on a machine with a network fetch it and put it at {target}"
        ) from None
    if not is_official(part, file.checksum):
        remove(part)
        raise WaffleError(f"{file.url} gave a file with a wrong checksum; nothing was kept, try again later")
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
        raise OSError(f"cut off after {have} of {file.size} bytes; run the same command again to go on from there")
