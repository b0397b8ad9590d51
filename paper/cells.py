"""The cells of the paper's table as our records give them: mean and spread over what a record varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from statistics import mean, stdev
from typing import Literal, TypeAlias

from paper.printed_table import METHODS, TABLE, TITLES, Printed
from waffle_fl.claims.record_files import Part
from waffle_fl.results import FinishedRun, Score

Column: TypeAlias = Literal["best", "last", "late", "selected"]
Unit: TypeAlias = Literal["seed", "permutation_seed", "split_seed", "alice"]
Cells: TypeAlias = Mapping[tuple[str, str], Score]

COLUMNS: dict[Column, str] = {
    "best": "best round",
    "last": "last round",
    "late": "last ten rounds",
    "selected": "selected",
}
LATE_ROUNDS = 10
AS_PRINTED = "waffle-printed"  # WAFFLE on CIFAR-10 with the printed distances; "waffle-paper" compares directions there
CIFAR_TITLES = {"waffle-paper": "WAFFLE, directions", AS_PRINTED: "WAFFLE, printed distances"}


def value_of(run: FinishedRun, column: Column) -> float | None:
    """Return a run's accuracy in a column, or None if its record does not tell."""
    if column == "late":
        late = [line["accuracy"] for line in run.rounds[-LATE_ROUNDS:]]
        return mean(late) if len(late) == LATE_ROUNDS else None
    return float(run.result[column]["accuracy"]) if column in run.result else None


def cells(runs: Sequence[FinishedRun], column: Column = "best", unit: Unit = "seed") -> dict[tuple[str, str], Score]:
    """Return the score of each (split, method) over units; the runs of one unit are averaged first."""
    groups: dict[tuple[str, str], dict[object, list[FinishedRun]]] = {}
    for run in runs:
        s = run.config.settings
        groups.setdefault((s.split, run.config.method), {}).setdefault(getattr(s, unit), []).append(run)
    return {key: _score(list(units.values()), column) for key, units in groups.items()}


def _score(units: Sequence[Sequence[FinishedRun]], column: Column) -> Score:
    found = [[value for run in unit if (value := value_of(run, column)) is not None] for unit in units]
    values = [mean(unit) for unit in found if unit]
    diverged = sum(run.result["status"] == "diverged" for unit in units for run in unit)
    return Score(mean(values) if values else nan, stdev(values) if len(values) > 1 else None, len(values), diverged)


def study_cells(study: str, parts: Mapping[str, Part], column: Column = "best") -> dict[tuple[str, str], Score]:
    """Return the cells that a study's claims are about.

    CIFAR-10: over seeds. MNIST: over ten seeds; on A* and B* over ten permutations of the other agents' labels, except
    for Local, which does not depend on them.
    """
    if study == "cifar10":
        return cifar_cells(parts["cifar10"], column)
    seeds = cells(parts["mnist"].all_runs, column)
    permuted = cells(parts["mnist-permutations"].all_runs, column, "permutation_seed")
    return {key: score for key, score in seeds.items() if not permutes(*key)} | {
        key: score for key, score in permuted.items() if permutes(*key)
    }


def permutes(split: str, method: str) -> bool:
    """Whether a cell depends on the permutation of the other agents' labels."""
    return split.endswith("*") and method != "local"


def cifar_cells(part: Part, column: Column = "best") -> dict[tuple[str, str], Score]:
    """Return the cells of CIFAR-10, with WAFFLE in two rows: directions, and the printed distances."""
    printed = cells([run for name, runs in part.runs.items() if name.endswith("/printed") for run in runs], column)
    return cells(our_runs(part), column) | {(split, AS_PRINTED): score for (split, _), score in printed.items()}


def our_runs(part: Part) -> list[FinishedRun]:
    """Return the runs of a study's main record, without WAFFLE with the printed distances."""
    return [run for name, runs in part.runs.items() if not name.endswith("/printed") for run in runs]


def printed_cell(study: str, split: str, method: str) -> Printed | None:
    """Return the paper's number for a cell; both rows of WAFFLE on CIFAR-10 have the same."""
    return TABLE[study].get((split, "waffle-paper" if method == AS_PRINTED else method))


def printed_text(study: str, split: str, method: str) -> str:
    """Return the paper's number for a cell as text."""
    printed = printed_cell(study, split, method)
    if printed is None:
        return "–"
    return f"{printed.mean:.2f}" + (f" ± {printed.std:.2f}" if printed.std is not None else "")


def title(study: str, method: str) -> str:
    """Return a method's name in the tables of a study."""
    return CIFAR_TITLES.get(method, TITLES.get(method, method)) if study == "cifar10" else TITLES[method]


def methods_in(found: Cells) -> list[str]:
    """Return the methods of some cells: those of the paper in its order, then the others."""
    present = dict.fromkeys(method for _, method in found)
    order = [m for method in METHODS for m in ((method, AS_PRINTED) if method == "waffle-paper" else (method,))]
    return [*(m for m in order if m in present), *(m for m in present if m not in order)]


def best_methods(found: Cells, split: str) -> set[str]:
    """Return the methods with the best printed mean of a split."""
    means = {m: round(100 * score.mean, 2) for (row, m), score in found.items() if row == split and score.seeds}
    return {method for method, value in means.items() if value == max(means.values())}
