"""The records of a tournament: one file per data set, one JSON line per tuning trial and per part of the table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from waffle_fl.atomic_files import check_regular
from waffle_fl.config import Settings
from waffle_fl.errors import WaffleError
from waffle_fl.tournament.plan import TaskSet, Tournament, TuningTrial

Line = dict[str, Any]


def record_file(folder: Path, tournament: Tournament, data: str) -> Path:
    return folder / f"{tournament.name}-{data}.jsonl"


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a record; none if there is no file yet. A partial last line is ignored."""
    if not path.exists():
        return []
    lines: list[Line] = []
    for number, text in enumerate(check_regular(path).read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if text.endswith("\n"):
            try:
                lines.append(json.loads(text))
            except ValueError:
                raise WaffleError(f"{path}: line {number} is not JSON: delete it and run again") from None
    return lines


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """Add lines to a record and write them to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def column_name(column: Settings) -> str:
    """Return the name of a column: split and shift, or "natural"; and the share of agents per round."""
    name = "natural" if column.is_own else column.column
    shared = column.participation < 1 or column.alice_takes_part == "always"
    return f"{name}, {100 * column.participation:g} % per round" if shared else name


def tuning_key(line: Line) -> tuple[Any, ...]:
    return line["method"], line["lr"], line["name"], line["value"]


def trial_key(method: str, trial: TuningTrial) -> tuple[Any, ...]:
    return method, *trial


def table_key(line: Line) -> tuple[Any, ...]:
    return line["method"], line["column"], line["partition"]


def tuned(lines: Sequence[Line]) -> dict[tuple[Any, ...], Line]:
    """Return the lines of the tuning by method and trial."""
    return {tuning_key(line): line for line in lines if line["stage"] == "tuning"}


def table(lines: Sequence[Line]) -> dict[tuple[Any, ...], Line]:
    """Return the lines of the table by method, column and partition."""
    return {table_key(line): line for line in lines if line["stage"] == "table"}


def chosen_trial(tournament: Tournament, tasks: TaskSet, method: str, lines: Sequence[Line]) -> TuningTrial | None:
    """Return the trial with the best mean validation score over all columns; None until all trials are recorded.

    A trial with a diverged run comes after every trial without one.
    """
    known = tuned(lines)
    trials = tournament.trials(method, tasks)
    found = [known.get(trial_key(method, trial)) for trial in trials]
    if any(line is None for line in found):
        return None
    ranks = [_rank(line) for line in found if line is not None]
    return trials[max(range(len(trials)), key=ranks.__getitem__)]


def _rank(line: Line) -> tuple[int, float]:
    scores = [score for score in line["validation"] if score is not None]
    return -line["diverged"], mean(scores) if scores else float("-inf")
