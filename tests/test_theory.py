"""Tests of docs/theory.md on convergence: each docstring is a statement of that page, checked on quadratics."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from paper import drift, momentum
from paper.quadratics import (
    Response,
    equal_weights,
    fedavg_radius,
    in_one_dimension,
    lines,
    play,
    response,
    round_map,
    scaffold_radius,
    spectral_radius,
    stationary,
)
from torch import Tensor

from theory_support import (
    ALPHA,
    DRIFT,
    ONE_STEP_FLAT,
    START,
    close,
    quadratics,
    same_curvature,
    trained,
)
from waffle_fl.algorithms import SGD
from waffle_fl.algorithms.contract import one_hot
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.scaffold import Scaffold
from waffle_fl.algorithms.waffle import Waffle

# ------------------------------------------------------------------------------------------------------- fixed weights


def test_a_round_of_local_steps() -> None:
    """A round moves agent i by −lr K P_i (∇f_i(x) + c − c_i) and sets c_i to P_i ∇f_i(x) + (I − P_i)(c_i − c), with P_i
    the mean of the first K powers of I − lr H_i."""
    problem, lr, K = quadratics(), 0.7, 5
    waffle = Waffle(SGD(lr), clip=0.0)
    before, after = (s for s, *_ in list(play(waffle, problem.grad, START, [K] * 3, 4, ALPHA))[-2:])
    *_, (_, up, _) = play(waffle, problem.grad, START, [K] * 3, 4, ALPHA)
    eye = torch.eye(2, dtype=torch.float64)
    for i, H in enumerate(problem.curvatures):
        P = torch.stack([torch.linalg.matrix_power(eye - lr * H, k) for k in range(K)]).mean(dim=0)
        g = problem.grad(before.x.expand(3, -1), START)[0][i]
        assert close(up.dy[i], -lr * K * P @ (g + before.c - before.c_i[i]))
        assert close(after.c_i[i], P @ g + (eye - P) @ (before.c_i[i] - before.c))


@pytest.mark.parametrize("steps", [1, 2, 9, (1, 4, 2)], ids=str)
def test_fixed_weights_end_in_the_minimiser(steps: int | tuple[int, ...]) -> None:
    """With fixed weights, the anchored rule and lr L < 2 the only fixed point is the minimiser of the weighted
    objective, for any numbers of local steps, equal or not; there c = 0 and each c_i is its agent's gradient."""
    problem, lr = quadratics(1, low=0.3), 0.3
    server = trained(Waffle(SGD(lr), clip=0.0), problem, steps, weights=ALPHA)
    goal = problem.minimiser(ALPHA)
    assert close(server.x, goal)
    assert close(server.c, START)
    assert close(server.c_i, problem.grad(goal.expand(3, -1), START)[0])
    each = [steps] * 3 if isinstance(steps, int) else steps
    unmoved = torch.eye(10, dtype=torch.float64) - round_map(problem.curvatures, ALPHA, lr, each)
    assert torch.linalg.matrix_rank(unmoved) == 10


def test_fixed_point_of_fedavg() -> None:
    """FedAvg stops at the mean of the optima weighted by I − (I − lr H_i)^K: at the minimiser for one step, at the
    plain mean of the optima for very many, and in between, to first order, lr (K − 1)/2 · H⁻¹ Σ α_i H_i ∇f_i(x*)
    away from the minimiser."""
    problem, lr = quadratics(1), 0.02
    eye, equal = torch.eye(2, dtype=torch.float64), torch.full((3,), 1 / 3, dtype=torch.float64)
    goal = problem.minimiser(equal)
    for K in (1, 4, 1000):
        new_control_variates = eye - torch.linalg.matrix_power(eye - lr * problem.curvatures, K)
        stop = stationary(new_control_variates, problem.optima)
        ((server, _, _),) = play(FedAvg(SGD(lr)), problem.grad, stop, [K] * 3, 1)
        assert close(server.x, stop)
        assert fedavg_radius(problem, lr, [K] * 3) < 1
        if K == 1:
            assert close(stop, goal)
        elif K == 4:
            force = torch.einsum("ipq,iq->ip", problem.curvatures, problem.grad(goal.expand(3, -1), START)[0])
            first_order = torch.linalg.solve(problem.curvatures.mean(dim=0), force.mean(dim=0)) * lr * (K - 1) / 2
            assert (stop - goal).norm() > 0.01
            assert (stop - goal - first_order).norm() < 0.1 * first_order.norm()
        else:
            assert (stop - problem.optima.mean(dim=0)).norm() < 0.2 * (goal - problem.optima.mean(dim=0)).norm()


