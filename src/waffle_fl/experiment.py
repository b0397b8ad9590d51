"""From settings to finished run folders: build, group the runs that can share a stack, train, record, resume."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from waffle_fl.algorithms import Net, training_key
from waffle_fl.algorithms.schedules import evaluate
from waffle_fl.config import Experiment, RunConfig, Settings
from waffle_fl.data import Dataset, load
from waffle_fl.data.files import data_dir as data_folder
from waffle_fl.engines.cells import Cell, Outcome, State
from waffle_fl.engines.closing import SCORE_ROWS
from waffle_fl.engines.simulate import check_stack, initial_state, simulate
from waffle_fl.errors import Diverged, WaffleError
from waffle_fl.federation import Federation, build, index_of, pool_of
from waffle_fl.folders import own_federation
from waffle_fl.metrics import measure
from waffle_fl.models import STATS_POLICY, FlatModel, builder, cross_entropy, squared_error
from waffle_fl.partition import split
from waffle_fl.records import Run, provenance, read_rounds, summary

FILES_A_RUN, SPARE_FILES = 2, 200
EVERYONE = "all"
STACK = 64  # runs that train together at most
CHECKPOINT_SECONDS = 10.0
CHECKPOINT_SHARE = 2000  # and a run trains this many times as long as it saves,
LONGEST_UNSAVED = 120.0  # but loses no more than these seconds
SAVING_SHARE = 0.25  # of a round's time, at most, goes into saving when many runs want to at once
COMPILE_PAYS = 30_000  # steps of a row: a compiled one saves about a millisecond, a compilation takes half a minute


@dataclass(frozen=True)
class Place:
    """Where and how to run."""

    device: str = "auto"
    """auto, cpu or cuda."""
    data_dir: str = ""
    """Folder of the data sets (else $WAFFLE_DATA, else the user's cache folder)."""
    allow_unverified: bool = False
    """Use data files whose checksum is not the official one; the record says so."""
    workers: int = 0
    """Processes that train rows side by side; 0 takes one a core. It changes no result."""
    stack: int = STACK
    """Runs that train together at most."""
    rows: Literal["auto", "stacked", "single"] = "auto"
    """Train agents as one stack or row by row; auto stacks small models, on a CPU only those that do not convolve."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile models that train row by row; auto does so on a GPU in runs long enough to win the time back."""
    force: bool = False
    """Go on with a run whose config, data or code has changed; the record says so."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Seconds between checkpoints at least; 0 saves after every round."""
    minutes: float = 0.0
    """Stop after so many minutes, every run saved, as if by Ctrl-C; 0 never does."""


class Listener:
    """What a front end may want to hear of; the default hears nothing."""

    def planned(self, runs: Sequence[tuple[RunConfig, Path]], finished: int) -> None: ...
    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None: ...
    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None: ...
    def warned(self, message: str) -> None: ...


@dataclass
class Interrupted(Exception):
    """The user asked to stop, or the time is up; every run is checkpointed."""

    signal: int


def device_of(name: str) -> torch.device:
    """`auto` takes the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WaffleError(f"expected a device such as auto, cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WaffleError("device cuda was asked for, but this machine shows none: use --device auto or cpu")
    if device.type not in ("cpu", "cuda"):
        raise WaffleError(f"expected the device auto, cpu or cuda, got {name!r}")
    return device


@lru_cache(maxsize=2)
def _dataset(name: str, folder: str, allow_unverified: bool) -> Dataset:
    return load(name, folder, allow_unverified)


@lru_cache(maxsize=2)
def _pool(name: str, folder: str, allow_unverified: bool) -> tuple[Tensor, Tensor]:
    return pool_of(_dataset(name, folder, allow_unverified))


def federation_of(s: Settings, data_dir: str = "", allow_unverified: bool = False) -> Federation:
    """The federation that the settings describe; runs that differ in their seed alone share it."""
    folder = _own_folder(s.data, data_dir) if s.is_own else None
    if folder:
        whole = own_federation(s, folder, None if s.alice == EVERYONE else s.alice)
    else:
        whole = _federation(replace(s, seed=0, leave_out=()), data_dir, allow_unverified)
    return whole.without(*s.leave_out) if s.leave_out else whole


def _own_folder(name: str, place: str) -> Path | None:
    """A folder of the user's own: a path, or a name beside the data sets."""
    if os.sep in name or Path(name).is_dir():
        return Path(name)
    beside = data_folder(place) / name
    return beside if beside.is_dir() else None


@lru_cache(maxsize=16)
def _federation(s: Settings, data_dir: str, allow_unverified: bool) -> Federation:
    dataset = _dataset(s.data, data_dir, allow_unverified)
    names = [f"agent {i}" for i in range(s.agents)]
    alice = index_of(s.alice, names)
    partition = split(
        dataset.y_train,
        dataset.y_test,
        s.split,
        agents=s.agents,
        classes=dataset.classes,
        alice=alice,
        seed=s.split_seed,
        samples_per_agent=s.samples_per_agent,
        validation=s.validation,
        test=s.test,
        shares=s.shares or None,
        sizes=s.sizes,
        direction=s.direction,
        permutation_seed=s.permutation_seed,
        shared_permutation=s.shared_permutation,
    )
    return build(dataset, partition, alice, _pool(s.data, data_dir, allow_unverified))


def _origin(s: Settings, place: Place) -> dict[str, Any]:
    """What the record says of where the data came from."""
    if s.is_own:
        return {}
    dataset = _dataset(s.data, place.data_dir, place.allow_unverified)
    return {"data_verified": dataset.verified, **({"data_note": dataset.note} if dataset.note else {})}


def advice(config: RunConfig, federation: Federation) -> list[str]:
    """What a careful colleague would mention before the run."""
    notes = list(federation.notes)
    empty = [name for name, n in zip(federation.names, federation.samples.tolist(), strict=True) if not n]
    if empty:
        notes.append(f"{', '.join(empty)} without training samples: weight 0 throughout")
    if config.method == "waffle":
        if federation.agents == 1:
            notes.append("a single agent: this is Local")
        if federation.agents == 2:
            notes.append("two agents: the paper's weights are 0/0, both weigh the same until 95 % of the rounds")
        if config.settings.rounds < 20:
            notes.append("fewer than 20 rounds: the last 5 %, in which Alice trains alone, are at most one round")
    return notes


def plan(experiment: Experiment, out: Path, place: Place | None = None) -> list[tuple[RunConfig, Path]]:
    """The runs of a grid, each with its folder. An option that is a table is read at the run's split."""
    place = place or Place()
    runs = []
    for method in experiment.methods:
        for kind in experiment.splits:
            for seed in experiment.seeds:
                table = experiment.options.get(method, {})
                options = {k: v.get(kind) if isinstance(v, dict) else v for k, v in table.items()}
                given = {k: v for k, v in options.items() if v is not None}
                settings = replace(experiment.settings, split=kind, seed=seed)
                for alice in alices(settings, place):
                    config = RunConfig(method=method, settings=replace(settings, alice=alice), options=given)
                    runs.append((config, out / config.label))
    return runs


def alices(s: Settings, place: Place) -> list[str]:
    """The agents that a model is wanted for: the one who is named, or each who can be."""
    if s.alice != EVERYONE:
        return [s.alice]
    federation = everyone_of(s, place)
    able = [
        (i, name) for i, name in enumerate(federation.names) if len(federation.train[i]) and len(federation.test[i])
    ]
    return [handle(i, name) for i, name in able]


def everyone_of(s: Settings, place: Place) -> Federation:
    """The federation of all agents, whoever is Alice."""
    wanted = replace(s, alice=EVERYONE if s.is_own else "0", leave_out=())
    return federation_of(wanted, place.data_dir, place.allow_unverified)


def handle(agent: int, name: str) -> str:
    """What a config calls an agent: its name, or its number where it has no name of its own."""
    return str(agent) if name == f"agent {agent}" else name


@dataclass
class _Job:
    """A run on its way: its folder, its cell, and how far it has come."""

    config: RunConfig
    run: Run
    cell: Cell
    start: int
    compiled: bool
    next_save: float
    latest: tuple[int, State] | None = None


def execute(
    runs: Sequence[tuple[RunConfig, Path]], place: Place, listener: Listener | None = None
) -> list[dict[str, Any]]:
    """Bring every run to its end and return the results, in order. Finished runs are not run again."""
    listener = listener or Listener()
    if place.workers < 0 or place.stack < 1 or not place.minutes >= 0:
        given = f"{place.workers}, {place.stack} and {place.minutes}"
        raise WaffleError(f"expected workers >= 0, stack >= 1 and minutes >= 0, got {given}")
    device = device_of(place.device)
    _allow_files(FILES_A_RUN * len(runs))
    results: dict[Path, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack, _stop_requests(place.minutes) as stopped:
        jobs = []
        for config, folder in runs:
            job = _open(stack, config, folder, place, device, listener)
            if isinstance(job, _Job):
                jobs.append(job)
            else:
                results[folder] = job
        listener.planned(runs, len(results))
        for group in _groups(jobs, place.stack):
            for job, result in _train(group, place, device, listener, stopped):
                results[job.run.folder] = result
                listener.ended(job.config, result)
    return [results[folder] for _, folder in runs]


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
    place: Place,
    device: torch.device,
    listener: Listener,
) -> _Job | dict[str, Any]:
    """Lock a run's folder and find out where it stands; a run that has ended gives its result."""
    whole = federation_of(config.settings, place.data_dir, place.allow_unverified)
    alone = config.method == "local"  # nobody else's training could matter
    federation = whole.only(whole.alice) if alone else whole
    if config.settings.augment and len(federation.shape) != 3:
        raise WaffleError(f"augment is for images; {config.settings.data} has samples of shape {federation.shape}")
    model = model_of(config.settings, federation, place, device)
    _check_once(config.settings, model, federation)
    cell = Cell(config.algorithm(), federation, config.settings.seed)
    check_stack([cell], model, config.settings.batch_size)
    _check_schedules(config)
    notes = advice(config, federation)
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
        **_origin(config.settings, place),
        statistics=STATS_POLICY if model.stats_size else "this model has no running statistics",
        parameters=model.size,
        engine={"rows": "stacked" if model.stacked else "single", "compiled": model.compiled},
        notes=notes,
    )
    run = stack.enter_context(Run.opened(folder, config, description, place.force))
    result = run.result
    if result is not None:
        for note in run.notes:
            listener.warned(note)
        return result
    if federation.preprocessing:
        run.keep("preprocessing.json", federation.preprocessing.to_json())
    for note in notes:
        listener.warned(f"{folder.name}: {note}")
    template = _tensors(initial_state(cell, model))
    start, tensors, warnings = run.resume(template)
    if start > config.settings.rounds:
        raise WaffleError(f"{folder} has come to round {start} already, {config.settings.rounds} are asked for")
    for warning in warnings:
        listener.warned(warning)
    state = _state(tensors, initial_state(cell, model)) if tensors else None
    next_save = time.monotonic() + place.checkpoint_seconds
    return _Job(config, run, replace(cell, state=state), start, model.compiled, next_save)


