"""Reference for other published personalised methods, each written from its pseudo-code."""

import math

import torch
from torch import Tensor, nn

from reference.problem import Problem, Trace, gradient, shares, step, train, weighted_sum


def fedprox(problem: Problem, *, clip: float = 0.0, mu: float = 0.1, weighting: str = "equal") -> Trace:
    """FedProx, Algorithm 2: each agent minimises F_i(y) + mu/2 |y - x|^2 from x."""
    trace, x = Trace(), problem.start
    zeros = torch.zeros_like(x)
    for r in problem.rounds():
        trained = []
        for i, net in enumerate(problem.nets):
            y, velocity = x, problem.velocity(i, x)
            for batch in problem.batches[r - 1][i]:
                y, velocity = step(problem, y, velocity, gradient(net, y, batch) + mu * (y - x), clip, zeros)
            problem.keep(i, velocity)
            trained.append(y)
        weights = shares(problem, r, weighting)
        x = weighted_sum(weights, trained)
        trace.models.append(x)
        trace.weights.append(weights)
    return trace


def mr_mtl(problem: Problem, *, clip: float = 0.0, lam: float = 1.0, weighting: str = "equal") -> Trace:
    """MR-MTL (section 4): silo k minimises F_k(w_k) + lam/2 |w_k - mean|^2 from its own w_k; then the mean is new."""
    trace, mean = Trace(), problem.start
    models, zeros = [problem.start for _ in problem.nets], torch.zeros_like(problem.start)
    for r in problem.rounds():
        for i, net in enumerate(problem.nets):
            velocity = problem.velocity(i, mean)
            for batch in problem.batches[r - 1][i]:
                g = gradient(net, models[i], batch) + lam * (models[i] - mean)
                models[i], velocity = step(problem, models[i], velocity, g, clip, zeros)
            problem.keep(i, velocity)
        trace.weights.append(shares(problem, r, weighting))
        mean = weighted_sum(trace.weights[-1], models)
        trace.models.append(models[problem.alice])
    return trace


def fedavg_ft(problem: Problem, *, clip: float = 0.0, tuning: int = 1, weighting: str = "equal") -> Trace:
    """FedAvg in all rounds but the last `tuning`; in those Alice fine-tunes the global model alone."""
    trace, x, N, R = Trace(), problem.start, len(problem.nets), len(problem.batches)
    for r in problem.rounds(1, R - tuning):
        trained = [train(problem, r, i, x, clip) for i in range(N)]
        trace.models.append(trained[problem.alice])
        trace.weights.append(shares(problem, r, weighting))
        x = weighted_sum(trace.weights[-1], trained)
    y = x
    for r in problem.rounds(max(R - tuning, 0) + 1, R):
        y = train(problem, r, problem.alice, y, clip)
        trace.models.append(y)
        trace.weights.append(shares(problem, r, weighting))
    return trace


def per_fedavg(
    problem: Problem,
    *,
    clip: float = 0.0,
    inner_lr: float = 0.03,
    variant: str = "first-order",
    difference_step: float = 0.001,
    weighting: str = "equal",
) -> Trace:
    """Per-FedAvg, Algorithm 1, without the Hessian (FO, section 5) or by differences (HF, Eq. 19 there)."""
    assert variant in ("first-order", "hessian-free")
    trace, x = Trace(), problem.start
    zeros = torch.zeros_like(x)
    per_update = 2 if variant == "first-order" else 3
    for r in problem.rounds():
        trained = []
        for i, net in enumerate(problem.nets):
            w, velocity, left = x, problem.velocity(i, x), list(problem.batches[r - 1][i])
            while len(left) >= per_update:
                adapted = w - inner_lr * gradient(net, w, left.pop(0))
                d = gradient(net, adapted, left.pop(0))
                if variant == "hessian-free":
                    batch = left.pop(0)
                    offset = difference_step * d
                    ahead, behind = gradient(net, w + offset, batch), gradient(net, w - offset, batch)
                    d = d - inner_lr * (ahead - behind) / (2 * difference_step)
                w, velocity = step(problem, w, velocity, d, clip, zeros)
            problem.keep(i, velocity)
            trained.append(w)
        first = problem.batches[r - 1][problem.alice][0]
        trace.models.append(x - inner_lr * gradient(problem.nets[problem.alice], x, first))
        trace.weights.append(shares(problem, r, weighting))
        x = weighted_sum(trace.weights[-1], trained)
    return trace


