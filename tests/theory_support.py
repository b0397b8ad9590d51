"""Quadratics and checks that the tests of docs/theory.md and docs/theory-weights.md share."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from paper import drift
from paper.quadratics import (
    Quadratics,
    play,
)
from torch import Tensor

from waffle_fl.algorithms import Net, Round
from waffle_fl.algorithms.scaffold import Agents
from waffle_fl.algorithms.waffle_paper import calc_weights

PAGES = [Path(__file__).parent.parent / "docs" / name for name in ("theory.md", "theory-weights.md")]
STATEMENT = re.compile(
    r"^\*\*(\d+)\. (?:Theorem|Remark|Measured)\.\*\* (.+?)\s+\(`(test_\w+)`\)$", re.MULTILINE | re.DOTALL
)
START = torch.zeros(2, dtype=torch.float64)
DRIFT = Quadratics(torch.diag_embed(drift.CURVATURES), drift.OPTIMA)


def quadratics(seed: int = 0, agents: int = 3, size: int = 2, low: float = 0.1, high: float = 1.0) -> Quadratics:
    """Return quadratics with randomly rotated curvatures from `low` to `high`, both included, and optima around 0."""
    g = torch.Generator().manual_seed(seed)
    rotations = torch.linalg.qr(torch.randn(agents, size, size, generator=g, dtype=torch.float64)).Q
    h = low * (high / low) ** torch.rand(agents, size, generator=g, dtype=torch.float64)
    h[0, 0], h[-1, -1] = high, low
    curvatures = rotations @ torch.diag_embed(h) @ rotations.mT
    return Quadratics((curvatures + curvatures.mT) / 2, 3 * torch.randn(agents, size, generator=g, dtype=torch.float64))


class Case(NamedTuple):
    """A random problem: curvatures do not commute; agents, dimensions and weights differ between seeds."""

    problem: Quadratics
    weights: Tensor  # positive, sum to 1
    draw: random.Random
    generator: torch.Generator

    @property
    def agents(self) -> int:
        return len(self.problem.optima)

    @property
    def size(self) -> int:
        return self.problem.optima.shape[1]

    @property
    def zero(self) -> Tensor:
        return torch.zeros(self.size, dtype=torch.float64)

    @property
    def eye(self) -> Tensor:
        return torch.eye(self.size, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def some_weights(self, *rows: int) -> Tensor:
        return torch.softmax(1.5 * self.normal(*rows, self.agents), dim=-1)

    def some_steps(self, most: int = 8) -> list[int]:
        return [self.draw.randint(1, most) for _ in range(self.agents)]

    def gradients(self, x: Tensor) -> Tensor:
        return self.problem.grad(x.expand(self.agents, -1), x).params

    def powers(self, lr: float, K: int) -> Tensor:
        """Return (I - lr H_i)^K of each agent."""
        return torch.linalg.matrix_power(self.eye - lr * self.problem.curvatures, K)

    def rest(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, c and c_i at the fixed point of anchored WAFFLE with these weights."""
        goal = self.problem.minimiser(weights)
        return goal, self.zero, self.gradients(goal)


def random_case(seed: int, low: float = 0.1, agents: tuple[int, int] = (2, 5), sizes: tuple[int, int] = (1, 4)) -> Case:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    problem = quadratics(seed, draw.randint(*agents), draw.randint(*sizes), low)
    weights = torch.softmax(1.5 * torch.randn(len(problem.optima), generator=generator, dtype=torch.float64), dim=0)
    return Case(problem, weights, draw, generator)


def seeds(examples: int) -> Callable[[Callable[..., None]], Any]:
    """Run a test on this many seeds."""
    return lambda test: settings(max_examples=examples)(given(seed=st.integers(0, 1_000_000))(test))


def same_curvature(problem: Quadratics) -> Quadratics:
    return problem._replace(curvatures=problem.curvatures[:1].expand_as(problem.curvatures))


def same_optimum(problem: Quadratics) -> Quadratics:
    return problem._replace(optima=problem.optima[:1].expand_as(problem.optima))


def trained(algorithm: Any, problem: Quadratics, steps: int | Sequence[int], rounds: int = 250, **options: Any) -> Any:
    """Return the server after the last round, from a model of zeros."""
    each = [steps] * len(problem.optima) if isinstance(steps, int) else steps
    *_, (server, _, _) = play(algorithm, problem.grad, torch.zeros_like(problem.optima[0]), each, rounds, **options)
    return server


def state_at(algorithm: Any, x: Tensor, c: Tensor, c_i: Tensor) -> Any:
    """Return the states of SCAFFOLD's or WAFFLE's server and agents with this model and these control variates."""
    server, _ = algorithm.init(Net(x, x[:0]), len(c_i))
    return server._replace(x=x, c=c, c_i=c_i), Agents(c_i)


def round_from(
    algorithm: Any, problem: Quadratics, state: Sequence[Tensor], steps: Sequence[int], weights: Tensor
) -> tuple[Any, Tensor]:
    """Return the server after one round from these x, c and c_i, and the updates."""
    start = state_at(algorithm, *state)
    ((server, up, _),) = play(algorithm, problem.grad, state[0], steps, 1, weights, state=start)
    return server, up.dy


def flat(server: Any) -> Tensor:
    return torch.cat([server.x, server.c, server.c_i.flatten()])


def close(a: Tensor, b: Tensor, atol: float = 1e-9) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=atol)


def round_of(r: int, of: int, agents: int, steps: int = 1) -> Round:
    broadcast_to, each = torch.ones(agents, dtype=torch.bool), torch.full((agents,), steps)
    return Round(r, of, torch.tensor(0), broadcast_to, broadcast_to, each, each, 1)


def raw_weights(dy: Tensor, omega: float, psi: float, denominator: str = "max", r: int = 1) -> Tensor:
    """Return alpha before smoothing, of updates in a run of 100 rounds. Agent 0 is Alice."""
    past = torch.full((2, len(dy)), 1 / len(dy), dtype=torch.float64)
    return calc_weights(dy, past, round_of(r, 100, len(dy)), omega, psi, denominator)[1]  # type: ignore[arg-type]


def updates_at(distances: Sequence[float], seed: int) -> Tensor:
    """Return updates in one to five dimensions with Alice's first and the others at these distances from hers."""
    g = torch.Generator().manual_seed(seed)
    size = random.Random(seed).randint(1, 5)
    directions = torch.nn.functional.normalize(torch.randn(len(distances), size, generator=g, dtype=torch.float64))
    return torch.cat(
        [torch.zeros_like(directions[:1]), torch.tensor(distances, dtype=torch.float64)[:, None] * directions]
    )
