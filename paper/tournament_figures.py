"""The figures of a tournament: gaps, ranks, and points over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import altair as alt

from paper.figures import INK, styled
from waffle_fl.report.charts import inline
from waffle_fl.tournament.plan import Tournament
from waffle_fl.tournament.record import Line
from waffle_fl.tournament.standings import MethodStanding, Scores, critical_difference

CURVES = 8  # methods with curves, the first of the standings


def gaps(tournament: Tournament, order: Sequence[MethodStanding]) -> Any:
    """Draw the mean gap of every method."""
    values = [
        {
            "method": tournament.title(s.method),
            "gap": s.gap,
            "ours": tournament.entry(s.method).method.startswith("waffle"),
        }
        for s in order
    ]
    titles = [value["method"] for value in values]
    colour = alt.condition("datum.ours", alt.value("#d1495b"), alt.value("#4c78a8"))
    bars = (
        alt.Chart(inline(values), width=300, height=18 * len(values), title="Points behind the best method")
        .mark_bar()
        .encode(
            x=alt.X("gap:Q", title=None, scale=alt.Scale(type="symlog", constant=1)),
            y=alt.Y("method:N", sort=titles, title=None),
            color=colour,
        )
    )
    text = bars.mark_text(align="left", dx=3, color=INK).encode(
        text=alt.Text("gap:Q", format=".2f"), color=alt.value(INK)
    )
    return styled(bars + text)


def ranks(tournament: Tournament, order: Sequence[MethodStanding]) -> Any:
    """Draw the mean rank of every method, and the critical difference from the first."""
    by_rank = sorted(order, key=lambda s: s.rank)
    distance = critical_difference(len(order), order[0].columns)
    limit = by_rank[0].rank + distance
    values = [
        {"method": tournament.title(s.method), "rank": s.rank, "near": s.rank <= limit, "end": min(limit, 99)}
        for s in by_rank
    ]
    titles = [value["method"] for value in values]
    base = alt.Chart(inline(values), width=300, height=18 * len(values), title="Mean rank, and the critical difference")
    y = alt.Y("method:N", sort=titles, title=None)
    colour = alt.condition("datum.near", alt.value("#3a7d44"), alt.value("#8c8c8c"))
    points = base.mark_circle(size=70, opacity=1).encode(
        x=alt.X("rank:Q", title=None, scale=alt.Scale(zero=False)), y=y, color=colour
    )
    line = base.mark_rule(strokeDash=[4, 3], color=INK).encode(x="mean(end):Q")
    return styled(line + points)


def curves(
    tournament: Tournament, records: Mapping[str, Sequence[Line]], scores: Scores, order: Sequence[MethodStanding]
) -> Any:
    """Draw the mean points over the rounds of the first methods."""
    shown = [s.method for s in order[:CURVES]]
    values = []
    for method in shown:
        points = [
            line["curve"]
            for data, lines in records.items()
            for line in lines
            if line["stage"] == "table" and line["method"] == method and (data, line["column"]) in scores.columns
            if None not in line["curve"]
        ]
        means = [fmean(values) for values in zip(*points, strict=True)]
        values += [
            {"method": tournament.title(method), "round": 10 * (k + 1), "points": v} for k, v in enumerate(means)
        ]
    titles = [tournament.title(method) for method in shown]
    chart = (
        alt.Chart(inline(values), width=560, height=260)
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("round:Q", title="percent of the rounds"),
            y=alt.Y("points:Q", title="points", scale=alt.Scale(zero=False)),
            color=alt.Color("method:N", sort=titles, title=None),
        )
    )
    return styled(chart)
