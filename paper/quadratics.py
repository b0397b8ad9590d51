"""Calculations for docs/theory.md: on quadratic losses a round of SCAFFOLD or WAFFLE is a matrix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paper import drift
from waffle_fl.algorithms import SGD, Net, Round, scaffold
from waffle_fl.algorithms.contract import Grad, Rows, State, Vector, Weights, sums_of
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.waffle_paper import WafflePaper
from waffle_fl.engines.tree import where_rows

MEASURED_OVER = 60  # rounds: long enough for the largest eigenvalue to dominate
STEPS = 8
ONE_SHARP = (1.0, *[0.4] * 4, *[0.1] * 5)  # curvatures of ten agents
ONE_FLAT = (1.0, 0.001)
SWITCH, AFTER, NEW_WEIGHTS = 30, 30, (0.8, 0.1, 0.1)
GRID, TRIED = [round(0.05 * i, 2) for i in range(1, 49)], [0.4, 0.8, 1.2, 1.6, 2.2]


class Quadratics(NamedTuple):
    """The losses f_i(x) = 1/2 (x - o_i)' H_i (x - o_i)."""

    curvatures: Tensor  # (N, P, P)
    optima: Rows

    def grad(self, params: Rows, stats: Rows) -> Net:
        return Net(torch.einsum("ipq,iq->ip", self.curvatures, params - self.optima), stats)

    def minimiser(self, weights: Weights) -> Vector:
        """Return the minimiser of sum_i weights_i f_i."""
        return stationary(torch.einsum("i,ipq->ipq", weights, self.curvatures), self.optima)


class Response(NamedTuple):
    """K local steps move a model by -lr K (to_gradient g + to_correction b).

    g is the gradient at the start of the round, b the correction that every step adds.
    """

    to_gradient: Tensor
    to_correction: Tensor


def stationary(responses: Tensor, optima: Rows) -> Vector:
    """Return the x with sum_i responses_i (x - o_i) = 0."""
    x: Vector = torch.linalg.solve(responses.sum(dim=0), torch.einsum("ipq,iq->p", responses, optima))
    return x


def response(H: Tensor, lr: float, steps: int, momentum: float = 0.0) -> Response:
    """Return the response, computed from one round with g = identity and one with b = identity."""
    eye = torch.eye(len(H), dtype=H.dtype)
    means = []
    for g, b in ((eye, 0 * eye), (0 * eye, eye)):
        displacement, velocity = torch.zeros_like(H), torch.zeros_like(H)
        for _ in range(steps):
            velocity = momentum * velocity + g + H @ displacement
            displacement = displacement - lr * (velocity + b)
        means.append(-displacement / (lr * steps))
    return Response(*means)


def round_map(
    curvatures: Tensor,
    weights: Weights,
    lr: float,
    steps: Sequence[int],
    responses: Sequence[Response] | None = None,
    control: Literal["anchored", "paper"] = "anchored",
) -> Tensor:
    """Return the matrix of a round on the errors of (x, c, c_1, ..., c_N).

    `responses` are those of plain SGD if not given.
    """
    agents, size = curvatures.shape[:2]
    eye = torch.eye(size, dtype=curvatures.dtype)
    matrix = torch.zeros(agents + 2, size, agents + 2, size, dtype=curvatures.dtype)
    matrix[0, :, 0] = eye
    each = responses or [response(H, lr, k) for H, k in zip(curvatures, steps, strict=True)]
    for i, (H, k, (to_g, to_b)) in enumerate(zip(curvatures, steps, each, strict=True), start=2):
        move = torch.zeros_like(matrix[0])  # the mean corrected gradient, -dy_i / (lr K_i)
        move[:, 0], move[:, 1], move[:, i] = to_g @ H, to_b, -to_b
        matrix[0] -= lr * k * weights[i - 2] * move
        matrix[i] = move
        matrix[i, :, i] += eye
        matrix[i, :, 1] -= eye
    matrix[1] = torch.einsum("i,ipjq->pjq", weights, matrix[2:])
    if control == "paper":
        matrix[1, :, 1] += eye
        matrix[1, :, 2:] -= torch.einsum("i,pq->piq", weights, eye)
    return matrix.reshape((agents + 2) * size, -1)


def spectral_radius(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(matrix).abs().max())


