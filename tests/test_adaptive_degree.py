"""The adaptive degree: hand-computed examples, properties, and federations with a known answer."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from conftest import BATCH, CLASSES, FEATURES, make_federation, make_model, outcomes_of
from waffle_fl.algorithms import SGD, Round
from waffle_fl.algorithms.adaptive_degree import GradientStatistics, observe, start
from waffle_fl.algorithms.waffle_paper import WafflePaper
from waffle_fl.config import check_run
from waffle_fl.engines.aggregation import aggregate, aggregate_together, registered
from waffle_fl.engines.run_spec import RoundSettings, RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation
from waffle_fl.randomness import generator

CPU = torch.device("cpu")
ADAPTIVE = {"omega": "adaptive", "psi": "adaptive"}


def round_of(agents: int, intact: list[bool] | None = None) -> Round:
    ones, intact_mask = torch.ones(agents, dtype=torch.int64), torch.tensor(intact or [True] * agents)
    return Round(1, 100, torch.tensor(0), intact_mask, intact_mask, ones, ones, 32)


def statistics_after(*rounds: list[list[float]]) -> GradientStatistics:
    """Return the statistics after these rounds' gradients; Alice's gradient comes first."""
    statistics = start(CPU)
    for gradients in rounds:
        statistics = observe(statistics, torch.tensor(gradients, dtype=torch.float64), round_of(len(gradients)))
    return statistics


def test_by_hand() -> None:
    """One agent at 60 degrees from Alice, one opposite: s = (1/2 + 0)/2 = 1/4, and their mean points away from hers.

    The mean of (1/2, sqrt(3)/2) and (-1, 0) is (-1/4, sqrt(3)/4), of length 1/2: t = -1/2. So k = 1/4 and z = 1/2 +
    1/2. A second such round doubles z and leaves k unchanged.
    """
    gradients = [[1.0, 0.0], [0.5, math.sqrt(3) / 2], [-1.0, 0.0]]
    for times in (1, 2):
        statistics = statistics_after(*[gradients] * times)
        z = times * 1.0
        assert statistics.strife.item() == pytest.approx(z)
        assert statistics.degree.item() == pytest.approx(1 / 4 + 3 / 4 * math.exp(-z))


def test_noisy_rounds_count_little() -> None:
    """Rounds with s = 0.8 and s = 0.1 give k = (0.512 + 0.001) / (0.64 + 0.01), close to the larger s."""
    rounds = [[[1.0, 0.0], [s, math.sqrt(1 - s * s)]] for s in (0.8, 0.1)]
    statistics = statistics_after(*rounds)
    assert (statistics.cubes / statistics.squares).item() == pytest.approx(0.513 / 0.65)


rows = st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=4, max_size=4)


@given(st.lists(rows, min_size=1, max_size=5))
@settings(max_examples=100)
def test_degree_never_rises(rounds: list[list[list[float]]]) -> None:
    """For any gradients, including zeros, the degree lies in [0, 1] and never rises."""
    degrees = [1.0] + [statistics_after(*rounds[: r + 1]).degree.item() for r in range(len(rounds))]
    assert all(0 <= after <= before for before, after in pairwise(degrees))


integer_rows = st.lists(st.lists(st.integers(-100, 100), min_size=3, max_size=3), min_size=4, max_size=4)


@given(integer_rows, st.floats(0.01, 100), st.permutations([1, 2, 3]))
@settings(max_examples=60)
def test_scale_and_order_do_not_matter(gradients: list[list[float]], scale: float, order: list[int]) -> None:
    """The degree does not depend on the gradients' scale or the agents' order, unless the other agents cancel out."""
    assume(any(map(sum, zip(*gradients[1:], strict=True))))
    other = [[scale * v for v in gradients[i]] for i in (0, *order)]
    assert statistics_after(other).degree.item() == pytest.approx(statistics_after(gradients).degree.item(), abs=1e-6)


def test_equal_gradients_stay_global() -> None:
    """The degree stays 1 when all gradients are equal."""
    assert statistics_after(*[[[0.3, -2.0]] * 5] * 50).degree.item() == 1.0


def test_altered_updates_do_not_count() -> None:
    """An agent whose update was rejected or altered does not affect the degree."""
    gradients = torch.tensor([[1.0, 0.0], [1.0, 0.0], [math.nan, -5.0]], dtype=torch.float64)
    statistics = observe(start(CPU), gradients.nan_to_num(-7.0), round_of(3, [True, True, False]))
    assert statistics.degree.item() == 1.0


def concepts(relabelled: tuple[int, ...], agents: int = 6, samples: int = 40) -> Federation:
    """Agents with samples of the same three classes; the relabelled agents use label k + 1 for class k."""
    rng = generator(5, "concepts")
    centres = 3 * rng.standard_normal((CLASSES, FEATURES))
    parts = {}
    for i in range(agents):
        y = np.arange(samples + 12) % CLASSES
        x = centres[y] + rng.standard_normal((len(y), FEATURES))
        y = (y + 1) % CLASSES if i in relabelled else y
        parts[f"agent {i}"] = (x[:samples], y[:samples], x[samples:], y[samples:])
    return Federation.from_arrays(parts, class_names=("a", "b", "c"))


def weights_of(federation: Federation, rounds: int = 40, **options: Any) -> list[list[float]]:
    spec = RunSpec(WafflePaper(SGD(0.1), **ADAPTIVE, **options), federation, 3)
    return [outcome.measured["weights"] for outcome in outcomes_of(spec, make_model(), rounds=rounds)]


def test_one_concept_stays_near_uniform() -> None:
    """With six agents of one concept all weights are positive and below twice the uniform weight in every round."""
    for weights in weights_of(concepts(())):
        assert min(weights) > 0
        assert max(weights) < 1 / 3


def test_other_concept_ends_with_weight_zero() -> None:
    """Four agents with permuted labels end with weight 0; Alice and the one agent with her labels share all weight."""
    last = weights_of(concepts((2, 3, 4, 5)))[-1]
    assert last[2:] == [0, 0, 0, 0]
    assert last[0] > 0
    assert sum(last[:2]) == pytest.approx(1)


@pytest.mark.parametrize(("relabelled", "ends"), [((), True), ((1,), False)])
def test_partner_stays_only_with_the_same_concept(relabelled: tuple[int, ...], ends: bool) -> None:
    """With denominator "range" the only partner keeps its weight if and only if it shares Alice's concept."""
    last = weights_of(concepts(relabelled, agents=2), denominator="range")[-1]
    assert (last[1] > 0) is ends