def _check_once(s: Settings, model: FlatModel, federation: Federation) -> None:
    """A model that fitted such data once is not tried again."""
    kind = (s.model, s.data, federation.shape, federation.outputs, federation.task)
    if kind not in _fitting:
        check_output(s.model, model, federation)
        _fitting.add(kind)


_fitting: set[tuple[Any, ...]] = set()


def check_output(name: str, model: FlatModel, federation: Federation) -> None:
    """A model that does not fit the data is told before the first round."""
    net = model.init(0)
    sample = federation.x[federation.train[federation.alice][:1]].to(model.device, model.dtype)
    try:
        found = tuple(model.predict(net.params, net.stats, sample).shape)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise WaffleError(f"the model {name} cannot take samples of shape {federation.shape}: {reason}") from None
    wanted = [(1, federation.outputs)] + ([(1,)] if federation.task == "regression" else [])
    if found not in wanted:
        raise WaffleError(
            f"the model {name} answers one sample in the shape {found}, expected {wanted[0]}: "
            f"{'a number' if federation.task == 'regression' else 'a score for each class'}"
        )


def _check_schedules(config: RunConfig) -> None:
    """A schedule that leaves [0, 1] in any round is told before the first."""
    for name in ("omega", "psi"):
        schedule = getattr(config.algorithm(), name, None)
        if schedule is not None:
            for r in range(1, config.settings.rounds + 1):
                evaluate(schedule, name, r, config.settings.rounds)


