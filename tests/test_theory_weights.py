"""Tests of docs/theory-weights.md: each docstring is a statement of that page, checked on quadratics."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from paper.quadratics import (
    Quadratics,
    equal_weights,
    in_one_dimension,
    play,
    response,
)
from torch import Tensor

import test_theory
from theory_support import (
    ALPHA,
    PAGES,
    START,
    STATEMENT,
    close,
    quadratics,
    round_of,
    same_curvature,
    trained,
    weights_at,
)
from waffle_fl.algorithms import SGD, Net
from waffle_fl.algorithms.contract import angular_distance
from waffle_fl.algorithms.fedavg import Down, FedAvg, Up
from waffle_fl.algorithms.schedules import evaluate
from waffle_fl.algorithms.waffle import Waffle, calc_weights
from waffle_fl.algorithms.waffle_kin import Cut, WaffleKin

# --------------------------------------------------------------------------------------------------------- the weights

distances_among = st.lists(st.floats(0.01, 100), min_size=2, max_size=6)
readings = st.sampled_from(["max", "range"])


@given(distances_among, st.floats(0.01, 1), readings, st.floats(0.01, 100))
@settings(max_examples=60)
def test_weights_depend_on_distance_ratios(distances: list[float], omega: float, reading: str, scale: float) -> None:
    """CalcWeights depends only on ratios of distances: scaling or shifting all updates gives the same weights, no agent
    weighs more than Alice, and of two agents the nearer never weighs less."""
    alpha = weights_at(distances, omega, reading)
    assert torch.allclose(alpha, weights_at([scale * d for d in distances], omega, reading), atol=1e-6)
    dy = torch.tensor([[0.0], *([d] for d in distances)], dtype=torch.float64)
    past = torch.full((2, len(dy)), 1 / len(dy), dtype=torch.float64)
    shifted = calc_weights(dy + scale, past, round_of(1, 100, len(dy)), omega, omega, reading)[1]  # type: ignore[arg-type]
    assert torch.allclose(alpha, shifted, atol=1e-6)
    assert alpha[0] >= alpha.max() - 1e-12
    by_distance = alpha[1:][torch.tensor(distances, dtype=torch.float64).argsort()]
    assert (by_distance.diff() <= 1e-12).all()


@pytest.mark.parametrize("q", [0.1, 0.3, 0.5, 0.8, 0.95])
def test_when_alice_is_alone(q: float) -> None:
    """With Ω = Ψ and q = dm/dM Alice has all the raw weight if and only if Ω ≤ q(1 − q)/(1 + q(1 − q)) under "max",
    which is never above 1/5, and Ω ≤ q(1 − Ω)² under "range", which is never above 0.382."""
    most = q * (1 - q) / (1 + q * (1 - q))
    assert most <= 0.2
    ranged = 1 + 1 / (2 * q) - math.sqrt(1 / q + 1 / (4 * q * q))
    assert ranged == pytest.approx(q * (1 - ranged) ** 2)
    assert ranged < (3 - math.sqrt(5)) / 2
    highest = {"max": (0.2, 72), "range": ((3 - math.sqrt(5)) / 2, 58)}  # passed in this round of 100
    for omega, r in highest.values():
        assert evaluate("sigmoid(3.2)", "omega", r - 1, 100) > omega > evaluate("sigmoid(3.2)", "omega", r, 100)
    for reading, limit in (("max", most), ("range", ranged)):
        assert weights_at([q, 1.0, (1 + q) / 2], limit - 1e-6, reading)[0] == 1
        assert weights_at([q, 1.0, (1 + q) / 2], limit + 1e-6, reading)[0] < 1


@given(distances_among)
@settings(max_examples=30)
def test_weights_at_omega_one_and_zero(distances: list[float]) -> None:
    """At Ω = Ψ = 1 the nearest agent weighs as much as Alice, the farthest q = dm/dM times as much under "max" and
    nothing under "range", so only equal distances give FedAvg's weights; at 0 Alice has all the weight."""
    q = min(distances) / max(distances)
    alpha = weights_at(distances, 1.0)
    assert (alpha[1:].max() / alpha[0]).item() == pytest.approx(1)
    assert (alpha[1:].min() / alpha[0]).item() == pytest.approx(q)
    if q < 0.99:
        ranged = weights_at(distances, 1.0, "range")
        assert (ranged[1:].max() / ranged[0]).item() == pytest.approx(1)
        assert ranged[1:].min().item() == pytest.approx(0, abs=1e-9)
    assert weights_at([2.0, 2.0], 1.0).tolist() == pytest.approx([1 / 3] * 3)
    for reading in ("max", "range"):
        assert weights_at(distances, 0.0, reading)[0] == 1


