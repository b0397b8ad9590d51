"""Reference for methods that choose partners: CoBo, pFedGraph, FedCollab.

Written from the authors' objectives and the rules of their released code, with the changes listed in docs/algorithms.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from reference.collaboration import epoch, split_mix
from reference.problem import Problem, Trace, gradient, samples, step, train, weighted_sum


def cobo(
    problem: Problem,
    *,
    clip: float = 0.0,
    rho: float = 0.05,
    gamma: float = 0.01,
    pairs: int = 1,
    rehearsed: float = 0.1,
) -> Trace:
    """CoBo: SGD on the penalised losses, then projected ascent on the weights of random pairs."""
    trace, N = Trace(), len(problem.nets)
    x, W = [problem.start] * N, [[1.0] * N for _ in range(N)]
    for r in problem.rounds():
        ring = sorted(range(N), key=lambda i: split_mix(r - 1, i + 1) >> 1)
        drawn = {
            frozenset((ring[k], ring[(k + d) % N]))
            for k in range(N)
            for d in range(1, pairs + 1)
            if r > 1 and 2 * d <= N
        }
        change = {}
        for pair in drawn:
            i, j = sorted(pair)
            z = (x[i] + x[j]) / 2
            means = []
            for agent in (i, j):
                batches = epoch(problem, r, agent)
                batches = batches[: math.ceil(rehearsed * len(batches))]
                means.append(sum(gradient(problem.nets[agent], z, batch) for batch in batches) / len(batches))
            steps = min(len(problem.batches[r - 1][agent]) for agent in (i, j))
            change[i, j] = gamma * steps * float(means[0] @ means[1])
        new = list(x)
        for i in range(N):
            velocity = problem.velocity(i, x[i])
            for batch in problem.batches[r - 1][i]:
                pull = torch.zeros_like(x[i])
                for j in range(N):
                    if j != i and r > 1:
                        pull = pull + rho * W[i][j] * (new[i] - x[j])
                new[i], velocity = step(problem, new[i], velocity, gradient(problem.nets[i], new[i], batch), clip, pull)
            problem.keep(i, velocity)
        x = new
        for (i, j), amount in change.items():
            W[i][j] = W[j][i] = min(max(W[i][j] + amount, 0.0), 1.0)
        row = [1.0 if j == problem.alice else W[problem.alice][j] for j in range(N)]
        trace.models.append(x[problem.alice])
        trace.weights.append([weight / sum(row) for weight in row])
    return trace


def pfedgraph(
    problem: Problem,
    *,
    clip: float = 0.0,
    alpha: float = 0.8,
    lam: float = 0.01,
    cosine: str = "attract",
    saturation: float = 1.0,
    used: str = "trained",
) -> Trace:
    """pFedGraph; the gradient of the cosine term is that of autograd."""
    trace, N = Trace(), len(problem.nets)
    zeros, sign = torch.zeros_like(problem.start), -1.0 if cosine == "attract" else 1.0
    starts, others, w = [problem.start] * N, [], [[0.0] * N for _ in range(N)]
    for r in problem.rounds():
        theta = []
        for i in range(N):
            y, velocity = starts[i], problem.velocity(i, zeros)
            for batch in problem.batches[r - 1][i]:
                g = gradient(problem.nets[i], y, batch)
                if others:
                    leaf = y.clone().requires_grad_()
                    likeness = [torch.cosine_similarity(leaf, other, dim=0) for other in others]
                    total = sum(weight * value for weight, value in zip(w[i], likeness, strict=True))
                    g = g + sign * lam * torch.autograd.grad(total, leaf)[0]
                y, velocity = step(problem, y, velocity, g, clip, zeros)
            problem.keep(i, velocity)
            theta.append(y)
        sizes = [samples(problem, r, i) for i in range(N)]
        p = [size / sum(sizes) for size in sizes]
        for i in range(N):
            change = [model - problem.start for model in theta]
            cosines = [float(torch.cosine_similarity(change[i], other, dim=0)) for other in change]
            cosines = [1.0 if c > saturation or j == i else c for j, c in enumerate(cosines)]
            w[i] = simplex_weights(cosines, p, alpha)
        starts, others = [weighted_sum(w[i], theta) for i in range(N)], theta
        trace.models.append(theta[problem.alice] if used == "trained" else starts[problem.alice])
        trace.weights.append(list(w[problem.alice]))
    return trace


def simplex_weights(cosines: list[float], p: list[float], alpha: float) -> list[float]:
    """Minimise -<w, cosines> + alpha |w - p|^2 on the simplex, by trying every set of positive weights."""
    N, found = len(p), []
    for chosen in range(1, 2**N):
        support = [j for j in range(N) if chosen >> j & 1]
        # On the support the derivative -c_j + 2 alpha (w_j - p_j) is the same number for all.
        level = (2 * alpha * (1 - sum(p[j] for j in support)) - sum(cosines[j] for j in support)) / len(support)
        w = [p[j] + (cosines[j] + level) / (2 * alpha) if j in support else 0.0 for j in range(N)]
        if min(w) >= 0:
            cost = sum(-w[j] * cosines[j] + alpha * (w[j] - p[j]) ** 2 for j in range(N))
            found.append((cost, w))
    return min(found)[1]


def errors(problem: Problem, i: int, model: Tensor) -> float:
    """Return the share of agent i's training samples that a model misclassifies."""
    x, y = (torch.cat(parts) for parts in zip(*epoch(problem, 1, i), strict=True))
    vector_to_parameters(model.clone(), problem.nets[i].parameters())
    with torch.no_grad():
        return float((problem.nets[i](x).argmax(dim=1) != y).double().mean())


