"""Tables of docs/results.md with one row per cell of the paper's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from statistics import median

from paper.cells import (
    COLUMNS,
    Cells,
    Column,
    best_methods,
    cells,
    methods_in,
    permutes,
    printed_cell,
    printed_text,
    study_cells,
    title,
    value_of,
)
from paper.claims import agreement_test, percent
from paper.markdown import Records, absent, prose, table
from paper.page_text import DRAWS_TEXT, NOTHING_SELECTED, PERMUTATIONS_TEXT
from paper.printed_table import SPLITS, TITLES
from waffle_fl.results import FinishedRun, Score


def mnist_section(records: Records) -> Iterator[str]:
    """Yield the main table of MNIST, how far the paper's numbers are from it, and the same on other draws."""
    yield "## MNIST, 2,500 samples per agent"
    parts = records.parts
    yield from filter(None, (absent(records, name) for name in ("mnist", "mnist-permutations")))
    if not parts["mnist"].all_runs:
        return
    yield setting(parts["mnist"].all_runs)
    yield prose(PERMUTATIONS_TEXT)
    yield cell_table({column: study_cells("mnist", parts, column) for column in COLUMNS}, "mnist")
    if parts["mnist-permutations"].all_runs:
        yield "### Where the paper lies among the permutations"
        yield permutation_table(parts["mnist-permutations"].all_runs)
    yield "### Other samples, and every agent as Alice"
    yield from filter(None, (absent(records, name) for name in ("mnist-splits", "mnist-alices")))
    yield prose(DRAWS_TEXT)
    yield draws_table(records)


def full_section(records: Records) -> Iterator[str]:
    """Yield the table of the full split of MNIST."""
    yield "## MNIST, the full split of 6,000 samples per agent"
    runs = records.runs("mnist-6000")
    if absent(records, "mnist-6000"):
        yield absent(records, "mnist-6000")
    if runs:
        yield setting(runs)
        yield cell_table({column: cells(runs, column) for column in COLUMNS}, "mnist")
        yield NOTHING_SELECTED


def cifar_section(records: Records) -> Iterator[str]:
    """Yield the table of CIFAR-10."""
    yield "## CIFAR-10 with DLA"
    if absent(records, "cifar10"):
        yield absent(records, "cifar10")
    runs = records.runs("cifar10")
    if not runs:
        return
    yield setting(runs)
    by_column = {column: study_cells("cifar10", records.parts, column) for column in COLUMNS}
    yield cell_table(by_column, "cifar10")
    yield prose(NOTHING_SELECTED, "`results/cifar10-reset.jsonl` holds out 250 of the 5,000 samples for that.")


def setting(runs: Sequence[FinishedRun]) -> str:
    """Return the settings of some runs in one line."""
    first = runs[0]
    s, seeds = first.config.settings, sorted({run.config.settings.seed for run in runs})
    device = ", ".join(sorted({str(run.provenance.get("binding", {}).get("device")) for run in runs}))
    parts = [
        f"{s.rounds} rounds, batch {s.batch_size}, lr {s.lr}, {s.precision} on {device}",
        f"seeds {', '.join(map(str, seeds))}",
        f"{first.provenance.get('test_samples')} test samples on {first.row}",
    ]
    notes = {run.provenance["data_note"] for run in runs if run.provenance.get("data_note")}
    return "; ".join([*parts, *sorted(notes)]) + "."


def cell_table(by_column: Mapping[Column, Cells], study: str) -> str:
    """Return one row per cell: the paper, the difference, its test, and every column that has values.

    The best method of a split is bold. n is the number of seeds, or of permutations.
    """
    best = by_column["best"]
    shown = [column for column, found in by_column.items() if any(score.seeds for score in found.values())]
    rows = []
    for split in SPLITS:
        for method in methods_in(best):
            printed, found = printed_cell(study, split, method), percent(best, split, method)
            gap = f"{found - printed.mean:+.2f}" if printed and not isnan(found) else "–"
            n = str(best[split, method].seeds) if (split, method) in best else "–"
            texts = [_cell(by_column[column], split, method) for column in shown]
            test = _test(best, study, split, method)
            rows.append(
                [split, title(study, method), printed_text(study, split, method), texts[0], gap, test, n, *texts[1:]]
            )
    return table(["split", "method", "paper", COLUMNS["best"], "difference", "p", "n",
                  *(COLUMNS[column] for column in shown[1:])], rows)  # fmt: skip


