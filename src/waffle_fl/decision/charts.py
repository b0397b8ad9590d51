"""The page's charts as HTML and CSS: intervals on a common axis, and shares over the rounds. No script draws them.

Each chart has an alternative text that gives the same numbers. Colours are CSS variables, so that charts follow the
reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import NamedTuple

from waffle_fl.algorithms import title_of
from waffle_fl.decision.bootstrap import Interval, Metric, better_if_lower, in_percent
from waffle_fl.decision.study import ALONE, Decision, View, gainers, mean_over, phases
from waffle_fl.decision.verdict_text import METRIC_TITLES, difference, number, signed

WIDE = 2.5  # an interval is cut if it is this many times as wide as the median interval
TICKS = 7
LEAST_SHARE = 0.0005  # a smaller share has no block: its gap would shorten the column
COLOURS = 8  # of partners; page.css defines them
MARKS = {1: "up", 0: "level", -1: "down"}


class Axis(NamedTuple):
    """The range of a chart's horizontal axis."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Return the position of a value in percent of the axis, limited to the axis."""
        return min(100.0, max(0.0, 100 * (value - self.low) / (self.high - self.low)))


class Line(NamedTuple):
    """One line of a chart: a name, an interval, and the interval as text."""

    name: str
    found: Interval
    text: str
    limits: str
    mark: str


def axis_of(found: Sequence[Interval], *also: float) -> Axis:
    """Return the axis of these intervals and further values. Few very wide intervals do not stretch it."""
    widths = [one.high - one.low for one in found]
    limit = WIDE * median(widths) if len(found) > 2 else math.inf
    kept = [one for one, width in zip(found, widths, strict=True) if width <= limit] or list(found)
    low, high = min(*(one.low for one in kept), *also, math.inf), max(*(one.high for one in kept), *also, -math.inf)
    margin = 0.05 * (high - low) or 0.01
    return Axis(low - margin, high + margin)


