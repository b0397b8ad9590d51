"""The records that the pages are made from, and the Markdown that all pages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from paper.studies import STUDIES
from waffle_fl.claims.record_files import Part
from waffle_fl.results import FinishedRun


@dataclass(frozen=True)
class Records:
    """The records that the pages are made from."""

    parts: Mapping[str, Part]
    drift: Sequence[Mapping[str, Any]]
    momentum: Sequence[Mapping[str, Any]]
    quadratics: Sequence[Mapping[str, Any]]

    def runs(self, name: str) -> list[FinishedRun]:
        return self.parts[name].all_runs


def one_line(*texts: str) -> str:
    """Join texts into one line with single spaces."""
    return " ".join(" ".join(texts).split())


def prose(*texts: str) -> str:
    """Return the texts as one wrapped paragraph."""
    return fill(one_line(*texts), 120, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


def absent(records: Records, name: str) -> str:
    """Return a sentence on the missing runs of a record, or "" if it is complete."""
    part = records.parts[name]
    missing, planned = len(part.missing()), len(part.planned())
    study = next(study for study, names in STUDIES.items() if name in names)
    command = f"`python -m paper {study} --cell {name}` makes them"
    return f"**{missing} of {planned} runs of `results/{name}.jsonl` are missing**; {command}." if missing else ""
