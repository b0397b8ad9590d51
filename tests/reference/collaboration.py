"""Reference for methods with several models: FedAMP, FedFomo, APPLE, FedALA, kNN-Per, IFCA, CFL.

Written from the papers' pseudo-code, with the changes listed in docs/algorithms. Each agent's data are the samples of
its mini-batches of one epoch; there is no validation data.
"""

import math
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.nn.utils import vector_to_parameters

from reference.paper import fedavg
from reference.problem import Batch, Problem, Trace, gradient, samples, step, train, weighted_sum


def epoch(problem: Problem, r: int, i: int) -> list[Batch]:
    """Return the mini-batches of agent i's first epoch in round r, which end where a sample repeats."""
    seen: list[Batch] = []
    for x, y in problem.batches[r - 1][i]:
        if any(torch.equal(row, x[0]) for earlier, _ in seen for row in earlier):
            break
        seen.append((x, y))
    return seen


def loss(problem: Problem, i: int, at: Tensor) -> float:
    """Return the mean loss of a model on all training samples of agent i."""
    x, y = (torch.cat(parts) for parts in zip(*epoch(problem, 1, i), strict=True))
    vector_to_parameters(at.clone(), problem.nets[i].parameters())
    with torch.no_grad():
        return float(cross_entropy(problem.nets[i](x), y))


def fedamp(
    problem: Problem,
    *,
    clip: float = 0.0,
    lam: float = 1.0,
    alpha: float = 1.0,
    sigma: float = 0.3,
    own: float = 0.0,
) -> Trace:
    """FedAMP, Algorithm 1: an attraction step at the server, then SGD on the proximal problem."""
    trace, N = Trace(), len(problem.nets)
    zeros = torch.zeros_like(problem.start)
    w, u = [problem.start] * N, [problem.start] * N
    for r in problem.rounds():
        for i in range(N):
            velocity = problem.velocity(i, zeros)
            for batch in problem.batches[r - 1][i]:
                g = gradient(problem.nets[i], w[i], batch) + lam / alpha * (w[i] - u[i])
                w[i], velocity = step(problem, w[i], velocity, g, clip, zeros)
            problem.keep(i, velocity)
        xi = [[0.0] * N for _ in range(N)]
        for i in range(N):
            for j in range(N):
                if j != i:
                    xi[i][j] = alpha * math.exp(-(float((w[i] - w[j]).norm()) ** 2) / sigma) / sigma
            total = sum(xi[i])
            if total > 1 - own:
                xi[i] = [(1 - own) * share / total for share in xi[i]]
            xi[i][i] = 1 - sum(xi[i])
        u = [weighted_sum(xi[i], w) for i in range(N)]
        trace.models.append(w[problem.alice])
        trace.weights.append(xi[problem.alice])
    return trace


def fedfomo(problem: Problem, *, clip: float = 0.0) -> Trace:
    """FedFomo, Eq. 4 and 5. Every agent receives all other models, so no sampling is needed."""
    trace, N = Trace(), len(problem.nets)
    y, before = [problem.start] * N, [problem.start] * N
    for r in problem.rounds():
        starts, weights = [], []
        for i in range(N):
            gain = [0.0] * N
            for n in range(N):
                distance = float((y[n] - before[i]).norm())
                if distance > 0:
                    gain[n] = max((loss(problem, i, before[i]) - loss(problem, i, y[n])) / distance, 0.0)
            if r == 1 or sum(gain) == 0:
                share = [1.0 if n == i else 0.0 for n in range(N)]
            else:
                share = [g / sum(gain) for g in gain]
            starts.append(weighted_sum(share, y))
            weights.append(share)
        y = [train(problem, r, i, starts[i], clip) for i in range(N)]
        before = starts
        trace.models.append(y[problem.alice])
        trace.weights.append(weights[problem.alice])
    return trace


