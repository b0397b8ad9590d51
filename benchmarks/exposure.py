"""Count the training rows that an update reveals: python -m benchmarks.exposure > results/exposure.jsonl

For honest networks during training, and for weights that are chosen to single out rows, on tables of several sizes:
the share that `deploy/exposure.py` finds, and the rows that can be recovered from the update of one step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from waffle_fl import FedAvg, Federation, FlatModel
from waffle_fl.algorithms import SGD, Net
from waffle_fl.config import check_run
from waffle_fl.deploy.exposure import exposed_shares, usual_shares
from waffle_fl.engines.run_spec import RunSpec, own_net
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment import Runtime
from waffle_fl.experiment.factories import federation_of, model_of
from waffle_fl.models import Batch, mlp
from waffle_fl.randomness import generator

ROWS = (30, 60, 120, 240)
FEATURES = 6
CHECKED_ROUNDS = (1, 5, 15)
DIGITS: list[dict[str, Any]] = [
    {"agents": 3, "samples_per_agent": 40, "batch_size": 16},
    {"agents": 4, "batch_size": 16},
]


def imprint(model: FlatModel) -> Tensor:
    """Return hidden-layer weights whose units count the rows beyond a threshold; neighbours differ by few rows."""
    shapes = {name: value.shape for name, value in model.state_dict(model.init(0)).items()}
    first_weight, first_bias, last_weight, last_bias = shapes
    hidden, features = shapes[first_weight]
    shares = torch.arange(1, hidden + 1, dtype=torch.float64) / (hidden + 1)
    direction = torch.linspace(0.3, 1.7, features, dtype=torch.float64)
    parts = {
        first_weight: direction.expand(hidden, features),
        first_bias: -0.9 * direction.norm() * 2**0.5 * torch.erfinv(2 * shares - 1),
        last_weight: torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(shapes[last_weight]) * 1e-3,
        last_bias: torch.zeros(shapes[last_bias], dtype=torch.float64),
    }
    return torch.cat([parts[name].reshape(-1) for name in shapes])


def recovered(model: FlatModel, update: Tensor, rows: Tensor) -> int:
    """Return how many of the rows can be recovered exactly from the update of one step."""
    weight, bias, *_ = model.state_dict(Net(update, update[:0])).values()
    along, by = weight[:-1] - weight[1:], bias[:-1] - bias[1:]
    found = along[by.abs() > 1e-12] / by[by.abs() > 1e-12][:, None]
    return int(((found[:, None] - rows[None]).abs().amax(dim=2) < 1e-6).any(dim=0).sum())


def attacked(count: int) -> dict[str, Any]:
    """Measure one step of full-batch training from chosen weights, on a table of standard normal columns."""
    rng = generator(count, "exposure")
    x, y = rng.standard_normal((count + 5, FEATURES)), rng.integers(0, 2, count + 5)
    arrays = (x[:count], y[:count], x[count:], y[count:])
    federation = Federation.from_arrays([("north", arrays)], class_names=("a", "b"))
    model = FlatModel(lambda: mlp((FEATURES,), 2), precision="float64")
    federation = federation.to(model.device, model.dtype)
    chosen = imprint(model)
    rows = federation.x[federation.train[0]].double()
    batch = Batch(
        rows[None], torch.tensor(y[:count])[None], torch.ones(1, count).double(), torch.zeros(1, dtype=torch.int64)
    )
    gradient = model.grad(chosen[None], chosen[None, :0], batch).params[0]
    return {
        "weights": "chosen",
        "rows": count,
        "share": round(exposed_shares(model, Net(chosen, chosen[:0]), federation)[0], 3),
        "random": round(usual_shares(model, federation)[0], 3),
        "recovered": recovered(model, gradient, rows),
    }


def honest(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure FedAvg on the digits: the largest share in the checked rounds."""
    s = check_run("fedavg", {"data": "digits", "model": "mlp", **settings}, {}).settings
    federation = federation_of(s)
    model = model_of(s, federation, Runtime(), torch.device("cpu"))
    spec = RunSpec(FedAvg(SGD(s.lr)), federation, s.seed)
    alone = federation.only(federation.alice)
    shares = [
        exposed_shares(model, own_net(spec, outcome.state, model), alone)[0]
        for (outcome,) in simulate([spec], model, rounds=max(CHECKED_ROUNDS), batch_size=s.batch_size, workers=1)
        if outcome.round in CHECKED_ROUNDS
    ]
    rows = len(alone.train[0])
    return {
        "weights": "honest",
        "rows": rows,
        "share": round(max(shares), 3),
        "random": round(usual_shares(model, alone)[0], 3),
    }


def lines() -> Iterator[dict[str, Any]]:
    """Yield the lines of the record."""
    yield from map(attacked, ROWS)
    yield from map(honest, DIGITS)


if __name__ == "__main__":
    for line in lines():
        sys.stdout.write(json.dumps(line) + "\n")