@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(0.1, 1))
@settings(max_examples=15)
def test_linear_convergence(seed: int, K: int, share: float) -> None:
    """For lr K L ≤ μ/(4L) the error |x − x*| + μ/(4L²) max_i |∇f_i(x) − c_i| falls every round by a factor of at most
    1 − 0.45 lr K μ."""
    low, high = 0.2, 1.0
    problem = quadratics(seed, low=low, high=high)
    lr, goal = share * low / (4 * high**2) / K, problem.minimiser(ALPHA)

    def error(x: Tensor, c_i: Tensor) -> float:
        lag = problem.grad(x.expand(3, -1), START)[0] - c_i
        return float((x - goal).norm() + low / (4 * high**2) * lag.norm(dim=1).max())

    waffle = Waffle(SGD(lr), clip=0.0)
    errors = [error(START, torch.zeros(3, 2, dtype=torch.float64))]
    errors += [error(s.x, s.c_i) for s, *_ in play(waffle, problem.grad, START, [K] * 3, 12, ALPHA)]
    assert all(new <= (1 - 0.45 * lr * K * low) * old for old, new in pairwise(errors))


def test_a_whole_run_ends_in_alice_s_own_optimum() -> None:
    """Once Alice holds all the weight, anchored WAFFLE is gradient descent on her own loss, so a long run ends in her
    own minimiser, and the other agents only determine where it starts."""
    lr, K, rounds = 0.05, 4, 60
    problem = quadratics(2)
    history = list(play(Waffle(SGD(lr), clip=0.0), problem.grad, START, [K] * 3, rounds))
    alone = next(r for r, (_, _, info) in enumerate(history) if all(w.weights[0] == 1 for _, _, w in history[r:]))
    assert 30 < alone < 58
    start = history[alone][0].x
    power = torch.linalg.matrix_power(
        torch.eye(2, dtype=torch.float64) - lr * problem.curvatures[0], K * (rounds - 1 - alone)
    )
    assert close(history[-1][0].x - problem.optima[0], power @ (start - problem.optima[0]))


# ---------------------------------------------------------------------------------------------------- the control rule


def test_the_printed_rule_s_bias_is_a_sum() -> None:
    """Under the printed rule c differs from the weighted mean of the c_i by the sum, over all rounds, of the decrease
    of each weight times the control variate of that round; under the anchored rule they are always equal."""
    problem = quadratics(3)
    for control in ("anchored", "paper"):
        waffle = Waffle(SGD(0.2), clip=0.0, control=control)  # type: ignore[arg-type]
        history = list(play(waffle, problem.grad, START, [4] * 3, 40))
        biases = [server.c - info.weights @ server.c_i for server, _, info in history]
        total = torch.zeros_like(START)
        for (old, _, before), (_, _, after), bias in zip(history, history[1:], biases[1:], strict=False):
            total = total + (before.weights - after.weights) @ old.c_i
            assert close(bias, total if control == "paper" else START)
        assert (biases[-1].norm() > 0.1) == (control == "paper")


def test_the_bias_moves_the_fixed_point() -> None:
    """With c − Σ α_i c_i = b the fixed point is the minimiser minus H_α⁻¹ b, and the printed rule never changes b once
    the weights are constant."""
    problem = quadratics(4, low=0.3)
    g = torch.Generator().manual_seed(0)
    changing = torch.softmax(2 * torch.randn(5, 3, generator=g, dtype=torch.float64), dim=1)
    weights = torch.cat([changing, ALPHA.expand(150, -1)])
    for control in ("anchored", "paper"):
        waffle = Waffle(SGD(0.3), clip=0.0, control=control)  # type: ignore[arg-type]
        history = list(play(waffle, problem.grad, START, [4] * 3, len(weights), weights))
        b = history[5][0].c - ALPHA @ history[5][0].c_i
        assert close(history[-1][0].c - ALPHA @ history[-1][0].c_i, b)
        H = torch.einsum("i,ipq->pq", ALPHA, problem.curvatures)
        assert close(history[-1][0].x, problem.minimiser(ALPHA) - torch.linalg.solve(H, b))
        assert (b.norm() > 0.1) == (control == "paper")


def test_the_printed_rule_stays_where_it_converged() -> None:
    """If training has converged before the weights change, the printed rule keeps the model there for any later
    weights; the anchored rule converges to the new minimiser."""
    problem, rounds = quadratics(5, low=0.3), 120
    alone = one_hot(torch.tensor(0), 3)
    weights = torch.cat([ALPHA.expand(rounds, -1), alone.expand(rounds, -1)])
    ends = {
        control: trained(Waffle(SGD(0.3), clip=0.0, control=control), problem, 4, 2 * rounds, weights=weights).x  # type: ignore[arg-type]
        for control in ("anchored", "paper")
    }
    assert close(ends["paper"], problem.minimiser(ALPHA))
    assert close(ends["anchored"], problem.optima[0])


