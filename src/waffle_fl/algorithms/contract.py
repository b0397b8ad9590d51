"""The interface that every algorithm implements, and the arithmetic that algorithms share.

A model is a flat vector (P,); the agents of a federation are the rows of a matrix (N, P). The state of an algorithm is
split by where it is stored. The type names show what leaves an agent:

    Server   stays at the server            Down   one row per agent: sent to the agent
    Agents   row i never leaves agent i     Up     one row per agent: sent to the server
    Local    row i while agent i trains     Info   diagnostics for the record, never read by the algorithm
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from waffle_fl.constraints import (
    above,
    at_least,
    below_one,
    between,
    check_fields,
    parameter,
    parameters_of,
    share,
    unless,
)
from waffle_fl.models.flat import Batch, FlatModel
from waffle_fl.models.flat import Net as Net

Vector: TypeAlias = Tensor  # (P,)
Rows: TypeAlias = Tensor  # (N, P)
Weights: TypeAlias = Tensor  # (N,), float64
State: TypeAlias = Any  # a NamedTuple of tensors, private to its algorithm
AsMethod: TypeAlias = Literal["method"]  # an option of the optimiser that the method sets itself
AS_METHOD: AsMethod = "method"
BetweenRounds: TypeAlias = Literal["reset", "keep", "average"]  # what becomes of the velocity after a round

TINY = 1e-300
NEARLY_EQUAL = 1e-12
LR = {"low": 0.01, "high": 0.5, "log": True}  # default search space of `waffle tune`: docs/tune.md
CLIP = [0.0, 0.5, 1.0, 2.0, 5.0]
ADAM_EPSILON = 1e-8  # as in torch.optim.Adam
BLOCK = 1 << 20  # numbers per block, so that a block fits the CPU cache


class Features(NamedTuple):
    """Features of each row's mini-batch: the inputs of the model's last linear layer."""

    values: Tensor  # (N, B, D)
    labels: Tensor  # (N, B)
    weight: Tensor  # (N, B), 0 for padding


@dataclass(frozen=True)
class Grad:
    """Mini-batch gradient of each row's own loss, and the normalisation statistics after that forward pass.

    Rows with several models are ordered by model: the first models of all rows, then the second models of all rows.
    The position in the round is given as tensors, so that a captured CUDA graph can update it.
    """

    gradient: Callable[..., Net]
    t: Tensor  # (1,): steps completed before this one
    steps: Tensor  # (N,): K_i, steps in the round
    features_of: Callable[[Rows, Rows], Features] | None = None

    @classmethod
    def on(cls, model: FlatModel, batch: Batch, t: Tensor, steps: Tensor, plain: bool = False) -> Grad:
        """Return the gradient on a mini-batch; `plain` computes it by autograd on the module, row by row."""

        def features_of(params: Rows, stats: Rows) -> Features:
            return Features(model.training_features(params, stats, batch, plain), batch.y, batch.weight)

        return cls(partial(model.plain_grad if plain else model.grad, batch=batch), t, steps, features_of)

    def __call__(self, params: Rows, stats: Rows, pull: Tensor | None = None) -> Net:
        """Return gradient and statistics; `pull` (N, B, D) adds <pull, features> to the loss of each sample."""
        return self.gradient(params, stats) if pull is None else self.gradient(params, stats, pull=pull)

    def features(self, params: Rows, stats: Rows) -> Features:
        """Return the features of the mini-batch in this forward pass, with the labels of the samples."""
        if self.features_of is None:
            raise TypeError("this Grad was constructed without features: use Grad.on(model, batch, t, steps)")
        return self.features_of(params, stats)


class Round(NamedTuple):
    """What the server knows about a round in addition to the updates."""

    r: int  # 1-based, as in the paper
    of: int  # R
    alice: Tensor  # i*, the index of Alice
    received: Tensor  # (N,) bool: agents whose update arrived and was accepted
    intact: Tensor  # (N,) bool: received agents whose update was used as sent, not clipped
    samples: Tensor  # (N,) registered sample counts
    steps: Tensor  # (N,) K_i, mini-batches planned for each agent
    batch_size: int
    suspect: Tensor | None = None  # (N,) bool: received agents that the guard flagged; None: no guard
    asked: Tensor | None = None  # (N,) bool: agents that take part in this round; None: all
    cohort: Tensor | None = None  # (N,) numbers of the agents, ascending, if they are a cohort; None: all agents


class Angles(NamedTuple):
    """How several vectors of each agent lie to Alice's, for methods with `compares_directions`."""

    cosines: Tensor  # (N, L); 0 where a vector is 0
    lengths: Tensor  # (N, L)


