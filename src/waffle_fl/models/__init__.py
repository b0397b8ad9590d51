"""Networks by name, and FlatModel, which turns any module into rows of flat parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from waffle_fl.errors import WaffleError, suggest
from waffle_fl.importing import import_named
from waffle_fl.models.building import ready
from waffle_fl.models.dla import DLA
from waffle_fl.models.flat import STATS_POLICY, Batch, FlatModel, Net, cross_entropy, output_is_loss, squared_error
from waffle_fl.models.nets import LeNet5, Quadratic, cnn, cnn_1d, cnn_1d_gn, cnn_gn, cnn_pooled_gn, linear, mlp

Build = Callable[[Sequence[int], int], nn.Module]  # (shape of a sample, classes; 1 for a regression) -> module

MODELS: dict[str, Build] = {
    "lenet5": LeNet5,
    "lenet5-tanh": lambda shape, classes: LeNet5(shape, classes, "tanh", "average"),
    "dla": DLA,
    "cnn": cnn,
    "cnn-1d": cnn_1d,
    "cnn-gn": cnn_gn,
    "cnn-pooled-gn": cnn_pooled_gn,
    "cnn-1d-gn": cnn_1d_gn,
    "mlp": mlp,
    "linear": linear,
}

DEFAULTS = {"mnist": "lenet5", "fashion-mnist": "lenet5", "cifar10": "dla", "digits": "mlp", "synthetic": "mlp"}
BY_AXES = {
    1: "mlp",
    2: "cnn-1d-gn",
    3: "cnn-pooled-gn",
}  # tables, signals (channels, length), images (channels, height, width)
NEEDS = {
    "lenet5": 3,
    "lenet5-tanh": 3,
    "dla": 3,
    "cnn": 3,
    "cnn-1d": 2,
    "cnn-gn": 3,
    "cnn-pooled-gn": 3,
    "cnn-1d-gn": 2,
}  # axes of a sample; others take any


def builder(name: str, data: str, shape: Sequence[int], classes: int) -> Callable[[], nn.Module]:
    """Return a function that builds the named network.

    The name `auto` selects one by the data set or the shape of its samples; `module:factory` imports your own.
    """
    chosen = DEFAULTS.get(data) or BY_AXES.get(len(shape), "mlp") if name == "auto" else name
    if ":" in chosen:
        return ready(lambda: import_named(chosen, "model")(shape, classes), shape)
    if chosen not in MODELS:
        raise WaffleError(f"unknown model {chosen!r}{suggest(chosen, MODELS)} (or module:factory)")
    axes = NEEDS.get(chosen, len(shape))
    if len(shape) != axes:
        raise WaffleError(
            f"the model {chosen} takes samples with {axes} axes, those of {data} have the shape {tuple(shape)}: "
            "use auto, or a model of your own"
        )
    return lambda: MODELS[chosen](shape, classes)


__all__ = [
    "DLA",
    "MODELS",
    "STATS_POLICY",
    "Batch",
    "FlatModel",
    "LeNet5",
    "Net",
    "Quadratic",
    "builder",
    "cnn",
    "cnn_1d",
    "cnn_1d_gn",
    "cnn_gn",
    "cnn_pooled_gn",
    "cross_entropy",
    "linear",
    "mlp",
    "output_is_loss",
    "ready",
    "squared_error",
]