def pfedme(
    problem: Problem,
    *,
    clip: float = 0.0,
    lam: float = 1.0,
    inner_steps: int = 5,
    eta: float = 0.5,
    beta: float = 1.0,
    weighting: str = "equal",
) -> Trace:
    """pFedMe, Algorithm 1; a few SGD steps on the same mini-batch solve the inner problem approximately."""
    trace, x = Trace(), problem.start
    zeros = torch.zeros_like(x)
    for r in problem.rounds():
        trained, personal = [], []
        for i, net in enumerate(problem.nets):
            w, theta, velocity = x, x, problem.velocity(i, x)
            for batch in problem.batches[r - 1][i]:
                for _ in range(inner_steps):
                    g = gradient(net, theta, batch) + lam * (theta - w)
                    theta, velocity = step(problem, theta, velocity, g, clip, zeros)
                w = w - eta * lam * (w - theta)
            problem.keep(i, velocity)
            trained.append(w)
            personal.append(theta)
        trace.models.append(personal[problem.alice])
        trace.weights.append(shares(problem, r, weighting))
        x = (1 - beta) * x + beta * weighted_sum(trace.weights[-1], trained)
    return trace


def layers(net: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the layers that hold parameters and the number of parameters of each, in order."""
    sizes = [(module, sum(p.numel() for p in module.parameters(recurse=False))) for module in net.modules()]
    return [(module, size) for module, size in sizes if size]


def fedper(problem: Problem, *, clip: float = 0.0, head_layers: int = 1, weighting: str = "equal") -> Trace:
    """FedPer, Algorithms 1 and 2: base layers are averaged, personalisation layers kept; both train together."""
    sizes = [size for _, size in layers(problem.nets[0])]
    at = sum(sizes[: len(sizes) - head_layers])
    trace, N = Trace(), len(problem.nets)
    body, heads = problem.start[:at], [problem.start[at:]] * N
    for r in problem.rounds():
        trained = [train(problem, r, i, torch.cat([body, heads[i]]), clip) for i in range(N)]
        heads = [y[at:] for y in trained]
        trace.weights.append(shares(problem, r, weighting))
        body = weighted_sum(trace.weights[-1], [y[:at] for y in trained])
        trace.models.append(torch.cat([body, heads[problem.alice]]))
    return trace


def fedrep(
    problem: Problem,
    *,
    clip: float = 0.0,
    head_layers: int = 1,
    head_share: float = 0.5,
    tuning: int = 0,
    weighting: str = "equal",
) -> Trace:
    """FedRep, Algorithm 1: train the head with the body fixed, then the body with the head fixed."""
    sizes = [size for _, size in layers(problem.nets[0])]
    at = sum(sizes[: len(sizes) - head_layers])
    trace, N = Trace(), len(problem.nets)
    body, heads = problem.start[:at], [problem.start[at:]] * N
    for r in problem.rounds():
        bodies: list[Tensor] = []
        for i, net in enumerate(problem.nets):
            batches, b, h = problem.batches[r - 1][i], body, heads[i]
            on_head = max(1, math.floor(head_share * len(batches))) if len(batches) > 1 else 0
            tuned = r > len(problem.batches) - tuning
            on_head = len(batches) if tuned else on_head
            of_head, of_body = problem.velocity(i, h, "head"), problem.velocity(i, b, "body")
            for batch in batches[:on_head]:
                g = gradient(net, torch.cat([b, h]), batch)[at:]
                h, of_head = step(problem, h, of_head, g, clip, torch.zeros_like(h))
            for batch in batches[on_head:]:
                g = gradient(net, torch.cat([b, h]), batch)
                b, of_body = step(problem, b, of_body, g[:at], clip, torch.zeros_like(b))
                if len(batches) == 1:
                    h, of_head = step(problem, h, of_head, g[at:], clip, torch.zeros_like(h))
            problem.keep(i, of_head, "head")
            problem.keep(i, of_body, "body")
            heads[i] = h
            bodies.append(b)
        trace.weights.append(shares(problem, r, weighting))
        body = weighted_sum(trace.weights[-1], bodies)
        trace.models.append(torch.cat([body, heads[problem.alice]]))
    return trace


def fedbn(problem: Problem, *, clip: float = 0.0, weighting: str = "equal") -> Trace:
    """FedBN, Algorithm 1; each agent's network updates its own running statistics."""
    kinds = [torch.full((size,), isinstance(layer, nn.BatchNorm1d)) for layer, size in layers(problem.nets[0])]
    own, trace, N = torch.cat(kinds), Trace(), len(problem.nets)
    models = [problem.start] * N
    for r in problem.rounds():
        trained = [train(problem, r, i, models[i], clip) for i in range(N)]
        trace.weights.append(shares(problem, r, weighting))
        mean = weighted_sum(trace.weights[-1], trained)
        models = [torch.where(own, y, mean) for y in trained]
        trace.models.append(models[problem.alice])
    return trace
