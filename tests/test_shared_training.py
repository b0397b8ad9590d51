"""A model for every agent: training that does not look at Alice is done once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import BATCH, make_federation, make_model
from waffle_fl import SGD, Federation, RunSpec, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.engines.backend import Trained, Work
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.engines.shared_training import groups_of
from waffle_fl.engines.stacked import StackedBackend

BLIND = tuple(name for name, kind in ALGORITHMS.items() if not getattr(kind, "for_alice", False))


def everyone(method: str, federation: Federation, **options: object) -> list[RunSpec]:
    algorithm = ALGORITHMS[method](sgd=SGD(0.1), **options)  # type: ignore[call-arg]
    return [RunSpec(algorithm, replace(federation, alice=i), 1) for i in range(federation.agents)]


def outcomes(specs: list[RunSpec], rounds: int = 4) -> list[list[Outcome]]:
    return list(simulate(specs, make_model(), rounds=rounds, batch_size=BATCH))


def alike(found: Outcome, expected: Outcome) -> bool:
    """The same numbers and bits, whatever time it took."""
    numbers = {**found.measured, "seconds": 0}, {**expected.measured, "seconds": 0}
    bits = zip(
        (*found.state.server, *found.state.agents), (*expected.state.server, *expected.state.agents), strict=True
    )
    return numbers[0] == numbers[1] and all(torch.equal(a, b) for a, b in bits)


@pytest.mark.parametrize("method", [*BLIND, "local", "waffle", "weight-erosion"])
def test_each_agent_gets_what_it_would_get_alone(method: str) -> None:
    specs = everyone(method, make_federation())
    assert len(groups_of(specs)) == (1 if method in BLIND else len(specs))
    together = outcomes(specs)
    for i, spec in enumerate(specs):
        for done, (alone,) in zip(together, outcomes([spec]), strict=True):
            assert done[i].index == i
            assert alike(done[i], alone)


@pytest.mark.parametrize("method", ["fedavg", "fedamp"])
def test_validation_data_are_each_agent_s_own(method: str) -> None:
    """An Alice without validation data has no score on the first one's; her weights, and attackers', are her own."""
    federation = make_federation()
    held = (federation.train[0][:4], *(rows[:0] for rows in federation.train[1:]))
    specs = [replace(spec, attackers=(3,)) for spec in everyone(method, replace(federation, validation=held))]
    together = outcomes(specs)
    for i, spec in enumerate(specs):
        for mine, (alone,) in zip(together, outcomes([spec]), strict=True):
            assert alike(mine[i], alone)
            assert ("validation_loss" in mine[i].measured) == (i == 0)


def test_a_family_trains_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    train = StackedBackend.train

    def counted(backend: StackedBackend, work: Work) -> list[Trained]:
        trained.append(len(work.runs))
        return train(backend, work)

    monkeypatch.setattr(StackedBackend, "train", counted)
    outcomes(everyone("fedavg", make_federation()), rounds=3)
    assert trained == [1, 1, 1]


@pytest.mark.parametrize("broken", [0, 2])
def test_an_agent_that_cannot_train_does_not_end_the_others(broken: int) -> None:
    """Whose own data are unusable diverges as it would alone, first of the family or not; the others go on."""
    federation = make_federation()
    federation.x[federation.train[broken]] = torch.inf
    specs = everyone("fedavg", federation)
    together = outcomes(specs)
    for i, spec in enumerate(specs):
        alone = [one for (one,) in outcomes([spec])]
        mine = [o for done in together for o in done if o.index == i]
        assert [bool(o.error) for o in mine] == [bool(o.error) for o in alone]
        assert all(alike(a, b) for a, b in zip(mine, alone, strict=True))


def test_other_seeds_starts_and_data_are_other_families() -> None:
    federation = make_federation()
    first, *_ = everyone("fedavg", federation)
    specs = [
        first,
        replace(first, federation=replace(federation, alice=1)),
        replace(first, seed=2),
        replace(first, federation=make_federation()),
        replace(first, tamper=lambda up, r: up),
    ]
    assert groups_of(specs) == [[0, 1], [2], [3], [4]]
