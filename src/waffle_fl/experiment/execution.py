"""Execute runs: open or resume their folders, group runs that can share a stack, and train them."""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from waffle_fl.config import RunConfig
from waffle_fl.engines.row_store import RowStore
from waffle_fl.engines.run_spec import initial_state, on_device, own_net
from waffle_fl.engines.simulate import simulate
from waffle_fl.errors import WaffleError
from waffle_fl.experiment.active_run import (
    ActiveRun,
    close,
    log,
    save,
    save_some,
    selected_from,
    selected_tensors,
    selection_of,
    selects,
    state_of,
    tensors_of,
)
from waffle_fl.experiment.factories import model_of, newcomers_of, simulation_options
from waffle_fl.experiment.grouping import stacks_of
from waffle_fl.experiment.prepared_run import PreparedRun, prepare, provenance_of
from waffle_fl.experiment.runtime import Interrupted, Listener, Runtime, device_of
from waffle_fl.manifest import LOG, Finding, summary
from waffle_fl.out_of_memory import enough_memory
from waffle_fl.records import Run, read_rounds

STATES = "states"  # folder of the states of agents within a run folder
FILES_PER_RUN, SPARE_FILES = 2, 200


def execute(
    runs: Sequence[tuple[RunConfig, Path]], runtime: Runtime, listener: Listener | None = None, until: int | None = None
) -> list[dict[str, Any]]:
    """Train every run to its end and return the results in order. Finished runs are not run again.

    With `until`, runs are saved and paused after that round. The status of a paused run is `paused`.
    """
    listener = listener or Listener()
    if runtime.workers < 0 or runtime.stack < 1 or not runtime.minutes >= 0:
        given = f"{runtime.workers}, {runtime.stack} and {runtime.minutes}"
        raise WaffleError(f"expected workers >= 0, stack >= 1 and minutes >= 0, got {given}")
    if runtime.on == "ray":
        on_ray: Any = import_module("waffle_fl.ray_cluster.driver")  # Ray is an optional package
        results_on_ray: list[dict[str, Any]] = on_ray.execute_on_ray(runs, runtime, listener, until)
        return results_on_ray
    if runtime.address:
        raise WaffleError(f"address: expected it only with --on ray, got {runtime.address!r}")
    device = device_of(runtime.device)
    _allow_files(FILES_PER_RUN * len(runs))
    results: dict[Path, dict[str, Any]] = {}
    findings: list[Finding] = []
    with enough_memory(), contextlib.ExitStack() as stack, stop_requests(runtime.minutes) as stopped:
        active_runs = []
        for config, folder in runs:
            prepared = prepare(config, folder, runtime, device)
            active = open_run(stack, prepared, runtime, device_name(device), listener, findings)
            if isinstance(active, ActiveRun):
                active_runs.append(active)
            else:
                results[folder] = active
        for line in summary(findings):
            listener.warned(line)
        listener.planned(runs, len(results))
        for active in active_runs:
            if active.start:
                listener.resumed(active.config, active.start)
        waiting = [active for active in active_runs if until is None or active.start < until]
        for group in stacks_of(waiting, runtime.stack):
            for active, result in _train(group, runtime, device, listener, stopped, until):
                results[active.run.folder] = result
                listener.ended(active.config, result)
    return [results.get(folder, {"status": "paused", "rounds": until}) for _, folder in runs]


def _allow_files(count: int) -> None:
    """Raise the limit of open files. Every run keeps its lock and its log open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_run(
    stack: contextlib.ExitStack,
    prepared: PreparedRun,
    runtime: Runtime,
    device: str,
    listener: Listener,
    findings: list[Finding],
) -> ActiveRun | dict[str, Any]:
    """Lock and open a run's folder. Return the run in progress, or the result if it has ended."""
    config, folder, spec, all_agents, model = prepared[:5]
    if config.settings.states == "disk":
        spec = replace(spec, store=RowStore(folder / STATES))
    s, federation = config.settings, spec.federation
    description = provenance_of(prepared, runtime, device)
    run = stack.enter_context(Run.opened(folder, config, description, runtime.force))
    result = run.result
    if result is not None:
        findings += run.findings
        for note in run.notes:
            listener.warned(note)
        return result
    if federation.preprocessing:
        run.keep("preprocessing.json", federation.preprocessing.to_json())
    if federation.scaling:
        run.keep("scaling.json", federation.scaling.to_json())
    for note in description["notes"]:
        listener.warned(f"{folder.name}: {note}")
    initial = initial_state(spec, model)
    first = own_net(spec, initial, model)
    template = tensors_of(initial) | (selected_tensors(first) if selects(s) else {})
    start, tensors, warnings = run.resume(template)
    if start > s.rounds:
        raise WaffleError(f"expected at least {start} rounds, got {s.rounds}: {folder} is already at round {start}")
    for warning in warnings:
        listener.warned(warning)
    state = state_of(tensors, initial) if tensors else None
    next_save = time.monotonic() + runtime.checkpoint_seconds
    newcomers = newcomers_of(s, all_agents, runtime)
    active = ActiveRun(config, run, replace(spec, state=state), start, next_save, newcomers=newcomers)
    if tensors and selects(s):
        active.selected = selected_from(tensors, read_rounds(folder / LOG), first, selection_of(s))
    return active


def _train(
    active_runs: Sequence[ActiveRun],
    runtime: Runtime,
    device: torch.device,
    listener: Listener,
    stopped: Callable[[], int],
    until: int | None,
) -> Iterator[tuple[ActiveRun, dict[str, Any]]]:
    """Train one stack to its end or pause. Log every round and save every few seconds."""
    s = active_runs[0].config.settings
    last = s.rounds if until is None else min(until, s.rounds)
    model = model_of(s, active_runs[0].spec.federation, runtime, device)
    specs = on_device([active.spec for active in active_runs], model)
    stream = simulate(specs, model, start=active_runs[0].start, **simulation_options(s, runtime))
    began, ended = time.monotonic(), False
    try:
        for outcomes in islice(stream, last - active_runs[0].start):
            for outcome in outcomes:
                active = active_runs[outcome.index]
                if outcome.error:
                    save(active)
                    yield active, close(active, specs[outcome.index], model, "diverged", str(outcome.error))
                else:
                    log(active, outcome, specs[outcome.index], model, listener)
            if outcomes[0].round < last:
                save_some(active_runs, runtime.checkpoint_seconds, time.monotonic() - began)
            if stopped():
                raise Interrupted(stopped())
            if listener.stopped():
                raise Interrupted(signal.SIGTERM)
            began = time.monotonic()
        ended = last == s.rounds
    finally:
        for active in active_runs:
            if not ended and active.run.result is None:
                save(active)
            if active.spec.store and not ended:
                active.spec.store.close()
    for active, spec in zip(active_runs, specs, strict=True):
        if ended and active.run.result is None:
            yield active, close(active, spec, model, "finished")


def device_name(device: torch.device) -> str:
    """Return the name of a device that a run folder keeps."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextlib.contextmanager
def stop_requests(minutes: float = 0.0) -> Iterator[Callable[[], int]]:
    """Turn Ctrl-C, SIGTERM and the time limit into a stop after the current round. A second Ctrl-C stops at once."""
    received: list[int] = []
    end = time.monotonic() + 60 * minutes if minutes else math.inf

    def handle(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: the caller handles the signals
        before = {}
    try:
        yield lambda: received[0] if received else signal.SIGALRM * (time.monotonic() >= end)
    finally:
        for number, old in before.items():
            signal.signal(number, old)
