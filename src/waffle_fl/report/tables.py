"""Result tables as in the paper, with splits as rows and methods as columns: CSV, Markdown, LaTeX, HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from math import isnan

from waffle_fl import spreadsheet
from waffle_fl.algorithms import title_of
from waffle_fl.results import (
    PROTOCOLS,
    FinishedRun,
    Protocol,
    Score,
    best_of,
    measure_of_runs,
    methods_of,
    rows_of,
    scores,
)

LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def grid(
    runs: Sequence[FinishedRun],
    protocol: Protocol,
    cell: Callable[[Score | None, bool], str],
    name: Callable[[str], str] = str,
) -> list[list[str]]:
    """Return the header and rows as text.

    `cell` formats a score, given whether it is the best of its row; `name` formats the name of a row."""
    methods, cells = methods_of(runs), scores(runs, protocol)
    lines = [["", *(title_of(m) for m in methods)]]
    for row in rows_of(runs):
        best = best_of(cells, row)
        lines.append([name(row), *(cell(cells.get((row, m)), m in best) for m in methods)])
    return lines


def protocols_of(runs: Sequence[FinishedRun]) -> list[Protocol]:
    """Return the protocols that at least one run reports."""
    return [p for p in PROTOCOLS if any(p in run.result for run in runs)]


def to_csv(runs: Sequence[FinishedRun]) -> str:
    """Return CSV with one line per cell and unrounded numbers."""
    rows: list[Sequence[object]] = [["protocol", "split", "method", "mean", "std", "seeds", "diverged"]]
    for protocol in protocols_of(runs):
        for (row, method), s in sorted(scores(runs, protocol).items()):
            numbers = ["" if value is None or isnan(value) else value for value in (s.mean, s.std)]
            rows.append([protocol, row, method, *numbers, s.seeds, s.diverged])
    return spreadsheet.to_csv(rows)


def to_markdown(runs: Sequence[FinishedRun]) -> str:
    """Return one Markdown table per protocol, with the best of each row in bold."""
    parts = []
    for protocol in protocols_of(runs):
        lines = grid(runs, protocol, _markdown_cell, _markdown)
        head, *body = [f"| {' | '.join(line)} |" for line in lines]
        rule = "|" + " --- |" * len(lines[0])
        parts.append("\n".join([f"{measure_of_runs(runs).title}, {PROTOCOLS[protocol]}:", "", head, rule, *body]))
    return "\n\n".join(parts) + "\n"


def by_method(runs: Sequence[FinishedRun], protocol: Protocol) -> str:
    """Return a Markdown table with methods as rows and splits as columns, with the best of each split in bold."""
    lines = grid(runs, protocol, _markdown_cell, _markdown)
    turned = [list(line) for line in zip(*lines, strict=True)]
    head, *body = [f"| {' | '.join(line)} |" for line in turned]
    rule = "|" + " --- |" * len(turned[0])
    return "\n".join([f"{measure_of_runs(runs).title}, {PROTOCOLS[protocol]}:", "", head, rule, *body]) + "\n"


def _markdown_cell(s: Score | None, best: bool) -> str:
    return "" if s is None else f"**{s.text()}**" if best else s.text()


def _markdown(text: str) -> str:
    """Return a user's text escaped for a Markdown table: no markup, no HTML, no new column."""
    return re.sub(r"([\\`_\[\]|])", r"\\\1", html.escape(text, quote=False))


def to_latex(runs: Sequence[FinishedRun]) -> str:
    """Return LaTeX tables for a paper, with booktabs."""
    parts = []
    for protocol in protocols_of(runs):
        lines = grid(runs, protocol, _latex_cell, _latex)
        head, *body = [" & ".join(line).replace("*", r"$^*$") + r" \\" for line in lines]
        columns = "l" + "r" * (len(lines[0]) - 1)
        caption = f"% {measure_of_runs(runs).title.lower()}, {PROTOCOLS[protocol]}"
        parts.append(
            "\n".join(
                [caption, rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
            )
            + "\n\\end{tabular}"
        )
    return "\n\n".join(parts) + "\n"


def _latex(text: str) -> str:
    """Return a user's text escaped for LaTeX."""
    return "".join(LATEX.get(character, character) for character in text)


def _latex_cell(s: Score | None, best: bool) -> str:
    if s is None or isnan(s.mean):
        return "--" if s is None else r"$^\dagger$"
    text = s.text(r" \pm ").replace(" (diverged)", "")
    mark = r"$^\dagger$" if s.diverged else ""
    return (rf"$\mathbf{{{text}}}$" if best else f"${text}$") + mark


def to_html(runs: Sequence[FinishedRun], protocol: Protocol) -> str:
    def cell(s: Score | None, best: bool) -> str:
        if s is None:
            return "<td>–</td>"
        mean, _, spread = s.text().partition(" ± ")
        inner = html.escape(mean) + (f" <small>± {html.escape(spread)}</small>" if spread else "")
        return f'<td class="best">{inner}</td>' if best else f"<td>{inner}</td>"

    head, *body = grid(runs, protocol, cell)
    columns = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    rows = "".join(f"<tr><th>{html.escape(line[0])}</th>{''.join(line[1:])}</tr>" for line in body)
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>"
