"""An agent that joins after training: what a method gives to an agent that it has never seen.

The mechanism is the same for every method. The newcomer starts as any agent does: from the server's model, if the
server has one model for all agents, else from the initial model. It takes part in a few rounds in which the server's
state does not change: it receives what the server would send to it, trains, and keeps its own state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from waffle_fl.algorithms import Algorithm, Net
from waffle_fl.algorithms.local import Local
from waffle_fl.engines.flower.site_trainer import SiteTrainer
from waffle_fl.engines.mixed_outputs import models_in, names_in
from waffle_fl.engines.run_spec import RoundSettings, RunSpec, State
from waffle_fl.engines.tree import rows_of
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel


def join_after_training(
    spec: RunSpec, state: State, model: FlatModel, settings: RoundSettings, newcomer: Federation, rounds: int
) -> dict[str, dict[str, float | None]]:
    """Return the scores of a newcomer on its own test data, as in `result.json`.

    before  of the model that the method gives to it, without any training
    after   of its model after `rounds` rounds with the method, in which the server does not change
    tuned   of the model `before` (of several the first), after as many rounds of plain local training

    `newcomer` is a federation of this agent alone, with its training data. In `spec` the agent has none.
    """
    name, algorithm = newcomer.names[0], spec.algorithm
    row = spec.federation.names.index(name) if name in spec.federation.names else 0  # Local knows Alice only
    down = rows_of(algorithm.broadcast(state.server, spec.federation.agents), slice(row, row + 1))
    with_method = _trainer(algorithm, spec.seed, model, settings, newcomer)
    agents = algorithm.init(_start(state.server, model, spec.seed), 1)[1]
    given = with_method.own_model(down, agents)
    alone = _trainer(Local(algorithm.sgd, getattr(algorithm, "clip", 0.0)), spec.seed, model, settings, newcomer)
    start = models_in(algorithm, model, given)[0]
    tuned = alone.start()._replace(y=start.params[None], stats=start.stats[None])
    for r in range(settings.rounds + 1, settings.rounds + 1 + rounds):
        agents, _ = with_method.train(down, agents, r, attempt=0)
        tuned, _ = alone.train(alone.blank_down(), tuned, r, attempt=0)
    one_model = alone if names_in(algorithm) else with_method
    scores = {
        "before": with_method.evaluate(given),
        "after": with_method.evaluate(with_method.own_model(down, agents)),
        "tuned": one_model.evaluate(Net(tuned.y[0], tuned.stats[0])),
    }
    return {when: _finite(found) for when, found in scores.items()}


def _trainer(algorithm: Algorithm, seed: int, model: FlatModel, s: RoundSettings, newcomer: Federation) -> SiteTrainer:
    return SiteTrainer(algorithm, newcomer, model, seed, replace(s, steps_per_round=0, privacy="off"))


def _start(server: Any, model: FlatModel, seed: int) -> Net:
    """Return the server's model, if it has one model for all agents, else the initial model."""
    initial, x, stats = model.init(seed), getattr(server, "x", None), getattr(server, "stats", None)
    if x is None or stats is None or (x.shape, stats.shape) != (initial.params.shape, initial.stats.shape):
        return initial
    return Net(x, stats)


def _finite(scores: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}
