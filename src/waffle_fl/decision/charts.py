"""Vega-Lite specifications of the page's charts, each with an alternative text that gives the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from waffle_fl.algorithms import title_of
from waffle_fl.decision.bootstrap import Interval, Metric, in_percent
from waffle_fl.decision.study import ALONE, Decision, View, gainers, mean_over, phases
from waffle_fl.decision.verdict_text import METRIC_TITLES, difference, number
from waffle_fl.report.charts import colors_of

WIDTH, STEP = 600, 36
OUTCOMES = {1: ("gains", "#2f7d4f", "triangle-right"), 0: ("no clear difference", "#7a7f8a", "circle"),
            -1: ("loses", "#c23b4e", "triangle-left")}  # fmt: skip
PALETTE = ("#4c78a8", "#e4a11b", "#72b7b2", "#6a51a3", "#3a7d44", "#b07aa1", "#9c755f", "#bab0ac", "#59a14f", "#86bcb6")
OWN = "#d1495b"


def methods_chart(view: View, metric: Metric) -> dict[str, Any]:
    """Return a chart with one line per method: its score and interval on this agent's test data."""
    lines: list[dict[str, Any]] = []
    for method, standing in view.standings.items():
        found = standing.scores[metric]
        lines.append({"method": title_of(method), **_scaled(found, metric), "text": number(found.value, metric)})
    order = [line["method"] for line in lines]
    colors = alt.Scale(domain=order, range=colors_of(order))
    base = alt.Chart(alt.InlineData(values=lines)).encode(
        y=alt.Y("method:N", sort=order, title=None, axis=_names()),
        color=alt.Color("method:N", scale=colors, legend=None),
    )
    x = alt.X("value:Q", title=_axis(metric), scale=alt.Scale(zero=False, padding=14), axis=alt.Axis(tickCount=6))
    alone = alt.Chart(alt.InlineData(values=[line for line in lines if line["method"] == title_of(ALONE)]))
    layers = [
        alone.mark_rule(strokeDash=[4, 4], color="#9aa0aa").encode(x="value:Q"),
        base.mark_rule(strokeWidth=3, opacity=0.55).encode(x=alt.X("low:Q", title=_axis(metric)), x2="high:Q"),
        base.mark_point(size=150, filled=True, opacity=1).encode(x=x),
        base.mark_text(dy=-13, fontSize=14, fontWeight="bold").encode(x=x, text="text:N"),
    ]
    values = "; ".join(f"{line['method']} {line['text']}" for line in lines)
    return _finished(
        alt.layer(*layers), len(lines), f"{METRIC_TITLES[metric]} of each method for {view.name}: {values}", 46
    )


def gains_chart(decision: Decision, method: str) -> dict[str, Any]:
    """Return a chart with one line per agent, the largest gain first."""
    found = {view.name: gain for view, gain in gainers(decision.views, method, decision.metric)}
    title = f"Gain with {title_of(method)} over training alone"
    return _gains(found, decision.metric, title, ("gains", "no clear difference", "loses"))


def partners_chart(view: View, metric: Metric) -> dict[str, Any]:
    """Return a chart with one line per partner: the gain from its participation."""
    found = dict(sorted(view.partners.items(), key=lambda item: -item[1].value))
    title = f"Gain of {view.name} from each partner"
    return _gains(found, metric, title, ("helps", "no clear difference", "hurts"))