# ----------------------------------------------------------------------------------------------------------- stability


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("control", ["anchored", "paper"])
def test_a_round_is_a_matrix(control: Any, beta: float) -> None:
    """A round is a matrix on the errors of (x, c, c_1, …, c_N), and for lr L < 2 the printed rule gives it the
    eigenvalue 1 as many times as the model has parameters, the anchored rule never."""
    problem, steps, lr = quadratics(6), [3, 1, 5], 0.4
    each = [response(H, lr, k, beta) for H, k in zip(problem.curvatures, steps, strict=True)]
    matrix = round_map(problem.curvatures, ALPHA, lr, steps, each, control)
    history = play(Waffle(SGD(lr, beta), clip=0.0, control=control), problem.grad, START, steps, 8, ALPHA)
    states = [torch.cat([server.x, server.c, server.c_i.flatten()]) for server, *_ in history]
    moves = [new - old for old, new in pairwise(states)]
    for old, new in pairwise(moves):
        assert close(new, matrix @ old)
    ones = (torch.linalg.eigvals(matrix) - 1).abs() < 1e-9
    assert ones.sum() == (2 if control == "paper" else 0)


@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(0.01, 1.99), st.integers(2, 5), st.floats(0.1, 5))
@settings(max_examples=60)
def test_stable_below_two(seed: int, K: int, lr: float, agents: int, evenness: float) -> None:
    """For lr L < 2 and a number of local steps that all agents share, the round map of SCAFFOLD and of anchored WAFFLE
    has a spectral radius below 1, for all weights and all curvatures."""
    problem = quadratics(seed, agents, 3, low=0.01)
    g = torch.Generator().manual_seed(seed)
    weights = torch.softmax(torch.randn(agents, generator=g, dtype=torch.float64) * 4 / evenness, dim=0)
    assert spectral_radius(round_map(problem.curvatures, weights, lr, [K] * agents)) < 1


def test_many_local_steps_slow_scaffold_down() -> None:
    """If all agents have the same curvature and lr L < 2, the spectral radius is the larger of |1 − lr h|^K and 1 −
    p(h) over its eigenvalues h, so beyond some number of local steps additional ones make SCAFFOLD slower."""
    problem, lr = same_curvature(quadratics(7)), 0.5
    h = torch.linalg.eigvalsh(problem.curvatures[0])
    found = {}
    for K in (1, 2, 4, 8, 16, 64):
        p = (1 - (1 - lr * h) ** K) / (K * lr * h)
        found[K] = spectral_radius(round_map(problem.curvatures, ALPHA, lr, [K] * 3))
        assert found[K] == pytest.approx(float(torch.maximum((1 - lr * h).abs() ** K, 1 - p).max()))
    best = min(found, key=lambda K: found[K])
    assert 1 < best < 64
    assert found[64] > 0.9


@pytest.mark.parametrize("K", [2, 8])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
def test_one_sharp_agent_causes_instability(K: int, share: float) -> None:
    """In one dimension and for an even K SCAFFOLD and WAFFLE are stable if and only if lr h_i < 2 for every agent, even
    one of small weight, whereas FedAvg only needs |Σ α_i (1 − lr h_i)^K| < 1."""
    problem, weights = in_one_dimension((1.0, 0.1)), torch.tensor([share, 1 - share], dtype=torch.float64)

    def radius(lr: float) -> float:
        return spectral_radius(round_map(problem.curvatures, weights, lr, [K, K]))

    assert radius(1.99) < 1 - 1e-4 * share
    assert radius(2.0) == pytest.approx(1)
    assert radius(2.01) > 1 + 1e-4 * share
    ten = in_one_dimension((1.0, *[0.1] * 9))
    assert fedavg_radius(ten, 2.1, [K] * 10) < 1 < scaffold_radius(ten, 2.1, [K] * 10)


