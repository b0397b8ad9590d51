"""Train what the records of a tournament lack, job by job; a job is one method on one data set.

    python -m waffle_fl.tournament experiments/tournament.toml --data heart-disease --processes 8 --minutes 20

Needs only torch and numpy. Every finished trial and every finished column is written at once, so an interrupted job
continues where it stopped.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from waffle_fl.config import Settings
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, device_of
from waffle_fl.process_options import end_with_parent
from waffle_fl.tournament.plan import TaskSet, Tournament, TuningTrial, load_tournament
from waffle_fl.tournament.record import (
    Line,
    append_lines,
    chosen_trial,
    column_name,
    read_lines,
    record_file,
    table,
    trial_key,
    tuned,
)
from waffle_fl.tournament.tasks import AliceScore, mean_points, train
from waffle_fl.versions import RESULTS_VERSION

Report = Callable[[str], None]
FAILED = ": failed: "
EACH_ALICE, MEANS = ("selected", "last"), ("best", "loss")  # scores in a record per Alice, and as means over Alices


class TournamentJob(NamedTuple):
    """One method on one data set."""

    data: str
    method: str


def jobs_of(tournament: Tournament, data: Sequence[str] = (), methods: Sequence[str] = ()) -> list[TournamentJob]:
    """Return the jobs of these data sets and methods; none given means all."""
    for given, known in ((data, tournament.data), (methods, tournament.methods)):
        odd = next((name for name in given if name not in known), None)
        if odd:
            raise WaffleError(f"expected names from {', '.join(known)}, got {odd!r}")
    return [
        TournamentJob(name, method)
        for name in tournament.data
        if not data or name in data
        for method in tournament.entries(name)
        if not methods or method in methods
    ]


def run(
    file: Path,
    out: Path,
    runtime: Runtime,
    jobs: Sequence[TournamentJob],
    processes: int = 1,
    report: Report = print,
) -> int:
    """Run all jobs until they are done or the minutes of the runtime are over; return how many failed."""
    if processes < 1:
        raise WaffleError(f"processes: expected at least 1, got {processes}")
    end = time.time() + 60 * runtime.minutes if runtime.minutes else float("inf")
    if processes == 1:
        return sum(_reported(_run_job(file, out, runtime, job, end), report) for job in jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_parent) as pool:
        started = [pool.submit(_run_job, file, out, replace(runtime, workers=1), job, end) for job in jobs]
        return sum(_reported(future.result(), report) for future in as_completed(started))


def _reported(line: str, report: Report) -> bool:
    """Report the line of a job; return whether the job failed."""
    report(line)
    return FAILED in line


def _run_job(file: Path, out: Path, runtime: Runtime, job: TournamentJob, end: float) -> str:
    """Tune a method on a data set, then fill its part of the table. Return one line for the display."""
    if time.time() > end:
        return f"{job.data} {job.method}: not started"
    tournament = load_tournament(file)
    tasks, path, began = tournament.data[job.data], record_file(out, tournament, job.data), time.time()
    done = 0
    try:
        for lines in _lines(tournament, tasks, job.method, path, runtime):
            append_lines(path, lines)
            done += len(lines)
            if time.time() > end:
                return f"{job.data} {job.method}: stopped after {done} lines, {time.time() - began:.0f} s"
    except (WaffleError, TypeError, RuntimeError, torch.OutOfMemoryError) as error:
        return f"{job.data} {job.method}{FAILED}{type(error).__name__}: {error}"
    return f"{job.data} {job.method}: {done} lines, {time.time() - began:.0f} s"


def _lines(tournament: Tournament, tasks: TaskSet, method: str, path: Path, runtime: Runtime) -> Iterator[list[Line]]:
    """Yield the lines that a method lacks on a data set, a trial or a column at a time."""
    known = tuned(read_lines(path))
    for trial in tournament.trials(method, tasks):
        if trial_key(method, trial) not in known:
            yield [_tuning_line(tournament, tasks, method, trial, runtime)]
    lines = read_lines(path)
    chosen = chosen_trial(tournament, tasks, method, lines)
    if chosen is None:
        raise WaffleError(f"{path}: the record lacks trials of {method} that were just written: is the disk full?")
    held = table(lines)
    for columns in _stacks(tasks, runtime):
        missing = [
            (column, partition)
            for column in columns
            for partition in tournament.partitions
            if (method, column_name(column), partition) not in held
        ]
        if missing:
            yield _table_lines(tournament, tasks, method, chosen, missing, runtime)


def _stacks(tasks: TaskSet, runtime: Runtime) -> list[Sequence[Settings]]:
    """Return the columns that train together: all on a GPU, one at a time on a CPU."""
    return [tasks.columns] if device_of(runtime.device).type == "cuda" else [(column,) for column in tasks.columns]


def _tuning_line(tournament: Tournament, tasks: TaskSet, method: str, trial: TuningTrial, runtime: Runtime) -> Line:
    pairs = [(p, s) for p in tournament.tuning_partitions for s in tournament.tuning_seeds]
    validation, diverged, count = [], 0, 0
    for columns in _stacks(tasks, runtime):
        configs = [tournament.config(method, column, trial, p, s) for column in columns for p, s in pairs]
        found = [scores for _, _, scores in train(configs, runtime, tasks.measure, tournament.tuning_alices)]
        for k in range(len(columns)):
            own = [score for part in found[k * len(pairs) : (k + 1) * len(pairs)] for score in part]
            validation.append(_short(mean_points([score.validation for score in own]), 6))
            diverged += sum(score.last is None for score in own)
            count += len(own)
    return {
        "stage": "tuning",
        "method": method,
        **trial._asdict(),
        "validation": validation,
        "diverged": diverged,
        "tasks": count,
        "origin": _origin(runtime),
    }


def _table_lines(
    tournament: Tournament,
    tasks: TaskSet,
    method: str,
    trial: TuningTrial,
    missing: Sequence[tuple[Settings, int]],
    runtime: Runtime,
) -> list[Line]:
    configs = [
        tournament.config(method, column, trial, partition, seed)
        for column, partition in missing
        for seed in tournament.seeds
    ]
    found = {i: (names, scores) for i, names, scores in train(configs, runtime, tasks.measure, tasks.alices)}
    lines = []
    for k, (column, partition) in enumerate(missing):
        own = [found[k * len(tournament.seeds) + i] for i in range(len(tournament.seeds))]
        lines.append(
            {
                "stage": "table",
                "method": method,
                "column": column_name(column),
                "partition": partition,
                **trial._asdict(),
                "seeds": list(tournament.seeds),
                "alices": _alices(own[0][0]),
                **_columns([scores for _, scores in own]),
                "origin": _origin(runtime),
            }
        )
    return lines


def _columns(scores: Sequence[Sequence[AliceScore]]) -> dict[str, list[Any]]:
    """Return scores as a list of seeds of lists of Alices; means per seed of the others; one curve."""
    each = {name: [[_short(getattr(score, name), 4) for score in seed] for seed in scores] for name in EACH_ALICE}
    means = {
        name: [_short(mean_points([getattr(score, name) for score in seed]), 4) for seed in scores] for name in MEANS
    }
    curves = zip(*(score.curve for seed in scores for score in seed), strict=True)
    return {**each, **means, "curve": [_short(mean_points(points), 4) for points in curves]}


def _short(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _alices(names: Sequence[str]) -> list[str] | int:
    """Return the names of the Alices, or their number if they are agent 0, agent 1 and so on."""
    return len(names) if list(names) == [f"agent {i}" for i in range(len(names))] else list(names)


def _origin(runtime: Runtime) -> str:
    device = device_of(runtime.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{name}, torch {torch.__version__}, results version {RESULTS_VERSION}"
