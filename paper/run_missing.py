"""Run what is missing of a study, in pieces, and keep it as records. Needs torch and numpy alone."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paper import drift, momentum, quadratics
from paper.studies import read_study
from waffle_fl.atomic_files import write_atomically
from waffle_fl.claims.record_files import identity, read_part, record_of
from waffle_fl.config import RunConfig
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.experiment import Interrupted, Listener, Runtime, execute
from waffle_fl.manifest import no_warning
from waffle_fl.records import read_json
from waffle_fl.results import Details, FinishedRun, condense, read_runs
from waffle_fl.versions import RESULTS_VERSION

COMPUTED: dict[str, Callable[[], Iterable[str]]] = {
    "drift": drift.lines,
    "momentum": momentum.lines,
    "quadratics": quadratics.lines,
}
OPEN = 1000  # runs at a time: each keeps two files open
KEPT_EVERY = 60.0  # seconds
DETAILS: dict[str, Details] = {  # of the rounds, where tables need less than all
    **dict.fromkeys(("mnist-departures", "mnist-permutations", "mnist-sizes"), "accuracy"),
    **dict.fromkeys(("har", "landmine", "beyond"), "none"),
    "robustness": "late",
}


def run_missing(
    root: Path,
    study: str,
    runs: Path,
    runtime: Runtime,
    listener: Listener,
    cell: str = "",
    seeds: Sequence[int] = (),
    anew: bool = False,
    share: tuple[int, int] = (1, 1),
    methods: Sequence[str] = (),
) -> None:
    """Bring every missing run of a study, of one of its cells or of some methods, to its end and into the records.

    With `share` (k, n) it is the k-th of n processes that do so at the same time.
    """
    end = time.monotonic() + 60 * runtime.minutes
    compute(root)
    parts = read_study(root, study).values()
    cells = {name: config for part in parts for name, config in part.planned().items() if is_in(name, cell)}
    if not cells:
        raise WaffleError(f"no cell {cell!r} in {study}: name one such as {study}/C/waffle")
    known = list(dict.fromkeys(config.method for config in cells.values()))
    for method in methods:
        if method not in known:
            raise WaffleError(f"no method {method!r} in {cell or study}{suggest(method, known)}")
    for part in parts:
        asked, ours = part.planned(seeds) if anew else part.missing(seeds), _share(part.planned(seeds), *share)
        missing = {
            name: config
            for name, config in asked.items()
            if name in ours and is_in(name, cell) and (not methods or config.method in methods)
        }
        if missing:
            _run(root, part.name, missing, runs, runtime, listener, end)


def is_in(name: str, cell: str) -> bool:
    """Is mnist/C/waffle/1 in mnist/C/waffle? Everything is in the cell without a name."""
    return not cell or f"{name}/".startswith(f"{cell}/")


def _share(planned: Iterable[str], k: int, n: int) -> set[str]:
    """Every n-th column of the tables, from the k-th on: whole ones, whose runs share data and training.

    Of all that is planned, so that a process that comes later, when some of it is done, takes nobody else's.
    """
    columns: dict[str, list[str]] = {}
    for name in planned:
        columns.setdefault(name.rsplit("/", 2)[0], []).append(name)
    return {name for names in list(columns.values())[k - 1 :: n] for name in names}


def _run(
    root: Path,
    part: str,
    missing: Mapping[str, RunConfig],
    runs: Path,
    runtime: Runtime,
    listener: Listener,
    end: float,
) -> None:
    """As the file has them, so many runs at a time, of these method by method."""
    methods = list(dict.fromkeys(config.method for config in missing.values()))
    planned = [(config, runs.joinpath(*name.split("/")[:-3], config.label)) for name, config in missing.items()]
    for piece in (planned[i : i + OPEN] for i in range(0, len(planned), OPEN)):
        piece.sort(key=lambda run: methods.index(run[0].method))
        keep_ended = partial(_keep_ended, root, part, runtime.force, [folder for _, folder in piece])
        try:
            execute(piece, _until(end, runtime), _Keeper(listener, keep_ended))
        finally:
            keep_ended()


def _keep_ended(root: Path, part: str, force: bool, folders: Sequence[Path]) -> None:
    """Add finished runs to the record; skip those of another results version, of which `execute` has warned."""
    ended = [folder for folder in folders if read_json(folder / "result.json")]
    found = read_runs(ended, trust=True, force=force, warn=no_warning) if ended else []
    ours = [run for run in found if run.provenance["binding"].get("results_version") == RESULTS_VERSION]
    if ours:
        keep(root, part, ours)


class _Keeper(Listener):
    """Tells another what it hears, and keeps what has ended now and then, lest much be lost."""

    def __init__(self, listener: Listener, keep_ended: Callable[[], None]) -> None:
        self._listener, self._keep_ended = listener, keep_ended
        self._kept, self._more_ended = time.monotonic(), False

    def planned(self, runs: Sequence[tuple[RunConfig, Path]], finished: int) -> None:
        self._listener.planned(runs, finished)

    def resumed(self, config: RunConfig, start: int) -> None:
        self._listener.resumed(config, start)

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        self._listener.advanced(config, measured)
        self._now_and_then()

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        self._listener.ended(config, result)
        self._more_ended = True
        self._now_and_then()

    def warned(self, message: str) -> None:
        self._listener.warned(message)

    def _now_and_then(self) -> None:
        """Also while others go on: what ended right after the last time waits for no end to come."""
        if self._more_ended and time.monotonic() - self._kept > KEPT_EVERY:
            self._keep_ended()
            self._kept, self._more_ended = time.monotonic(), False


def _until(end: float, runtime: Runtime) -> Runtime:
    """The place with what is left of its time, where that is limited."""
    if not runtime.minutes:
        return runtime
    minutes = (end - time.monotonic()) / 60
    if minutes <= 0:
        raise Interrupted(signal.SIGALRM)
    return replace(runtime, minutes=minutes)


def compute(root: Path) -> None:
    """Write the records that need neither data nor time."""
    with _alone(root):
        for name, lines in COMPUTED.items():
            write_atomically(record_of(root, name), "".join(f"{line}\n" for line in lines()).encode())


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One process at a time changes the records of a clone; whoever comes second waits."""
    folder = os.open(root / "results", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def keep(root: Path, name: str, runs: Sequence[FinishedRun]) -> None:
    """Add finished runs to a part's record, in place of older ones of the same config; one process at a time.

    A line tells what changed since the one before, so runs on the same data lie together.
    """
    new = {identity(run.config) for run in runs}
    with _alone(root):
        kept = [*(run for run in read_part(root, name).all_runs if identity(run.config) not in new), *runs]
        data = list(dict.fromkeys(run.provenance["binding"]["data"] for run in kept))
        kept.sort(key=lambda run: data.index(run.provenance["binding"]["data"]))
        lines = condense(kept, DETAILS.get(name, "all"))
        write_atomically(record_of(root, name), "".join(f"{line}\n" for line in lines).encode())
