"""Build the federation and the model from the settings, check them, and collect notes for the user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from waffle_fl.algorithms.partial_sharing import Parts
from waffle_fl.algorithms.schedules import ADAPTIVE, evaluate
from waffle_fl.attacks import NONE, parse, poisoned
from waffle_fl.config import ALL_ALICES, RunConfig, Settings
from waffle_fl.constraints import parameters_of
from waffle_fl.data import Dataset, load
from waffle_fl.data.files import data_dir as data_folder
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.errors import WaffleError
from waffle_fl.experiment.runtime import Runtime
from waffle_fl.federation import Federation, build, check_alice, index_of, pool_of
from waffle_fl.folder_federation import folder_federation
from waffle_fl.models import BY_AXES, DEFAULTS, FlatModel, builder, cross_entropy, squared_error
from waffle_fl.models.flat import Precision
from waffle_fl.partition import split
from waffle_fl.user_data import Task


@lru_cache(maxsize=2)
def _dataset(name: str, folder: str, allow_unverified: bool) -> Dataset:
    return load(name, folder, allow_unverified)


@lru_cache(maxsize=2)
def _pool(name: str, folder: str, allow_unverified: bool) -> tuple[Tensor, Tensor]:
    return pool_of(_dataset(name, folder, allow_unverified))


def federation_of(s: Settings, data_dir: str = "", allow_unverified: bool = False) -> Federation:
    """Return the federation that the settings describe.

    Runs that differ only in seed, guard, or an attack that does not poison data share it.
    """
    if s.newcomers and s.attack != NONE:
        raise WaffleError(f"newcomers: expected none with an attack, got {', '.join(s.newcomers)}")
    s = replace(s, seed=0, guard="off")
    if s.test == "none":
        return federation_of(replace(s, test="share"), data_dir, allow_unverified).without_test()
    if parse(s.attack).poison is None:
        s = replace(s, attack=NONE, attackers=1)
    elif not s.is_own:
        return _attacked(s, data_dir, allow_unverified)
    folder = own_folder(s.data, data_dir) if s.is_own else None
    if folder:
        federation = folder_federation(s, folder, None if s.alice == ALL_ALICES else s.alice)
    else:
        federation = _federation(replace(s, leave_out=(), newcomers=()), data_dir, allow_unverified)
    federation = federation.before_joining(*s.newcomers) if s.newcomers else federation
    federation = federation.without(*s.leave_out) if s.leave_out else federation
    return poisoned(federation, s.attack, s.attackers) if s.attack != NONE else federation


@lru_cache(maxsize=32)
def _attacked(s: Settings, data_dir: str, allow_unverified: bool) -> Federation:
    """Return a federation with a backdoor. It has its own copy of the samples, which all such runs share."""
    return poisoned(federation_of(replace(s, attack=NONE), data_dir, allow_unverified), s.attack, s.attackers)


def newcomers_of(s: Settings, federation: Federation, runtime: Runtime) -> tuple[Federation, ...]:
    """Return the agents that join after training, each as a federation of its own, with its training data."""
    if not federation.newcomers:
        return ()
    joined = federation_of(replace(s, newcomers=()), runtime.data_dir, runtime.allow_unverified)
    return tuple(joined.only(joined.names.index(name)) for name in federation.newcomers)


def own_folder(name: str, runtime: str) -> Path | None:
    """Return the user's own data folder: a path, or a folder of this name next to the data sets."""
    if os.sep in name or Path(name).is_dir():
        return Path(name)
    named_folder = data_folder(runtime) / name
    return named_folder if named_folder.is_dir() else None


@lru_cache(maxsize=64)  # the columns of a large table: each feature shift has its own copy of the samples
def _federation(s: Settings, data_dir: str, allow_unverified: bool) -> Federation:
    if s.alice != Settings.alice and not s.split.endswith("*") and not s.shift:  # the data does not depend on Alice
        first = _federation(replace(s, alice=Settings.alice), data_dir, allow_unverified)
        return check_alice(replace(first, alice=index_of(s.alice, first.names)))
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
        test="all" if s.test == "all" else "share",  # "none" is settled before
        shares=s.shares or None,
        sizes=s.sizes,
        direction=s.direction,
        permutation_seed=s.permutation_seed,
        shared_permutation=s.shared_permutation,
        shift=s.shift,
        division=s.division,
    )
    return build(dataset, partition, alice, _pool(s.data, data_dir, allow_unverified))


def origin(s: Settings, runtime: Runtime) -> dict[str, Any]:
    """Return the entries of the record on the origin of the data."""
    if s.is_own:
        return {}
    dataset = _dataset(s.data, runtime.data_dir, runtime.allow_unverified)
    return {"data_verified": dataset.verified, **({"data_note": dataset.note} if dataset.note else {})}


