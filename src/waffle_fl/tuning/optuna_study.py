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
State: TypeAlias = Literal["COMPLETE", "PRUNED", "FAIL"]
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

    def ask(self, number: int, fixed: Mapping[str, Any]) -> Asked:
        """The trial of this number, one that was asked for before or a new one; what is fixed is not drawn."""
        known = self.trials
        trial = (
            self._optuna.trial.Trial(self._study, known[number]._trial_id) if number < len(known) else self._study.ask()
        )
        return Asked(self, trial, fixed)

    def draw_by(self, number: int, name: str, fixed: Mapping[str, Any]) -> None:
        """Let the next draw be made by a sampler of its own."""
        samplers = self._optuna.samplers
        seed = derive(self.seed, "tuning", number, name) % 2**32
        sampler = samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS, constant_liar=True)
        if name in fixed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
                sampler = samplers.PartialFixedSampler(dict(fixed), sampler)
        self._study.sampler = sampler

    def tell(self, number: int, score: float | None, state: State) -> None:
        self._study.tell(number, score, state=self._optuna.trial.TrialState[state])


class Asked:
    """A trial on its way: it draws, reports, and may be given up."""

    def __init__(self, study: Study, trial: Any, fixed: Mapping[str, Any]) -> None:
        self._study, self._trial, self._fixed = study, trial, fixed
        self.index: int = trial.number

    @property
    def params(self) -> dict[str, Any]:
        return dict(self._trial.params)

    def choose(self, name: str, choices: Sequence[Any]) -> Any:
        self._study.draw_by(self.index, name, self._fixed)
        return self._trial.suggest_categorical(name, choices)

    def number(self, name: str, low: float, high: float, log: bool) -> float:
        self._study.draw_by(self.index, name, self._fixed)
        return float(self._trial.suggest_float(name, low, high, log=log))

    def report(self, score: float, rung: int) -> bool:
        """Whether to give up, now that the score at a rung is known."""
        if rung not in self._study.trials[self.index].intermediate_values:
            self._trial.report(score, rung)
        return bool(self._trial.should_prune())