def partitions(agents: list[int]) -> Iterator[list[list[int]]]:
    """Yield every partition of the agents into coalitions."""
    if not agents:
        yield []
        return
    first, rest = agents[0], agents[1:]
    for found in partitions(rest):
        yield [[first], *found]
        for k in range(len(found)):
            yield [*found[:k], [first, *found[k]], *found[k + 1 :]]


def bound(coalitions: list[list[int]], distance: list[list[float]], sizes: list[int], C: float) -> float:
    """Return the mean over all agents of C sqrt(sum_j a_ij^2 / (beta_j m)) + sum_j a_ij D_ij."""
    m, total = sum(sizes), 0.0
    for coalition in coalitions:
        for i in coalition:
            a = {j: sizes[j] / sum(sizes[k] for k in coalition) for j in coalition}
            total += C * math.sqrt(sum(a[j] ** 2 / (sizes[j] / m * m) for j in coalition))
            total += sum(a[j] * distance[i][j] for j in coalition)
    return total / len(sizes)


def fedcollab(
    problem: Problem,
    *,
    clip: float = 0.0,
    C: float = 10.0,
    alone: int = 3,
    models: int = 3,
    start: str = "trained",
    weighting: str = "samples",
) -> Trace:
    """FedCollab: distances between agents, the best of all partitions, then FedAvg in each coalition."""
    trace, N = Trace(), len(problem.nets)
    x, coalitions = [problem.start] * N, [[i] for i in range(N)]
    exchange = math.ceil((N - 1) / models)
    gap = [[0.0] * N for _ in range(N)]
    for r in problem.rounds():
        turn = r - 1 - alone
        for i in range(N):
            for step_size in range(turn * models + 1, min((turn + 1) * models, N - 1) + 1) if turn >= 0 else ():
                j = (i + step_size) % N
                gap[i][j] = abs(errors(problem, i, x[j]) - errors(problem, j, x[j]))
        y = [train(problem, r, i, x[i], clip) for i in range(N)]
        sizes = [samples(problem, r, i) for i in range(N)]
        if r == alone + exchange:
            distance = [[max(gap[i][j], gap[j][i]) for j in range(N)] for i in range(N)]
            coalitions = min(partitions(list(range(N))), key=lambda found: bound(found, distance, sizes, C))
        for coalition in coalitions:
            counts = [sizes[j] if weighting == "samples" else 1 for j in coalition]
            shares = [count / sum(counts) for count in counts]
            mean = weighted_sum(shares, [y[j] for j in coalition])
            for j in coalition:
                x[j] = problem.start if r == alone + exchange and start == "initial" else mean
            if problem.alice in coalition:
                row = dict(zip(coalition, shares, strict=True))
                trace.weights.append([row.get(j, 0.0) for j in range(N)])
        trace.models.append(x[problem.alice])
    return trace
