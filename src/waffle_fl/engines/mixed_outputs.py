"""Models of methods whose agents have several: the row of `personal` holds them one after another.

A method that mixes the outputs of two models adds the share of the first. A method that mixes predictions, or one with
the hook `answer`, also predicts with the agent's training samples: its memory is computed wherever its models are
evaluated, and saved with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net
from waffle_fl.algorithms.mixture import PARTS, mixed, part_predictions, weights_of
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel

TWO = ("personal", "received")  # names in a model file of the models whose outputs are mixed
MIXTURE, NEIGHBOURS = "mixture", "neighbours"  # prefixes in a model file
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


def memory_name(algorithm: Algorithm) -> str:
    """Return the prefix in a model file of what a prediction needs besides models; empty if it needs nothing."""
    return MIXTURE if mixes_predictions(algorithm) else NEIGHBOURS if hasattr(algorithm, "answer") else ""


class Memory(NamedTuple):
    """What a prediction needs besides models: the agent's training samples, and the weights of a mixture."""

    features: Tensor  # (samples, features) of its first model
    labels: Tensor  # integers, or float64 for a regression
    weights: Tensor | None = None  # of the parts of a mixture


MEMORY_NAMES = frozenset(f"{prefix}.{field}" for prefix in (MIXTURE, NEIGHBOURS) for field in Memory._fields)


@torch.no_grad()
def memory_of(
    algorithm: Algorithm, model: FlatModel, net: Net, federation: Federation, progress: float = 1.0
) -> Memory | None:
    """Return what Alice's predictions need besides her models.

    Weights come from her validation samples, unless they are given; features and labels from her training samples.
    """
    if not memory_name(algorithm):
        return None
    models, alice = models_in(algorithm, model, net), federation.alice

    def labels_of(rows: Tensor) -> Tensor:
        labels = federation.labels(alice, rows, progress).to(model.device)
        return labels.double() if labels.is_floating_point() else labels

    def samples_of(rows: Tensor) -> list[Tensor]:
        return [federation.x[part].to(model.device, model.dtype) for part in torch.split(rows, ROWS)]

    own, validation = federation.train[alice], federation.validation[alice]
    known = torch.cat([model.features(*models[0], x)[1] for x in samples_of(own)])
    memory = Memory(known, labels_of(own))
    if not mixes_predictions(algorithm):
        return memory
    if given := getattr(algorithm, "part_weights", ()):
        return memory._replace(weights=torch.tensor(given, dtype=torch.float64, device=model.device))
    predicted = torch.cat([_parts(model, models, memory, x) for x in samples_of(validation)], dim=1)
    return memory._replace(weights=weights_of(predicted, labels_of(validation)))


def _parts(model: FlatModel, models: Sequence[Net], memory: Memory, x: Tensor) -> Tensor:
    """Return the predictions of all parts of a mixture."""
    shared, features = model.features(*models[0], x)
    outputs = torch.stack([shared, *(model.predict(*one, x) for one in models[1:])])
    return part_predictions(outputs, features, memory.features, memory.labels)


def output_of(
    algorithm: Algorithm, model: FlatModel, net: Net, memory: Memory | None = None
) -> Callable[[Tensor], Tensor]:
    """Return the function from samples to outputs; without a memory, that of the models alone."""
    models = models_in(algorithm, model, net)
    if memory is None:
        own, *others = (partial(model.predict, *one) for one in models)
        return (lambda x: torch.lerp(others[0](x), own(x), net.params[-1])) if others else own
    known, labels, weights = memory
    if weights is not None:
        return lambda x: mixed(_parts(model, models, memory, x), weights).to(model.dtype)
    answer: Any = algorithm
    return lambda x: answer.answer(*model.features(*models[0], x), known, labels)  # type: ignore[no-any-return]


def tensors_in(algorithm: Algorithm, model: FlatModel, net: Net, memory: Memory | None = None) -> dict[str, Tensor]:
    """Return the named tensors of an agent's model for a file; of several models with the names of their parts."""
    names, models = names_in(algorithm), models_in(algorithm, model, net)
    if not names:
        tensors = model.state_dict(net)
    else:
        states = zip(names, map(model.state_dict, models), strict=True)
        tensors = {f"{part}.{name}": tensor for part, state in states for name, tensor in state.items()}
    if mixes_outputs(algorithm):
        tensors["share"] = net.params[-1].detach().cpu().clone()
    kept = {} if memory is None else memory._asdict()
    prefix = memory_name(algorithm)
    return tensors | {f"{prefix}.{name}": part.cpu().clone() for name, part in kept.items() if part is not None}
