"""What a study of images or series may cost: a rule by counted work, so that it ends in minutes on two cores.

Work is counted in multiply-adds of forward passes, which do not depend on the machine. Each part of a study has a
limit. A part that would exceed it is reduced, with a sentence for the user; `--budget` multiplies all limits, and 0
removes them. Tables are cheap: only their partner values have a limit, in mini-batch steps (`measurement.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from waffle_fl.algorithms import algorithm_of
from waffle_fl.config import Settings
from waffle_fl.experiment import Runtime, device_of, model_of
from waffle_fl.federation import Federation
from waffle_fl.models.cost import multiply_adds

TRIALS = 1e11  # of one federated model per agent: above it, fewer methods and candidates are tried
TRAININGS = 3e12  # of the final models of all methods, agents and seeds
PARTNERS = 3e12  # of the coalitions of one measurement
PER_SAMPLE = 500_000  # what a sample costs in a step besides its forward pass, as measured with small networks
LEFT_OUT = "ditto"  # of the default methods where trials are reduced: it trains two models per agent
MORE = "raise --budget"
TRIED = f"Only {{}} were tried in training trials, and the other methods train as {{}} does: {MORE}."
WITHOUT = f"Ditto was left out, because training takes long: add it with --methods, or {MORE}."
ONE_SEED = f"Every model was trained with one seed instead of {{}}: ask for more with --seeds 1 2 3, or {MORE}."


class WorkBudget(NamedTuple):
    """The limits of a study, and the work of one pass over a sample."""

    per_sample: float  # multiply-adds; 0 for tables, which have no limit here
    factor: float = 1.0  # of every limit; 0: no limit

    def exceeds(self, passes: float, limit: float) -> bool:
        """Whether so many passes over a sample cost more than a limit allows."""
        return passes * self.per_sample > (self.factor * limit or inf)


UNLIMITED = WorkBudget(0.0)


def budget_for(s: Settings, federation: Federation, runtime: Runtime, factor: float = 1.0) -> WorkBudget:
    """Return the budget of a study of this data with the network of the settings."""
    agent = next((i for i, rows in enumerate(federation.train) if len(rows)), None)
    if len(federation.shape) == 1 or agent is None:
        return WorkBudget(0.0, factor)
    model, rows = model_of(s, federation, runtime, device_of(runtime.device)), federation.train[agent][:2]
    model.prepared(federation.x[rows], federation.labels(agent, rows), federation.outputs)
    sample = federation.x[rows[:1]].to(model.device, model.dtype)
    return WorkBudget(PER_SAMPLE + multiply_adds(model.module(), sample), factor)


def is_expensive(budget: WorkBudget, federation: Federation, rounds: int, models: int) -> bool:
    """Whether one federated model for each of so many agents costs more than trials of all methods may."""
    return budget.exceeds(models * rounds * int(federation.samples.sum()), TRIALS)


def passes_of(method: str, federation: Federation, rounds: int, alices: Sequence[int]) -> int:
    """Return the passes over a sample in the training of a method for these agents, with one seed."""
    rows, kind = federation.samples, algorithm_of(method)
    if method == "local":
        return rounds * int(rows[list(alices)].sum())
    models = (2 if hasattr(kind, "helper") else 1) * (len(alices) if getattr(kind, "for_alice", False) else 1)
    return rounds * models * int(rows.sum())


def seeds_within(
    budget: WorkBudget,
    seeds: Sequence[int],
    methods: Sequence[str],
    federation: Federation,
    rounds: int,
    alices: Sequence[int],
) -> tuple[int, ...]:
    """Return the seeds, or only the first one if the trainings would exceed their limit."""
    passes = sum(passes_of(method, federation, rounds, alices) for method in methods)
    return tuple(seeds[:1] if budget.exceeds(len(seeds) * passes, TRAININGS) else seeds)
