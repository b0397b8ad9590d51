"""Check the records of a tournament against its file, and decide the claims of the file.

[[claims]]
claim = "WAFFLE is above Local over all tasks"
method = "waffle-paper"
above = "local"          # holds if the difference is positive and significant (paired t test over the columns)

[[claims]]
claim = "WAFFLE is at most 0.3 points behind the best tuned method"
method = "waffle-paper"
gap = 0.3                # holds if the mean gap to the best method of each column is at most this
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from waffle_fl.claims.verdict import Verdict
from waffle_fl.config import read_toml
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.tournament.plan import Tournament
from waffle_fl.tournament.record import Line, chosen_trial, column_name, read_lines, record_file, table
from waffle_fl.tournament.standings import Protocol, Scores, compare, scores_of, standings

SIGNIFICANT = 0.05
KEYS = {"claim", "method", "above", "gap"}


def read_records(tournament: Tournament, folder: Path) -> dict[str, list[Line]]:
    """Return the lines of each data set."""
    return {data: read_lines(record_file(folder, tournament, data)) for data in tournament.data}


def complete_scores(
    tournament: Tournament, records: Mapping[str, Sequence[Line]], protocol: Protocol = "selected"
) -> Scores:
    """Return the scores of the columns that every method of their data set has; others would favour the absent."""
    found = scores_of(records, protocol).columns
    whole = {column: some for column, some in found.items() if set(some) == set(tournament.entries(column[0]))}
    return Scores({column: some for column, some in whole.items() if all(some.values())})


def problems(tournament: Tournament, records: Mapping[str, Sequence[Line]]) -> list[str]:
    """Return one line per data set and method whose record is incomplete or not what the file says."""
    return [problem for data in tournament.data for problem in _problems(tournament, data, records[data])]


def _problems(tournament: Tournament, data: str, lines: Sequence[Line]) -> Iterator[str]:
    tasks, held = tournament.data[data], table(lines)
    wanted = {(column_name(column), partition) for column in tasks.columns for partition in tournament.partitions}
    if not lines:
        yield f"{data}: no record yet"
        return
    for method in tournament.entries(data):
        chosen = chosen_trial(tournament, tasks, method, lines)
        found = {key[1:]: line for key, line in held.items() if key[0] == method}
        if chosen is None:
            yield f"{data} {method}: the record lacks trials of the tuning"
        elif wanted - set(found):
            yield f"{data} {method}: the record lacks {len(wanted - set(found))} of {len(wanted)} parts of the table"
        elif any((line["lr"], line["name"], line["value"]) != tuple(chosen) for line in found.values()):
            yield f"{data} {method}: the table was made with another trial than the tuning chose, {chosen}"
        if set(found) - wanted:
            yield f"{data} {method}: the record has columns or partitions that the file lacks"


def read_claims(file: Path, known: Sequence[str]) -> list[dict[str, Any]]:
    """Return the claims of a tournament file, which are about its methods, the `known` ones."""
    claims: list[dict[str, Any]] = read_toml(file)[1].get("claims", [])
    for claim in claims:
        if set(claim) - KEYS or not {"claim", "method"} <= set(claim) or ("above" in claim) == ("gap" in claim):
            raise WaffleError(f"{file}: expected a claim with claim, method and either above or gap, got {claim}")
        for name in (claim["method"], claim.get("above", claim["method"])):
            if name not in known:
                raise WaffleError(f"{file}: a claim is about {name!r}, which does not take part{suggest(name, known)}")
    return claims


def verdicts(claims: Sequence[Mapping[str, Any]], scores: Scores) -> list[Verdict]:
    """Decide the claims. A claim about methods without a complete record is undecided."""
    return [_verdict(claim, scores) for claim in claims]


def _verdict(claim: Mapping[str, Any], scores: Scores) -> Verdict:
    method, known = claim["method"], scores.methods
    if method not in known or claim.get("above", method) not in known:
        return Verdict(claim["claim"], False, "the record is not complete", undecided=True)
    if "above" in claim:
        found = compare(scores, method, claim["above"])
        significant = found.p < SIGNIFICANT
        return Verdict(claim["claim"], significant and found.difference > 0, str(found), undecided=not significant)
    own = next(standing for standing in standings(scores) if standing.method == method)
    best = standings(scores)[0]
    numbers = f"mean gap {own.gap:.2f} over {own.columns} columns; the smallest is {best.gap:.2f} ({best.method})"
    return Verdict(claim["claim"], own.gap <= claim["gap"], numbers)
