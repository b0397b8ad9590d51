"""A run on its way: logged every round, saved every few seconds, closed with its model and what that says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from waffle_fl.config import RunConfig
from waffle_fl.engines.evaluation import SCORE_ROWS, Predictor, predictor_of
from waffle_fl.engines.run_spec import Outcome, RunSpec, State, own_net
from waffle_fl.experiment.runtime import Listener
from waffle_fl.federation import Federation
from waffle_fl.metrics import measure
from waffle_fl.models import FlatModel
from waffle_fl.records import Run, read_rounds, summary

CHECKPOINT_SHARE = 2000  # a run trains this many times as long as it saves,
LONGEST_UNSAVED = 120.0  # but loses no more than these seconds
SAVING_SHARE = 0.25  # of a round's time, at most, goes into saving when many runs want to at once


@dataclass
class ActiveRun:
    """A run on its way: its folder, its cell, and how far it has come."""

    config: RunConfig
    run: Run
    spec: RunSpec
    start: int
    compiled: bool
    next_save: float
    latest: tuple[int, State] | None = None


def log(job: ActiveRun, outcome: Outcome, listener: Listener) -> None:
    job.run.append(outcome.measured)
    job.latest = outcome.round, outcome.state
    listener.advanced(job.config, outcome.measured)


def save(job: ActiveRun) -> None:
    if job.latest:
        job.run.checkpoint(job.latest[0], tensors_of(job.latest[1]))


def save_some(jobs: Sequence[ActiveRun], every: float, round_seconds: float) -> None:
    """Save the runs whose turn has come; of many, a few each round, so that a GPU goes on working meanwhile."""
    began = time.monotonic()
    for job in sorted((j for j in jobs if j.run.result is None and j.next_save <= began), key=lambda j: j.next_save):
        before = time.monotonic()
        save(job)
        now = time.monotonic()
        job.next_save = now + min(max(every, CHECKPOINT_SHARE * (now - before)), LONGEST_UNSAVED) if every else now
        if every and now - began > SAVING_SHARE * round_seconds:
            return


def close(job: ActiveRun, spec: RunSpec, model: FlatModel, status: str, message: str = "") -> dict[str, Any]:
    """The end of a run, its cell's data where the model is."""
    result = summary(read_rounds(job.run.folder / "rounds.jsonl"), status, message)
    state = job.latest[1] if job.latest else spec.state
    if status != "finished" or state is None:
        job.run.close(result)
        return result
    own, federation = own_net(spec, state, model), spec.federation
    said = predictions(model, predictor_of(spec.algorithm, model, own, federation), federation)
    result |= {"metrics": measure(said["output"], said["target"])}
    job.run.close(result, model.state_dict(own), {name: tensor.cpu() for name, tensor in said.items()})
    return result


def predictions(model: FlatModel, answer: Predictor, federation: Federation) -> dict[str, Tensor]:
    """What Alice's model says of her test data, beside the truth; numbers in the target's own unit, in double."""
    rows = federation.test[federation.alice]
    parts = torch.split(rows, SCORE_ROWS)
    output = torch.cat([answer(federation.x[part].to(model.device, model.dtype)) for part in parts])
    said = {"output": output, "target": federation.labels(federation.alice, rows, progress=1.0)}
    prepared = federation.preprocessing
    if prepared is None or federation.task == "classification":
        return said
    mean, deviation = prepared.target_mean, prepared.target_deviation
    return {name: mean + deviation * numbers.double() for name, numbers in said.items()}


def tensors_of(state: State) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": tensor
        for part, fields in (("server", state.server), ("agents", state.agents))
        for name, tensor in fields._asdict().items()
    }


def state_of(tensors: Mapping[str, Tensor], like: State) -> State:
    parts = [
        type(fields)(*(tensors[f"{part}.{name}"].to(old.device) for name, old in fields._asdict().items()))
        for part, fields in (("server", like.server), ("agents", like.agents))
    ]
    return State(*parts)
