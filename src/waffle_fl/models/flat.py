"""FlatModel: any `torch.nn.Module` as rows of flat parameters.

Running statistics (the float buffers of BatchNorm) are rows of their own, beside the parameters and never inside an
update, so distances do not see them. Integer buffers are constants of the module and are neither sent nor averaged.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from waffle_fl.errors import WaffleError
from waffle_fl.randomness import derive, noise

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (output, target) -> one loss a sample

STATS_POLICY = "running statistics: averaged with the weights of the updates, outside every distance; counters constant"


class Net(NamedTuple):
    """One model a row: trainable parameters, and the running statistics of its normalisation layers (may be empty)."""

    params: Tensor
    stats: Tensor


class Batch(NamedTuple):
    """One mini-batch a row. A row with fewer samples is padded, and the padding weighs 0."""

    x: Tensor  # (N, B, ...)
    y: Tensor  # (N, B)
    weight: Tensor  # (N, B)
    key: Tensor  # (N,): the seed of this step's dropout


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def output_is_loss(output: Tensor, target: Tensor) -> Tensor:
    """For modules, such as Quadratic, that compute their own loss."""
    return output


class FlatModel:
    """init / grad / predict on flat parameters, for one architecture."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        loss: Loss = cross_entropy,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        stacked: bool | None = None,
    ) -> None:
        self._build, self._loss, self.dtype, self.device = build, loss, dtype, torch.device(device)
        self._template = _seeded(build, 0).to(self.device, dtype).requires_grad_(False)
        self._own = threading.local()
        self._params = _Layout(dict(self._template.named_parameters()))
        floats = {name: b for name, b in self._template.named_buffers() if b.is_floating_point()}
        self._stats = _Layout(floats)
        self._check()
        self.size, self.stats_size = self._params.size, self._stats.size
        self.dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in self._template.modules())
        self.stacked = self._stacks_well() if stacked is None else stacked
        if self.stacked and self.stats_size:
            raise WaffleError("a model with running statistics trains row by row: leave `stacked` unset or false")
        self._stacked_grad = torch.vmap(torch.func.grad(self._row_loss, has_aux=True), randomness="error")

    def _check(self) -> None:
        if not self._params.size:
            raise WaffleError("expected a model with parameters to train, got one without any")
        for name, module in self._template.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
                raise WaffleError(f"{name}: BatchNorm needs a momentum here; its cumulative average is not supported")

    def _stacks_well(self) -> bool:
        """Padding would spoil running statistics; and one CPU core convolves faster row by row (docs/design.md)."""
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in self._template.modules())
        return not self._stats.size and not (convolves and self.device.type == "cpu")

    def _module(self, training: bool) -> nn.Module:
        """This thread's own copy: functional_call puts its tensors into the module while it runs."""
        if not hasattr(self._own, "modules"):
            self._own.modules = {mode: copy.deepcopy(self._template).train(mode) for mode in (True, False)}
        return self._own.modules[training]  # type: ignore[no-any-return]

    def init(self, seed: int) -> Net:
        """A random model that depends on the seed alone."""
        module = _seeded(self._build, derive(seed, "init")).to(dtype=self.dtype)
        params = self._params.flatten(dict(module.named_parameters()))
        stats = self._stats.flatten(dict(module.named_buffers()))
        return Net(params.to(self.device), stats.to(self.device, self.dtype))

    def grad(self, params: Tensor, stats: Tensor, batch: Batch) -> Net:
        """Gradient of each row's mean loss over its mini-batch, and its statistics afterwards."""
        if self.stacked:
            return Net(*self._stacked_grad(params, stats, *batch))
        rows = [self._row_grad(p, s, Batch(*b)) for p, s, *b in zip(params, stats, *batch, strict=True)]
        return Net(torch.stack([g for g, _ in rows]), torch.stack([s for _, s in rows]))

    def _row_grad(self, params: Tensor, stats: Tensor, batch: Batch) -> Net:
        held = batch.weight > 0
        if not held.all():
            batch = Batch(batch.x[held], batch.y[held], batch.weight[held], batch.key)
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            loss, new_stats = self._row_loss(leaf, stats.clone(), *batch)
            (gradient,) = torch.autograd.grad(loss, leaf)
        return Net(gradient, new_stats.detach())

    def _row_loss(
        self, params: Tensor, stats: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        buffers = self._stats.unflatten(stats)
        with _dropout(key, active=self.dropout):
            output = torch.func.functional_call(
                self._module(training=True), {**self._params.unflatten(params), **buffers}, (x,)
            )
        loss = (self._loss(output, y) * weight).sum() / weight.sum().clamp(min=1)
        return loss, self._stats.flatten(buffers) if buffers else stats

    @torch.no_grad()
    def predict(self, params: Tensor, stats: Tensor, x: Tensor) -> Tensor:
        """Outputs of one model, its statistics frozen."""
        tensors = {**self._params.unflatten(params), **self._stats.unflatten(stats)}
        return torch.func.functional_call(self._module(training=False), tensors, (x,))  # type: ignore[no-any-return]

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        return self._loss(output, target)

    def state_dict(self, net: Net) -> dict[str, Tensor]:
        """One model's named tensors, for saving or for `module.load_state_dict(..., strict=False)`."""
        tensors = {**self._params.unflatten(net.params), **self._stats.unflatten(net.stats)}
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def fingerprint(self) -> str:
        """Names and shapes of all tensors: two models that share it can exchange updates."""
        layout = repr((self.dtype, self._params.shapes, self._stats.shapes))
        return f"{derive(0, layout):016x}"


class _Layout:
    """Where each named tensor lies in a flat vector."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self._sizes = [t.numel() for t in tensors.values()]
        self.size = sum(self._sizes)

    def flatten(self, tensors: dict[str, Any]) -> Tensor:
        parts = [tensors[name].detach().reshape(-1) for name in self.shapes]
        return torch.cat(parts) if parts else torch.empty(0)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, self._sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class _SeededDropout(TorchFunctionMode):
    """Dropout whose mask depends on the step's key and on nothing that runs beside it."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.calls = key, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.dropout:
            return func(*args, **kwargs)
        named = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        x, p = named["input"], named.get("p", 0.5)
        if not named.get("training", True) or p == 0:
            return x
        self.calls += 1
        draws = noise((self.key + self.calls)[None], x.numel()).view(x.shape)
        return torch.where(draws < int(p * 2**63), 0.0, x / (1 - p))


@contextmanager
def _dropout(key: Tensor, active: bool) -> Iterator[None]:
    if not active:
        yield
        return
    with _SeededDropout(key):
        yield
