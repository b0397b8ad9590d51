"""The default backend: the agents of all runs as rows of one stack, on CPU or GPU.

`begin`, `step` and `finish` are row-local, so rows of many federations train together; aggregation is per run. On a CPU
one thread computes a row, so its bits depend neither on what else is stacked nor on the number of cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from waffle_fl.algorithms import Algorithm
from waffle_fl.engines import aggregation, cohort_sums, helper_agents
from waffle_fl.engines.aggregation import Aggregated, aggregate, aggregate_together, receive, registered
from waffle_fl.engines.backend import TrainedAgents, Work
from waffle_fl.engines.candidate_losses import CandidateLosses
from waffle_fl.engines.cuda_graphs import Graphs
from waffle_fl.engines.evaluation import Evaluator, evaluate_runs
from waffle_fl.engines.helper_agents import TwoTrainings
from waffle_fl.engines.masked_checks import masked_rounds_of
from waffle_fl.engines.participation import asking, cohorts_of, expecting, for_all_agents
from waffle_fl.engines.private_gradients import batches_of
from waffle_fl.engines.row_training import RowTraining, Selection
from waffle_fl.engines.run_spec import RoundSettings, RunSpec, State, all_nets
from waffle_fl.engines.tree import pick_rows, release_memory
from waffle_fl.models import FlatModel


class StackedBackend:
    """Trains, aggregates and evaluates runs whose data is on the model's device."""

    def __init__(self, specs: Sequence[RunSpec], model: FlatModel, settings: RoundSettings, cores: int) -> None:
        self.specs, self.model, self.settings, self._cores = specs, model, settings, cores
        self._registered = [registered(spec.federation, settings, model.device) for spec in specs]
        self._cohorts = [cohorts_of(spec, settings) for spec in specs]
        self._graphs = Graphs(model)
        self._evaluator = Evaluator(model, cores)
        self._trainings: dict[Any, RowTraining | TwoTrainings] = {}
        self._masked = [masked_rounds_of(spec, settings) for spec in specs]
        self._sums_cohorts = [cohort_sums.applies(spec, settings, model.device) for spec in specs]

    def close(self) -> None:
        """Stop all worker processes and threads; they start again when needed."""
        for training in self._trainings.values():
            training.close()
        self._trainings = {}
        self._evaluator.close()
        release_memory()

    def train(self, work: Work) -> list[TrainedAgents]:
        """A2.3-12 for the rows of all agents that take part in the round."""
        cohorts = [self._cohorts[i](work.r) for i in work.runs]
        given = [
            self._given(i, state, cohort)  # A2.3
            for i, state, cohort in zip(work.runs, work.states, cohorts, strict=True)
        ]
        key = work.runs, tuple(map(len, cohorts))
        if key not in self._trainings:
            if not work.attempt:  # a run has diverged, or cohorts have another size: the former trainings are obsolete
                self.close()
            self._trainings[key] = self._training(work, cohorts)
        left = self.settings.rounds - work.r + 1
        trained = self._trainings[key].round(given, work.r, work.attempt, left)
        return [TrainedAgents(*one, *states) for one, states in zip(given, trained, strict=True)]

    def _given(self, i: int, state: State, cohort: Sequence[int]) -> tuple[Any, Any]:
        """Return what the agents of a cohort receive, and their states."""
        algorithm, agents = self.specs[i].algorithm, self.specs[i].federation.agents
        server = expecting(algorithm, state.server, cohort, self._registered[i])
        if len(cohort) == agents:
            return algorithm.broadcast(server, agents), state.agents
        rows = torch.tensor(cohort, device=self.model.device)
        before = pick_rows(state.agents, rows)
        if self._sums_cohorts[i]:
            return algorithm.broadcast(server, len(cohort)), before
        return pick_rows(algorithm.broadcast(server, agents), rows), before

    def _training(self, work: Work, cohorts: Sequence[Sequence[int]]) -> RowTraining | TwoTrainings:
        s, specs = self.settings, [self.specs[i] for i in work.runs]
        federations, seeds = [spec.federation for spec in specs], [spec.seed for spec in specs]
        cores = 1 if work.attempt else self._cores  # a retry has few runs: workers would not pay

        def training(
            algorithm: Algorithm, agents: Sequence[Sequence[int]], selection: Selection | None = None
        ) -> RowTraining:
            batches = batches_of(algorithm, self.model, federations, seeds, s, agents)
            losses = CandidateLosses(algorithm, self.model, federations, seeds, s.rounds)
            rows = list(map(len, cohorts if selection else agents))
            return RowTraining(algorithm, self.model, batches, self._graphs, rows, cores, losses, selection)

        sizes = [federation.agents for federation in federations]
        if [*map(len, cohorts)] != sizes:  # helpers would vary in number, so every agent of a cohort trains its model
            return training(specs[0].algorithm, [range(size) for size in sizes], self._selection(work.runs, sizes))
        if helper_agents.applies(specs) and not s.adds_noise:  # a helper has other noise
            return TwoTrainings(specs[0].algorithm, self.model, sizes, helper_agents.helping(specs), training)
        return training(specs[0].algorithm, [range(size) for size in sizes])

    def _selection(self, runs: Sequence[int], sizes: Sequence[int]) -> Selection:
        """Return the function that maps a round to the rows of its cohorts, among the rows of all agents."""
        firsts = [sum(sizes[:k]) for k in range(len(sizes))]
        return lambda r: [first + agent for first, i in zip(firsts, runs, strict=True) for agent in self._cohorts[i](r)]

    def aggregate(self, work: Work, trained: Sequence[TrainedAgents]) -> list[Aggregated]:
        """A2.13-16 for every run. On a GPU runs of one kind are aggregated together, without waiting for the device."""
        inputs, refused = {}, {}
        done: dict[int, Aggregated] = {}
        for i, before, one in zip(work.runs, work.states, trained, strict=True):
            cohort = self._cohorts[i](work.r)
            known = asking(self._registered[i], cohort)
            if self._sums_cohorts[i] and len(cohort) < len(known.samples):
                rows = cohort_sums.cohort_of(cohort, self.specs[i].federation.alice, self.model.device, *one)
                done[i] = cohort_sums.in_memory(
                    self.specs[i].algorithm, before, rows, work.r, self._registered[i], self.settings
                )
                continue
            agents, up = for_all_agents(cohort, before.agents, one.after, one.up, known)
            arrived = receive(self.specs[i], self.model, up, work.r, known)
            server = expecting(self.specs[i].algorithm, before.server, cohort, known)
            inputs[i] = (server, before.agents, agents, arrived.up, arrived.present, known)
            refused[i] = arrived.refused
        for algorithm, group in self._by_kind(list(inputs)):
            several = [inputs[i] for i in group]
            masked = [rounds for i in group if (rounds := self._masked[i])]
            if masked:
                found = [m.aggregate(work.r, work.attempt, *one) for m, one in zip(masked, several, strict=True)]
            elif aggregation.applies(self.model):
                found = aggregate_together(algorithm, work.r, self.settings, several)
            else:
                found = [aggregate(algorithm, work.r, self.settings, *one) for one in several]
            done |= dict(zip(group, found, strict=True))
        for i, messages in refused.items():
            if messages:
                done[i].measured["refused"] = messages
        return [done[i] for i in work.runs]

    def _by_kind(self, runs: Sequence[int]) -> list[tuple[Algorithm, list[int]]]:
        """Group runs by algorithm and number of agents."""
        groups: dict[tuple[Algorithm, int], list[int]] = {}
        for i in runs:
            groups.setdefault((self.specs[i].algorithm, self.specs[i].federation.agents), []).append(i)
        return [(algorithm, group) for (algorithm, _), group in groups.items()]

    def evaluate(self, work: Work, aggregated: Sequence[Aggregated]) -> list[Aggregated]:
        """Add the scores of Alice's model, or of everyone's, to the measurements of each run."""
        specs = [self.specs[i] for i in work.runs]
        nets = [
            all_nets(spec, State(run.server, run.agents), self.model) if spec.everyone else run.own
            for spec, run in zip(specs, aggregated, strict=True)
        ]
        scores = evaluate_runs(self._evaluator, specs, nets, work.r / self.settings.rounds)
        return [
            run._replace(measured={**scored, **run.measured}) for run, scored in zip(aggregated, scores, strict=True)
        ]
