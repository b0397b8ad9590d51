"""Vega-Lite charts, made from records only; the page, PNG and PDF use the same specification."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from statistics import mean
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from waffle_fl.algorithms import TITLES, title_of
from waffle_fl.algorithms.schedules import evaluate, sigmoid
from waffle_fl.results import WEIGHING, FinishedRun, measure_of_runs, methods_of, row_of, rows_of

CHOSEN = {
    "Local": "#8c8c8c",
    "FedAvg": "#4c78a8",
    "SCAFFOLD": "#72b7b2",
    "WE": "#e4a11b",
    "WAFFLE": "#d1495b",
    "APFL": "#6a51a3",
    "Ditto": "#3a7d44",
}
FURTHER = (
    *("#9ecae9", "#f58518", "#b279a2", "#54a24b", "#ff9da6", "#9d755d", "#79706e"),
    *("#1f4e79", "#c9b458", "#008b8b", "#a0522d", "#88d27a", "#d67195"),
)
COLORS = {
    **dict(zip((title for title in TITLES.values() if title not in CHOSEN), cycle(FURTHER), strict=False)),
    **CHOSEN,
}
WIDTH, HEIGHT = 285, 200
MOST_ROWS = 40  # maximum number of table rows in a chart


def inline(values: Sequence[Mapping[str, Any]]) -> alt.InlineData:
    """Return the data of a chart. Altair would validate every value, which takes seconds for a large chart."""
    with debug_mode(False):
        return alt.InlineData(values=values)


def specification(chart: Any) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart, without a second validation of all its parts and values."""
    return chart.to_dict(validate=False)  # type: ignore[no-any-return]


