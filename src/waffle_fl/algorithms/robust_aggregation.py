"""Robust rules in place of the mean: each turns the updates of a round into one, whatever a few of them hold.

A rule reads the rows of the agents that were heard and returns the aggregate and each agent's share in it, in float64.
Krum and its kin expect f malicious agents; where too few are heard for that many, they expect fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import (
    TINY,
    Rows,
    Vector,
    Weights,
    lengths,
    normalised,
    one_hot,
    uniform,
    weighted_sum,
)
from waffle_fl.call_syntax import build, read_call
from waffle_fl.errors import WaffleError

Rule: TypeAlias = Callable[[Rows, Tensor], tuple[Vector, Weights]]  # (dy, heard) -> (aggregate, shares)

WEISZFELD_STEPS = 16  # steps
SMOOTHING = 1e-6  # of the median length: nearer than this a row pulls no harder
CLIPPING_STEPS = 3


def krum(f: float = 1.0) -> Rule:
    """Blanchard et al. 2017: the one update whose n - f - 1 nearest others lie nearest (squared distances)."""
    expected = _agent_count("krum", f)

    def rule(dy: Rows, received: Tensor) -> tuple[Vector, Weights]:
        shares = one_hot(_krum_scores(dy, received, expected).argmin(), len(dy))
        return weighted_sum(shares, dy), shares

    return rule


def multi_krum(f: float = 1.0) -> Rule:
    """The mean of the n - f updates that Krum likes best."""
    expected = _agent_count("multi-krum", f)

    def rule(dy: Rows, received: Tensor) -> tuple[Vector, Weights]:
        rank = _krum_scores(dy, received, expected).argsort(stable=True).argsort(stable=True)
        shares = uniform(received & (rank < received.sum() - _tolerated(expected, received)))
        return weighted_sum(shares, dy), shares

    return rule


def trimmed_mean(f: float = 1.0) -> Rule:
    """Yin et al. 2018: in each coordinate the mean without its f largest and f smallest values."""
    expected = _agent_count("trimmed-mean", f)
    return lambda dy, received: _trimmed(dy, received, _tolerated(expected, received))


def median() -> Rule:
    """Yin et al. 2018: the median of each coordinate."""
    return lambda dy, received: _trimmed(dy, received, (received.sum() - 1).clamp(min=0) // 2)


def geometric_median() -> Rule:
    """The point with the least sum of distances, by smoothed Weiszfeld steps (Pillutla et al. 2022).

    Who lies where the steps begin holds them there, so they begin where the few cannot be alone: at the median of each
    coordinate, and not at zero.
    """

    def rule(dy: Rows, received: Tensor) -> tuple[Vector, Weights]:
        start, _ = median()(dy, received)
        return weiszfeld(dy, received, start, SMOOTHING * _median_of_received(lengths(dy), received), WEISZFELD_STEPS)

    return rule


def centered_clipping(radius: float = 1.0) -> Rule:
    """Karimireddy et al. 2021: the mean of what lies within a radius of a centre, which moves there, three times.

    Differs from the paper: updates are differences already, so the centre starts at zero in each round and nothing is
    remembered; and the radius is told in median lengths of the updates, so that it fits every model.
    """
    if not radius > 0:
        raise WaffleError(f"centered-clipping needs a radius above 0, got {radius:g}")
    return lambda dy, received: clipped_mean(dy, received, radius * _median_of_received(lengths(dy), received), CLIPPING_STEPS)


RULES: dict[str, Callable[..., Rule]] = {
    "krum": krum,
    "multi-krum": multi_krum,
    "trimmed-mean": trimmed_mean,
    "median": median,
    "geometric-median": geometric_median,
    "centered-clipping": centered_clipping,
}


@cache
def parse(text: str) -> Rule | None:
    """The rule that a text such as krum(3) names; None is the mean."""
    kinds: dict[str, Callable[..., Rule | None]] = {"mean": lambda: None, **RULES}
    return build(text, kinds, "an aggregation", "mean, median or krum(3)")


def check_agents(text: str, agents: int) -> None:
    """Raise a WaffleError where a rule expects half of the agents or more to be malicious."""
    call = read_call(text)
    if call and call.kind in ("krum", "multi-krum", "trimmed-mean"):
        expected = float([*call.values, *call.named.values(), "1"][0])
        if 2 * expected >= agents:
            raise WaffleError(
                f"aggregation: {text} expects {expected:g} malicious agents of {agents}, and it takes fewer than half: "
                f"use at most {call.kind}({(agents - 1) // 2}), or mean"
            )


def weiszfeld(dy: Rows, received: Tensor, start: Vector, smoothing: Tensor, steps: int) -> tuple[Vector, Weights]:
    """Weigh each row by 1 / its distance from the centre, and move the centre to their mean."""
    centre, shares = start, uniform(received)
    for _ in range(steps):
        shares = normalised(received / lengths(dy, centre).clamp(min=TINY).maximum(smoothing), received)
        centre = weighted_sum(shares, dy)
    return centre, shares


def clipped_mean(dy: Rows, received: Tensor, radius: Tensor, steps: int) -> tuple[Vector, Weights]:
    """Move the centre by the mean of the differences to it, each shortened to the radius."""
    centre = torch.zeros(dy.shape[1], dtype=torch.float64, device=dy.device)
    shares = equal = uniform(received)
    for _ in range(steps):
        shares = equal * (radius / lengths(dy, centre).clamp(min=TINY)).clamp(max=1)
        centre = (1 - shares.sum()) * centre + weighted_sum(shares, dy)
    return centre, shares


def _trimmed(dy: Rows, received: Tensor, cut: Tensor) -> tuple[Vector, Weights]:
    """In each coordinate the mean of the heard values but the `cut` outermost on either side."""
    values, order = torch.where(received[:, None], dy.double(), math.inf).sort(dim=0, stable=True)
    rank = torch.arange(len(dy), device=dy.device)
    kept = (rank >= cut) & (rank < received.sum() - cut)
    inner = kept.double() / kept.sum().clamp(min=1)
    mean = torch.where(kept[:, None], values * inner[:, None], 0.0).sum(dim=0)
    shares = torch.zeros_like(values).scatter(0, order, inner[:, None].expand_as(values)).mean(dim=1)
    return mean, shares


def _krum_scores(dy: Rows, received: Tensor, f: int) -> Weights:
    """Krum's score: the mean squared distance to the n - f - 1 nearest others; infinite for who was not heard."""
    square = torch.stack([lengths(dy, dy[i]) for i in range(len(dy))]) ** 2
    nearest = torch.where(received, square, math.inf).sort(dim=1).values
    rank = torch.arange(len(dy), device=dy.device)
    counted = (rank >= 1) & (
        rank < received.sum() - _tolerated(f, received)
    )  # the nearest of all is the row itself
    score = torch.where(counted, nearest, 0.0).sum(dim=1) / counted.sum().clamp(min=1)
    return torch.where(received, score, math.inf)


def _tolerated(f: int, received: Tensor) -> Tensor:
    """f, or as many as leave a majority of those heard."""
    return ((received.sum() - 1) // 2).clamp(min=0, max=f)


def _median_of_received(values: Weights, received: Tensor) -> Tensor:
    return torch.where(received, values, torch.nan).nanmedian(dim=0).values


def _agent_count(rule: str, f: float) -> int:
    if f != int(f) or f < 0:
        raise WaffleError(f"{rule} expects a whole number of malicious agents, got {f:g}")
    return int(f)
