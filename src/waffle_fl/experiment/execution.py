"""Bring runs to their end: open their folders, group those that can share a stack, train, resume."""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from waffle_fl.algorithms import training_key
from waffle_fl.algorithms.contract import check_agents
from waffle_fl.attacks import NONE, attackers_of, tamper_of
from waffle_fl.config import RunConfig
from waffle_fl.engines.run_spec import RunSpec, fitted, initial_state, on_device
from waffle_fl.engines.shared_training import carriers
from waffle_fl.engines.simulate import check_model, simulate
from waffle_fl.errors import WaffleError
from waffle_fl.experiment.active_run import ActiveRun, close, log, save, save_some, state_of, tensors_of
from waffle_fl.experiment.factories import (
    advice,
    check_once,
    check_schedules,
    federation_of,
    model_name,
    model_of,
    origin,
)
from waffle_fl.experiment.runtime import Interrupted, Listener, Runtime, device_of
from waffle_fl.federation import Federation
from waffle_fl.manifest import Finding, summary
from waffle_fl.models import STATS_POLICY
from waffle_fl.out_of_memory import enough_memory
from waffle_fl.records import Run, provenance

FILES_A_RUN, SPARE_FILES = 2, 200


def execute(
    runs: Sequence[tuple[RunConfig, Path]], runtime: Runtime, listener: Listener | None = None, until: int | None = None
) -> list[dict[str, Any]]:
    """Bring every run to its end and return the results, in order. Finished runs are not run again.

    With `until` they pause after that round, saved: the result of a run that has not ended says `paused`.
    """
    listener = listener or Listener()
    if runtime.workers < 0 or runtime.stack < 1 or not runtime.minutes >= 0:
        given = f"{runtime.workers}, {runtime.stack} and {runtime.minutes}"
        raise WaffleError(f"expected workers >= 0, stack >= 1 and minutes >= 0, got {given}")
    device = device_of(runtime.device)
    _allow_files(FILES_A_RUN * len(runs))
    results: dict[Path, dict[str, Any]] = {}
    findings: list[Finding] = []
    with enough_memory(), contextlib.ExitStack() as stack, _stop_requests(runtime.minutes) as stopped:
        jobs = []
        for config, folder in runs:
            job = _open(stack, config, folder, runtime, device, listener, findings)
            if isinstance(job, ActiveRun):
                jobs.append(job)
            else:
                results[folder] = job
        for line in summary(findings):
            listener.warned(line)
        listener.planned(runs, len(results))
        for job in jobs:
            if job.start:
                listener.resumed(job.config, job.start)
        waiting = [job for job in jobs if until is None or job.start < until]
        for group in _groups(waiting, runtime.stack):
            for job, result in _train(group, runtime, device, listener, stopped, until):
                results[job.run.folder] = result
                listener.ended(job.config, result)
    return [results.get(folder, {"status": "paused", "rounds": until}) for _, folder in runs]


def _allow_files(count: int) -> None:
    """Every run keeps its lock and its log open: ask the system for as many files as that takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _open(
    stack: contextlib.ExitStack,
    config: RunConfig,
    folder: Path,
    runtime: Runtime,
    device: torch.device,
    listener: Listener,
    findings: list[Finding],
) -> ActiveRun | dict[str, Any]:
    """Lock a run's folder and find out where it stands; a run that has ended gives its result, and what it is worth."""
    s = config.settings
    whole = federation_of(s, runtime.data_dir, runtime.allow_unverified)
    alone = config.method == "local"  # nobody else's training could matter
    federation = whole.only(whole.alice) if alone else whole
    if s.augment and len(federation.shape) != 3:
        raise WaffleError(f"augment is for images; {s.data} has samples of shape {federation.shape}")
    model = model_of(s, federation, runtime, device)
    check_once(s, model, federation)
    spec = fitted(_cell(config, federation), model)
    check_model([spec], model, s.batch_size, s.remainder)
    check_agents(spec.algorithm, federation.agents)
    check_schedules(config)
    notes = advice(config, federation, getattr(spec.algorithm, "parts", None))
    description = provenance(
        _device_name(device),
        whole.digest(),
        agents=list(whole.names),
        alice=whole.alice,
        label_counts=whole.label_counts().tolist(),
        test_samples=len(federation.test[federation.alice]),
        task=whole.task,
        classes=list(whole.class_names),
        sample=list(whole.shape),
        **({"shifted": dict(whole.shifted)} if whole.shifted else {}),
        **origin(s, runtime),
        statistics=STATS_POLICY if model.stats_size else "this model has no running statistics",
        model=model_name(s, whole.shape),
        parameters=model.size,
        engine={"rows": "stacked" if model.stacked else "single", "compiled": model.compiled},
        notes=notes,
        **({"attackers": [whole.names[i] for i in attackers_of(whole, s.attackers)]} if s.attack != NONE else {}),
    )
    run = stack.enter_context(Run.opened(folder, config, description, runtime.force))
    result = run.result
    if result is not None:
        findings += run.findings
        for note in run.notes:
            listener.warned(note)
        return result
    if federation.preprocessing:
        run.keep("preprocessing.json", federation.preprocessing.to_json())
    for note in notes:
        listener.warned(f"{folder.name}: {note}")
    template = tensors_of(initial_state(spec, model))
    start, tensors, warnings = run.resume(template)
    if start > s.rounds:
        raise WaffleError(f"{folder} has come to round {start} already, {s.rounds} are asked for")
    for warning in warnings:
        listener.warned(warning)
    state = state_of(tensors, initial_state(spec, model)) if tensors else None
    next_save = time.monotonic() + runtime.checkpoint_seconds
    return ActiveRun(config, run, replace(spec, state=state), start, model.compiled, next_save)