def apple(
    problem: Problem,
    *,
    clip: float = 2.0,
    eta_p: float = 0.001,
    mu: float = 0.1,
    global_share: float = 0.1,
    core_step: str = "paper",
) -> Trace:
    """APPLE, Algorithm 1. In the first round each agent trains alone, because no core model has been sent yet."""
    trace, N, R = Trace(), len(problem.nets), len(problem.batches)
    zeros = torch.zeros_like(problem.start)
    core = [problem.start] * N
    shift = [[0.0] * N for _ in range(N)]
    for r in problem.rounds():
        sizes = [samples(problem, r, i) for i in range(N)]
        last = global_share * R
        pull = mu * ((math.cos(math.pi * (r - 1) / last) + 1) / 2 if r - 1 < last else 0.0)
        new = list(core)
        for i in range(N):
            p0 = [size / sum(sizes) for size in sizes] if r > 1 else [1.0 if j == i else 0.0 for j in range(N)]
            present = range(N) if r > 1 else [i]
            p = [p0[j] + shift[i][j] if j in present else 0.0 for j in range(N)]
            cores, velocity = list(core), problem.velocity(i, zeros)
            for batch in problem.batches[r - 1][i]:
                g = gradient(problem.nets[i], weighted_sum(p, cores), batch)
                slope = [float(g @ cores[j]) + pull * (p[j] - p0[j]) for j in range(N)]
                own = p[i] / p0[i] if core_step == "lr" else p[i]
                cores[i], velocity = step(problem, cores[i], velocity, own * g, clip, zeros)
                p = [p[j] - eta_p * slope[j] if j in present else 0.0 for j in range(N)]
            problem.keep(i, velocity)
            for j in present:
                shift[i][j] = p[j] - p0[j]
            new[i] = cores[i]
            if i == problem.alice:
                trace.models.append(weighted_sum(p, cores))
                trace.weights.append([abs(share) / sum(abs(q) for q in p) for share in p])
        core = new
    return trace


def fedala(
    problem: Problem,
    *,
    clip: float = 0.0,
    eta_w: float = 30.0,
    rehearsed: float = 0.8,
    head_layers: int = 0,
) -> Trace:
    """FedALA, Algorithm 1, with one pass over part of the mini-batches in every round."""
    trace, N, x = Trace(), len(problem.nets), problem.start
    tensors = list(problem.nets[0].parameters())  # one weight and one bias per layer
    head = sum(tensor.numel() for tensor in (tensors[-2 * head_layers :] if head_layers else tensors))
    y, W = [x] * N, [torch.ones_like(x) for _ in range(N)]
    for r in problem.rounds():
        for i in range(N):
            own = torch.cat([x[:-head], y[i][-head:]])
            batches = epoch(problem, r, i)
            start = own + (x - own) * W[i]
            for batch in batches[: math.ceil(rehearsed * len(batches))]:
                g = gradient(problem.nets[i], start, batch)
                W[i] = (W[i] - eta_w * g * (x - own)).clamp(0, 1)
                start = own + (x - own) * W[i]
            y[i] = train(problem, r, i, start, clip)
        x = weighted_sum([1 / N] * N, y)
        trace.models.append(y[problem.alice])
        trace.weights.append([1 / N] * N)
    return trace


def knn_per(problem: Problem, *, clip: float = 0.0, weighting: str = "equal") -> Trace:
    """kNN-Per trains as FedAvg; `nearest` computes its predictions."""
    return fedavg(problem, clip=clip, weighting=weighting)


def nearest(
    sample: Tensor, known: list[Tensor], labels: list[int], predicted: Tensor, k: int, mix: float, scale: float
) -> list[float]:
    """kNN-Per, Eq. 6 and 7: class probabilities of one sample, from its features and the model's probabilities."""
    squared = [float(((sample - other) ** 2).sum()) for other in known]
    near = sorted(range(len(known)), key=lambda n: squared[n])[:k]
    weights = {n: math.exp(-squared[n] / (len(sample) * scale)) for n in near}
    total = sum(weights.values())
    votes = [sum(w for n, w in weights.items() if labels[n] == c) / total for c in range(len(predicted))]
    return [mix * vote + (1 - mix) * float(p) for vote, p in zip(votes, predicted, strict=True)]


