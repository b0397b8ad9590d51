"""Build the federation of a data folder named in the settings; cached until a file in the folder changes."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from waffle_fl.config import ALL_ALICES, Settings
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation, check_alice, index_of
from waffle_fl.user_data import ReadOptions

SPLITTING = (  # settings that divide one data set among agents
    *("split", "shift", "shares", "sizes", "direction", "agents", "samples_per_agent"),
    *("test", "permutation_seed", "shared_permutation"),
)


def folder_federation(s: Settings, folder: Path, alice: str | None) -> Federation:
    """Return the federation of a folder with one file or folder per agent."""
    check_undivided(s)
    found = _read(str(folder), ReadOptions(**{f.name: getattr(s, f.name) for f in fields(ReadOptions)}), _stamp(folder))
    if ALL_ALICES in found.names:
        raise WaffleError(f"{folder} has an agent called {ALL_ALICES!r}, which means every agent: give it another name")
    return found if alice is None else check_alice(replace(found, alice=index_of(alice, found.names)))


def check_undivided(s: Settings) -> None:
    """Raise WaffleError for settings that divide one data set among agents."""
    defaults = Settings()
    odd = next((name for name in SPLITTING if getattr(s, name) != getattr(defaults, name)), None)
    if odd:
        raise WaffleError(f"{odd} divides a data set among agents; in {s.data} each agent has its own: leave it out")


@lru_cache(maxsize=4)
def _read(folder: str, options: ReadOptions, stamp: tuple[tuple[str, int, int], ...]) -> Federation:
    return Federation.from_folder(folder, **vars(options))


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return the name, size and modification time of each file, without hidden files; they reveal a change."""
    try:
        paths = [path for path in sorted(folder.rglob("*")) if not _hidden(path.relative_to(folder))]
        found = [(path, path.stat()) for path in paths]
    except OSError as error:
        raise WaffleError(f"cannot read {error.filename or folder}: {error.strerror}") from None
    return tuple((str(path), status.st_size, status.st_mtime_ns) for path, status in found)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
