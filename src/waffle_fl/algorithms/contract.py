"""The contract every algorithm keeps, and the few lines of arithmetic they share.

A model is a flat vector (P,); the agents of a federation are the rows of a matrix (N, P). The state of an algorithm is
split by who holds it, and the names of the types are the privacy story:

    Server   stays at the server            Down   one row an agent: what travels to it
    Agents   row i never leaves agent i     Up     one row an agent: what travels back
    Local    row i while agent i trains     Info   diagnostics for the record, never read again
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from waffle_fl.constraints import above, at_least, below_one, check_fields, parameter, parameters_of
from waffle_fl.models.flat import Net as Net

Vector: TypeAlias = Tensor  # (P,)
Rows: TypeAlias = Tensor  # (N, P)
Weights: TypeAlias = Tensor  # (N,), float64
State: TypeAlias = Any  # a NamedTuple of tensors, private to its algorithm

TINY = 1e-300
NEARLY_EQUAL = 1e-12
LR = {"low": 0.01, "high": 0.5, "log": True}  # what a search goes through by default: docs/tune.md
CLIP = [0.0, 0.5, 1.0, 2.0, 5.0]
BLOCK = 1 << 20  # numbers at a time that a CPU takes from its caches, not from its memory


@dataclass(frozen=True)
class Grad:
    """Mini-batch gradient of each row's own loss, and the normalisation statistics after that forward pass.

    A row may have several models: then all rows' first models come first, all second ones after them. Where in its
    round the mini-batch stands is told in tensors, so that a captured graph can count.
    """

    gradient: Callable[[Rows, Rows], Net]
    t: Tensor  # (1,): the steps that were made before this one
    steps: Tensor  # (N,): K_i, of how many

    def __call__(self, params: Rows, stats: Rows) -> Net:
        return self.gradient(params, stats)


class Round(NamedTuple):
    """What the server knows of a round besides the updates."""

    r: int  # 1-based, as in the paper
    of: int  # R
    alice: Tensor  # i*, a number
    received: Tensor  # (N,) bool: the agents whose update arrived and was admitted
    intact: Tensor  # (N,) bool: those of them whose update was taken as it was sent, not clipped
    samples: Tensor  # (N,) registered sample counts
    steps: Tensor  # (N,) K_i, the mini-batches that the plan gives each agent
    batch_size: int
    suspect: Tensor | None = None  # (N,) bool: those that a guard found out, absent ones not among them; None: no guard


@dataclass(frozen=True)
class About:
    """What commands, tables and pages say of a method; the first line of its class's docstring is its summary."""

    name: str
    """On the command line and in files."""
    title: str
    """In tables and charts."""
    trains_model_for: Literal["Alice", "each agent", "all agents"]
    """Whose model it trains: one for Alice, one for each agent or cluster, one for all."""
    in_words: str
    """What the model is, for the decision page: "a model of its own, held near one model for everybody"."""
    cite: str = ""
    """Authors, venue and year of the publication."""
    order: int = 1000
    """Its place in tables."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """What `waffle tune` searches, where the `search` of single parameters cannot say it."""


class Algorithm(Protocol):
    """Implementations are final, frozen dataclasses of hyperparameters; every function is pure.

    `begin`, `step` and `finish` are row-local: row i reads row i alone. So an engine may loop over rows, stack them,
    stack the rows of many federations, compile `step`, or run row i in a hospital; the algorithm cannot tell.
    One whose `aggregate` reads who Alice is says so by `for_alice = True`; others train alike for every Alice.
    `hooks.py` has the optional functions. `about` describes a method of this package; elsewhere it is optional.
    """

    @property
    def sgd(self) -> SGD: ...
    def init(self, net: Net, agents: int) -> tuple[State, State]: ...
    def broadcast(self, server: State, agents: int) -> State: ...
    def begin(self, down: State, agents: State) -> State: ...
    def step(self, local: State, grad: Grad) -> State: ...
    def finish(self, down: State, agents: State, local: State) -> tuple[State, State]: ...
    def aggregate(self, server: State, up: State, now: Round) -> tuple[State, State]: ...
    def personal(self, server: State, agents: State, count: int) -> Net: ...


@dataclass(frozen=True)
class SGD:
    """Mini-batch SGD with momentum and weight decay; agents reset the velocity in every round, or keep it."""

    lr: float = parameter(0.1, above(0))
    momentum: float = parameter(0.0, below_one())
    weight_decay: float = parameter(0.0, at_least(0))
    momentum_between_rounds: Literal["reset", "keep"] = "reset"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def keeps_velocity(self) -> bool:
        """Is the velocity part of an agent's state?"""
        return self.momentum > 0 and self.momentum_between_rounds == "keep"

    def step(
        self, y: Rows, velocity: Rows, g: Rows, correction: Rows | None = None, clip: float = 0.0
    ) -> tuple[Rows, Rows]:
        """One step. A control variate's correction joins after momentum has amplified g: docs/paper.md, section 3.

        No step is longer than what momentum makes of gradients of norm `clip`.
        """
        if self.weight_decay:
            g = torch.add(g, y, alpha=self.weight_decay)
        if self.momentum:
            velocity = g = torch.add(g, velocity, alpha=self.momentum)
        if correction is not None:
            g = g + correction
        if clip:
            limit = clip / (1 - self.momentum)
            scale = limit / g.norm(dim=1, keepdim=True).clamp(min=limit)
            return torch.addcmul(y, g, scale, value=-self.lr), velocity
        return torch.add(y, g, alpha=-self.lr), velocity

    def zero_velocity(self, y: Rows) -> Rows:
        """A velocity of zero; without momentum it takes no memory."""
        return torch.zeros_like(y) if self.momentum else y[:, :0]


