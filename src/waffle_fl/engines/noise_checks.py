"""Which runs can have differential privacy at each agent."""

from __future__ import annotations

import importlib.util

from waffle_fl.engines.private_gradients import gradients_per_step, releases_of
from waffle_fl.engines.run_spec import RoundSettings, RunSpec
from waffle_fl.errors import WaffleError
from waffle_fl.models import FlatModel
from waffle_fl.privacy.accounting import cached_epsilon

SLACK = 1e-3  # given multipliers may be rounded


def check_noise(spec: RunSpec, settings: RoundSettings, model: FlatModel) -> None:
    """Raise a WaffleError if noise would not make what the agents of a run send private."""
    if not settings.adds_noise:
        return
    gradients_per_step(spec.algorithm, model)
    most = int(spec.federation.samples.max())
    problem = ""
    if model.normalises:
        problem = "batch normalisation mixes the samples of a batch: choose a network without it, such as cnn-gn"
    elif model.passes.seeded:
        problem = "the network's forward pass draws random numbers or depends on values of other samples"
    elif settings.delta * most >= 1:
        problem = f"delta: expected below 1 / {most}, the most samples of an agent, got {settings.delta:g}"
    elif not settings.noise_multipliers and not importlib.util.find_spec("dp_accounting"):
        problem = (
            "needs the package dp-accounting (pip install 'waffle-fl[private]') to compute noise, or noise_multipliers"
        )
    if problem:
        raise WaffleError(f"privacy = {settings.privacy}: {problem}")
    if settings.noise_multipliers and importlib.util.find_spec("dp_accounting"):
        _check_given(spec, settings)


def _check_given(spec: RunSpec, settings: RoundSettings) -> None:
    """Raise if noise multipliers of the settings are too small for epsilon."""
    for name, release in releases_of(spec.federation, settings).items():
        cost = cached_epsilon(release, settings.delta) if release.steps else 0.0
        if cost > (1 + SLACK) * settings.epsilon:
            raise WaffleError(
                f"noise_multipliers: expected at least the noise that epsilon {settings.epsilon:g} needs, got "
                f"{release.multiplier:g}, with which {name} would spend {cost:.3g}: leave them out"
            )
