"""Pieces of the page: tables, matrices, figures, choices. Every text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from waffle_fl.decision.bootstrap import Interval, Metric
from waffle_fl.decision.verdict_text import number, signed

MARKS = {1: "up", 0: "level", -1: "down"}
SHADE = 0.75  # of the colour, for a cell of 1: the figure on it stays readable
WIDE = 10  # agents from which matrices are set smaller


def heat(
    name: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], percent: bool = False
) -> str:
    """A matrix as a shaded table: a chart that can also be read aloud."""
    most = 1.0 if percent else max(1.0, *(max(line) for line in values))
    body = []
    for row, line in zip(rows, values, strict=True):
        specs = []
        for column, value in zip(columns, line, strict=True):
            text = f"{100 * value:.0f}" if percent else f"{value:.2f}"
            mark = ' class="own"' if row == column else ""
            specs.append(
                f'<td{mark} style="background-color: rgba(76, 120, 168, {SHADE * value / most:.3f})">{text}</td>'
            )
        body.append(f'<tr><th scope="row">{escape(row)}</th>{"".join(specs)}</tr>')
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    wide = " wide" if len(columns) >= WIDE else ""
    return (
        f'<div class="scroll"><table class="heat{wide}" id="{name}"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def table(head: Sequence[str], rows: Iterable[str], caption: str) -> str:
    """A table with its caption; the rows are markup already."""
    columns = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def interval(found: Interval, metric: Metric) -> str:
    """A cell: the figure, and its interval below."""
    low, high = (number(v, metric).removesuffix(" %") for v in (found.low, found.high))
    return f"<td>{number(found.value, metric)} <small>{low} to {high}</small></td>"


def gain(found: Interval, metric: Metric) -> str:
    """A cell: the difference, coloured where it is clear."""
    value, low, high = (signed(v, metric) for v in found)
    return f'<td class="{MARKS[found.sign]}">{value} <small>{low} to {high}</small></td>'


def part(title: str, said: str, chart: str = "") -> str:
    """A heading, what is to be said, and a figure, kept on one page in print."""
    return f'<div class="keep"><h3>{escape(title)}</h3>{paragraphs([said])}{chart}</div>'


def figure(name: str, caption: str) -> str:
    """A place for a chart."""
    return f'<figure><figcaption>{escape(caption)}</figcaption><div class="scroll" data-chart="{name}"></div></figure>'


def select(name: str, label: str, options: Mapping[str, str]) -> str:
    """A choice; parts with data-of its name and data-is a value are shown by it."""
    listed = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options.items())
    return f'<div class="choose"><label for="{name}">{label}</label><select id="{name}">{listed}</select></div>'


def paragraphs(texts: Iterable[str], kind: str = "") -> str:
    """One paragraph a text."""
    mark = f' class="{kind}"' if kind else ""
    return "".join(f"<p{mark}>{together(text)}</p>" for text in texts if text)


def together(text: str) -> str:
    """Escaped, and no line breaks between a number and its sign."""
    return escape(text).replace(" %", "&#160;%")