def hyperparameters(algorithm: type[Algorithm]) -> list[str]:
    """What a user may set of an algorithm besides its optimiser."""
    return [name for name in parameters_of(algorithm) if name != "sgd"]


def check_agents(algorithm: Algorithm, agents: int) -> None:
    """Raise a WaffleError where the algorithm's hyperparameters do not fit a federation of this many agents."""
    check = getattr(algorithm, "check_agents", None)
    if check:
        check(agents)


def training_key(algorithm: Algorithm) -> tuple[Any, ...]:
    """Two algorithms with equal keys train their rows alike, whatever their servers do.

    An algorithm whose agents do exactly what another's do names that one in `trains_as`.
    """
    algorithm = getattr(algorithm, "inner", algorithm)  # whether velocities are kept is a field of `sgd`
    fields = dataclasses.fields(algorithm)  # type: ignore[arg-type]
    settings = ((f.name, getattr(algorithm, f.name)) for f in fields if not f.metadata.get("server_side"))
    return (getattr(algorithm, "trains_as", type(algorithm)), *settings)


def gradients(grad: Grad, *nets: Net) -> list[Net]:
    """Several models a row, differentiated at once."""
    params, stats = grad(torch.cat([net.params for net in nets]), torch.cat([net.stats for net in nets]))
    return [Net(*part) for part in zip(params.chunk(len(nets)), stats.chunk(len(nets)), strict=True)]


def broadcast_to(net: Net, agents: int) -> Net:
    """The same model for every agent, as rows that share memory."""
    return Net(net.params.expand(agents, -1), net.stats.expand(agents, -1))


def inner(a: Rows, b: Rows) -> Tensor:
    """<a_i, b_i> of each row."""
    if a.is_cuda:  # whose matrix products may be rounded to TF32
        return (a.double() * b.double()).sum(dim=1).to(a.dtype)
    if len(a) == 1:  # a stack of one would add up in another order: its bits must not depend on company
        return inner(a.repeat(2, 1), b.repeat(2, 1))[:1]
    return torch.bmm(a[:, None], b[:, :, None]).flatten()


def blocks(rows: Rows) -> tuple[Rows, ...]:
    """The rows, on a CPU few at a time, so that a thousand agents need no copy of all their numbers in float64."""
    return (rows,) if rows.is_cuda else torch.split(rows, max(1, BLOCK // max(1, rows.shape[1])))


def lengths(rows: Rows, origin: Vector | None = None) -> Weights:
    """|rows_i|, or |rows_i - origin|, in float64."""
    parts = (part.double() for part in blocks(rows))
    return torch.cat([(part if origin is None else part - origin.double()).norm(dim=1) for part in parts])


def cosines(rows: Rows, vector: Vector) -> Weights:
    """Of each row with the vector, in float64; 0 where one of them is 0."""
    products = torch.cat([torch.mv(part.double(), vector) for part in blocks(rows)])
    return products.div((lengths(rows) * vector.norm()).clamp(min=TINY)).clamp(-1, 1)  # whatever rounding made of it


def angular_distance(rows: Rows, vector: Vector) -> Weights:
    """|rows_i / |rows_i| - vector / |vector||: how far directions are apart; a row without one is at right angles."""
    gap = 1 - cosines(rows, vector.double())  # of a cosine of 1
    return torch.where(gap <= NEARLY_EQUAL, 0.0, 2 * gap).sqrt()  # not what rounding left of the same way


def weighted_sum(weights: Weights, rows: Rows) -> Vector:
    """Sum of weights_i rows_i in float64; a row of weight 0 is left out, whatever it holds."""
    parts = blocks(rows)
    shares = torch.split(weights, len(parts[0]))
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for w, part in zip(shares, parts, strict=True):
        total = total + w @ torch.where(w[:, None] != 0, part, 0.0).double()
    return total


def uniform(received: Tensor) -> Weights:
    """Equal weights for the agents that were heard."""
    return normalised(received.double(), received)


def normalised(weights: Weights, fallback: Tensor) -> Weights:
    """Weights scaled to sum to 1; where they sum to nothing finite and positive, equal weights over `fallback`."""
    weights = torch.where(weights > 0, weights, 0.0)
    total = weights.sum()
    usable = torch.isfinite(total) & (total > 0)
    equal = fallback.double() / fallback.sum().clamp(min=1)
    return torch.where(usable, weights / torch.where(usable, total, 1.0), equal)


def one_hot(agent: Tensor, agents: int) -> Weights:
    """All weight on one agent: e_i."""
    return (torch.arange(agents, device=agent.device) == agent).double()


def row_of(rows: Rows, agent: Tensor) -> Vector:
    """One agent's row, found without asking the device for its number."""
    return rows.index_select(0, agent.view(1)).squeeze(0)


def apply_update(x: Vector, weights: Weights, dy: Rows, eta_g: float = 1.0) -> Vector:
    """x + eta_g * sum_i weights_i dy_i."""
    return (x.double() + eta_g * weighted_sum(weights, dy)).to(x.dtype)


def averaged(stats: Vector, weights: Weights, rows: Rows) -> Vector:
    """Normalisation statistics follow the same weights as the updates."""
    return weighted_sum(weights, rows).to(stats.dtype) if len(stats) else stats