def ticks_of(axis: Axis) -> list[float]:
    """Return at most TICKS + 1 round numbers within the axis."""
    rough = (axis.high - axis.low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(axis.low / step)
    return [k * step for k in range(first, math.floor(axis.high / step) + 1)]


def methods_chart(view: View, metric: Metric) -> str:
    """Return a chart with one line per method: its score and interval on this agent's test data."""
    found = {title_of(method): standing.scores[metric] for method, standing in view.standings.items()}
    gains = {title_of(method): standing.gains.get(metric) for method, standing in view.standings.items()}
    lines = [
        Line(title, one, number(one.value, metric), _limits(one, metric, plus=False), MARKS[gain.sign if gain else 0])
        for (title, one), gain in zip(found.items(), gains.values(), strict=True)
    ]
    values = "; ".join(f"{line.name} {line.text}" for line in lines)
    about = f"{METRIC_TITLES[metric]} of each method for {view.name}: {values}"
    unit = " in percent" if in_percent(metric) else ""
    reference = view.standings[ALONE].scores[metric].value
    return _chart(lines, metric, reference, f"{METRIC_TITLES[metric]}{unit}; the line marks training alone", about)


def gains_chart(decision: Decision, method: str) -> str:
    """Return a chart with one line per agent, the largest gain first."""
    found = {view.name: gain for view, gain in gainers(decision.views, method, decision.metric)}
    return _gains(found, decision.metric, f"Gain with {title_of(method)} over training alone")


def recommended_chart(decision: Decision) -> str:
    """Return a chart with one line per agent: the gain with its best group on test data."""
    found = {view.name: view.recommended for view in decision.views if view.recommended is not None}
    return _gains(found, decision.metric, "Gain of each agent with its best group over training alone")


def partners_chart(view: View, metric: Metric) -> str:
    """Return a chart with one line per partner: its contribution."""
    contributions = view.advice.contributions if view.advice else {}
    found = dict(sorted(contributions.items(), key=lambda item: -item[1].value))
    return _gains(found, metric, f"Contribution of each partner to {view.name}")


def _gains(found: Mapping[str, Interval], metric: Metric, title: str) -> str:
    lines = [
        Line(name, gain, signed(gain.value, metric), _limits(gain, metric, plus=True), MARKS[gain.sign])
        for name, gain in found.items()
    ]
    values = "; ".join(f"{name} {difference(gain, metric)}" for name, gain in found.items())
    unit = "points" if in_percent(metric) else METRIC_TITLES[metric]
    lower = " (a lower error is better)" if better_if_lower(metric) else ""
    return _chart(lines, metric, 0.0, f"worse ◂ {unit} ▸ better{lower}", f"{title}: {values}")


def _limits(found: Interval, metric: Metric, plus: bool) -> str:
    low, high = (signed(v, metric) if plus else number(v, metric).removesuffix(" %") for v in (found.low, found.high))
    return f"{low} to {high}"


def _chart(lines: Sequence[Line], metric: Metric, reference: float, title: str, about: str) -> str:
    """Return the lines on a common axis with a vertical reference line."""
    axis = axis_of([line.found for line in lines], reference)
    scale = 100 if in_percent(metric) else 1
    shown = Axis(scale * axis.low, scale * axis.high)
    ticks = "".join(f'<i style="left:{shown.place(tick):.2f}%"><u>{_tick(tick)}</u></i>' for tick in ticks_of(shown))
    rows = "".join(_row(line, axis, reference) for line in lines)
    cut = any(line.found.low < axis.low or line.found.high > axis.high for line in lines)
    note = " An arrow marks an interval that continues beyond the axis." if cut else ""
    return (
        f'<div class="chart" role="img" aria-label="{escape(about)}"><div class="lines" aria-hidden="true">{rows}'
        f'<div class="axis"><span></span><span class="track">{ticks}</span><span></span></div></div>'
        f'<p class="axis-title" aria-hidden="true">{escape(title)}.{note}</p></div>'
    )


def _row(line: Line, axis: Axis, reference: float) -> str:
    low, high = axis.place(line.found.low), axis.place(line.found.high)
    cuts = (" cut-low" if line.found.low < axis.low else "") + (" cut-high" if line.found.high > axis.high else "")
    inside = axis.low <= line.found.value <= axis.high
    dot = f'<b class="dot" style="left:{axis.place(line.found.value):.2f}%"></b>' if inside else ""
    return (
        f'<div class="line {line.mark}"><span class="name">{escape(line.name)}</span><span class="track">'
        f'<i class="zero" style="left:{axis.place(reference):.2f}%"></i>'
        f'<i class="bar{cuts}" style="left:{low:.2f}%;width:{max(0.4, high - low):.2f}%"></i>{dot}</span>'
        f'<span class="value">{escape(line.text)} <small>{escape(line.limits)}</small></span></div>'
    )


def _tick(value: float) -> str:
    return f"{value:.4g}".replace("-", "−") if abs(value) > 1e-12 else "0"


def sources_chart(view: View, decision: Decision, method: str) -> str:
    """Return a chart of the agents' shares in the updates of this agent's model, per phase of rounds."""
    rounds, own = view.update_weights[method], decision.names.index(view.name)
    order = [own, *(i for i in range(len(decision.names)) if i != own)]
    colours = ["own", *(f"s{k % COLOURS}" for k in range(len(order) - 1))]
    columns = []
    for part in phases(len(rounds)):
        shares = mean_over(rounds, part)
        blocks = "".join(
            f'<i class="{colour}" style="height:{100 * shares[i]:.2f}%" '
            f'title="{escape(decision.names[i])} {100 * shares[i]:.0f} %"></i>'
            for i, colour in zip(order, colours, strict=True)
            if shares[i] >= LEAST_SHARE
        )
        columns.append(f'<div style="flex:{len(part)}">{blocks}</div>')
    mean = mean_over(rounds)
    legend = "".join(
        f'<li><i class="{colour}"></i>{escape(decision.names[i])} <small>{100 * mean[i]:.0f}&#160;%</small></li>'
        for i, colour in zip(order, colours, strict=True)
    )
    listed = "; ".join(f"{decision.names[i]} {100 * mean[i]:.0f} %" for i in order)
    about = f"Shares of the updates in {view.name}'s {title_of(method)} model, mean over all rounds: {listed}"
    return (
        f'<div class="chart" role="img" aria-label="{escape(about)}"><ul class="legend">{legend}</ul>'
        f'<div class="shares">{"".join(columns)}</div>'
        f'<div class="ends"><span>round 1</span><span>round {len(rounds)}</span></div></div>'
    )
