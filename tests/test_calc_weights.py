"""Algorithm 1: hand-computed examples, properties and edge cases."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from reference.paper import calc_weights as slow
from waffle_fl.algorithms import SGD, Round
from waffle_fl.algorithms.contract import angular_distance
from waffle_fl.algorithms.schedules import evaluate, parse, sigmoid
from waffle_fl.algorithms.waffle_paper import WafflePaper, calc_weights
from waffle_fl.errors import WaffleError

TINY_FLOATS = st.floats(-100, 100, allow_subnormal=False)


def round_of(agents: int, r: int = 1, of: int = 100, alice: int = 0, received: list[bool] | None = None) -> Round:
    ones, present = torch.ones(agents, dtype=torch.int64), torch.tensor(received or [True] * agents)
    return Round(r, of, torch.tensor(alice), present, present, ones, ones, 32)


def past(agents: int) -> torch.Tensor:
    return torch.full((2, agents), 1 / agents, dtype=torch.float64)


def unsmoothed_weights(distances: list[float], omega: float, denominator: str = "max", r: int = 1) -> list[float]:
    """Return alpha before smoothing, with Alice at 0 and the others on a line at these distances from her."""
    dy = torch.tensor([[0.0], *([d] for d in distances)], dtype=torch.float64)
    return calc_weights(dy, past(len(dy)), round_of(len(dy), r), omega, omega, denominator)[1].tolist()


def test_max_by_hand() -> None:
    """Distances 1, 1.25, 2 at omega = psi = 1/2, divided by the largest.

    dM = 2, dm = 1, d_A = 1 * (1 - (2-1)/2 * (1 - 1/2)) = 0.75.
    Alice 0.5 - 0 = 1/2; then 0.5 - 0.25/2 = 3/8; 0.5 - 0.5/2 = 1/4; 0.5 - 1.25/2 < 0, so 0. Their sum is 9/8.
    """
    assert unsmoothed_weights([1.0, 1.25, 2.0], 0.5) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])


def test_range_by_hand() -> None:
    """The same distances, divided by the range dM - d_A = 1.25 as in Eq. 2.

    Alice 1/2; 0.5 - 0.25/1.25 = 0.3; 0.5 - 0.5/1.25 = 0.1; 0.5 - 1.25/1.25 < 0. Their sum is 0.9.
    """
    assert unsmoothed_weights([1.0, 1.25, 2.0], 0.5, "range") == pytest.approx([5 / 9, 3 / 9, 1 / 9, 0])


def test_omega_above_one_by_hand() -> None:
    """At omega = psi = 1.2 Alice's distance is 1.1 and the minimum is 1, so the range is 1 (Algorithm 1, line 6).

    1.2; 1.2 + 0.1 = 1.3; 1.2 - 0.15 = 1.05; 1.2 - 0.9 = 0.3. Their sum is 3.85.
    """
    expected = [1.2 / 3.85, 1.3 / 3.85, 1.05 / 3.85, 0.3 / 3.85]
    assert unsmoothed_weights([1.0, 1.25, 2.0], 1.2, "range") == pytest.approx(expected)


def test_only_max_starts_with_all_agents() -> None:
    """In round 1 of 100 the farthest agent has weight under "max" and none under "range", where its ratio is 1."""
    omega = evaluate("sigmoid(3.2)", "omega", 1, 100)
    assert unsmoothed_weights([1.0, 1.25, 2.0], omega, "max")[3] == pytest.approx(0.140987, abs=1e-6)
    assert unsmoothed_weights([1.0, 1.25, 2.0], omega, "range")[3] == 0


def test_directions_by_hand() -> None:
    """Distances of unit vectors: 0 for equal directions, √2 for right angles and zero vectors, 2 for opposite ones."""
    dy = torch.tensor([[2.0, 0.0], [7.0, 0.0], [0.0, 3.0], [0.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    assert angular_distance(dy, dy[0]).tolist() == pytest.approx([0, 0, math.sqrt(2), math.sqrt(2), 2])
    d = calc_weights(dy, past(5), round_of(5), 0.5, 0.5, distance=angular_distance)[2]
    assert d.tolist() == pytest.approx([0, 0, math.sqrt(2), math.sqrt(2), 2])
    way = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    same = torch.tensor([[1.0], [3.0], [0.1], [7e-3]], dtype=torch.float64) * way
    assert angular_distance(same, same[0]).tolist() == [0, 0, 0, 0]
    assert angular_distance(torch.tensor([[1.0], [math.nan]], dtype=torch.float64), torch.ones(1))[1].isnan()


def test_smoothing_by_hand() -> None:
    """alpha_bar is the mean of alpha^(r-2), alpha^(r-1) and alpha^r: (1/4 + 1/4 + 4/9) / 3 = 17/54 for Alice."""
    dy = torch.tensor([[0.0], [1.0], [1.25], [2.0]], dtype=torch.float64)
    alpha_bar, _, d = calc_weights(dy, past(4), round_of(4), 0.5, 0.5)
    assert alpha_bar.tolist() == pytest.approx([17 / 54, 15 / 54, 13 / 54, 9 / 54])
    assert d.tolist() == pytest.approx([0.75, 1.0, 1.25, 2.0])


def test_history_keeps_the_raw_weights() -> None:
    """The history stores alpha^r, not alpha_bar (Algorithm 2, line 14)."""
    from waffle_fl.algorithms.scaffold import Up
    from waffle_fl.models import Net

    waffle = WafflePaper(SGD())
    server, _ = waffle.init(Net(torch.zeros(1, dtype=torch.float64), torch.zeros(0)), 4)
    up = Up(torch.tensor([[0.0], [1.0], [1.25], [2.0]], dtype=torch.float64), torch.zeros(4, 0))
    after, info = waffle.aggregate(server, up, round_of(4, r=50))
    assert after.past[0].tolist() == [0.25] * 4
    assert after.past[1].tolist() == info.alpha.tolist() != info.weights.tolist()


@pytest.mark.parametrize(("rounds", "first"), [(100, 95), (20, 19), (10, 10), (7, 7), (3, 3), (1, 1)])
def test_alice_trains_alone_from_95_percent(rounds: int, first: int) -> None:
    """alpha is Alice's indicator from the first round r with r >= 0.95 R, and not before (integer arithmetic)."""
    dy = torch.tensor([[0.0], [1.0], [1.1]], dtype=torch.float64)
    alone = [
        calc_weights(dy, past(3), round_of(3, r, rounds), 1.0, 1.0)[1].tolist() == [1, 0, 0]
        for r in range(1, rounds + 1)
    ]
    assert alone == [r >= first for r in range(1, rounds + 1)]