class Seen(NamedTuple):
    """What a server needs to know about the updates of a round before it weighs them."""

    distances: Weights  # of each agent from Alice, in what the method compares; not read where nothing was received
    length: Tensor | None = None  # of Alice's update, for methods with `reads_length`
    angles: Angles | None = None
    totals: Mapping[str, float] = {}  # lengths of the sums with `first_weights`, by name; without those not computed


@dataclass(frozen=True)
class About:
    """Description of a method for commands, tables and pages. Its summary is the first line of the class docstring."""

    name: str
    """Name on the command line and in files."""
    title: str
    """Name in tables and charts."""
    trains_model_for: Literal["Alice", "each agent", "all agents"]
    """Which models it trains: one for Alice, one per agent or cluster, or one for all agents."""
    in_words: str
    """What the model is, for the decision page: "a personal model, kept close to a shared global model"."""
    cite: str = ""
    """Authors, venue and year of the publication."""
    order: int = 1000
    """Sort key in tables."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """Search space of `waffle tune`, where the `search` of single parameters cannot express it."""


class Algorithm(Protocol):
    """Interface of an algorithm: a final, frozen dataclass of hyperparameters whose functions are all pure.

    `begin`, `step` and `finish` are row-local: row i reads row i only. An engine may therefore loop over rows, stack
    them, stack the rows of many federations, compile `step`, or run row i at a remote site; results do not change.
    Set `for_alice = True` if `aggregate` depends on which agent is Alice; other methods train the same for every Alice.
    `hooks.py` defines the optional functions. `about` is required in this package and optional elsewhere.
    """

    @property
    def sgd(self) -> Optimiser:
        """The optimiser of the local steps."""

    def init(self, net: Net, agents: int) -> tuple[State, State]:
        """Return the states of the server and of the agents before the first round."""

    def broadcast(self, server: State, agents: int) -> State:
        """Return what the server sends, one row per agent."""

    def begin(self, down: State, agents: State) -> State:
        """Return the state of local training before the first mini-batch."""

    def step(self, local: State, grad: Grad) -> State:
        """Return the state of local training after one more mini-batch."""

    def finish(self, down: State, agents: State, local: State) -> tuple[State, State]:
        """Return the agents' states after the round, and what they send to the server."""

    def aggregate(self, server: State, up: State, now: Round) -> tuple[State, State]:
        """Return the server's state after the round, and diagnostics for the record."""

    def personal(self, server: State, agents: State, count: int) -> Net:
        """Return the model that each agent would use, one row per agent."""


def moved(y: Rows, direction: Rows, lr: float | Tensor, scale: Tensor | None = None) -> Rows:
    """Return y - lr * scale * direction; lr is a number, or a column of numbers if it changes from round to round."""
    if isinstance(lr, Tensor):
        return torch.addcmul(y, direction, lr if scale is None else lr * scale, value=-1)
    if scale is None:
        return torch.add(y, direction, alpha=-lr)
    return torch.addcmul(y, direction, scale, value=-lr)


@dataclass(frozen=True)
class SGD:
    """Mini-batch SGD with momentum and weight decay. The velocity is reset every round, or kept between rounds.

    lr is multiplied by `lr_decay` after every round (`lr_decay.py`). The models that agents use are means over the last
    share `averaging` of the rounds (`averaged_models.py`).
    """

    lr: float = parameter(0.1, above(0))
    momentum: float = parameter(0.0, below_one())
    weight_decay: float = parameter(0.0, at_least(0))
    momentum_between_rounds: BetweenRounds = "reset"
    clip: float | AsMethod = parameter(AS_METHOD, unless(AS_METHOD, at_least(0)))
    lr_decay: float = parameter(1.0, share())
    averaging: float = parameter(0.0, between(0, 1))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def keeps_velocity(self) -> bool:
        """Whether the velocity is part of an agent's state."""
        return self.momentum > 0 and self.momentum_between_rounds == "keep"

    @property
    def averages_velocity(self) -> bool:
        """Whether the server averages the velocity."""
        return self.momentum > 0 and self.momentum_between_rounds == "average"

    def step(
        self, y: Rows, velocity: Rows, g: Rows, correction: Rows | None = None, clip: float = 0.0
    ) -> tuple[Rows, Rows]:
        """Return the model and velocity after one step.

        A control variate's correction is added after momentum has amplified g: docs/paper.md, section 3. The step is
        clipped to the norm that momentum produces from steady gradients of norm `clip`. The optimiser's own `clip`, if
        set, replaces this argument.
        """
        clip = clip if self.clip == AS_METHOD else self.clip
        if self.weight_decay:
            g = torch.add(g, y, alpha=self.weight_decay)
        if self.momentum:
            velocity = g = torch.add(g, velocity, alpha=self.momentum)
        if correction is not None:
            g = g + correction
        if clip:
            limit = clip / (1 - self.momentum)
            scale = limit / g.norm(dim=1, keepdim=True).clamp(min=limit)
            return moved(y, g, self.lr, scale), velocity
        return moved(y, g, self.lr), velocity

    def zero_velocity(self, y: Rows) -> Rows:
        """Return a velocity of zero. Without momentum it has no columns and uses no memory."""
        return torch.zeros_like(y) if self.momentum else y[:, :0]


