"""Differential privacy in the engines: batches are Poisson samples, gradients are clipped per sample and noised.

An algorithm reads its agents' samples through `Grad` alone. So a `Grad` that returns noised gradients makes everything
that an agent computes from them private: its update, its control variate, its model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Grad, Net
from waffle_fl.batches import Batches, BatchPlan, steps_of
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel
from waffle_fl.poisson_batches import PoissonBatches, RowNoise, sampling_rate
from waffle_fl.privacy.accounting import Release, noise_multiplier
from waffle_fl.randomness import normal


def batches_of(
    algorithm: Algorithm,
    model: FlatModel,
    federations: Sequence[Federation],
    seeds: Sequence[int],
    s: RoundSettings,
    agents: Sequence[Sequence[int]] | None = None,
) -> Batches:
    """Return the mini-batches of these agents, or of all: with differential privacy Poisson samples with noise."""
    data = (federations, seeds, s.batch_size, s.epochs, model.dtype, s.augment, s.flips, s.rounds, agents)
    if not s.adds_noise:
        return Batches(*data, s.remainder, s.steps_per_round)
    rows = zip(federations, agents or [range(f.agents) for f in federations], strict=True)
    found = [release_of(s, len(f.train[i]), f.ids[i]) for f, some in rows for i in some]
    deviations = [one.multiplier * s.sample_clip for one in found]
    noise = RowNoise(s.sample_clip, deviations, gradients_per_step(algorithm, model))
    return PoissonBatches(*data, s.remainder, s.steps_per_round, noise_of=noise)


def releases_of(federation: Federation, s: RoundSettings) -> dict[str, Release]:
    """Return what each agent releases in a whole run, by name."""
    agents = zip(federation.names, federation.train, federation.ids, strict=True)
    return {name: release_of(s, len(rows), agent) for name, rows, agent in agents}


def release_of(s: RoundSettings, samples: int, agent: int) -> Release:
    """Return what an agent releases in a whole run: its sampling rate, its noise multiplier and its steps."""
    rate = sampling_rate(samples, s.batch_size, s.remainder)
    steps = s.rounds * steps_of(samples, s.batch_size, s.epochs, s.remainder, s.steps_per_round)
    if s.noise_multipliers:
        return Release(rate, s.noise_multipliers[agent % len(s.noise_multipliers)], steps)
    return Release(rate, noise_multiplier(s.epsilon, s.delta, rate, steps), steps)


def privacy_of(
    samples: Sequence[int], ids: Sequence[int], s: RoundSettings, noise: Literal["seed", "secret"] = "seed"
) -> dict[str, Any]:
    """Return the guarantee of a run for its provenance; empty without one. Lists have one entry per agent.

    `noise` is what the noise derives from: the run's seed, which is no secret, or a secret of each site.
    """
    if not s.adds_noise:
        return {}
    found = [release_of(s, count, agent) for count, agent in zip(samples, ids, strict=True)]
    rates, multipliers, steps = zip(*found, strict=True)
    agents = {"rates": list(rates), "noise_multipliers": list(multipliers), "steps": list(steps)}
    about = {"epsilon": s.epsilon, "delta": s.delta, "sample_clip": s.sample_clip, "noise": noise}
    return {"privacy": {**about, **agents}}


def step_grad(model: FlatModel, batches: Batches, plan: BatchPlan, t: Tensor, size: int, plain: bool = False) -> Grad:
    """Return the gradient function of step t; `plain` computes it by autograd on the module."""
    batch = batches.batch(plan, t, size)
    if not isinstance(batches, PoissonBatches):
        return Grad.on(model, batch, t, plan.steps, plain)
    allowed, draw, clip = batches.noise_of.gradients, batches.draw, batches.noise_of.clip
    deviation, expected = plan.noise[:, :1], plan.noise[:, 1:].clamp(min=1)
    places = count()

    def gradient(params: Tensor, stats: Tensor) -> Net:
        sums = model.clipped_sums(params, stats, batch, clip, plain)
        noised = []
        for part in torch.split(sums, len(batch.x)):
            if (place := next(places)) >= allowed:
                raise RuntimeError(f"expected at most {allowed} gradients per step, for which the noise is enough")
            draws = normal(plan.noise_keys + (t << 16) + (place << 40), sums.shape[1], draw).to(sums)
            noised.append((part + math.sqrt(allowed) * deviation * draws) / expected)
        return Net(torch.cat(noised), stats)

    return Grad(gradient, t, plan.steps)


class _Probe:
    """Counts the gradients that a step asks for, and refuses what noise does not cover."""

    def __init__(self) -> None:
        self.gradients = 0

    def gradient(self, params: Tensor, stats: Tensor, pull: Any = None) -> Net:
        if pull is not None:
            raise _Uncovered("features of samples")
        self.gradients += len(params)
        return Net(torch.zeros_like(params), stats)

    def features(self, params: Tensor, stats: Tensor) -> Any:
        raise _Uncovered("features of samples")


class _Uncovered(Exception):
    """What a method reads from samples besides gradients."""


UNCOVERED = {
    "candidates": "losses of several models on samples",
    "scored_on": "losses of several models on samples",
    "rehearse": "mini-batches before its training",
    "answer": "training samples in its predictions",
    "mixes_predictions": "training samples in its predictions",
}


def gradients_per_step(algorithm: Algorithm, model: FlatModel) -> int:
    """Return how many gradients of a sample a step uses; raise if the method reads samples in another way too."""
    name = type(getattr(algorithm, "unwrapped", algorithm)).__name__
    found = next((what for hook, what in UNCOVERED.items() if getattr(algorithm, hook, None)), "")
    probe, net = _Probe(), model.init(0)
    if not found:
        one = torch.ones(1, dtype=torch.int64, device=model.device)
        server, agents = algorithm.init(net, 1)
        local = algorithm.begin(algorithm.broadcast(server, 1), agents)
        try:
            algorithm.step(local, Grad(probe.gradient, 0 * one, one, probe.features))
        except _Uncovered as error:
            found = str(error)
    if found:
        raise WaffleError(f"privacy = dp: {name} also uses {found}, which the noise does not cover")
    return probe.gradients