def _groups(jobs: Sequence[_Job], stack: int) -> list[list[_Job]]:
    """Runs that train their rows alike, and stand at the same round, go into one stack."""
    groups: dict[Any, list[_Job]] = {}
    for job in jobs:
        s = job.config.settings
        key = (
            training_key(job.cell.algorithm),
            s.data,
            s.model,
            s.rounds,
            s.epochs,
            s.batch_size,
            s.augment,
            s.guard,
            s.precision,
        )
        f = job.cell.federation
        groups.setdefault((*key, f.shape, f.outputs, f.task, job.start, f.agents, job.compiled), []).append(job)
    return [group[i : i + stack] for group in groups.values() for i in range(0, len(group), stack)]


def _train(
    jobs: Sequence[_Job], place: Place, device: torch.device, listener: Listener, stopped: Callable[[], int]
) -> Iterator[tuple[_Job, dict[str, Any]]]:
    """Train one stack to its end, logging every round and saving every few seconds."""
    s = jobs[0].config.settings
    model = model_of(s, jobs[0].cell.federation, place, device)
    cells = [job.cell for job in jobs]
    stream = simulate(
        cells,
        model,
        rounds=s.rounds,
        start=jobs[0].start,
        batch_size=s.batch_size,
        epochs=s.epochs,
        augment=s.augment,
        guard=s.guard,
        workers=place.workers,
    )
    began = time.monotonic()
    try:
        for outcomes in stream:
            for outcome in outcomes:
                job = jobs[outcome.cell]
                if outcome.error:
                    _save(job)
                    yield job, _close(job, model, "diverged", str(outcome.error))
                else:
                    _log(job, outcome, listener)
            if outcomes[0].round < s.rounds:
                _save_some(jobs, place.checkpoint_seconds, time.monotonic() - began)
            if stopped():
                raise Interrupted(stopped())
            began = time.monotonic()
    except torch.OutOfMemoryError:
        raise WaffleError("the GPU ran out of memory: train fewer runs at once (--stack) or use --device cpu") from None
    finally:
        for job in jobs:
            if job.run.result is None:
                _save(job)
    for job in jobs:
        if job.run.result is None:
            yield job, _close(job, model, "finished")


