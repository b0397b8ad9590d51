"""The tables of docs/beyond.md and docs/beyond-shifts.md, from the record of experiments/beyond.toml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import TypeAlias

from paper.cell_tables import setting
from paper.claims import Verdict
from paper.markdown import prose, table
from paper.sections import verdict_table
from waffle_fl.algorithms import TITLES as METHODS
from waffle_fl.claims.file_claims import accuracies, near
from waffle_fl.claims.record_files import Part
from waffle_fl.report.tables import by_method
from waffle_fl.results import FinishedRun

Column: TypeAlias = tuple[str, str]  # (data set, split with its shift)

NAME = "beyond"
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
KINDS = {  # kind of shift -> names of its shifts
    "labels and quantities": ("dirichlet", "quantity", "prior"),
    "features": ("rotate", "blur", "noise", "contrast", "colour", "scale"),
    "concepts": ("swap",),
    "drifts": ("drift",),
}


def summary(part: Part, claims: Sequence[Verdict]) -> Iterator[str]:
    """Yield the claims, and every method over all columns."""
    yield verdict_table(claims)
    yield "### How far each method is behind the best one"
    yield standings(part)


def tables(part: Part, _claims: Sequence[Verdict]) -> Iterator[str]:
    """Yield one table per data set and kind of shift."""
    for data, title in TITLES.items():
        runs = [run for run in part.all_runs if run.config.settings.data == data]
        if runs:
            yield f"## {title}"
            yield setting(runs)
        for kind in ("the paper's splits", *KINDS, "a mixture"):
            some = [run for run in runs if kind_of(run) == kind]
            if some:
                yield f"### {title}: {kind}"
                yield by_method(some, "last").rstrip()


def kind_of(run: FinishedRun) -> str:
    """Return the kind of shift of a run."""
    shift = run.config.settings.shift
    if not shift:
        return "the paper's splits"
    return "a mixture" if "+" in shift else next(kind for kind, names in KINDS.items() if shift.startswith(names))


def standings(part: Part) -> str:
    """Return, per method, in how many columns it is near the best one, and how far behind it is."""
    columns = last_rounds(part)
    behind = {
        method: [max(map(mean, found.values())) - mean(found[method]) for found in columns.values() if method in found]
        for method in METHODS
        if any(method in found for found in columns.values())
    }
    close = {method: sum(is_near_best(found, method) for found in columns.values()) for method in behind}
    rows = [
        [METHODS[method], f"{close[method]} of {len(gaps)}", *(f"{gap:.2f}" for gap in (mean(gaps), max(gaps)))]
        for method, gaps in sorted(behind.items(), key=lambda item: (-close[item[0]], mean(item[1])))
    ]
    head = ["", "within one standard deviation of the best", "points behind the best, mean", "largest"]
    where = "the tables in [beyond-shifts.md](beyond-shifts.md)"
    return f"Last round, over the {len(columns)} columns of {where}:\n\n{table(head, rows)}"


def of_method(part: Part, method: str) -> str:
    """Return one method's accuracy in every column next to the best method's, or "" if there is none."""
    columns = {key: found for key, found in last_rounds(part).items() if method in found}
    if not columns:
        return ""
    close = sum(is_near_best(found, method) for found in columns.values())
    rows = []
    for name in dict.fromkeys(name for _, name in columns):
        row = [name]
        for data in TITLES:
            found = columns.get((data, name))
            row += [_shown(found[method]), _best(found)] if found else ["–", "–"]
        rows.append(row)
    head = ["", *(cell for title in TITLES.values() for cell in (title, "best method"))]
    text = prose(
        "With default options, last round, from `results/beyond.jsonl` ([beyond.md](../beyond.md) has all methods).",
        f"Within one standard deviation of the best method in {close} of {len(columns)} columns.",
    )
    return f"{text}\n\n{table(head, rows)}"


def last_rounds(part: Part) -> dict[Column, dict[str, list[float]]]:
    """Return the accuracies in percent of all seeds, per column and method; the paper's splits come first."""
    runs: dict[Column, dict[str, list[FinishedRun]]] = {}
    for run in sorted(part.all_runs, key=lambda run: bool(run.config.settings.shift)):
        runs.setdefault((run.config.settings.data, run.row), {}).setdefault(run.config.method, []).append(run)
    return {
        column: {method: [100 * a for a in accuracies(some, "last")] for method, some in found.items()}
        for column, found in runs.items()
    }


def is_near_best(found: Mapping[str, Sequence[float]], method: str) -> bool:
    return method in found and mean(found[method]) >= near(max(found.values(), key=mean), 1.0)


def _shown(values: Sequence[float]) -> str:
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _best(found: Mapping[str, Sequence[float]]) -> str:
    best = max(found, key=lambda method: mean(found[method]))
    return f"{mean(found[best]):.2f} {METHODS[best]}"
