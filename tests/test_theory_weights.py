"""Tests of docs/theory-weights.md: each docstring is a statement of that page, checked on random problems."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paper.quadratics import (
    Quadratics,
    equal_weights,
    play,
    response,
    stationary,
)
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

import test_theory
from theory_support import (
    PAGES,
    STATEMENT,
    Case,
    close,
    random_case,
    raw_weights,
    round_of,
    same_curvature,
    same_optimum,
    seeds,
    updates_at,
)
from waffle_fl.algorithms import SGD, Net
from waffle_fl.algorithms.contract import angular_distance
from waffle_fl.algorithms.fedavg import FedAvg, Up
from waffle_fl.algorithms.mixture import class_weights, value_weights
from waffle_fl.algorithms.schedules import evaluate
from waffle_fl.algorithms.waffle import Cut, Down, Waffle
from waffle_fl.algorithms.waffle_paper import WafflePaper, calc_weights

READINGS = ("max", "range")

# --------------------------------------------------------------------------------------------------------- the weights


@seeds(40)
def test_weights_depend_on_distance_ratios(seed: int) -> None:
    """CalcWeights' raw weights depend only on ratios of distances: scaling, shifting or rotating all updates gives the
    same weights, no agent weighs more than Alice, and of two other agents the nearer never weighs less."""
    case = random_case(seed, sizes=(1, 6))
    dy, shift, scale = case.normal(case.agents, case.size), case.normal(case.size), 10 ** case.draw.uniform(-2, 2)
    rotation = torch.linalg.qr(case.normal(case.size, case.size)).Q
    omega, psi = case.draw.random(), case.draw.random()
    for reading in READINGS:
        alpha = raw_weights(dy, omega, psi, reading)
        assert close(alpha, raw_weights(scale * (dy + shift) @ rotation, omega, psi, reading))
        assert alpha[0] >= alpha.max() - 1e-12
        by_distance = alpha[1:][(dy - dy[0]).norm(dim=1)[1:].argsort()]
        assert (by_distance.diff() <= 1e-12).all()


@seeds(20)
def test_when_alice_is_alone(seed: int) -> None:
    """With Ω = Ψ and q = dm/dM Alice has all the raw weight before 0.95 R if and only if Ω ≤ q(1 − q)/(1 + q(1 − q))
    under "max", which is never above 1/5, and Ω ≤ q(1 − Ω)² under "range", which is never above 0.382."""
    case = random_case(seed, agents=(3, 6))
    q = case.draw.uniform(0.02, 0.98)
    most = q * (1 - q) / (1 + q * (1 - q))
    ranged = 1 + 1 / (2 * q) - math.sqrt(1 / q + 1 / (4 * q * q))
    assert ranged == pytest.approx(q * (1 - ranged) ** 2)
    assert most <= 0.2
    assert ranged < (3 - math.sqrt(5)) / 2 < 0.382
    dy = updates_at([q, 1.0, *(case.draw.uniform(q, 1) for _ in range(case.agents - 3))], seed)
    for reading, limit in (("max", most), ("range", ranged)):
        for r in (1, 94):
            assert raw_weights(dy, limit - 1e-6, limit - 1e-6, reading, r)[0] == 1
            assert raw_weights(dy, limit + 1e-6, limit + 1e-6, reading, r)[0] < 1
    highest = {"max": (0.2, 72), "range": ((3 - math.sqrt(5)) / 2, 58)}  # passed in this round of 100
    for omega, r in highest.values():
        assert evaluate("sigmoid(3.2)", "omega", r - 1, 100) > omega > evaluate("sigmoid(3.2)", "omega", r, 100)


@seeds(20)
def test_weights_at_omega_one_and_zero(seed: int) -> None:
    """At Ω = Ψ = 1 the nearest agent weighs as much as Alice, and the farthest q = dm/dM times as much under "max" and
    nothing under "range" if the distances differ; only equal distances give FedAvg's weights. At Ψ = 0 Alice has all
    the weight."""
    case = random_case(seed, agents=(3, 6))
    distances = [case.draw.uniform(0.01, 1) for _ in range(case.agents - 1)]
    dy, q = updates_at(distances, seed), min(distances) / max(distances)
    near, far = (1 + torch.tensor(distances).sort().indices[[0, -1]]).tolist()
    for reading, farthest in (("max", q), ("range", 0.0)):
        alpha = raw_weights(dy, 1.0, 1.0, reading)
        assert (alpha[near] / alpha[0]).item() == pytest.approx(1)
        assert (alpha[far] / alpha[0]).item() == pytest.approx(farthest, abs=1e-9)
        equal = updates_at([2.0] * (case.agents - 1), seed)
        assert close(raw_weights(equal, 1.0, 1.0, reading), equal_weights(case.problem))
        assert raw_weights(dy, case.draw.random(), 0.0, reading)[0] == 1


@seeds(25)
def test_the_first_distances_are_of_gradients(seed: int) -> None:
    """In the first round d_i is lr K |∇f_i(x) − ∇f_A(x)| up to lr K · lr (K − 1) L/2 · (|∇f_i(x)| + |∇f_A(x)|), if
    lr L ≤ 1."""
    case = random_case(seed)
    x, K, lr = case.normal(case.size), case.draw.randint(1, 12), case.draw.uniform(0.01, 1)
    g = case.gradients(x)
    ((_, _, info),) = play(WafflePaper(SGD(lr), clip=0.0), case.problem.grad, x, [K] * case.agents, 1, of=100)
    bound = lr * K * lr * (K - 1) / 2 * (g.norm(dim=1) + g[0].norm())
    error = (info.distances - lr * K * (g - g[0]).norm(dim=1)).abs()
    assert (error[1:] <= bound[1:] + 1e-9).all()


@seeds(12)
def test_distances_among_equal_curvatures(seed: int) -> None:
    """Among agents of one curvature the distances in round r are lr K |P (I − P)^(r−1) (∇f_i − ∇f_A)| for any weights:
    in one dimension their ratios never change, and in several dimensions, for K > 1 and lr L ≤ 1, the share of the
    sharpest direction in each difference grows every round and tends to 1, unless it is 0."""
    case = random_case(seed)
    lr, K = case.draw.uniform(0.2, 1), case.draw.randint(2, 5)
    problem, weights = same_curvature(case.problem), case.some_weights(8)
    H, P = problem.curvatures[0], response(problem.curvatures[0], lr, K).to_gradient
    apart = (problem.optima[0] - problem.optima) @ H
    sharpest, shares = torch.linalg.eigh(H).eigenvectors[:, -1], []
    waffle = WafflePaper(SGD(lr), clip=0.0, control="paper" if seed % 2 else "anchored")
    for r, (_, up, _) in enumerate(play(waffle, problem.grad, case.zero, [K] * case.agents, 8, weights)):
        differences = up.dy - up.dy[0]
        expected = lr * K * apart @ (P @ torch.linalg.matrix_power(case.eye - P, r)).T
        assert close(differences.norm(dim=1), expected.norm(dim=1), atol=1e-12)
        shares.append((expected[1:] @ sharpest).abs() / expected[1:].norm(dim=1))
    if case.size == 1:
        assert close(differences.norm(dim=1) / differences[1].norm(), apart.norm(dim=1) / apart[1].norm(), atol=1e-6)
    assert (torch.stack(shares).diff(dim=0) >= -1e-12).all()
    shrinking = (case.eye - P) / torch.linalg.matrix_norm(case.eye - P, 2)
    late = apart[1:] @ (P @ torch.linalg.matrix_power(shrinking, 300)).T
    if (torch.linalg.eigvalsh(H).diff()[-1:] > 0.05).all():
        assert close((late @ sharpest).abs() / late.norm(dim=1), torch.ones(case.agents - 1).double(), atol=1e-3)


@seeds(8)
def test_one_step_per_round_hides_the_optima(seed: int) -> None:
    """With one local step the distances are lr |(H_i − H_A)(x_r − x_(r−1))| from the second round on, whatever the
    optima: an agent with Alice's curvature has her raw weight, and then the agent whose distance is the largest has
    none, even if its optimum is hers."""
    case = random_case(seed, agents=(3, 5))
    curvatures, optima = case.problem.curvatures.clone(), case.problem.optima[:1].repeat(case.agents, 1)
    curvatures[1], optima[1] = curvatures[0], optima[1] + 9 * case.normal(case.size)
    problem, lr, x = Quadratics(curvatures, optima), case.draw.uniform(0.05, 0.9), [case.normal(case.size)]
    history = play(WafflePaper(SGD(lr), clip=0.0), problem.grad, x[0], [1] * case.agents, 6, of=100)
    for r, (server, _, info) in enumerate(history):
        x.append(server.x)
        if r > 0:
            expected = lr * ((curvatures - curvatures[0]) @ (x[r] - x[r - 1])).norm(dim=1)
            assert close(info.distances[1:], expected[1:], atol=1e-12)
            assert info.alpha[1].item() == pytest.approx(info.alpha[0].item())
            assert info.alpha[expected.argmax()] == 0


@seeds(25)
def test_more_steps_look_like_another_task(seed: int) -> None:
    """For lr L < 2 an agent with Alice's loss that makes three times her K steps is farther from her in the first round
    than an agent that sends zeros if (1 − lr h)^K > 0.618, the golden section, for every curvature h of her loss, and
    nearer if it is smaller for every h; in one dimension one of the two holds, except at equality."""
    case = random_case(seed, agents=(3, 3))
    K, lr, misled = case.draw.randint(1, 5), case.draw.uniform(0.05, 1), seed % 2 == 0
    left = []  # of 1 − lr h
    while len(left) < case.size:
        drawn = case.draw.uniform(-0.99, 0.99)
        if abs(drawn**K - 0.618) > 0.01 and (drawn**K > 0.618) == misled:
            left.append(drawn)
    rotation = torch.linalg.qr(case.normal(case.size, case.size)).Q
    H = rotation @ torch.diag((1 - torch.tensor(left, dtype=torch.float64)) / lr) @ rotation.T
    start, optimum = case.normal(case.size), case.normal(case.size)
    problem = Quadratics(H.expand(3, -1, -1), torch.stack([optimum, optimum, start]))
    ((_, up, info),) = play(WafflePaper(SGD(lr), clip=0.0), problem.grad, start, [K, 3 * K, K], 1, of=100)
    assert up.dy[2].norm() == 0
    assert (info.distances[1] > info.distances[2]) == misled


def _noisy(problem: Quadratics, roots: Tensor, noise: Tensor) -> Any:
    """Return gradients with noise for many copies of the model side by side; row k of the noise is that of step k."""
    agents, copies, size = noise.shape[1:]
    steps = iter(range(len(noise)))

    def grad(params: Tensor, stats: Tensor) -> Net:
        apart = params.view(agents, copies, size) - problem.optima[:agents, None]
        exact = torch.einsum("ipq,inq->inp", problem.curvatures[:agents], apart)
        added = torch.einsum("ipq,inq->inp", roots[:agents], noise[next(steps)])
        return Net((exact + added).flatten(1), stats)

    return grad


@seeds(5)
def test_noise_looks_like_distance(seed: int) -> None:
    """In the first round independent gradient noise of mean 0 and covariances Σ_i adds
    lr² Σ_k (tr(M_i^2k Σ_i) + tr(M_A^2k Σ_A)), k < K, to the mean squared distance, so a noisy agent with Alice's loss
    can be farther from her than a noise-free agent with another loss."""
    case = random_case(seed, agents=(3, 4), sizes=(1, 3))
    lr, K, copies = case.draw.uniform(0.2, 0.8), case.draw.randint(2, 5), 3000
    problem = case.problem._replace(curvatures=case.problem.curvatures.clone(), optima=case.problem.optima.clone())
    problem.curvatures[1], problem.optima[1] = problem.curvatures[0], problem.optima[0]
    roots = case.normal(case.agents, case.size, case.size)
    roots[1], roots[2] = 9 * roots[1], 0 * roots[2]  # agent 1 has Alice's loss and much noise, agent 2 no noise
    half = case.normal(K, case.agents, copies, case.size)
    noise = torch.cat([half, -half], dim=2)  # pairs, so that the mean is exactly 0
    start, steps = case.zero.repeat(2 * copies), [K] * case.agents
    ((_, up, _),) = play(FedAvg(SGD(lr)), _noisy(problem, roots, noise), start, steps, 1)
    ((_, exact, _),) = play(FedAvg(SGD(lr)), problem.grad, case.zero, steps, 1)
    squared = (up.dy - up.dy[0]).view(case.agents, 2 * copies, -1).square().sum(dim=2).mean(dim=1)
    powers = [torch.linalg.matrix_power(case.eye - lr * problem.curvatures, 2 * k) for k in range(K)]
    covariances = roots @ roots.mT
    added = lr**2 * sum((M @ covariances).diagonal(dim1=1, dim2=2).sum(dim=1) for M in powers)
    signal = (exact.dy - exact.dy[0]).square().sum(dim=1)
    assert torch.allclose(squared[1:] - signal[1:], (added + added[0])[1:], rtol=0.1)
    assert signal[1] < 1e-12
    assert squared[1] > squared[2] or signal[2] > added[1]


@seeds(4)
def test_control_variates_keep_the_heterogeneity(seed: int) -> None:
    """With fixed weights, lr L < 2 and equal numbers of steps the corrected updates and with them all distances tend to
    0, while |c_i − c_A| tends to |∇f_i − ∇f_A| at the limit: the heterogeneity itself."""
    case = random_case(seed, low=0.4)
    steps, waffle = [4] * case.agents, WafflePaper(SGD(0.4), clip=0.0)
    *_, (server, up, _) = play(waffle, case.problem.grad, case.zero, steps, 80, case.weights)
    g = case.gradients(case.problem.minimiser(case.weights))
    assert up.dy.norm() < 1e-4
    assert close((server.c_i - server.c_i[0]).norm(dim=1), (g - g[0]).norm(dim=1), atol=1e-4)
    assert (g - g[0]).norm(dim=1)[1:].min() > 1e-3
    compares_gradients = WafflePaper(SGD(0.4), clip=0.0, compared="gradients")
    for server, _, info in play(compares_gradients, case.problem.grad, case.zero, steps, 10):
        assert close(info.distances[1:], (server.c_i - server.c_i[0]).norm(dim=1)[1:])


@seeds(6)
def test_noise_affects_directions_less_than_distances(seed: int) -> None:
    """As the dimensions grow, independent isotropic noise of length s_i adds s_i² to the squared distance of an agent's
    gradient g_i from Alice's, and divides their cosine by √(1 + s_i²/|g_i|²): an agent with Alice's gradient g and
    s_i above √2 |g| is farther from her than a noise-free agent with an orthogonal gradient of her length, but not by
    direction, where it is like a noise-free agent with a positive cosine."""
    case = random_case(seed, agents=(4, 6))
    for n in (2000, 200_000):
        exact = torch.zeros(case.agents, n, dtype=torch.float64)
        exact[:, : case.agents] = case.normal(case.agents, case.agents)
        exact[1] = exact[0]  # agent 1 has Alice's gradient, agent 2 an orthogonal one of the same length
        exact[2] = exact[2] - exact[0] * (exact[2] @ exact[0]) / exact[0].square().sum()
        exact[2] *= exact[0].norm() / exact[2].norm()
        length = torch.tensor([0.0, case.draw.uniform(1.6, 9) * float(exact[0].norm()), 0.0], dtype=torch.float64)
        length = torch.cat([length, 5 * case.normal(case.agents - 3).abs()])
        rows = exact + length[:, None] * case.normal(case.agents, n) / math.sqrt(n)
        context, past = round_of(1, 100, case.agents), equal_weights(case.problem).expand(2, -1)
        far = calc_weights(rows, past, context, 1.0, 1.0)[2]
        turned = calc_weights(rows, past, context, 1.0, 1.0, distance=angular_distance)[2]
        squared = (exact - exact[0]).square().sum(dim=1) + length**2
        norms = exact.norm(dim=1)
        shrunk = cosine_similarity(exact, exact[:1]) / (1 + length**2 / norms**2).sqrt()
        scale = 6 / math.sqrt(n)  # of the deviations, in a finite number of dimensions
        error = (far.square() - squared)[1:].abs()
        assert (error <= scale * (length * (norms + norms[0]) + length**2)[1:] + 1e-9).all()
        assert ((1 - turned.square() / 2) - shrunk)[1:].abs().max() <= scale
    assert far[1] > far[2]
    assert turned[1] < turned[2]


# ------------------------------------------------------------------------------------------------ WAFFLE by kinship


def server_after(updates: Iterable[Tensor]) -> Any:
    """Return the server after rounds with these updates of a head, one row per agent."""
    rounds = list(updates)
    agents, size = rounds[0].shape
    algorithm = Waffle(cut=Cut((size,), (True,)), yielding=0.0)
    server, _ = algorithm.init(Net(torch.zeros(size, dtype=torch.float64), rounds[0][0, :0]), agents)
    for r, dy in enumerate(rounds, 1):
        server, _ = algorithm.aggregate(server, Up(dy, dy[:, :0]), round_of(r, 100, agents))
    return server


def kinship_after(updates: Iterable[Tensor]) -> Tensor:
    server = server_after(updates)
    return (server.agreement / server.evidence)[1:, 0]


def with_cosine(case: Case, own: Tensor, cosine: float) -> Tensor:
    """Return a random vector with this cosine with another one."""
    other = case.normal(len(own))
    other = normalize(other - own * (other @ own) / own.square().sum(), dim=0)
    return cosine * normalize(own, dim=0) + math.sqrt(1 - cosine**2) * other


@seeds(20)
def test_kinship_ignores_orthogonal_rounds(seed: int) -> None:
    """Unless all cosines s_r are 0, kinship lies between the smallest and the largest, and if none is negative it is at
    least their mean weighted by the lengths of Alice's updates; rounds in which an agent's update is orthogonal to
    Alice's do not change it."""
    case = random_case(seed, sizes=(2, 6))
    own = [case.draw.uniform(0.1, 10) * case.normal(case.size) for _ in range(case.draw.randint(1, 8))]
    rows = [case.normal(case.agents, case.size) + case.normal(case.agents, 1) * u / u.norm() for u in own]
    rounds = [torch.cat([u[None], row[1:]]) for u, row in zip(own, rows, strict=True)]
    s = torch.stack([cosine_similarity(dy[1:], dy[:1]) for dy in rounds])
    kinship = kinship_after(rounds)
    assert (kinship >= s.amin(dim=0) - 1e-9).all()
    assert (kinship <= s.amax(dim=0) + 1e-9).all()
    turned = [torch.cat([dy[:1], dy[1:] * c.sign()[:, None]]) for dy, c in zip(rounds, s, strict=True)]
    lengths = torch.stack([u.norm() for u in own])
    assert (kinship_after(turned) >= lengths @ s.abs() / lengths.sum() - 1e-9).all()
    silent = [torch.cat([u[None], with_cosine(case, u, 0.0).expand(case.agents - 1, -1)]) for u in own]
    assert close(kinship_after([*rounds, *silent]), kinship)


