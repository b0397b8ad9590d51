"""Client drift of the real algorithms on three agents with quadratic losses in two dimensions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from waffle_fl.algorithms import SGD, Algorithm, Grad, Net, Round
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.scaffold import Scaffold
from waffle_fl.algorithms.waffle_paper import WafflePaper

NAMES = ("Alice", "agent 1", "agent 2")
OPTIMA = torch.tensor([[4.0, 1.0], [3.0, 3.2], [-1.5, 3.6]], dtype=torch.float64)
CURVATURES = torch.tensor([[1.0, 0.5], [0.4, 1.0], [0.3, 1.2]], dtype=torch.float64)
START = torch.tensor([0.0, -1.0], dtype=torch.float64)
ROUNDS, STEPS, LR = 20, 8, 0.2
SHOWN = 3  # rounds whose local steps are recorded: the paper's schematic has three


def algorithms() -> dict[str, Algorithm]:
    sgd = SGD(LR)
    return {"fedavg": FedAvg(sgd), "scaffold": Scaffold(sgd, clip=0.0), "waffle-paper": WafflePaper(sgd, clip=0.0)}


def gradient(params: Tensor, stats: Tensor) -> Net:
    """Return the gradient of 1/2 sum_j h_ij (y_j - o_ij)^2 in row i."""
    return Net(CURVATURES * (params - OPTIMA), stats)


def common_optimum() -> Tensor:
    """Return the minimiser of the mean loss."""
    return (CURVATURES * OPTIMA).sum(dim=0) / CURVATURES.sum(dim=0)


def trajectory(algorithm: Algorithm) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the server's model before each round and at the end, the agents' models at each step, and the weights."""
    agents_count = len(OPTIMA)
    server, agents = algorithm.init(Net(START, START[:0]), agents_count)
    all_agents, steps = torch.ones(agents_count, dtype=torch.bool), torch.full((agents_count,), STEPS)
    models, paths, weights = [server.x], [], []
    for r in range(1, ROUNDS + 1):
        down = algorithm.broadcast(server, agents_count)
        local = algorithm.begin(down, agents)
        path = [local.y]
        for t in range(STEPS):
            local = algorithm.step(local, Grad(gradient, torch.tensor([t]), steps))
            path.append(local.y)
        agents, up = algorithm.finish(down, agents, local)
        now = Round(r, ROUNDS, torch.tensor(0), all_agents, all_agents, steps, steps, 1)
        server, info = algorithm.aggregate(server, up, now)
        models.append(server.x)
        paths.append(torch.stack(path, dim=1))
        weights.append(info.weights)
    return models, paths, weights


def lines() -> Iterator[str]:
    """Yield the record: one JSON line per method."""
    problem = {
        "agents": NAMES,
        "optima": OPTIMA.tolist(),
        "curvatures": CURVATURES.tolist(),
        "common_optimum": _short(common_optimum()),
        "steps": STEPS,
        "lr": LR,
    }
    for method, algorithm in algorithms().items():
        models, paths, weights = trajectory(algorithm)
        moves = {"server": _short(torch.stack(models)), "local": [_short(path) for path in paths[:SHOWN]]}
        content = {"method": method, **problem, **moves, "weights": _short(torch.stack(weights))}
        yield json.dumps(content, separators=(",", ":"))


def _short(values: Tensor) -> Any:
    return json.loads(json.dumps(values.tolist()), parse_float=lambda text: round(float(text), 4))
