"""Folder of the published data sets."""

from __future__ import annotations

import os
from pathlib import Path

from waffle_fl.errors import WaffleError


def data_dir(given: str = "") -> Path:
    """Return `--data-dir` if given, or else $WAFFLE_DATA, or else the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    chosen = Path(given or os.environ.get("WAFFLE_DATA") or Path(cache) / "waffle-fl")
    try:
        return chosen.expanduser()
    except RuntimeError as error:
        raise WaffleError(f"no data folder {chosen}: {error}") from None