def to_svg(chart: Any) -> str:
    """Return the chart as SVG. Clip paths are renumbered from 0, so the text depends on this chart only."""
    import vl_convert

    svg = str(vl_convert.vegalite_to_svg(chart.to_json(validate=False)))
    numbers = {name: f"clip{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"\bclip\d+\b", svg)))}
    return re.sub(r"\bclip\d+\b", lambda match: numbers[match[0]], svg)


def colors_of(titles: Sequence[str]) -> list[str]:
    """Return a colour per title; methods from outside the package get the remaining colours in turn."""
    others = [title for title in titles if title not in COLORS]
    known = {**COLORS, **dict(zip(others, cycle(reversed(FURTHER)), strict=False))}
    return [known[title] for title in titles]


def charts_of(runs: Sequence[FinishedRun]) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """Return name -> (caption, chart) for every chart these runs have data for, with at most MOST_ROWS rows."""
    rows = rows_of(runs)
    if len(rows) > MOST_ROWS:
        first = charts_of([run for run in runs if run.row in rows[:MOST_ROWS]])
        note = f"; the first {MOST_ROWS} of {len(rows)} rows"
        return {name: (caption + note, chart) for name, (caption, chart) in first.items()}
    measure = measure_of_runs(runs)
    makers: dict[str, tuple[str, Callable[[Sequence[FinishedRun]], Any]]] = {
        measure.key: (f"{measure.title} of Alice's model on her own test data, mean over seeds", accuracy),
        "weights": ("Weight of each agent's update in Alice's model per round (first seed)", weights),
        "labels": ("Training samples per agent and label", labels),
        "omega": ("Degree of personalisation Ω over the rounds: 1 is global, 0 is local training", omega),
    }
    made = {name: (caption, maker(runs)) for name, (caption, maker) in makers.items()}
    return {name: (caption, chart) for name, (caption, chart) in made.items() if chart is not None}


def _color(runs: Sequence[FinishedRun]) -> Any:
    titles = [title_of(m) for m in methods_of(runs)]
    scale = alt.Scale(domain=titles, range=colors_of(titles))
    return alt.Color(
        "method:N", scale=scale, title=None, sort=titles, legend=alt.Legend(orient="top", symbolStrokeWidth=3)
    )


def styled(chart: Any) -> Any:
    """Return the chart with the common style."""
    return (
        chart.configure(font="Inter, Helvetica, Arial, sans-serif")
        .configure_view(strokeWidth=0)
        .configure_axis(gridColor="#ececec", domainColor="#bbb", tickColor="#bbb", labelColor="#444", titleColor="#444")
        .configure_header(labelFontSize=13, labelFontWeight="bold", title=None)
    )


def accuracy(runs: Sequence[FinishedRun]) -> Any:
    """Return a chart of the score per round: one panel per split, one line per method."""
    measure = measure_of_runs(runs)
    groups: dict[tuple[str, str], list[FinishedRun]] = {}
    for run in runs:
        if run.rounds:
            groups.setdefault((run.row, run.title), []).append(run)
    values = []
    for (row, title), group in groups.items():
        for lines in zip(*(run.rounds for run in group), strict=False):
            known = [line[measure.key] for line in lines if line.get(measure.key) is not None]
            if known:
                value = float(f"{measure.scale * mean(known):.5g}")
                values.append({"split": row, "method": title, "round": lines[0]["round"], measure.key: value})
    if not values:
        return None
    hover = alt.selection_point(fields=["method"], bind="legend")
    line = (
        alt.Chart(inline(values))
        .mark_line(strokeWidth=1.8, clip=True)
        .encode(
            x=alt.X("round:Q", title="round", axis=alt.Axis(grid=False)),
            y=alt.Y(f"{measure.key}:Q", title=measure.title.lower(), scale=alt.Scale(zero=False)),
            color=_color(runs),
            opacity=alt.condition(hover, alt.value(1.0), alt.value(0.12)),
            tooltip=["method:N", "split:N", "round:Q", alt.Tooltip(f"{measure.key}:Q", format=".4~g")],
        )
        .properties(width=WIDTH, height=HEIGHT)
        .add_params(hover)
    )
    panels = line.facet(facet=alt.Facet("split:N", sort=rows_of(runs), title=None), columns=3)
    return styled(panels.resolve_scale(x="independent", y="independent"))


def weights(runs: Sequence[FinishedRun]) -> Any:
    """Return a chart of the weights: one panel per split and weighing method, with Alice highlighted."""
    weighing = [run for run in runs if run.config.method in WEIGHING and run.rounds and "weights" in run.rounds[0]]
    first: dict[tuple[str, str], FinishedRun] = {}
    for run in sorted(weighing, key=lambda run: run.config.settings.seed):
        first.setdefault((run.row, run.title), run)
    values = []
    for (row, title), run in first.items():
        alice = int(run.provenance.get("alice", 0))
        names = run.provenance.get("agents") or [f"agent {i}" for i in range(len(run.rounds[0]["weights"]))]
        for line in run.rounds:
            for i, weight in enumerate(line["weights"]):
                agent = f"{names[i]} (Alice)" if i == alice else names[i]
                values.append(
                    {"split": row, "method": title, "round": line["round"], "agent": agent, "weight": round(weight, 5),
                     "alice": i == alice}
                )  # fmt: skip
    if not values:
        return None
    others = sorted({v["agent"] for v in values if not v["alice"]})
    alices = sorted({v["agent"] for v in values if v["alice"]})
    palette = [
        "#4c78a8",
        "#72b7b2",
        "#e4a11b",
        "#6a51a3",
        "#3a7d44",
        "#b07aa1",
        "#9c755f",
        "#bab0ac",
        "#59a14f",
        "#86bcb6",
    ]
    colors = [palette[i % len(palette)] for i in range(len(others))]
    scale = alt.Scale(domain=[*alices, *others], range=["#d1495b"] * len(alices) + colors)
    chart = (
        alt.Chart(inline(values))
        .mark_line(clip=True)
        .encode(
            x=alt.X("round:Q", title="round", axis=alt.Axis(grid=False)),
            y=alt.Y("weight:Q", title="weight", scale=alt.Scale(domain=[0, 1])),
            color=alt.Color(
                "agent:N",
                scale=scale,
                title=None,
                sort=[*alices, *others],
                legend=alt.Legend(orient="top", columns=10, symbolStrokeWidth=3),
            ),
            strokeWidth=alt.condition("datum.alice", alt.value(3), alt.value(1.3)),
            tooltip=["agent:N", "round:Q", alt.Tooltip("weight:Q", format=".3f")],
        )
        .properties(width=WIDTH * 0.62, height=HEIGHT * 0.8)
        .facet(
            column=alt.Column("split:N", sort=rows_of(weighing), title=None),
            row=alt.Row("method:N", sort=["WE", "WAFFLE"], title=None),
        )
    )
    return styled(chart)


def labels(runs: Sequence[FinishedRun]) -> Any:
    """Return a chart of agents against labels, one panel per split; the size of a dot is the number of samples."""
    found: dict[str, dict[str, list[list[int]]]] = {}  # by split, then by row
    for run in runs:
        counts: list[list[int]] = run.provenance.get("label_counts") or []
        if any(counts) and run.config.method != "local" and counts not in found.get(row_of(run.config), {}).values():
            found.setdefault(row_of(run.config), {}).setdefault(run.row, counts)
    shown = {row if len(rows) > 1 else split: counts for split, rows in found.items() for row, counts in rows.items()}
    return label_chart(shown) if shown else None


def label_chart(counts: dict[str, list[list[int]]]) -> Any:
    """Return the paper's repartition figure for any number of splits."""
    return styled(label_panels({row: counts[row] for row in sorted(counts, key=lambda row: (row.endswith("*"), row))}))


def label_panels(counts: dict[str, list[list[int]]]) -> Any:
    """Return the panels of `label_chart` without the style, for combination with other charts."""
    values = [
        {"split": row, "agent": i, "label": k, "samples": n}
        for row, matrix in counts.items()
        for i, line in enumerate(matrix)
        for k, n in enumerate(line)
        if n
    ]
    return (
        alt.Chart(inline(values))
        .mark_circle(opacity=0.9, color="#4c78a8")
        .encode(
            x=alt.X("label:O", title="label", axis=alt.Axis(labelAngle=0, grid=True)),
            y=alt.Y("agent:O", title="agent", axis=alt.Axis(grid=True)),
            size=alt.Size(
                "samples:Q", scale=alt.Scale(range=[8, 260]), title="samples", legend=alt.Legend(orient="top")
            ),
            tooltip=["agent:O", "label:O", "samples:Q"],
        )
        .properties(width=WIDTH * 0.62, height=WIDTH * 0.62)
        .facet(facet=alt.Facet("split:N", sort=list(counts), title=None), columns=5)
    )


def omega(runs: Sequence[FinishedRun]) -> Any:
    """Return a chart of Omega in the first WAFFLE run, or the paper's Omega if there is no such run."""
    first = next(
        (run for run in runs if run.config.method == "waffle-paper" and run.rounds and "omega" in run.rounds[0]), None
    )
    if first:
        values = [{"round": line["round"], "omega": line["omega"]} for line in first.rounds]
    else:
        values = [{"round": r, "omega": evaluate(sigmoid(), "omega", r, 100)} for r in range(1, 101)]
    chart = (
        alt.Chart(inline(values))
        .mark_line(color="#d1495b", strokeWidth=2.5)
        .encode(
            x=alt.X("round:Q", title="round r", axis=alt.Axis(grid=False)),
            y=alt.Y("omega:Q", title="Ω(r)", scale=alt.Scale(domain=[0, 1])),
            tooltip=["round:Q", alt.Tooltip("omega:Q", format=".3f")],
        )
        .properties(width=WIDTH * 1.4, height=HEIGHT)
    )
    return styled(chart)
