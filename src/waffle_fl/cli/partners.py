"""The part of `waffle decide` that measures partners: the study, its record, and the runs of the best groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from waffle_fl.cli.console import console_for
from waffle_fl.cli.progress import Output
from waffle_fl.config import RunConfig, Settings
from waffle_fl.decision import coalitions
from waffle_fl.decision.bootstrap import Metric
from waffle_fl.decision.budget import WorkBudget
from waffle_fl.decision.coalitions import FOLDS
from waffle_fl.decision.measurement import PartnerOption, joint_method, measurement_for
from waffle_fl.decision.partners import PartnerStudy, key_of, study_partners
from waffle_fl.decision.study import alices_of, group_runs, headline
from waffle_fl.errors import writable
from waffle_fl.experiment import Runtime, all_alices_of
from waffle_fl.records import read_json, write_json

RECORD = "partners.json"
OLD_FLAGS = ("--leave-one-out", "--without")  # delete in 0.3


def without_old_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--leave-one-out AGENTS` replaced, and print a note on stderr.

    The old flag took agents; partners are now measured for every agent that a model is trained for."""
    kept: list[str] = []
    dropping = replaced = False
    for argument in arguments:
        if argument.split("=")[0] in OLD_FLAGS:
            dropping = replaced = True
            print(f"note: {argument.split('=')[0]} is now --partners leave-one-out", file=sys.stderr)
            continue
        dropping = dropping and not argument.startswith("--")
        kept += [] if dropping else [argument]
    return [*kept, "--partners", "leave-one-out"] if replaced else kept


def measure_partners(
    option: PartnerOption,
    settings: Settings,
    runs: Sequence[tuple[RunConfig, Path]],
    seeds: Sequence[int],
    options: Mapping[str, Mapping[str, Any]],
    metric: Metric | None,
    runtime: Runtime,
    out: Path,
    output: Output,
    budget: WorkBudget,
    reduced: Callable[[str], None],
) -> list[tuple[RunConfig, Path]]:
    """Measure the partners of every agent, write the record, and return the runs of each agent's best group.

    A study of the same data and settings is read from its record. `reduced` receives a sentence if less is measured
    than could be.
    """
    federation = all_alices_of(settings, runtime)
    alices, method = alices_of(runs, federation.names), headline([config.method for config, _ in runs])
    measurement, folds, one_seed, reason = measurement_for(
        option, federation, settings, alices, method, len(seeds), budget
    )
    if reason:
        reduced(reason)
    if measurement is None:
        with writable(out):
            (out / RECORD).unlink(missing_ok=True)
        return []
    used = seeds[:1] if one_seed else seeds
    method = joint_method(federation) if one_seed else method
    key = key_of(measurement, federation, settings, method, alices, used, options, metric, folds)
    study = read_study(out)
    if study is None or study.key != key:
        with _progress(output) as progress:
            study = study_partners(
                measurement, federation, settings, method, alices, used, options, runtime, metric, progress, folds
            )
        study = replace(study, key=key)
        with writable(out):
            write_json(out / RECORD, study.to_json())
    trained = seeds[:1] if folds < FOLDS else seeds
    return group_runs(study, settings, trained, federation.names, out, options)


def read_study(folder: Path) -> PartnerStudy | None:
    """Return the study whose record is in this folder, if there is one."""
    found = read_json(folder / RECORD)
    return PartnerStudy.from_json(found) if found else None


@contextmanager
def _progress(output: Output) -> Iterator[coalitions.Progress]:
    """Show the number of trained coalitions on stderr, unless output is quiet."""
    if output.quiet:
        yield lambda done, total: None
        return
    columns = (TextColumn("[bold]Partners "), BarColumn(bar_width=32), MofNCompleteColumn(), TextColumn("finish in"))
    with Progress(*columns, TimeRemainingColumn(), console=console_for(stderr=True)) as bar:
        task = bar.add_task("partners", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
