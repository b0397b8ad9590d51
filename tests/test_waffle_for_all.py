"""WAFFLE for all agents at once: its limits are SCAFFOLD and Local, and its weights those of WAFFLE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import make_federation, outcomes_of, refusal, shared_model
from waffle_fl import SGD, Local, RunSpec
from waffle_fl.algorithms import Round
from waffle_fl.algorithms.waffle_for_all import (
    Mixture,
    WaffleForAll,
    distances_to,
    mixed,
    nearest,
    row_of_weights,
    sampled,
    sketched,
    weigh,
)
from waffle_fl.algorithms.waffle_paper import weigh_distances
from waffle_fl.engines.run_spec import all_nets

SIZES = (12, 9, 17, 7, 5, 8, 11)
LATE = {"omega": "constant(0)", "psi": "constant(0)"}


def models(algorithm: Any, rounds: int = 5, **options: Any) -> torch.Tensor:
    """Return the models of all agents after some of 200 rounds, so that none of the last, local ones is reached."""
    spec = RunSpec(algorithm, make_federation(SIZES), 1, everyone=True)
    return all_nets(spec, outcomes_of(spec, shared_model(), rounds=rounds, **options)[-1].state, shared_model()).params


def facts(agents: int, r: int = 3, alice: int = 0, missing: tuple[int, ...] = ()) -> Round:
    received = torch.ones(agents, dtype=torch.bool)
    received[list(missing)] = False
    ones = torch.ones(agents, dtype=torch.int64)
    return Round(r, 100, torch.tensor(alice), received, received, ones, ones, 1, None, None)


def test_the_rest_of_a_mean_is_not_computed_agent_by_agent() -> None:
    """Equal weights of own, near and other agents give the mean of all that were received, however few are near."""
    rows = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    received = torch.arange(9) != 5
    for k in (0, 2, 6):
        near = (torch.arange(9)[:, None] + torch.arange(1, 9)) % 9
        near = torch.stack([row[row != 5][:k] for row in near])
        equal = torch.full((9,), 1 / 8, dtype=torch.float64)
        weights = Mixture(equal, equal[:, None].expand(9, k), equal, torch.ones(9, k, dtype=torch.bool))
        found = mixed(weights, rows, near, received)
        torch.testing.assert_close(found[received], rows[received].mean(dim=0).expand(8, 4))


def test_the_local_phase_is_local() -> None:
    """With Psi = 0 every agent trains alone."""
    expected = models(Local(SGD(0.1), clip=2.0))
    torch.testing.assert_close(models(WaffleForAll(SGD(0.1), **LATE)), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("degrees", [(0.9, 0.9), (0.5, 0.6), (0.1, 0.2)])
def test_weights_of_all_others_are_those_of_waffle(degrees: tuple[float, float]) -> None:
    """If all agents are near, each agent's weights are those of Algorithm 1 with that agent as Alice."""
    sketch = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    start = (torch.arange(9)[:, None] + torch.arange(1, 9)) % 9
    for alice in range(9):
        now = facts(9, alice=alice, missing=(4,) if alice != 4 else ())
        near, d = nearest(sketch, start, now)
        mixture = weigh(d, *sampled(sketch, near, d, now), now, *degrees)
        past = torch.full((2, 9), -1.0, dtype=torch.float64)
        expected = weigh_distances((sketch - sketch[alice]).norm(dim=1), past, now, *degrees)[1]
        torch.testing.assert_close(row_of_weights(mixture, near, now), torch.where(now.received, expected, 0.0))
        rows = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        found = mixed(mixture, rows, near, now.received)[alice]
        torch.testing.assert_close(found, row_of_weights(mixture, near, now) @ rows)


def test_near_agents_are_found_among_many() -> None:
    """In 300 agents of 30 groups, the five nearest are found in a few rounds, of 20 compared ones each."""
    rng = torch.Generator().manual_seed(1)
    groups = torch.arange(300) % 30
    sketch = 5 * torch.randn(30, 8, generator=rng)[groups] + torch.randn(300, 8, generator=rng)
    near = (torch.arange(300)[:, None] + torch.arange(1, 6)) % 300
    for r in range(1, 16):
        near, _ = nearest(sketch, near, facts(300, r))
    assert (groups[near] == groups[:, None]).double().mean() > 0.9
    assert not (near == torch.arange(300)[:, None]).any()
    assert all(len(set(row)) == 5 for row in near.tolist())


def test_sketches_keep_distances() -> None:
    """The distance of two sketches is that of the rows within a few percent; short rows are compared as they are."""
    rows = torch.randn(6, 20_000, generator=torch.Generator().manual_seed(1))
    others = torch.arange(6).repeat(6, 1)
    exact, found = (distances_to(part, others) for part in (rows, sketched(rows, 2048)))
    off = ~torch.eye(6, dtype=torch.bool)
    assert (found[off] / exact[off] - 1).abs().max() < 0.1
    assert torch.equal(sketched(rows[:, :9], 16), rows[:, :9])


def test_absent_agents_keep_their_models() -> None:
    """With partial participation only the agents of a round get new models."""
    algorithm = WaffleForAll(SGD(0.1), neighbours=3)
    spec = RunSpec(algorithm, make_federation(SIZES), 1, everyone=True)
    before, after = outcomes_of(spec, shared_model(), rounds=6, participation=3 / 7)[-2:]
    changed = (before.state.server.x != after.state.server.x).any(dim=1).nonzero().flatten().tolist()
    assert [f"agent {i}" for i in changed] == after.measured["participants"]


def test_a_single_agent_and_an_adaptive_schedule() -> None:
    """A federation of one trains alone; schedules that follow the round's noise are refused in one line."""
    spec = RunSpec(WaffleForAll(SGD(0.1)), make_federation((9,)), 1)
    alone = replace(spec, algorithm=Local(SGD(0.1), clip=2.0))
    found, expected = (outcomes_of(one, shared_model())[-1].measured["loss"] for one in (spec, alone))
    assert found == pytest.approx(expected)
    assert "got adaptive" in refusal(WaffleForAll, psi="adaptive")