def _test(found: Cells, study: str, split: str, method: str) -> str:
    p = agreement_test(found, study, split, method)
    return "–" if isnan(p) else f"{p:.2g}"


def _cell(found: Cells, split: str, method: str) -> str:
    score = found.get((split, method))
    if score is None or (isnan(score.mean) and not score.diverged):
        return "–"
    text = score.text()
    return f"**{text}**" if method in best_methods(found, split) else text


def permutation_table(runs: Sequence[FinishedRun]) -> str:
    """Return the distribution of each cell over permutations, and how many permutations lie below the paper."""
    groups: dict[tuple[str, str], dict[int, list[float]]] = {}
    for run in runs:
        value, s = value_of(run, "best"), run.config.settings
        if value is not None and permutes(s.split, run.config.method):
            groups.setdefault((s.split, run.config.method), {}).setdefault(s.permutation_seed, []).append(100 * value)
    rows = []
    for split in SPLITS:
        for method in methods_in({key: Score(0, None, 1, 0) for key in groups}):
            means = sorted(sum(values) / len(values) for values in groups.get((split, method), {}).values())
            printed = printed_cell("mnist", split, method)
            if means:
                below = f"{sum(value < printed.mean for value in means)} of {len(means)}" if printed else "–"
                quantiles = (f"{value:.2f}" for value in (means[0], median(means), means[-1]))
                rows.append([split, TITLES[method], printed_text("mnist", split, method), *quantiles, below])
    return table(["split", "method", "paper", "lowest", "median", "highest", "permutations below the paper"], rows)


def draws_table(records: Records) -> str:
    """Return the best round of each cell on other samples and with every agent as Alice."""
    main = study_cells("mnist", records.parts)
    splits = cells(records.runs("mnist-splits"), "best", "split_seed")
    alices = cells(records.runs("mnist-alices"), "best", "alice")
    lowest = _lowest(records.runs("mnist-alices"))
    rows = []
    for split in SPLITS:
        for method in methods_in(main):
            worst = lowest.get((split, method))
            shown = [_cell(found, split, method) for found in (main, splits, alices)]
            rows.append([split, TITLES[method], *shown, "–" if worst is None else f"{100 * worst:.2f}"])
    return table(["split", "method", "table above", "other samples", "every Alice", "lowest Alice"], rows)


def _lowest(runs: Sequence[FinishedRun]) -> dict[tuple[str, str], float]:
    """Return the lowest mean over seeds of any Alice, per cell."""
    by_alice = {
        name: cells([run for run in runs if run.config.settings.alice == name])
        for name in dict.fromkeys(run.config.settings.alice for run in runs)
    }
    keys = dict.fromkeys(key for found in by_alice.values() for key in found)
    return {key: min(found[key].mean for found in by_alice.values() if key in found) for key in keys}


def summary_table(records: Records) -> str:
    """Return both data sets on one screen, for the README: our best round, and the paper's in parentheses."""
    shown = ("local", "fedavg", "scaffold", "weight-erosion", "apfl", "waffle-paper")
    rows = []
    for study, name, digits in (("mnist", "MNIST", 2), ("cifar10", "CIFAR-10", 1)):
        found = {(split, m): score for (split, m), score in study_cells(study, records.parts).items() if m in shown}
        for split in SPLITS:
            texts = [_summary_cell(found, study, split, method, digits) for method in shown]
            rows.append([f"{name} {split}".replace("*", "\\*"), *texts])
    return table(["", *(TITLES[method] for method in shown)], rows)


def _summary_cell(found: Cells, study: str, split: str, method: str, digits: int) -> str:
    ours, printed = percent(found, split, method), printed_cell(study, split, method)
    if isnan(ours) or printed is None:
        return "–"
    text = f"{ours:.{digits}f} ({printed.mean:.{digits}f})"
    return f"**{text}**" if method in best_methods(found, split) else text
