"""Compare WAFFLE's mixture of predictions with all tuned methods: python -m benchmarks.mixture_page

Reads the records of experiments/tournament.toml and writes the tables of docs/one-waffle.md: the goals that were set
before, the standings, and each column.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from benchmarks.doc_tables import write_between
from benchmarks.one_waffle import NAMES, PAGE
from waffle_fl.tournament.checking import read_records
from waffle_fl.tournament.plan import load_tournament
from waffle_fl.tournament.standings import Column, Protocol, Scores, scores_of, standings

EXPERIMENTS, RESULTS = Path("experiments"), Path("results")
MIXTURE, SHOWN = "waffle", 6  # entry of the tournament file; methods in the standings
LIMITS = (("selected", 0.3), ("last", 0.7))  # of the mean gap, from the issue
LARGEST = {"har-described": 1.0}  # of a data set's mean gap; 1.5 elsewhere
LARGEST_COLUMN = 1.5
PARTITIONS = 3


def title_of(entry: str) -> str:
    """Return the name of a method or variant in tables."""
    return load_tournament(EXPERIMENTS / "tournament.toml").title(entry)


def complete(protocol: Protocol) -> Scores:
    """Return the scores of the columns that the mixture has, with all methods."""
    found = scores_of(read_records(load_tournament(EXPERIMENTS / "tournament.toml"), RESULTS), protocol).columns
    return Scores({column: some for column, some in found.items() if _is_complete(some)})


def _is_complete(some: Mapping[str, Mapping[tuple[int, str], float]]) -> bool:
    """Return whether the mixture has all partitions of a column."""
    return MIXTURE in some and len({partition for partition, _ in some[MIXTURE]}) == PARTITIONS


def gaps_of(scores: Scores) -> dict[Column, tuple[float, str, float]]:
    """Return by column: the mixture's points, the best other method, and its points."""
    found = {}
    for column, some in scores.columns.items():
        means = {method: fmean(tasks.values()) for method, tasks in some.items()}
        own = means.pop(MIXTURE)
        best = max(means, key=means.__getitem__)
        found[column] = own, best, means[best]
    return found


def goals(by_protocol: Mapping[Protocol, Scores]) -> str:
    """Return the goals and whether they hold; where the mixture is the best its gap is 0."""
    rows = []
    for protocol, limit in LIMITS:
        gaps = [max(best - own, 0.0) for own, _, best in gaps_of(by_protocol[protocol]).values()]
        kind = "round selected on validation data" if protocol == "selected" else "last round"
        rows.append((f"mean gap over {len(gaps)} columns, {kind}", fmean(gaps), limit))
    by_data: dict[str, list[float]] = {}
    for (data, _), (own, _, best) in gaps_of(by_protocol["selected"]).items():
        by_data.setdefault(data, []).append(max(best - own, 0.0))
    rows += [(f"mean gap on {NAMES[data]}", fmean(gaps), LARGEST.get(data, 1.5)) for data, gaps in by_data.items()]
    largest = max(best - own for own, _, best in gaps_of(by_protocol["selected"]).values())
    rows.append(("largest gap of one column", largest, LARGEST_COLUMN))
    lines = [f"| {what} | {gap:.2f} | {limit:g} | {'yes' if gap <= limit else 'no'} |" for what, gap, limit in rows]
    return "\n".join(["| goal | measured | at most | holds |", "| --- | --- | --- | --- |", *lines])


def ranking(by_protocol: Mapping[Protocol, Scores]) -> str:
    """Return the methods with the smallest mean gaps."""
    last = {one.method: one.gap for one in standings(by_protocol["last"])}
    lines = [
        "| method | gap | gap, last round | largest gap | above Local | rank |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in standings(by_protocol["selected"])[:SHOWN]:
        title = "**mixture**" if one.method == MIXTURE else title_of(one.method)
        numbers = (
            f"{one.gap:.2f} | {last[one.method]:.2f} | {one.largest:.1f} | {100 * one.gains:.0f} % | {one.rank:.1f}"
        )
        lines.append(f"| {title} | {numbers} |")
    return "\n".join(lines)


def columns(by_protocol: Mapping[Protocol, Scores]) -> str:
    """Return each column: the mixture, WAFFLE with one model and the best other method."""
    scores = by_protocol["selected"]
    lines = ["| data | column | mixture | one model | best other method |", "| --- | --- | --- | --- | --- |"]
    for column, (own, best, points) in gaps_of(scores).items():
        kin = fmean(scores.columns[column]["waffle-model"].values())
        name = NAMES[column[0]].partition(" (")[0]
        lines.append(f"| {name} | {column[1]} | {own:.2f} | {kin:.2f} | {points:.2f} {title_of(best)} |")
    return "\n".join(lines)


def page() -> str:
    """Return the tables of the page."""
    protocols: tuple[Protocol, ...] = ("selected", "last")
    scores = {protocol: complete(protocol) for protocol in protocols}
    return "\n\n".join(part(scores) for part in (goals, ranking, columns))


if __name__ == "__main__":
    write_between(PAGE, "tournament: mixture", page())
