"""Reference for the paper's method and the methods that the paper compares it with."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from reference.problem import Batch, Problem, Trace, gradient, samples, shares, step, train, weighted_sum

Schedule = Callable[[int, int], float]  # Omega or Psi: (r, R) -> degree of globality, r from 1 to R


def local(problem: Problem, *, clip: float = 0.0) -> Trace:
    """Alice trains alone (section 2)."""
    trace, y, N = Trace(), problem.start, len(problem.nets)
    for r in problem.rounds():
        y = train(problem, r, problem.alice, y, clip)
        trace.models.append(y)
        trace.weights.append([1.0 if i == problem.alice else 0.0 for i in range(N)])
    return trace


def fedavg(problem: Problem, *, clip: float = 0.0, weighting: str = "equal") -> Trace:
    """Federated averaging of the updates (section 2)."""
    assert weighting in ("equal", "samples")
    trace, x, N = Trace(), problem.start, len(problem.nets)
    for r in problem.rounds():
        dy = [train(problem, r, i, x, clip) - x for i in range(N)]
        sizes = [samples(problem, r, i) if weighting == "samples" else 1 for i in range(N)]
        weights = [size / sum(sizes) for size in sizes]
        x = x + weighted_sum(weights, dy)
        trace.models.append(x)
        trace.weights.append(weights)
    return trace


def scaffold(
    problem: Problem, *, clip: float = 2.0, correction: float = 1.0, eta_g: float = 1.0, weighting: str = "equal"
) -> Trace:
    """SCAFFOLD with option II (section 3): Algorithm 2 with all weights 1/N and c averaged by its changes."""
    return controlled(problem, clip, correction, eta_g, "paper", lambda r, _dy, _c_i: shares(problem, r, weighting))


def waffle_paper(
    problem: Problem,
    *,
    clip: float = 2.0,
    correction: float = 1.0,
    control: str = "anchored",
    denominator: str = "max",
    compared: str = "updates",
    omega: Schedule | str | None = None,
    psi: Schedule | str | None = None,
    eta_g: float = 1.0,
) -> Trace:
    """WAFFLE (Algorithm 2); "adaptive" in place of a schedule selects the degree of docs/algorithms/waffle.md."""
    assert compared in ("updates", "gradients", "directions")
    omega, psi = omega or sigmoid, psi or sigmoid
    N, R = len(problem.nets), len(problem.batches)
    past = ([1 / N] * N, [1 / N] * N)  # line 1: alpha^{r-2}, alpha^{r-1}
    gradients: list[list[Tensor]] = []

    def at(schedule: Schedule | str, r: int) -> float:
        return schedule(r, R) if callable(schedule) else adaptive_degree(gradients, problem.alice)

    def weigh(r: int, dy: list[Tensor], c_i: list[Tensor]) -> list[float]:
        nonlocal past
        gradients.append(list(c_i))
        last = 10**9 if psi == "adaptive" else R  # an adaptive degree has no local rounds at the end
        rows = {"updates": dy, "gradients": c_i, "directions": [g / g.norm() for g in c_i]}[compared]
        alpha_bar, alpha = calc_weights(rows, past, problem.alice, r, last, at(omega, r), at(psi, r), denominator)  # 13
        past = (past[1], alpha)  # line 14: the history keeps the weights before smoothing
        return alpha_bar

    return controlled(problem, clip, correction, eta_g, control, weigh)


def controlled(
    problem: Problem,
    clip: float,
    correction: float,
    eta_g: float,
    control: str,
    weigh: Callable[[int, list[Tensor], list[Tensor]], list[float]],
) -> Trace:
    """Algorithm 2 for any rule that computes the aggregation weights of round r from the updates."""
    assert control in ("anchored", "paper")
    trace, x, N = Trace(), problem.start, len(problem.nets)
    c = torch.zeros_like(x)
    c_i = [torch.zeros_like(x) for _ in range(N)]
    for r in problem.rounds():  # line 2
        dy, dc = [], []
        for i in range(N):  # line 4
            y = train(problem, r, i, x, clip, correction=correction * (c - c_i[i]))  # lines 5 to 8
            K = len(problem.batches[r - 1][i])
            c_plus = correction * (c_i[i] - c) + (x - y) / (K * problem.lr)  # line 9
            dy.append(y - x)  # line 10
            dc.append(c_plus - c_i[i])
            c_i[i] = c_plus  # line 11
        weights = weigh(r, dy, c_i)  # lines 13 and 14
        x = x + eta_g * weighted_sum(weights, dy)  # lines 15 and 16
        c = c + weighted_sum(weights, dc) if control == "paper" else weighted_sum(weights, c_i)
        trace.models.append(x)
        trace.weights.append(weights)
    return trace


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / (float(a.norm()) * float(b.norm()))


def adaptive_degree(gradients: list[list[Tensor]], alice: int) -> float:
    """Return the degree after these rounds: the minimum over rounds of k + (1 - k) exp(-z); gradients[round][agent]."""
    s, z, degree = [], 0.0, 1.0
    for g in gradients:
        others = [g[i] for i in range(len(g)) if i != alice]
        s.append(sum(max(cosine(other, g[alice]), 0.0) for other in others) / len(others))
        z += max(0.5 - cosine(sum(others[1:], others[0]) / len(others), g[alice]), 0.0)
        k = sum(value**3 for value in s) / sum(value**2 for value in s) if any(s) else 0.0
        degree = min(degree, k + (1 - k) * math.exp(-z))
    return degree


def sigmoid(r: int, R: int) -> float:
    """The paper's Omega = Psi with its slope of 3.2 (Eq. 3)."""
    return 1 / (1 + math.exp(3.2 * (r / (R / 2) - 1)))


