"""The tables of docs/beyond.md, from the record of experiments/beyond.toml."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from waffle_fl.report.tables import by_method
from waffle_fl.reproduce.claims import Verdict
from waffle_fl.reproduce.sections import setting, verdict_table
from waffle_fl.reproduce.studies import Part
from waffle_fl.results import Finished

NAME = "beyond"
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
KINDS = {  # of shifts, by their names
    "labels and quantities": ("dirichlet", "quantity", "prior"),
    "features": ("rotate", "blur", "noise", "contrast", "colour", "scale"),
    "concepts": ("swap",),
    "drifts": ("drift",),
}


def sections(part: Part, judged: Sequence[Verdict]) -> Iterator[str]:
    """What the record says, table by table."""
    yield verdict_table(judged)
    for data, title in TITLES.items():
        runs = [run for run in part.all_runs if run.config.settings.data == data]
        if runs:
            yield setting(runs)
        for kind in ("the paper's splits", *KINDS, "a mixture"):
            some = [run for run in runs if kind_of(run) == kind]
            if some:
                yield f"### {title}: {kind}"
                yield by_method(some, "last").rstrip()


def kind_of(run: Finished) -> str:
    """What kind of shift a run is about."""
    shift = run.config.settings.shift
    if not shift:
        return "the paper's splits"
    return "a mixture" if "+" in shift else next(kind for kind, names in KINDS.items() if shift.startswith(names))
