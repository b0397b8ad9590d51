"""Training on the user's own data: optimiser settings per method, chosen on validation data from a small grid.

A verdict is only as good as the models behind it. Unless the user gives these settings, agents train with Adam, a fifth
of the training rows selects the round, and learning rate, weight decay, the network (for tables) and augmentation (for
images) are those with the best validation score, averaged over the agents: the least loss among those within a standard
error of the best accuracy. Test rows are never used. Where training is expensive, only Local and FedAvg are tried, and
the other methods train as FedAvg does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

from waffle_fl.config import RunConfig, Settings
from waffle_fl.experiment import Listener, Runtime, alices, all_alices_of, execute
from waffle_fl.federation import Federation
from waffle_fl.records import read_rounds, validation_rank
from waffle_fl.versions import RESULTS_VERSION

RunList: TypeAlias = list[tuple[RunConfig, Path]]

RECIPE: dict[str, Any] = {  # settings that replace the defaults of `Settings`, if they are not given
    "optimiser": "adam",
    "momentum_between_rounds": "keep",
    "validation": 0.2,
    "final_model": "selected",
}
TABLES: tuple[dict[str, Any], ...] = (
    *({"model": "linear", "lr": lr, "weight_decay": decay} for lr in (0.01, 0.03) for decay in (0.0, 0.3)),
    *({"model": "mlp", "lr": lr, "weight_decay": decay} for lr in (0.003, 0.01) for decay in (0.0, 0.3)),
)
SERIES: tuple[dict[str, Any], ...] = ({"lr": 0.003}, {"lr": 0.001}, {"lr": 0.003, "weight_decay": 0.1})
IMAGES: tuple[dict[str, Any], ...] = (
    {"lr": 0.003, "augment": True, "flips": False},
    {"lr": 0.003, "augment": True, "flips": True},
    {"lr": 0.003},
)
STEPS = 400  # mini-batches of the median agent, from which the number of rounds follows
FEWEST_ROUNDS, MOST_ROUNDS = 20, 160
MOST_WORK = 60_000  # images or series times rounds, beyond which the rounds are not doubled
STILL_IMPROVING = 0.8  # share of the rounds: a later best round means that training was too short
EXPENSIVE = 2_000  # training images or series of all agents from which only Local and FedAvg are tried
PROXIES = ("local", "fedavg")
TUNED = ("lr", "weight_decay", "model", "augment", "flips", "rounds", *RECIPE)  # what this module may set


class Measured(NamedTuple):
    """Accuracy (0 for regression) and loss on validation data."""

    accuracy: float
    loss: float


@dataclass(frozen=True)
class ChosenTraining:
    """The settings that were chosen for each method, and the validation score of every candidate."""

    rounds: int
    chosen: Mapping[str, Mapping[str, Any]]  # method -> settings that differ from the user's
    scores: Mapping[str, Sequence[tuple[Mapping[str, Any], Measured]]]  # method -> candidate, on validation data

    def applied(self, config: RunConfig) -> RunConfig:
        """Return a run's config with the settings chosen for its method."""
        found = self.chosen.get(config.method, self.chosen.get("fedavg", {}))
        return replace(config, settings=replace(config.settings, **found))

    def text(self) -> str:
        """Return the choice in words: rounds, and per method what distinguishes it."""
        shown = {
            method: ", ".join(
                [f"{name} {found[name]}" for name in ("model", "lr", "weight_decay") if found.get(name)]
                + ["shifts and flips" if found.get("flips") else "shifts"] * bool(found.get("augment"))
            )
            for method, found in self.chosen.items()
        }
        return f"{self.rounds} rounds; " + "; ".join(
            f"{method}: {words or 'as given'}" for method, words in shown.items()
        )

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def choose_training(
    settings: Settings,
    methods: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    given: Sequence[str],
    folder: Path,
    runtime: Runtime,
    listener: Listener,
) -> ChosenTraining:
    """Return the training of each method; `given` are the settings that the user has set, which are kept."""
    federation = all_alices_of(settings, runtime)
    free = {name: value for name, value in RECIPE.items() if name not in given}
    base = replace(settings, **free)
    if "rounds" not in given:
        base = replace(base, rounds=rounds_for(base, federation))
    candidates = _without(given, grid_for(base, federation))
    tried = [m for m in methods if m in PROXIES] if is_expensive(federation) else list(methods)
    runs = {
        (method, k): _runs(method, replace(base, **candidate), options, folder / str(k), runtime)
        for method in tried
        for k, candidate in enumerate(candidates)
    }
    if len(candidates) > 1 or "rounds" not in given:
        execute([run for group in runs.values() for run in group], runtime, listener)
    scores = {m: [(c, _measured(runs[m, k])) for k, c in enumerate(candidates)] for m in tried}
    held_out = all_alices_of(base, runtime).validation
    samples = sum(len(rows) for rows in held_out)
    best = {m: best_candidate([measured for _, measured in found], samples) for m, found in scores.items()}
    settings_of = {m: candidates[k] for m, k in best.items()}
    if "rounds" not in given:
        first = {m: runs[m, best[m]] for m in PROXIES if m in best}
        base = _long_enough(base, first, settings_of, options, federation, folder, runtime, listener)
    common = {name: getattr(base, name) for name in (*free, "rounds")}
    return ChosenTraining(base.rounds, {m: {**common, **found} for m, found in settings_of.items()}, scores)