@seeds(10)
def test_opposed_agents_lose_their_share(seed: int) -> None:
    """If all updates of Alice have the same length, an agent that had the cosine a > 0.45 with her in n rounds and has
    −b from then on gets share 0 in her head from the m-th such round on, m = ⌈n a⁴ (a − 0.45) / (b⁴ (b + 0.45))⌉."""
    case = random_case(seed, sizes=(2, 6))
    n, a, b = case.draw.randint(1, 8), case.draw.uniform(0.46, 1), case.draw.uniform(0.5, 1)
    ratio = n * a**4 * (a - 0.45) / (b**4 * (b + 0.45))
    m = math.ceil(ratio)
    if abs(ratio - round(ratio)) < 1e-6:
        return
    rounds = []
    for cosine in [a] * n + [-b] * (m + 2):
        own = 3 * normalize(case.normal(case.size), dim=0)
        rounds.append(torch.stack([own, case.draw.uniform(0.1, 9) * with_cosine(case, own, cosine)]))
    assert server_after(rounds[: n + m - 1]).share[1, 0] > 0
    assert server_after(rounds[: n + m]).share[1, 0] == 0
    assert server_after(rounds).share[1, 0] == 0


@seeds(25)
def test_kinship_counts_common_labels(seed: int) -> None:
    """From a head of zeros, on balanced classes whose means form a regular simplex, an agent whose C labels are Alice's
    permuted, f of them unchanged, has a first gradient of cosine (f − 1)/(C − 1) with hers: of ten labels, an agent
    with 0 or 2 to 5 unchanged gets share 0 in her head, and one with 7 or more gets share 1."""
    case = random_case(seed)
    C = 10 if seed % 2 else case.draw.randint(3, 12)
    f = case.draw.choice([*range(C - 1), C])
    order = case.draw.sample(range(C), C)
    labels = torch.arange(C)
    labels[order[f:]] = torch.tensor([*order[f + 1 :], *order[f : f + 1]], dtype=torch.int64)
    width, each = C + case.draw.randint(0, 5), case.draw.randint(1, 3)
    corners = torch.linalg.qr(case.normal(width, width)).Q[:C] * case.draw.uniform(0.1, 5) + case.normal(width)
    within = case.normal(each, C, width)
    features = (corners + within - within.mean(dim=0)).flatten(0, 1)  # the means of the classes are the corners
    head = torch.zeros(2, width, C, dtype=torch.float64, requires_grad=True)
    known = torch.stack([torch.arange(C), labels]).repeat(1, each)
    loss = cross_entropy((features @ head).flatten(0, 1), known.flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, head)
    dy = -0.1 * gradient.flatten(1)
    cosine, share = cosine_similarity(dy[0], dy[1], dim=0).item(), server_after([dy]).share[1, 0]
    assert cosine == pytest.approx((f - 1) / (C - 1), abs=1e-9)
    assert share.item() == pytest.approx(min(max((cosine - 0.45) / 0.15, 0), 1), abs=1e-9) or f == 1
    if C == 10 and f != 1:  # a cosine of 0 is no evidence, so that rounding decides
        assert (share == 0) == (f <= 5)
        assert (share == 1) == (f >= 7)


