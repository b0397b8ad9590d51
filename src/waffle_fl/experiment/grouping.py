"""Group runs into stacks that train together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

from waffle_fl.algorithms import training_key
from waffle_fl.config import RunConfig
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.shared_training import carriers
from waffle_fl.experiment.factories import round_settings


class Resumable(Protocol):
    """A run that continues after a round."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def spec(self) -> RunSpec: ...
    @property
    def start(self) -> int: ...


R = TypeVar("R", bound=Resumable)


def stacks_of(runs: Sequence[R], most: int, workers: int = 1) -> list[list[R]]:
    """Group runs with the same local training that are at the same round into stacks, with the runs they carry.

    A stack trains at most `most` runs. For several workers on which stacks train one by one, the largest groups are
    divided further, until there are PER_WORKER stacks for each worker or stacks of SMALL runs. The stacks that train
    longest then come first: short ones at the end leave workers idle for less time.
    """
    groups = _groups(runs)
    pieces = [-(-len(group) // most) for group in groups]
    while workers > 1 and sum(pieces) < PER_WORKER * workers:
        sizes = [len(group) / count for group, count in zip(groups, pieces, strict=True)]
        largest = max(range(len(groups)), key=sizes.__getitem__, default=0)
        fewest = SMALL if sum(pieces) >= workers else 1  # no worker is left without a run
        if not groups or len(groups[largest]) < fewest * (pieces[largest] + 1):
            break
        pieces[largest] += 1
    stacks = [part for group, count in zip(groups, pieces, strict=True) for part in _divided(group, count, most)]
    if workers > 1:
        stacks.sort(key=_rounds_to_train, reverse=True)
    return [list(chain.from_iterable(part)) for part in stacks]


PER_WORKER = 2  # stacks for each worker: workers that get short runs take more
SMALL = 8  # runs in a stack that is not worth dividing


def _rounds_to_train(stack: Sequence[list[R]]) -> int:
    """Return the rounds that the runs of a stack train themselves; those that they carry add almost no work."""
    return sum(first.config.settings.rounds - first.start for first, *_ in stack)


def _divided(group: Sequence[list[R]], count: int, most: int) -> list[Sequence[list[R]]]:
    """Divide a group into parts: full ones, if no more than these are needed, otherwise equal ones."""
    if count == -(-len(group) // most):
        return [group[i : i + most] for i in range(0, len(group), most)]
    cuts = [round(i * len(group) / count) for i in range(count + 1)]
    return [group[cuts[i] : cuts[i + 1]] for i in range(count)]


def _groups(runs: Sequence[R]) -> list[list[list[R]]]:
    """Return groups of runs that can train in one stack; a run is listed with those that it carries."""
    carried = _carried(runs)
    groups: dict[Any, list[list[R]]] = {}
    for i, run in enumerate(runs):
        if i in carried:
            continue
        s = run.config.settings
        key = (
            training_key(run.spec.algorithm),
            s.data,
            s.model,
            s.rounds,
            s.epochs,
            s.steps_per_round,
            s.batch_size,
            s.remainder,
            s.augment and ("augment", s.flips, s.shift),  # crops are padded with the darkest pixel of the whole stack
            s.guard,
            s.participation,
            s.alice_takes_part,
            s.states,
            s.privacy,
            s.masked_distances,
            s.sketch_size,
            s.min_contributors,
            s.epsilon,
            s.delta,
            s.sample_clip,
            s.noise_multipliers,
            s.precision,
        )
        f = run.spec.federation
        group_of_run = [run, *(runs[k] for k, carrier in carried.items() if carrier == i)]
        groups.setdefault((*key, f.shape, f.outputs, f.task, run.start, f.agents), []).append(group_of_run)
    return list(groups.values())


def _carried(runs: Sequence[R]) -> dict[int, int]:
    """Map each run that needs no training of its own to the run with the same settings and round that carries it."""
    alike: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        if round_settings(run.config.settings).shares_training:
            alike.setdefault((run.config.settings, run.start), []).append(i)
    found = ((indices, carriers([runs[i].spec for i in indices])) for indices in alike.values())
    return {indices[k]: indices[carrier] for indices, pairs in found for k, carrier in pairs.items()}
