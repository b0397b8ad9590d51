"""The simulator: rejected arguments, known optima, bit-identical variants, batches and scores."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import BATCH, make_federation, make_model, outcomes_of
from waffle_fl import SGD, FedAvg, Federation, FlatModel, RunSpec, Scaffold, WaffleError, WafflePaper, simulate
from waffle_fl.batches import Batches
from waffle_fl.data.synthetic import quadratics
from waffle_fl.engines.cuda_graphs import WORTH_A_CUT, last_for_all
from waffle_fl.engines.evaluation import StackedTestSets, score
from waffle_fl.models import Quadratic, output_is_loss
from waffle_fl.randomness import derive, noise, shuffle


def quadratic_federation(seed: int = 0) -> tuple[Federation, FlatModel, torch.Tensor]:
    """Return three agents with known optima, a model of their quadratics, and the mean of the optima."""
    problem = quadratics(seed, agents=3, samples=8, noise=0.0)
    agents = [
        (f"agent {i}", (b.numpy(), torch.zeros(len(b), dtype=torch.int64).numpy(), b.numpy() + i + 1.0,
                        torch.zeros(len(b), dtype=torch.int64).numpy()))
        for i, b in enumerate(problem.samples)
    ]  # fmt: skip
    federation = Federation.from_arrays(agents, duplicates="keep")
    federation = Federation(**{**federation.__dict__, "x": torch.cat([t for b in problem.samples for t in (b, b)])})
    model = FlatModel(lambda: Quadratic(problem.curvature), loss=output_is_loss, precision="float64")
    return federation, model, problem.optimum(torch.ones(3, dtype=torch.float64))


def test_fedavg_and_scaffold_find_the_known_optimum() -> None:
    """On quadratics of equal curvature both converge to the minimiser of the mean objective, known in closed form."""
    federation, model, optimum = quadratic_federation()
    for algorithm in (FedAvg(SGD(0.3)), Scaffold(SGD(0.3), clip=0.0)):
        state = outcomes_of(RunSpec(algorithm, federation, 1), model, rounds=80)[-1].state
        torch.testing.assert_close(state.server.x, optimum, rtol=1e-6, atol=1e-6)


def test_waffle_finds_alice_s_optimum() -> None:
    """WAFFLE converges to Alice's own optimum once training is local."""
    algorithm = WafflePaper(SGD(0.3), clip=0.0, omega="step(0.5)", psi="step(0.5)")
    federation, model, _ = quadratic_federation()
    state = outcomes_of(RunSpec(algorithm, federation, 1), model, rounds=200)[-1].state
    torch.testing.assert_close(state.server.x, federation.x[0], rtol=1e-5, atol=1e-5)