def calc_weights(
    dy: list[Tensor],
    past: tuple[list[float], list[float]],
    alice: int,
    r: int,
    R: int,
    omega: float,
    psi: float,
    denominator: str = "max",
) -> tuple[list[float], list[float]]:
    """Algorithm 1: (alpha_bar, alpha) of round r; past is (alpha^{r-2}, alpha^{r-1})."""
    assert denominator in ("max", "range")
    N = len(dy)
    only_alice = [1.0 if i == alice else 0.0 for i in range(N)]
    if N == 1 or 100 * r >= 95 * R:  # lines 7 and 8, exact
        alpha = only_alice
    else:
        d = [float((update - dy[alice]).norm()) for update in dy]  # lines 1 and 2
        dM = max(d[i] for i in range(N) if i != alice)  # line 3
        dm = min(d[i] for i in range(N) if i != alice)
        if dM > 0:
            d[alice] = max(dm * (1 - (dM - dm) / dM * (1 - omega)), 0.0)  # line 4; never negative, even for Omega < 0
        alpha = []
        for i in range(N):  # lines 5 and 6
            if denominator == "max":  # min_i d_i taken before line 4, where Alice's is 0
                ratio = (d[i] - d[alice]) / dM if dM > 0 else 0.0
            elif dM - min(d) > 1e-12 * dM:
                ratio = (d[i] - d[alice]) / (dM - min(d))
            elif i == alice:
                ratio = 0.0
            else:  # all distances equal: line 6 is 0/0; use the limit of the nearest agent's ratio as dm -> dM
                ratio = (1 - omega) / (2 - omega) if omega <= 1 else 1 - omega
            alpha.append(max(psi - ratio, 0.0))
        total = sum(alpha)
        alpha = [a / total for a in alpha] if total > 0 else only_alice  # line 9
    alpha_bar = [(a2 + a1 + a0) / 3 for a2, a1, a0 in zip(past[0], past[1], alpha, strict=True)]  # line 10
    return alpha_bar, alpha


def weight_erosion(
    problem: Problem,
    *,
    clip: float = 0.0,
    p_d: float = 0.0067,
    p_s: float = 0.0,
    counted: str = "samples",
    p_d_rounds: int = 0,
    batch_size: int = 32,
) -> Trace:
    """Weight Erosion (section 5.1). The round's gradient g_i is the update -dy_i/lr (lr cancels everywhere)."""
    trace, x, N = Trace(), problem.start, len(problem.nets)
    alpha = [1.0] * N
    p_d = p_d * p_d_rounds / len(problem.batches) if p_d_rounds else p_d
    for r in problem.rounds():
        dy = [train(problem, r, i, x, clip) - x for i in range(N)]
        norm = float(dy[problem.alice].norm())
        for i in range(N):
            if norm > 0:  # section 5.3: no erosion in a round in which Alice's update is zero
                distance = float((dy[i] - dy[problem.alice]).norm()) / norm
                size = samples(problem, r, i) if counted == "samples" else len(problem.batches[r - 1][i])
                reuse = ((r - 1) * batch_size) // size
                alpha[i] = max(0.0, alpha[i] - (1 + p_s * reuse) * p_d * distance)
        weights = [a / sum(alpha) for a in alpha]
        x = x + weighted_sum(weights, dy)
        trace.models.append(x)
        trace.weights.append(weights)
    return trace


