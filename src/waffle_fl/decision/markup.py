"""HTML of tables, matrices, figures and selects. All text is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from waffle_fl.decision.bootstrap import Interval, Metric
from waffle_fl.decision.charts import MARKS
from waffle_fl.decision.verdict_text import number, signed

SHADE = 0.75  # opacity of a cell of value 1: its number stays readable
WIDE = 10  # number of agents from which matrices use a smaller font


def heat(
    name: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], percent: bool = False
) -> str:
    """Return a matrix as a shaded table, which screen readers can read."""
    most = 1.0 if percent else max(1.0, *(max(line) for line in values))
    body = []
    for row, line in zip(rows, values, strict=True):
        cells = []
        for column, value in zip(columns, line, strict=True):
            text = f"{100 * value:.0f}" if percent else f"{value:.2f}"
            mark = ' class="own"' if row == column else ""
            cells.append(f'<td{mark} style="--shade:{SHADE * value / most:.3f}">{text}</td>')
        body.append(f'<tr><th scope="row">{escape(row)}</th>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    wide = " wide" if len(columns) >= WIDE else ""
    return (
        f'<div class="scroll"><table class="heat{wide}" id="{name}"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def table(head: Sequence[str], rows: Iterable[str], caption: str, foot: str = "") -> str:
    """Return a table with its caption; `rows` and `foot` are already HTML."""
    columns = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody>{f'<tfoot>{foot}</tfoot>' if foot else ''}</table></div>"
    )


def interval(found: Interval, metric: Metric) -> str:
    """Return a cell with the value and its interval below."""
    low, high = (number(v, metric).removesuffix(" %") for v in (found.low, found.high))
    return f"<td>{number(found.value, metric)} <small>{low} to {high}</small></td>"


def gain(found: Interval, metric: Metric) -> str:
    """Return a cell with the difference, coloured when it is clear."""
    value, low, high = (signed(v, metric) for v in found)
    return f'<td class="{MARKS[found.sign]}">{value} <small>{low} to {high}</small></td>'


def share_cell(found: Interval | None) -> str:
    """Return a cell with a share of agents in percent and its interval."""
    if found is None:
        return "<td>–</td>"
    value, low, high = (f"{100 * v:.0f}" for v in found)
    return f"<td>{value} % <small>{low} to {high}</small></td>"


def part(title: str, text: str, chart: str = "") -> str:
    """Return a heading, a text and a figure, kept on one printed page."""
    return f'<div class="keep"><h3>{escape(title)}</h3>{paragraphs([text])}{chart}</div>'


def figure(chart: str, caption: str) -> str:
    """Return a chart, which is already HTML, with its caption."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>"


def actions(found: Iterable[tuple[str, str, str, str]], single: bool) -> str:
    """Return what each agent should do: (agent, action, reason, mark) per line."""
    lines = "".join(
        f'<li class="{mark}"><span class="who">{escape(name)}</span>'
        f'<span class="do">{together(_capital(action))}</span><p class="why">{together(reason)}</p></li>'
        for name, action, reason, mark in found
    )
    return f'<ul class="actions{" one" if single else ""}">{lines}</ul>'


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def select(name: str, label: str, options: Mapping[str, str]) -> str:
    """Return a select that shows the elements whose data-of is `name` and whose data-is is the selected value."""
    listed = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options.items())
    return f'<div class="choose"><label for="{name}">{label}</label><select id="{name}">{listed}</select></div>'


def paragraphs(texts: Iterable[str], kind: str = "") -> str:
    """Return one paragraph per text."""
    mark = f' class="{kind}"' if kind else ""
    return "".join(f"<p{mark}>{together(text)}</p>" for text in texts if text)


def together(text: str) -> str:
    """Return the text escaped; no line breaks before a percent sign or within a flag such as --budget."""
    return re.sub(r"(?<!\S)--[\w-]+", r"<code>\g<0></code>", escape(text).replace(" %", "&#160;%"))
