"""Quadratics and checks that the tests of docs/theory.md and docs/theory-weights.md share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from paper import drift
from paper.quadratics import (
    Quadratics,
    in_one_dimension,
    play,
)
from torch import Tensor

from waffle_fl.algorithms import Round
from waffle_fl.algorithms.waffle import calc_weights

PAGES = [Path(__file__).parent.parent / "docs" / name for name in ("theory.md", "theory-weights.md")]
STATEMENT = re.compile(r"^\*\*(\d+)\. (?:Theorem|Measured)\.\*\* (.+?)\s+\(`(test_\w+)`\)$", re.MULTILINE | re.DOTALL)
ALPHA = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
START = torch.zeros(2, dtype=torch.float64)
DRIFT = Quadratics(torch.diag_embed(drift.CURVATURES), drift.OPTIMA)
ONE_STEP_FLAT = in_one_dimension((1.0, 0.001))


def quadratics(seed: int = 0, agents: int = 3, size: int = 2, low: float = 0.1, high: float = 1.0) -> Quadratics:
    """Return quadratics with randomly rotated curvatures from `low` to `high`, both included, and optima around 0."""
    g = torch.Generator().manual_seed(seed)
    rotations = torch.linalg.qr(torch.randn(agents, size, size, generator=g, dtype=torch.float64)).Q
    h = low * (high / low) ** torch.rand(agents, size, generator=g, dtype=torch.float64)
    h[0, 0], h[-1, -1] = high, low
    curvatures = rotations @ torch.diag_embed(h) @ rotations.mT
    return Quadratics((curvatures + curvatures.mT) / 2, 3 * torch.randn(agents, size, generator=g, dtype=torch.float64))


def same_curvature(problem: Quadratics) -> Quadratics:
    return problem._replace(curvatures=problem.curvatures[:1].expand_as(problem.curvatures))


def trained(algorithm: Any, problem: Quadratics, steps: int | Sequence[int], rounds: int = 250, **options: Any) -> Any:
    """Return the server after the last round."""
    each = [steps] * len(problem.optima) if isinstance(steps, int) else steps
    *_, (server, _, _) = play(algorithm, problem.grad, START[: problem.optima.shape[1]], each, rounds, **options)
    return server


def close(a: Tensor, b: Tensor, atol: float = 1e-9) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=atol)


def round_of(r: int, of: int, agents: int, steps: int = 1) -> Round:
    broadcast_to, each = torch.ones(agents, dtype=torch.bool), torch.full((agents,), steps)
    return Round(r, of, torch.tensor(0), broadcast_to, broadcast_to, each, each, 1)


def weights_at(distances: Sequence[float], omega: float, denominator: str = "max") -> Tensor:
    """Return alpha before smoothing, with Alice at 0 and the others at these distances from her."""
    dy = torch.tensor([[0.0], *([d] for d in distances)], dtype=torch.float64)
    past = torch.full((2, len(dy)), 1 / len(dy), dtype=torch.float64)
    return calc_weights(dy, past, round_of(1, 100, len(dy)), omega, omega, denominator)[1]  # type: ignore[arg-type]