def test_fully_local_two_rounds_later() -> None:
    """With R = 100 the smoothed weights are exactly Alice's from round 97."""
    dy, history = torch.tensor([[0.0], [1.0], [1.1]], dtype=torch.float64), past(3)
    local = []
    for r in range(90, 101):
        alpha_bar, alpha, _ = calc_weights(dy, history, round_of(3, r), 1.0, 1.0)
        history = torch.stack([history[1], alpha])
        if alpha_bar.tolist() == [1, 0, 0]:
            local.append(r)
    assert local == [97, 98, 99, 100]


updates = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(TINY_FLOATS, min_size=width, max_size=width), min_size=2, max_size=6)
)
degrees = st.floats(0.01, 1)
readings = st.sampled_from(["max", "range"])


@given(updates, degrees, degrees, readings, st.integers(1, 94))
@settings(max_examples=150)
def test_weights_are_normalised(dy: list[list[float]], omega: float, psi: float, reading: str, r: int) -> None:
    """Weights are finite, non-negative and sum to 1; a nearer agent never weighs less; Alice has the largest weight."""
    rows = torch.tensor(dy, dtype=torch.float64)
    alpha_bar, alpha, d = calc_weights(rows, past(len(rows)), round_of(len(rows), r), omega, psi, reading)
    for weights in (alpha_bar, alpha):
        assert torch.isfinite(weights).all()
        assert (weights >= 0).all()
        assert weights.sum().item() == pytest.approx(1)
    assert alpha[0] >= alpha.max() - 1e-12
    others = sorted(zip(d[1:].tolist(), alpha[1:].tolist(), strict=True))
    assert all(b <= a + 1e-12 for (_, a), (_, b) in pairwise(others))


