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
    """An experiment file and its record: the runs of each experiment, and the names of runs that the file lacks."""

    name: str
    experiments: tuple[Experiment, ...]
    runs: dict[str, list[FinishedRun]]
    unplanned: list[str]

    @property
    def all_runs(self) -> list[FinishedRun]:
        return [run for runs in self.runs.values() for run in runs]

    def planned(self, seeds: Sequence[int] = ()) -> dict[str, RunConfig]:
        """Return the runs of the file, keyed by names such as mnist/C/waffle/1; `seeds` replace the file's."""
        return {
            cell_of(experiment.name, config): config
            for experiment in self.experiments
            for config, _ in plan(replace(experiment, seeds=tuple(seeds) or experiment.seeds), Path())
        }

    def missing(self, seeds: Sequence[int] = ()) -> dict[str, RunConfig]:
        """Return the planned runs that the record lacks."""
        known = {cell_of(name, run.config) for name, runs in self.runs.items() for run in runs}
        return {name: config for name, config in self.planned(seeds).items() if name not in known}


def cell_of(experiment: str, config: RunConfig) -> str:
    """Return a run's name in its study: mnist/C/waffle/1, or har/subject-01/waffle/1 if each agent is Alice once."""
    return f"{experiment}/{row_of(config)}/{config.method}/{config.settings.seed}"


def read_part(root: Path, name: str) -> Part:
    """Read a file's experiments and their recorded runs. A record may hold more seeds than planned."""
    experiments = tuple(load_experiments(root / "experiments" / f"{name}.toml"))
    record = record_of(root, name)
    recorded = read_condensed(record, trust=True) if record.exists() else []
    planned: dict[str, str] = {}
    for experiment in experiments:
        for config, _ in plan(replace(experiment, seeds=(0,)), Path()):
            planned.setdefault(unseeded(config), experiment.name)
    runs: dict[str, list[FinishedRun]] = {experiment.name: [] for experiment in experiments}
    unplanned = []
    for run in recorded:
        owner = planned.get(unseeded(run.config))
        if owner is None:
            unplanned.append(run.folder.name)
        else:
            runs[owner].append(run)
    return Part(name, experiments, runs, unplanned)


def identity(config: RunConfig) -> str:
    """Return the whole config as text."""
    return json.dumps(config.contents)


def unseeded(config: RunConfig) -> str:
    """Return the config without its seed as text: equal for all runs of one cell."""
    content = config.contents
    return json.dumps({**content, "settings": {**content["settings"], "seed": 0}})


def record_of(root: Path, name: str) -> Path:
    return root / "results" / f"{name}.jsonl"


def read_lines(root: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a record that does not contain runs."""
    path = record_of(root, name)
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise WaffleError(f"cannot read {path}: {error}") from None


def problems(parts: dict[str, Part]) -> list[str]:
    """Return what is wrong with a study's records: unplanned, missing, duplicate or inconsistent runs."""
    found = []
    for part in parts.values():
        record = f"results/{part.name}.jsonl"
        if part.unplanned:
            first = part.unplanned[0]
            found.append(f"{record}: {len(part.unplanned)} runs belong to no config of its file, such as {first}")
        missing = list(dict.fromkeys(name.rpartition("/")[0] for name in part.missing()))
        if missing:
            shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
            found.append(f"{record}: {len(missing)} cells are not complete: {shown}")
        for name, runs in part.runs.items():
            if len({cell_of(name, run.config) for run in runs}) < len(runs):
                found.append(f"{record}: a run of {name} occurs twice")
            seen = {(run.row, run.provenance["binding"]["data"]) for run in runs}
            if len(seen) > len({row for row, _ in seen}):
                found.append(f"{record}: runs of {name} on one split saw different data")
            inconsistent = [run.folder.name for run in runs if run.rounds and _inconsistent(run)]
            more = f", and of {len(inconsistent) - 1} more" if len(inconsistent) > 1 else ""
            found += [
                f"{record}: the result of {name} {run} does not match its rounds{more}" for run in inconsistent[:1]
            ]
    return found


def _inconsistent(run: FinishedRun) -> bool:
    """Return whether a result contradicts the rounds that the record keeps."""
    scored = {line["round"]: line["accuracy"] for line in run.rounds if line.get("loss", 0) is not None}
    entries = [run.result[key] for key in ("best", "last") if key in run.result]
    if not entries:
        return bool(scored)
    differs = any(abs(scored.get(entry["round"], entry["accuracy"]) - entry["accuracy"]) > 1e-4 for entry in entries)
    highest = run.result.get("best", {}).get("accuracy", 1.0)
    return (
        differs or max(scored.values(), default=0.0) > highest + 1e-4 or max(scored, default=0) > entries[-1]["round"]
    )
