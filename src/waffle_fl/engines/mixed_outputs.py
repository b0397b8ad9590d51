"""Models of methods that mix the outputs of two models: a row of `personal` holds both, and the share of the first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net
from waffle_fl.models import FlatModel

PARTS = ("personal", "received")  # their names in a model file


def mixes_outputs(algorithm: Algorithm) -> bool:
    """Return whether a row of `personal` holds two models whose outputs are mixed."""
    return bool(getattr(algorithm, "mixes_outputs", False))


def models_in(algorithm: Algorithm, model: FlatModel, net: Net) -> list[Net]:
    """Return the one model, or the two models, of an agent."""
    if not mixes_outputs(algorithm):
        return [net]
    params, stats = net.params[: 2 * model.size].tensor_split(2), net.stats.tensor_split(2)
    return [Net(*pair) for pair in zip(params, stats, strict=True)]


def output_of(algorithm: Algorithm, model: FlatModel, net: Net) -> Callable[[Tensor], Tensor]:
    """Return the function from samples to outputs."""
    own, *others = (partial(model.predict, *one) for one in models_in(algorithm, model, net))
    if not others:
        return own
    share = net.params[-1]
    return lambda x: torch.lerp(others[0](x), own(x), share)


def tensors_in(algorithm: Algorithm, model: FlatModel, net: Net) -> dict[str, Tensor]:
    """Return the named tensors of an agent's model for a file; of two models with the names of their parts."""
    if not mixes_outputs(algorithm):
        return model.state_dict(net)
    models = zip(PARTS, models_in(algorithm, model, net), strict=True)
    both = {f"{part}.{name}": tensor for part, one in models for name, tensor in model.state_dict(one).items()}
    return both | {"share": net.params[-1].detach().cpu().clone()}