def _cell(config: RunConfig, federation: Federation) -> RunSpec:
    """The run as the engine sees it; who trains alone is nobody's victim."""
    s = config.settings
    spec = RunSpec(config.algorithm(), federation, s.seed, requested=frozenset([federation.alice]))
    if s.attack == NONE or federation.agents == 1:
        return spec
    tamper = tamper_of(federation, s.attack, s.attackers, s.seed)
    return replace(spec, tamper=tamper, attackers=attackers_of(federation, s.attackers))


def _groups(jobs: Sequence[ActiveRun], stack: int) -> list[list[ActiveRun]]:
    """Runs that train their rows alike, and stand at the same round, go into one stack, with those that they carry."""
    carried = _carried(jobs)
    groups: dict[Any, list[list[ActiveRun]]] = {}
    for i, job in enumerate(jobs):
        if i in carried:
            continue
        s = job.config.settings
        key = (
            training_key(job.spec.algorithm),
            s.data,
            s.model,
            s.rounds,
            s.epochs,
            s.batch_size,
            s.remainder,
            s.augment and ("augment", s.shift),  # the border of a crop is the darkest pixel of all that are stacked
            s.guard,
            s.precision,
        )
        f = job.spec.federation
        several = [job, *(jobs[k] for k, carrier in carried.items() if carrier == i)]
        groups.setdefault((*key, f.shape, f.outputs, f.task, job.start, f.agents, job.compiled), []).append(several)
    pieces = [group[i : i + stack] for group in groups.values() for i in range(0, len(group), stack)]
    return [list(chain.from_iterable(piece)) for piece in pieces]


def _carried(jobs: Sequence[ActiveRun]) -> dict[int, int]:
    """Runs that need no training beside another one of the same settings that stands at the same round, and which."""
    alike: dict[Any, list[int]] = {}
    for i, job in enumerate(jobs):
        if job.config.settings.guard == "off":  # a guard goes by Alice: under one nothing is shared
            alike.setdefault((job.config.settings, job.start), []).append(i)
    found = ((some, carriers([jobs[i].spec for i in some])) for some in alike.values())
    return {some[k]: some[carrier] for some, pairs in found for k, carrier in pairs.items()}


def _train(
    jobs: Sequence[ActiveRun],
    runtime: Runtime,
    device: torch.device,
    listener: Listener,
    stopped: Callable[[], int],
    until: int | None,
) -> Iterator[tuple[ActiveRun, dict[str, Any]]]:
    """Train one stack to its end, or to its pause, logging every round and saving every few seconds."""
    s = jobs[0].config.settings
    last = s.rounds if until is None else min(until, s.rounds)
    model = model_of(s, jobs[0].spec.federation, runtime, device)
    specs = on_device([job.spec for job in jobs], model)
    stream = simulate(
        specs,
        model,
        rounds=s.rounds,
        start=jobs[0].start,
        batch_size=s.batch_size,
        remainder=s.remainder,
        epochs=s.epochs,
        augment=s.augment,
        guard=s.guard,
        workers=runtime.workers,
        engine=runtime.engine,
    )
    began, ended = time.monotonic(), False
    try:
        for outcomes in islice(stream, last - jobs[0].start):
            for outcome in outcomes:
                job = jobs[outcome.index]
                if outcome.error:
                    save(job)
                    yield job, close(job, specs[outcome.index], model, "diverged", str(outcome.error))
                else:
                    log(job, outcome, listener)
            if outcomes[0].round < last:
                save_some(jobs, runtime.checkpoint_seconds, time.monotonic() - began)
            if stopped():
                raise Interrupted(stopped())
            began = time.monotonic()
        ended = last == s.rounds
    finally:
        for job in jobs:
            if not ended and job.run.result is None:
                save(job)
    for job, spec in zip(jobs, specs, strict=True):
        if ended and job.run.result is None:
            yield job, close(job, spec, model, "finished")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextlib.contextmanager
def _stop_requests(minutes: float = 0.0) -> Iterator[Callable[[], int]]:
    """Turn Ctrl-C, SIGTERM and the end of the time into a wish to stop after this round; a second Ctrl-C is obeyed."""
    received: list[int] = []
    end = time.monotonic() + 60 * minutes if minutes else math.inf

    def handle(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever runs us handles the signals
        before = {}
    try:
        yield lambda: received[0] if received else signal.SIGALRM * (time.monotonic() >= end)
    finally:
        for number, old in before.items():
            signal.signal(number, old)
