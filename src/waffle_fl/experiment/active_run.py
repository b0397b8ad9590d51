"""A run in progress: logged every round, saved every few seconds, closed with its model and its predictions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from waffle_fl.config import RunConfig, Settings
from waffle_fl.engines.evaluation import SCORE_ROWS, Predictor, predictor_of, views_of
from waffle_fl.engines.mixed_outputs import memory_of, output_of, tensors_in
from waffle_fl.engines.newcomers import join_after_training
from waffle_fl.engines.run_spec import Outcome, RunSpec, State, all_nets, own_net
from waffle_fl.experiment.factories import round_settings
from waffle_fl.experiment.runtime import Listener
from waffle_fl.federation import Federation
from waffle_fl.metrics import measure
from waffle_fl.models import FlatModel, Net
from waffle_fl.records import Run, Selection, read_rounds, summary

CHECKPOINT_SHARE = 2000  # a run trains at least this many times as long as it saves,
LONGEST_UNSAVED = 120.0  # but at most this many seconds between checkpoints
SAVING_SHARE = 0.25  # maximum share of a round's time spent on saving if many runs are due at once


@dataclass
class ActiveRun:
    """A run in progress: its config, its folder, its spec, and its latest state."""

    config: RunConfig
    run: Run
    spec: RunSpec
    start: int
    next_save: float
    latest: tuple[int, State] | None = None
    selected: Selected | None = None
    newcomers: tuple[Federation, ...] = ()  # agents that join after training, each alone


class Selected(NamedTuple):
    """The model of the round with the best validation score so far, and its rank."""

    rank: tuple[float, ...]
    net: Net


def log(active: ActiveRun, outcome: Outcome, spec: RunSpec, model: FlatModel, listener: Listener) -> None:
    active.run.append(outcome.measured)
    active.latest = outcome.round, outcome.state
    if selects(active.config.settings):
        rank = selection_of(active.config.settings).rank(outcome.measured)
        if active.selected is None or rank > active.selected.rank:
            active.selected = Selected(rank, own_net(spec, outcome.state, model))
    listener.advanced(active.config, outcome.measured)


def selects(s: Settings) -> bool:
    """Whether a run saves the model of a selected round."""
    return s.final_model == "selected"


def selection_of(s: Settings) -> Selection:
    return Selection(s.selected_by, s.final_round)


def save(active: ActiveRun) -> None:
    if active.latest:
        if active.spec.store:
            active.spec.store.sync(active.latest[1].agents)
        chosen = selected_tensors(active.selected.net) if active.selected else {}
        active.run.checkpoint(active.latest[0], tensors_of(active.latest[1]) | chosen)


def selected_tensors(net: Net) -> dict[str, Tensor]:
    """Return the selected model as tensors of a checkpoint."""
    return {f"selected.{name}": tensor for name, tensor in net._asdict().items()}


def selected_from(
    tensors: Mapping[str, Tensor], rounds: Sequence[Mapping[str, Any]], like: Net, selection: Selection
) -> Selected:
    """Return the selected model of a checkpoint; its rank is the best of the logged rounds."""
    net = Net(*(tensors[f"selected.{name}"].to(old.device) for name, old in like._asdict().items()))
    return Selected(max(map(selection.rank, rounds)), net)


def save_some(active_runs: Sequence[ActiveRun], every: float, round_seconds: float) -> None:
    """Save the runs whose checkpoint is due. If many are due, save a few per round, so that a GPU does not wait."""
    began = time.monotonic()
    for active in sorted(
        (active for active in active_runs if active.run.result is None and active.next_save <= began),
        key=lambda active: active.next_save,
    ):
        before = time.monotonic()
        save(active)
        now = time.monotonic()
        active.next_save = now + min(max(every, CHECKPOINT_SHARE * (now - before)), LONGEST_UNSAVED) if every else now
        if every and now - began > SAVING_SHARE * round_seconds:
            return


def close(active: ActiveRun, spec: RunSpec, model: FlatModel, status: str, message: str = "") -> dict[str, Any]:
    """Write the result of a run. The data of `spec` is on the model's device."""
    rounds, selection = read_rounds(active.run.folder / "rounds.jsonl"), selection_of(active.config.settings)
    result = summary(rounds, status, message, selection)
    state = active.latest[1] if active.latest else spec.state
    if status != "finished" or state is None:
        active.run.close(result)
        return result
    own, federation = active.selected.net if active.selected else own_net(spec, state, model), spec.federation
    memory = memory_of(spec.algorithm, model, own, federation)
    tensors = predictions(model, output_of(spec.algorithm, model, own, memory), federation)
    scored = everyones_predictions(spec, state, model) if spec.everyone else tensors
    result |= {"metrics": measure(scored["output"], scored["target"])}
    if active.newcomers:
        s = active.config.settings
        result["newcomers"] = {
            one.names[0]: join_after_training(spec, state, model, round_settings(s), one, s.newcomer_rounds)
            for one in active.newcomers
        }
    named = tensors_in(spec.algorithm, model, own, memory)
    active.run.close(result, named, {name: tensor.cpu() for name, tensor in tensors.items()})
    if spec.store:
        spec.store.delete()
    return result


def everyones_predictions(spec: RunSpec, state: State, model: FlatModel) -> dict[str, Tensor]:
    """Return outputs and targets of all agents' test data, each agent with its own model."""
    nets = all_nets(spec, state, model)
    parts = []
    for view in views_of(spec.federation):
        net = Net(nets.params[view.alice], nets.stats[view.alice])
        parts.append(predictions(model, predictor_of(spec.algorithm, model, net, view), view))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def predictions(model: FlatModel, answer: Predictor, federation: Federation) -> dict[str, Tensor]:
    """Return outputs and targets of Alice's test data. For regression they are float64 in the target's unit."""
    rows = federation.test[federation.alice]
    parts = torch.split(rows, SCORE_ROWS)
    output = torch.cat([answer(federation.x[part].to(model.device, model.dtype)) for part in parts])
    tensors = {"output": output, "target": federation.labels(federation.alice, rows, progress=1.0)}
    if federation.task == "classification":
        return tensors
    mean, deviation = federation.target_scale(federation.alice)
    return {name: mean + deviation * numbers.double() for name, numbers in tensors.items()}


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