@seeds(6)
def test_kinship_of_equal_losses_is_fedavg(seed: int) -> None:
    """Among agents with the same loss every share stays 1, and the model that Alice starts from is FedAvg's."""
    case = random_case(seed, sizes=(2, 5))
    problem, steps = same_optimum(same_curvature(case.problem)), [case.draw.randint(1, 5)] * case.agents
    cut, sgd = Cut((1, case.size - 1), (False, True)), SGD(case.draw.uniform(0.05, 1.9))
    kin = play(Waffle(sgd, clip=0.0, cut=cut), problem.grad, case.zero, steps, 12)
    fedavg = play(FedAvg(sgd), problem.grad, case.zero, steps, 12)
    for (server, _, info), (average, _, _) in zip(kin, fedavg, strict=True):
        assert close(server.x, average.x)
        assert close(server.share, torch.ones_like(server.share))
        assert close(info.weights, equal_weights(problem))


@seeds(10)
def test_alice_withdraws_exponentially(seed: int) -> None:
    """If in every round the sum of the others' updates has a cosine of at most −τ < 0 with Alice's update in a layer of
    the body, each of them has at most exp(−0.3 τ² r) times her weight after r rounds, and exactly exp(−0.3 r) if the
    updates are opposite, as in one dimension; if the loss is a sum over layers and lr L < 2, her layer then tends to
    her own optimum."""
    case = random_case(seed, low=0.5, sizes=(1, 3))
    direction = normalize(case.normal(case.size), dim=0)
    optima = -direction * (1 + case.normal(case.agents, 1).abs()) + 0.2 * case.normal(case.agents, case.size)
    optima[0] = direction
    problem, lr, K = case.problem._replace(optima=optima), case.draw.uniform(0.05, 0.3), case.draw.randint(1, 3)
    kin = Waffle(SGD(lr), clip=0.0, cut=Cut((case.size,), (False,)))
    rho, before, least, z, largest = float(torch.linalg.matrix_norm(case.powers(lr, K)[0], 2)), case.zero, 1.0, 0.0, 0.0
    history = play(kin, problem.grad, case.zero, [K] * case.agents, 25)
    for r, (server, up, info) in enumerate(history, 1):
        t = cosine_similarity(up.dy[1:].sum(dim=0), up.dy[0], dim=0).item()
        least, z = min(least, -t), z + max(-t, 0) ** 2
        ratio = info.weights[1:] / info.weights[0]
        assert close(ratio, torch.full_like(ratio, math.exp(-0.3 * z)))
        if least > 0:
            assert (ratio <= math.exp(-0.3 * least**2 * r) + 1e-12).all()
        largest = max(largest, float((server.y[1:] - optima[0]).norm(dim=1).max()))
        moved = rho * (before - optima[0]).norm() + float(ratio.sum()) * largest
        assert (server.x - optima[0]).norm() <= moved + 1e-12
        before = server.x
    if case.size == 1:
        assert least == pytest.approx(1)