@pytest.mark.parametrize(("K", "share"), [(8, 0.5), (16, 0.5), (40, 0.5), (40, 0.9)])
def test_unequal_steps_can_diverge(K: int, share: float) -> None:
    """With one agent of curvature h that makes one step and a flat agent that makes K, a round is stable for lr h < 2
    if and only if lr h < 1/(α_1 α_2 (K − 1)): with unequal numbers of steps lr L < 2 is not enough."""
    flat, weights = in_one_dimension((1.0, 0.0)), torch.tensor([share, 1 - share], dtype=torch.float64)
    limit = 1 / (share * (1 - share) * (K - 1))
    for lr, stable in ((0.99 * limit, True), (1.01 * limit, False)):
        assert (spectral_radius(round_map(flat.curvatures, weights, lr, [1, K])) < 1) == stable
    assert limit < 2


def test_measured_rates_are_spectral_radii() -> None:
    """Over 60 rounds the models of FedAvg and WAFFLE shrink or grow at the rate of the spectral radius within 5 %,
    below 1 and above it."""
    for line in map(json.loads, lines()):
        if "measured" not in line:
            continue
        computed = dict(zip(line["lr"], line["radius"], strict=True))
        for lr, rate in zip(line["tried"], line["measured"], strict=True):
            assert rate == pytest.approx(computed[lr], rel=0.05)


def test_momentum_reweighs_the_objective() -> None:
    """Under momentum our form stops where Σ α_i B_i⁻¹ G_i ∇f_i(x) = 0, with G_i and B_i the responses of K steps to a
    gradient and to a correction: at the minimiser if the curvatures are equal, elsewhere if they are not."""
    sgd = SGD(momentum.LR, momentum.MOMENTUM)
    each = [response(H, sgd.lr, momentum.STEPS, sgd.momentum) for H in DRIFT.curvatures]
    new_control_variates = torch.stack(
        [torch.linalg.solve(r.to_correction, r.to_gradient @ H) for r, H in zip(each, DRIFT[0], strict=True)]
    )
    stop = stationary(new_control_variates, DRIFT.optima)
    assert close(trained(Scaffold(sgd, clip=0.0), DRIFT, momentum.STEPS, 60).x, stop, atol=1e-6)
    recorded = momentum.models(*momentum.FORMS["outside, divided by K (ours)"])[-1]
    assert (stop - recorded).norm() < 0.001 < 0.1 < (stop - drift.common_optimum()).norm()
    equal = same_curvature(DRIFT)
    assert close(trained(Scaffold(sgd, clip=0.0), equal, momentum.STEPS, 60).x, equal.optima.mean(dim=0), atol=1e-6)


def test_correction_inside_momentum_diverges() -> None:
    """With the correction inside the velocity and division by K, the difference of two c_i in a direction without
    curvature is multiplied by 1 − S/K per round, S the sum of the K velocities under a constant gradient of 1."""
    beta, K, lr = momentum.MOMENTUM, momentum.STEPS, momentum.LR
    S = K / (1 - beta) - beta * (1 - beta**K) / (1 - beta) ** 2
    flat = response(torch.zeros(1, 1, dtype=torch.float64), lr, K, beta).to_gradient
    assert 1 - flat.item() == pytest.approx(1 - S / K)
    assert 1 - S / K < -6
    each = [Response(r.to_gradient, r.to_gradient) for r in (response(H, lr, K, beta) for H in DRIFT.curvatures)]
    radius = spectral_radius(round_map(DRIFT.curvatures, equal_weights(DRIFT), lr, [K] * 3, each))
    *_, before, last = momentum.models(*momentum.FORMS["inside, divided by K"])
    goal = drift.common_optimum()
    assert radius == pytest.approx(float((last - goal).norm() / (before - goal).norm()), rel=0.01)


@given(st.integers(0, 10_000), st.integers(1, 30), st.floats(0, 0.95), st.floats(0.01, 1.9))
@settings(max_examples=40)
def test_stability_under_momentum(seed: int, K: int, beta: float, lr: float) -> None:
    """Under momentum the round map has a spectral radius below 1 for all weights if |1 − lr K h G(h)| < 1 and
    |1 − B(h)| < 1 for every curvature h; an agent of weight 0 has the eigenvalues 1 − B(h)."""
    problem = quadratics(seed, low=0.01)
    each = [response(H, lr, K, beta) for H in problem.curvatures]
    gradient_maps = torch.stack(
        [
            torch.eye(2, dtype=torch.float64) - lr * K * r.to_gradient @ H
            for r, H in zip(each, problem.curvatures, strict=True)
        ]
    )
    correction_maps = torch.eye(2, dtype=torch.float64) - torch.stack([r.to_correction for r in each])
    if max(torch.linalg.eigvals(m).abs().max() for m in (gradient_maps, correction_maps)) < 1:
        assert spectral_radius(round_map(problem.curvatures, ALPHA, lr, [K] * 3, each)) < 1
    found = torch.linalg.eigvals(round_map(problem.curvatures, one_hot(torch.tensor(0), 3), lr, [K] * 3, each))
    for expected in torch.linalg.eigvals(correction_maps[1:]).flatten():
        assert (found - expected).abs().min() < 1e-6 * max(1.0, float(expected.abs()))


