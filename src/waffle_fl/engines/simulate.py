"""The simulator: many runs at once, on CPU or GPU, with the fast engine or the readable one (`loop.py`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Literal, TypeAlias, get_args

from waffle_fl.algorithms import training_key
from waffle_fl.algorithms.contract import check_agents
from waffle_fl.batches import Remainder, batch_sizes
from waffle_fl.engines import cohort_rounds, loop, run_workers, shared_training
from waffle_fl.engines.arithmetic import one_thread, products
from waffle_fl.engines.backend import Work, round_of
from waffle_fl.engines.masked_checks import check_privacy
from waffle_fl.engines.noise_checks import check_noise
from waffle_fl.engines.outcomes import outcome_of, to_numbers
from waffle_fl.engines.run_spec import (
    MaskedDistances,
    Outcome,
    Presence,
    Privacy,
    RoundSettings,
    RunSpec,
    State,
    fitted,
    initial_state,
    on_device,
    prepared,
)
from waffle_fl.engines.run_workers import RunWorkers
from waffle_fl.engines.stacked import StackedBackend
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.guard import Guard
from waffle_fl.models import FlatModel

Engine: TypeAlias = Literal["fast", "loop"]


def simulate(
    specs: Sequence[RunSpec],
    model: FlatModel,
    *,
    rounds: int,
    start: int = 0,
    batch_size: int = 32,
    epochs: int = 1,
    augment: bool = False,
    flips: bool = True,
    guard: Guard = "off",
    remainder: Remainder = "spread",
    participation: float = 1.0,
    alice_takes_part: Presence = "by-method",
    steps_per_round: int = 0,
    privacy: Privacy = "off",
    masked_distances: MaskedDistances = "sketch",
    sketch_size: int = 4096,
    min_contributors: float = 1.0,
    epsilon: float = 8.0,
    delta: float = 1e-5,
    sample_clip: float = 1.0,
    noise_multipliers: tuple[float, ...] = (),
    workers: int = 0,
    engine: Engine = "fast",
) -> Iterator[list[Outcome]]:
    """Train the runs together and yield their outcomes, one list per round; diverged runs drop out.

    `start` is the number of rounds that the runs' states have completed. `participation` is the share of the agents
    that take part in each round; Alice is one of them where the method's training depends on her, or always.
    With `privacy="masked"` the server sees distances and weighted sums alone: `masked_distances`, `sketch_size` and
    `min_contributors` are explained in docs/privacy.md. With `privacy="dp"` gradients are clipped per sample and noised
    so that a whole run costs each agent's samples at most `epsilon` at `delta`; `privacy="masked+dp"` does both.
    `steps_per_round` mini-batches replace the `epochs` of a round unless it is 0. At most `workers` processes share the
    work on a CPU; 0 means one per core. `engine="loop"` computes every round as the paper prints it, one agent after
    another.
    """
    rounds_of_all = rounds, batch_size, epochs, augment, flips, guard, remainder
    masks = privacy, masked_distances, sketch_size, min_contributors
    noise = epsilon, delta, sample_clip, noise_multipliers
    settings = RoundSettings(*rounds_of_all, participation, alice_takes_part, steps_per_round, *masks, *noise)
    if type(start) is not int or not 0 <= start <= rounds:
        raise WaffleError(f"start: expected an integer from 0 to rounds ({rounds}), got {start!r}")
    if type(workers) is not int or workers < 0:
        raise WaffleError(f"workers: expected an integer of at least 0, got {workers!r}")
    if engine not in get_args(Engine):
        raise WaffleError(f"engine: unknown {engine!r}{suggest(str(engine), get_args(Engine))}")
    if not specs:
        raise WaffleError("specs: expected at least one RunSpec, got none")
    model = prepared(model, specs[0].federation)
    specs = [fitted(spec, model) for spec in specs]
    check_model(specs, model, batch_size, remainder)
    for spec in specs:
        check_agents(spec.algorithm, spec.federation.agents)
        check_privacy(spec, settings)
        check_noise(spec.algorithm, model, spec.federation, settings)
    if any(spec.store for spec in specs):
        return _with_stores(specs, model, settings, start, workers, engine)
    if engine == "loop":
        return _loop(on_device(specs, model), model, settings, start)
    groups = shared_training.groups_of(specs) if settings.shares_training else [[i] for i in range(len(specs))]
    check_stack([specs[first] for first, *_ in groups])
    specs, rounds_of = on_device(specs, model), partial(_rounds, model, settings, workers)
    if len(groups) == len(specs):
        return rounds_of(specs, start)
    return shared_training.train_once_per_group(rounds_of, groups, specs, model, start, rounds)


def check_stack(specs: Sequence[RunSpec]) -> None:
    """Raise if the runs cannot train in one stack."""
    if len({training_key(spec.algorithm) for spec in specs}) > 1:
        raise WaffleError(
            "specs: expected runs whose rows train alike, got several kinds of training in one stack: use methods of "
            "one kind with the same step settings"
        )


def check_model(specs: Sequence[RunSpec], model: FlatModel, batch_size: int, remainder: Remainder) -> None:
    """Raise if a model with BatchNorm would get a batch of one sample."""
    if not model.normalises:
        return
    for spec in specs:
        for name, n in zip(spec.federation.names, spec.federation.samples.tolist(), strict=True):
            if n and min(batch_sizes(n, batch_size, remainder)) == 1:
                raise WaffleError(
                    f"{name} has {n} samples, so with batch size {batch_size} one batch has a single sample, which "
                    "BatchNorm cannot normalise: choose another batch size"
                )


def _with_stores(
    specs: Sequence[RunSpec], model: FlatModel, settings: RoundSettings, start: int, workers: int, engine: Engine
) -> Iterator[list[Outcome]]:
    """Return the rounds of runs whose states are on disk, one run after another in each round."""
    if not all(spec.store for spec in specs):
        raise WaffleError("specs: expected a store in every RunSpec or in none, got both")
    for spec in specs:
        cohort_rounds.check_store(spec, settings, model, engine)
    cores = 1 if model.device.type == "cuda" else workers or os.cpu_count() or 1
    specs = on_device(specs, model)
    runs = [cohort_rounds.run(spec, model, settings, cores, start, i) for i, spec in enumerate(specs)]
    return _together(runs, settings.rounds - start, model.precision)


def _loop(specs: Sequence[RunSpec], model: FlatModel, settings: RoundSettings, start: int) -> Iterator[list[Outcome]]:
    """Return the rounds of all runs, computed by the readable engine."""
    runs = [loop.run(spec, model, settings, start, i) for i, spec in enumerate(specs)]
    return _together(runs, settings.rounds - start, model.precision)


def _together(runs: Sequence[Iterator[Outcome]], rounds: int, precision: str) -> Iterator[list[Outcome]]:
    """Yield the rounds of all runs, each computed by itself, until all have ended."""
    for _ in range(rounds):
        with one_thread(), products(precision):
            outcomes = [outcome for run in runs if (outcome := next(run, None))]
        if not outcomes:
            return
        yield outcomes


def _rounds(
    model: FlatModel, settings: RoundSettings, workers: int, specs: Sequence[RunSpec], start: int
) -> Iterator[list[Outcome]]:
    """Yield the rounds of all runs, computed by the fast engine.

    A run drops out when Alice's update is not finite in any attempt.
    """
    cores = 1 if model.device.type == "cuda" else workers or os.cpu_count() or 1
    by_runs = run_workers.applies(specs, model, cores)
    with (
        closing(StackedBackend(specs, model, settings, 1 if by_runs else cores)) as backend,
        closing(RunWorkers(round_of(backend), cores if by_runs else 1, settings.rounds)) as compute,
    ):
        states: dict[int, State] = {i: spec.state or initial_state(spec, model) for i, spec in enumerate(specs)}
        clock = time.perf_counter()
        for r in range(start + 1, settings.rounds + 1):  # A2.2
            done: dict[int, Outcome] = {}
            pending = tuple(states)
            for attempt in range(settings.attempts):
                with one_thread(), products(model.precision):
                    computed = compute(Work(pending, tuple(states[i] for i in pending), r, attempt))
                    measured = to_numbers([run.measured for run in computed])
                for i, run, numbers in zip(pending, computed, measured, strict=True):
                    after = State(run.server, run.agents)
                    done[i] = outcome_of(i, specs[i], numbers, after, states[i], r, attempt)
                pending = tuple(i for i in pending if done[i].error)
                if not pending:
                    break
            began, clock = clock, time.perf_counter()
            for i, outcome in done.items():
                states[i] = outcome.state
                if not outcome.error:
                    outcome.measured["seconds"] = round((clock - began) / len(done), 6)
            for i in pending:
                del states[i]
            yield [done[i] for i in sorted(done)]
            if not states:
                return