def _rotated(size: int, ratio: float) -> Quadratics:
    """Return two agents whose curvatures 1 and 1/ratio are turned by the angle at which statement 37 is sharp."""
    angle = math.atan(1 / math.sqrt(ratio))
    H = torch.eye(size, dtype=torch.float64).repeat(2, 1, 1)
    for i, a in enumerate((angle, -angle)):
        turn = torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]], dtype=torch.float64)
        H[i, :2, :2] = turn @ torch.diag(torch.tensor([1.0, 1 / ratio], dtype=torch.float64)) @ turn.T
    return Quadratics(H, torch.zeros(2, size, dtype=torch.float64))


@seeds(8)
def test_layers_are_personalised_separately(seed: int) -> None:
    """Let the loss be a sum over layers and lr L < 2. Where the optima coincide, Alice's layer tends to the common
    optimum for any shares; in the body it stays fully shared if each curvature commutes with hers, or if lr L ≤ 1 and
    L/μ ≤ 3 + 2√2, but for no larger ratio in general. In a head where no cosine with her is above 0.45 in any round,
    nor 0 in the first, she trains alone and tends to her own optimum."""
    case, body, head = random_case(seed, low=0.2, agents=(3, 5)), 3, random_case(seed).draw.randint(1, 3)
    nearby = random_case(seed, low=1 / 5.8, agents=(case.agents, case.agents), sizes=(body, body)).problem.curvatures
    eigenvalues, Q = torch.rand(case.agents, body, generator=case.generator).double(), torch.linalg.eigh(nearby[0])[1]
    commuting = Q @ torch.diag_embed(0.02 + 0.98 * eigenvalues) @ Q.T
    x0, own = case.normal(body + head), case.normal(head)
    apart = [with_cosine(case, own, case.draw.uniform(-0.99, 0.44)) for _ in range(case.agents - 1)]
    if head == 1:
        apart = [-case.draw.uniform(0.5, 2) * own for _ in range(case.agents - 1)]
    optima = torch.cat([case.normal(body).expand(case.agents, -1), x0[body:] + torch.stack([own, *apart])], dim=1)
    curvatures = torch.zeros(case.agents, body + head, body + head, dtype=torch.float64)
    cut, ones = Cut((body, head), (False, True)), torch.ones(case.agents - 1, dtype=torch.float64)
    for matrices, lr in ((commuting, case.draw.uniform(0.5, 1.9)), (nearby, case.draw.uniform(0.5, 1))):
        curvatures[:, :body, :body] = matrices
        for i in range(case.agents):  # in the head a multiple of the identity, so that cosines are constant
            curvatures[i, body:, body:] = case.draw.uniform(0.3, 0.9) / lr * torch.eye(head, dtype=torch.float64)
        problem = Quadratics(curvatures, optima)
        *_, (server, _, _) = play(Waffle(SGD(lr), clip=0.0, cut=cut), problem.grad, x0, [3] * case.agents, 20)
        assert close(server.share[1:], torch.stack([ones, 0 * ones], dim=1))
        alone = torch.linalg.matrix_power(torch.eye(head) - lr * curvatures[0, body:, body:], 60)
        assert close(server.x[body:] - optima[0, body:], alone @ (x0 - optima[0])[body:])
        contraction = float(torch.linalg.matrix_norm(torch.eye(body) - lr * matrices, 2).max()) ** 60
        assert (server.x - optima[0])[:body].norm() <= contraction * (x0 - optima[0])[:body].norm() + 1e-9
    for ratio, shared in ((5.8, True), (6.0, False), (case.draw.uniform(20, 200), False)):
        problem = _rotated(body, ratio)
        start = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
        kin = Waffle(SGD(0.5), clip=0.0, cut=Cut((body,), (False,)))
        *_, (server, _, _) = play(kin, problem.grad, start, [1, 1], 12)
        assert (server.share[1, 0] > 1 - 1e-9) == shared
        assert server.share[1, 0] < 0.5 or ratio < 20
        assert server.x.norm() <= (1 - 0.5 / ratio) ** 12


