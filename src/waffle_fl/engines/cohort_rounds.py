"""Rounds of a run whose agents' states are on disk: only the cohort of a round is in memory and on the device.

A round reads the states of its cohort, trains them in one stack, sums their updates, and writes the states back. Every
step takes time and memory for the cohort; what remains for all agents are vectors of one number per agent. The numbers
are those of a run whose states are in memory, and a record has the weights of the cohort alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from waffle_fl.algorithms import Net
from waffle_fl.batches import Batches
from waffle_fl.engines import cohort_sums
from waffle_fl.engines.aggregation import registered
from waffle_fl.engines.candidate_losses import CandidateLosses
from waffle_fl.engines.cuda_graphs import Graphs
from waffle_fl.engines.evaluation import Evaluator, evaluate_runs
from waffle_fl.engines.outcomes import diverged, to_numbers
from waffle_fl.engines.participation import cohorts_of
from waffle_fl.engines.row_store import StoredAgents, initial_rows
from waffle_fl.engines.row_training import RowTraining
from waffle_fl.engines.run_spec import Measured, Outcome, RoundSettings, RunSpec, State, initial_state
from waffle_fl.engines.tree import pick_rows
from waffle_fl.errors import WaffleError
from waffle_fl.guard import OK, REASONS
from waffle_fl.models import FlatModel


def check_store(spec: RunSpec, settings: RoundSettings, model: FlatModel, engine: str) -> None:
    """Raise a WaffleError if the states of a run with a store cannot stay on disk."""
    wrong = [
        ("participation", "a share below 1", settings.participation, settings.participation == 1),
        ("guard", "off", settings.guard, settings.guard != "off"),
        ("privacy", "off", settings.privacy, settings.privacy != "off"),
        ("engine", "fast", engine, engine != "fast"),
        ("attack", "none", "one", bool(spec.tamper or spec.transport)),
        ("scored", "alice", "all", spec.everyone),
    ]
    for name, expected, got, is_wrong in wrong:
        if is_wrong:
            raise WaffleError(f"{name}: expected {expected} with states on disk, got {got}")
    cohort_sums.check_method(spec.algorithm, model.init(spec.seed))


class Computed(NamedTuple):
    """A round before it is accepted."""

    server: Any
    agents: Any  # of the cohort
    measured: dict[str, Any]


class CohortRounds:
    """Computes single rounds of one run."""

    def __init__(self, spec: RunSpec, model: FlatModel, settings: RoundSettings, cores: int) -> None:
        assert spec.store
        self.spec, self.model, self.settings, self.store = spec, model, settings, spec.store
        self.cohorts, f, s = cohorts_of(spec, settings), spec.federation, settings
        self._known = registered(f, settings, model.device)
        self._evaluator = Evaluator(model, cores)
        _, self._initial = initial_rows(spec.algorithm, model.init(spec.seed), f.agents)
        shape = (s.batch_size, s.epochs, model.dtype, s.augment, s.flips, s.rounds)
        batches = Batches([f], [spec.seed], *shape, remainder=s.remainder, steps_per_round=s.steps_per_round)
        losses = CandidateLosses(spec.algorithm, model, [f], [spec.seed], s.rounds)
        sizes, rows = [len(self.cohorts(1))], (lambda r: list(self.cohorts(r)))
        self._training = RowTraining(spec.algorithm, model, batches, Graphs(model), sizes, cores, losses, rows)

    def close(self) -> None:
        self._training.close()
        self._evaluator.close()

    def compute(self, state: State, r: int, attempt: int) -> Computed:
        """A2.3-16: one round, whose states are not written yet."""
        algorithm, device, numbers = self.spec.algorithm, self.model.device, self.cohorts(r)
        before = self.store.read(state.agents, numbers, self._initial)
        down = algorithm.broadcast(state.server, len(numbers))  # A2.3
        ((agents, up),) = self._training.round([(down, before)], r, attempt, self.settings.rounds - r + 1)  # A2.5-12
        alice = self.spec.federation.alice
        cohort = cohort_sums.cohort_of(numbers, alice, device, down, before, agents, up)
        server, agents, facts, sent = cohort_sums.aggregate_cohort(
            algorithm, state.server, cohort, r, self._known, self.settings
        )
        if alice in numbers:
            own = pick_rows(agents, cohort.alice.view(1))
        else:
            own = self.store.read(state.agents, [alice], self._initial)
        net = algorithm.personal(server, own, 1)
        everyone = len(self._known.samples)
        facts = {name: fact[cohort.agents] if fact.shape[:1] == (everyone,) else fact for name, fact in facts.items()}
        (scores,) = evaluate_runs(
            self._evaluator, [self.spec], [Net(net.params[0], net.stats[0])], r / self.settings.rounds
        )
        del sent["received"]  # `codes` says it
        return Computed(server, agents, {**scores, **facts, **sent})

    def written(self, stored: StoredAgents, r: int, trained: Computed) -> State:
        """Write the states of the round's cohort and return the state after the round."""
        return State(trained.server, self.store.write(stored, self.cohorts(r), trained.agents))


def run(
    spec: RunSpec, model: FlatModel, settings: RoundSettings, cores: int, start: int = 0, index: int = 0
) -> Iterator[Outcome]:
    """Train one run and yield the outcome of each round; the run ends when Alice's training diverges."""
    rounds, names, alice = CohortRounds(spec, model, settings, cores), spec.federation.names, spec.federation.alice
    state = spec.state or initial_state(spec, model)  # A2.1
    try:
        for r in range(start + 1, settings.rounds + 1):  # A2.2
            began, cohort = time.perf_counter(), rounds.cohorts(r)
            for attempt in range(settings.attempts):
                trained = rounds.compute(state, r, attempt)
                (numbers,) = to_numbers([trained.measured])
                line, finite = _line(r, numbers, [names[i] for i in cohort], names[alice])
                if finite:
                    break
            else:
                yield Outcome(index, r, line, state, attempt, diverged(r, names[alice], attempt + 1))
                return
            state = rounds.written(state.agents, r, trained)
            line["seconds"] = round(time.perf_counter() - began, 6)
            yield Outcome(index, r, line, state, attempt)
    finally:
        rounds.close()


def _line(r: int, measured: dict[str, Any], names: list[str], alice: str) -> tuple[Measured, bool]:
    """Return the line of a record, and whether the round is finite.

    Numbers per agent are those of the participants, in their order, and have a place of their own: readers of `weights`
    expect all agents.
    """
    codes = measured.pop("codes")
    for key in ("loss", "validation_loss", "rmse", "validation_rmse"):
        if key in measured and not math.isfinite(measured[key]):
            measured[key] = None
    screened = {name: REASONS[int(code)] for name, code in zip(names, codes, strict=True) if code != OK}
    own = {key: value for key, value in measured.items() if isinstance(value, list)}
    others = {key: value for key, value in measured.items() if key not in own}
    line = {"round": r, **others, "participants": names, "of_participants": own}
    line |= {"screened": screened} if screened else {}
    return cast(Measured, line), alice not in screened and measured["loss"] is not None
