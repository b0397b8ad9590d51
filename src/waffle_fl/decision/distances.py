"""Distances between the agents' data before training: by labels, by features and by the first gradients.

label      half the sum of the absolute differences between label shares: 0 for the same mix, 1 for no common label
           (regression: the difference between the mean targets, in standard deviations of all targets)
feature    the difference between the means of a feature, in standard deviations of all training samples, averaged over
           features (None with local preprocessing, which sets the means of every agent to 0)
gradient   the sine of half the angle between the full gradients at one random model: 0 for the same direction, 0.71
           for a right angle, 1 for opposite directions, regardless of the gradients' norms

All three are symmetric and 0 between an agent and itself. They use training data only; features and gradients use at
most SAMPLES samples per agent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel
from waffle_fl.models.flat import Batch

SAMPLES, CHUNK = 1024, 256


class Distances(NamedTuple):
    """One matrix (agents x agents) per kind of distance."""

    names: list[str]
    label: list[list[float]]
    feature: list[list[float]] | None
    gradient: list[list[float]]

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Distances:
        """Return the distances of a parsed distances.json; raise WaffleError for any other content."""
        try:
            names = [str(name) for name in content["names"]]
            found = {kind: _matrix(content[kind], len(names)) for kind in ("label", "feature", "gradient")}
            if found["label"] is None or found["gradient"] is None:
                raise ValueError("label and gradient")
            return cls(names, found["label"], found["feature"], found["gradient"])
        except (KeyError, TypeError, ValueError):
            raise WaffleError(
                "distances.json: expected names and a matrix of numbers for each kind; delete it"
            ) from None


def _matrix(content: Any, side: int) -> list[list[float]] | None:
    if content is None:
        return None
    matrix = [[float(value) for value in row] for row in content]
    if [len(row) for row in matrix] != [side] * side:
        raise ValueError("shape")
    return matrix


def distances(federation: Federation, model: FlatModel, seed: int = 1) -> Distances:
    """Return all three distances between the agents that have training samples."""
    present = [i for i in range(federation.agents) if len(federation.train[i])]
    rows = [_subset(federation.train[i]) for i in present]
    prepared = federation.preprocessing or federation.scaling
    return Distances(
        names=[federation.names[i] for i in present],
        label=label_distance(federation, present).tolist(),
        feature=None if prepared and prepared.scope == "local" else feature_distance(federation.x, rows).tolist(),
        gradient=gradient_distance(federation, model, present, rows, seed).tolist(),
    )


def label_distance(federation: Federation, present: list[int]) -> Tensor:
    labels = [federation.labels(i, federation.train[i]) for i in present]
    if federation.y.is_floating_point():
        means = torch.stack([part.double().mean() for part in labels])[:, None]
        return torch.cdist(means, means, p=1) / _deviation(torch.cat(labels).double())
    counts = torch.stack([part.bincount(minlength=len(federation.class_names)) for part in labels])
    shares = counts.double() / counts.sum(dim=1, keepdim=True)
    return torch.cdist(shares, shares, p=1) / 2


def feature_distance(x: Tensor, rows: list[Tensor]) -> Tensor:
    parts = [x[part].flatten(1).double() for part in rows]
    pooled = torch.cat(parts)
    varies = pooled.std(dim=0, correction=0) > 0
    scaled = torch.stack([part.mean(dim=0) for part in parts])[:, varies] / _deviation(pooled)[varies]
    return torch.cdist(scaled, scaled, p=1) / max(1, int(varies.sum()))


def gradient_distance(
    federation: Federation, model: FlatModel, present: list[int], rows: list[Tensor], seed: int
) -> Tensor:
    net = model.init(seed)
    gradients = []
    for i, mine in zip(present, rows, strict=True):
        total = torch.zeros(model.size, dtype=torch.float64, device=model.device)
        for part in torch.split(mine, CHUNK):
            x = federation.x[part].to(model.device, model.dtype)[None]
            y = federation.labels(i, part).to(model.device)[None]
            weight = torch.ones(1, len(part), dtype=model.dtype, device=model.device)
            batch = Batch(x, y, weight, torch.zeros(1, dtype=torch.int64, device=model.device))
            total += model.grad(net.params[None], net.stats[None], batch).params[0].double() * len(part) / len(mine)
        gradients.append(total.cpu())
    g = torch.stack(gradients)
    directions = g / g.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return torch.stack([(directions - direction).norm(dim=1) for direction in directions]) / 2


def _subset(rows: Tensor) -> Tensor:
    """Return at most SAMPLES of the rows, evenly spaced."""
    return rows[:: max(1, -(-len(rows) // SAMPLES))]


def _deviation(values: Tensor) -> Tensor:
    return values.std(dim=0, correction=0).clamp(min=1e-300)