def test_adaptive_weights_are_normalised() -> None:
    """In every round weights are non-negative and sum to 1, and there is no forced local phase from 95 percent on."""
    for weights in (found := weights_of(make_federation(), rounds=20)):
        assert min(weights) >= 0
        assert sum(weights) == pytest.approx(1)
    assert found[-1] != [1, 0, 0, 0] or found[15] == [1, 0, 0, 0]


def test_default_keeps_no_statistics() -> None:
    """With the default schedule the statistics are not updated, so that the paper's method has no extra cost."""
    server = outcomes_of(RunSpec(WafflePaper(SGD(0.1)), make_federation(), 3), make_model())[-1].state.server
    assert [server.squares.item(), server.cubes.item(), server.strife.item(), server.degree.item()] == [0, 0, 0, 1]


def test_resumed_run_is_identical() -> None:
    """A run resumed after three rounds ends with the same bits as an uninterrupted run."""
    model, spec = make_model(torch.float32), RunSpec(WafflePaper(SGD(0.1), **ADAPTIVE), make_federation(), 3)
    unbroken = [outcomes[0] for outcomes in simulate([spec], model, rounds=6, batch_size=BATCH)]
    resumed = replace(spec, state=unbroken[2].state)
    last = [outcomes[0] for outcomes in simulate([resumed], model, rounds=6, start=3, batch_size=BATCH)][-1]
    assert all(torch.equal(a, b) for a, b in zip(last.state.server, unbroken[-1].state.server, strict=True))
    assert last.measured["omega"] == unbroken[-1].measured["omega"] == last.state.server.degree.item()


def test_batched_aggregation_agrees() -> None:
    """Aggregated in one batch, as on a GPU, two adaptive federations get the same results as one by one."""
    algorithm, model, work = WafflePaper(SGD(0.1), denominator="range", **ADAPTIVE), make_model(), []
    settings = RoundSettings(10, BATCH)
    for seed, alice in ((3, 0), (4, 2)):
        federation = make_federation(alice=alice, seed=seed)
        state = outcomes_of(RunSpec(algorithm, federation, seed), model, rounds=3)[-1].state
        down = algorithm.broadcast(state.server, federation.agents)
        agents, up = algorithm.finish(down, state.agents, algorithm.begin(down, state.agents))
        up = up._replace(dy=torch.sin(torch.arange(up.dy.numel(), dtype=torch.float64)).view_as(up.dy))
        work.append(
            (state.server, state.agents, agents, up, torch.ones(4) > 0, registered(federation, settings, CPU)),
        )
    alone = [aggregate(algorithm, 4, settings, *arguments) for arguments in work]
    for one, other in zip(alone, aggregate_together(algorithm, 4, settings, work), strict=True):
        for a, b in zip(one.server, other.server, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_adaptive_is_a_setting() -> None:
    """omega = "adaptive" is accepted like any schedule, and suggested when misspelt."""
    assert check_run("waffle-paper", {}, {"omega": "adaptive"}).options["omega"] == "adaptive"
    with pytest.raises(WaffleError, match="did you mean adaptive"):
        check_run("waffle-paper", {}, {"psi": "adaptiv"})