@given(updates, degrees, degrees, readings)
@settings(max_examples=100)
def test_agrees_with_the_reference(dy: list[list[float]], omega: float, psi: float, reading: str) -> None:
    """The tensor form and the reference's plain floats give the same weights."""
    rows = torch.tensor(dy, dtype=torch.float64)
    n = len(rows)
    mine = calc_weights(rows, past(n), round_of(n, 7), omega, psi, reading)
    theirs = slow(list(rows), ([1 / n] * n, [1 / n] * n), 0, 7, 100, omega, psi, reading)
    assert mine[0].tolist() == pytest.approx(theirs[0], abs=1e-9)
    assert mine[1].tolist() == pytest.approx(theirs[1], abs=1e-9)


@given(updates, degrees, readings, st.sampled_from([0.25, 4.0, 1024.0]))
@settings(max_examples=100)
def test_scale_does_not_matter(dy: list[list[float]], omega: float, reading: str, scale: float) -> None:
    """Updates k times as long give the same weights."""
    rows = torch.tensor(dy, dtype=torch.float64)
    context = round_of(len(rows))
    before = calc_weights(rows, past(len(rows)), context, omega, omega, reading)[0]
    after = calc_weights(scale * rows, past(len(rows)), context, omega, omega, reading)[0]
    assert after.tolist() == pytest.approx(before.tolist(), abs=1e-9)


