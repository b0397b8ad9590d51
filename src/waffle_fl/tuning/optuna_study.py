"""Sampling and pruning of trials with Optuna. Its SQLite file holds the complete state of a search.

Every draw uses its own sampler, seeded by (seed, trial, name) and fitted to the trials that have ended. So a search
that was killed at any moment draws the same trials again, and two searches with the same seed are identical.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from waffle_fl.errors import WaffleError
from waffle_fl.randomness import derive
from waffle_fl.records import read_json, write_json

Pruning: TypeAlias = Literal["median", "halving", "off"]
State: TypeAlias = Literal["COMPLETE", "PRUNED", "FAIL"]
RANDOM_TRIALS = 8  # before the sampler uses earlier trials
UNPRUNED_TRIALS = 4
FILE = "study.db"
NAMED = "study.json"  # the name of a study in a storage elsewhere
JOURNAL = "journal:"


def require_optuna() -> Any:
    """Import Optuna, or raise an error that says how to install it."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise WaffleError("waffle tune needs Optuna: pip install 'waffle-fl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """An Optuna study. Larger scores are better."""

    def __init__(self, optuna: Any, study: Any, seed: int) -> None:
        self._optuna, self._study, self.seed = optuna, study, seed

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path, seed: int, pruning: Pruning, url: str = "") -> Iterator[Study]:
        """Open the study of a search, or create it: in a file of its folder, or in the storage of a URL."""
        optuna = require_optuna()
        pruners = optuna.pruners
        pruner = {
            "median": lambda: pruners.MedianPruner(n_startup_trials=UNPRUNED_TRIALS),
            "halving": lambda: pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            "off": pruners.NopPruner,
        }[pruning]()
        name = _claim_study(folder, url)
        with _storage(optuna, url or f"sqlite:///{(folder / FILE).resolve()}") as storage:
            study = optuna.create_study(
                storage=storage, study_name=name, direction="maximize", pruner=pruner, load_if_exists=True
            )
            yield cls(optuna, study, seed)

    @property
    def trials(self) -> list[Any]:
        """All trials so far, frozen, in order."""
        return list(self._study.get_trials(deepcopy=False))

    @property
    def ended(self) -> list[Any]:
        return [trial for trial in self.trials if trial.state.is_finished()]

    def ask(self, number: int, fixed: Mapping[str, Any]) -> ActiveTrial:
        """Return the trial with this number, an earlier one or a new one. Values in `fixed` are not drawn."""
        known = self.trials
        trial = (
            self._optuna.trial.Trial(self._study, known[number]._trial_id) if number < len(known) else self._study.ask()
        )
        return ActiveTrial(self, trial, fixed)

    def use_sampler(self, number: int, name: str, fixed: Mapping[str, Any]) -> None:
        """Give the next draw its own sampler."""
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


class ActiveTrial:
    """A trial that is being trained: it draws values, reports scores, and may be pruned."""

    def __init__(self, study: Study, trial: Any, fixed: Mapping[str, Any]) -> None:
        self._study, self._trial, self._fixed = study, trial, fixed
        self.index: int = trial.number

    @property
    def params(self) -> dict[str, Any]:
        return dict(self._trial.params)

    def choose(self, name: str, choices: Sequence[Any]) -> Any:
        self._study.use_sampler(self.index, name, self._fixed)
        return self._trial.suggest_categorical(name, choices)

    def number(self, name: str, low: float, high: float, log: bool) -> float:
        self._study.use_sampler(self.index, name, self._fixed)
        return float(self._trial.suggest_float(name, low, high, log=log))

    def report(self, score: float, rung: int) -> bool:
        """Report the score at a rung and return whether to prune the trial."""
        if rung not in self._study.trials[self.index].intermediate_values:
            self._trial.report(score, rung)
        return bool(self._trial.should_prune())


def _claim_study(folder: Path, url: str) -> str:
    """Return the name of a search's study. In a storage with other studies it is unique, and kept in the folder."""
    known = read_json(folder / NAMED)
    if url and (folder / FILE).exists():
        raise WaffleError(f"{folder} holds a search in its own {FILE}: leave --storage out, or choose another --out")
    if known and not url:
        raise WaffleError(
            f"{folder} holds a search in a storage elsewhere: give its --storage, or choose another --out"
        )
    if not url:
        return "waffle"
    if not known:
        known = {"study": f"{folder.name}-{secrets.token_hex(4)}"}
        write_json(folder / NAMED, known)
    return str(known["study"])


def _check_journal(path: Path) -> None:
    """Raise if a file with other content is there: Optuna would append to it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        first = file.readline()
        if first and not (first.startswith(b"{") and b'"op_code"' in first):
            raise ValueError("the file is not a journal of Optuna")


@contextlib.contextmanager
def _storage(optuna: Any, url: str) -> Iterator[Any]:
    """Yield Optuna's storage for a URL: a journal file, or a database that SQLAlchemy knows."""
    shown = re.sub(r"(?<=:)[^:/@]+(?=@)", "***", url)  # no error shows a password
    try:
        if url.startswith(JOURNAL):
            path, journal = url.removeprefix(JOURNAL), optuna.storages.journal
            _check_journal(Path(path))
            storage = optuna.storages.JournalStorage(journal.JournalFileBackend(path))
        else:
            storage = optuna.storages.RDBStorage(url)
    except Exception as error:  # SQLAlchemy and each database driver have their own kinds
        reason = " ".join(str(error).replace(url, shown).split())[:200]
        raise WaffleError(
            f"storage: expected a URL such as journal:search.log, sqlite:///search.db or postgresql://USER@HOST/NAME, "
            f"got {shown}: {reason}"
        ) from None
    try:
        yield storage
    finally:
        if hasattr(storage, "engine"):
            storage.remove_session()
            storage.engine.dispose()