def _gains(found: Mapping[str, Interval], metric: Metric, title: str, labels: Sequence[str]) -> dict[str, Any]:
    words = dict(zip((1, 0, -1), labels, strict=True))
    lines = [{"agent": name, **_scaled(gain, metric), "outcome": words[gain.sign]} for name, gain in found.items()]
    shown = [sign for sign in (1, 0, -1) if any(gain.sign == sign for gain in found.values())]
    domain = [words[sign] for sign in shown]
    color = alt.Color(
        "outcome:N",
        scale=alt.Scale(domain=domain, range=[OUTCOMES[s][1] for s in shown]),
        legend=alt.Legend(orient="top", title=None),
    )
    shape = alt.Shape("outcome:N", scale=alt.Scale(domain=domain, range=[OUTCOMES[s][2] for s in shown]), title=None)
    base = alt.Chart(alt.InlineData(values=lines)).encode(
        y=alt.Y("agent:N", sort=list(found), title=None, axis=_names()), color=color
    )
    unit = "points" if in_percent(metric) else METRIC_TITLES[metric]
    x_title = f"worse  ◂  {unit}  ▸  better"
    x = alt.X("value:Q", title=x_title, scale=alt.Scale(padding=14), axis=alt.Axis(tickCount=8))
    zero = alt.Chart(alt.InlineData(values=[{"zero": 0}])).mark_rule(color="#1f2430").encode(x="zero:Q")
    layers = [
        zero,
        base.mark_rule(strokeWidth=3, opacity=0.55).encode(x=alt.X("low:Q", title=x_title), x2="high:Q"),
        base.mark_point(size=150, filled=True, opacity=1).encode(x=x, shape=shape),
    ]
    values = "; ".join(f"{name} {difference(gain, metric)}" for name, gain in found.items())
    return _finished(alt.layer(*layers), len(lines), f"{title}: {values}", STEP)


def sources_chart(view: View, decision: Decision, method: str) -> dict[str, Any]:
    """Return a chart of the agents' shares in the updates of this agent's model, per phase of rounds."""
    rounds, own = view.update_weights[method], decision.names.index(view.name)
    others = [i for i in range(len(decision.names)) if i != own]
    order = [decision.names[i] for i in (own, *others)]
    values = []
    for part in phases(len(rounds)):
        shares, top = mean_over(rounds, part), 0.0
        for i in (own, *others):
            low, top = top, top + shares[i]
            bounds = {"first": part.start + 0.5, "last": part.stop + 0.5, "low": round(low, 4), "high": round(top, 4)}
            values.append({**bounds, "agent": decision.names[i], "share": round(shares[i], 4)})
    colors = [OWN, *(PALETTE[k % len(PALETTE)] for k in range(len(others)))]
    scale = alt.Scale(domain=[0.5, len(rounds) + 0.5], nice=False)
    chart = (
        alt.Chart(alt.InlineData(values=values))
        .mark_rect(stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X("first:Q", title="round", scale=scale, axis=alt.Axis(grid=False, tickMinStep=1)),
            x2="last:Q",
            y=alt.Y("low:Q", title="share", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", tickCount=5)),
            y2="high:Q",
            color=alt.Color(
                "agent:N",
                sort=order,
                scale=alt.Scale(domain=order, range=colors),
                legend=alt.Legend(title=None, orient="right", symbolType="square", symbolStrokeWidth=0),
            ),
            tooltip=["agent:N", alt.Tooltip("share:Q", format=".1%")],
        )
    )
    shares = mean_over(rounds)
    listed = "; ".join(f"{decision.names[i]} {100 * shares[i]:.0f} %" for i in (own, *others))
    about = f"Shares of the updates in {view.name}'s {title_of(method)} model, mean over all rounds: {listed}"
    return _styled(chart.properties(width=WIDTH, height=240, description=about))


def _scaled(found: Interval, metric: Metric) -> dict[str, float]:
    scale = 100 if in_percent(metric) else 1
    return {key: round(scale * value, 5) for key, value in found._asdict().items()}


def _axis(metric: Metric) -> str:
    unit = " in percent" if in_percent(metric) else ""
    return f"{METRIC_TITLES[metric]}{unit}, with 95 % interval"


def _names() -> alt.Axis:
    return alt.Axis(labelLimit=260, labelFontSize=15, domain=False, ticks=False, labelPadding=12)


def _finished(chart: Any, lines: int, about: str, step: int) -> dict[str, Any]:
    return _styled(chart.properties(width=WIDTH, height=max(2, lines) * step, description=about))


def _styled(chart: Any) -> dict[str, Any]:
    grey = {"gridColor": "#ececf0", "domainColor": "#c5c8cf", "tickColor": "#c5c8cf"}
    text = {"labelColor": "#1f2430", "titleColor": "#4a5162", "labelFontSize": 14, "titleFontSize": 14}
    done = (
        chart.configure(font="Inter, Helvetica, Arial, sans-serif", background="white")
        .configure_view(strokeWidth=0)
        .configure_axis(**grey, **text, titleFontWeight="normal", titlePadding=10)
        .configure_legend(labelFontSize=14, labelColor="#1f2430", symbolSize=130, labelLimit=240)
    )
    return dict(done.to_dict())
