"""The search: ask for a few trials, train them together, give up on some, tell how the others did; again.

A trial is a run like any other, in a folder of its own, or one run for each Alice. Trials of a batch share what changes
the training, so that those which differ at the server alone train in one stack; one that draws what was drawn before is
told the same and not trained again. Test data is never looked at.
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
from waffle_fl.tuning.optuna_study import Asked, Pruning, State, Study, needed
from waffle_fl.tuning.space import check_drawn, drawn, trained

Runs = Sequence[tuple[RunConfig, Path]]

RUNGS = (0.5, 0.75)  # parts of the rounds after which hopeless trials are given up
DEFAULT = -1  # the number of the run with the values to begin with
TIE = 1e-6  # the most that a loss counts beside an accuracy: it decides between equal ones
STATES: dict[State, str] = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "diverged"}
ENDS: dict[str, State] = {word: state for state, word in STATES.items()}


@dataclass(frozen=True)
class Wish:
    """What is searched, where it starts from, and how much may be spent."""

    config: RunConfig
    space: Mapping[str, Any]
    trials: int
    together: int
    pruning: Pruning

    def to_json(self) -> dict[str, Any]:
        """All that makes a search this one; a longer search is the same."""
        how = {"space": dict(self.space), "together": self.together, "pruning": self.pruning}
        return {**self.config.to_json(), **how}


class Trial(NamedTuple):
    """A trial that has ended, or the default."""

    number: int  # or DEFAULT
    state: str
    config: RunConfig
    score: float | None  # larger is better; None where Alice's training diverged
    validation: float | None  # accuracy or error on validation data, in the round that these select
    measure: Measure
    rounds: int
    folder: Path


class Found(NamedTuple):
    """What a search has found so far."""

    trials: list[Trial]
    default: Trial
    best: Trial  # the default, unless a trial beat it
    time_is_up: bool

    @property
    def measure(self) -> Measure:
        return self.default.measure


class Watcher(Listener):
    """A front end that also wants to hear of trials; the default hears nothing."""

    def begun(self, wish: Wish, runs: int, ended: int) -> None: ...
    def told(self, trial: Trial, found: Found) -> None: ...


def search(wish: Wish, out: Path, runtime: Runtime, watcher: Watcher) -> Found:
    """Search until the trials or the minutes are spent. The same wish in the same folder goes on where it stopped."""
    needed()
    if wish.trials < 1 or wish.together < 1:
        raise WaffleError(f"expected trials >= 1 and together >= 1, got {wish.trials} and {wish.together}")
    check_drawn(wish.space, wish.config)
    _check_validation(wish.config, runtime)
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        _settle(wish, out)
        with Study.opened(out, wish.config.settings.seed, wish.pruning) as study:
            return _Search(wish, out, runtime, watcher, study).run()


class _Search:
    """A search on its way."""

    def __init__(self, wish: Wish, out: Path, runtime: Runtime, watcher: Watcher, study: Study) -> None:
        self.wish, self.out, self.runtime, self.watcher, self.study = wish, out, runtime, watcher, study
        self._end = time.monotonic() + 60 * runtime.minutes if runtime.minutes else math.inf
        self._first = {_key(wish.config): DEFAULT}  # which trial drew a config first
        self._trials = {
            trial.number: self._judged(trial.number, STATES[trial.state.name], self._config(trial))
            for trial in study.ended
        }

    def run(self) -> Found:
        config = self.wish.config
        runs = self._runs(DEFAULT, config)
        self.watcher.begun(self.wish, len(runs), len(self._trials))
        self._train(runs)
        default = self._judged(DEFAULT, "finished", config)
        if default.score is None:
            raise WaffleError("the training diverged with the values to begin with: lower lr, or set clip")
        numbers = range(self.wish.trials)
        try:
            for batch in (numbers[i : i + self.wish.together] for i in range(0, len(numbers), self.wish.together)):
                if not self._trials.keys() >= set(batch):
                    self._batch(batch, default)
        except Interrupted as stop:
            if stop.signal != signal.SIGALRM:
                raise
            return self._found(default, time_is_up=True)
        return self._found(default)

    def _batch(self, numbers: range, default: Trial) -> None:
        """Trials that are asked for before any of them is trained, and then train together."""
        asked: list[tuple[Asked, RunConfig]] = []
        again: list[tuple[Asked, RunConfig]] = []
        shared = trained(self.wish.space, self.wish.config.method)
        alike = shared < self.wish.space.keys()  # something is left for the server to differ in
        fixed: dict[str, Any] = {}
        for number in numbers:
            trial = self.study.ask(number, fixed)
            config = drawn(self.wish.space, self.wish.config, trial)
            if alike:
                fixed = {name: value for name, value in trial.params.items() if name in shared}
            if number not in self._trials:
                (asked if self._drawn_first_by(config, number) == number else again).append((trial, config))
        rounds = self.wish.config.settings.rounds
        for rung in sorted({math.ceil(part * rounds) for part in (*RUNGS, 1)}):
            asked = self._climb(asked, rung, rounds, default)
        for trial, config in again:
            twin = self._trials.get(self._drawn_first_by(config, trial.index), default)
            self._tell(trial, config, twin.score if twin.state == "finished" else None, ENDS[twin.state], default)

    def _drawn_first_by(self, config: RunConfig, number: int) -> int:
        return self._first.setdefault(_key(config), number)

    def _climb(
        self, asked: Sequence[tuple[Asked, RunConfig]], rung: int, rounds: int, default: Trial
    ) -> list[tuple[Asked, RunConfig]]:
        """Train up to a rung, and tell which of the trials end there."""
        runs = {trial.index: self._runs(trial.index, config) for trial, config in asked}
        results = self._train([run for few in runs.values() for run in few], rung)
        going_on = []
        for trial, config in asked:
            diverged = any(results[folder]["status"] == "diverged" for _, folder in runs[trial.index])
            score = None if diverged else _score(runs[trial.index], rung)[0]
            if score is None:
                self._tell(trial, config, None, "FAIL", default)
            elif rung == rounds:
                self._tell(trial, config, score, "COMPLETE", default)
            elif trial.report(score, rung):
                self._tell(trial, config, None, "PRUNED", default)
            else:
                going_on.append((trial, config))
        return going_on

    def _tell(self, trial: Asked, config: RunConfig, score: float | None, state: State, default: Trial) -> None:
        self.study.tell(trial.index, score, state)
        told = self._trials[trial.index] = self._judged(trial.index, STATES[state], config)
        remove(*told.folder.glob("*/checkpoint-*.safetensors"))
        self.watcher.told(told, self._found(default))

    def _train(self, runs: Runs, until: int | None = None) -> dict[Path, dict[str, Any]]:
        left = (self._end - time.monotonic()) / 60
        if left <= 0:
            raise Interrupted(signal.SIGALRM)
        runtime = replace(self.runtime, minutes=left if math.isfinite(left) else 0.0)
        results = execute(runs, runtime, self.watcher, until)
        return {folder: result for (_, folder), result in zip(runs, results, strict=True)}

    def _folder(self, number: int, config: RunConfig) -> Path:
        first = self._drawn_first_by(config, number)
        return self.out / ("default" if first == DEFAULT else f"trial-{first:04d}")

    def _runs(self, number: int, config: RunConfig) -> Runs:
        return plan(_grid(config), self._folder(number, config), self.runtime)

    def _config(self, trial: Any) -> RunConfig:
        return drawn(self.wish.space, self.wish.config, _Known(trial.params))

    def _judged(self, number: int, state: str, config: RunConfig) -> Trial:
        runs = self._runs(number, config)
        folders = [folder for _, folder in runs if (folder / "config.json").exists()]
        verify_all(folders, (LOG,), self.runtime.force, warn=self.watcher.warned)
        made = min(len(read_rounds(folder / "rounds.jsonl")) for _, folder in runs)
        diverged = any((read_json(folder / "result.json") or {}).get("status") == "diverged" for _, folder in runs)
        scores = (None, None, ACCURACY) if diverged else _score(runs, made)
        ended = "diverged" if diverged else state
        return Trial(number, ended, config, *scores, made, self._folder(number, config))

    def _found(self, default: Trial, time_is_up: bool = False) -> Found:
        trials = [self._trials[number] for number in sorted(self._trials)]
        finished = [trial for trial in trials if trial.state == "finished"]
        best = max([default, *finished], key=lambda trial: -math.inf if trial.score is None else trial.score)
        return Found(trials, default, best, time_is_up)


def _key(config: RunConfig) -> str:
    return json.dumps(config.to_json(), sort_keys=True)


@dataclass(frozen=True)
class _Known:
    """What a trial drew."""

    params: Mapping[str, Any]

    def choose(self, name: str, choices: list[Any]) -> Any:
        return self.params[name]

    def number(self, name: str, low: float, high: float, log: bool) -> float:
        return float(self.params[name])


def _score(runs: Runs, rung: int) -> tuple[float | None, float | None, Measure]:
    """(what is searched for, the measure alone, which one): the best round up to the rung, mean over the Alices."""
    best = [_best(read_rounds(folder / "rounds.jsonl")[:rung]) for _, folder in runs]
    known = [line for line in best if line is not None]
    if len(known) < len(best):
        return None, None, ACCURACY
    measure = measure_of(known[0])
    return mean(map(_merit, known)), mean(line[f"validation_{measure.key}"] for line in known), measure


def _best(rounds: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    judged = [line for line in rounds if line.get("validation_loss") is not None]
    return max(judged, key=_merit, default=None)


def _merit(line: Mapping[str, Any]) -> float:
    """The larger the better, on validation data: accuracy, the loss where accuracies are equal; or less error."""
    if "validation_rmse" in line:
        return -float(line["validation_rmse"])
    return float(line["validation_accuracy"]) + TIE * math.exp(-float(line["validation_loss"]))


def _check_validation(config: RunConfig, runtime: Runtime) -> None:
    for run, _ in plan(_grid(config), Path(), runtime):
        federation = federation_of(run.settings, runtime.data_dir, runtime.allow_unverified)
        if not len(federation.validation[federation.alice]):
            name = federation.names[federation.alice]
            raise WaffleError(
                f"Alice ({name}) has no validation data, and a search must not see her test data: "
                f"hold a share of the samples out, such as --validation 0.2 (it is {config.settings.validation})"
            )


def _settle(wish: Wish, out: Path) -> None:
    """The folder is this search's, or becomes it."""
    asked = json.loads(json.dumps(wish.to_json()))
    known = read_json(out / "search.json")
    if known is None:
        write_json(out / "search.json", asked)
    elif known != asked:
        raise WaffleError(f"{out} holds another search: {next(differences(known, asked))}; choose another --out")


def _grid(config: RunConfig) -> Experiment:
    """The runs of one config: one, or one for each Alice."""
    s = config.settings
    options = {config.method: config.options}
    return Experiment(methods=(config.method,), splits=(s.split,), seeds=(s.seed,), settings=s, options=options)
