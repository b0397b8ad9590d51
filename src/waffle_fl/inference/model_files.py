"""A model file as a torch module, also for methods that predict with several models or with training samples.

The modules call the functions with which the engines predict, so that both compute the same outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from waffle_fl.algorithms import Algorithm
from waffle_fl.algorithms.mixture import PARTS, mixed, part_predictions
from waffle_fl.engines.mixed_outputs import TWO, memory_name, mixes_outputs, mixes_predictions, names_in
from waffle_fl.errors import WaffleError
from waffle_fl.models import FlatModel
from waffle_fl.models.features import output_and_features
from waffle_fl.tensorfile import read_shapes, read_tensors

SUM_ERROR = 1e-6  # of the weights of a mixture, whose sum is 1


def read_model(
    path: Path, algorithm: Algorithm, model: FlatModel, shape: Sequence[int], classes: int
) -> dict[str, Tensor]:
    """Return the tensors of a model file; all names, shapes and types, labels and weights must fit the run.

    `shape` is that of a sample; `classes` is 0 for a regression.
    """
    one, several = model.state_dict(model.init(0)), names_in(algorithm)
    template = {f"{part}.{name}": tensor for part in several for name, tensor in one.items()} if several else one
    if mixes_outputs(algorithm):
        template["share"] = torch.empty((), dtype=model.dtype)
    memory = memory_name(algorithm)
    if not memory:
        return read_tensors(path, template)[1]
    samples = _samples_in(path, f"{memory}.labels")
    features = model.features(*model.init(0), torch.zeros(2, *shape, dtype=model.dtype))[1].shape[1]
    kind = torch.int64 if classes else torch.float64
    template[f"{memory}.features"] = torch.empty(samples, features, dtype=model.dtype, device="meta")
    template[f"{memory}.labels"] = torch.empty(samples, dtype=kind, device="meta")
    if mixes_predictions(algorithm):
        template[f"{memory}.weights"] = torch.empty(len(PARTS) + 1, dtype=torch.float64)
    tensors = read_tensors(path, template)[1]
    _check_memory(path, memory, tensors, classes)
    return tensors


def _samples_in(path: Path, name: str) -> int:
    """Return the number of training samples in a model file, of which each has a label."""
    shape = read_shapes(path).get(name)
    if shape is None:
        raise WaffleError(
            f"{path} has no {name}: its predictions need Alice's training samples. A run of an earlier version must be "
            "run again; of a deployment only the folder at Alice's site has them: predict there"
        )
    if len(shape) != 1 or not shape[0]:
        raise WaffleError(f"{path}: {name!r} has the shape {shape}, expected one label for each training sample")
    return shape[0]


def _check_memory(path: Path, memory: str, tensors: Mapping[str, Tensor], classes: int) -> None:
    labels, weights = tensors[f"{memory}.labels"], tensors.get(f"{memory}.weights")
    if classes and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise WaffleError(f"{path}: '{memory}.labels' has numbers that are no class, expected 0 to {classes - 1}")
    if not labels.isfinite().all():
        raise WaffleError(f"{path}: '{memory}.labels' has numbers that are not finite")
    if weights is not None and not (bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) <= SUM_ERROR):
        raise WaffleError(f"{path}: '{memory}.weights' is {weights.tolist()}, expected weights of sum 1, none below 0")


def module_of(
    algorithm: Algorithm, build: Callable[[], nn.Module], dtype: torch.dtype, tensors: Mapping[str, Tensor]
) -> nn.Module:
    """Return a new module that predicts as the method does, in evaluation mode."""
    below = {part: _below(part, tensors) for part in (*names_in(algorithm), memory_name(algorithm)) if part}
    parts = {part: with_tensors(build, dtype, below[part]) for part in names_in(algorithm)}
    if mixes_outputs(algorithm):
        return MixedOutputs(parts, tensors["share"]).eval()
    if mixes_predictions(algorithm):
        return MixedPredictions(parts, below[memory_name(algorithm)]).eval()
    module = with_tensors(build, dtype, tensors)
    answer = getattr(algorithm, "answer", None)
    return module if answer is None else WithNeighbours(module, answer, below[memory_name(algorithm)]).eval()


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


class MemoryBuffers(nn.Module):
    """Buffers: features and labels of training samples, and the weights of a mixture."""

    features: Tensor
    labels: Tensor
    weights: Tensor

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.clone())


def memory_in(module: nn.Module) -> MemoryBuffers | None:
    """Return what a module stores of training samples; None for most methods."""
    return next((part for part in module.modules() if isinstance(part, MemoryBuffers)), None)


class MixedPredictions(nn.Module):
    """A mixture of predictions: logarithms of probabilities, or the values of a regression."""

    def __init__(self, parts: Mapping[str, nn.Module], memory: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name in PARTS:
            self.add_module(name, parts[name])
        self.mixture = MemoryBuffers(memory)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (self.get_submodule(name) for name in PARTS)
        output, features = output_and_features(first, first, x)
        outputs = torch.stack([output, *(part(x) for part in others)])
        predictions = part_predictions(outputs, features, self.mixture.features, self.mixture.labels)
        return mixed(predictions, self.mixture.weights).to(output.dtype)


class WithNeighbours(nn.Module):
    """A model whose outputs are combined with an agent's nearest training samples, as by kNN-Per."""

    def __init__(
        self, model: nn.Module, answer: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], memory: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.model, self.answer, self.neighbours = model, answer, MemoryBuffers(memory)

    def forward(self, x: Tensor) -> Tensor:
        output, features = output_and_features(self.model, self.model, x)
        return self.answer(output, features, self.neighbours.features, self.neighbours.labels)


class MixedOutputs(nn.Module):
    """The mixed outputs of two models, as by APFL."""

    share: Tensor

    def __init__(self, parts: Mapping[str, nn.Module], share: Tensor) -> None:
        super().__init__()
        for name in TWO:
            self.add_module(name, parts[name])
        self.register_buffer("share", share.clone())

    def forward(self, x: Tensor) -> Tensor:
        own, received = (self.get_submodule(name)(x) for name in TWO)
        return torch.lerp(received, own, self.share)


@torch.no_grad()
def with_tensors(build: Callable[[], nn.Module], dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a new module with these tensors, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state unchanged
        module = build().to("cpu", dtype)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in tensors:
            tensor.copy_(tensors[name])
    return module.eval().requires_grad_(False)