@given(st.integers(0, 10_000), st.integers(1, 20), st.floats(0.01, 1))
@settings(max_examples=30)
def test_the_first_distances_are_of_gradients(seed: int, K: int, lr: float) -> None:
    """In the first round d_i is lr K |∇f_i(x) − ∇f_A(x)| up to lr K · lr (K − 1) L/2 · (|∇f_i(x)| + |∇f_A(x)|), if
    lr L ≤ 1."""
    problem = quadratics(seed)
    g = problem.grad(START.expand(3, -1), START)[0]
    ((_, _, info),) = play(Waffle(SGD(lr), clip=0.0), problem.grad, START, [K] * 3, 1, of=100)
    bound = lr * K * lr * (K - 1) / 2 * (g.norm(dim=1) + g[0].norm())
    error = (info.distances - lr * K * (g - g[0]).norm(dim=1)).abs()
    assert (error[1:] <= bound[1:] + 1e-9).all()


def test_distances_among_equal_curvatures() -> None:
    """Among agents of one curvature the distances in round r are lr K |P (I − P)^(r−1) (∇f_i − ∇f_A)| for any weights,
    so in one dimension their ratios never change, and in several dimensions the sharpest direction dominates in the
    end."""
    lr, K = 0.3, 6
    problem = same_curvature(quadratics(8))
    H, eye = problem.curvatures[0], torch.eye(2, dtype=torch.float64)
    P = response(H, lr, K).to_gradient
    apart = (problem.optima - problem.optima[0]) @ H
    for r, (_, _, info) in enumerate(play(Waffle(SGD(lr), clip=0.0), problem.grad, START, [K] * 3, 12, of=100)):
        expected = lr * K * (apart @ (P @ torch.linalg.matrix_power(eye - P, r)).T).norm(dim=1)
        assert close(info.distances[1:], expected[1:], atol=1e-12)
    line = in_one_dimension((1.0,) * 3)._replace(optima=torch.tensor([[0.0], [1.0], [-3.0]], dtype=torch.float64))
    for _, _, info in play(Waffle(SGD(lr), clip=0.0), line.grad, START[:1], [K] * 3, 12, of=100):
        assert info.distances[2] / info.distances[1] == pytest.approx(3)
    flat_and_sharp = Quadratics(
        torch.diag_embed(torch.tensor([[1.0, 0.05]] * 3, dtype=torch.float64)),
        torch.tensor([[0.0, 0.0], [0.2, 0.0], [0.0, 20.0]], dtype=torch.float64),
    )
    history = list(play(Waffle(SGD(lr), clip=0.0), flat_and_sharp.grad, START, [K] * 3, 12, of=100))
    assert history[0][2].distances[1] < history[0][2].distances[2]
    assert history[-1][2].distances[1] > history[-1][2].distances[2]


def test_one_step_per_round_hides_the_optima() -> None:
    """With one local step the distances are lr |(H_i − H_A)(x_r − x_(r−1))| from the second round on, which does not
    depend on the optima: an agent with Alice's curvature but another optimum looks like a copy of her, and an agent
    with her optimum but another curvature is dropped."""
    problem = Quadratics(
        torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64).view(-1, 1, 1),
        torch.tensor([[1.0], [-9.0], [1.0]], dtype=torch.float64),
    )
    lr, x = 0.1, [START[:1]]
    for r, (server, _, info) in enumerate(play(Waffle(SGD(lr), clip=0.0), problem.grad, x[0], [1] * 3, 12, of=100)):
        x.append(server.x)
        if r > 0:
            difference = (problem.curvatures - problem.curvatures[0]).squeeze(2) * (x[r] - x[r - 1])
            assert close(info.distances[1:], lr * difference.norm(dim=1)[1:], atol=1e-12)
            assert info.alpha[1].item() == pytest.approx(info.alpha[0].item())
            assert info.alpha[2] < 0.05


