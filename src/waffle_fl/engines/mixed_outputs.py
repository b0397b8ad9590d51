"""Models of methods whose agents have several: the row of `personal` holds them one after another.

A method that mixes the outputs of two models adds the share of the first. A method that mixes predictions computes the
weights of its parts, and the neighbours among the training samples, wherever its models are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net
from waffle_fl.algorithms.mixture import PARTS, mixed, part_predictions, weights_of
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel

TWO = ("personal", "received")  # names in a model file of the models whose outputs are mixed
ROWS = 2000  # of an agent's own samples that are predicted at a time


def mixes_outputs(algorithm: Algorithm) -> bool:
    """Return whether a row of `personal` holds two models whose outputs are mixed."""
    return bool(getattr(algorithm, "mixes_outputs", False))


def mixes_predictions(algorithm: Algorithm) -> bool:
    """Return whether a row of `personal` holds the models of a mixture of predictions."""
    return bool(getattr(algorithm, "mixes_predictions", False))


def names_in(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the names of the models in a row of `personal`; none if it holds one."""
    return TWO if mixes_outputs(algorithm) else PARTS if mixes_predictions(algorithm) else ()


def models_in(algorithm: Algorithm, model: FlatModel, net: Net) -> list[Net]:
    """Return the model, or the models, of an agent."""
    count = len(names_in(algorithm))
    if not count:
        return [net]
    params, stats = net.params[: count * model.size].tensor_split(count), net.stats.tensor_split(count)
    return [Net(*pair) for pair in zip(params, stats, strict=True)]


def output_of(algorithm: Algorithm, model: FlatModel, net: Net) -> Callable[[Tensor], Tensor]:
    """Return the function from samples to outputs."""
    own, *others = (partial(model.predict, *one) for one in models_in(algorithm, model, net))
    if not others:
        return own
    share = net.params[-1]
    return lambda x: torch.lerp(others[0](x), own(x), share)


def tensors_in(algorithm: Algorithm, model: FlatModel, net: Net) -> dict[str, Tensor]:
    """Return the named tensors of an agent's model for a file; of several models with the names of their parts."""
    if not names_in(algorithm):
        return model.state_dict(net)
    models = zip(names_in(algorithm), models_in(algorithm, model, net), strict=True)
    all_of = {f"{part}.{name}": tensor for part, one in models for name, tensor in model.state_dict(one).items()}
    return all_of | ({"share": net.params[-1].detach().cpu().clone()} if mixes_outputs(algorithm) else {})


def mixture_of(
    algorithm: Algorithm, model: FlatModel, net: Net, federation: Federation, progress: float
) -> Callable[[Tensor], Tensor]:
    """Return Alice's mixture of predictions as a function from samples to outputs.

    Its weights come from her validation samples, its neighbours from her training samples.
    """
    models, alice = models_in(algorithm, model, net), federation.alice

    def labels_of(rows: Tensor) -> Tensor:
        return federation.labels(alice, rows, progress).to(model.device)

    def samples_of(rows: Tensor) -> Tensor:
        return federation.x[rows].to(model.device, model.dtype)

    own, validation = federation.train[alice], federation.validation[alice]
    known = torch.cat([model.features(*models[0], samples_of(part))[1] for part in torch.split(own, ROWS)])
    labels = labels_of(own)

    def parts(x: Tensor) -> Tensor:
        shared, features = model.features(*models[0], x)
        outputs = torch.stack([shared, *(model.predict(*one, x) for one in models[1:])])
        return part_predictions(outputs, features, known, labels)

    predicted = torch.cat([parts(samples_of(part)) for part in torch.split(validation, ROWS)], dim=1)
    weights = weights_of(predicted, labels_of(validation))
    return lambda x: mixed(parts(x), weights).to(model.dtype)
