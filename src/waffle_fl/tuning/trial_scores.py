"""Validation scores of training trials: the best round of a trial, and the best of several candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple, TypeAlias

from waffle_fl.config import RunConfig
from waffle_fl.records import Selection, read_rounds

RunList: TypeAlias = list[tuple[RunConfig, Path]]

LEAST = 1e-9  # smaller validation losses count as this
WORST = 1e9  # loss of a run without a finite validation loss


class ValidationScore(NamedTuple):
    """Accuracy (0 for regression) and loss on validation data."""

    accuracy: float
    loss: float


class BestRound(NamedTuple):
    """The round with the best validation score, or its mean over Alices, and the score there."""

    round: float
    score: ValidationScore
    folder: str = ""  # of the trial's runs


DIVERGED = BestRound(1, ValidationScore(-1.0, WORST))  # of runs that did not reach their last round


def own_rounds(runs: RunList, rounds: int) -> BestRound:
    """Return the mean over Alices, each at the round with her best validation score among the first `rounds`."""
    logs = [read_rounds(folder / "rounds.jsonl")[:rounds] for _, folder in runs]
    if any(len(log) < rounds for log in logs):
        return DIVERGED
    rank = Selection(runs[0][0].settings.selected_by).rank
    best = [max(log, key=rank) for log in logs]
    return BestRound(fmean(line["round"] for line in best), _mean(best))


def common_round(runs: RunList, rounds: int) -> BestRound:
    """Return the round with the best mean over Alices: the largest accuracy, then the least loss, or the least loss.

    Only the first `rounds` count: a trial that was resumed may have more.
    """
    s = runs[0][0].settings
    logs = [read_rounds(folder / "rounds.jsonl")[:rounds] for _, folder in runs]
    if any(len(log) < rounds for log in logs):
        return DIVERGED
    means = [_mean(lines) for lines in zip(*logs, strict=True)]
    best = min(range(rounds), key=lambda r: (0.0 if s.selected_by == "loss" else -means[r].accuracy, means[r].loss))
    return BestRound(best + 1, means[best])


def _mean(lines: Sequence[Mapping[str, Any]]) -> ValidationScore:
    """Return the mean accuracy and the geometric mean of the losses of these rounds.

    One agent with outliers thus counts no more than the others. A round without a finite loss counts as the worst.
    """
    losses = [line.get("validation_loss") for line in lines]
    accuracy = fmean(line.get("validation_accuracy") or 0.0 for line in lines)
    return ValidationScore(accuracy, geometric_mean(WORST if loss is None else max(loss, LEAST) for loss in losses))


def best_candidate(found: Sequence[ValidationScore], samples: int) -> int:
    """Return the candidate with the least loss among those within a standard error of the best accuracy.

    Accuracy on few or unbalanced samples is coarse; the loss then decides. Numbers have no accuracy: it is 0 for all.
    """
    top = max(measured.accuracy for measured in found)
    error = sqrt(max(top * (1 - top), 0.0) / max(samples, 1))
    close = [k for k, measured in enumerate(found) if measured.accuracy >= top - error]
    return min(close, key=lambda k: found[k].loss)


def best_first(found: Sequence[ValidationScore], samples: int) -> list[int]:
    """Return the candidates in order: the best, the best of the others, and so on."""
    left, order = list(range(len(found))), list[int]()
    while left:
        order.append(left.pop(best_candidate([found[k] for k in left], samples)))
    return order
