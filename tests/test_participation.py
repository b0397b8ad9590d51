"""Partial participation: the same cohorts in every engine, and absent agents keep their state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import BATCH, make_federation, outcomes_of, refusal, shared_model
from test_engines import assert_engines_agree
from waffle_fl import SGD, FedAvg, RunSpec, Scaffold, WafflePaper, simulate
from waffle_fl.algorithms import ALGORITHMS, Round
from waffle_fl.algorithms.waffle_paper import NO_PART, calc_weights
from waffle_fl.engines import aggregation, cuda_graphs, run_workers, workers
from waffle_fl.engines.cuda_graphs import late_rows
from waffle_fl.engines.participation import Cohorts, cohort_size
from waffle_fl.engines.run_spec import RoundSettings, initial_state
from waffle_fl.experiment.active_run import state_of, tensors_of

SIZES = (12, 9, 0, 17, 7, 5)
STEP = SGD(0.1, 0.9, 0.01, "keep")
HALF: dict[str, Any] = {"participation": 0.5, "rounds": 3, "epochs": 1}
MODEL, FLOAT32 = shared_model(), shared_model(torch.float32)
every = pytest.mark.parametrize("method", list(ALGORITHMS))


def make(method: str) -> Any:
    """Return the method; FedCollab forms its coalitions in round 2, so that a cohort follows."""
    more = {"fedcollab": {"alone": 1, "models": 5}}.get(method, {})
    return ALGORITHMS[method](sgd=STEP, **more)  # type: ignore[call-arg]


def cohorts(algorithm: Any = None, share: float = 0.5, **more: Any) -> Cohorts:
    given: dict[str, Any] = {"samples": SIZES, "ids": range(len(SIZES)), "alice": 3, "seed": 1, "rounds": 40, **more}
    return Cohorts(algorithm or FedAvg(), share=share, **given)


def test_the_size_of_a_cohort() -> None:
    """A share of the agents that have samples, rounded, and at least two if there are two."""
    assert [cohort_size(20, share) for share in (1.0, 0.5, 0.125, 0.1, 0.01)] == [20, 10, 3, 2, 2]
    assert [cohort_size(n, 0.1) for n in (1, 2, 3, 25)] == [1, 2, 2, 3]
    assert len(cohorts()(1)) == 3  # of five agents with samples


def test_cohorts_depend_on_seed_and_round_only() -> None:
    """Agents without samples never take part, every other agent does, and other agents do not change the order."""
    drawn = [cohorts()(r) for r in range(1, 41)]
    assert {agent for cohort in drawn for agent in cohort} == {0, 1, 3, 4, 5}
    assert drawn == [cohorts(alice=0)(r) for r in range(1, 41)]
    assert drawn != [cohorts(seed=2)(r) for r in range(1, 41)]
    fewer = cohorts(samples=(23, 9, 17, 14), ids=(0, 1, 3, 4), share=0.75, alice=0)  # the ids of the four that stay
    names = {0: 0, 1: 1, 2: 3, 3: 4}
    for r, cohort in enumerate(drawn, 1):
        assert {agent for agent in cohort if agent != 5} <= {names[agent] for agent in fewer(r)}


def test_alice_takes_part_where_training_depends_on_her() -> None:
    """In every round of a method for Alice, or if the settings need her; other methods do not look at her."""
    rounds = range(1, 21)
    assert all(3 in cohorts(WafflePaper())(r) and len(cohorts(WafflePaper())(r)) == 3 for r in rounds)
    assert all(3 in cohorts(needs_alice=True)(r) for r in rounds)
    assert RoundSettings(1, guard="standard").needs_alice
    assert RoundSettings(1, participation=0.5, alice_takes_part="always").needs_alice
    assert not RoundSettings(1, alice_takes_part="always").needs_alice
    assert not all(3 in cohorts()(r) for r in rounds)


def test_some_methods_have_rounds_of_all_agents() -> None:
    """FedDBE measures features, FedCollab forms coalitions, and FedAvg+FT fine-tunes with all agents."""
    assert [len(cohorts(make("feddbe"))(r)) for r in (1, 2)] == [6, 3]
    assert [len(cohorts(make("fedcollab"))(r)) for r in (2, 3)] == [6, 3]
    assert [len(cohorts(make("fedavg-ft"))(r)) for r in (39, 40)] == [3, 6]


@every
def test_the_stack_agrees_with_the_loop(method: str) -> None:
    """Both engines train the same cohorts to the same models, for every Alice of a shared training."""
    specs = [RunSpec(make(method), replace(make_federation(SIZES), alice=alice), 1) for alice in (0, 3)]
    assert_engines_agree(specs, MODEL, **HALF)


@every
def test_absent_agents_keep_their_state_and_resumed_runs_their_cohorts(method: str) -> None:
    """The state of an absent agent does not change; the last round is the same alone, resumed and beside others."""
    model, federation = FLOAT32, make_federation(SIZES, alice=3)
    spec, other = RunSpec(make(method), federation, 1), RunSpec(make(method), make_federation((12, 20, 7), seed=2), 4)
    together = [line[0] for line in simulate([spec, other], model, batch_size=BATCH, **HALF)]
    start = max(k for k, outcome in enumerate(together) if "participants" in outcome.measured)
    before, last = together[start - 1].state, together[start]
    absent = [i for i, name in enumerate(federation.names) if name not in last.measured["participants"]]
    for field, earlier in zip(last.state.agents, before.agents, strict=True):
        assert torch.equal(field[absent], earlier[absent])
    saved = state_of(tensors_of(before), initial_state(spec, model))
    resumed = outcomes_of(replace(spec, state=saved), model, start=start, workers=1, **HALF)[0]
    ends = [tensors_of(outcome.state) for outcome in (last, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert resumed.measured["participants"] == last.measured["participants"]


def replayed(graph: Any, size: int, together: bool) -> Any:
    """Return a stand-in for a captured graph, which computes its step on a CPU."""
    return SimpleNamespace(replay=lambda: graph._advance(size, together))


@pytest.mark.parametrize("kind", ["run workers", "row workers", "single rows", "graphs"])
def test_no_part_of_the_engine_changes_a_cohort(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, rows one after another and graphs of one shape agree with the loop."""
    for name in ("ROUND", "START", "WARM_UP"):
        monkeypatch.setattr(workers, name, 0.0)
    if kind == "row workers":
        monkeypatch.setattr(run_workers, "applies", lambda specs, model, cores: False)
    if kind == "graphs":
        monkeypatch.setattr(cuda_graphs, "applies", lambda model: True)
        monkeypatch.setattr(cuda_graphs._Graph, "_captured", replayed)
    specs = [RunSpec(make("waffle-paper"), make_federation(SIZES, alice=3, seed=seed), 1) for seed in (0, 5)]
    stacked = False if kind == "single rows" else None
    assert_engines_agree(specs, shared_model(stacked=stacked), workers=2 if "workers" in kind else 1, **HALF)