def advice(config: RunConfig, federation: Federation, parts: Parts | None = None) -> list[str]:
    """Return notes for the user before the run; `parts` says which layers the method keeps local, if it does."""
    notes = list(federation.notes)
    if parts and not any((*parts.params[1::2], *parts.stats[1::2])):
        notes.append("no layer of this model is personal: one model for all agents")
    if parts and not any(parts.params[::2]):
        notes.append("every layer of this model is personal: this is Local")
    if config.method == "per-fedavg":
        s, needed = config.settings, config.algorithm().batches_per_update  # type: ignore[attr-defined]
        steps = (s.steps(n) for n in federation.samples.tolist())
        short = [name for name, k in zip(federation.names, steps, strict=True) if 0 < k < needed]
        if short:
            notes.append(f"{', '.join(short)}: fewer than {needed} mini-batches per round, which an update needs")
    if config.method == "fedfomo" and not len(federation.validation[federation.alice]):
        notes.append("no validation data: models are compared on Alice's training samples (set validation)")
    if config.options.get("prediction") == "mixture" and not len(federation.validation[federation.alice]):
        notes.append("no validation data: the mixture is Alice's model alone (set validation)")
    samples = dict(zip(federation.names, federation.samples.tolist(), strict=True))
    empty = [name for name, n in samples.items() if not n and name not in federation.newcomers]
    if empty:
        notes.append(f"{', '.join(empty)} without training samples: weight 0 throughout")
    if federation.drifts(federation.alice):
        notes.append("Alice's own labels drift: test labels change from round to round, so use the last, not the best")
    if config.method == "waffle-paper":
        if federation.agents == 1:
            notes.append("a single agent: this is Local")
        adaptive = config.options.get("psi") == ADAPTIVE
        if federation.agents == 2 and adaptive and config.options.get("denominator", "max") == "max":
            notes.append("two agents: with the denominator max both have the same weight; choose range")
        if federation.agents == 2 and not adaptive:
            notes.append("two agents: the paper's weights are 0/0, both have the same weight until 95 % of the rounds")
        if config.settings.rounds < 20 and not adaptive:
            notes.append("fewer than 20 rounds: the last 5 %, in which Alice trains alone, are at most one round")
    return notes


def model_of(s: Settings, federation: Federation, runtime: Runtime, device: torch.device) -> FlatModel:
    """Return the model that the settings describe, on its device.

    Runs with the same network share it: the trial of stacking and the traced gradients are made once per process.
    """
    make = new_model if ":" in s.model else _known_model
    return make(
        model_name(s, federation.shape),
        s.data,
        federation.shape,
        federation.outputs,
        federation.task,
        s.precision,
        device,
        None if runtime.rows == "auto" else runtime.rows == "stacked",
    )


def new_model(
    name: str,
    data: str,
    shape: tuple[int, ...],
    outputs: int,
    task: Task,
    precision: Precision,
    device: torch.device,
    stacked: bool | None,
) -> FlatModel:
    """Build a model for samples of this shape."""
    loss = squared_error if task == "regression" else cross_entropy
    network = builder(name, data, shape, outputs)
    return FlatModel(network, loss=loss, precision=precision, device=device, stacked=stacked)


_known_model = lru_cache(maxsize=8)(new_model)


def simulation_options(s: Settings, runtime: Runtime) -> dict[str, Any]:
    """Return the arguments of `simulate` that the settings and the runtime determine."""
    return vars(round_settings(s)) | {"workers": runtime.workers, "engine": runtime.engine}


def round_settings(s: Settings) -> RoundSettings:
    """Return the settings of the rounds."""
    return RoundSettings(**{name: getattr(s, name) for name in parameters_of(RoundSettings)})


def model_name(s: Settings, shape: Sequence[int]) -> str:
    """Return the name of the network for samples of this shape, with `auto` resolved."""
    return (DEFAULTS.get(s.data) or BY_AXES.get(len(shape), "mlp")) if s.model == "auto" else s.model


def check_once(s: Settings, model: FlatModel, federation: Federation) -> None:
    """Check the model's output: once per kind of data for built-in models, every time for the user's own models."""
    kind = (s.model, s.data, federation.shape, federation.outputs, federation.task)
    if ":" in s.model or kind not in _checked_models:
        check_output(s.model, model, federation)
        _checked_models.add(kind)


_checked_models: set[tuple[Any, ...]] = set()


def check_output(name: str, model: FlatModel, federation: Federation) -> None:
    """Raise an error if the model does not fit the data."""
    rows = federation.train[federation.alice][:2]
    try:
        model.prepared(federation.x[rows], federation.labels(federation.alice, rows), federation.outputs)
    except WaffleError as error:
        raise WaffleError(f"{name}: {error}") from None


def check_scored(config: RunConfig) -> None:
    """Raise an error if all agents are to be scored in a run that trains for Alice alone, or is under attack."""
    s = config.settings
    if s.scored == "all" and config.method != "local" and getattr(config.algorithm(), "for_alice", False):
        raise WaffleError(f"scored: expected alice for {config.method}, which trains for Alice alone: use alice = all")
    if s.scored == "all" and s.attack != NONE:
        raise WaffleError(f"scored: expected alice with the attack {s.attack}, got all")


def check_schedules(config: RunConfig) -> None:
    """Raise an error if a schedule leaves [0, 1] in any round."""
    for name in ("omega", "psi"):
        schedule = getattr(config.algorithm(), name, None)
        if schedule not in (None, ADAPTIVE):
            for r in range(1, config.settings.rounds + 1):
                evaluate(schedule, name, r, config.settings.rounds)
