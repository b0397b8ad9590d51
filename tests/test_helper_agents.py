"""Helper agents, whose own models are not requested, compute only the global update; results stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conftest import BATCH, make_federation, make_model
from waffle_fl import SGD, RunSpec, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.engines.helper_agents import helping
from waffle_fl.engines.run_spec import Outcome, own_net
from waffle_fl.models import FlatModel

METHODS = [name for name, kind in ALGORITHMS.items() if hasattr(kind, "helper")]


def spec(method: str, alice: int = 0, seed: int = 1, requested: frozenset[int] | None = frozenset()) -> RunSpec:
    """Return a run specification that requests Alice's model, or the models of the given agents."""
    algorithm = ALGORITHMS[method](sgd=SGD(0.1, momentum=0.5), clip=0.5)  # type: ignore[call-arg]
    requested = frozenset([alice]) if requested == frozenset() else requested
    return RunSpec(algorithm, make_federation(alice=alice), seed, requested=requested)


def rounds(specs: list[RunSpec], model: FlatModel | None = None, **options: object) -> list[list[Outcome]]:
    return list(simulate(specs, model or make_model(), **{"rounds": 4, "batch_size": BATCH, **options}))  # type: ignore[arg-type]


def numbers(outcome: Outcome) -> dict[str, object]:
    return {**outcome.measured, "seconds": 0}


def bits(one: RunSpec, outcome: Outcome) -> list[Tensor]:
    """Return the tensors of the server and of Alice's model."""
    return [*outcome.state.server, *own_net(one, outcome.state, make_model())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_apfl_and_ditto_have_helpers() -> None:
    assert METHODS == ["apfl", "ditto"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_alice_and_the_server_get_the_same_bits(method: str, stacked: bool, workers: int) -> None:
    alone = [spec(method, alice=2), spec(method, alice=0, seed=2)]
    complete = [replace(one, requested=None) for one in alone]
    model = make_model(stacked=stacked)
    for few, all_ in zip(rounds(alone, model, workers=workers), rounds(complete, model, workers=workers), strict=True):
        for one, a, b in zip(alone, few, all_, strict=True):
            assert numbers(a) == numbers(b)
            assert same(bits(one, a), bits(one, b))


@pytest.mark.parametrize("method", METHODS)
def test_helpers_keep_their_state(method: str) -> None:
    one = spec(method, alice=2)
    first, *_, last = (outcome.state.agents for (outcome,) in rounds([one]))
    for before, after in zip(first, last, strict=True):
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)]
        assert changed in ([2], [])
    assert not torch.equal(first[0], last[0])


@pytest.mark.parametrize("method", METHODS)
def test_resumed_run_is_identical(method: str) -> None:
    one = spec(method, alice=1)
    complete = [outcome for (outcome,) in rounds([one])]
    continued = [outcome for (outcome,) in rounds([replace(one, state=complete[1].state)], start=2)]
    assert [numbers(outcome) for outcome in continued] == [numbers(outcome) for outcome in complete[2:]]


@pytest.mark.parametrize("method", METHODS)
def test_shared_training_requests_every_alice(method: str) -> None:
    members = [spec(method, alice=i) for i in (0, 2)]
    for together, *alone in zip(rounds(members), *(rounds([one]) for one in members), strict=True):
        for one, outcome, (own,) in zip(members, together, alone, strict=True):
            assert numbers(outcome) == numbers(own)
            assert same(bits(one, outcome), bits(one, own))


@pytest.mark.parametrize("method", METHODS)
def test_helpers_train_one_model_per_row(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    gradient = FlatModel.grad

    def counted(model: FlatModel, params: Tensor, *args: object, **options: object) -> object:
        trained.append(len(params))
        return gradient(model, params, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(FlatModel, "grad", counted)
    agents = make_federation().agents
    for requested, most in ((None, 2 * agents), (frozenset(), agents - 1)):
        trained.clear()
        rounds([spec(method, requested=requested)], make_model(stacked=True), rounds=1, workers=1)
        assert max(trained) == most


def test_only_agents_without_request_are_helpers() -> None:
    federation = make_federation()
    all_agents = frozenset(range(federation.agents))
    assert helping([spec("apfl", requested=None), spec("apfl", requested=all_agents), spec("fedavg")]) == [[], [], []]
    assert helping([spec("apfl", alice=1)]) == [[i for i in range(federation.agents) if i != 1]]