@seeds(5)
def test_shared_layer_reduces_noise(seed: int) -> None:
    """In a layer that N agents share fully, independent noise that adds the variance v_i to agent i's update adds
    Σ v_i / N² to Alice's model in a round, and v_A if she trains alone: sharing reduces her noise if and only if
    Σ v_i < N² v_A, and to at most 1/N of it if and only if the mean of the v_i is at most v_A."""
    case = random_case(seed, low=0.5, sizes=(1, 3))
    lr, K, copies, N = case.draw.uniform(0.1, 0.8), case.draw.randint(1, 4), 3000, case.agents
    problem = same_optimum(case.problem)
    roots = case.normal(N, case.size, case.size) * 2 ** case.normal(N, 1, 1)
    noise = 0.1 * case.normal(K, N, copies, case.size)
    variance = {}
    for agents in (1, N):
        start = (problem.optima[0] + 50).repeat(copies)
        algorithm = Waffle(SGD(lr), clip=0.0, cut=Cut((copies * case.size,), (False,)))
        gradient = _noisy(problem, roots, noise[:, :agents])
        ((server, _, info),) = play(algorithm, gradient, start, [K] * agents, 1)
        assert close(info.weights, torch.full((agents,), 1 / agents, dtype=torch.float64))
        variance[agents] = server.x.view(copies, -1).var(dim=0).sum().item()
    powers = [torch.linalg.matrix_power(case.eye - lr * problem.curvatures, 2 * k) for k in range(K)]
    v = (0.1 * lr) ** 2 * sum((M @ roots @ roots.mT).diagonal(dim1=1, dim2=2).sum(dim=1) for M in powers)
    assert variance[1] == pytest.approx(v[0].item(), rel=0.15)
    assert variance[N] == pytest.approx(v.sum().item() / N**2, rel=0.15)
    for measured, exact in ((variance[1], N**2 * v[0]), (variance[1] / N, N * v[0])):
        if abs(math.log(v.sum() / exact)) > 0.4:  # else the variances are too similar for this sample
            assert (variance[N] < measured) == bool(v.sum() < exact)


