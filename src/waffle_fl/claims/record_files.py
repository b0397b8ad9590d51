"""Which runs an experiment file plans, and whether its record holds exactly these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from waffle_fl.config import Experiment, RunConfig, load_experiments
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import plan
from waffle_fl.results import FinishedRun, read_condensed, row_of


@dataclass(frozen=True)
class Part:
    """An experiment file, and what its record holds: the runs of each experiment, and of none."""

    name: str
    experiments: tuple[Experiment, ...]
    runs: dict[str, list[FinishedRun]]
    strangers: list[str]

    @property
    def all_runs(self) -> list[FinishedRun]:
        return [run for runs in self.runs.values() for run in runs]

    def planned(self, seeds: Sequence[int] = ()) -> dict[str, RunConfig]:
        """The runs that the file asks for, by names such as mnist/C/waffle/1; `seeds` replace the file's."""
        return {
            cell_of(experiment.name, config): config
            for experiment in self.experiments
            for config, _ in plan(replace(experiment, seeds=tuple(seeds) or experiment.seeds), Path())
        }

    def missing(self, seeds: Sequence[int] = ()) -> dict[str, RunConfig]:
        """Those of them that the record lacks."""
        known = {cell_of(name, run.config) for name, runs in self.runs.items() for run in runs}
        return {name: config for name, config in self.planned(seeds).items() if name not in known}


def cell_of(experiment: str, config: RunConfig) -> str:
    """The name of a run in its study: mnist/C/waffle/1, or har/subject-01/waffle/1 where each agent is Alice."""
    return f"{experiment}/{row_of(config)}/{config.method}/{config.settings.seed}"


def read_part(root: Path, name: str) -> Part:
    """A file's experiments, and the runs of its record that belong to them; a record may hold more seeds than asked."""
    experiments = tuple(load_experiments(root / "experiments" / f"{name}.toml"))
    record = record_of(root, name)
    recorded = read_condensed(record, trust=True) if record.exists() else []
    asked: dict[str, str] = {}
    for experiment in experiments:
        for config, _ in plan(replace(experiment, seeds=(0,)), Path()):
            asked.setdefault(unseeded(config), experiment.name)
    runs: dict[str, list[FinishedRun]] = {experiment.name: [] for experiment in experiments}
    strangers = []
    for run in recorded:
        owner = asked.get(unseeded(run.config))
        if owner is None:
            strangers.append(run.folder.name)
        else:
            runs[owner].append(run)
    return Part(name, experiments, runs, strangers)


def identity(config: RunConfig) -> str:
    """All that makes a run what it is, as text."""
    return json.dumps(config.to_json())


def unseeded(config: RunConfig) -> str:
    """All that runs of one cell share."""
    return identity(replace(config, settings=replace(config.settings, seed=0)))


def record_of(root: Path, name: str) -> Path:
    return root / "results" / f"{name}.jsonl"


def read_lines(root: Path, name: str) -> list[dict[str, Any]]:
    """A record that is no record of runs, as it stands."""
    path = record_of(root, name)
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise WaffleError(f"cannot read {path}: {error}") from None


def problems(parts: dict[str, Part]) -> list[str]:
    """What is wrong with the records of a study: runs of no config of theirs, missing, doubled or inconsistent."""
    found = []
    for part in parts.values():
        record = f"results/{part.name}.jsonl"
        if part.strangers:
            first = part.strangers[0]
            found.append(f"{record}: {len(part.strangers)} runs belong to no config of its file, such as {first}")
        missing = list(dict.fromkeys(name.rpartition("/")[0] for name in part.missing()))
        if missing:
            shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
            found.append(f"{record}: {len(missing)} cells are not complete: {shown}")
        for name, runs in part.runs.items():
            if len({cell_of(name, run.config) for run in runs}) < len(runs):
                found.append(f"{record}: a run of {name} is there twice")
            seen = {(run.row, run.provenance["binding"]["data"]) for run in runs}
            if len(seen) > len({row for row, _ in seen}):
                found.append(f"{record}: runs of {name} on one split saw different data")
            odd = [run.folder.name for run in runs if run.rounds and _odd(run)]
            more = f", and of {len(odd) - 1} more" if len(odd) > 1 else ""
            found += [f"{record}: the result of {name} {run} is not its rounds'{more}" for run in odd[:1]]
    return found


def _odd(run: FinishedRun) -> bool:
    """Does a result say other than its rounds, as far as they are there?"""
    scored = {line["round"]: line["accuracy"] for line in run.rounds if line.get("loss", 0) is not None}
    if "best" not in run.result:
        return bool(scored)
    best, last = run.result["best"], run.result["last"]
    differs = any(abs(scored.get(told["round"], told["accuracy"]) - told["accuracy"]) > 1e-4 for told in (best, last))
    return (
        differs or max(scored.values(), default=0.0) > best["accuracy"] + 1e-4 or max(scored, default=0) > last["round"]
    )
