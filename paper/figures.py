"""The paper's figures, each drawn from committed records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import floor
from statistics import mean, stdev
from typing import Any

import altair as alt

from paper.printed_table import TITLES
from waffle_fl.report.charts import COLORS, inline
from waffle_fl.results import FinishedRun, methods_of, rows_of

INK, SOFT = "#333333", "#e6e6e6"
FONT = "Helvetica, Arial, sans-serif"
AGENTS = ("#4c78a8", "#3a7d44", "#e4a11b", "#6a51a3", "#8c8c8c")  # by distance from Alice on the ring
ALICE = "#d1495b"
ARMS = {"without": "without size penalty: p_s = 0, p_d = 0.04", "with": "with size penalty: p_s = 2, p_d = 0.005"}


def styled(chart: Any) -> Any:
    """Return the chart with the style that all figures share."""
    axis = {"gridColor": SOFT, "domainColor": "#999999", "tickColor": "#999999", "labelColor": INK, "titleColor": INK}
    return (
        chart.configure(font=FONT, background="white", padding=8)
        .configure_view(stroke=None)
        .configure_axis(labelFontSize=11, titleFontSize=12, titleFontWeight="normal", **axis)
        .configure_title(fontSize=13, anchor="start", color=INK, offset=6)
        .configure_legend(labelFontSize=12, labelColor=INK, titleFontSize=12, titleColor=INK, symbolStrokeWidth=3)
        .configure_header(labelFontSize=12, labelColor=INK, title=None)
    )


def best_so_far(run: FinishedRun) -> list[float]:
    """Return the best accuracy up to each round, which is what the paper draws."""
    return list(accumulate((line["accuracy"] for line in run.rounds), max))


def _method_color(methods: Sequence[str]) -> Any:
    titles = [TITLES[method] for method in methods]
    scale = alt.Scale(domain=titles, range=[COLORS[title] for title in titles])
    return alt.Color(
        "method:N", scale=scale, sort=titles, title=None, legend=alt.Legend(orient="top", columns=7, symbolOpacity=1)
    )


def accuracy(runs: Sequence[FinishedRun]) -> Any:
    """Draw the best accuracy so far, mean and standard deviation over seeds: one panel per split."""
    methods = methods_of(runs)
    return styled(alt.concat(*(_accuracy_panel(runs, row, methods) for row in rows_of(runs)), columns=3, spacing=24))


def _accuracy_panel(runs: Sequence[FinishedRun], row: str, methods: Sequence[str]) -> Any:
    curves: dict[str, list[list[float]]] = {}
    for run in runs:
        if run.row == row and run.rounds:
            curves.setdefault(run.title, []).append(best_so_far(run))
    values = [
        {"method": title, "round": r + 1, **_mean_and_band(at_r)}
        for title, group in curves.items()
        for r, at_r in enumerate(zip(*group, strict=False))
    ]
    ends = [100 * mean(curve[-1] for curve in group) for group in curves.values()]
    spread = max(ends) - min(ends)
    tick = 5 if spread > 5 else 1
    low = 0 if spread > 25 else tick * floor((min(ends) - max(4, spread)) / tick)
    scale, color = alt.Scale(domain=[low, 100], nice=False), _method_color(methods)
    x = alt.X("round:Q", title="round", axis=alt.Axis(grid=False, tickCount=5))
    base = alt.Chart(inline(values), title=row).encode(x=x, color=color)
    some = "datum.round % 3 == 1"  # a band needs fewer points than a line, and the file stays small
    band = base.transform_filter(some).mark_area(opacity=0.15, clip=True)
    band = band.encode(y=alt.Y("low:Q", scale=scale, title=""), y2="high:Q")
    line = base.mark_line(strokeWidth=1.8, clip=True, strokeJoin="round").encode(
        y=alt.Y("accuracy:Q", title="accuracy (%)", scale=scale)
    )
    return alt.layer(band, line).properties(width=225, height=170)


def _mean_and_band(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of some accuracies in percent, and one standard deviation on either side of it."""
    centre, spread = 100 * mean(values), 100 * stdev(values) if len(values) > 1 else 0.0
    return {"accuracy": round(centre, 3), "low": round(centre - spread, 3), "high": round(centre + spread, 3)}


