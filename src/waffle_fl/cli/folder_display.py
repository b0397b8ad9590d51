"""Print what `waffle data FOLDER` finds in a folder of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from waffle_fl.user_data.cells import shortened
from waffle_fl.user_data.table_report import AgentReport, ColumnReport, FolderReport

MOST_CLASSES = 8  # classes shown as columns; more are summarised
MOST_VALUES = 6  # categories listed per column


def show_folder(report: FolderReport, console: Console) -> None:
    """Print the agents, the columns, and all problems and notes."""
    _show_line(console, _title(report))
    if report.agents:
        console.print(_agents(report))
    if report.columns:
        console.print(_columns(report))
    _show_list(console, "Problems: a run stops here", report.problems, "red")
    _show_list(console, "Notes", report.notes, "yellow")
    others = [name for name in report.passed_over if not any(name in note for note in report.notes)]
    if others:
        _show_line(console, f"Not read: {', '.join(others)}")


def _title(report: FolderReport) -> str:
    rows = sum(agent.rows for agent in report.agents)
    goal = f"predicts {report.target}" + (f" ({report.task})" if report.task else "") if report.target else "no target"
    agents = len(report.agents)
    return f"{report.folder}: {agents} agent{'s' * (agents != 1)}, {rows:,} row{'s' * (rows != 1)}, {goal}"


def _agents(report: FolderReport) -> Table:
    names = {name for agent in report.agents for name in agent.classes}
    classes = sorted(names, key=lambda name: (name.lower(), name))
    wide = len(classes) > MOST_CLASSES
    split = any(agent.train is not None for agent in report.agents)
    heads = ["rows", *(["train", "test"] if split else []), *(["classes"] if wide else classes)]
    table = _table("agent", *heads, "file")
    for agent in report.agents:
        counts = _split(agent) if split else []
        shares = [f"{len(agent.classes)} of {len(classes)}"] if wide else [_count(agent.classes, c) for c in classes]
        table.add_row(escape(agent.name), f"{agent.rows:,}", *counts, *shares, escape(", ".join(agent.files)))
    return table


def _split(agent: AgentReport) -> list[str]:
    return ["" if n is None else f"{n:,}" for n in (agent.train, agent.test)]


def _count(classes: Mapping[str, int], name: str) -> str:
    return f"{classes[name]:,}" if name in classes else "·"


def _columns(report: FolderReport) -> Table:
    table = _table("column", "read as", "values", "missing", left=("read as", "values", "missing"))
    for column in report.columns:
        table.add_row(escape(column.name), column.kind, escape(_values(column)), escape(_missing(column)))
    return table


def _values(column: ColumnReport) -> str:
    if column.low is not None:
        return f"{column.low:g} to {column.high:g}, mean {column.mean:.4g}"
    shown = [f"{shortened(name)} ({count:,})" for name, count in list(column.counts.items())[:MOST_VALUES]]
    rest = len(column.counts) - len(shown)
    return ", ".join([*shown, *([f"{rest} more"] if rest > 0 else [])])


def _missing(column: ColumnReport) -> str:
    total = sum(column.missing.values())
    parts = [f"{total:,} ({total / column.cells:.0%})"] if total else []
    parts += [f"no column at {', '.join(column.absent)}"] if column.absent else []
    return "; ".join(parts) or "·"


def _table(first: str, *heads: str, left: Sequence[str] = ("file",)) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, style="bold", overflow="fold")
    for head in heads:
        table.add_column(Text(head), justify="left" if head in left else "right", overflow="fold")
    return table


def _show_list(console: Console, title: str, lines: Sequence[str], style: str) -> None:
    if not lines:
        return
    console.print(Text(title if len(lines) == 1 else f"{title} ({len(lines)})", style=f"bold {style}"))
    for line in lines:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row("-", Text(line, overflow="fold"))
        console.print(grid)
    console.print()


def _show_line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
