"""Training on the user's own data: optimiser settings per method, chosen on validation data from a small grid.

A verdict is only as good as the models behind it. Unless the user gives these settings, agents train with Adam, a fifth
of the training rows selects the round, and learning rate, weight decay, the network (for tables) and augmentation (for
images) are those with the best validation score, averaged over the agents: the least loss among those within a standard
error of the best accuracy. Test rows are never used. Where training is expensive (`decision/budget.py`), only Local and
FedAvg, or FedAvg+FT, are tried, candidates are compared after half of the rounds, and the other methods train as the
shared model does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from waffle_fl.algorithms import title_of
from waffle_fl.attacks import NONE
from waffle_fl.config import RunConfig, Settings
from waffle_fl.decision.budget import TRIED, budget_for, is_expensive
from waffle_fl.decision.measurement import JOINT, shortened_options
from waffle_fl.experiment import Listener, Runtime, alices, all_alices_of
from waffle_fl.federation import Federation
from waffle_fl.tuning.trial_scores import BestRound, common_round, own_rounds
from waffle_fl.tuning.trials import Candidate, Scores, Trials
from waffle_fl.versions import RESULTS_VERSION

RECIPE: dict[str, Any] = {  # settings that replace the defaults of `Settings`, if they are not given
    "optimiser": "adam",
    "momentum_between_rounds": "keep",
    "validation": 0.2,
    "final_model": "selected",
}
TABLES: tuple[dict[str, Any], ...] = (
    *({"model": "linear", "lr": 0.03, "weight_decay": decay} for decay in (0.01, 0.1, 1.0, 3.0)),
    *({"model": "mlp", "lr": lr, "weight_decay": decay} for lr in (0.003, 0.01) for decay in (0.1, 1.0)),
)
SERIES: tuple[dict[str, Any], ...] = ({"lr": 0.003}, {"lr": 0.001}, {"lr": 0.003, "weight_decay": 0.1})
IMAGES: tuple[dict[str, Any], ...] = (
    {"lr": 0.003, "augment": True, "flips": False},
    {"lr": 0.003, "augment": True, "flips": True},
    {"lr": 0.003},
)
SMALLEST_BATCH = 8  # of an agent in joint models of images
STEPS = 400  # mini-batches of the median agent, from which the number of rounds follows
FEWEST_ROUNDS, MOST_ROUNDS = 20, 160
MOST_WORK = 60_000  # images or series times rounds, beyond which the rounds are not doubled
STILL_IMPROVING = 0.8  # share of the rounds: a later best round means that training was too short
PROXIES = ("local", *JOINT)
FINALISTS = 2  # augmentations that train to the end, of those that were compared after half of the rounds
RARE = 0.8  # share of the most frequent class from which a round is selected by its loss
TUNED = (
    *(*RECIPE, *("rounds", "lr", "weight_decay", "model", "augment", "flips", "batch_size", "selected_by")),
    "final_round",
)


@dataclass(frozen=True)
class ChosenTraining:
    """The settings that were chosen for each method, and the validation score of every candidate."""

    rounds: int
    chosen: Mapping[str, Mapping[str, Any]]  # method -> settings that differ from the user's
    scores: Scores  # of the candidates of each method that were compared
    reduced: tuple[str, ...] = ()  # what was not tried, to keep within the budget
    options: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # hyperparameters that follow from the rounds
    part_weights: Mapping[str, Mapping[str, tuple[float, ...]]] = field(
        default_factory=dict
    )  # method -> Alice -> weights in her mixture of predictions
    others: Mapping[str, Any] = field(default_factory=dict)  # what methods that were not tried do not take from these

    def applied(self, config: RunConfig) -> RunConfig:
        """Return a run's config with the settings chosen for its method, and options that follow from the rounds."""
        found = self.chosen.get(config.method)
        if found is None:  # not tried: trained as the shared model, to the last round
            shared = next((self.chosen[method] for method in reversed(JOINT) if method in self.chosen), {})
            found = {**shared, **self.others, "final_model": "last", "final_round": 0}
        options = {**config.options, **self.options.get(config.method, {})}
        if weights := self.part_weights.get(config.method, {}).get(config.settings.alice):
            options["part_weights"] = weights
        return replace(config, settings=replace(config.settings, **found), options=options)

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
    factor: float = 1.0,
) -> ChosenTraining:
    """Return the training of each method; `given` are the settings that the user has set, which are kept.

    The methods finally train on all rows, and the round with the best mean validation score of the agents in the trials
    is used for all of them. If `validation` or `final_model` is given, every agent selects its own round. `factor`
    multiplies the work above which less is tried.
    """
    federation = all_alices_of(settings, runtime)
    recipe = RECIPE | {"selected_by": "loss" if has_rare_classes(federation) else "accuracy"}
    free = {name: value for name, value in recipe.items() if name not in given}
    keeps_rounds = "rounds" in given
    base = replace(settings, **free, rounds=settings.rounds if keeps_rounds else rounds_for(settings, federation))
    budget = budget_for(base, federation, runtime, factor)
    expensive = is_expensive(budget, federation, base.rounds, len(alices(base, runtime)))
    if expensive and not keeps_rounds:  # the longer training at once, instead of a second one from the start
        base = replace(base, rounds=more_rounds(base.rounds, federation))
    candidates = _without(given, grid_for(base, federation))
    tried = [m for m in methods if m in PROXIES] if expensive else list(methods)
    all_rows = not {"validation", "final_model", "final_round"}.intersection(given)
    joint = joint_training(base, federation, options, given)
    changes = {m: joint if m in JOINT else {} for m in methods}
    trials = Trials(base, options, folder, runtime, listener, common_round if all_rows else own_rounds, changes)
    if expensive and len(candidates) > 1:
        scores, found = trials.halved(tried, candidates, FINALISTS if differ_in_augmentation(candidates) else 1)
    else:
        scores, found = trials.compared(tried, candidates)
    while not (keeps_rounds or expensive) and _improves(found, base.rounds):
        if (rounds := more_rounds(base.rounds, federation)) == base.rounds:
            break
        base = replace(base, rounds=rounds)
        longer = replace(trials, base=base).best_rounds({(m, f"{rounds}-rounds"): c for m, (c, _) in found.items()})
        found = {m: (found[m][0], trial) for m, (trial,) in longer.items()}
    cut = 0
    if expensive and all_rows and not keeps_rounds:  # no model of a later round is used
        last = max([FEWEST_ROUNDS, *(round(trial.round) for _, trial in found.values())])
        cut = max(0, base.rounds - last)
        base = replace(base, rounds=base.rounds - cut)
    if all_rows:
        base = replace(base, validation=0.0)
    common = {name: getattr(base, name) for name in (*free, "rounds")}
    chosen_of = {
        m: {**common, **changes[m], **c, **({"final_round": round(trial.round)} if all_rows else {})}
        for m, (c, trial) in found.items()
    }
    part_weights = {m: trials.part_weights(m, c, trial) for m, (c, trial) in found.items()} if all_rows else {}
    named = " and ".join(map(title_of, tried))
    reduced = (TRIED.format(named, title_of(tried[-1])),) if expensive and set(methods) - set(tried) else ()
    weights = {m: some for m, some in part_weights.items() if some}
    others = {name: getattr(base, name) for name in joint}
    return ChosenTraining(base.rounds, chosen_of, scores, reduced, shortened_options(options, cut), weights, others)


