"""Train what the records of a tournament lack. A job is one method on one data set: its tuning, then its tables.

    python -m waffle_fl.tournament experiments/tournament.toml --data heart-disease --processes 8 --minutes 20

Needs only torch and numpy. The trials of a job train in parallel, then its columns. Every finished trial and every
finished column is written at once, so an interrupted job continues where it stopped.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
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


class TrainingPart(NamedTuple):
    """What one process trains at a time: a trial of the tuning, or columns of the tables."""

    trial: TuningTrial
    columns: Sequence[tuple[Settings, int]] = ()  # column and partition; none: the trial is one of the tuning


def run(
    file: Path,
    out: Path,
    runtime: Runtime,
    jobs: Sequence[TournamentJob],
    processes: int = 1,
    report: Report = print,
) -> int:
    """Run all jobs, the first ones first, until the minutes of the runtime are over; return how many failed."""
    if processes < 1:
        raise WaffleError(f"processes: expected at least 1, got {processes}")
    end = time.time() + 60 * runtime.minutes if runtime.minutes else float("inf")
    if processes > 1:
        runtime = replace(runtime, workers=1)
    tournament, failed = load_tournament(file), 0
    open_jobs = [_JobRun(tournament, job, out, runtime) for job in jobs]
    running: dict[Future[int | str], _JobRun] = {}
    with _executor(processes) as executor:
        while open_jobs:
            for job in open_jobs:
                while len(running) < processes and time.time() <= end and (part := job.next_part()):
                    running[executor.submit(_train_part, file, out, runtime, job.job, part)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                running.pop(future).completed(future.result())
            for job in [job for job in open_jobs if not job.running and (job.is_done or time.time() > end)]:
                open_jobs.remove(job)
                report(job.line())
                failed += bool(job.failure)
    return failed


class _Here(Executor):
    """Runs everything at once in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _executor(processes: int) -> Executor:
    if processes == 1:
        return _Here()
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_parent)


class _JobRun:
    """The progress of a job."""

    def __init__(self, tournament: Tournament, job: TournamentJob, out: Path, runtime: Runtime) -> None:
        self.job, self.running, self.is_done, self.failure = job, 0, False, ""
        self._stages = _stages(tournament, job, record_file(out, tournament, job.data), runtime)
        self._parts: list[TrainingPart] = []
        self._began, self._lines = 0.0, 0

    def next_part(self) -> TrainingPart | None:
        """Return a part that can train now; a stage begins when the one before is complete."""
        if not self._parts and not self.running and not self.is_done:
            self._began = self._began or time.time()
            self._parts = next(self._stages, [])
            self.is_done = not self._parts
        if not self._parts:
            return None
        self.running += 1
        return self._parts.pop(0)

    def completed(self, result: int | str) -> None:
        """Count the lines that a part wrote, or stop after its failure."""
        self.running -= 1
        if isinstance(result, int):
            self._lines += result
        else:
            self.failure, self.is_done, self._parts = result, True, []

    def line(self) -> str:
        """Return one line for the display."""
        name, seconds = f"{self.job.data} {self.job.method}", time.time() - self._began
        if self.failure:
            return f"{name}: failed: {self.failure}"
        if not self._began:
            return f"{name}: not started"
        return f"{name}: {'' if self.is_done else 'stopped after '}{self._lines} lines, {seconds:.0f} s"


def _stages(tournament: Tournament, job: TournamentJob, path: Path, runtime: Runtime) -> Iterator[list[TrainingPart]]:
    """Yield the trials that a job's record lacks, then, with the chosen trial, the columns."""
    tasks, method = tournament.data[job.data], job.method
    known = tuned(read_lines(path))
    trials = [
        TrainingPart(trial) for trial in tournament.trials(method, tasks) if trial_key(method, trial) not in known
    ]
    if trials:
        yield trials
    lines = read_lines(path)
    chosen = chosen_trial(tournament, tasks, method, lines)
    if chosen is None:
        raise WaffleError(f"{path}: the record lacks trials of {method} that were just written: is the disk full?")
    held = table(lines)
    missing = [
        [
            (column, partition)
            for column in columns
            for partition in tournament.partitions
            if (method, column_name(column), partition) not in held
        ]
        for columns in _stacks(tasks, runtime)
    ]
    if any(missing):
        yield [TrainingPart(chosen, columns) for columns in missing if columns]


def _train_part(file: Path, out: Path, runtime: Runtime, job: TournamentJob, part: TrainingPart) -> int | str:
    """Train a part and write its lines. Return their number, or why it failed."""
    tournament = load_tournament(file)
    tasks = tournament.data[job.data]
    try:
        if part.columns:
            lines = _table_lines(tournament, tasks, job.method, part.trial, part.columns, runtime)
        else:
            lines = [_tuning_line(tournament, tasks, job.method, part.trial, runtime)]
        append_lines(record_file(out, tournament, job.data), lines)
    except (WaffleError, TypeError, RuntimeError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return len(lines)


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
