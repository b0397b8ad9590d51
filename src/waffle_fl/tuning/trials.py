"""Trials of settings on validation data: train the candidates of each method and choose the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

from waffle_fl.config import RunConfig, Settings
from waffle_fl.engines.mixed_outputs import MIXTURE, mixes_predictions
from waffle_fl.experiment import Listener, Runtime, alices, all_alices_of, execute
from waffle_fl.federation import index_of
from waffle_fl.inference.trained_run import MODEL
from waffle_fl.tensorfile import read_named, read_shapes
from waffle_fl.tuning.trial_scores import BestRound, RunList, ValidationScore, best_candidate, best_first

Candidate: TypeAlias = Mapping[str, Any]  # settings
Scores: TypeAlias = dict[str, list[tuple[Candidate, ValidationScore]]]  # method -> candidates, on validation data


@dataclass(frozen=True)
class Trials:
    """Runs without test rows that compare candidates on validation data, each candidate in a folder of its own."""

    base: Settings
    options: Mapping[str, Mapping[str, Any]]
    folder: Path
    runtime: Runtime
    listener: Listener
    best_round: Callable[[RunList, int], BestRound]
    changes: Mapping[str, Candidate] = field(default_factory=dict)  # method -> settings of all its candidates

    def best_rounds(
        self, trials: Mapping[tuple[str, str], Candidate], until: int | None = None
    ) -> dict[str, list[BestRound]]:
        """Train the trials, by method and folder, together; return the best round of each trial of a method.

        With `until` they are paused after that round; the same trials continue there.
        """
        s = replace(self.base, test="none")
        runs = {
            (m, at): _runs(
                m, replace(s, **{**self.changes.get(m, {}), **c}), self.options, self.folder / at, self.runtime
            )
            for (m, at), c in trials.items()
        }
        execute([run for group in runs.values() for run in group], self.runtime, self.listener, until)
        rounds = until or s.rounds
        found = {key: self.best_round(group, rounds)._replace(folder=key[1]) for key, group in runs.items()}
        return {m: [best for (own, _), best in found.items() if own == m] for m, _ in runs}

    def part_weights(self, method: str, candidate: Candidate, trial: BestRound) -> dict[str, tuple[float, ...]]:
        """Return by Alice the weights of her mixture of predictions in a trial; empty if the method has none."""
        s = replace(self.base, **candidate, test="none")
        runs = _runs(method, s, self.options, self.folder / trial.folder, self.runtime)
        if trial.score.accuracy < 0 or not mixes_predictions(runs[0][0].algorithm()):
            return {}
        files = {config.settings.alice: folder / MODEL for config, folder in runs}
        return {alice: _part_weights_in(file) for alice, file in files.items()}

    def compared(
        self, methods: Sequence[str], candidates: Sequence[Candidate], until: int | None = None
    ) -> tuple[Scores, dict[str, tuple[Candidate, BestRound]]]:
        """Train all candidates; return the score of each, and the best candidate of each method with its best round."""
        some = {m: range(len(candidates)) for m in methods}
        found = self.best_rounds({(m, _name(k)): candidates[k] for m, ks in some.items() for k in ks}, until)
        return _scored(candidates, found), self._best(candidates, some, found)

    def halved(
        self, methods: Sequence[str], candidates: Sequence[Candidate], finalists: int
    ) -> tuple[Scores, dict[str, tuple[Candidate, BestRound]]]:
        """Like `compared`, but after half of the rounds only the best candidates train to the end.

        More than one does where augmentation is compared, which slows training at first."""
        scores, _ = self.compared(methods, candidates, ceil(self.base.rounds / 2))
        samples = validation_samples(self.base, self.runtime)
        left = {m: best_first([score for _, score in some], samples)[:finalists] for m, some in scores.items()}
        found = self.best_rounds({(m, _name(k)): candidates[k] for m, ks in left.items() for k in ks})
        return scores, self._best(candidates, left, found)

    def _best(
        self,
        candidates: Sequence[Candidate],
        tried: Mapping[str, Sequence[int]],
        found: Mapping[str, Sequence[BestRound]],
    ) -> dict[str, tuple[Candidate, BestRound]]:
        """Return the best of the candidates that were tried with each method, and its best round."""
        samples = validation_samples(self.base, self.runtime)
        first = {m: best_candidate([trial.score for trial in some], samples) for m, some in found.items()}
        return {m: (candidates[tried[m][k]], found[m][k]) for m, k in first.items()}


def _part_weights_in(file: Path) -> tuple[float, ...]:
    weights = read_named(file, tuple(read_shapes(file)))[f"{MIXTURE}.weights"]
    return tuple(weights.tolist())


def _name(candidate: int) -> str:
    return f"candidate-{candidate}"


def _scored(candidates: Sequence[Candidate], found: Mapping[str, Sequence[BestRound]]) -> Scores:
    return {m: [(c, t.score) for c, t in zip(candidates, trials, strict=True)] for m, trials in found.items()}


def validation_samples(s: Settings, runtime: Runtime) -> int:
    """Return the number of validation rows of the agents that a model is trained for."""
    federation = all_alices_of(s, runtime)
    return sum(len(federation.validation[index_of(alice, federation.names)]) for alice in alices(s, runtime))


def _runs(
    method: str, s: Settings, options: Mapping[str, Mapping[str, Any]], folder: Path, runtime: Runtime
) -> RunList:
    """Return one run per Alice."""
    configs = [
        RunConfig(method=method, settings=replace(s, alice=alice), options=options.get(method, {}))
        for alice in alices(s, runtime)
    ]
    return [(config, folder / config.label) for config in configs]