@seeds(4)
def test_averaging_reduces_noise(seed: int) -> None:
    """If the models of the rounds are one point plus independent noise, in any dimension, the noise of Alice's mean has
    after r rounds 1/(a (2 − a) r) of that noise's covariance, a the share of the rounds that she averages over, up to
    terms in 1/r²."""
    averaging, rounds = random_case(seed).draw.uniform(0.1, 1), 400
    algorithm = Waffle(averaging=averaging, cut=Cut((rounds + 1,), (False,)))
    models = torch.eye(rounds + 1, dtype=torch.float64)  # so that the mean's numbers are the weights of the models
    _, agents = algorithm.init(Net(models[0], models[0, :0]), 1)
    error = {}
    for r, x in enumerate(models[:rounds], 1):
        down = Down(x[None], x[None, :0], torch.ones(1, 1))
        agents, _ = algorithm.finish(down, agents, algorithm.begin(down, agents))
        if r in (100, 200, 400):
            weights = algorithm.personal(Down(models[r], models[0, :0], torch.ones(1, 1)), agents, 1).params[0]
            assert weights.sum().item() == pytest.approx(1)
            assert (weights >= 0).all()
            error[r] = abs(weights.square().sum().item() - 1 / (averaging * (2 - averaging) * r))
    assert error[200] < 0.3 * error[100] + 1e-9
    assert error[400] < 0.3 * error[200] + 1e-9


