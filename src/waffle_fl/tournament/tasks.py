"""Train one method on some columns of a tournament, in memory, and score the model of every Alice.

A column's federation is built once per partition; each agent with training, validation and test samples is Alice once,
in the same federation. A method whose training does not depend on Alice trains once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from waffle_fl.config import RunConfig, Settings
from waffle_fl.engines.evaluation import predictor_of
from waffle_fl.engines.run_spec import Outcome, RunSpec, on_device, own_net
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment import Runtime, device_of, federation_of, model_of
from waffle_fl.experiment.active_run import predictions, selection_of
from waffle_fl.experiment.factories import simulation_options
from waffle_fl.federation import Federation
from waffle_fl.metrics import measure as metrics_of
from waffle_fl.models import FlatModel, Net
from waffle_fl.tournament.plan import Measure

POINTS = 10  # of the accuracy over the rounds in a record
AFTER_DRIFT = 0.8  # an Alice whose labels drift selects among the rounds after this share of them
STACK_BYTES = {"cpu": 3 << 30, "cuda": 40 << 30}  # of all states of one stack
STATES = 12  # vectors per row that a training keeps, roughly
ACTIVATIONS = 3  # times the outputs of all layers: themselves, their nonlinearities, their gradients


class AliceScore(NamedTuple):
    """Points of one Alice's model; larger is better. None where the run diverged before it had a model."""

    selected: float | None  # of the round selected on validation data
    last: float | None
    best: float | None  # of the best round on test data
    loss: float | None  # mean loss on test data in the selected round
    validation: float | None  # points on validation data in the selected round
    round: int
    curve: tuple[float | None, ...]  # accuracy or error in points at each tenth of the rounds


@dataclass
class Task:
    """One Alice in one run: what was measured so far, and her model of the best validation round."""

    spec: RunSpec
    settings: Settings
    rounds: list[Mapping[str, Any]] = field(default_factory=list)
    rank: tuple[float, ...] = (-math.inf,)
    selected: Net | None = None
    latest: Net | None = None
    at: int = 0
    diverged: bool = False

    def add(self, outcome: Outcome, model: FlatModel, keep_latest: bool) -> None:
        if outcome.error:
            self.diverged = True
            return
        self.rounds.append(outcome.measured)
        last = outcome.round == self.settings.rounds
        rank = selection_of(self.settings).rank(outcome.measured)
        drifts = self.spec.federation.drifts(self.spec.federation.alice)
        counts = not drifts or outcome.round > AFTER_DRIFT * self.settings.rounds
        better = counts and rank > self.rank
        if better or (last and keep_latest):
            net = own_net(self.spec, outcome.state, model)
            net = Net(net.params.clone(), net.stats.clone())
            if better:
                self.rank, self.at, self.selected = rank, outcome.round, net
            if last:
                self.latest = net


def train(
    configs: Sequence[RunConfig], runtime: Runtime, measure: Measure, alices: int = 0
) -> Iterator[tuple[int, list[str], list[AliceScore]]]:
    """Yield for each config its position, its Alices and their scores. The configs differ in column and seed only."""
    device = device_of(runtime.device)
    federations = [_federation(config, runtime) for config in configs]
    chosen = [_some(alices_of(federation), alices) for federation in federations]
    model = model_of(configs[0].settings, federations[0], runtime, device)
    pairs = [(i, alice) for i in range(len(configs)) for alice in chosen[i]]
    scores: dict[int, dict[int, AliceScore]] = {i: {} for i in range(len(configs))}
    for part in _parts(configs, federations, pairs, model):
        tasks = _train([(configs[i], federations[i], alice) for i, alice in part], runtime, model, measure)
        for (i, alice), task in zip(part, tasks, strict=True):
            scores[i][alice] = _score(task, model, measure)
            task.selected = task.latest = None
    for i, some in enumerate(chosen):
        yield i, [federations[i].names[alice] for alice in some], [scores[i][alice] for alice in some]


def alices_of(federation: Federation) -> list[int]:
    """Return the agents that have training, validation and test samples."""
    parts = (federation.train, federation.validation, federation.test)
    return [i for i in range(federation.agents) if all(len(part[i]) for part in parts)]


