"""Run what is missing of a study, in pieces, and keep it as records. Needs torch and numpy alone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from waffle_fl.config import RunConfig
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Interrupted, Listener, Place, execute
from waffle_fl.records import read_json
from waffle_fl.reproduce import drift, momentum, quadratics
from waffle_fl.reproduce.studies import identity, read_part, read_study, record_of
from waffle_fl.results import Details, Finished, condense, read_runs
from waffle_fl.tensorfile import write_atomically

Planned: TypeAlias = tuple[RunConfig, Path]

COMPUTED: dict[str, Callable[[], Iterable[str]]] = {
    "drift": drift.lines,
    "momentum": momentum.lines,
    "quadratics": quadratics.lines,
}
AT_A_TIME = 200  # runs, and the rest of their method's: then they are kept, whatever becomes of the others
DETAILS: dict[str, Details] = {  # of the rounds, where tables need less than all
    **dict.fromkeys(("mnist-departures", "mnist-permutations", "mnist-sizes"), "accuracy"),
    **dict.fromkeys(("har", "landmine", "beyond"), "none"),
    "robustness": "late",
}


def run_missing(
    root: Path,
    study: str,
    runs: Path,
    place: Place,
    listener: Listener,
    cell: str = "",
    seeds: Sequence[int] = (),
    anew: bool = False,
) -> None:
    """Bring every missing run of a study, or of one of its cells, to its end, and what has ended into the records."""
    end = time.monotonic() + 60 * place.minutes
    compute(root)
    parts = read_study(root, study).values()
    if not any(is_in(name, cell) for part in parts for name in part.planned()):
        raise WaffleError(f"no cell {cell!r} in {study}: name one such as {study}/C/waffle")
    for part in parts:
        asked = part.planned(seeds) if anew else part.missing(seeds)
        missing = {name: config for name, config in asked.items() if is_in(name, cell)}
        if missing:
            _run(root, part.name, missing, runs, place, listener, end)


def is_in(name: str, cell: str) -> bool:
    """Is mnist/C/waffle/1 in mnist/C/waffle? Everything is in the cell without a name."""
    return not cell or f"{name}/".startswith(f"{cell}/")


def _run(
    root: Path,
    part: str,
    missing: Mapping[str, RunConfig],
    runs: Path,
    place: Place,
    listener: Listener,
    end: float,
) -> None:
    """Method by method, as the file has them, so many runs at a time."""
    planned = [(config, runs.joinpath(*name.split("/")[:-3], config.label)) for name, config in missing.items()]
    for piece in pieces(planned):
        try:
            execute(piece, _until(end, place), listener)
        finally:
            ended = [folder for _, folder in piece if read_json(folder / "result.json")]
            if ended:
                keep(root, part, read_runs(ended))


def pieces(planned: Sequence[Planned]) -> Iterator[list[Planned]]:
    """Whole methods, as many as make up so many runs."""
    by_method: dict[str, list[Planned]] = {}
    for run in planned:
        by_method.setdefault(run[0].method, []).append(run)
    piece: list[Planned] = []
    for some in by_method.values():
        piece += some
        if len(piece) >= AT_A_TIME:
            yield piece
            piece = []
    if piece:
        yield piece


def _until(end: float, place: Place) -> Place:
    """The place with what is left of its time, where that is limited."""
    if not place.minutes:
        return place
    minutes = (end - time.monotonic()) / 60
    if minutes <= 0:
        raise Interrupted(signal.SIGALRM)
    return replace(place, minutes=minutes)


def compute(root: Path) -> None:
    """Write the records that need neither data nor time."""
    for name, lines in COMPUTED.items():
        write_atomically(record_of(root, name), "".join(f"{line}\n" for line in lines()).encode())


def keep(root: Path, name: str, runs: Sequence[Finished]) -> None:
    """Add finished runs to a part's record, in place of older ones of the same config.

    A line tells what changed since the one before, so runs on the same data lie together.
    """
    new = {identity(run.config) for run in runs}
    kept = [*(run for run in read_part(root, name).all_runs if identity(run.config) not in new), *runs]
    data = list(dict.fromkeys(run.provenance["binding"]["data"] for run in kept))
    kept.sort(key=lambda run: data.index(run.provenance["binding"]["data"]))
    lines = condense(kept, DETAILS.get(name, "all"))
    write_atomically(record_of(root, name), "".join(f"{line}\n" for line in lines).encode())