def test_a_batch_of_one_cannot_be_normalised() -> None:
    """BatchNorm with a last batch of a single sample is rejected before any work, with the agent's name."""
    model = FlatModel(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    spec = RunSpec(FedAvg(), make_federation((16, 9)), 1)
    with pytest.raises(WaffleError, match="agent 1 has 9 samples"):
        next(simulate([spec], model, rounds=1, batch_size=BATCH, remainder="keep"))
    assert next(simulate([spec], model, rounds=1, batch_size=BATCH))


def test_normalised_models_train() -> None:
    """A model with BatchNorm trains with every batch size that leaves no single sample, and its statistics change."""
    model = FlatModel(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    outcomes = outcomes_of(RunSpec(WafflePaper(SGD(0.1, 0.9)), make_federation((16, 10, 3)), 1), model, rounds=4)
    stats = [o.state.server.stats for o in outcomes]
    assert all(torch.isfinite(s).all() for s in stats)
    assert not torch.equal(stats[0], stats[3])


def test_tiny_agents_take_part() -> None:
    """An agent with one sample makes one step with a batch of one, and its K_i is 1."""
    federation = make_federation((23, 1, 5))
    batches = Batches([federation], [1], BATCH, 1, torch.float32)
    assert batches.steps == [3, 1, 1]
    outcome = outcomes_of(RunSpec(WafflePaper(SGD(0.1)), federation, 1), make_model(), rounds=3)[-1]
    assert outcome.measured["weights"][1] > 0


def test_a_stack_needs_equal_training() -> None:
    """Runs with different step settings are rejected in one stack; different server settings are accepted."""
    federation, model = make_federation(), make_model()
    with pytest.raises(WaffleError, match="rows train alike"):
        next(
            simulate(
                [RunSpec(FedAvg(SGD(0.1)), federation, 1), RunSpec(FedAvg(SGD(0.2)), federation, 1)], model, rounds=1
            )
        )
    specs = [RunSpec(WafflePaper(SGD(0.1), denominator=d), federation, 1) for d in ("max", "range")]
    assert len(next(simulate(specs, model, rounds=5, batch_size=BATCH))) == 2


def test_chunks_and_workers_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows trained all at once, in chunks of three, or by four workers have the same bits."""
    from waffle_fl.engines import row_training as module

    def run(workers: int) -> torch.Tensor:
        spec = RunSpec(WafflePaper(SGD(0.1)), make_federation((23, 9, 32, 14, 8)), 1)
        return outcomes_of(spec, make_model(torch.float32), rounds=4, workers=workers)[-1].state.server.x

    together = run(1)
    monkeypatch.setattr(module, "CHUNK_BYTES", {"cpu": 3 * 16 * 57 * 4})
    assert torch.equal(together, run(1))
    assert torch.equal(together, run(4))


def test_every_sample_is_used_once_per_epoch() -> None:
    """Each epoch visits every sample of every agent exactly once, for any batch size."""
    federation = make_federation()
    batches = Batches([federation], [7], BATCH, 2, torch.float32)
    plan = batches.plan(3, 0, slice(None))
    for i, rows in enumerate(federation.train):
        seen = plan.samples[i][plan.weight[i] > 0]
        assert sorted(seen.tolist()) == sorted([*rows.tolist(), *rows.tolist()])
        half = batches.steps[i] // 2
        first = plan.samples[i, :half][plan.weight[i, :half] > 0]
        assert sorted(first.tolist()) == rows.tolist()


def test_orders_differ_by_round_agent_seed_and_attempt() -> None:
    """Another round, agent, seed or attempt gives another order; the same four give the same order."""
    federation = make_federation((20, 20))
    batches = [Batches([federation], [seed], 20, 1, torch.float32) for seed in (1, 1, 2)]
    orders = [b.plan(1, 0, slice(None)).samples for b in batches]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], batches[0].plan(2, 0, slice(None)).samples)
    assert not torch.equal(orders[0], batches[0].plan(1, 1, slice(None)).samples)
    assert not torch.equal(orders[0][0], orders[0][1] - 32)


def test_shuffles_are_fair() -> None:
    """Each position is equally likely for each element, within five standard deviations."""
    keys = torch.tensor([derive(0, "fair", i) for i in range(6000)])
    orders = shuffle(keys, torch.full((6000,), 6), 6)
    counts = torch.stack([(orders[:, runtime, None] == torch.arange(6)).sum(dim=0) for runtime in range(6)])
    assert (counts - 1000).abs().max() < 5 * (6000 * 5 / 36) ** 0.5
    assert len(torch.unique(noise(keys, 50))) == 300000
    assert (noise(keys, 50) >= 0).all()


def test_accuracy_counts_correct_predictions() -> None:
    """The accuracy of a model that always predicts class 0 is the share of class 0."""
    federation = make_federation()
    model = FlatModel(lambda: nn.Linear(5, 3), precision="float64")
    algorithm = FedAvg(SGD(1e-300))
    outcome = outcomes_of(RunSpec(algorithm, federation, 1), model, rounds=1)[0]
    net = model.init(1)
    output = model.predict(net.params, net.stats, federation.x[federation.test[0]].double())
    right = (output.argmax(dim=1) == federation.labels(0, federation.test[0])).float().mean()
    assert outcome.measured["accuracy"] == pytest.approx(float(right))


def test_joint_evaluation_equals_separate_evaluation() -> None:
    """Evaluating several models in one padded pass gives each the accuracy and loss it has alone."""
    pool = make_federation()
    federations = [pool, Federation(**{**pool.__dict__, "alice": 2, "test": tuple(t[:7] for t in pool.test)})]
    federations = [Federation(**{**f.__dict__, "x": pool.x.double()}) for f in federations]
    shared = federations[0].x
    federations = [Federation(**{**f.__dict__, "x": shared}) for f in federations]
    model = make_model()
    nets = [model.init(seed) for seed in (1, 2)]
    next(simulate([RunSpec(FedAvg(), pool, 1)], model, rounds=1, batch_size=BATCH))  # so that the model knows it folds
    parts = [f.test[f.alice] for f in federations]
    together = StackedTestSets(federations, parts).score(model, nets)
    for f, part, net, found in zip(federations, parts, nets, together, strict=True):
        alone = score(model, partial(model.predict, *net), f, part)
        assert float(found["accuracy"]) == float(alone["accuracy"])
        torch.testing.assert_close(found["loss"], alone["loss"], rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(max))
def test_dropping_finished_rows_saves_work(steps: list[int]) -> None:
    """Continuing with fewer rows saves at least its share of the work; otherwise all rows continue to the end."""
    cut, most = last_for_all(steps), max(steps)
    work = len(steps) * cut + sum(count > cut for count in steps) * (most - cut)
    assert cut in steps
    assert work < WORTH_A_CUT * len(steps) * most if cut < most else cut == most


def test_few_long_rows_do_not_delay_the_others() -> None:
    assert last_for_all([189] * 40 + [198] * 10) == 189
    assert last_for_all([189] * 40 + [190] * 10) == 190