@seeds(10)
def test_own_share_moves_alice_to_her_optimum(seed: int) -> None:
    """If Alice is sent the same model x in r > 1/a rounds, her model is o + (I − b (1 − 1/(a r)) (I − (I − lr H_A)^K))
    (x − o), o her optimum, b how far her mean moves towards the model she trained and a the share of the rounds that
    she averages over; with yielding a layer that all agents share fully stays at such an x only if x = o."""
    case = random_case(seed)
    lr, K, rounds = case.draw.uniform(0.05, 1), case.draw.randint(1, 4), 12
    own, averaging = case.draw.random(), case.draw.uniform(0.15, 1)
    steps, optimum = [K] * case.agents, case.problem.optima[0]
    rest = stationary(case.eye - case.powers(lr, K), case.problem.optima)
    options: Any = {"clip": 0.0, "own": own, "averaging": averaging, "cut": Cut((case.size,), (False,))}
    algorithm = Waffle(SGD(lr), yielding=0.0, **options)
    *_, (server, _, _) = play(algorithm, case.problem.grad, rest, steps, rounds)
    agents = SimpleNamespace(y=server.y, mean=server.mean, mean_stats=server.mean_stats, rounds=server.rounds)
    assert close(server.x, rest)
    factor = case.eye - own * (1 - 1 / (averaging * rounds)) * (case.eye - case.powers(lr, K)[0])
    assert close(algorithm.personal(server, agents, case.agents).params[0] - optimum, factor @ (rest - optimum))
    ((server, _, _),) = play(Waffle(SGD(lr), **options), case.problem.grad, rest, steps, 1)
    assert server.share[1, 0].item() == pytest.approx(math.exp(-0.3))
    assert (server.x - rest).norm() > 1e-9