def joint_training(
    s: Settings, federation: Federation, options: Mapping[str, Mapping[str, Any]], given: Sequence[str]
) -> dict[str, Any]:
    """Return the settings with which FedAvg and FedAvg+FT train on images, unless they are given.

    A step of all agents together uses about as many images as one of training alone, and moments are averaged: so they
    train nearly as Adam does on all images. Where the server does not see updates, or must not rely on each of them,
    and with partial participation, they train as the other methods do.
    """
    robust = s.attack != NONE or any("aggregation" in options.get(method, {}) for method in JOINT)
    if len(federation.shape) != 3 or s.privacy != "off" or s.participation < 1 or robust:
        return {}
    batch = min(s.batch_size, max(SMALLEST_BATCH, s.batch_size // federation.agents))
    found = {"momentum_between_rounds": "average", "batch_size": batch}
    return {name: value for name, value in found.items() if name not in given}


def _improves(found: Mapping[str, tuple[Candidate, BestRound]], rounds: int) -> bool:
    """Whether Local or FedAvg still improves near the end of training."""
    return any(found[m][1].round > STILL_IMPROVING * rounds for m in PROXIES if m in found)


def rounds_for(s: Settings, federation: Federation) -> int:
    """Return the rounds in which the median agent makes about STEPS steps."""
    steps = median(s.steps(n) for n in federation.samples.tolist() if n)
    return min(max(ceil(STEPS / steps), FEWEST_ROUNDS), MOST_ROUNDS)


def has_rare_classes(federation: Federation) -> bool:
    """Whether most agents' training rows are nearly all of one class, so that accuracy says little."""
    counts = [row for row in federation.label_counts().tolist() if sum(row)]
    return bool(counts) and median(max(row) / sum(row) for row in counts) >= RARE


def more_rounds(rounds: int, federation: Federation) -> int:
    """Return twice the rounds, within MOST_ROUNDS and, for images or series, MOST_WORK; at least the same rounds."""
    most = MOST_ROUNDS if len(federation.shape) == 1 else MOST_WORK // int(federation.samples.sum())
    return max(rounds, min(2 * rounds, most, MOST_ROUNDS))


def differ_in_augmentation(candidates: Sequence[Mapping[str, Any]]) -> bool:
    """Whether candidates differ only in their augmentation, which slows training at first."""
    steps = [{name: value for name, value in c.items() if name not in ("augment", "flips")} for c in candidates]
    return all(step == steps[0] for step in steps)


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


def request_digest(
    settings: Settings,
    methods: Sequence[str],
    options: Mapping[str, Any],
    given: Sequence[str],
    runtime: Runtime,
    factor: float = 1.0,
) -> str:
    """Return a short hash of a request and its data, the name of the folder of its trials."""
    grids = [TABLES, IMAGES, SERIES, SMALLEST_BATCH]
    made = [RESULTS_VERSION, all_alices_of(settings, runtime).digest(), *grids, factor]
    content = json.dumps([asdict(settings), sorted(methods), options, sorted(given), made], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def given_settings(arguments: Sequence[str]) -> list[str]:
    """Return the settings in TUNED that a command line sets."""
    flags = {argument.split("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")}
    spelled = {name: name.replace("_", "-") for name in TUNED}
    return [name for name, flag in spelled.items() if flags.intersection((f"--{flag}", f"--no-{flag}"))]
