"""The search loop: draw a batch of trials, train them together, prune some, and report the scores to Optuna.

A trial is an ordinary run in its own folder, or one run per Alice. Trials of a batch share the hyperparameters that
change the local training and differ only on the server, so that they train in one stack. A trial that draws the values
of an earlier one gets its score and is not trained again. The search never uses test data.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from waffle_fl.atomic_files import remove
from waffle_fl.config import Experiment, RunConfig
from waffle_fl.errors import WaffleError, writable
from waffle_fl.experiment import Interrupted, Listener, Runtime, execute, federation_of, plan
from waffle_fl.manifest import LOG, verify_all
from waffle_fl.records import differences, locked, read_json, read_rounds, write_json
from waffle_fl.results import ACCURACY, Measure, measure_of
from waffle_fl.tuning.optuna_study import ActiveTrial, Pruning, State, Study, require_optuna
from waffle_fl.tuning.space import check_space, draw_config, training_names

Runs = Sequence[tuple[RunConfig, Path]]

RUNGS = (0.5, 0.75)  # shares of the rounds after which trials may be pruned
DEFAULT = -1  # trial number of the run with the given values
TIE = 1e-6  # maximum contribution of the loss to the score: it only breaks ties between equal accuracies
STATES: dict[State, str] = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "diverged"}
ENDS: dict[str, State] = {word: state for state, word in STATES.items()}


@dataclass(frozen=True)
class SearchSpec:
    """The search space, the config to start from, and the number of trials."""

    config: RunConfig
    space: Mapping[str, Any]
    trials: int
    parallel_trials: int
    pruning: Pruning

    def to_json(self) -> dict[str, Any]:
        """Return what identifies a search. The number of trials is not part of it, so a search can be continued."""
        how = {"space": dict(self.space), "together": self.parallel_trials, "pruning": self.pruning}
        return {**self.config.to_json(), **how}


class Trial(NamedTuple):
    """A trial that has ended, or the default."""

    number: int  # or DEFAULT
    state: str
    config: RunConfig
    score: float | None  # larger is better; None if Alice's training diverged
    validation: float | None  # accuracy or error on validation data, in the round selected on them
    measure: Measure
    rounds: int
    folder: Path


class SearchResult(NamedTuple):
    """The trials of a search so far."""

    trials: list[Trial]
    default: Trial
    best: Trial  # the default, unless a trial beat it
    timed_out: bool

    @property
    def measure(self) -> Measure:
        return self.default.measure


class SearchListener(Listener):
    """Listener that also receives trials. The base class ignores all events."""

    def started(self, spec: SearchSpec, runs: int, ended: int) -> None: ...
    def trial_ended(self, trial: Trial, result: SearchResult) -> None: ...


def search(spec: SearchSpec, out: Path, runtime: Runtime, listener: SearchListener, storage: str = "") -> SearchResult:
    """Search until the limit of trials or minutes. The same spec in the same folder continues an earlier search.

    `storage` is the URL of Optuna's journal or database; by default the folder has its own.
    """
    require_optuna()
    if spec.trials < 1 or spec.parallel_trials < 1:
        raise WaffleError(f"expected trials and parallel_trials >= 1, got {spec.trials} and {spec.parallel_trials}")
    check_space(spec.space, spec.config)
    _check_validation(spec.config, runtime)
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        _claim_folder(spec, out)
        with Study.opened(out, spec.config.settings.seed, spec.pruning, storage) as study:
            return _Search(spec, out, runtime, listener, study).run()


class _Search:
    """A running search."""

    def __init__(self, spec: SearchSpec, out: Path, runtime: Runtime, listener: SearchListener, study: Study) -> None:
        self.spec, self.out, self.runtime, self.listener, self.study = spec, out, runtime, listener, study
        self._end = time.monotonic() + 60 * runtime.minutes if runtime.minutes else math.inf
        self._first = {_key(spec.config): DEFAULT}  # config -> the first trial that drew it
        self._trials = {
            trial.number: self._ended_trial(trial.number, STATES[trial.state.name], self._config(trial))
            for trial in study.ended
        }

    def run(self) -> SearchResult:
        config = self.spec.config
        runs = self._runs(DEFAULT, config)
        self.listener.started(self.spec, len(runs), len(self._trials))
        self._train(runs)
        default = self._ended_trial(DEFAULT, "finished", config)
        if default.score is None:
            raise WaffleError("the training diverged with the given values, before any trial: lower lr, or set clip")
        numbers = range(self.spec.trials)
        try:
            size = self.spec.parallel_trials
            for batch in (numbers[i : i + size] for i in range(0, len(numbers), size)):
                if not self._trials.keys() >= set(batch):
                    self._batch(batch, default)
        except Interrupted as stop:
            if stop.signal != signal.SIGALRM:
                raise
            return self._result(default, timed_out=True)
        return self._result(default)

    def _batch(self, numbers: range, default: Trial) -> None:
        """Draw all trials of a batch, then train them together."""
        active: list[tuple[ActiveTrial, RunConfig]] = []
        duplicates: list[tuple[ActiveTrial, RunConfig]] = []
        shared = training_names(self.spec.space, self.spec.config.method)
        alike = shared < self.spec.space.keys()  # the space has server-side hyperparameters
        fixed: dict[str, Any] = {}
        for number in numbers:
            trial = self.study.ask(number, fixed)
            config = draw_config(self.spec.space, self.spec.config, trial)
            if alike:
                fixed = {name: value for name, value in trial.params.items() if name in shared}
            if number not in self._trials:
                (active if self._drawn_first_by(config, number) == number else duplicates).append((trial, config))
        rounds = self.spec.config.settings.rounds
        for rung in sorted({math.ceil(part * rounds) for part in (*RUNGS, 1)}):
            active = self._train_to_rung(active, rung, rounds, default)
        for trial, config in duplicates:
            twin = self._trials.get(self._drawn_first_by(config, trial.index), default)
            self._end_trial(trial, config, twin.score if twin.state == "finished" else None, ENDS[twin.state], default)

    def _drawn_first_by(self, config: RunConfig, number: int) -> int:
        return self._first.setdefault(_key(config), number)

    def _train_to_rung(
        self, active: Sequence[tuple[ActiveTrial, RunConfig]], rung: int, rounds: int, default: Trial
    ) -> list[tuple[ActiveTrial, RunConfig]]:
        """Train trials up to a rung and return those that continue."""
        runs = {trial.index: self._runs(trial.index, config) for trial, config in active}
        results = self._train([run for few in runs.values() for run in few], rung)
        remaining = []
        for trial, config in active:
            diverged = any(results[folder]["status"] == "diverged" for _, folder in runs[trial.index])
            score = None if diverged else _score(runs[trial.index], rung)[0]
            if score is None:
                self._end_trial(trial, config, None, "FAIL", default)
            elif rung == rounds:
                self._end_trial(trial, config, score, "COMPLETE", default)
            elif trial.report(score, rung):
                self._end_trial(trial, config, None, "PRUNED", default)
            else:
                remaining.append((trial, config))
        return remaining

    def _end_trial(
        self, trial: ActiveTrial, config: RunConfig, score: float | None, state: State, default: Trial
    ) -> None:
        self.study.tell(trial.index, score, state)
        ended = self._trials[trial.index] = self._ended_trial(trial.index, STATES[state], config)
        remove(*ended.folder.glob("*/checkpoint-*.safetensors"))
        self.listener.trial_ended(ended, self._result(default))

    def _train(self, runs: Runs, until: int | None = None) -> dict[Path, dict[str, Any]]:
        left = (self._end - time.monotonic()) / 60
        if left <= 0:
            raise Interrupted(signal.SIGALRM)
        runtime = replace(self.runtime, minutes=left if math.isfinite(left) else 0.0)
        results = execute(runs, runtime, self.listener, until)
        return {folder: result for (_, folder), result in zip(runs, results, strict=True)}

    def _folder(self, number: int, config: RunConfig) -> Path:
        first = self._drawn_first_by(config, number)
        return self.out / ("default" if first == DEFAULT else f"trial-{first:04d}")

    def _runs(self, number: int, config: RunConfig) -> Runs:
        return plan(_grid(config), self._folder(number, config), self.runtime)

    def _config(self, trial: Any) -> RunConfig:
        return draw_config(self.spec.space, self.spec.config, _RecordedDraws(trial.params))

    def _ended_trial(self, number: int, state: str, config: RunConfig) -> Trial:
        runs = self._runs(number, config)
        folders = [folder for _, folder in runs if (folder / "config.json").exists()]
        verify_all(folders, (LOG,), self.runtime.force, warn=self.listener.warned)
        made = min(len(read_rounds(folder / "rounds.jsonl")) for _, folder in runs)
        diverged = any((read_json(folder / "result.json") or {}).get("status") == "diverged" for _, folder in runs)
        scores = (None, None, ACCURACY) if diverged else _score(runs, made)
        ended = "diverged" if diverged else state
        return Trial(number, ended, config, *scores, made, self._folder(number, config))

    def _result(self, default: Trial, timed_out: bool = False) -> SearchResult:
        trials = [self._trials[number] for number in sorted(self._trials)]
        finished = [trial for trial in trials if trial.state == "finished"]
        best = max([default, *finished], key=lambda trial: -math.inf if trial.score is None else trial.score)
        return SearchResult(trials, default, best, timed_out)


def _key(config: RunConfig) -> str:
    return json.dumps(config.to_json(), sort_keys=True)


@dataclass(frozen=True)
class _RecordedDraws:
    """The values that a trial drew."""

    params: Mapping[str, Any]

    def choose(self, name: str, choices: list[Any]) -> Any:
        return self.params[name]

    def number(self, name: str, low: float, high: float, log: bool) -> float:
        return float(self.params[name])


def _score(runs: Runs, rung: int) -> tuple[float | None, float | None, Measure]:
    """Return (score, validation metric, which metric) of the best round up to the rung, averaged over the Alices."""
    best = [_best(read_rounds(folder / "rounds.jsonl")[:rung]) for _, folder in runs]
    known = [line for line in best if line is not None]
    if len(known) < len(best):
        return None, None, ACCURACY
    measure = measure_of(known[0])
    return mean(map(_score_of_round, known)), mean(line[f"validation_{measure.key}"] for line in known), measure


def _best(rounds: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    scored = [line for line in rounds if line.get("validation_loss") is not None]
    return max(scored, key=_score_of_round, default=None)


def _score_of_round(line: Mapping[str, Any]) -> float:
    """Return the validation score of a round: accuracy, with ties broken by the loss; for regression minus the rmse."""
    if "validation_rmse" in line:
        return -float(line["validation_rmse"])
    return float(line["validation_accuracy"]) + TIE * math.exp(-float(line["validation_loss"]))


def _check_validation(config: RunConfig, runtime: Runtime) -> None:
    for run, _ in plan(_grid(config), Path(), runtime):
        federation = federation_of(run.settings, runtime.data_dir, runtime.allow_unverified)
        if not len(federation.validation[federation.alice]):
            name = federation.names[federation.alice]
            raise WaffleError(
                f"Alice ({name}) has no validation data, and a search must not use test data: "
                f"hold out a share of the samples, such as --validation 0.2 (it is {config.settings.validation})"
            )


def _claim_folder(spec: SearchSpec, out: Path) -> None:
    """Write search.json into the folder, or check that the folder holds the same search."""
    requested = json.loads(json.dumps(spec.to_json()))
    known = read_json(out / "search.json")
    if known is None:
        write_json(out / "search.json", requested)
    elif known != requested:
        raise WaffleError(f"{out} holds another search: {next(differences(known, requested))}; choose another --out")


def _grid(config: RunConfig) -> Experiment:
    """Return the grid of one config: one run, or one run per Alice."""
    s = config.settings
    options = {config.method: config.options}
    return Experiment(methods=(config.method,), splits=(s.split,), seeds=(s.seed,), settings=s, options=options)