@pytest.mark.parametrize(("lr", "misled"), [(0.05, True), (0.25, False)])
def test_more_steps_look_like_another_task(lr: float, misled: bool) -> None:
    """An agent with Alice's loss that makes three times her K steps is farther from her in the first round than an
    agent that sends zeros if and only if (1 − lr h)^K > 0.618, the golden section."""
    K = 4
    assert ((1 - lr) ** K > (math.sqrt(5) - 1) / 2) == misled
    problem = in_one_dimension((1.0, 1.0, 1.0))._replace(
        optima=torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)
    )
    ((_, up, info),) = play(Waffle(SGD(lr), clip=0.0), problem.grad, START[:1], [K, 3 * K, K], 1, of=100)
    assert up.dy[2] == 0
    assert (info.distances[1] > info.distances[2]) == misled


def test_noise_looks_like_distance() -> None:
    """In the first round gradient noise adds lr² Σ_k tr(M_i^2k Σ_i) + tr(M_A^2k Σ_A), k < K, to the mean squared
    distance, so a noisy agent with Alice's loss can be farther from her than a noise-free agent with another loss."""
    lr, K, size, copies = 0.1, 5, 3, 4000
    sigma = torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)
    h, away = torch.tensor([1.0, 1.0, 1.0]).double(), torch.tensor([1.0, 1.0, 1.5]).double()
    g = torch.Generator().manual_seed(0)
    noisy = sigma[:, None, None, None] * torch.randn(3, copies, size, K, generator=g, dtype=torch.float64)
    steps = iter(range(K))

    def grad(params: Tensor, stats: Tensor) -> Net:
        exact = h[:, None, None] * (params.view(3, copies, size) - away[:, None, None])
        return Net((exact + noisy[..., next(steps)]).flatten(1), stats)

    ((_, up, _),) = play(FedAvg(SGD(lr)), grad, torch.zeros(copies * size, dtype=torch.float64), [K] * 3, 1)
    squared = (up.dy - up.dy[0]).view(3, copies, size).square().sum(dim=2).mean(dim=1)
    powers = sum((1 - lr) ** (2 * k) for k in range(K))
    assert squared[1].item() == pytest.approx(lr**2 * powers * size * 4, rel=0.05)
    assert squared[1] > squared[2] > 0


def test_control_variates_keep_the_heterogeneity() -> None:
    """While the corrected updates and with them all distances tend to 0, |c_i − c_A| tends to |∇f_i − ∇f_A| at the
    limit: the heterogeneity itself."""
    problem = quadratics(9, low=0.3)
    goal = problem.minimiser(ALPHA)
    *_, (server, up, _) = play(Waffle(SGD(0.3), clip=0.0), problem.grad, START, [4] * 3, 150, ALPHA)
    g = problem.grad(goal.expand(3, -1), START)[0]
    assert up.dy.norm() < 1e-8
    assert close((server.c_i - server.c_i[0]).norm(dim=1), (g - g[0]).norm(dim=1))
    assert (g - g[0]).norm(dim=1)[1:].min() > 0.1
    compares_gradients = Waffle(SGD(0.3), clip=0.0, compared="gradients")
    for server, _, info in play(compares_gradients, problem.grad, START, [4] * 3, 20):
        assert close(info.distances[1:], (server.c_i - server.c_i[0]).norm(dim=1)[1:])


