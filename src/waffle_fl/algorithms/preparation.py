"""Prepare an algorithm for training: set what depends on the model, and add the options of its optimiser."""

from __future__ import annotations

from waffle_fl.algorithms.averaged_models import AveragedModels
from waffle_fl.algorithms.averaged_momentum import with_averaged_momentum
from waffle_fl.algorithms.contract import Algorithm
from waffle_fl.algorithms.hooks import ModelDependent
from waffle_fl.algorithms.kept_momentum import KeptMomentum
from waffle_fl.algorithms.lr_decay import LrDecay
from waffle_fl.algorithms.mixture import PredictionMixture
from waffle_fl.algorithms.wrapper import Wrapper
from waffle_fl.errors import WaffleError
from waffle_fl.models.layers import Layers


def for_model(algorithm: Algorithm, layers: Layers) -> Algorithm:
    """Return the algorithm prepared for a model with these layers. Engines call this before they train."""
    prepared = algorithm.unwrapped if isinstance(algorithm, Wrapper) else algorithm
    if isinstance(prepared, ModelDependent):
        prepared = prepared.for_model(layers)
    sgd = prepared.sgd
    if sgd.averaging and hasattr(prepared, "averaging"):
        raise WaffleError(
            f"averaging: {type(prepared).__name__} has a hyperparameter of this name: set that, not the optimiser's"
        )
    if getattr(prepared, "mixes_predictions", False):
        prepared = PredictionMixture(prepared)
    if sgd.lr_decay != 1:
        prepared = LrDecay(prepared)
    if sgd.keeps_velocity:
        prepared = KeptMomentum(prepared)
    if sgd.averages_velocity:
        prepared = with_averaged_momentum(prepared)
    if sgd.averaging:
        prepared = AveragedModels(prepared)
    return prepared