@given(updates, degrees, readings, st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_order_does_not_matter(dy: list[list[float]], omega: float, reading: str, random: object) -> None:
    """Permuting the agents permutes their weights."""
    rows = torch.tensor(dy, dtype=torch.float64)
    n = len(rows)
    order = list(range(n))
    random.shuffle(order)  # type: ignore[attr-defined]
    before = calc_weights(rows, past(n), round_of(n), omega, omega, reading)[0]
    after = calc_weights(rows[order], past(n), round_of(n, alice=order.index(0)), omega, omega, reading)[0]
    assert after.tolist() == pytest.approx(before[order].tolist(), abs=1e-12)


def test_common_shift_does_not_matter() -> None:
    """Adding one vector to every update leaves the weights unchanged."""
    rows = torch.tensor([[0.0, 1.0], [2.0, 0.5], [-1.0, 3.0]], dtype=torch.float64)
    shifted = rows + torch.tensor([5.0, -7.0], dtype=torch.float64)
    before, after = (calc_weights(dy, past(3), round_of(3), 0.7, 0.7)[0].tolist() for dy in (rows, shifted))
    assert after == pytest.approx(before)


@pytest.mark.parametrize("reading", ["max", "range"])
def test_one_agent(reading: str) -> None:
    """N = 1: all weight is Alice's."""
    assert unsmoothed_weights([], 0.5, reading) == [1.0]


def test_two_agents() -> None:
    """N = 2, where the paper's formula is 0/0: equal weights under "max", the nearest agent's limit under "range".

    The limit of the ratio is (1 - omega) / (2 - omega) = 1/3 at omega = 1/2: weights 1/2 and 1/2 - 1/3 = 1/6.
    """
    assert unsmoothed_weights([3.0], 0.5, "max") == [0.5, 0.5]
    assert unsmoothed_weights([3.0], 0.5, "range") == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize("reading", ["max", "range"])
def test_equal_distances(reading: str) -> None:
    """Equally distant agents have equal weights, and nothing is NaN."""
    weights = unsmoothed_weights([2.0, 2.0, 2.0], 0.8, reading)
    assert weights[1] == weights[2] == weights[3]
    assert math.isfinite(sum(weights))


@pytest.mark.parametrize("reading", ["max", "range"])
def test_identical_updates(reading: str) -> None:
    """The weights are defined when all updates are equal, also when all are zero."""
    weights = unsmoothed_weights([0.0, 0.0], 0.6, reading)
    assert all(math.isfinite(w) for w in weights)
    assert sum(weights) == pytest.approx(1)


def test_no_threshold_passed() -> None:
    """Alice trains alone when psi = 0 makes every weight zero."""
    dy = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    assert calc_weights(dy, past(3), round_of(3, 50), 0.0, 0.0)[1].tolist() == [1, 0, 0]


def test_missing_agents_have_weight_zero() -> None:
    """An agent that was not received has weight 0, does not enter dM and dm, and passes its history to the others."""
    dy = torch.tensor([[0.0], [1.0], [500.0], [2.0]], dtype=torch.float64)
    alpha_bar, alpha, _ = calc_weights(dy, past(4), round_of(4, received=[True, True, False, True]), 0.5, 0.5)
    three = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    assert alpha[[0, 1, 3]].tolist() == pytest.approx(calc_weights(three, past(3), round_of(3), 0.5, 0.5)[1].tolist())
    assert alpha_bar[2] == 0
    assert alpha_bar.sum().item() == pytest.approx(1)


def test_only_alice_is_received() -> None:
    """A round in which only Alice's update arrives is a local step."""
    dy = torch.zeros(3, 2, dtype=torch.float64)
    alpha_bar, _, _ = calc_weights(dy, past(3), round_of(3, received=[True, False, False]), 0.9, 0.9)
    assert alpha_bar.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("r", "value"), [(1, 0.958354), (25, 0.832018), (50, 0.5), (75, 0.167982), (95, 0.053151), (100, 0.039166)]
)
def test_the_paper_s_sigmoid(r: int, value: float) -> None:
    """Omega(r) = 1 / (1 + exp(3.2 (r/50 - 1))) for R = 100."""
    assert evaluate("sigmoid(3.2)", "omega", r, 100) == pytest.approx(value, abs=1e-6)


def test_schedules_by_hand() -> None:
    """Hand-computed values of the other schedules, and the shift that starts local training earlier."""
    assert parse("linear")(25, 100) == 0.75
    assert parse("linear(0.8, 0.2)")(50, 100) == pytest.approx(0.5)
    assert [parse("step(0.7)")(r, 100) for r in (69, 70)] == [1.0, 0.0]
    assert parse("constant(0.3)")(99, 100) == 0.3
    assert parse("exponential(2)")(50, 100) == pytest.approx(math.exp(-1))
    assert sigmoid(3.2, 10)(40, 100) == 0.5
    assert evaluate("sigmoid(1e12)", "omega", 100, 100) == pytest.approx(0, abs=1e-300)
    assert evaluate("sigmoid(0)", "omega", 1, 100) == 0.5
    assert evaluate(lambda r, rounds: r / rounds, "psi", 200, 100) == 1.0


@pytest.mark.parametrize(
    "text", ["sigmoid(-1)", "sigmoyd(3)", "linear(a)", "step(1,2,3,4)", "3.2", "os:nothing", "math:pi"]
)
def test_bad_schedules(text: str) -> None:
    """A schedule that cannot be parsed is rejected with one line."""
    with pytest.raises(WaffleError, match=r"^[^\n]+$"):
        parse(text)


@pytest.mark.parametrize("value", [math.nan, 1.5, -0.1, math.inf, "half"])
def test_bad_values_of_a_schedule(value: object) -> None:
    """A user's schedule that leaves [0, 1] is rejected with the round and the value."""
    with pytest.raises(WaffleError, match=r"omega\(7\) of 10 rounds is"):
        evaluate(lambda r, rounds: value, "omega", 7, 10)  # type: ignore[arg-type,return-value]
