"""Optuna's part: what to try next, and what to give up. Its SQLite file holds the whole state of a search.

Every draw has a sampler of its own, seeded by (seed, trial, name) and taught by the trials that have ended. So a search
that was killed at any moment asks for the same trials again, and two searches of one seed are the same.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from waffle_fl.errors import WaffleError
from waffle_fl.randomness import derive

Pruning: TypeAlias = Literal["median", "halving", "off"]
RANDOM_TRIALS = 8  # before the sampler has something to learn from
UNPRUNED_TRIALS = 4
FILE = "study.db"


def needed() -> Any:
    """Optuna, or the line that says how to get it."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise WaffleError("waffle tune needs Optuna: pip install 'waffle-fl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """A search as Optuna keeps it. Scores are such that the larger one is better."""

    def __init__(self, optuna: Any, study: Any, seed: int) -> None:
        self._optuna, self._study, self.seed = optuna, study, seed

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path, seed: int, pruning: Pruning) -> Iterator[Study]:
        optuna = needed()
        pruners = optuna.pruners
        pruner = {
            "median": lambda: pruners.MedianPruner(n_startup_trials=UNPRUNED_TRIALS),
            "halving": lambda: pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            "off": pruners.NopPruner,
        }[pruning]()
        storage = optuna.storages.RDBStorage(f"sqlite:///{(folder / FILE).resolve()}")
        try:
            study = optuna.create_study(
                storage=storage, study_name="waffle", direction="maximize", pruner=pruner, load_if_exists=True
            )
            yield cls(optuna, study, seed)
        finally:
            storage.remove_session()
            storage.engine.dispose()

    @property
    def trials(self) -> list[Any]:
        """All trials that were asked for, frozen, in order."""
        return list(self._study.get_trials(deepcopy=False))

    @property
    def ended(self) -> list[Any]:
        return [trial for trial in self.trials if trial.state.is_finished()]

    def ask(self, number: int) -> Asked:
        """The trial of this number: one that was asked for before and has not ended, or a new one."""
        known = self.trials
        trial = (
            self._optuna.trial.Trial(self._study, known[number]._trial_id) if number < len(known) else self._study.ask()
        )
        return Asked(self, trial)

    def sampler(self, number: int, name: str, fixed: Mapping[str, Any]) -> Any:
        samplers = self._optuna.samplers
        seed = derive(self.seed, "tuning", number, name) % 2**32
        sampler = samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS, constant_liar=True)
        if name not in fixed:
            return sampler
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return samplers.PartialFixedSampler(dict(fixed), sampler)

    def draw_by(self, sampler: Any) -> None:
        self._study.sampler = sampler

    def tell(self, number: int, score: float | None, state: Literal["COMPLETE", "PRUNED", "FAIL"]) -> None:
        score = score if state == "COMPLETE" else None  # of a pruned one Optuna has the reports
        self._study.tell(number, score, state=self._optuna.trial.TrialState[state])


class Asked:
    """A trial on its way: it draws, reports, and may be given up."""

    def __init__(self, study: Study, trial: Any) -> None:
        self._study, self._trial = study, trial
        self.index: int = trial.number
        self.fixed: Mapping[str, Any] = {}

    @property
    def params(self) -> dict[str, Any]:
        return dict(self._trial.params)

    def choose(self, name: str, choices: Sequence[Any]) -> Any:
        self._study.draw_by(self._study.sampler(self.index, name, self.fixed))
        return self._trial.suggest_categorical(name, choices)

    def number(self, name: str, low: float, high: float, log: bool) -> float:
        self._study.draw_by(self._study.sampler(self.index, name, self.fixed))
        return float(self._trial.suggest_float(name, low, high, log=log))

    def report(self, score: float, rung: int) -> bool:
        """Whether to give up, now that the score at a rung is known."""
        if rung not in self._trial.storage.get_trial(self._trial._trial_id).intermediate_values:
            self._trial.report(score, rung)
        return bool(self._trial.should_prune())