def test_momentum_lowers_the_stable_step_size() -> None:
    """With ten local steps, an agent of weight 0 has stable control variates up to lr h = 2 without momentum, and only
    up to 0.14 with momentum 0.9."""

    def stable(h: float, beta: float) -> bool:
        return abs(1 - response(torch.tensor([[h]], dtype=torch.float64), 1.0, 10, beta).to_correction.item()) < 1

    assert all(stable(0.01 * i, 0.0) for i in range(1, 200))
    assert not stable(2.01, 0.0)
    assert [i for i in range(1, 20) if stable(0.01 * i, 0.9)] == list(range(1, 15))


# ------------------------------------------------------------------------------------------------------------ clipping


@given(st.integers(0, 10_000), st.floats(0.1, 5), st.integers(1, 6), st.floats(0.1, 4))
@settings(max_examples=15)
def test_clipping_bounds_a_round(seed: int, clip: float, K: int, lr: float) -> None:
    """With corrected gradients clipped at C a round moves the model by at most lr K C, and under fixed weights c is
    never longer than C and no c_i grows by more than 2C per round, for any losses and any step size."""
    problem = quadratics(seed)
    x, longest = START, torch.zeros(3, dtype=torch.float64)
    for server, _, _ in play(Waffle(SGD(lr), clip=clip), problem.grad, START, [K] * 3, 8, ALPHA):
        assert (server.x - x).norm() <= lr * K * clip * (1 + 1e-9)
        assert server.c.norm() <= clip * (1 + 1e-9)
        assert (server.c_i.norm(dim=1) <= longest + 2 * clip * (1 + 1e-9)).all()
        x, longest = server.x, server.c_i.norm(dim=1)


def test_clipping_moves_no_fixed_point_of_waffle() -> None:
    """Clipping changes neither the fixed point of WAFFLE nor its rate near it, because corrected gradients vanish
    there; FedAvg's raw gradients do not, and clipping moves its fixed point."""
    problem = in_one_dimension((1.0, 1.0, 1.0))._replace(
        optima=torch.tensor([[0.0], [1.0], [8.0]], dtype=torch.float64)
    )
    assert trained(Waffle(SGD(0.2), clip=0.5), problem, 4, weights=equal_weights(problem)).x.item() == pytest.approx(3)
    assert trained(FedAvg(SGD(0.2)), problem, 1).x.item() == pytest.approx(3)
    assert trained(FedAvg(SGD(0.2), clip=0.5), problem, 1).x.item() == pytest.approx(1)


def test_clipping_bounds_an_unstable_run() -> None:
    """With one and sixteen steps at lr 0.6, where the spectral radius is 1.5, the model is 10^25 away after 150 rounds;
    clipped at 2 it circles around the optimum, never farther than 13, and does not converge."""
    problem = ONE_STEP_FLAT._replace(optima=torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    goal = problem.minimiser(equal_weights(problem))
    far = {}
    for clip in (0.0, 2.0):
        history = play(Waffle(SGD(0.6), clip=clip), problem.grad, START[:1], [1, 16], 150, equal_weights(problem))
        far[clip] = [float((server.x - goal).norm()) for server, *_ in history]
    assert far[0.0][-1] > 1e25
    assert max(far[2.0]) < 13
    assert max(far[2.0][-20:]) > 1


def test_clipping_shortens_the_recovery() -> None:
    """If Alice trains alone after 40 or 80 such rounds, she needs 23 or 41 rounds to come within 0.01 of her optimum
    without clipping, and 12 in both cases with it."""
    problem = ONE_STEP_FLAT._replace(optima=torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    needed = {}
    for clip in (0.0, 2.0):
        for unstable in (40, 80):
            alone = one_hot(torch.tensor(0), 2).expand(45, -1)
            weights = torch.cat([equal_weights(problem).expand(unstable, -1), alone])
            history = play(Waffle(SGD(0.6), clip=clip), problem.grad, START[:1], [1, 16], len(weights), weights)
            far = [float((server.x - problem.optima[0]).norm()) for server, *_ in history]
            needed[clip, unstable] = 1 + next(r for r, distance in enumerate(far[unstable:]) if distance < 0.01)
    assert needed == {(0.0, 40): 23, (0.0, 80): 41, (2.0, 40): 12, (2.0, 80): 12}
