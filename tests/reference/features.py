"""Reference for methods that use the features, the input of the last layer: FedDBE, FedPAC.

Written from the authors' objectives and the rules of their released code, with the changes listed in docs/algorithms.
Each network is used as a body and a linear head, and the whole objective is differentiated by autograd.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from reference.collaboration import epoch
from reference.problem import Batch, Problem, Trace, gradient, shares, step, weighted_sum


def body_of(net: nn.Module, y: Tensor, x: Tensor) -> Tensor:
    """Return the features of samples under the model y, differentiable with respect to y."""
    names, parts, at = [], [], 0
    for name, tensor in net.named_parameters():
        names.append(name)
        parts.append(y[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()
    *before, _ = net.children()
    held = dict(zip(names, parts, strict=True))
    for number, layer in enumerate(before):
        own = {name.split(".")[1]: part for name, part in held.items() if name.split(".")[0] == str(number)}
        x = torch.func.functional_call(layer, own, (x,))
    return x


def head_of(net: nn.Module, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of the last layer, which are the last entries of y."""
    *_, weight, bias = net.parameters()
    start = y[-weight.numel() - bias.numel() :]
    return start[: weight.numel()].view(weight.shape), start[weight.numel() :]


def feddbe(
    problem: Problem,
    *,
    clip: float = 0.0,
    kappa: float = 1.0,
    mu: float = 1.0,
    memory: bool = True,
    weighting: str = "samples",
) -> Trace:
    """FedDBE; the first round trains without vector and pull, and measures the mean features."""
    trace, N, x = Trace(), len(problem.nets), problem.start
    D = head_of(problem.nets[0], x)[0].shape[1]
    m, z = [torch.zeros(D, dtype=x.dtype) for _ in range(N)], None
    for r in problem.rounds():
        trained, means = [], []
        for i, net in enumerate(problem.nets):
            both = torch.cat([x, m[i]])
            velocity, running = problem.velocity(i, both), torch.zeros(D, dtype=x.dtype)
            for samples, labels in problem.batches[r - 1][i]:
                leaf = both.clone().requires_grad_()
                y, vector = leaf[:-D], leaf[-D:] if memory else torch.zeros_like(m[i])
                features = body_of(net, y, samples)
                mean = (1 - mu) * running + mu * features.mean(dim=0)
                shifted = features + vector if z is not None else features
                objective = cross_entropy(linear(shifted, *head_of(net, y)), labels)
                if z is not None:
                    objective = objective + kappa * (0.5 * (mean - z) ** 2).mean()
                (g,) = torch.autograd.grad(objective, leaf)
                both, velocity = step(problem, both, velocity, g, clip, torch.zeros_like(g))
                running = mean.detach()
            problem.keep(i, velocity)
            trained.append(both[:-D])
            m[i] = both[-D:]
            means.append(running)
        weights = shares(problem, r, weighting)
        x = weighted_sum(weights, trained)
        if z is None:
            z = weighted_sum(shares(problem, r, "samples"), means)
        weight, bias = head_of(problem.nets[0], x)
        own = torch.cat([x[: -len(bias)], bias + weight @ m[problem.alice]])
        trace.models.append(own)
        trace.weights.append(weights)
    return trace


def fedpac(
    problem: Problem,
    *,
    clip: float = 0.0,
    lam: float = 1.0,
    heads: str = "combined",
    head_share: float = 0.5,
    used: str = "trained",
    weighting: str = "samples",
) -> Trace:
    """FedPAC: statistics of the received features, head, aligned body, centroids, combination of heads."""
    trace, N = Trace(), len(problem.nets)
    weight, bias = head_of(problem.nets[0], problem.start)
    at, C = len(problem.start) - weight.numel() - bias.numel(), len(bias)
    body, own = problem.start[:at], [problem.start[at:]] * N
    centroids: dict[int, Tensor] = {}
    for r in problem.rounds():
        h, V, bodies, trained_heads, samples_of = [], [], [], [], {k: [] for k in range(C)}
        for i, net in enumerate(problem.nets):
            b, head = body, own[i]
            x, labels = (torch.cat(parts) for parts in zip(*epoch(problem, r, i), strict=True))
            features = body_of(net, torch.cat([b, head]), x).detach()
            h.append(torch.stack([features[labels == k].sum(dim=0) / len(x) for k in range(C)]))
            spread = sum(float(row @ row) for row in features) / len(x) - float((h[i] ** 2).sum())
            V.append(spread / len(x))
            batches = problem.batches[r - 1][i]
            on_head = max(1, math.floor(head_share * len(batches))) if len(batches) > 1 else 0
            of_head, of_body = problem.velocity(i, head, "head"), problem.velocity(i, b, "body")
            for number, batch in enumerate(batches):
                y = torch.cat([b, head])
                if number < on_head or len(batches) == 1:
                    g = gradient(net, y, batch)[at:]
                    new_head, of_head = step(problem, head, of_head, g, clip, torch.zeros_like(g))
                else:
                    new_head = head
                if number >= on_head:
                    for sample, k in zip(body_of(net, y, batch[0]).detach(), batch[1].tolist(), strict=True):
                        samples_of[k].append(sample)
                    g = aligned(net, y, batch, centroids, lam)[:at]
                    b, of_body = step(problem, b, of_body, g, clip, torch.zeros_like(g))
                head = new_head
            problem.keep(i, of_head, "head")
            problem.keep(i, of_body, "body")
            bodies.append(b)
            trained_heads.append(head)
        body = weighted_sum(shares(problem, r, weighting), bodies)
        alphas = [
            combination(h, V, i) if heads == "combined" else [1.0 if j == i else 0.0 for j in range(N)]
            for i in range(N)
        ]
        own = [weighted_sum(alpha, trained_heads) for alpha in alphas]
        for k, found in samples_of.items():
            if found:
                centroids[k] = torch.stack(found).mean(dim=0)
        alice = problem.alice
        pair = (bodies[alice], trained_heads[alice]) if used == "trained" else (body, own[alice])
        trace.models.append(torch.cat(pair))
        trace.weights.append(alphas[alice])
    return trace


def aligned(net: nn.Module, y: Tensor, batch: Batch, centroids: dict[int, Tensor], lam: float) -> Tensor:
    """Return the gradient of the loss and of the squared distance of the features from the centroids of their class."""
    leaf = y.clone().requires_grad_()
    features = body_of(net, leaf, batch[0])
    targets = [centroids.get(k, own) for k, own in zip(batch[1].tolist(), features.detach(), strict=True)]
    distance = ((features - torch.stack(targets)) ** 2).mean()
    objective = cross_entropy(linear(features, *head_of(net, leaf)), batch[1]) + lam * distance
    return torch.autograd.grad(objective, leaf)[0]


def combination(h: list[Tensor], V: list[float], i: int) -> list[float]:
    """Minimise a^T (diag(V) + B_i) a on the simplex, by trying every set of positive weights."""
    N = len(V)
    Q = torch.tensor(
        [
            [float(((h[i] - h[j]) * (h[i] - h[k])).sum()) + (V[j] if j == k else 0.0) for k in range(N)]
            for j in range(N)
        ],
        dtype=torch.float64,
    )
    found = []
    for chosen in range(1, 2**N):
        support = [j for j in range(N) if chosen >> j & 1]
        a = torch.linalg.inv(Q[support][:, support]).sum(dim=1)
        if float(a.min()) >= 0:
            full = torch.zeros(N, dtype=torch.float64)
            full[support] = a / a.sum()
            found.append((float(full @ Q @ full), full.tolist()))
    return min(found)[1]
