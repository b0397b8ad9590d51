"""Reference for waffle, in plain loops, written from docs/algorithms/waffle.md."""

import math

import torch
from torch import Tensor

from reference.personal import layers
from reference.problem import Problem, Trace, train


def cosine(a: Tensor, b: Tensor) -> float:
    lengths = float(a.norm()) * float(b.norm())
    return float(a @ b) / lengths if lengths else 0.0


def pace(averaging: float, rounds: int) -> float:
    return 1 / (averaging * rounds) if averaging * rounds > 1 else 1.0


def waffle(
    problem: Problem,
    *,
    clip: float = 5.0,
    head_layers: int = 1,
    yielding: float = 0.3,
    averaging: float = 0.1,
    own: float = 0.3,
) -> Trace:
    """Each layer is a mean of the agents' layers weighted by their shares; Alice's model averages over rounds."""
    sizes = [size for _, size in layers(problem.nets[0])]
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    trace, x, N, A = Trace(), problem.start, len(problem.nets), problem.alice
    others = [i for i in range(N) if i != A]
    y, mean = [x] * N, x
    share = [[1.0] * len(sizes) for _ in range(N)]
    history: list[list[list[tuple[float, float]]]] = [[[] for _ in sizes] for _ in range(N)]
    strife = [0.0] * len(sizes)
    for r in problem.rounds():
        starts = []
        for i in range(N):
            start = x.clone()
            for k, span in enumerate(spans):
                start[span] = share[i][k] * x[span] + (1 - share[i][k]) * y[i][span]
            starts.append(start)
        y = [train(problem, r, i, starts[i], clip) for i in range(N)]
        dy = [y[i] - starts[i] for i in range(N)]
        new, weights = x.clone(), [0.0] * N
        for k, span in enumerate(spans):
            theirs = sum((share[i][k] * dy[i][span] for i in others), torch.zeros_like(x[span]))
            strife[k] += max(-cosine(theirs, dy[A][span]), 0.0) ** 2
            for i in others:
                history[i][k].append((float(dy[A][span].norm()), cosine(dy[i][span], dy[A][span])))
                share[i][k] = math.exp(-yielding * strife[k])
                if k >= len(sizes) - head_layers:
                    evidence, agreement = (sum(length * s**p for length, s in history[i][k]) for p in (4, 5))
                    kinship = agreement / evidence if evidence else 1.0
                    share[i][k] = min(share[i][k], min(max((kinship - 0.45) / 0.15, 0.0), 1.0))
            total = sum(share[i][k] for i in range(N))
            new[span] = sum((share[i][k] / total * y[i][span] for i in range(N)), torch.zeros_like(x[span]))
            weights = [w + share[i][k] / total * sizes[k] / sum(sizes) for i, w in enumerate(weights)]
        x = new
        between = (1 - own) * starts[A] + own * y[A]
        mean = mean + pace(averaging, r - 1) * (between - mean)
        trace.models.append(mean + pace(averaging, r) * (x - mean))
        trace.weights.append(weights)
    return trace
