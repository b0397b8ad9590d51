"""The generated parts of docs/beyond.md, docs/beyond-tables.md and docs/kin-ablation.md, and their figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from paper.markdown import prose, table
from paper.tournament_figures import CURVES, curves, gaps, ranks
from waffle_fl.claims.verdict import Verdict
from waffle_fl.config.settings import options_of
from waffle_fl.report.charts import to_svg
from waffle_fl.tournament.checking import complete_scores, problems, read_claims, read_records, verdicts
from waffle_fl.tournament.cost import cost_of
from waffle_fl.tournament.plan import Tournament, load_tournament
from waffle_fl.tournament.record import Line, chosen_trial
from waffle_fl.tournament.standings import (
    Column,
    MethodStanding,
    Scores,
    TaskKey,
    critical_difference,
    mean_loss,
    standings,
)

PAGES = {  # file in experiments/ -> its pages in docs/: the summary, all tables, and a short table
    "tournament": ("beyond", "beyond-tables", "how-to/choose-a-method"),
    "tournament-participation": ("participation", "participation"),
    "kin-ablation": ("kin-ablation", "kin-ablation"),
}
TITLES = {
    "heart-disease": "Heart Disease",
    "landmine-whole": "Landmine",
    "school-whole": "School",
    "har-described": "HAR",
    "digit-domains-described": "Digit domains",
    "office-described": "Office",
}
SHORT = ("waffle", "weight-erosion", "waffle-model", "waffle-paper", "knn-per", "ditto", "fedper", "local", "fedavg")
KINDS = {  # kind of shift -> names of its shifts
    "labels and quantities": ("dirichlet", "quantity", "prior"),
    "features": ("rotate", "blur", "noise", "contrast", "colour", "scale"),
    "concepts": ("swap",),
    "drift": ("drift",),
}
MEGABYTES = 4 * 61_706 / 1e6  # of LeNet-5 in float32
FIGURES = ("gaps", "ranks", "curves")  # one file each


class Standings(NamedTuple):
    """A tournament, its records, and what follows from the columns that every method has."""

    tournament: Tournament
    records: Mapping[str, Sequence[Line]]
    scores: Scores
    order: Sequence[MethodStanding]
    claims: Sequence[Verdict]
    missing: Sequence[str]


def read_standings(root: Path, name: str) -> Standings:
    """Read the file and the records of a tournament."""
    file = root / "experiments" / f"{name}.toml"
    tournament = load_tournament(file)
    records = read_records(tournament, root / "results")
    scores = complete_scores(tournament, records)
    claims = verdicts(read_claims(file, tournament.methods), scores)
    return Standings(tournament, records, scores, standings(scores), claims, problems(tournament, records))


def contents(root: Path, found: Standings) -> dict[Path, str]:
    """Return the pages and figures of a tournament as its records give them."""
    name = found.tournament.name
    made: dict[Path, str] = {}
    if found.order:
        folder = root / "docs" / "figures"
        charts = gaps(found.tournament, found.order), ranks(found.tournament, found.order), curves(*found[:4])
        made = {folder / f"{name}-{kind}.svg": to_svg(chart) for kind, chart in zip(FIGURES, charts, strict=True)}
    texts: dict[str, list[str]] = {}
    for page, sections in zip(PAGES[name], (summary(found), tables(found), short(found)), strict=False):
        texts.setdefault(page, []).extend(sections)
    marker = re.compile(rf"(<!-- record: {name} -->\n).*?(<!-- end of record -->)", re.DOTALL)
    for page, lines in texts.items():
        path, text = root / "docs" / f"{page}.md", "\n\n".join(lines)
        old = path.read_text(encoding="utf-8")
        made[path] = marker.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", old)  # type: ignore[misc]
    return made


def claims_table(claims: Sequence[Verdict]) -> str:
    """Return one row per claim; the claims were written before the runs."""
    return table(["claim", "verdict", "numbers"], [[claim.claim, claim.word, claim.numbers] for claim in claims])


def summary(found: Standings) -> Iterator[str]:
    """Yield the sections of the first page: figures, claims, and one row per method."""
    if found.missing:
        yield prose(
            f"**The record is not complete**: {len(found.missing)} data sets or pairs of data set and method are",
            "missing. Only columns that have all methods are used below.",
        )
    if found.order:
        name = found.tournament.name
        yield counts(found.tournament, found.scores.columns)
        yield from (f"![{name}-{kind}](figures/{name}-{kind}.svg)" for kind in FIGURES[:2])
        yield caption(found.order)
    yield "## Claims"
    yield claims_table(found.claims)
    if found.order:
        yield "## All methods"
        yield counts(found.tournament, found.scores.columns)
        yield all_methods(found)
        yield f"![{name}-curves](figures/{name}-curves.svg)"
        yield prose(
            f"Points on test data over the rounds (Landmine: accuracy), mean over all tasks, first {CURVES} methods."
        )


def tables(found: Standings) -> Iterator[str]:
    """Yield the sections with all tables: each data set, each column, and the tuning."""
    if found.order:
        if len({data for data, _ in found.scores.columns}) > 1:
            yield "## Each data set"
            yield counts(found.tournament, found.scores.columns)
            yield by_data(found.tournament, found.scores, found.order)
        yield "## Each column"
        yield from by_column(found)
        yield "## What the tuning chose"
        yield trials(found.tournament)
        yield choices(found.tournament, found.records, found.order)


def short(found: Standings) -> Iterator[str]:
    """Yield a few rows of the table of all methods."""
    if not found.order:
        return
    tournament, _, scores, order = found[:4]
    yield counts(tournament, scores.columns)
    rows = [
        [tournament.title(s.method), f"{s.gap:.2f}", f"{s.largest:.1f}", f"{100 * s.gains:.0f} %"]
        for s in order
        if s.method in SHORT
    ]
    yield table(["method", "points behind the best, mean over the columns", "largest", "tasks above Local"], rows)


def counts(tournament: Tournament, columns: Mapping[Column, Mapping[str, Mapping[TaskKey, float]]]) -> str:
    """Return the number of tasks, partitions, Alices and seeds of some columns."""
    tasks = [next(iter(found.values())) for found in columns.values()]
    data = len({name for name, _ in columns})
    alices = sorted({len({alice for _, alice in some}) for some in tasks})
    span = f"{alices[0]} to {alices[-1]}" if len(alices) > 1 else f"{alices[0]}"
    methods = {method for found in columns.values() for method in found}
    return prose(
        f"**{sum(map(len, tasks)):,} tasks**: {_number(len(columns), 'column')} of {_number(data, 'data set')},",
        f"{_number(len(tournament.partitions), 'partition')}, {span} Alices per column,",
        f"{_number(len(tournament.seeds), 'seed')} per task, {_number(len(methods), 'method')}, each tuned with",
        f"{_budget(tournament)} trials on another partition.",
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _budget(tournament: Tournament) -> int:
    tasks = next(iter(tournament.data.values()))
    return len(tournament.trials(tournament.methods[0], tasks))


def trials(tournament: Tournament) -> str:
    """Return what the tuning is based on."""
    most = f"at most {tournament.tuning_alices}" if tournament.tuning_alices else "all"
    return prose(
        f"{_budget(tournament)} trials per method and data set, on"
        f" {_number(len(tournament.tuning_partitions), 'partition')} that no table has, with"
        f" {_number(len(tournament.tuning_seeds), 'seed')} and {most} Alices."
    )


def caption(order: Sequence[MethodStanding]) -> str:
    """Return what the first two figures show."""
    distance = critical_difference(len(order), order[0].columns)
    return prose(
        "First: points behind the best method of each column, mean over the columns, in the round selected on",
        f"validation data. Second: mean ranks; methods closer than {distance:.1f} do not differ significantly",
        "(Nemenyi's test, level 0.05), marked for the first one.",
    )


def all_methods(found: Standings) -> str:
    """Return one row per method: gaps, shares, calibration and costs."""
    tournament, records, scores, order = found[:4]
    last = {standing.method: standing.gap for standing in standings(complete_scores(tournament, records, "last"))}
    lines = [
        line
        for data, some in records.items()
        for line in some
        if line["stage"] == "table" and (data, line["column"]) in scores.columns
    ]
    rows = []
    for s in order:
        base, fixed = tournament.entry(s.method)
        options = {name: value for name, value in fixed.items() if name in options_of(base)}
        loss, cost = mean_loss(lines, s.method), cost_of(base, options)
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
                f"{MEGABYTES * cost.down:.2f} / {MEGABYTES * cost.up:.2f}",
                f"{cost.gradients:.0f}",
            ]
        )
    head = [
        *("", "gap", "gap, last round", "largest gap", "near the best", "worst tenth", "above Local", "log loss"),
        *("rank", "MB down / up", "gradients"),
    ]
    notes = prose(
        "gap: points behind the best method of each column, mean over the columns; near the best: columns in which",
        "it is within one standard error (over tasks) of the best method; worst tenth: the same gap for the mean of",
        "the worst tenth of the tasks; above Local: share of the tasks; log loss: mean over the classifications;",
        f"MB down / up: per agent and round with LeNet-5, a model of {MEGABYTES:.2f} MB; gradients: per mini-batch.",
    )
    return f"{table(head, rows)}\n\n{notes}"


def by_data(tournament: Tournament, scores: Scores, order: Sequence[MethodStanding]) -> str:
    """Return the mean points of every method on each data set."""
    data = list(dict.fromkeys(name for name, _ in scores.columns))
    means = {
        (name, s.method): fmean(fmean(scores.columns[c][s.method].values()) for c in scores.columns if c[0] == name)
        for name in data
        for s in order
        if s.method in tournament.entries(name)
    }
    best = {name: max(value for (other, _), value in means.items() if other == name) for name in data}
    rows = [
        [tournament.title(s.method), *(_bold(means.get((name, s.method)), best[name]) for name in data)] for s in order
    ]
    columns = {name: sum(c[0] == name for c in scores.columns) for name in data}
    head = ["", *(f"{title_of_data(name)} ({columns[name]})" for name in data)]
    note = prose("Mean points over the tasks; in brackets the number of columns.")
    return f"{table(head, rows)}\n\n{note}"


def by_column(found: Standings) -> Iterator[str]:
    """Yield a table per kind of shift of the data sets with several columns."""
    tournament, _, scores, order = found[:4]
    for data in dict.fromkeys(name for name, _ in scores.columns):
        columns = [column for name, column in scores.columns if name == data]
        if len(columns) < 2:
            continue
        for kind in dict.fromkeys(map(kind_of, columns)):
            some = [column for column in columns if kind_of(column) == kind]
            means = {(c, m): fmean(tasks.values()) for c in some for m, tasks in scores.columns[data, c].items()}
            best = {c: max(value for (other, _), value in means.items() if other == c) for c in some}
            methods = [s.method for s in order if s.method in tournament.entries(data)]
            rows = [[tournament.title(m), *(_bold(means[c, m], best[c]) for c in some)] for m in methods]
            yield f"### {title_of_data(data)}: {kind}"
            yield counts(tournament, {(data, column): scores.columns[data, column] for column in some})
            yield table(["", *some], rows)


def kind_of(column: str) -> str:
    """Return the kind of shift of a column such as `A rotate(45)`."""
    name, _, share = column.partition(", ")
    if share.endswith("per round"):
        return "some agents per round"
    _, _, shift = name.partition(" ")
    if not shift:
        return "the paper's splits"
    return "a mixture" if "+" in shift else next(kind for kind, names in KINDS.items() if shift.startswith(names))


def title_of_data(name: str) -> str:
    return TITLES.get(name, name.capitalize())


def of_method(found: Standings, method: str) -> str:
    """Return one method's points in every column next to the best method's, or "" if there are none."""
    tournament, _, scores, order = found[:4]
    standing = next((s for s in order if s.method == method), None)
    if standing is None:
        return ""
    rows = []
    for (data, column), tasks in scores.columns.items():
        if method in tasks:
            means = {m: fmean(some.values()) for m, some in tasks.items()}
            best = max(means, key=means.__getitem__)
            ends = [f"{means[method]:.2f}", f"{means[best]:.2f} {tournament.title(best)}"]
            rows.append([title_of_data(data), column, *ends])
    text = prose(
        f"Tuned, round selected on validation data ([all methods](../beyond.md)): {standing.gap:.2f} points behind the",
        f"best method in the mean over {standing.columns} columns, within one standard error of it in {standing.near}.",
    )
    return f"{text}\n\n{table(['data', 'column', 'points', 'best method'], rows)}"


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
    return table(["", "hyperparameter", *(f"{title_of_data(name)}: lr, value" for name in tournament.data)], rows)
