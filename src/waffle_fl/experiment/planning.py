"""The runs of a grid: one for each method, split, shift, seed and Alice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count, product
from pathlib import Path

from waffle_fl.config import ALL_ALICES, Experiment, RunConfig, Settings
from waffle_fl.experiment.factories import federation_of
from waffle_fl.experiment.runtime import Runtime
from waffle_fl.federation import Federation
from waffle_fl.records import other_settings
from waffle_fl.shifts import Drift, Swap, read_shifts


def plan(experiment: Experiment, out: Path, runtime: Runtime | None = None) -> list[tuple[RunConfig, Path]]:
    """The runs of a grid, each with its folder. An option that is a table is read at the run's split."""
    runtime = runtime or Runtime()
    runs = []
    shifts = experiment.shifts or (experiment.settings.shift,)
    for method, kind, shift, seed in product(experiment.methods, experiment.splits, shifts, experiment.seeds):
        table = experiment.options.get(method, {})
        options = {k: v.get(kind) if isinstance(v, dict) else v for k, v in table.items()}
        given = {k: v for k, v in options.items() if v is not None}
        settings = _of_column(experiment.settings, kind, shift, seed)
        for alice in alices(settings, runtime):
            config = RunConfig(method=method, settings=replace(settings, alice=alice), options=given)
            runs.append((config, out / config.label))
    return runs


def free_folder(wanted: Path, runs: Sequence[tuple[RunConfig, Path]]) -> tuple[Path, str]:
    """(The wanted folder, or the first of wanted-2, wanted-3 ... where no run has other settings; what differs.)"""
    reason = ""
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        changes = chain.from_iterable(
            other_settings(runtime, config) for config, runtime in moved(runs, wanted, folder)
        )
        change = next(changes, "")
        if not change:
            return folder, reason
        reason = reason or change
    raise AssertionError("there is always another number")


def moved(runs: Sequence[tuple[RunConfig, Path]], old: Path, new: Path) -> list[tuple[RunConfig, Path]]:
    """The runs with their folders in another one."""
    return [(config, new / folder.relative_to(old)) for config, folder in runs]


def _of_column(s: Settings, kind: str, shift: str, seed: int) -> Settings:
    """The settings of one run; where no labels are permuted the permutations' seed says nothing: the default."""
    permutes = kind.endswith("*") or any(isinstance(part, Swap | Drift) for part in read_shifts(shift))
    seed_of_labels = s.permutation_seed if permutes else Settings.permutation_seed
    return replace(s, split=kind, shift=shift, seed=seed, permutation_seed=seed_of_labels)


def alices(s: Settings, runtime: Runtime) -> list[str]:
    """The agents that a model is wanted for: the one who is named, or each who can be."""
    if s.alice != ALL_ALICES:
        return [s.alice]
    federation = all_alices_of(s, runtime)
    able = [
        (i, name) for i, name in enumerate(federation.names) if len(federation.train[i]) and len(federation.test[i])
    ]
    return [handle(i, name) for i, name in able]


def all_alices_of(s: Settings, runtime: Runtime) -> Federation:
    """The federation of all agents, whoever is Alice."""
    wanted = replace(s, alice=ALL_ALICES if s.is_own else "0", leave_out=())
    return federation_of(wanted, runtime.data_dir, runtime.allow_unverified)


def handle(agent: int, name: str) -> str:
    """What a config calls an agent: its name, or its number where it has no name of its own."""
    return str(agent) if name == f"agent {agent}" else name