@pytest.mark.parametrize("length", [1.5, 4.0, 30.0])
def test_noise_affects_directions_less_than_distances(length: float) -> None:
    """As the dimensions grow, independent noise of length s_i adds s_i² to the squared distance of an agent's gradient
    g_i from Alice's, and divides their cosine by √(1 + s_i²/|g_i|²): an agent with Alice's gradient g and s_i > √2
    |g| is farther from her than a noise-free agent with an orthogonal gradient, but not by direction, where it is
    like a noise-free agent with a positive cosine."""
    n, cosine = 1_000_000, 1 / math.sqrt(1 + length**2)
    noise = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * length / math.sqrt(n)
    # gradients: Alice's, the same with noise, an orthogonal one, one with a positive cosine
    rows = torch.zeros(4, n, dtype=torch.float64)
    rows[0, 0] = rows[2, 1] = 1.0
    rows[1] = rows[0] + noise
    rows[3, 0], rows[3, 1] = cosine, math.sqrt(1 - cosine**2)
    context, past = round_of(1, 100, 4), torch.full((2, 4), 1 / 4, dtype=torch.float64)
    far = calc_weights(rows, past, context, 1.0, 1.0)[2]
    assert far[1].square().item() == pytest.approx(length**2, rel=0.01)
    assert far[1] > far[2] > 1.4
    turned = calc_weights(rows, past, context, 1.0, 1.0, distance=angular_distance)[2]
    assert turned[1].item() == pytest.approx(turned[3].item(), rel=0.003)
    assert turned[1] < turned[2]


# ------------------------------------------------------------------------------------------------ WAFFLE by kinship


def server_after(cosines: Sequence[float], lengths: Iterable[float] = repeat(1.0)) -> Any:
    """Return the server after rounds with these cosines between an agent's updates and Alice's of these lengths."""
    algorithm = WaffleKin(cut=Cut((2,), (True,)), yielding=0.0)
    server, _ = algorithm.init(Net(START, START[:0]), 2)
    for r, (s, length) in enumerate(zip(cosines, lengths, strict=False), 1):
        dy = torch.tensor([[length, 0.0], [s, math.sqrt(1 - s * s)]], dtype=torch.float64)
        server, _ = algorithm.aggregate(server, Up(dy, dy[:, :0]), round_of(r, 100, 2))
    return server


def kinship_after(cosines: Sequence[float], lengths: Iterable[float] = repeat(1.0)) -> float:
    server = server_after(cosines, lengths)
    return float(server.agreement[1, 0] / server.evidence[1, 0])