def _save(job: _Job) -> None:
    if job.latest:
        job.run.checkpoint(job.latest[0], _tensors(job.latest[1]))


def _save_some(jobs: Sequence[_Job], every: float, round_seconds: float) -> None:
    """Save the runs whose turn has come; of many, a few each round, so that a GPU goes on working meanwhile."""
    began = time.monotonic()
    for job in sorted((j for j in jobs if j.run.result is None and j.next_save <= began), key=lambda j: j.next_save):
        before = time.monotonic()
        _save(job)
        now = time.monotonic()
        job.next_save = now + min(max(every, CHECKPOINT_SHARE * (now - before)), LONGEST_UNSAVED) if every else now
        if every and now - began > SAVING_SHARE * round_seconds:
            return


def _log(job: _Job, outcome: Outcome, listener: Listener) -> None:
    job.run.append(outcome.measured)
    job.latest = outcome.round, outcome.state
    listener.advanced(job.config, outcome.measured)


def _close(job: _Job, model: FlatModel, status: str, message: str = "") -> dict[str, Any]:
    result = summary(read_rounds(job.run.folder / "rounds.jsonl"), status, message)
    state = job.latest[1] if job.latest else job.cell.state
    if status != "finished" or state is None:
        job.run.close(result)
        return result
    federation = job.cell.federation
    net = job.cell.algorithm.personal(state.server, state.agents, federation.agents)
    own = Net(net.params[federation.alice], net.stats[federation.alice])
    said = predictions(model, own, federation)
    result |= {"metrics": measure(said["output"], said["target"])}
    job.run.close(result, model.state_dict(own), said)
    return result


def predictions(model: FlatModel, net: Net, federation: Federation) -> dict[str, Tensor]:
    """What a model says of Alice's test data, beside the truth; numbers in the target's own unit."""
    rows = federation.test[federation.alice]
    parts = torch.split(rows, SCORE_ROWS)
    output = torch.cat([model.predict(*net, federation.x[part].to(model.device, model.dtype)).cpu() for part in parts])
    said = {"output": output, "target": federation.labels(federation.alice, rows)}
    prepared = federation.preprocessing
    if prepared is None or federation.task == "classification":
        return said
    return {name: prepared.target_mean + prepared.target_deviation * numbers for name, numbers in said.items()}


def model_of(s: Settings, federation: Federation, place: Place, device: torch.device) -> FlatModel:
    """The model that the settings describe, on its device."""
    build_module = builder(s.model, s.data, federation.shape, federation.outputs)
    steps = s.rounds * s.epochs * sum(-(-n // s.batch_size) for n in federation.samples.tolist())
    pays = device.type == "cuda" and steps >= COMPILE_PAYS
    return FlatModel(
        build_module,
        loss=squared_error if federation.task == "regression" else cross_entropy,
        precision=s.precision,
        device=device,
        stacked=None if place.rows == "auto" else place.rows == "stacked",
        compiled=pays if place.compile == "auto" else place.compile == "on",
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _tensors(state: State) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": tensor
        for part, fields in (("server", state.server), ("agents", state.agents))
        for name, tensor in fields._asdict().items()
    }


def _state(tensors: Mapping[str, Tensor], like: State) -> State:
    parts = [
        type(fields)(*(tensors[f"{part}.{name}"].to(old.device) for name, old in fields._asdict().items()))
        for part, fields in (("server", like.server), ("agents", like.agents))
    ]
    return State(*parts)


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


__all__ = [
    "EVERYONE",
    "Diverged",
    "Interrupted",
    "Listener",
    "Place",
    "advice",
    "check_output",
    "device_of",
    "everyone_of",
    "execute",
    "federation_of",
    "handle",
    "model_of",
    "plan",
]
