"""FedPAC (Xu et al. 2023): features are aligned with class means of all agents, and heads are combined per agent.

Local training first trains the head, then the body with F_i + lam / D |f(x) - c_y|^2, where c_y is the mean feature of
class y over all agents. Bodies are averaged. The head of agent i is sum_j alpha_j head_j, where alpha minimises
alpha^T (diag(V) + B_i) alpha on the simplex: V_j is the variance of agent j's class means, and B_i contains the
differences between the class means of other agents and those of agent i.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg, partial_sharing
from waffle_fl.algorithms.contract import (
    SGD,
    TINY,
    About,
    Features,
    Grad,
    Net,
    Optimiser,
    Round,
    Rows,
    Vector,
    broadcast_to,
    weighted_sum,
)
from waffle_fl.algorithms.fedavg import Weighting
from waffle_fl.algorithms.partial_sharing import Parts, cut, join
from waffle_fl.constraints import at_least, check_fields, fraction, model_dependent, parameter
from waffle_fl.errors import WaffleError
from waffle_fl.models.layers import Layers

PIVOTS = 30  # exchanges of the quadratic program; a few are usual
PATIENCE = 3  # exchanges without progress before single ones
SLACK = 1e-10  # of the conditions for an optimum
LEAST_VARIANCE = 1e-12


class HeadShape(NamedTuple):
    """Numbers of classes and of features; 0 before `for_model`."""

    classes: int = 0
    features: int = 0


class Server(NamedTuple):
    x: Vector  # the body
    stats: Vector
    head: Rows  # (N, H): the combined head of each agent
    centroids: Rows  # (classes, D), float64
    seen: Tensor  # (classes,), float64: 1 for classes with a centroid
    alpha: Tensor  # (N, N), float64


class Agents(NamedTuple):
    y: Rows  # the trained model
    own_stats: Rows


class Down(NamedTuple):
    x: Rows
    stats: Rows
    head: Rows
    centroids: Tensor  # (N, classes, D)
    seen: Tensor  # (N, classes)


class Local(NamedTuple):
    body: Rows
    head: Rows
    stats: Rows
    body_velocity: Rows
    head_velocity: Rows
    centroids: Tensor
    seen: Tensor
    counts: Tensor  # (N, classes), this and the two following fields: of all samples, before training
    sums: Tensor  # (N, classes, D)
    squares: Tensor  # (N,)
    trained_counts: Tensor  # (N, classes), this and the following field: of the steps that train the body
    trained_sums: Tensor  # (N, classes, D)


class Up(NamedTuple):
    dy: Rows  # of the body
    stats: Rows
    head: Rows
    means: Rows  # (N, classes * D): p_k times the mean feature of class k
    variance: Rows  # (N, 1)
    counts: Rows  # (N, classes)
    sums: Rows  # (N, classes * D)


class Info(NamedTuple):
    pass


def class_sums(classes: Tensor, values: Tensor) -> Tensor:
    """Return (N, classes, D): the sum of the features of each class; classes is one-hot (N, B, classes)."""
    if len(classes) == 1:  # a stack of one sums in another order; results must not depend on the stack
        return class_sums(classes.repeat(2, 1, 1), values.repeat(2, 1, 1))[:1]
    return torch.bmm(classes.transpose(1, 2), values)


def head_weights(means: Rows, variance: Tensor, usable: Tensor) -> Tensor:
    """Return alpha (N, N): row i minimises alpha^T (diag(V) + B_i) alpha over the simplex of the usable agents."""
    others = [means - row for row in means]
    programs = torch.stack([gap @ gap.T for gap in others]) + torch.diag(variance.clamp(min=LEAST_VARIANCE))
    return least_quadratic(programs, usable.expand(len(means), -1))


def least_quadratic(programs: Tensor, usable: Tensor) -> Tensor:
    """Return for each positive definite Q the point of the simplex where a^T Q a is least.

    It is proportional to the b >= 0 with Q b >= 1 and b (Q b - 1) = 0, which is found by exchanging all wrong indices
    between the positive and the zero entries of b, or only the last one if this makes no progress (block pivoting).
    """
    positive, size = usable, programs.shape[-1]
    fewest = torch.full_like(usable[:, 0], size + 1, dtype=torch.int64)
    patience = torch.full_like(fewest, PATIENCE)
    numbers = torch.arange(size, device=programs.device)
    b = _solved(programs, positive)
    for _ in range(PIVOTS):
        excess = (programs @ b[:, :, None]).squeeze(2) - 1
        wrong = torch.where(positive, b < 0, usable & (excess < -SLACK))
        count = wrong.sum(dim=1)
        better = count < fewest
        patience = torch.where(better, PATIENCE, patience - 1)
        fewest = torch.minimum(fewest, count)
        last = numbers == torch.where(wrong, numbers, -1).max(dim=1, keepdim=True).values
        positive = positive ^ torch.where((better | (patience > 0))[:, None], wrong, wrong & last)
        b = _solved(programs, positive)
    b = torch.where(usable, b.clamp(min=0), 0.0)
    return b / b.sum(dim=1, keepdim=True).clamp(min=TINY)


def _solved(programs: Tensor, positive: Tensor) -> Tensor:
    """Return b with Q b = 1 where positive, and 0 elsewhere."""
    inside = positive[:, :, None] & positive[:, None]
    system = torch.where(inside, programs, 0.0) + torch.diag_embed((~positive).double())
    return torch.linalg.solve(system, positive.double()[:, :, None]).squeeze(2)  # type: ignore[no-any-return]


@final
@dataclass(frozen=True)
class FedPAC:
    """A model for every agent: aligned features, and a combination of the heads that help it."""

    about: ClassVar[About] = About(
        name="fedpac",
        title="FedPAC",
        trains_model_for="each agent",
        in_words="a shared network with aligned features, and last layers combined from agents with similar data",
        cite="Xu et al., ICLR 2023",
        order=250,
    )

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of the head's gradient and of the body's gradient; 0 turns clipping off."""
    lam: float = parameter(1.0, at_least(0), search={"low": 0.01, "high": 10.0, "log": True})
    """Strength of the alignment of features with the class means of all agents; 0 turns it off."""
    heads: Literal["combined", "own"] = parameter("combined", server_side=True)
    """Head with which an agent starts a round: the combination of all heads, or its own."""
    head_share: float = parameter(0.5, fraction())
    """Share of a round's steps that train the head, before the body; at least one step, unless it is 0."""
    used: Literal["trained", "mixed"] = "trained"
    """The agent's model: trained (after local training), or mixed (from which the next round starts)."""
    weighting: Weighting = parameter("samples", server_side=True)
    """Weight agents by their number of samples in the body, as the authors do, or equally."""
    parts: Parts = model_dependent(Parts())
    shape: HeadShape = model_dependent(HeadShape())
    rehearsed: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def for_model(self, layers: Layers) -> FedPAC:
        last = layers.last_linear
        if last is None or last.outputs < 2:
            raise WaffleError("fedpac: expected a model whose last linear layer has an output per class")
        parts = partial_sharing.parts(layers, {last.name})
        return replace(self, parts=parts, shape=HeadShape(last.outputs, last.features))

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        body, head = cut(net.params, self.parts.params)
        centroids = torch.zeros(self.shape, dtype=torch.float64, device=body.device)
        alpha = torch.eye(agents, dtype=torch.float64, device=body.device)
        server = Server(body, net.stats, head.repeat(agents, 1), centroids, centroids[:, 0], alpha)
        return server, Agents(*broadcast_to(net, agents))

    def broadcast(self, server: Server, agents: int) -> Down:
        rows = broadcast_to(Net(server.x, server.stats), agents)
        return Down(*rows, server.head, server.centroids.expand(agents, -1, -1), server.seen.expand(agents, -1))

    def begin(self, down: Down, agents: Agents) -> Local:
        velocities = self.sgd.zero_velocity(down.x), self.sgd.zero_velocity(down.head)
        counts, sums = torch.zeros_like(down.seen), torch.zeros_like(down.centroids)
        known = down.centroids, down.seen
        return Local(down.x, down.head, down.stats, *velocities, *known, counts, sums, counts[:, 0], counts, sums)

    def rehearse(self, local: Local, grad: Grad) -> Local:
        """Measure the features of all samples under the received body."""
        features, classes, values = self._features(local, grad)
        weighted = classes * features.weight.double()[:, :, None]
        squares = (features.weight.double() * values.square().sum(dim=2)).sum(dim=1)
        return local._replace(
            counts=local.counts + weighted.sum(dim=1),
            sums=local.sums + class_sums(weighted, values),
            squares=local.squares + squares,
        )

    def _features(self, local: Local, grad: Grad) -> tuple[Features, Tensor, Tensor]:
        """Return the features of a mini-batch, its one-hot labels and the values of the features, in float64."""
        features = grad.features(join(local.body, local.head, self.parts.params), local.stats)
        numbers = torch.arange(self.shape.classes, device=features.labels.device)
        return features, (features.labels[:, :, None] == numbers).double(), features.values.double()

    def step(self, local: Local, grad: Grad) -> Local:
        features, classes, values = self._features(local, grad)
        labels = features.labels[:, :, None].expand(-1, -1, self.shape.features)
        centroids, known = local.centroids.gather(1, labels), local.seen.gather(1, features.labels)
        pull = 2 * self.lam / self.shape.features * known[:, :, None] * (values - centroids)
        y = join(local.body, local.head, self.parts.params)
        g, stats = grad(y, local.stats, pull.to(y.dtype) if self.lam else None)
        g_body, g_head = cut(g, self.parts.params)
        body, body_velocity = self.sgd.step(local.body, local.body_velocity, g_body, clip=self.clip)
        head, head_velocity = self.sgd.step(local.head, local.head_velocity, g_head, clip=self.clip)
        on_head = grad.t < self._head_steps(grad.steps)
        single_step = grad.steps == 1  # a single step trains both parts
        trains_head, trains_body = (on_head | single_step)[:, None], (~on_head | single_step)[:, None]
        weighted = classes * (features.weight.double() * trains_body)[:, :, None]
        return local._replace(
            body=torch.where(trains_body, body, local.body),
            head=torch.where(trains_head, head, local.head),
            stats=stats,
            body_velocity=torch.where(trains_body, body_velocity, local.body_velocity),
            head_velocity=torch.where(trains_head, head_velocity, local.head_velocity),
            trained_counts=local.trained_counts + weighted.sum(dim=1),
            trained_sums=local.trained_sums + class_sums(weighted, values),
        )

    def _head_steps(self, steps: Tensor) -> Tensor:
        turns = (self.head_share * steps).floor()
        return turns.clamp(min=1) if self.head_share else turns

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        n = local.counts.sum(dim=1).clamp(min=1)
        means = (local.sums / n[:, None, None]).flatten(1)
        variance = (local.squares / n - means.square().sum(dim=1)) / n
        measured = means, variance[:, None], local.trained_counts, local.trained_sums.flatten(1)
        y = join(local.body, local.head, self.parts.params)
        return Agents(y, local.stats), Up(local.body - down.x, local.stats, local.head, *measured)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        shared = fedavg.Server(server.x, server.stats)
        (x, stats), _ = fedavg.aggregate(shared, fedavg.Up(up.dy, up.stats), now, self.weighting)
        received = now.received[:, None]
        own = torch.eye(len(up.head), dtype=torch.float64, device=up.head.device)
        alpha = own
        if self.heads == "combined":
            found = head_weights(up.means, up.variance.squeeze(1), now.received)
            alpha = torch.where(received, found, own)
        head = torch.where(received, (alpha @ up.head.double()).to(server.head.dtype), server.head)
        counts = weighted_sum(now.received.double(), up.counts)
        sums = weighted_sum(now.received.double(), up.sums).view(self.shape)
        some = counts[:, None] > 0
        centroids = torch.where(some, sums / counts.clamp(min=1)[:, None], server.centroids)
        return Server(x, stats, head, centroids, torch.where(counts > 0, 1.0, server.seen), alpha), Info()

    def relations(self, server: Server) -> Tensor:
        return server.alpha

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        if self.used == "trained":
            return Net(agents.y, agents.own_stats)
        body, stats = broadcast_to(Net(server.x, server.stats), count)
        return Net(join(body, server.head.expand(count, -1), self.parts.params), stats)
