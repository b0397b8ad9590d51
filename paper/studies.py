"""The experiment files and records of each study of the paper."""

from __future__ import annotations

from pathlib import Path

from waffle_fl.claims.record_files import Part, read_part
from waffle_fl.errors import WaffleError, suggest

STUDIES = {
    "mnist": (
        *("mnist", "mnist-permutations", "mnist-splits", "mnist-alices"),
        *("mnist-6000", "mnist-departures", "mnist-sizes"),
    ),
    "cifar10": ("cifar10", "cifar10-reset", "cifar10-printed", "cifar10-departures"),
}


def find_root(start: Path) -> Path:
    """Return the clone of the repository that contains a folder."""
    for folder in (start, *start.parents):
        if (folder / "experiments" / "mnist.toml").is_file() and (folder / "results").is_dir():
            return folder
    raise WaffleError("`waffle reproduce` works in a clone of the repository: no experiments/ and results/ here")


def read_study(root: Path, study: str) -> dict[str, Part]:
    """Return the parts of a study by name; an experiment file in no study of the paper is its own study."""
    has_file = (root / "experiments" / f"{study}.toml").is_file()
    if study not in STUDIES and not has_file:
        raise WaffleError(f"unknown study {study!r}{suggest(study, STUDIES)}")
    return {name: read_part(root, name) for name in STUDIES.get(study, (study,))}
