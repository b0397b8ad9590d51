"""The README's picture: Alice's weights over the rounds, and our errors beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from paper.cells import Cells, study_cells
from paper.figures import AGENTS, ALICE, styled
from paper.printed_table import SPLITS, TABLE, TITLES
from waffle_fl.claims.record_files import Part
from waffle_fl.report.charts import COLORS, inline
from waffle_fl.results import FinishedRun

SHOWN = ("local", "fedavg", "scaffold", "waffle-paper")
HEIGHT = 230


def overview(parts: Mapping[str, Part]) -> Any:
    """Return both panels, from the records of the MNIST study."""
    panels = alt.hconcat(_weights(parts["mnist"].all_runs), _errors(study_cells("mnist", parts)), spacing=34)
    return styled(panels.resolve_scale(color="independent", shape="independent"))


def _weights(runs: Sequence[FinishedRun]) -> Any:
    """Weight of each agent in Alice's model under WAFFLE on split C, first seed."""
    (run,) = [r for r in runs if r.config.method == "waffle-paper" and r.row == "C" and r.config.settings.seed == 1]
    agents = list(range(10))
    values = [
        {"round": line["round"], "agent": agent, "weight": round(weight, 4)}
        for line in run.rounds
        for agent, weight in enumerate(line["weights"])
    ]
    scale = alt.Scale(domain=agents, range=[ALICE, *AGENTS, *AGENTS[-2::-1]])
    legend = alt.Legend(
        orient="top", columns=5, labelExpr="datum.value == 0 ? 'Alice' : datum.value", title="agent", titleOrient="left"
    )
    return (
        alt.Chart(inline(values), title="Who trains Alice's model (WAFFLE, split C)")
        .mark_line(strokeJoin="round")
        .encode(
            x=alt.X("round:Q", axis=alt.Axis(grid=False, tickCount=5)),
            y=alt.Y("weight:Q", scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("agent:N", scale=scale, sort=agents, legend=legend),
            strokeWidth=alt.condition("datum.agent == 0", alt.value(3), alt.value(1.5)),
        )
        .properties(width=330, height=HEIGHT)
    )


def _errors(cells: Cells) -> Any:
    """Error of Alice's model by split and method, ours filled and the paper's hollow, on a logarithmic scale."""
    values = []
    for split in SPLITS:
        for method in SHOWN:
            title = TITLES[method]
            ours, printed = 100 - 100 * cells[split, method].mean, 100 - TABLE["mnist"][split, method].mean
            values.append({"split": split, "method": title, "error": round(ours, 3), "source": "this software"})
            values.append({"split": split, "method": title, "error": round(printed, 3), "source": "the paper"})
    titles = [TITLES[method] for method in SHOWN]
    base = alt.Chart(inline(values), title="Error of Alice's model on her test data (MNIST)").encode(
        x=alt.X(
            "error:Q",
            title="error (%), logarithmic",
            scale=alt.Scale(type="log", domain=[0.1, 100]),
            axis=alt.Axis(values=[0.1, 0.3, 1, 3, 10, 30, 100], format="~g"),
        ),
        y=alt.Y("split:N", sort=list(SPLITS), title="split", axis=alt.Axis(grid=True)),
        yOffset=alt.YOffset("method:N", sort=titles),
        color=alt.Color(
            "method:N",
            sort=titles,
            scale=alt.Scale(domain=titles, range=[COLORS[title] for title in titles]),
            legend=alt.Legend(orient="top", title=None),
        ),
    )
    shape = alt.Shape(
        "source:N",
        sort=["this software", "the paper"],
        scale=alt.Scale(domain=["this software", "the paper"], range=["circle", "diamond"]),
        legend=alt.Legend(orient="top", title=None),
    )
    ours = base.transform_filter("datum.source == 'this software'").mark_point(size=70, filled=True, opacity=1)
    paper = base.transform_filter("datum.source == 'the paper'").mark_point(size=70, filled=False, strokeWidth=1.6)
    return alt.layer(ours.encode(shape=shape), paper.encode(shape=shape)).properties(width=360, height=HEIGHT)
