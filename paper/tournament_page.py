"""The generated part of docs/tournament.md and its figures, from the records of experiments/tournament.toml."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import altair as alt

from paper.figures import INK, styled
from paper.markdown import prose, table
from waffle_fl.claims.verdict import Verdict
from waffle_fl.report.charts import to_svg
from waffle_fl.tournament.checking import complete_scores, problems, read_claims, read_records, verdicts
from waffle_fl.tournament.cost import cost_of
from waffle_fl.tournament.plan import Tournament, load_tournament
from waffle_fl.tournament.record import Line, chosen_trial
from waffle_fl.tournament.standings import (
    MethodStanding,
    Scores,
    critical_difference,
    mean_loss,
    standings,
)

NAMES = ("tournament", "kin-ablation")  # files in experiments/, and their pages in docs/
CURVES = 8  # methods with curves, the first of the standings


def contents(root: Path) -> dict[Path, str]:
    """Return the pages and figures of all tournaments as the records give them."""
    return {path: text for name in NAMES for path, text in _contents(root, name).items()}


def _contents(root: Path, name: str) -> dict[Path, str]:
    file, page = root / "experiments" / f"{name}.toml", root / "docs" / f"{name}.md"
    tournament = load_tournament(file)
    records = read_records(tournament, root / "results")
    missing = problems(tournament, records)
    complete = complete_scores(tournament, records)
    order = standings(complete)
    made: dict[Path, str] = {}
    if order:
        folder = root / "docs" / "figures"
        made[folder / f"{name}-gaps.svg"] = to_svg(gaps(tournament, order))
        made[folder / f"{name}-ranks.svg"] = to_svg(ranks(tournament, order))
        made[folder / f"{name}-curves.svg"] = to_svg(curves(tournament, records, complete, order))
    claims = verdicts(read_claims(file), complete)
    text = "\n\n".join([*sections(tournament, records, complete, order, missing), "## Claims", claims_table(claims)])
    marker = re.compile(rf"(<!-- record: {name} -->\n).*?(<!-- end of record -->)", re.DOTALL)
    old = page.read_text(encoding="utf-8")
    return made | {page: marker.sub(lambda match: f"{match[1]}{text}\n{match[2]}", old)}


def claims_table(claims: Sequence[Verdict]) -> str:
    """Return one row per claim; the claims were written before the runs."""
    return table(["claim", "verdict", "numbers"], [[claim.claim, claim.word, claim.numbers] for claim in claims])


def sections(
    tournament: Tournament,
    records: Mapping[str, Sequence[Line]],
    scores: Scores,
    order: Sequence[MethodStanding],
    missing: Sequence[str],
) -> Iterator[str]:
    """Yield the sections of the page."""
    if missing:
        yield prose(
            f"**The record is not complete**: {len(missing)} data sets or pairs of data set and method are missing.",
            "Only columns that have all methods are used below.",
        )
    if not order:
        return
    yield counts(tournament, scores)
    yield from (f"![{tournament.name}-{kind}](figures/{tournament.name}-{kind}.svg)" for kind in ("gaps", "ranks"))
    yield caption(order)
    yield "## All methods"
    yield all_methods(tournament, records, scores, order)
    yield f"![{tournament.name}-curves](figures/{tournament.name}-curves.svg)"
    yield prose(
        f"Points on test data over the rounds (Landmine: accuracy), mean over all tasks, first {CURVES} methods."
    )
    yield "## Each data set"
    yield by_data(tournament, scores, order)
    yield "## What the tuning chose"
    yield choices(tournament, records, order)


def counts(tournament: Tournament, scores: Scores) -> str:
    """Return the number of tasks, partitions, Alices and seeds."""
    tasks = [next(iter(found.values())) for found in scores.columns.values()]
    data = len({name for name, _ in scores.columns})
    alices = sorted({len({alice for _, alice in some}) for some in tasks})
    span = f"{alices[0]} to {alices[-1]}" if len(alices) > 1 else f"{alices[0]}"
    return prose(
        f"**{sum(map(len, tasks)):,} tasks**: {len(scores.columns)} columns of {data} data sets,",
        f"{len(tournament.partitions)} partitions, {span} Alices per column, {len(tournament.seeds)} seeds per task,",
        f"{len(tournament.methods)} methods, each tuned with {_budget(tournament)} trials on another partition.",
    )


def _budget(tournament: Tournament) -> int:
    tasks = next(iter(tournament.data.values()))
    return len(tournament.trials(tournament.methods[0], tasks))


def caption(order: Sequence[MethodStanding]) -> str:
    """Return what the first two figures show."""
    distance = critical_difference(len(order), order[0].columns)
    return prose(
        "First: points behind the best method of each column, mean over the columns, in the round selected on",
        f"validation data. Second: mean ranks; methods closer than {distance:.1f} do not differ significantly",
        "(Nemenyi's test, level 0.05), marked for the first one.",
    )


def all_methods(
    tournament: Tournament,
    records: Mapping[str, Sequence[Line]],
    scores: Scores,
    order: Sequence[MethodStanding],
) -> str:
    """Return one row per method: gaps, shares, calibration and costs."""
    last = {standing.method: standing.gap for standing in standings(complete_scores(tournament, records, "last"))}
    lines = [
        line
        for data, some in records.items()
        for line in some
        if line["stage"] == "table" and (data, line["column"]) in scores.columns
    ]
    rows = []
    for s in order:
        loss, cost = mean_loss(lines, s.method), cost_of(tournament.entry(s.method).method)
        rows.append(
            [
                tournament.title(s.method),
                f"{s.gap:.2f}",
                f"{last.get(s.method, math.nan):.2f}",
                f"{s.largest:.1f}",
                f"{s.near} of {s.columns}",
                f"{s.worst:.2f}",
                f"{100 * s.gains:.0f} %",
                "–" if math.isnan(loss) else f"{loss:.3f}",
                f"{s.rank:.1f}",
                f"{cost.down:.1f} / {cost.up:.1f}",
                f"{cost.gradients:.0f}",
            ]
        )
    head = [
        *("", "gap", "gap, last round", "largest gap", "near the best", "worst tenth", "above Local", "log loss"),
        *("rank", "models down / up", "gradients"),
    ]
    notes = prose(
        "gap: points behind the best method of each column, mean over the columns; near the best: columns in which",
        "it is within one standard error (over tasks) of the best method; worst tenth: the same gap for the mean of",
        "the worst tenth of the tasks; above Local: share of the tasks; log loss: mean over the classifications;",
        "models down / up: sent per agent and round, as multiples of the model's size; gradients: per mini-batch.",
    )
    return f"{table(head, rows)}\n\n{notes}"


def by_data(tournament: Tournament, scores: Scores, order: Sequence[MethodStanding]) -> str:
    """Return the mean points of every method on each data set."""
    data = list(dict.fromkeys(name for name, _ in scores.columns))
    means = {
        (name, s.method): mean(mean(scores.columns[c][s.method].values()) for c in scores.columns if c[0] == name)
        for name in data
        for s in order
        if s.method in tournament.entries(name)
    }
    best = {name: max(value for (other, _), value in means.items() if other == name) for name in data}
    rows = [
        [tournament.title(s.method), *(_bold(means.get((name, s.method)), best[name]) for name in data)] for s in order
    ]
    columns = {name: sum(c[0] == name for c in scores.columns) for name in data}
    head = ["", *(f"{name} ({columns[name]})" for name in data)]
    note = prose("Mean points over the tasks; in brackets the number of columns.")
    return f"{table(head, rows)}\n\n{note}"


def _bold(value: float | None, best: float) -> str:
    if value is None:
        return "–"
    return f"**{value:.2f}**" if value == best else f"{value:.2f}"


def choices(tournament: Tournament, records: Mapping[str, Sequence[Line]], order: Sequence[MethodStanding]) -> str:
    """Return lr and the hyperparameter that was chosen per method and data set."""
    rows = []
    for s in order:
        row = [tournament.title(s.method), f"`{tournament.grid[s.method][0]}`"]
        for name, tasks in tournament.data.items():
            found = chosen_trial(tournament, tasks, s.method, records[name])
            row.append("–" if found is None else f"{found.lr:g}, {found.value}")
        rows.append(row)
    return table(["", "hyperparameter", *(f"{name}: lr, value" for name in tournament.data)], rows)


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
        alt.Chart(alt.Data(values=values), width=300, height=18 * len(values), title="Points behind the best method")
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
    base = alt.Chart(
        alt.Data(values=values), width=300, height=18 * len(values), title="Mean rank, and the critical difference"
    )
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
        found = [
            line["curve"]
            for data, lines in records.items()
            for line in lines
            if line["stage"] == "table" and line["method"] == method and (data, line["column"]) in scores.columns
            if None not in line["curve"]
        ]
        means = [mean(points) for points in zip(*found, strict=True)]
        values += [
            {"method": tournament.title(method), "round": 10 * (k + 1), "points": v} for k, v in enumerate(means)
        ]
    titles = [tournament.title(method) for method in shown]
    chart = (
        alt.Chart(alt.Data(values=values), width=560, height=260)
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("round:Q", title="percent of the rounds"),
            y=alt.Y("points:Q", title="points", scale=alt.Scale(zero=False)),
            color=alt.Color("method:N", sort=titles, title=None),
        )
    )
    return styled(chart)