@dataclass(frozen=True)
class Adam:
    """Adam with decoupled weight decay (AdamW). Its moments take the place of SGD's velocity, in one row per agent.

    With control variates, c_i is the mean Adam step of a round, as it is the mean amplified gradient with momentum.
    """

    lr: float = parameter(0.001, above(0))
    momentum: float = parameter(0.9, below_one())
    weight_decay: float = parameter(0.0, at_least(0))
    momentum_between_rounds: BetweenRounds = "reset"
    second: float = parameter(0.999, below_one())
    clip: float | AsMethod = parameter(AS_METHOD, unless(AS_METHOD, at_least(0)))
    lr_decay: float = parameter(1.0, share())
    averaging: float = parameter(0.0, between(0, 1))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def keeps_velocity(self) -> bool:
        """Whether the moments are part of an agent's state."""
        return self.momentum_between_rounds == "keep"

    @property
    def averages_velocity(self) -> bool:
        """Whether the server averages the moments."""
        return self.momentum_between_rounds == "average"

    def step(
        self, y: Rows, velocity: Rows, g: Rows, correction: Rows | None = None, clip: float = 0.0
    ) -> tuple[Rows, Rows]:
        """Return the model and the moments after one step; `clip` limits the norm of the gradient.

        The optimiser's own `clip`, if set, replaces this argument.
        """
        clip = clip if self.clip == AS_METHOD else self.clip
        if clip:
            g = g * (clip / g.norm(dim=1, keepdim=True).clamp(min=clip))
        size = y.shape[1]
        first, second, steps = velocity[:, :size], velocity[:, size:-1], velocity[:, -1:] + 1
        first = torch.lerp(g, first, self.momentum)
        second = torch.lerp(g * g, second, self.second)
        scale = (second / (1 - self.second**steps)).sqrt() + ADAM_EPSILON
        direction = first / (1 - self.momentum**steps) / scale
        if self.weight_decay:
            direction = torch.add(direction, y, alpha=self.weight_decay)
        if correction is not None:
            direction = direction + correction
        return moved(y, direction, self.lr), torch.cat([first, second, steps], dim=1)

    def zero_velocity(self, y: Rows) -> Rows:
        """Return moments of zero and a step count of zero."""
        return y.new_zeros(len(y), 2 * y.shape[1] + 1)


Optimiser: TypeAlias = SGD | Adam


def hyperparameters(algorithm: type[Algorithm]) -> list[str]:
    """Return the names of an algorithm's settings, except those of its optimiser."""
    return [name for name in parameters_of(algorithm) if name != "sgd"]


def check_agents(algorithm: Algorithm, agents: int) -> None:
    """Raise a WaffleError if the algorithm's hyperparameters do not fit a federation of this many agents."""
    check = getattr(algorithm, "check_agents", None)
    if check:
        check(agents)


def training_key(algorithm: Algorithm) -> tuple[Any, ...]:
    """Return a key that is equal for algorithms with identical local training, regardless of their aggregation.

    An algorithm whose agents train exactly as those of another algorithm names that one in `trains_as`.
    """
    algorithm = getattr(algorithm, "unwrapped", algorithm)  # the field `sgd` already tells which wrappers there are
    fields = dataclasses.fields(algorithm)  # type: ignore[arg-type]
    settings = ((f.name, getattr(algorithm, f.name)) for f in fields if not f.metadata.get("server_side"))
    return (getattr(algorithm, "trains_as", type(algorithm)), *settings)


def gradients(grad: Grad, *nets: Net) -> list[Net]:
    """Return the gradients of several models per row, computed in one call."""
    params, stats = grad(torch.cat([net.params for net in nets]), torch.cat([net.stats for net in nets]))
    return [Net(*part) for part in zip(params.chunk(len(nets)), stats.chunk(len(nets)), strict=True)]


def broadcast_to(net: Net, agents: int) -> Net:
    """Return the same model for every agent, as rows that share memory."""
    return Net(net.params.expand(agents, -1), net.stats.expand(agents, -1))


def inner(a: Rows, b: Rows) -> Tensor:
    """Return the inner product <a_i, b_i> of each row."""
    if a.is_cuda:  # its matrix products may be rounded to TF32
        return (a.double() * b.double()).sum(dim=1).to(a.dtype)
    if len(a) == 1:  # a stack of one sums in another order; results must not depend on the stack
        return inner(a.repeat(2, 1), b.repeat(2, 1))[:1]
    return torch.bmm(a[:, None], b[:, :, None]).flatten()


