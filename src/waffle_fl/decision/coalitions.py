"""Cross-validate coalitions of agents: what each coalition's model predicts on rows that it was not trained on.

Every row that is not a test row is held out once per seed. In fold k all agents hold out their k-th part, so one
training of a coalition serves every member: its model predicts the held-out rows of each of them. Test rows are not
read here. All coalitions of a fold train in one stack. Where training is expensive, some folds and one seed do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from waffle_fl.config import RunConfig, Settings
from waffle_fl.decision.bootstrap import Array
from waffle_fl.decision.shapley import Coalition
from waffle_fl.engines.evaluation import predictor_of
from waffle_fl.engines.run_spec import Outcome, RunSpec, on_device, own_net
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment import Runtime, device_of, model_of
from waffle_fl.experiment.factories import simulation_options
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel
from waffle_fl.randomness import generator

FOLDS = 4
STACK = 256  # maximum number of coalitions trained together
Progress: TypeAlias = Callable[[int, int], None]  # (trainings done, trainings in all)


class Plan(NamedTuple):
    """A method and the agents that train with it. `alice` is None if one training serves every member."""

    method: str
    members: Coalition
    alice: int | None = None

    @property
    def served(self) -> tuple[int, ...]:
        """The agents that the plan trains a model for."""
        return tuple(sorted(self.members)) if self.alice is None else (self.alice,)


@dataclass(frozen=True)
class CrossValidation:
    """The held-out predictions of every plan, for each agent that it serves."""

    target: dict[int, Any]  # agent -> targets of its rows
    outputs: dict[tuple[Plan, int], dict[int, Array]] = field(default_factory=dict)  # -> seed -> outputs
    trainings: int = 0

    def with_more(self, other: CrossValidation) -> CrossValidation:
        """Return both sets of predictions."""
        return CrossValidation(self.target, self.outputs | other.outputs, self.trainings + other.trainings)


def rows_of(federation: Federation, agent: int) -> Tensor:
    """Return the rows of an agent that are not test rows: its training rows, then its validation rows."""
    return torch.cat([federation.train[agent], federation.validation[agent]])


def able_agents(federation: Federation) -> list[int]:
    """Return the agents with at least one row per fold; the others take no part."""
    return [i for i in range(federation.agents) if len(rows_of(federation, i)) >= FOLDS]


def folds_of(federation: Federation, agent: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of each row of an agent. The classes are spread evenly over the folds."""
    rows = rows_of(federation, agent)
    order = generator(seed, "folds", federation.ids[agent]).permutation(len(rows))
    if federation.task == "classification":
        labels = federation.labels(agent, rows).numpy()
        order = order[np.argsort(labels[order], kind="stable")]
    folds = np.empty(len(rows), dtype=np.int64)
    folds[order] = np.arange(len(rows)) % FOLDS
    return folds


def cross_validate(
    plans: Sequence[Plan],
    federation: Federation,
    settings: Settings,
    seeds: Sequence[int],
    options: Mapping[str, Mapping[str, Any]],
    runtime: Runtime,
    progress: Progress = lambda done, total: None,
    folds: int = FOLDS,
) -> CrossValidation:
    """Train every plan once per seed and fold, and return its predictions of the held-out rows.

    With less than FOLDS `folds` only the first ones are held out, with the first seed. A coalition whose training
    diverges predicts 0 for every output."""
    if folds < FOLDS:
        seeds = seeds[:1]
    model = model_of(settings, federation, runtime, device_of(runtime.device))
    everyone = sorted(frozenset().union(*(plan.members for plan in plans)))
    rows = {i: rows_of(federation, i) for i in everyone}
    target = {i: _in_unit(federation, i, federation.labels(i, rows[i], progress=1.0)) for i in everyone}
    fold_of = {(i, seed): folds_of(federation, i, seed) for i in everyone for seed in seeds}
    kept = {  # (seed, fold) -> the rows that each agent trains on
        (seed, k): {i: rows[i][torch.from_numpy(fold_of[i, seed] != k)] for i in everyone}
        for seed in seeds
        for k in range(folds)
    }
    found: dict[tuple[Plan, int], dict[int, Array]] = {
        (plan, agent): {seed: np.zeros((len(rows[agent]), federation.outputs)) for seed in seeds}
        for plan in plans
        for agent in plan.served
    }
    trainings = [(plan, *part) for plan in sorted(plans, key=lambda plan: plan.method) for part in kept]
    done = 0
    for stack in _stacks(trainings):
        specs = [_spec(plan, federation, kept[seed, k], settings, seed, options) for plan, seed, k in stack]
        for (plan, seed, k), spec, last in zip(stack, *_trained(specs, model, settings, runtime), strict=True):
            if last is None or last.error:
                continue
            for agent in plan.served:
                held = fold_of[agent, seed] == k
                part = rows[agent][torch.from_numpy(held)]
                found[plan, agent][seed][held] = _predicted(spec, last, model, federation, agent, part)
        done += len(stack)
        progress(done, len(trainings))
    if folds < FOLDS:
        (seed,) = seeds
        target = {i: values[fold_of[i, seed] < folds] for i, values in target.items()}
        found = {(plan, i): {seed: some[seed][fold_of[i, seed] < folds]} for (plan, i), some in found.items()}
    return CrossValidation(target, found, len(trainings))


