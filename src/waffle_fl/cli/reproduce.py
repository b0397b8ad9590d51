"""`waffle reproduce`. It needs a clone of the repository, because the paper's studies are not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from waffle_fl.errors import WaffleError


def reproduce(arguments: Sequence[str]) -> int:
    """Reproduce the paper's tables and figures: waffle reproduce mnist."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "paper" / "command.py").is_file() and (folder / "results").is_dir():
            sys.path.insert(0, str(folder))
            exit_code: int = import_module("paper.command").reproduce(arguments)
            return exit_code
    raise WaffleError("`waffle reproduce` needs a clone of the repository: no paper/ and results/ in this folder")