def weights(runs: Sequence[FinishedRun]) -> Any:
    """Draw the weights of all agents under WE and WAFFLE, for one seed and one split.

    Agents i and -i share equally many labels with Alice, so they have one colour, and one of them is dashed.
    """
    values = [
        {"method": run.title, "round": line["round"], "agent": i, "weight": round(weight, 4)}
        for run in runs
        for line in run.rounds
        for i, weight in enumerate(line["weights"])
    ]
    agents = list(range(10))
    scale = alt.Scale(domain=agents, range=[ALICE, *AGENTS, *AGENTS[-2::-1]])
    dashes = alt.Scale(domain=agents, range=[[1, 0]] * 6 + [[4, 3]] * 4)
    names = "datum.value == 0 ? 'Alice' : datum.value"
    legend = alt.Legend(orient="top", columns=10, labelExpr=names, title="agent", titleOrient="left")
    panels = [
        alt.Chart(inline([v for v in values if v["method"] == title]), title=title)
        .mark_line(strokeJoin="round")
        .encode(
            x=alt.X("round:Q", title="round", axis=alt.Axis(grid=False, tickCount=5)),
            y=alt.Y("weight:Q", title="weight", scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("agent:N", scale=scale, sort=agents, legend=legend),
            strokeDash=alt.StrokeDash("agent:N", scale=dashes, sort=agents, legend=legend),
            strokeWidth=alt.condition("datum.agent == 0", alt.value(3), alt.value(1.5)),
        )
        .properties(width=330, height=210)
        for title in ("WE", "WAFFLE")
        if any(value["method"] == title for value in values)
    ]
    return styled(alt.hconcat(*panels, spacing=24))


def labels(runs: Sequence[FinishedRun]) -> Any:
    """Draw the samples per agent and label, one panel per split; on A* and B* with each agent's label names."""
    rows = rows_of(runs)
    counts = {run.row: run.provenance["label_counts"] for run in runs}
    most = max(n for matrix in counts.values() for line in matrix for n in line)
    legend = alt.Legend(
        orient="top", values=[round(most * part, -2) for part in (0.25, 0.5, 1.0)], title="samples", titleOrient="left"
    )
    axis = alt.Axis(labelAngle=0, grid=True, ticks=False, domain=False)
    panels = [
        alt.Chart(
            inline(
                [
                    {"agent": i, "label": k, "samples": n}
                    for i, line in enumerate(counts[row])
                    for k, n in enumerate(line)
                    if n
                ]
            ),
            title=row,
        )
        .mark_circle(opacity=1, color=AGENTS[0])
        .encode(
            x=alt.X("label:O", title="label", axis=axis),
            y=alt.Y("agent:O", title="agent" if row == rows[0] else None, axis=axis),
            size=alt.Size("samples:Q", scale=alt.Scale(domain=[0, most], range=[0, 130]), legend=legend),
        )
        .properties(width=130, height=130)
        for row in rows
    ]
    return styled(alt.hconcat(*panels, spacing=14))


def omega(runs: Sequence[FinishedRun]) -> Any:
    """Draw Ω, the degree of personalisation, of the first WAFFLE run."""
    run = next(run for run in runs if run.config.method == "waffle-paper")
    values = [{"round": line["round"], "omega": line["omega"]} for line in run.rounds]
    return styled(
        alt.Chart(inline(values))
        .mark_line(color=ALICE, strokeWidth=2.5)
        .encode(
            x=alt.X("round:Q", title="round r", axis=alt.Axis(grid=False, tickCount=5)),
            y=alt.Y("omega:Q", title="Ω(r)", scale=alt.Scale(domain=[0, 1])),
        )
        .properties(width=340, height=190)
    )


def sizes(runs: Mapping[str, Sequence[FinishedRun]]) -> Any:
    """Draw the appendix experiment: accuracy with and without the size penalty, one panel per labels and sizes."""
    values = []
    for name, group in runs.items():
        size, arm = name.rpartition("/")[2].split("-")
        for row in rows_of(group):
            curves = [best_so_far(run) for run in group if run.row == row]
            values += [
                {"labels": f"labels {row}", "sizes": f"sizes {size}", "round": r + 1, "arm": ARMS[arm],
                 **_mean_and_band(at_r)}
                for r, at_r in enumerate(zip(*curves, strict=False))
            ]  # fmt: skip
    color = alt.Color(
        "arm:N",
        scale=alt.Scale(domain=list(ARMS.values()), range=[AGENTS[0], ALICE]),
        title=None,
        legend=alt.Legend(orient="top", labelLimit=400, symbolOpacity=1),
    )
    x = alt.X("round:Q", title="round", axis=alt.Axis(grid=False, tickCount=4))
    base = alt.Chart(inline(values)).encode(x=x, color=color)
    y_scale = alt.Scale(domain=[floor(min(v["accuracy"] for v in values if v["round"] > 3)), 100], nice=False)
    band = base.mark_area(opacity=0.18, clip=True).encode(y=alt.Y("low:Q", scale=y_scale), y2="high:Q", color=color)
    line = base.mark_line(strokeWidth=1.8, clip=True).encode(y=alt.Y("accuracy:Q", title="accuracy (%)", scale=y_scale))
    panels = alt.layer(band, line).properties(width=215, height=150)
    return styled(
        panels.facet(row=alt.Row("labels:N", title=None), column=alt.Column("sizes:N", title=None), spacing=18)
    )


def drift(record: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the path of the server's model and three rounds of local steps: one panel per method."""
    return styled(alt.hconcat(*(_drift_panel(line) for line in record), spacing=20))


def _drift_panel(line: Mapping[str, Any]) -> Any:
    names = line["agents"]
    scale = alt.Scale(domain=["server", *names], range=[INK, ALICE, AGENTS[0], AGENTS[2]])
    legend = alt.Legend(orient="top", symbolOpacity=1, symbolType="circle")
    color = alt.Color("owner:N", scale=scale, sort=["server", *names], title=None, legend=legend)
    x = alt.X("x:Q", title=None, scale=alt.Scale(domain=[-2, 5], nice=False), axis=alt.Axis(tickCount=4))
    y = alt.Y("y:Q", title=None, scale=alt.Scale(domain=[-1.5, 4.5], nice=False), axis=alt.Axis(tickCount=4))

    def chart(values: Sequence[Mapping[str, Any]]) -> Any:
        return alt.Chart(inline(list(values))).encode(x=x, y=y, color=color)

    local = [
        {"owner": names[i], "path": f"{r}-{i}", "k": k, "x": point[0], "y": point[1]}
        for r, paths in enumerate(line["local"])
        for i, path in enumerate(paths)
        for k, point in enumerate(path)
    ]
    server = [{"owner": "server", "k": r, "x": p[0], "y": p[1]} for r, p in enumerate(line["server"])]
    optima = [{"owner": n, "x": p[0], "y": p[1]} for n, p in zip(names, line["optima"], strict=True)]
    common = line["common_optimum"]
    return alt.layer(
        chart(local).mark_line(strokeWidth=1.2, opacity=0.8).encode(order="k:Q", detail="path:N"),
        chart(local).mark_circle(size=9, opacity=0.8),
        chart(server).mark_line(strokeWidth=2.2).encode(order="k:Q"),
        chart(server).mark_circle(size=26, opacity=1),
        chart(optima).mark_point(shape="cross", filled=True, size=90, opacity=1),
        chart([{"owner": "server", "x": common[0], "y": common[1]}]).mark_point(
            shape="diamond", size=110, strokeWidth=2
        ),
    ).properties(width=225, height=193, title=TITLES[line["method"]])


def quadratics(record: Sequence[Mapping[str, Any]]) -> Any:
    """Draw rates by step size, computed (lines) and measured (points), and the distances to a new optimum by round."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for line in record:
        panels.setdefault(line["panel"], []).append(line)
    return styled(alt.hconcat(*(_quadratics_panel(*panel) for panel in panels.items()), spacing=20)).resolve_scale(
        color="independent"
    )


def _quadratics_panel(title: str, lines: Sequence[Mapping[str, Any]]) -> Any:
    labels = [line["label"] for line in lines]
    scale = alt.Scale(domain=labels, range=[AGENTS[0], ALICE, AGENTS[2]][: len(labels)])
    color = alt.Color("label:N", scale=scale, sort=labels, title=None, legend=alt.Legend(orient="bottom", columns=2))

    def chart(values: Sequence[Mapping[str, Any]], x: alt.X, y: alt.Y) -> Any:
        return alt.Chart(inline(list(values))).encode(x=x, y=y, color=color)

    def points(along: str, values: str) -> list[dict[str, Any]]:
        return [
            {"label": line["label"], "x": x, "y": y}
            for line in lines
            for x, y in zip(line.get(along, range(1, len(line[values]) + 1)), line[values], strict=True)
        ]

    if "distances" in lines[0]:
        x = alt.X("x:Q", title="round", axis=alt.Axis(grid=False, tickCount=5))
        y = alt.Y("y:Q", title="distance", scale=alt.Scale(type="log"), axis=alt.Axis(format=".0e", tickCount=5))
        drawn = chart(points("round", "distances"), x, y).mark_line(strokeWidth=1.8)
    else:
        x = alt.X("x:Q", title="lr L", axis=alt.Axis(grid=False, tickCount=5))
        y = alt.Y("y:Q", title="factor per round", scale=alt.Scale(domain=[0, 2], nice=False))
        edge = alt.Chart(inline([{"y": 1}])).mark_rule(strokeDash=[4, 3], color=INK).encode(y="y:Q")
        computed = chart(points("lr", "radius"), x, y).mark_line(strokeWidth=1.8, clip=True)
        measured = chart(points("tried", "measured"), x, y).mark_circle(size=36, opacity=1, clip=True)
        drawn = alt.layer(edge, computed, measured)
    return drawn.properties(width=215, height=180, title=title)
