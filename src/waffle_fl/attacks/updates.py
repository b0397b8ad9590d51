"""Manipulated updates. The attackers are omniscient: they know all honest updates before they choose theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import TINY, Rows, Vector, lengths, row_of, uniform, weighted_sum
from waffle_fl.guard import AGREEMENT, CHANCE
from waffle_fl.randomness import normal

MARGIN = 1.05  # by which `evading` stays inside the guard's limit of the angle
SPREAD = 1e-3  # relative difference of the lengths of `evading` attackers: equal updates count once


class Scene(NamedTuple):
    """A round as an omniscient attacker sees it."""

    dy: Rows  # the update of each agent after honest training on its data
    honest: Tensor  # (N,) bool
    alice: Tensor  # (), her index
    keys: Tensor  # (N,), each agent's noise seed of this round


Lie: TypeAlias = Callable[[Scene], Rows]  # a row per agent; only the malicious agents send theirs


def scaled(factor: float) -> Lie:
    """The agent's own update times a factor: negative flips its sign, large replaces the model, 0 is a free rider."""
    return lambda scene: factor * scene.dy


def gaussian(length: float) -> Lie:
    """Noise instead of an update, `length` times as long as the median honest update."""

    def lie(scene: Scene) -> Rows:
        draws = normal(scene.keys, scene.dy.shape[1])
        return draws * (length * _typical_length(scene) / lengths(draws).clamp(min=TINY))[:, None]

    return lie


def alie(z: float) -> Lie:
    """A little is enough (Baruch et al. 2019): in each coordinate the honest mean plus z standard deviations."""

    def lie(scene: Scene) -> Rows:
        mean = _honest_mean(scene)
        squares = weighted_sum(scene.honest.double(), (scene.dy.double() - mean) ** 2)
        deviation = (squares / (scene.honest.sum() - 1).clamp(min=1)).sqrt()
        return (mean + z * deviation).expand(len(scene.dy), -1)

    return lie


def ipm(epsilon: float) -> Lie:
    """Inner product manipulation (Xie et al. 2020): the honest mean, negated and scaled."""
    return lambda scene: (-epsilon * _honest_mean(scene)).expand(len(scene.dy), -1)


def mimic(scene: Scene) -> Rows:
    """A copy of Alice's update, to get the same weight."""
    return row_of(scene.dy, scene.alice).expand(len(scene.dy), -1)


def projected(radius: float) -> Lie:
    """Adaptive: opposed to Alice's update, within `radius` times the distance of the honest update nearest to it."""

    def lie(scene: Scene) -> Rows:
        own = row_of(scene.dy, scene.alice).double()
        away = lengths(scene.dy, own)
        peers = scene.honest & (lengths(scene.dy) > 0) & (away > 0)
        nearest = away.where(peers, away.max()).min()
        factor: Tensor = 1 - (radius * nearest / own.norm().clamp(min=TINY)).clamp(max=2)
        return (factor * own).expand(len(scene.dy), -1)

    return lie


def evading(length: float) -> Lie:
    """Knows the guard: of the updates that pass its test of the angle, the one most opposed to the honest mean.

    Its length is a multiple of Alice's, and its cosine with her update just above the guard's limit.
    """

    def lie(scene: Scene) -> Rows:
        own, mean = row_of(scene.dy, scene.alice).double(), _honest_mean(scene).double()
        numbers = torch.arange(len(scene.dy), device=scene.dy.device)
        norms = lengths(scene.dy)
        peers = scene.honest & (numbers != scene.alice) & (norms > 0)
        along = scene.dy.double() @ own / (norms * own.norm()).clamp(min=TINY)
        usual = along.where(peers, float("nan")).nanmedian(dim=0).values
        chance = min(CHANCE / scene.dy.shape[1] ** 0.5, AGREEMENT)
        cosine = (MARGIN * (AGREEMENT * usual).nan_to_num().clamp(min=chance)).clamp(max=1)
        ahead = own / own.norm().clamp(min=TINY)
        across = (mean @ ahead) * ahead - mean
        across = across / across.norm().clamp(min=TINY)
        update = length * own.norm() * (cosine * ahead + (1 - cosine**2).sqrt() * across)
        shorter = 1 - SPREAD * numbers / len(scene.dy)
        sent: Rows = shorter[:, None] * update
        return sent

    return lie


def _honest_mean(scene: Scene) -> Vector:
    return weighted_sum(uniform(scene.honest), scene.dy)


def _typical_length(scene: Scene) -> Tensor:
    return lengths(scene.dy).where(scene.honest, float("nan")).nanmedian(dim=0).values