def split_mix(key: int, position: int) -> int:
    """SplitMix64: return the number at this position, counted from 1, of the sequence of a key."""
    z = (key + position * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def ifca(problem: Problem, *, clip: float = 0.0, clusters: int = 3, weighting: str = "equal") -> Trace:
    """IFCA, Algorithm 1 with model averaging. All clusters but the first start from random signs of the model."""
    trace, N, theta = Trace(), len(problem.nets), [problem.start]
    for j in range(1, clusters):
        signs = [-1.0 if split_mix(j, n + 1) >> 1 & 1 else 1.0 for n in range(len(problem.start))]
        theta.append(problem.start * torch.tensor(signs, dtype=problem.start.dtype))
    for r in problem.rounds():
        chosen, trained = [], []
        for i in range(N):
            losses = [loss(problem, i, model) for model in theta]
            chosen.append(losses.index(min(losses)))
            trained.append(train(problem, r, i, theta[chosen[i]], clip))
        counts = [samples(problem, r, i) if weighting == "samples" else 1 for i in range(N)]
        for j in range(len(theta)):
            held = [counts[i] if chosen[i] == j else 0 for i in range(N)]
            if sum(held):
                theta[j] = weighted_sum([count / sum(held) for count in held], trained)
            if j == chosen[problem.alice]:
                trace.weights.append([count / sum(held) for count in held])
        trace.models.append(theta[chosen[problem.alice]])
    return trace


def cfl(
    problem: Problem,
    *,
    clip: float = 0.0,
    eps_mean: float = 0.4,
    eps_max: float = 1.6,
    weighting: str = "equal",
    split_first: bool = False,
) -> Trace:
    """CFL, Algorithm 3, with an exhaustive search for each bipartition. Both parts start from the cluster's model."""
    trace, N = Trace(), len(problem.nets)
    clusters = [(list(range(N)), problem.start)]
    for r in problem.rounds():
        after = []
        for members, theta in clusters:
            dy = {i: train(problem, r, i, theta, clip) - theta for i in members}
            mean = weighted_sum(cluster_weights(problem, r, members, weighting), list(dy.values()))
            longest = max(float(update.norm()) for update in dy.values())
            parts: Sequence[list[int]] = [members]
            if len(members) > 1 and float(mean.norm()) < eps_mean and longest > eps_max:
                parts = bipartition(members, dy)
            for part in parts:
                averaged = part if split_first else members
                weights = cluster_weights(problem, r, averaged, weighting)
                model = theta + weighted_sum(weights, [dy[i] for i in averaged])
                after.append((part, model))
                if problem.alice in part:
                    trace.models.append(model)
                    row = dict(zip(averaged, weights, strict=True))
                    trace.weights.append([row.get(i, 0.0) for i in range(N)])
        clusters = after
    return trace


def cluster_weights(problem: Problem, r: int, members: list[int], weighting: str) -> list[float]:
    """Return the weights of a cluster's agents."""
    counts = [samples(problem, r, i) if weighting == "samples" else 1 for i in members]
    return [count / sum(counts) for count in counts]


def bipartition(members: list[int], dy: dict[int, Tensor]) -> tuple[list[int], list[int]]:
    """Return the bipartition with the smallest maximal similarity between its two parts."""
    found = []
    for size in range(1, len(members)):
        for part in combinations(members, size):
            rest = [i for i in members if i not in part]
            cross = max(float(cosine_similarity(dy[i], dy[j], dim=0)) for i in part for j in rest)
            found.append((cross, list(part), rest))
    _, one, other = min(found, key=lambda candidate: candidate[0])
    return one, other
