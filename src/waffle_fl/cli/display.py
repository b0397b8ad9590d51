"""Terminal output: live progress on stderr, tables on stdout. Only the package `cli` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from waffle_fl.algorithms import title_of
from waffle_fl.claims.verdict import Verdict
from waffle_fl.config import RunConfig
from waffle_fl.experiment import Listener
from waffle_fl.report.tables import protocols_of
from waffle_fl.results import (
    ACCURACY,
    PROTOCOLS,
    FinishedRun,
    Score,
    best_of,
    measure_of,
    measure_of_runs,
    methods_of,
    remarks,
    rows_of,
    scores,
    with_variants,
)


class ProgressDisplay(Listener):
    """One progress bar per method, with its current accuracy and remaining time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("[bold]{task.description:<9}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", style="cyan"),
            TextColumn("finish in"),
            TimeRemainingColumn(),
            console=console,
        )
        self._tasks: dict[str, Any] = {}
        self._printed: set[str] = set()
        self._scores: dict[str, dict[str, float]] = {}

    def __enter__(self) -> ProgressDisplay:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def planned(self, runs: Sequence[tuple[RunConfig, Path]], finished: int) -> None:
        note = f", {finished} already done" if finished else ""
        methods = dict.fromkeys(config.method for config, _ in runs)
        self.console.print(
            f"{len(runs)} run{'s' if len(runs) > 1 else ''}{note}: {', '.join(title_of(m) for m in methods)}"
        )
        for config, folder in runs:
            if (folder / "result.json").exists():
                continue
            if config.method not in self._tasks:
                self._tasks[config.method] = self.progress.add_task(title_of(config.method), total=0, state="")
                self._scores[config.method] = {}
            task = self._tasks[config.method]
            self.progress.update(task, total=(self.progress.tasks[task].total or 0) + config.settings.rounds)

    def resumed(self, config: RunConfig, start: int) -> None:
        """Count the rounds up to a run's checkpoint as done."""
        task = self._tasks[config.method]
        self.progress.reset(
            task, completed=int(self.progress.tasks[task].completed) + start
        )  # not counted in the speed

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        known, measure = self._scores[config.method], measure_of(measured)
        if measured.get(measure.key) is not None:
            known[config.label] = measured[measure.key]
        mean_score = f"{measure.text(mean(known.values()), 1):>5}{' %' * (measure == ACCURACY)}" if known else "n/a"
        state = f"{measure.key} {mean_score}"
        self.progress.update(self._tasks[config.method], advance=1, state=state)

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        if result["status"] == "diverged":
            self.warned(f"{config.label}: {result['message']}")

    def warned(self, message: str) -> None:
        if message in self._printed:
            return
        self._printed.add(message)
        self.console.print(f"note: {message}", style="yellow", highlight=False, markup=False)


def show_tables(runs: Sequence[FinishedRun], console: Console) -> None:
    """Print one table per protocol, with the best of each split in bold. Many methods become rows."""
    runs = with_variants(runs)
    for protocol in protocols_of(runs):
        cells, methods, splits = scores(runs, protocol), methods_of(runs), rows_of(runs)
        best = {split: best_of(cells, split) for split in splits}
        transposed = console.width < 8 * len(methods) + 8
        columns = len(splits) if transposed else len(methods)
        decimals = 2 if console.width >= 12 * columns + 8 else 1

        def text(split: str, method: str) -> str:
            return score_text(cells.get((split, method)), method in best[split], decimals)  # noqa: B023

        table = Table(
            title=f"\n{measure_of_runs(runs).title}, {PROTOCOLS[protocol]}",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        long_names = any("(" in split for split in splits)  # a shift such as rotate(45)
        table.add_column("method" if transposed else "split", style="bold", no_wrap=transposed or not long_names)
        for title in map(escape, splits) if transposed else (title_of(m) for m in methods):
            table.add_column(title, justify="right", no_wrap=not (transposed and long_names))
        if transposed:
            for m in methods:
                table.add_row(title_of(m), *(text(split, m) for split in splits))
        else:
            for split in splits:
                table.add_row(escape(split), *(text(split, m) for m in methods))
        console.print(table)
    for line in remarks(runs):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def score_text(score: Score | None, best: bool, decimals: int) -> str:
    if score is None:
        return "–"
    text = score.text("±", decimals).replace(" (diverged)", "†")
    return f"[bold]{text}[/bold]" if best else text


def show_verdicts(wrong: Sequence[str], verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the problems of a record, and whether each claim holds."""
    for line in wrong:
        console.print(line, style="red", highlight=False, soft_wrap=True, markup=False)
    for verdict in verdicts:
        mark = verdict.word if verdict.holds else verdict.word.upper()
        kind = "main claim, " if verdict.main else ""
        text = f"{mark}: {kind}{verdict.claim} ({verdict.numbers})"
        console.print(text, style=None if verdict.holds else "red", highlight=False, soft_wrap=True, markup=False)


def show_result(config: RunConfig, result: Mapping[str, Any], weights: Mapping[str, float], console: Console) -> None:
    """Print the result of one run, with each agent's weight in the model, mean over the rounds."""
    s = config.settings
    where = f"{s.data_name} for {s.alice}" if s.is_own else f"{s.data}, split {s.column}"
    table = Table(title=escape(f"{title_of(config.method)} on {where}"), title_justify="left")
    measure = measure_of(result.get("best", {}))
    for column in ("protocol", "round", measure.title.lower()):
        table.add_column(column, justify="left" if column == "protocol" else "right")
    for protocol, title in PROTOCOLS.items():
        if protocol in result:
            entry = result[protocol]
            value = entry.get(measure.key)
            table.add_row(title, str(entry["round"]), "n/a" if value is None else measure.text(value))
    if not table.row_count:
        table.add_row("no score", "n/a", "n/a")
    console.print(table)
    if weights:
        shown = ", ".join(f"{name}: {weight:.2f}" for name, weight in weights.items())
        console.print(f"mean weights over the rounds: {shown}", highlight=False, markup=False)
    for name, times in result.get("newcomers", {}).items():
        values = {when: found.get(measure.key) for when, found in times.items()}
        shown = ", ".join(f"{when} {'n/a' if value is None else measure.text(value)}" for when, value in values.items())
        console.print(f"{name} joins after training: {shown}", highlight=False, markup=False)


def show_all_agents(results: Sequence[tuple[str, Mapping[str, Any]]], console: Console) -> None:
    """Print the metrics of each agent with its own model, followed by mean, lowest and highest."""
    values: dict[str, list[float | None]] = {}
    for _, result in results:
        for name, value in result.get("metrics", {}).items():
            values.setdefault(name, []).append(value)
    metrics = [name for name, found in values.items() if any(v is not None for v in found)]
    table = Table()
    for column in ("agent", *(name.replace("_", " ") for name in metrics)):
        table.add_column(column, justify="left" if column == "agent" else "right")
    for i, (agent, result) in enumerate(results):
        metrics_of_agent = result.get("metrics", {})
        table.add_row(
            escape(agent), *(_shown(metrics_of_agent.get(name)) for name in metrics), end_section=i + 1 == len(results)
        )
    for title, pick in (("mean", mean), ("lowest", min), ("highest", max)):
        table.add_row(title, *(_shown(pick([v for v in values[name] if v is not None])) for name in metrics))
    console.print(table)


def _shown(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"
