"""The runs of a grid: one per method, split, shift, seed and Alice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count, product
from pathlib import Path

from waffle_fl.config import ALL_ALICES, Experiment, RunConfig, Settings
from waffle_fl.errors import WaffleError
from waffle_fl.experiment.factories import federation_of
from waffle_fl.experiment.runtime import Runtime
from waffle_fl.federation import Federation, index_of
from waffle_fl.records import other_settings
from waffle_fl.shifts import Drift, Swap, read_shifts


def plan(experiment: Experiment, out: Path, runtime: Runtime | None = None) -> list[tuple[RunConfig, Path]]:
    """Return the runs of a grid with their folders. An option may be a table with one value per split."""
    runtime = runtime or Runtime()
    runs = []
    shifts = experiment.shifts or (experiment.settings.shift,)
    shared: dict[tuple[str, str, int], list[Settings]] = {}  # one check of the fields for all methods
    for method, kind, shift, seed in product(experiment.methods, experiment.splits, shifts, experiment.seeds):
        table = experiment.options.get(method, {})
        options = {k: v.get(kind) if isinstance(v, dict) else v for k, v in table.items()}
        given = {k: v for k, v in options.items() if v is not None}
        if (kind, shift, seed) not in shared:
            settings = _settings_of_run(experiment.settings, kind, shift, seed)
            shared[kind, shift, seed] = [replace(settings, alice=alice) for alice in alices(settings, runtime)]
        for settings in shared[kind, shift, seed]:
            config = RunConfig(method=method, settings=settings, options=given)
            runs.append((config, out / config.label))
    return runs


def free_folder(preferred: Path, runs: Sequence[tuple[RunConfig, Path]]) -> tuple[Path, str]:
    """Return the first of preferred, preferred-2, preferred-3 ... without runs of other settings, and what differs."""
    reason = ""
    for number in count(1):
        folder = preferred if number == 1 else preferred.with_name(f"{preferred.name}-{number}")
        changes = chain.from_iterable(
            other_settings(runtime, config) for config, runtime in moved_to(runs, preferred, folder)
        )
        change = next(changes, "")
        if not change:
            return folder, reason
        reason = reason or change
    raise AssertionError("there is always another number")


def moved_to(runs: Sequence[tuple[RunConfig, Path]], old: Path, new: Path) -> list[tuple[RunConfig, Path]]:
    """Return the runs with their folders moved from `old` to `new`."""
    return [(config, new / folder.relative_to(old)) for config, folder in runs]


def _settings_of_run(s: Settings, kind: str, shift: str, seed: int) -> Settings:
    """Return the settings of one run. permutation_seed stays at its default if no labels are permuted."""
    permutes = kind.endswith("*") or any(isinstance(part, Swap | Drift) for part in read_shifts(shift))
    seed_of_labels = s.permutation_seed if permutes else Settings.permutation_seed
    return replace(s, split=kind, shift=shift, seed=seed, permutation_seed=seed_of_labels)


def alices(s: Settings, runtime: Runtime) -> list[str]:
    """Return the agents to train a model for: the given one, or every agent with training and test data."""
    if s.alice != ALL_ALICES:
        return [s.alice]
    if s.scored == ALL_ALICES:
        raise WaffleError("alice: expected one agent with scored = all, which has every agent's score, got all")
    federation = all_alices_of(s, runtime)
    later = {index_of(name, federation.names, "a newcomer") for name in s.newcomers}
    candidates = [
        (i, name)
        for i, name in enumerate(federation.names)
        if i not in later and len(federation.train[i]) and len(federation.test[i])
    ]
    return [handle(i, name) for i, name in candidates]


def all_alices_of(s: Settings, runtime: Runtime) -> Federation:
    """Return the federation of all agents, independent of `alice`, `leave_out` and `newcomers`."""
    preferred = replace(s, alice=ALL_ALICES if s.is_own else "0", leave_out=(), newcomers=())
    return federation_of(preferred, runtime.data_dir, runtime.allow_unverified)


def handle(agent: int, name: str) -> str:
    """Return how a config refers to an agent: by its name, or by its number if it has no name."""
    return str(agent) if name == f"agent {agent}" else name
