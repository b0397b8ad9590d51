"""Robust aggregation rules: alternatives to the mean that limit the influence of a few malicious updates.

A rule reads the received rows and returns the aggregate and each agent's share in it, in float64. Krum, multi-Krum and
the trimmed mean expect f malicious agents; f is reduced if it is not a minority of the received updates.
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

Rule: TypeAlias = Callable[[Rows, Tensor], tuple[Vector, Weights]]  # (dy, received) -> (aggregate, shares)

WEISZFELD_STEPS = 16
SMOOTHING = 1e-6  # in median lengths: smallest distance used in a Weiszfeld weight
CLIPPING_STEPS = 3


def krum(f: float = 1.0) -> Rule:
    """Blanchard et al. 2017: the update with the least sum of squared distances to its n - f - 1 nearest others."""
    expected = _agent_count("krum", f)

    def rule(dy: Rows, received: Tensor) -> tuple[Vector, Weights]:
        shares = one_hot(_krum_scores(dy, received, expected).argmin(), len(dy))
        return weighted_sum(shares, dy), shares

    return rule


def multi_krum(f: float = 1.0) -> Rule:
    """The mean of the n - f updates with the best Krum scores."""
    expected = _agent_count("multi-krum", f)

    def rule(dy: Rows, received: Tensor) -> tuple[Vector, Weights]:
        rank = _krum_scores(dy, received, expected).argsort(stable=True).argsort(stable=True)
        shares = uniform(received & (rank < received.sum() - _tolerated(expected, received)))
        return weighted_sum(shares, dy), shares

    return rule


def trimmed_mean(f: float = 1.0) -> Rule:
    """Yin et al. 2018: per coordinate the mean without the f largest and f smallest values."""
    expected = _agent_count("trimmed-mean", f)
    return lambda dy, received: _trimmed(dy, received, _tolerated(expected, received))


def median() -> Rule:
    """Yin et al. 2018: the median of each coordinate."""
    return lambda dy, received: _trimmed(dy, received, (received.sum() - 1).clamp(min=0) // 2)


def geometric_median() -> Rule:
    """The point with the least sum of distances, by smoothed Weiszfeld steps (Pillutla et al. 2022).

    A row at the start point gets nearly all the weight, so the steps start at the median of each coordinate, where a
    minority cannot place a row on its own, and not at zero.
    """

    def rule(dy: Rows, received: Tensor) -> tuple[Vector, Weights]:
        start, _ = median()(dy, received)
        return weiszfeld(dy, received, start, SMOOTHING * _median_of_received(lengths(dy), received), WEISZFELD_STEPS)

    return rule


def centered_clipping(radius: float = 1.0) -> Rule:
    """Karimireddy et al. 2021: move a centre by the mean of the differences to it, clipped to a radius, three times.

    Differs from the paper: updates are differences already, so the centre starts at zero in each round and no state is
    kept; and the radius is in units of the median length of the updates, so that one value fits every model.
    """
    if not radius > 0:
        raise WaffleError(f"centered-clipping needs a radius above 0, got {radius:g}")
    return lambda dy, received: clipped_mean(
        dy, received, radius * _median_of_received(lengths(dy), received), CLIPPING_STEPS
    )


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
    """Return the rule that a text such as krum(3) describes; None is the mean."""
    kinds: dict[str, Callable[..., Rule | None]] = {"mean": lambda: None, **RULES}
    return build(text, kinds, "an aggregation", "mean, median or krum(3)")


def check_agents(text: str, agents: int) -> None:
    """Raise a WaffleError if a rule expects half of the agents or more to be malicious."""
    call = read_call(text)
    if call and call.kind in ("krum", "multi-krum", "trimmed-mean"):
        expected = float([*call.values, *call.named.values(), "1"][0])
        if 2 * expected >= agents:
            raise WaffleError(
                f"aggregation: {text} expects {expected:g} malicious agents of {agents}, which is not a minority: "
                f"use at most {call.kind}({(agents - 1) // 2}), or mean"
            )


def weiszfeld(dy: Rows, received: Tensor, start: Vector, smoothing: Tensor, steps: int) -> tuple[Vector, Weights]:
    """Repeat: weight each row by 1 / its distance from the centre, and move the centre to the weighted mean."""
    centre, shares = start, uniform(received)
    for _ in range(steps):
        shares = normalised(received / lengths(dy, centre).clamp(min=TINY).maximum(smoothing), received)
        centre = weighted_sum(shares, dy)
    return centre, shares


def clipped_mean(dy: Rows, received: Tensor, radius: Tensor, steps: int) -> tuple[Vector, Weights]:
    """Repeat: move the centre by the mean of the differences to it, each clipped to the radius."""
    centre = torch.zeros(dy.shape[1], dtype=torch.float64, device=dy.device)
    shares = equal = uniform(received)
    for _ in range(steps):
        shares = equal * (radius / lengths(dy, centre).clamp(min=TINY)).clamp(max=1)
        centre = (1 - shares.sum()) * centre + weighted_sum(shares, dy)
    return centre, shares


def _trimmed(dy: Rows, received: Tensor, cut: Tensor) -> tuple[Vector, Weights]:
    """Return per coordinate the mean of the received values without the `cut` largest and `cut` smallest."""
    values, order = torch.where(received[:, None], dy.double(), math.inf).sort(dim=0, stable=True)
    rank = torch.arange(len(dy), device=dy.device)
    kept = (rank >= cut) & (rank < received.sum() - cut)
    inner = kept.double() / kept.sum().clamp(min=1)
    mean = torch.where(kept[:, None], values * inner[:, None], 0.0).sum(dim=0)
    shares = torch.zeros_like(values).scatter(0, order, inner[:, None].expand_as(values)).mean(dim=1)
    return mean, shares


def _krum_scores(dy: Rows, received: Tensor, f: int) -> Weights:
    """Return Krum's scores: the mean squared distance to the n - f - 1 nearest others; infinite if not received."""
    square = torch.stack([lengths(dy, dy[i]) for i in range(len(dy))]) ** 2
    nearest = torch.where(received, square, math.inf).sort(dim=1).values
    rank = torch.arange(len(dy), device=dy.device)
    counted = (rank >= 1) & (rank < received.sum() - _tolerated(f, received))  # index 0 is the row itself
    score = torch.where(counted, nearest, 0.0).sum(dim=1) / counted.sum().clamp(min=1)
    return torch.where(received, score, math.inf)


def _tolerated(f: int, received: Tensor) -> Tensor:
    """Return f, or the largest number that is a minority of the received updates."""
    return ((received.sum() - 1) // 2).clamp(min=0, max=f)


def _median_of_received(values: Weights, received: Tensor) -> Tensor:
    return torch.where(received, values, torch.nan).nanmedian(dim=0).values


def _agent_count(rule: str, f: float) -> int:
    if f != int(f) or f < 0:
        raise WaffleError(f"{rule} expects a whole number of malicious agents, got {f:g}")
    return int(f)