@given(
    st.lists(st.tuples(st.floats(0.05, 1), st.floats(0.1, 10), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 5),
)
@settings(max_examples=40)
def test_kinship_ignores_orthogonal_rounds(rounds: list[tuple[float, float, bool]], noise: int) -> None:
    """Kinship lies between the smallest and the largest of the cosines s_r, and if none is negative it is at least
    their mean weighted by the lengths of Alice's updates; rounds in which an agent's update is orthogonal to Alice's
    do not change it."""
    cosines, lengths, opposed = (list(column) for column in zip(*rounds, strict=True))
    mean = sum(length * s for s, length in zip(cosines, lengths, strict=True)) / sum(lengths)
    assert mean - 1e-9 <= kinship_after(cosines, lengths)
    signed = [-s if turned else s for s, turned in zip(cosines, opposed, strict=True)]
    kinship = kinship_after(signed, lengths)
    assert min(signed) - 1e-9 <= kinship <= max(signed) + 1e-9
    assert kinship_after([*signed, *[0.0] * noise], [*lengths, *[1.0] * noise]) == pytest.approx(kinship)


@pytest.mark.parametrize(("n", "a", "b"), [(5, 0.6, 0.7), (20, 0.7, 0.5), (1, 1.0, 1.0), (8, 0.5, 0.3), (30, 0.9, 0.6)])
def test_opposed_agents_lose_their_share(n: int, a: float, b: float) -> None:
    """If all updates of Alice have the same length, an agent that had the cosine a > 0.45 with her in n rounds and has
    −b from then on gets share 0 in her head from the m-th such round on, m = ⌈n a⁴ (a − 0.45) / (b⁴ (b + 0.45))⌉."""
    m = math.ceil(n * a**4 * (a - 0.45) / (b**4 * (b + 0.45)))
    agreed, turned = [a] * n, [-b] * (m + 2)
    assert server_after(agreed).share[1, 0] > 0
    assert m == 1 or server_after([*agreed, *turned[: m - 1]]).share[1, 0] > 0
    assert server_after([*agreed, *turned[:m]]).share[1, 0] == 0
    assert server_after([*agreed, *turned]).share[1, 0] == 0


@pytest.mark.parametrize("shared", [0, 1, 4, 5, 6, 7, 8, 10])
def test_kinship_counts_common_labels(shared: int) -> None:
    """From a head of zeros, on balanced classes whose means form a regular simplex, the first gradient of an agent that
    shares f of C labels with Alice has the cosine (f − 1)/(C − 1) with hers: of ten labels, an agent that shares 5
    or fewer gets share 0 in her head, and one that shares 7 or more gets share 1."""
    C = 10
    apply_update = torch.arange(shared, C).roll(1)
    labels = torch.stack([torch.arange(C), torch.cat([torch.arange(shared), apply_update])])
    features = torch.eye(C, dtype=torch.float64)  # one sample per class, at the corners of a simplex
    head = torch.zeros(2, C, C, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy((features @ head).flatten(0, 1), labels.flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, head)
    algorithm = WaffleKin(cut=Cut((C * C,), (True,)))
    server, _ = algorithm.init(Net(torch.zeros(C * C, dtype=torch.float64), START[:0]), 2)
    up = Up(-0.1 * gradient.flatten(1), gradient[:, 0, :0])
    server, info = algorithm.aggregate(server, up, round_of(1, 100, 2))
    cosine = torch.nn.functional.cosine_similarity(*gradient.flatten(1), dim=0).item()
    assert cosine == pytest.approx((shared - 1) / (C - 1), abs=1e-12)
    assert server.share[1, 0].item() == pytest.approx(min(max((cosine - 0.45) / 0.15, 0), 1), abs=1e-9)
    assert (server.share[1, 0] == 0) == (shared <= 5)
    assert (server.share[1, 0] == 1) == (shared >= 7)
    assert info.head[1] < info.head[0] or shared >= 7


def test_kinship_of_equal_losses_is_fedavg() -> None:
    """Among agents with the same loss every share stays 1, and the model that Alice starts from is FedAvg's."""
    problem = same_curvature(quadratics(3))
    problem = problem._replace(optima=problem.optima[:1].expand_as(problem.optima))
    kin = play(WaffleKin(SGD(0.3), clip=0.0, cut=Cut((1, 1), (False, True))), problem.grad, START, [5] * 3, 30)
    for (server, _, info), (average, _, _) in zip(
        kin, play(FedAvg(SGD(0.3)), problem.grad, START, [5] * 3, 30), strict=True
    ):
        assert close(server.x, average.x, atol=1e-12)
        assert close(info.weights, equal_weights(problem))


def test_alice_withdraws_exponentially() -> None:
    """If Alice and the others move in opposite directions in a one-dimensional layer of the body in every round, each
    of them has exp(−0.3 r) times her weight after r rounds, and her model tends to her own optimum."""
    problem = in_one_dimension((1.0, 1.0, 0.5))._replace(
        optima=torch.tensor([[1.0], [-1.0], [-2.0]], dtype=torch.float64)
    )
    history = list(play(WaffleKin(SGD(0.1), clip=0.0, cut=Cut((1,), (False,))), problem.grad, START[:1], [3] * 3, 80))
    for r, (_, _, info) in enumerate(history, 1):
        assert close(info.weights[1:] / info.weights[0], torch.full((2,), math.exp(-0.3 * r), dtype=torch.float64))
    assert history[-1][0].x.item() == pytest.approx(1, abs=1e-6)


def test_layers_are_personalised_separately() -> None:
    """If the loss is a sum over layers, agents that agree with Alice in the body and oppose her in the head lead her
    model to the common body and to her own head; FedAvg's head is the optimum of no agent."""
    curvatures = torch.tensor([[1.0, 1.0], [0.5, 1.0], [0.8, 1.0]], dtype=torch.float64)
    optima = torch.tensor([[2.0, 1.0], [2.0, -1.0], [2.0, -1.0]], dtype=torch.float64)
    problem = Quadratics(torch.diag_embed(curvatures), optima)
    server = trained(WaffleKin(SGD(0.2), clip=0.0, cut=Cut((1, 1), (False, True))), problem, 4)
    assert close(server.x, optima[0])
    assert server.share[1:].tolist() == [[1, 0], [1, 0]]
    assert close(trained(FedAvg(SGD(0.2)), problem, 4).x, torch.tensor([2.0, -1 / 3], dtype=torch.float64))


def test_shared_layer_reduces_noise() -> None:
    """In a layer that N agents share fully, gradient noise adds to Alice's model 1/N of the variance that it adds when
    she trains alone."""
    lr, K, N, copies = 0.1, 5, 5, 4000
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(N, copies, K, generator=g, dtype=torch.float64)
    variance = {}
    for agents in (1, N):
        steps = iter(range(K))

        def grad(params: Tensor, stats: Tensor, agents: int = agents, steps: Any = steps) -> Net:
            return Net(params - 10 + noise[:agents, :, next(steps)], stats)

        algorithm = WaffleKin(SGD(lr), clip=0.0, cut=Cut((copies,), (False,)))
        ((server, _, info),) = play(algorithm, grad, torch.zeros(copies, dtype=torch.float64), [K] * agents, 1)
        assert close(info.weights, torch.full((agents,), 1 / agents, dtype=torch.float64))
        variance[agents] = server.x.var().item()
    assert variance[N] / variance[1] == pytest.approx(1 / N, rel=0.1)


@pytest.mark.parametrize("averaging", [0.05, 0.1, 0.3])
def test_averaging_reduces_noise(averaging: float) -> None:
    """If the models of the rounds are one point plus independent noise, the noise of Alice's mean has after r rounds
    1/(a (2 − a) r) of that noise's variance, a the share of the rounds that she averages over, up to terms in 1/r²."""
    rounds = 600
    algorithm = WaffleKin(averaging=averaging, cut=Cut((rounds + 1,), (False,)))
    models = torch.eye(rounds + 1, dtype=torch.float64)  # so that the mean's numbers are the weights of the models
    _, agents = algorithm.init(Net(models[0], models[0, :0]), 1)
    for x in models[:rounds]:
        down = Down(x[None], x[None, :0])
        agents, _ = algorithm.finish(down, agents, algorithm.begin(down, agents))
    weights = algorithm.personal(SimpleNamespace(x=models[rounds], stats=models[0, :0]), agents, 1).params[0]
    assert weights.sum().item() == pytest.approx(1)
    assert (weights >= 0).all()
    assert weights.square().sum().item() == pytest.approx(1 / (averaging * (2 - averaging) * rounds), rel=0.02)


@pytest.mark.parametrize("own", [0.0, 0.3, 1.0])
def test_own_share_moves_alice_to_her_optimum(own: float) -> None:
    """In a layer that all share and where training has converged, Alice's model is 1 − b (1 − ρ)(1 − 1/(a r)) times as
    far from her optimum as the model she is sent, b how far her mean moves towards the model she trained, ρ the
    factor by which her K steps shrink a distance, a the share of the rounds that she averages over and r > 1/a their
    number."""
    lr, K, curvature, rounds = 0.1, 4, 0.5, 30
    optima = torch.tensor([[1.0], [-1.0], [-2.0]], dtype=torch.float64)
    problem = in_one_dimension((curvature,) * 3)._replace(optima=optima)
    algorithm = WaffleKin(SGD(lr), clip=0.0, head_layers=0, yielding=0.0, own=own, cut=Cut((1,), (False,)))
    rest = optima.mean(dim=0)
    *_, (server, _, _) = play(algorithm, problem.grad, rest, [K] * 3, rounds)
    agents = SimpleNamespace(mean=server.mean, mean_stats=server.mean_stats, rounds=server.rounds)
    assert close(server.x, rest)
    left = (1 - lr * curvature) ** K
    factor = 1 - own * (1 - left) * (1 - 1 / (algorithm.averaging * rounds))
    assert close(algorithm.personal(server, agents, 3).params[0] - optima[0], factor * (rest - optima[0]))


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_states_what_is_tested() -> None:
    """Every statement of the pages on theory has its number, names a test, and is that test's docstring; each test is
    named there once."""
    found = [statement for page in PAGES for statement in STATEMENT.findall(page.read_text())]
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1))
    tests = {k: v for m in (test_theory, sys.modules[__name__]) for k, v in vars(m).items() if k.startswith("test_")}
    del tests["test_theory"], tests["test_the_page_states_what_is_tested"]
    assert sorted(name for _, _, name in found) == sorted(tests)
    for _, statement, name in found:
        assert " ".join(statement.split()) == " ".join(str(tests[name].__doc__).split())