def rounds_for(s: Settings, federation: Federation) -> int:
    """Return the rounds in which the median agent makes about STEPS steps."""
    steps = median(s.steps(n) for n in federation.samples.tolist() if n)
    return min(max(ceil(STEPS / steps), FEWEST_ROUNDS), MOST_ROUNDS)


def most_rounds(federation: Federation) -> int:
    """Return the number of rounds beyond which they are not doubled: fewer for many images or series."""
    return MOST_ROUNDS if len(federation.shape) == 1 else min(MOST_WORK // int(federation.samples.sum()), MOST_ROUNDS)


def grid_for(s: Settings, federation: Federation) -> list[dict[str, Any]]:
    """Return the candidates for this data: networks for tables, augmentation for images."""
    if len(federation.shape) > 1 or ":" in s.model:
        return [*(IMAGES if len(federation.shape) == 3 else SERIES)]
    return [c for c in TABLES if s.model in ("auto", c["model"])] or [*SERIES]


def _without(given: Sequence[str], candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the candidates without the settings that the user has given, each once."""
    found: list[dict[str, Any]] = []
    for candidate in candidates:
        kept = {name: value for name, value in candidate.items() if name not in given}
        found += [kept] if kept not in found else []
    return found


def is_expensive(federation: Federation) -> bool:
    return len(federation.shape) > 1 and int(federation.samples.sum()) > EXPENSIVE


def request_digest(
    settings: Settings, methods: Sequence[str], options: Mapping[str, Any], given: Sequence[str], runtime: Runtime
) -> str:
    """Return a short hash of a request and its data, the name of the folder of its trials."""
    made = [RESULTS_VERSION, all_alices_of(settings, runtime).digest(), TABLES, IMAGES, SERIES]
    content = json.dumps([asdict(settings), sorted(methods), options, sorted(given), made], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def given_settings(arguments: Sequence[str]) -> list[str]:
    """Return the settings in TUNED that a command line sets."""
    flags = {argument.split("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")}
    spelled = {name: name.replace("_", "-") for name in TUNED}
    return [name for name, flag in spelled.items() if flags.intersection((f"--{flag}", f"--no-{flag}"))]


def _runs(
    method: str, s: Settings, options: Mapping[str, Mapping[str, Any]], folder: Path, runtime: Runtime
) -> RunList:
    """Return one run per Alice."""
    configs = [
        RunConfig(method=method, settings=replace(s, alice=alice), options=options.get(method, {}))
        for alice in alices(s, runtime)
    ]
    return [(config, folder / config.label) for config in configs]


def _long_enough(
    base: Settings,
    first: Mapping[str, RunList],
    best: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Mapping[str, Any]],
    federation: Federation,
    folder: Path,
    runtime: Runtime,
    listener: Listener,
) -> Settings:
    """Double the rounds until the validation score of Local and FedAvg no longer improves near the end.

    `first` are the runs of Local and FedAvg with the rounds of `base`.
    """
    runs, most = first, most_rounds(federation)
    while base.rounds < most and any(_best_round(group) > STILL_IMPROVING * base.rounds for group in runs.values()):
        base = replace(base, rounds=min(2 * base.rounds, most))
        runs = {
            m: _runs(m, replace(base, **best[m]), options, folder / f"{base.rounds}-rounds", runtime) for m in first
        }
        execute([run for group in runs.values() for run in group], runtime, listener)
    return base


def _measured(runs: RunList) -> Measured:
    """Return the mean over Alices at the round with the best validation score; a diverged run counts as the worst."""
    best = [max(map(validation_rank, read_rounds(folder / "rounds.jsonl")), default=(-1.0, -1e9)) for _, folder in runs]
    accuracy, loss = (fmean(max(rank[i], -1e9) for rank in best) for i in (0, 1))
    return Measured(accuracy, -loss)


def best_candidate(found: Sequence[Measured], samples: int) -> int:
    """Return the candidate with the least loss among those within a standard error of the best accuracy.

    Accuracy on few or unbalanced samples is coarse; the loss then decides. Numbers have no accuracy: it is 0 for all.
    """
    top = max(measured.accuracy for measured in found)
    error = sqrt(max(top * (1 - top), 0.0) / max(samples, 1))
    close = [k for k, measured in enumerate(found) if measured.accuracy >= top - error]
    return min(close, key=lambda k: found[k].loss)


def _best_round(runs: RunList) -> float:
    """Return the mean over Alices of the round with the best validation score."""
    logs = [read_rounds(folder / "rounds.jsonl") for _, folder in runs]
    return fmean(max(log, key=validation_rank)["round"] for log in logs if log)