# ----------------------------------------------------------------------------------------- the mixture of predictions


def losses_of(weights: Tensor, p: Tensor) -> Tensor:
    """Return the log loss (n,) of a mixture, from the probabilities (K, n) of the labels."""
    return -(weights @ p).log()


def pseudo_samples(case: Case, parts: int) -> Tensor:
    return torch.tensor([10 ** case.draw.uniform(-1.5, 1) for _ in range(parts)], dtype=torch.float64)


def bound(prior: Tensor, n: int) -> Tensor:
    """Return the excess of statement 42 for each part."""
    total = prior.sum()
    return (total - prior) * (1 + torch.log1p(n / total)) / n


@seeds(30)
def test_mixture_is_near_the_best_part(seed: int) -> None:
    """On n validation samples the mixture's mean log loss is at most that of part j plus (A − a_j) (1 + log(1 + n/A))
    / n, a the pseudo-samples of the parts and A their sum."""
    case = random_case(seed)
    n, parts = case.draw.randint(1, 60), case.draw.randint(2, 5)
    p = torch.from_numpy(np.random.default_rng(seed).beta(0.4, 0.4, (parts, n))).clamp(min=1e-9)
    prior = pseudo_samples(case, parts)
    excess = losses_of(class_weights(p, prior), p).mean() + p.log().mean(dim=1)
    assert (excess <= bound(prior, n) + 1e-9).all()


@seeds(10)
def test_no_sample_costs_more(seed: int) -> None:
    """On any sample, also a new one, the mixture's log loss is at most that of part j plus log((n + A) / a_j)."""
    case, rng = random_case(seed), np.random.default_rng(seed)
    n, parts = case.draw.randint(1, 60), case.draw.randint(2, 5)
    prior = pseudo_samples(case, parts)
    weights = class_weights(torch.from_numpy(rng.uniform(1e-9, 1, (parts, n))), prior)
    new = torch.from_numpy(rng.beta(0.2, 0.2, (parts, 200))).clamp(min=1e-12)
    excess = losses_of(weights, new) + new.log()
    assert (excess <= ((n + prior.sum()) / prior).log()[:, None] + 1e-9).all()


@seeds(30)
def test_mixture_of_numbers_is_near_the_best_part(seed: int) -> None:
    """On n validation samples the mean squared error of a mixture of numbers is at most that of part j plus 2 A m /
    n, m the error of the best part."""
    case = random_case(seed)
    n, parts = case.draw.randint(1, 40), case.draw.randint(2, 5)
    targets = case.normal(n)
    values = targets + case.normal(parts, n) * case.normal(parts, 1) + case.normal(parts, 1)
    prior = pseudo_samples(case, parts)
    errors = (values - targets).square().mean(dim=1)
    error = (value_weights(values, targets, prior) @ values - targets).square().mean()
    assert (error <= errors + 2 * prior.sum() * errors.min() / n + 1e-9).all()


@seeds(5)
def test_mixture_is_near_the_best_part_on_new_samples(seed: int) -> None:
    """If validation samples are drawn independently and no part gives a label less than the probability e, the
    mixture's expected log loss on a new sample is at most that of part j plus the term of statement 42 plus (2/e) √(2
    log k / n), k the number of parts."""
    case, rng = random_case(seed), np.random.default_rng(seed)
    n, parts, least = case.draw.randint(5, 60), case.draw.randint(2, 5), case.draw.uniform(0.05, 0.3)
    possible = torch.from_numpy(
        rng.uniform(least, 1, (parts, 8))
    )  # of each part on each of eight equally likely samples
    prior = pseudo_samples(case, parts)
    drawn = possible[:, torch.from_numpy(rng.integers(0, 8, (300, n)))].transpose(0, 1)
    expected = -(class_weights(drawn, prior) @ possible).log().mean()
    excess = expected + possible.log().mean(dim=1)
    assert (excess <= bound(prior, n) + 2 / least * (2 * math.log(parts) / n) ** 0.5).all()


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