def _stacks(trainings: Sequence[tuple[Plan, int, int]]) -> Iterator[list[tuple[Plan, int, int]]]:
    """Divide the trainings into stacks of one method each."""
    for _, same in groupby(trainings, key=lambda training: training[0].method):
        group = list(same)
        yield from (group[i : i + STACK] for i in range(0, len(group), STACK))


def _spec(
    plan: Plan,
    federation: Federation,
    kept: Mapping[int, Tensor],
    settings: Settings,
    seed: int,
    options: Mapping[str, Mapping[str, Any]],
) -> RunSpec:
    """Return the run of a plan on the rows that are kept for training."""
    alice = min(plan.members) if plan.alice is None else plan.alice
    gone = [str(i) for i in range(federation.agents) if i not in plan.members]
    train = tuple(kept.get(i, rows) for i, rows in enumerate(federation.train))
    empty = tuple(rows[:0] for rows in federation.validation)
    # The engine evaluates Alice's model in every round: one training row keeps this cheap, and test rows unread.
    seen = tuple(rows[:1] for rows in train)
    reduced = replace(federation, alice=alice, train=train, validation=empty, test=seen).without(*gone)
    config = RunConfig(method=plan.method, settings=replace(settings, seed=seed), options=options.get(plan.method, {}))
    requested = None if plan.alice is None else frozenset([reduced.alice])
    return RunSpec(config.algorithm(), reduced, seed, requested=requested)


def _trained(
    specs: Sequence[RunSpec], model: FlatModel, s: Settings, runtime: Runtime
) -> tuple[list[RunSpec], list[Outcome | None]]:
    """Return the runs on the model's device, and the last outcome of each."""
    rounds = simulate(specs, model, **simulation_options(s, runtime))
    trained = deque(islice(rounds, s.final_round or None), maxlen=1)
    last = {outcome.index: outcome for outcomes in trained for outcome in outcomes}
    return on_device(specs, model), [last.get(i) for i in range(len(specs))]


def _predicted(
    spec: RunSpec, last: Outcome, model: FlatModel, federation: Federation, agent: int, rows: Tensor
) -> Array:
    """Return the outputs of an agent's model for these rows; a regression's are in the target's unit."""
    own = spec.federation.names.index(federation.names[agent])
    spec = replace(spec, federation=replace(spec.federation, alice=own))
    answer = predictor_of(spec.algorithm, model, own_net(spec, last.state, model), spec.federation)
    output = answer(federation.x[rows].to(model.device, model.dtype)).cpu()
    return np.asarray(_in_unit(federation, agent, output)).reshape(len(rows), -1)


def _in_unit(federation: Federation, agent: int, numbers: Tensor) -> Array:
    """Return a regression's numbers in the target's unit; a classification's unchanged."""
    if federation.task == "classification":
        return numbers.double().numpy() if numbers.is_floating_point() else numbers.numpy()
    mean, deviation = federation.target_scale(agent)
    return np.asarray(mean + deviation * numbers.double().numpy())
