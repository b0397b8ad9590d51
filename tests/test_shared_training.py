"""Runs that differ only in Alice share one training when the method's training does not depend on Alice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import BATCH, make_federation, shared_model
from waffle_fl import SGD, Federation, RunSpec, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.engines.backend import TrainedAgents, Work
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.engines.shared_training import groups_of
from waffle_fl.engines.stacked import StackedBackend

ALICE_INDEPENDENT = tuple(name for name, kind in ALGORITHMS.items() if not getattr(kind, "for_alice", False))


def one_run_per_alice(method: str, federation: Federation, **options: object) -> list[RunSpec]:
    algorithm = ALGORITHMS[method](sgd=SGD(0.1), **options)  # type: ignore[call-arg]
    return [RunSpec(algorithm, replace(federation, alice=i), 1) for i in range(federation.agents)]


def outcomes(specs: list[RunSpec], rounds: int = 4) -> list[list[Outcome]]:
    return list(simulate(specs, shared_model(), rounds=rounds, batch_size=BATCH))


def same_outcome(found: Outcome, expected: Outcome) -> bool:
    """Return whether numbers and bits are equal, apart from the times."""
    numbers = {**found.measured, "seconds": 0}, {**expected.measured, "seconds": 0}
    bits = zip(
        (*found.state.server, *found.state.agents), (*expected.state.server, *expected.state.agents), strict=True
    )
    return numbers[0] == numbers[1] and all(torch.equal(a, b) for a, b in bits)


@pytest.mark.parametrize("method", [*ALICE_INDEPENDENT, "local", "waffle-paper", "weight-erosion"])
def test_shared_runs_equal_separate_runs(method: str) -> None:
    """All agents' models train together, and each agent has its own scores and weights."""
    specs = one_run_per_alice(method, make_federation((12, 9, 17, 5)))
    assert len(groups_of(specs)) == (1 if method in ALICE_INDEPENDENT else len(specs))
    together = outcomes(specs, rounds=2)
    for i, spec in enumerate(specs):
        for done, (alone,) in zip(together, outcomes([spec], rounds=2), strict=True):
            assert done[i].index == i
            assert same_outcome(done[i], alone)


@pytest.mark.parametrize("method", ["fedavg", "fedamp"])
def test_each_alice_has_her_own_validation_data(method: str) -> None:
    """Each Alice has her own weights, and validation scores only if she has validation data."""
    federation = make_federation()
    held = (federation.train[0][:4], *(rows[:0] for rows in federation.train[1:]))
    specs = [replace(spec, attackers=(3,)) for spec in one_run_per_alice(method, replace(federation, validation=held))]
    together = outcomes(specs)
    for i, spec in enumerate(specs):
        for mine, (alone,) in zip(together, outcomes([spec]), strict=True):
            assert same_outcome(mine[i], alone)
            assert ("validation_loss" in mine[i].measured) == (i == 0)


def test_a_group_trains_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    train = StackedBackend.train

    def counted(backend: StackedBackend, work: Work) -> list[TrainedAgents]:
        trained.append(len(work.runs))
        return train(backend, work)

    monkeypatch.setattr(StackedBackend, "train", counted)
    outcomes(one_run_per_alice("fedavg", make_federation()), rounds=3)
    assert trained == [1, 1, 1]


@pytest.mark.parametrize("broken", [0, 2])
def test_diverged_agent_does_not_stop_the_others(broken: int) -> None:
    """An Alice with unusable data diverges as she does alone, first of the group or not; the others continue."""
    federation = make_federation()
    federation.x[federation.train[broken]] = torch.inf
    specs = one_run_per_alice("fedavg", federation)
    together = outcomes(specs)
    for i, spec in enumerate(specs):
        alone = [one for (one,) in outcomes([spec])]
        mine = [o for done in together for o in done if o.index == i]
        assert [bool(o.error) for o in mine] == [bool(o.error) for o in alone]
        assert all(same_outcome(a, b) for a, b in zip(mine, alone, strict=True))


def test_other_seeds_starts_and_data_form_other_groups() -> None:
    federation = make_federation()
    first, *_ = one_run_per_alice("fedavg", federation)
    specs = [
        first,
        replace(first, federation=replace(federation, alice=1)),
        replace(first, seed=2),
        replace(first, federation=make_federation()),
        replace(first, tamper=lambda up, r: up),
    ]
    assert groups_of(specs) == [[0, 1], [2], [3], [4]]


def test_equal_coalitions_share_one_training() -> None:
    """Runs without the same agents share their training; runs without other agents do not."""
    federation = make_federation()
    algorithm = ALGORITHMS["fedavg"](sgd=SGD(0.1))  # type: ignore[call-arg]
    cases = [(0, "3"), (1, "3"), (0, "2")]
    specs = [RunSpec(algorithm, replace(federation, alice=alice).without(gone), 1) for alice, gone in cases]
    assert groups_of(specs) == [[0, 1], [2]]
    for i, done in enumerate(outcomes(specs)[-1]):
        assert same_outcome(done, replace(outcomes([specs[i]])[-1][0], index=i))