def blocks(rows: Rows) -> tuple[Rows, ...]:
    """Return the rows; on a CPU in small blocks, so that no float64 copy of all rows is needed at once."""
    return (rows,) if rows.is_cuda else torch.split(rows, block_size(rows))


def block_size(rows: Rows) -> int:
    """Return the number of rows in a block on a CPU."""
    return max(1, BLOCK // max(1, rows.shape[1]))


def lengths(rows: Rows, origin: Vector | None = None) -> Weights:
    """Return |rows_i|, or |rows_i - origin|, in float64."""
    parts = (part.double() for part in blocks(rows))
    return torch.cat([(part if origin is None else part - origin.double()).norm(dim=1) for part in parts])


def cosines(rows: Rows, vector: Vector) -> Weights:
    """Return the cosine of each row with the vector, in float64; 0 where the row or the vector is 0."""
    products = torch.cat([torch.mv(part.double(), vector) for part in blocks(rows)])
    return products.div((lengths(rows) * vector.norm()).clamp(min=TINY)).clamp(-1, 1)  # rounding may exceed 1


def angular_distance(rows: Rows, vector: Vector) -> Weights:
    """Return |rows_i / |rows_i| - vector / |vector||; a row of zeros counts as orthogonal to the vector."""
    gap = 1 - cosines(rows, vector.double())
    return torch.where(gap <= NEARLY_EQUAL, 0.0, 2 * gap).sqrt()  # equal directions differ only by rounding


def weighted_sum(weights: Weights, rows: Rows, agents: Tensor | None = None) -> Vector:
    """Return the sum of weights_i rows_i in float64. Rows of weight 0 are ignored, even if they are not finite.

    `agents` are the ascending numbers of the agents whose rows these are, if not all. The sum then has the bits of one
    over all agents in which the others weigh 0: rows of weight 0 change no bit within a block, so they can be left out,
    but a block of these rows must not span two blocks of all rows.
    """
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    if not len(total):
        return total
    sizes = [len(part) for part in blocks(rows)]
    if agents is not None and not rows.is_cuda:
        sizes = [len(list(same)) for _, same in groupby((agents // block_size(rows)).tolist())]
    for w, part in zip(torch.split(weights, sizes), torch.split(rows, sizes), strict=True):
        total = total + w @ torch.where(w[:, None] != 0, part, 0.0).double()
    return total


def uniform(received: Tensor) -> Weights:
    """Return equal weights for the agents whose update was received."""
    return normalised(received.double(), received)


def normalised(weights: Weights, fallback: Tensor) -> Weights:
    """Return weights scaled to sum to 1, or equal weights over `fallback` if their sum is not finite and positive."""
    weights = torch.where(weights > 0, weights, 0.0)
    total = weights.sum()
    usable = torch.isfinite(total) & (total > 0)
    equal = fallback.double() / fallback.sum().clamp(min=1)
    return torch.where(usable, weights / torch.where(usable, total, 1.0), equal)


def unless_absent(now: Round, new: Tensor, before: Tensor) -> Tensor:
    """Return the new rows of the agents that took part in the round, and the earlier rows of the others."""
    return new if now.asked is None else torch.where(now.asked.view(-1, *[1] * (new.ndim - 1)), new, before)


def one_hot(agent: Tensor, agents: int) -> Weights:
    """Return e_i: weight 1 for one agent, 0 for the others."""
    return (torch.arange(agents, device=agent.device) == agent).double()


def row_of(rows: Rows, agent: Tensor) -> Vector:
    """Return one agent's row, without copying its index from the device."""
    return rows.index_select(0, agent.view(1)).squeeze(0)


def apply_update(x: Vector, weights: Weights, dy: Rows, eta_g: float = 1.0, agents: Tensor | None = None) -> Vector:
    """Return x + eta_g * sum_i weights_i dy_i, over all agents or those with these numbers."""
    return shifted(x, weighted_sum(weights, dy, agents), eta_g)


def shifted(x: Vector, total: Vector, eta_g: float = 1.0) -> Vector:
    """Return x + eta_g * total, computed in float64."""
    return (x.double() + eta_g * total).to(x.dtype)


def averaged(stats: Vector, weights: Weights, rows: Rows, agents: Tensor | None = None) -> Vector:
    """Return the mean of normalisation statistics, with the weights of the updates."""
    return weighted_sum(weights, rows, agents).to(stats.dtype) if len(stats) else stats


def sums_of(
    weights: Mapping[str, Weights], rows: Mapping[str, Rows], agents: Tensor | None = None
) -> dict[str, Vector]:
    """Return the weighted sum of each part in float64, of all agents or of those with these numbers."""
    return {name: weighted_sum(weights[name], part, agents) for name, part in rows.items()}
