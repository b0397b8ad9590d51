"""Execute runs: open or resume their folders, group runs that can share a stack, and train them."""

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
from waffle_fl.engines.masked_checks import check_privacy
from waffle_fl.engines.noise_checks import check_noise
from waffle_fl.engines.private_gradients import privacy_of
from waffle_fl.engines.run_spec import RunSpec, fitted, initial_state, on_device, own_net
from waffle_fl.engines.shared_training import carriers
from waffle_fl.engines.simulate import check_model, simulate
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
from waffle_fl.experiment.factories import (
    advice,
    check_once,
    check_schedules,
    check_scored,
    federation_of,
    model_name,
    model_of,
    newcomers_of,
    origin,
    round_settings,
    simulation_options,
)
from waffle_fl.experiment.runtime import Interrupted, Listener, Runtime, device_of
from waffle_fl.federation import Federation
from waffle_fl.manifest import LOG, Finding, summary
from waffle_fl.models import STATS_POLICY
from waffle_fl.out_of_memory import enough_memory
from waffle_fl.records import Run, provenance, read_rounds

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
    device = device_of(runtime.device)
    _allow_files(FILES_PER_RUN * len(runs))
    results: dict[Path, dict[str, Any]] = {}
    findings: list[Finding] = []
    with enough_memory(), contextlib.ExitStack() as stack, _stop_requests(runtime.minutes) as stopped:
        active_runs = []
        for config, folder in runs:
            active = _open(stack, config, folder, runtime, device, listener, findings)
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
        for group in _groups(waiting, runtime.stack):
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


def _open(
    stack: contextlib.ExitStack,
    config: RunConfig,
    folder: Path,
    runtime: Runtime,
    device: torch.device,
    listener: Listener,
    findings: list[Finding],
) -> ActiveRun | dict[str, Any]:
    """Lock and open a run's folder. Return the run in progress, or the result if it has ended."""
    s = config.settings
    all_agents = federation_of(s, runtime.data_dir, runtime.allow_unverified)
    is_local = config.method == "local" and s.scored == "alice"  # no other agent's training is used
    federation = all_agents.only(all_agents.alice) if is_local else all_agents
    if s.augment and len(federation.shape) != 3:
        raise WaffleError(f"augment is for images; {s.data} has samples of shape {federation.shape}")
    model = model_of(s, federation, runtime, device)
    check_once(s, model, federation)
    spec = fitted(_run_spec(config, federation), model)
    check_model([spec], model, s.batch_size, s.remainder)
    if s.final_round and not selects(s):
        raise WaffleError(f"final_round: expected 0 unless final_model is selected, got {s.final_round}")
    if s.final_round > s.rounds:
        raise WaffleError(f"final_round: expected at most the number of rounds, {s.rounds}, got {s.final_round}")
    if s.test == "none" and not len(federation.validation[federation.alice]):
        raise WaffleError("test: expected share or all without validation data, got none: set validation, such as 0.2")
    if selects(s) and not s.final_round and not len(federation.validation[federation.alice]):
        raise WaffleError(
            "final_model: expected last without validation data, got selected: set validation, such as 0.2"
        )
    check_agents(spec.algorithm, federation.agents)
    check_privacy(spec, round_settings(s))
    check_noise(spec, round_settings(s), model)
    check_schedules(config)
    check_scored(config)
    notes = advice(config, federation, getattr(spec.algorithm, "parts", None))
    description = provenance(
        _device_name(device),
        all_agents.digest(),
        agents=list(all_agents.names),
        alice=all_agents.alice,
        label_counts=all_agents.label_counts().tolist(),
        test_samples=sum(map(len, federation.test)) if spec.everyone else len(federation.test[federation.alice]),
        task=all_agents.task,
        classes=list(all_agents.class_names),
        sample=list(all_agents.shape),
        **({"shifted": dict(all_agents.shifted)} if all_agents.shifted else {}),
        **origin(s, runtime),
        statistics=STATS_POLICY if model.stats_size else "this model has no running statistics",
        model=model_name(s, all_agents.shape),
        parameters=model.size,
        engine={"rows": "stacked" if model.stacked else "single"},
        **privacy_of(federation, round_settings(s)),
        notes=notes,
        **(
            {"attackers": [all_agents.names[i] for i in attackers_of(all_agents, s.attackers)]}
            if s.attack != NONE
            else {}
        ),
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
    if federation.scaling:
        run.keep("scaling.json", federation.scaling.to_json())
    for note in notes:
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


def _run_spec(config: RunConfig, federation: Federation) -> RunSpec:
    """Return the run as the engine's spec. A single agent has no attackers."""
    s = config.settings
    if s.scored == "all":
        return RunSpec(config.algorithm(), federation, s.seed, everyone=True)
    spec = RunSpec(config.algorithm(), federation, s.seed, requested=frozenset([federation.alice]))
    if s.attack == NONE or federation.agents == 1:
        return spec
    tamper = tamper_of(federation, s.attack, s.attackers, s.seed)
    return replace(spec, tamper=tamper, attackers=attackers_of(federation, s.attackers))


def _groups(active_runs: Sequence[ActiveRun], stack: int) -> list[list[ActiveRun]]:
    """Group runs with the same local training that are at the same round into stacks, with the runs they carry."""
    carried = _carried(active_runs)
    groups: dict[Any, list[list[ActiveRun]]] = {}
    for i, active in enumerate(active_runs):
        if i in carried:
            continue
        s = active.config.settings
        key = (
            training_key(active.spec.algorithm),
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
        f = active.spec.federation
        group_of_run = [active, *(active_runs[k] for k, carrier in carried.items() if carrier == i)]
        groups.setdefault((*key, f.shape, f.outputs, f.task, active.start, f.agents), []).append(group_of_run)
    stacks = [group[i : i + stack] for group in groups.values() for i in range(0, len(group), stack)]
    return [list(chain.from_iterable(piece)) for piece in stacks]


def _carried(active_runs: Sequence[ActiveRun]) -> dict[int, int]:
    """Map each run that needs no training of its own to the run with the same settings and round that carries it."""
    alike: dict[Any, list[int]] = {}
    for i, active in enumerate(active_runs):
        if round_settings(active.config.settings).shares_training:
            alike.setdefault((active.config.settings, active.start), []).append(i)
    found = ((indices, carriers([active_runs[i].spec for i in indices])) for indices in alike.values())
    return {indices[k]: indices[carrier] for indices, pairs in found for k, carrier in pairs.items()}


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
            began = time.monotonic()
        ended = last == s.rounds
    finally:
        for active in active_runs:
            if not ended and active.run.result is None:
                save(active)
    for active, spec in zip(active_runs, specs, strict=True):
        if ended and active.run.result is None:
            yield active, close(active, spec, model, "finished")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextlib.contextmanager
def _stop_requests(minutes: float = 0.0) -> Iterator[Callable[[], int]]:
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