def _some(agents: list[int], most: int) -> list[int]:
    """Return at most this many of the agents, evenly spaced; 0 means all."""
    if not most or len(agents) <= most:
        return agents
    return [agents[i * len(agents) // most] for i in range(most)]


def _federation(config: RunConfig, runtime: Runtime) -> Federation:
    return federation_of(config.settings, runtime.data_dir, runtime.allow_unverified)


def _spec(config: RunConfig, federation: Federation, alice: int) -> RunSpec:
    """Return the run for one Alice. Local trains her alone."""
    own = federation.only(alice) if config.method == "local" else replace(federation, alice=alice)
    return RunSpec(config.algorithm(), own, config.settings.seed, requested=frozenset([own.alice]))


def _parts(
    configs: Sequence[RunConfig],
    federations: Sequence[Federation],
    pairs: Sequence[tuple[int, int]],
    model: FlatModel,
) -> Iterator[list[tuple[int, int]]]:
    """Yield the runs in parts that fit into memory; the Alices of one config stay together if they share a training."""
    shared = not getattr(configs[0].algorithm(), "for_alice", False)
    numbers = STATES * model.size + ACTIVATIONS * configs[0].settings.batch_size * _outputs(model, federations[0].x[:1])
    row_bytes = numbers * model.dtype.itemsize
    most = max(1, STACK_BYTES[model.device.type] // row_bytes)
    part: list[tuple[int, int]] = []
    rows = 0
    seen: set[int] = set()
    for i, alice in pairs:
        new = 0 if shared and i in seen else 1 if configs[i].method == "local" else federations[i].agents
        if part and rows + new > most:
            yield part
            part, rows, seen = [], 0, set()
        part.append((i, alice))
        rows += new
        seen.add(i)
    if part:
        yield part


def _outputs(model: FlatModel, sample: Tensor) -> int:
    """Return how many numbers the layers of the model compute for one sample."""
    counted: list[int] = []

    def count(_: nn.Module, __: Any, output: Any) -> None:
        counted.append(output.numel() if isinstance(output, Tensor) else 0)

    module = model.module()
    hooks = [part.register_forward_hook(count) for part in module.modules() if not list(part.children())]
    try:
        with torch.no_grad():
            module(sample.to(model.device, model.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counted)


def _train(
    runs: Sequence[tuple[RunConfig, Federation, int]], runtime: Runtime, model: FlatModel, measure: Measure
) -> list[Task]:
    specs = on_device([_spec(*run) for run in runs], model)
    tasks = [Task(spec, config.settings) for spec, (config, _, _) in zip(specs, runs, strict=True)]
    for outcomes in simulate(specs, model, **simulation_options(runs[0][0].settings, runtime)):
        for outcome in outcomes:
            tasks[outcome.index].add(outcome, model, keep_latest=measure == "auc")
    return tasks


def _score(task: Task, model: FlatModel, measure: Measure) -> AliceScore:
    """Return the points of an Alice. A run that diverged keeps its selected round and has no last one."""
    unit = task.spec.federation.unit

    def points(line: Mapping[str, Any], prefix: str = "") -> float | None:
        if measure == "error":
            value = line.get(f"{prefix}rmse")
            return None if value is None else 100 * (1 - value / unit)
        value = line.get(f"{prefix}accuracy")
        return None if value is None else 100 * value

    lines = {line["round"]: line for line in task.rounds}
    curve = [points(lines.get(max(1, k * task.settings.rounds // POINTS), {})) for k in range(1, POINTS + 1)]
    if task.selected is None:
        return AliceScore(None, None, None, None, None, 0, tuple(curve))
    tested = _tested(task, task.selected, model)
    validation = points(lines[task.at], "validation_")
    if measure == "auc":  # by the loss, as rounds are selected
        validation = -lines[task.at]["validation_loss"]
    best = max((p for line in task.rounds if (p := points(line)) is not None), default=None)
    last = None if task.diverged else points(task.rounds[-1])
    if measure == "auc":
        best = None
        last = (
            None if task.diverged or task.latest is None else _points(_tested(task, task.latest, model), measure, unit)
        )
    return AliceScore(
        _points(tested, measure, unit), last, best, tested.get("log_loss"), validation, task.at, tuple(curve)
    )


def _tested(task: Task, net: Net, model: FlatModel) -> dict[str, float | None]:
    """Return all metrics of a model on Alice's test data with her final labels."""
    federation = task.spec.federation
    with torch.no_grad():
        found = predictions(model, predictor_of(task.spec.algorithm, model, net, federation), federation)
    return metrics_of(found["output"], found["target"])


def _points(tested: Mapping[str, float | None], measure: Measure, unit: float) -> float | None:
    """Return percent, or for a regression by how many percent the error is below the targets' deviation."""
    value = tested["rmse" if measure == "error" else measure]
    if value is None:
        return None
    return 100 * (1 - value / unit) if measure == "error" else 100 * value


def mean_points(scores: Sequence[float | None]) -> float | None:
    """Return the mean of the known points."""
    known = [score for score in scores if score is not None]
    return mean(known) if known else None
