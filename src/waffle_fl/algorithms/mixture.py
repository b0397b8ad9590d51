"""Mixture of predictions: a wrapper for a method that trains one model for Alice.

Besides that model Alice has the average model (FedAvg's), a model that she trains alone, and her nearest training
samples. Her prediction is a mixture of the four, with weights from her validation samples. The wrapper adds the two
models to the states; the functions below compute weights and predictions where a model is evaluated. What her weights
lose at most: docs/theory-weights.md, 42.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import NEARLY_EQUAL, TINY, Grad, Net, Round, State, broadcast_to, gradients, lengths
from waffle_fl.algorithms.knn_per import MIN_PROBABILITY, neighbours
from waffle_fl.algorithms.wrapper import Wrapper, extended, inner_state

PARTS = ("shared", "average", "alone")  # the models in a row of `personal`; the neighbours are the last part
COUNT = len(PARTS) + 1
PRIOR = (1.0, 1.0, 0.2, 0.2)  # pseudo-samples of each part: docs/algorithms/waffle.md
ALONE = PARTS[2]  # the names of the fields of the model that an agent trains alone start with it
NEIGHBOURS, SCALE = 10, 0.1  # defaults of kNN-Per
ITERATIONS = 100
LONGEST_UPDATE = 1e6  # a longer update of the average model is ignored


def class_weights(likelihoods: Tensor, prior: Tensor) -> Tensor:
    """Return the weights (..., K) of parts by EM, from the probability (..., K, n) of each label under each part.

    They maximise the sum of log sum_k w_k p_kn over the samples, plus sum of prior_k log w_k.
    """
    p = likelihoods.clamp(min=MIN_PROBABILITY)
    weights = torch.full_like(p.sum(dim=-1), 1 / len(prior))
    for _ in range(ITERATIONS):
        shares = weights[..., None] * p
        counts = (shares / shares.sum(dim=-2, keepdim=True)).sum(dim=-1) + prior
        weights = counts / counts.sum(dim=-1, keepdim=True)
    return weights


def value_weights(values: Tensor, targets: Tensor, prior: Tensor) -> Tensor:
    """Return the weights (K,) of predicted values (K, n) by least squares among non-negative weights of sum 1.

    The prior pulls towards its proportions, with the error of the best part per pseudo-sample. The minimum is computed
    exactly: each set of parts gives one candidate.
    """
    usable = values.isfinite().all(dim=1)
    errors = torch.where(usable[:, None], values, targets) - targets
    centre = prior / prior.sum()
    if not usable.any():
        return centre
    squares = errors[usable].square().mean(dim=1)
    pull = prior.sum() * torch.maximum(squares.min(), NEARLY_EQUAL * squares.max()).clamp(min=TINY)
    curvature = errors @ errors.T + pull * torch.eye(len(prior), dtype=values.dtype, device=values.device)
    best, lowest = centre, torch.inf
    known = usable.nonzero().flatten().tolist()
    for support in (part for size in range(1, len(known) + 1) for part in combinations(known, size)):
        weights = _on_support(curvature, pull * centre, list(support))
        loss = float(weights @ curvature @ weights - 2 * pull * centre @ weights)
        if bool((weights >= 0).all()) and loss < lowest:
            best, lowest = weights, loss
    return best


def _on_support(curvature: Tensor, slope: Tensor, support: list[int]) -> Tensor:
    """Return the weights of sum 1 on these parts that minimise w' curvature w - 2 slope' w."""
    sides = torch.stack([slope[support], torch.ones_like(slope[support])], dim=1)
    solved = torch.linalg.solve(curvature[support][:, support], sides)
    free, ones = solved.unbind(dim=1)
    weights = torch.zeros_like(slope)
    weights[support] = free + ones * (1 - free.sum()) / ones.sum()
    return weights


def part_predictions(outputs: Tensor, features: Tensor, known: Tensor, labels: Tensor) -> Tensor:
    """Return the predictions of all parts: probabilities (K, n, C), or values (K, n) for a regression.

    `outputs` are those of the models in `PARTS` and `features` the inputs of the shared model's last layer; `known` and
    `labels` belong to the agent's training samples. A part other than the shared model that is not finite predicts
    nothing.
    """
    if labels.is_floating_point():
        near = neighbours(features, known, labels[:, None], NEIGHBOURS, SCALE).view(1, -1)
        return torch.cat([outputs.double().view(len(outputs), -1), near])
    near = neighbours(features, known, F.one_hot(labels, outputs.shape[2]), NEIGHBOURS, SCALE)[None]
    shared, *others = outputs.double().softmax(dim=2)
    return torch.cat([shared[None], torch.stack(others).nan_to_num(0.0), near])


def weights_of(predictions: Tensor, target: Tensor) -> Tensor:
    """Return the weights of the parts, given their predictions for validation samples.

    Without validation samples nothing tells whether a part helps, and the shared model predicts alone.
    """
    prior = torch.tensor(PRIOR, dtype=torch.float64, device=predictions.device)
    if not len(target):
        return F.one_hot(torch.zeros((), dtype=torch.int64, device=prior.device), len(prior)).double()
    if target.is_floating_point():
        return value_weights(predictions, target.double(), prior)
    return class_weights(predictions[:, torch.arange(len(target), device=target.device), target], prior)


def mixed(predictions: Tensor, weights: Tensor) -> Tensor:
    """Return the logarithms of the mixed probabilities, or the mixed values of a regression."""
    used = weights.view(-1, *[1] * (predictions.ndim - 1))
    total = torch.where(used > 0, used * predictions, 0.0).sum(dim=0)
    return total if total.ndim == 1 else total.clamp(min=MIN_PROBABILITY).log()


@final
@dataclass(frozen=True)
class PredictionMixture(Wrapper):
    """An algorithm that also trains the average model and, at each agent, a model that is trained alone.

    A row of `personal` holds the models in `PARTS` one after another.
    """

    alone: bool = True  # False for agents whose own model is not requested

    def helper(self) -> PredictionMixture:
        return PredictionMixture(self.inner, alone=False)

    def init(self, net: Net, agents: int) -> tuple[State, State]:
        server, rows = self.inner.init(net, agents)
        if self.alone:
            own = broadcast_to(net, agents)
            rows = extended(rows, alone=own.params, alone_stats=own.stats)
        return extended(server, average=net.params, average_stats=net.stats), rows

    def broadcast(self, server: State, agents: int) -> State:
        average = broadcast_to(Net(server.average, server.average_stats), agents)
        sent = self.inner.broadcast(inner_state(server), agents)
        return extended(sent, average=average.params, average_stats=average.stats)

    def begin(self, down: State, agents: State) -> State:
        kept = inner_state(agents) if self.alone else agents
        more = {"average": Net(down.average, down.average_stats)}
        more |= {"alone": Net(agents.alone, agents.alone_stats)} if self.alone else {}
        return extended(self.inner.begin(inner_state(down), kept), **self._fields(more))

    def step(self, local: State, grad: Grad) -> State:
        names = ("average", "alone") if self.alone else ("average",)
        nets = [Net(getattr(local, name), getattr(local, f"{name}_stats")) for name in names]
        new: dict[str, Tensor] = {}
        for name, net, (g, stats) in zip(names, nets, gradients(grad, *nets), strict=True):
            velocity = getattr(local, f"{name}_velocity")
            params, velocity = self.sgd.step(net.params, velocity, g, clip=self.clip)
            new |= {name: params, f"{name}_stats": stats, f"{name}_velocity": velocity}
        return extended(self.inner.step(inner_state(local), grad), **new)

    def finish(self, down: State, agents: State, local: State) -> tuple[State, State]:
        kept = inner_state(agents) if self.alone else agents
        rows, up = self.inner.finish(inner_state(down), kept, inner_state(local))
        if self.alone:
            rows = extended(rows, alone=local.alone, alone_stats=local.alone_stats)
        moved, stats = local.average - down.average, local.average_stats
        sound = torch.cat([moved, stats], dim=1).isfinite().all(dim=1, keepdim=True)  # otherwise the run would end
        moved, stats = torch.where(sound, moved, 0.0), torch.where(sound, stats, down.average_stats)
        return rows, extended(up, average_dy=moved, average_stats=stats)

    def aggregate(self, server: State, up: State, now: Round) -> tuple[State, State]:
        after, info = self.inner.aggregate(inner_state(server), inner_state(up), now)
        counted = now._replace(received=now.intact & (lengths(up.average_dy) <= LONGEST_UPDATE))
        before = fedavg.Server(server.average, server.average_stats)
        (average, stats), _ = fedavg.aggregate(before, fedavg.Up(up.average_dy, up.average_stats), counted)
        stats = torch.where(counted.received.any(), stats, server.average_stats)
        return extended(after, average=average, average_stats=stats), info

    def personal(self, server: State, agents: State, count: int) -> Net:
        kept = inner_state(agents) if self.alone else agents
        nets = [self.inner.personal(inner_state(server), kept, count)]
        nets.append(broadcast_to(Net(server.average, server.average_stats), count))
        nets += [Net(agents.alone, agents.alone_stats)] if self.alone else []
        return Net(*(torch.cat(rows, dim=1) for rows in zip(*nets, strict=True)))

    def _fields(self, nets: dict[str, Net]) -> dict[str, Tensor]:
        """Return the fields of local training for these models."""
        fields: dict[str, Tensor] = {}
        for name, (params, stats) in nets.items():
            velocity = self.sgd.zero_velocity(params)
            fields |= {name: params, f"{name}_stats": stats, f"{name}_velocity": velocity}
        return fields