def apfl(
    problem: Problem,
    *,
    clip: float = 0.0,
    mix: float = 0.5,
    adaptive: str = "step",
    mixing: str = "parameters",
    weighting: str = "equal",
) -> Trace:
    """APFL with mixed parameters or outputs (section 6.1; "round": the rule of 6.2)."""
    assert adaptive in ("step", "round", "off")
    trace, x, N = Trace(), problem.start, len(problem.nets)
    zeros = torch.zeros_like(x)
    personal = [problem.start] * N
    mixes = [mix] * N
    for r in problem.rounds():
        trained = []
        for i in range(N):
            w, v, m = x, personal[i], mixes[i]
            w_velocity, v_velocity = problem.velocity(i, x, "w"), problem.velocity(i, x, "v")
            for k, batch in enumerate(problem.batches[r - 1][i]):
                g_w = gradient(problem.nets[i], w, batch)
                if mixing == "outputs":  # FedTorch: w first, then v and alpha on the mixed outputs
                    w, w_velocity = step(problem, w, w_velocity, g_w, clip, zeros)
                    g_v, g_mixed_w = of_mixed_outputs(problem.nets[i], v, w, m, batch)
                    v, v_velocity = step(problem, v, v_velocity, g_v, clip, zeros)
                    if adaptive == "step" and k == 0:
                        slope = float((v - w) @ (m * g_v + (1 - m) * g_mixed_w)) + 0.02 * m
                        m = min(max(m - problem.lr * slope, 0.0), 1.0)
                    continue
                g_mixed = gradient(problem.nets[i], m * v + (1 - m) * w, batch)
                slope = float((v - w) @ g_mixed)
                w, w_velocity = step(problem, w, w_velocity, g_w, clip, zeros)
                v, v_velocity = step(problem, v, v_velocity, m * g_mixed, clip, zeros)
                if adaptive == "step" and k == 0:
                    m = min(max(m - problem.lr * slope, 0.0), 1.0)
            if adaptive == "round":
                m = min(max(m + float((personal[i] - x) @ (v - personal[i])), 0.0), 1.0)
            trained.append(w)
            personal[i], mixes[i] = v, m
            problem.keep(i, w_velocity, "w")
            problem.keep(i, v_velocity, "v")
        m, v, w = mixes[problem.alice], personal[problem.alice], trained[problem.alice]
        both = torch.cat([v, w, v.new_tensor([m])])
        trace.models.append(both if mixing == "outputs" else m * v + (1 - m) * w)
        trace.weights.append(shares(problem, r, weighting))
        x = weighted_sum(trace.weights[-1], trained)
    return trace


def of_mixed_outputs(net: nn.Module, v: Tensor, w: Tensor, m: float, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to v and w of the loss of m v(x) + (1 - m) w(x)."""
    leaves = [v.clone().requires_grad_(), w.clone().requires_grad_()]
    outputs = []
    for leaf in leaves:
        parts = torch.split(leaf, [p.numel() for p in net.parameters()])
        named = zip(net.named_parameters(), parts, strict=True)
        outputs.append(torch.func.functional_call(net, {n: part.view(p.shape) for (n, p), part in named}, (batch[0],)))
    loss = torch.nn.functional.cross_entropy(m * outputs[0] + (1 - m) * outputs[1], batch[1])
    g_v, g_w = torch.autograd.grad(loss, leaves)
    return g_v, g_w


def ditto(problem: Problem, *, clip: float = 0.0, lam: float = 1.0, weighting: str = "equal") -> Trace:
    """Ditto (section 7): a personal model with a proximal term towards the global model of the round's start."""
    trace, x, N = Trace(), problem.start, len(problem.nets)
    zeros = torch.zeros_like(x)
    personal = [problem.start] * N
    for r in problem.rounds():
        for i in range(N):
            v, velocity = personal[i], problem.velocity(i, x, "v")
            for batch in problem.batches[r - 1][i]:
                g = gradient(problem.nets[i], v, batch) + lam * (v - x)
                v, velocity = step(problem, v, velocity, g, clip, zeros)
            personal[i] = v
            problem.keep(i, velocity, "v")
        dy = [train(problem, r, i, x, clip) - x for i in range(N)]
        trace.weights.append(shares(problem, r, weighting))
        x = x + weighted_sum(trace.weights[-1], dy)
        trace.models.append(personal[problem.alice])
    return trace