def play(
    algorithm: Any,
    gradient: Callable[[Rows, Rows], Net],
    start: Vector,
    steps: Sequence[int],
    rounds: int,
    weights: Weights | None = None,
    of: int = 0,
    state: tuple[State, State] | None = None,
) -> Iterator[tuple[State, State, State]]:
    """Yield server, updates and info after each round. Agent 0 is Alice.

    `weights` replace those that WAFFLE computes; they may have one row per round. `of` is the planned number of rounds
    R, if it is larger than `rounds`. `state` replaces the initial states of the server and of the agents.
    """
    agents_count, all_agents, planned = len(steps), torch.ones(len(steps), dtype=torch.bool), torch.tensor(steps)
    server, agents = state or algorithm.init(Net(start, start[:0]), agents_count)
    for r in range(1, rounds + 1):
        down = algorithm.broadcast(server, agents_count)
        local = algorithm.begin(down, agents)
        for k in range(max(steps)):
            stepped = algorithm.step(local, Grad(gradient, torch.tensor([k]), planned))
            local = stepped if k < min(steps) else where_rows(planned > k, stepped, local)
        agents, up = algorithm.finish(down, agents, local)
        now = Round(r, of or rounds, torch.tensor(0), all_agents, all_agents, planned, planned, 1)
        if weights is None:
            server, info = algorithm.aggregate(server, up, now)
        else:
            info = weights if weights.ndim == 1 else weights[r - 1]
            c_i = scaffold.received_control_variates(server, up, now, algorithm.sgd.lr, algorithm.correction)
            rows = {**up._asdict(), "c": c_i, "dc": c_i - server.c_i}
            server = algorithm.combine(server, sums_of(dict.fromkeys(rows, info), rows), now)._replace(c_i=c_i)
        yield server, up, info


def in_one_dimension(curvatures: Sequence[float]) -> Quadratics:
    """Return agents with the optimum 0 and these curvatures; stability depends only on the curvatures."""
    H = torch.tensor(curvatures, dtype=torch.float64).view(-1, 1, 1)
    return Quadratics(H, torch.zeros_like(H[:, 0]))


def equal_weights(problem: Quadratics) -> Weights:
    agents = len(problem.optima)
    return torch.full((agents,), 1 / agents, dtype=torch.float64)


def fedavg_radius(problem: Quadratics, lr: float, steps: Sequence[int]) -> float:
    """Return the spectral radius of FedAvg's round map, the mean of (I - lr H_i)^K_i."""
    eye = torch.eye(problem.optima.shape[1], dtype=torch.float64)
    powers = [torch.linalg.matrix_power(eye - lr * H, k) for H, k in zip(problem.curvatures, steps, strict=True)]
    return spectral_radius(torch.stack(powers).mean(dim=0))


def scaffold_radius(problem: Quadratics, lr: float, steps: Sequence[int]) -> float:
    """Return the spectral radius of SCAFFOLD's round map, which is WAFFLE's with equal weights."""
    return spectral_radius(round_map(problem.curvatures, equal_weights(problem), lr, steps))


def measured_rate(algorithm: Any, problem: Quadratics, steps: Sequence[int], weights: Weights | None = None) -> float:
    """Return the factor per round by which the model moves away from the optimum 0 or towards it, in later rounds."""
    start = torch.ones(problem.optima.shape[1], dtype=torch.float64)
    states = play(algorithm, problem.grad, start, steps, MEASURED_OVER, weights)
    sizes = [float(server.x.norm()) for server, *_ in states]
    half, window = MEASURED_OVER // 2, MEASURED_OVER // 10  # complex eigenvalues make sizes oscillate
    return float((max(sizes[-window:]) / max(sizes[half - window : half])) ** (1 / half))


@cache
def lines() -> tuple[str, ...]:
    """Return the record: computed and measured rates by step size, then the distances to a new optimum by round."""
    sharp, flat = in_one_dimension(ONE_SHARP), in_one_dimension(ONE_FLAT)
    same = (STEPS,) * len(ONE_SHARP)
    rates = [_rates("one sharp agent of ten", label, sharp, same) for label in ("FedAvg", "SCAFFOLD")]
    rates += [
        _rates("one flat agent of two", f"{one} and {other} steps", flat, (one, other))
        for one, other in ((8, 8), (1, 8), (1, 16))
    ]
    return (*rates, _distances("anchored"), _distances("paper"))


def _distances(control: Literal["anchored", "paper"]) -> str:
    problem = Quadratics(torch.diag_embed(drift.CURVATURES), drift.OPTIMA)
    new_weights = torch.tensor(NEW_WEIGHTS, dtype=torch.float64)
    weights = torch.stack([equal_weights(problem)] * SWITCH + [new_weights] * AFTER)
    waffle, goal = WafflePaper(SGD(drift.LR), clip=0.0, control=control), problem.minimiser(new_weights)
    states = play(waffle, problem.grad, drift.START, [drift.STEPS] * 3, len(weights), weights)
    distances = [_short(float((server.x - goal).norm())) for server, *_ in states]
    return _line({"panel": "new weights", "label": control, "switch": SWITCH, "distances": distances})


def _rates(panel: str, label: str, problem: Quadratics, steps: Sequence[int]) -> str:
    fedavg = label == "FedAvg"
    radius = fedavg_radius if fedavg else scaffold_radius
    weights = None if fedavg else equal_weights(problem)
    measured = [
        measured_rate(FedAvg(SGD(lr)) if fedavg else WafflePaper(SGD(lr), clip=0.0), problem, steps, weights)
        for lr in TRIED
    ]
    content = {
        "panel": panel,
        "label": label,
        "curvatures": problem.curvatures.flatten().tolist(),
        "steps": steps,
        "lr": GRID,
        "radius": [_short(radius(problem, lr, steps)) for lr in GRID],
        "tried": TRIED,
        "measured": [_short(rate) for rate in measured],
    }
    return _line(content)


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


def _short(value: float) -> float:
    return float(f"{value:.3g}")
