"""Run the missing runs of a study and add them to its records. Needs only torch and numpy."""

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
from waffle_fl.claims.record_files import identity, read_part, record_of, unseeded
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
OPEN = 1000  # runs per batch: each keeps two files open
FLUSH_SECONDS = 60.0  # between writes of finished runs to the record
DETAILS: dict[str, Details] = {  # record -> what it keeps of the rounds, if the tables need less than everything
    **dict.fromkeys(("mnist-departures", "mnist-permutations", "mnist-sizes", "pfllib"), "accuracy"),
    **dict.fromkeys(("har", "landmine", "mnist-splits", "mnist-alices"), "none"),
    **dict.fromkeys(("flamby-heart", "fedbn-digits", "fedbn-office"), "none"),
    **dict.fromkeys(("mnist", "mnist-6000"), "figures"),
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
    methods: Sequence[str] = (),
) -> None:
    """Run every missing run of a study, of one of its cells or of some methods, and add it to the records."""
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
        selected = part.planned(seeds) if anew else part.missing(seeds)
        missing = {
            name: config
            for name, config in selected.items()
            if is_in(name, cell) and (not methods or config.method in methods)
        }
        if missing:
            _run(root, part.name, missing, runs, runtime, listener, end)


def is_in(name: str, cell: str) -> bool:
    """Return whether a run such as mnist/C/waffle/1 is in a cell such as mnist/C/waffle; "" contains all runs."""
    return not cell or f"{name}/".startswith(f"{cell}/")


def _run(
    root: Path,
    part: str,
    missing: Mapping[str, RunConfig],
    runs: Path,
    runtime: Runtime,
    listener: Listener,
    end: float,
) -> None:
    """Run in the order of the file, OPEN runs per batch, and within a batch method by method."""
    methods = list(dict.fromkeys(config.method for config in missing.values()))
    planned = [(config, runs.joinpath(*name.split("/")[:-3], config.label)) for name, config in missing.items()]
    for batch in (planned[i : i + OPEN] for i in range(0, len(planned), OPEN)):
        batch.sort(key=lambda run: methods.index(run[0].method))
        save_finished = partial(_save_finished, root, part, runtime.force, [folder for _, folder in batch])
        try:
            execute(batch, _until(end, runtime), _SavingListener(listener, save_finished))
        finally:
            save_finished()


def _save_finished(root: Path, part: str, force: bool, folders: Sequence[Path]) -> None:
    """Add finished runs to the record; skip runs of another results version, about which `execute` has warned."""
    finished = [folder for folder in folders if read_json(folder / "result.json")]
    found = read_runs(finished, trust=True, force=force, warn=no_warning) if finished else []
    ours = [run for run in found if run.provenance["binding"].get("results_version") == RESULTS_VERSION]
    if ours:
        add_to_record(root, part, ours)


class _SavingListener(Listener):
    """Forwards events to a listener and saves finished runs at intervals, so that an interruption loses little."""

    def __init__(self, listener: Listener, save_finished: Callable[[], None]) -> None:
        self._listener, self._save_finished = listener, save_finished
        self._saved_at, self._unsaved = time.monotonic(), False

    def planned(self, runs: Sequence[tuple[RunConfig, Path]], finished: int) -> None:
        self._listener.planned(runs, finished)

    def resumed(self, config: RunConfig, start: int) -> None:
        self._listener.resumed(config, start)

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        self._listener.advanced(config, measured)
        self._save_if_due()

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        self._listener.ended(config, result)
        self._unsaved = True
        self._save_if_due()

    def warned(self, message: str) -> None:
        self._listener.warned(message)

    def _save_if_due(self) -> None:
        """Save finished runs if the interval has passed, even if no further run has ended since."""
        if self._unsaved and time.monotonic() - self._saved_at > FLUSH_SECONDS:
            self._save_finished()
            self._saved_at, self._unsaved = time.monotonic(), False


def _until(end: float, runtime: Runtime) -> Runtime:
    """Return the runtime with the remaining minutes, if its time is limited."""
    if not runtime.minutes:
        return runtime
    minutes = (end - time.monotonic()) / 60
    if minutes <= 0:
        raise Interrupted(signal.SIGALRM)
    return replace(runtime, minutes=minutes)


def compute(root: Path) -> None:
    """Write the records that are computed without data, in seconds."""
    with _locked(root):
        for name, lines in COMPUTED.items():
            write_atomically(record_of(root, name), "".join(f"{line}\n" for line in lines()).encode())


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Lock the records of a clone; other processes wait."""
    folder = os.open(root / "results", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def add_to_record(root: Path, name: str, runs: Sequence[FinishedRun]) -> None:
    """Add finished runs to a part's record and replace older runs of the same config.

    A line of a record holds only the differences from the line before, so similar runs are kept together.
    """
    new = {identity(run.config) for run in runs}
    with _locked(root):
        kept = [*(run for run in read_part(root, name).all_runs if identity(run.config) not in new), *runs]
        kept = _grouped(kept)
        lines = condense(kept, DETAILS.get(name, "all"))
        write_atomically(record_of(root, name), "".join(f"{line}\n" for line in lines).encode())


def _grouped(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs by data, then by method, then by cell, each in the order of the first occurrence."""
    ranks: list[dict[str, int]] = [{}, {}, {}]

    def place(run: FinishedRun) -> tuple[int, ...]:
        keys = run.provenance["binding"]["data"], run.config.method, unseeded(run.config)
        return *(
            rank.setdefault(key, len(rank)) for rank, key in zip(ranks, keys, strict=True)
        ), run.config.settings.seed

    return sorted(runs, key=place)
