"""The reference engine: a round as the paper's Algorithm 2 prints it, one agent after another.

Read this file and one method (`algorithms/waffle_paper.py`) to understand a round; step through it in a debugger with
`simulate(..., engine="loop")` or `waffle run --engine loop`. `# A2.n` cites line n of Algorithm 2. It stacks nothing
and shares no work; the default engine is tested to give the same results, many times faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from waffle_fl.algorithms import Algorithm, Grad
from waffle_fl.engines.aggregation import admit, diagnostics, receive, registered
from waffle_fl.engines.candidate_losses import CandidateLosses
from waffle_fl.engines.evaluation import Evaluator, evaluate_runs
from waffle_fl.engines.masked_checks import masked_rounds_of
from waffle_fl.engines.outcomes import outcome_of, to_numbers
from waffle_fl.engines.participation import asking, cohorts_of, expecting, for_all_agents
from waffle_fl.engines.private_gradients import batches_of, step_grad
from waffle_fl.engines.run_spec import Outcome, RoundSettings, RunSpec, State, initial_state, scored_net
from waffle_fl.engines.tree import rows_of, stack, where_rows
from waffle_fl.models import FlatModel


def run(spec: RunSpec, model: FlatModel, settings: RoundSettings, start: int = 0, index: int = 0) -> Iterator[Outcome]:
    """Train one federation and yield the outcome of each round; the run ends when Alice's training diverges."""
    algorithm, federation, agents_count = spec.algorithm, spec.federation, spec.federation.agents
    training = AgentTraining(algorithm, model, spec, settings)
    everyone, evaluator = registered(federation, settings, model.device), Evaluator(model)
    cohorts, masked = cohorts_of(spec, settings), masked_rounds_of(spec, settings)
    state = spec.state or initial_state(spec, model)  # A2.1
    for r in range(start + 1, settings.rounds + 1):  # A2.2
        known = asking(everyone, cohort := cohorts(r))  # all agents, or a sample of them
        for attempt in range(settings.attempts):
            server, before = expecting(algorithm, state.server, cohort, known), state.agents
            down = algorithm.broadcast(server, agents_count)  # A2.3
            trained = [
                training.round(i, rows_of(down, slice(i, i + 1)), rows_of(before, slice(i, i + 1)), r, attempt)
                for i in cohort  # A2.4-12
            ]
            agents, up = (stack(rows) for rows in zip(*trained, strict=True))
            agents, up = for_all_agents(cohort, before, agents, up, known)
            arrived = receive(spec, model, up, r, known)
            if masked:  # the server sees distances and weighted sums, no single update
                done = masked.aggregate(r, attempt, server, before, agents, arrived.up, arrived.present, known)
                server, agents, _, measured = done
            else:
                up, now, codes = admit(algorithm, server, arrived.up, arrived.present, known, r, settings)
                server, info = algorithm.aggregate(server, up, now)  # A2.13-16
                agents = where_rows(now.intact, agents, before)  # an agent that was not admitted keeps its state
                measured = diagnostics(algorithm, server, up, info, known)
                measured = {**measured, "received": now.received, "codes": codes}
            after = State(server, agents)
            (scores,) = evaluate_runs(evaluator, [spec], [scored_net(spec, after, model)], r / settings.rounds)
            (numbers,) = to_numbers([{**scores, **measured, "refused": arrived.refused}])
            outcome = outcome_of(index, spec, numbers, after, state, r, attempt)
            if not outcome.error:
                break
        yield outcome
        if outcome.error:
            return
        state = outcome.state


class AgentTraining:
    """Trains single agents: mini-batches in the run's order, gradients by autograd on the module itself."""

    def __init__(self, algorithm: Algorithm, model: FlatModel, spec: RunSpec, s: RoundSettings) -> None:
        self.algorithm, self.model = algorithm, model
        federations, seeds = [spec.federation], [spec.seed]
        self.batches = batches_of(algorithm, model, federations, seeds, s)
        self.losses = CandidateLosses(algorithm, model, federations, seeds, s.rounds)

    def round(self, i: int, down: Any, agents: Any, r: int, attempt: int) -> tuple[Any, Any]:
        """A2.5-12 for agent i: return its state after the round, and its update."""
        algorithm, row = self.algorithm, slice(i, i + 1)
        down = self.losses.into(down, agents, row, r)  # for methods that choose among models
        local = algorithm.begin(down, agents)  # A2.5
        if hasattr(algorithm, "rehearse") and hasattr(algorithm, "rehearsed"):  # it adapts its starting point
            rehearsed = math.ceil(algorithm.rehearsed * self.batches.per_epoch[i])
            for grad in self._gradients(row, r, attempt, min(rehearsed, self.batches.steps[i])):
                local = algorithm.rehearse(local, grad)
        for grad in self._gradients(row, r, attempt, self.batches.steps[i]):  # A2.6
            local = algorithm.step(local, grad)  # A2.7-8
        return algorithm.finish(down, agents, local)  # A2.9-12

    def _gradients(self, row: slice, r: int, attempt: int, steps: int) -> Iterator[Grad]:
        """Yield the gradient functions of the round's first `steps` mini-batches."""
        if not steps:  # an agent without samples
            return
        plan, sizes = self.batches.plan(r, attempt, row), self.batches.sizes(row, padded=False)
        for t in range(steps):
            at = torch.tensor([t], device=self.model.device)
            yield step_grad(self.model, self.batches, plan, at, sizes[t], plain=True)