@pytest.mark.parametrize("method", ["waffle-paper", "cobo", "fedfomo", "apple"])
def test_batched_aggregation_of_cohorts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that treat absent agents differently aggregate several runs in one computation."""
    monkeypatch.setattr(aggregation, "applies", lambda model: True)
    specs = [RunSpec(make(method), make_federation(SIZES, alice=3, seed=seed), 1) for seed in (0, 5)]
    assert_engines_agree(specs, MODEL, **HALF)


def test_full_participation_is_the_default() -> None:
    """A share of 1 trains all agents and records no participants; a share must be above 0."""
    spec = RunSpec(FedAvg(), make_federation(), 1)
    (one,) = outcomes_of(spec, MODEL, rounds=1, participation=1.0)
    assert "participants" not in one.measured
    assert refusal(RoundSettings, 1, participation=0.0) == (
        "participation: expected a number above 0 and at most 1, got 0.0"
    )


def test_alice_always_takes_part_if_the_settings_say_so() -> None:
    """Then every Alice has a training of her own, and she is in each of its rounds."""
    specs = [RunSpec(FedAvg(SGD(0.1)), make_federation(SIZES, alice=alice), 1) for alice in (0, 3)]
    lines = list(simulate(specs, MODEL, batch_size=BATCH, alice_takes_part="always", **HALF))
    assert all(f"agent {3 * outcome.index}" in outcome.measured["participants"] for line in lines for outcome in line)
    assert not torch.equal(lines[-1][0].state.server.x, lines[-1][1].state.server.x)


def test_scaffold_with_absent_agents() -> None:
    """x moves by the mean of the cohort's updates, and c stays the mean of the control variates of all agents."""
    spec = RunSpec(Scaffold(SGD(0.1)), make_federation(SIZES), 1)
    *_, two = outcomes_of(spec, MODEL, **{**HALF, "rounds": 2})
    weights = torch.tensor(two.measured["weights"])
    names = [f"agent {i}" for i in weights.nonzero().flatten().tolist()]
    assert names == two.measured["participants"]
    assert weights[weights > 0].tolist() == pytest.approx([1 / 3] * 3)
    able = torch.tensor(SIZES) > 0
    torch.testing.assert_close(two.state.server.c, two.state.server.c_i[able].mean(dim=0))


def test_waffle_averages_the_rounds_in_which_an_agent_took_part() -> None:
    """The weight of an agent is its mean over those of the last three rounds in which it took part."""
    now = Round(10, 100, torch.tensor(0), torch.tensor([True, True, False]), *[torch.tensor([8, 8, 8])] * 3, BATCH)
    now = now._replace(intact=now.received, asked=now.received)
    dy = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    past = torch.tensor([[0.9, NO_PART, 0.1], [0.6, NO_PART, 0.4]], dtype=torch.float64)
    alpha_bar, alpha, _ = calc_weights(dy, past, now, 1.0, 1.0)
    assert alpha.tolist() == [0.5, 0.5, 0.0]
    assert (alpha_bar * (2 / 3 + 0.5)).tolist() == pytest.approx([2 / 3, 0.5, 0.0])


def test_rows_that_go_on_alone_have_few_shapes() -> None:
    """With cohorts, the rows with more steps than the others are rounded up to a power of two, the longest first."""
    steps = [3, 9, 4, 8, 7]
    assert late_rows(steps, 4, varying=False) == [1, 3, 4]
    assert late_rows(steps, 4, varying=True) == [1, 3, 4, 2]
    assert late_rows(steps, 8, varying=True) == [1]
