"""The user's key for signing manifests. It never leaves the user's state folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from functools import cache
from pathlib import Path

from waffle_fl.atomic_files import check_regular, sync_folder
from waffle_fl.errors import WaffleError

FILE = "manifest.key"


def state_dir() -> Path:
    """Return $WAFFLE_STATE_DIR, or else waffle-fl in $XDG_STATE_HOME or ~/.local/state."""
    given = os.environ.get("WAFFLE_STATE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "waffle-fl"


def user_key() -> bytes | None:
    """Return the user's key, created on first use; None if it cannot be stored."""
    try:
        path = state_dir() / FILE
    except RuntimeError:  # a user without a home
        return None
    return _key_at(path)


def key_id(key: bytes) -> str:
    """Return a name for a key that does not reveal it."""
    return hashlib.sha256(b"waffle-fl manifest key\0" + key).hexdigest()[:16]


@cache
def _key_at(path: Path) -> bytes | None:
    try:
        if not path.exists():
            _make(path)
        text = check_regular(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise WaffleError(
            f"{path}: expected a key of 64 hexadecimal digits; restore it, or delete it to create a new one "
            "(run folders signed with the old key then count as another user's)"
        )
    return bytes.fromhex(text)


def _make(path: Path) -> None:
    """Write a new key, readable only by the user. If several processes try at once, the first one wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(f"{secrets.token_hex(32)}\n")
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
