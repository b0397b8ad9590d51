"""Which runs can have differential privacy at each agent."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from waffle_fl.algorithms import Algorithm
from waffle_fl.engines.private_gradients import gradients_per_step, releases_of
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel
from waffle_fl.privacy.accounting import LEAST_NOISE, Release, cached_epsilon, width_for


def check_noise(algorithm: Algorithm, model: FlatModel, federation: Federation, settings: RoundSettings) -> None:
    """Raise a WaffleError if noise would not make what these agents send private."""
    if not settings.adds_noise:
        return
    check_noise_covers(algorithm, model, int(federation.samples.max()), settings)
    if settings.noise_multipliers:
        _check_given(releases_of(federation, settings), settings)


def check_noise_covers(algorithm: Algorithm, model: FlatModel, most_samples: int, settings: RoundSettings) -> None:
    """Raise a WaffleError if the method or the network cannot be made private by noise, or delta is too large."""
    if not settings.adds_noise:
        return
    gradients_per_step(algorithm, model)
    problem = ""
    if model.normalises:
        problem = "batch normalisation mixes the samples of a batch: choose a network without it, such as cnn-gn"
    elif model.passes.seeded:
        problem = "the network's forward pass draws random numbers or depends on values of other samples"
    elif settings.delta * most_samples >= 1:
        problem = f"delta: expected below 1 / {most_samples}, the most samples of an agent, got {settings.delta:g}"
    elif not importlib.util.find_spec("dp_accounting"):
        problem = "needs the package dp-accounting, which computes noise: pip install 'waffle-fl[private]'"
    if problem:
        raise WaffleError(f"privacy = {settings.privacy}: {problem}")


def _check_given(releases: Mapping[str, Release], settings: RoundSettings) -> None:
    """Raise if noise multipliers of the settings are too small for epsilon."""
    if min(settings.noise_multipliers) < LEAST_NOISE:
        raise WaffleError(
            f"noise_multipliers: expected at least {LEAST_NOISE:g}, got {min(settings.noise_multipliers):g}"
        )
    for name, release in releases.items():
        cost = cached_epsilon(release, settings.delta, width_for(settings.epsilon)) if release.steps else 0.0
        if cost > settings.epsilon:
            raise WaffleError(
                f"noise_multipliers: expected at least the noise that epsilon {settings.epsilon:g} needs, got "
                f"{release.multiplier:g}, with which {name} would spend {cost:.3g}: leave them out"
            )
