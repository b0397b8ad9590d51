"""FlatModel: any `torch.nn.Module` as rows of flat parameters.

Running statistics (the float buffers of BatchNorm), and parameters that the module froze, are rows of their own, beside
the trained ones and never inside an update, so distances do not see them. Integer buffers are constants of the module
and are neither sent nor averaged.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from waffle_fl.errors import WaffleError
from waffle_fl.models.layers import Layers
from waffle_fl.models.replay import Replays
from waffle_fl.models.stacked import SeededDropout, Stacking
from waffle_fl.models.vessel import Layout, Vessel, abreast
from waffle_fl.randomness import derive

Precision: TypeAlias = Literal["float32", "float64", "tf32", "bf16"]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (output, target) -> one loss a sample

STACKED_PARAMETERS = 1_000_000
ABREAST = 10  # rows of a large model that share a GPU: fewer leave it idle, more gain little
REPLAYED_ROWS = 4  # that are not stacked: a trace has the operations of each
UNSEEDED = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
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


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """For regression: one number a sample, as (n, 1) or (n,)."""
    return (output.reshape(target.shape) - target) ** 2


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
        precision: Precision = "float32",
        device: str | torch.device = "cpu",
        stacked: bool | None = None,
        compiled: bool = False,
    ) -> None:
        self._build, self._loss, self.precision, self.device = build, loss, precision, torch.device(device)
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        module = _seeded(build, 0).to(self.device, self.dtype)
        self._template = copy.deepcopy(module).requires_grad_(False)
        self._own = threading.local()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        moving = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        self._params, self._stats = Layout(trained), Layout({**frozen, **moving})
        self.normalises = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
        self.layers = Layers.of(module, self._params, self._stats)
        self._check()
        self.size, self.stats_size = self._params.size, self._stats.size
        self.stacked = self._stacks_well() if stacked is None else stacked
        if self.stacked and (self.stats_size or self.normalises):
            raise WaffleError(
                "a model with statistics of its batches trains row by row: leave `stacked` unset or false"
            )
        self.compiled = compiled and not self.stacked
        self._folds: bool | None = None  # does the folded pass fit this module? found out at the first gradient

    def _check(self) -> None:
        if not self._params.size:
            raise WaffleError("expected a model with parameters to train, got one without any")
        for name, module in self._template.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
                raise WaffleError(f"{name}: BatchNorm needs a momentum here; its cumulative average is not supported")
            if isinstance(module, UNSEEDED):
                raise WaffleError(f"{name}: {type(module).__name__} draws numbers that no seed governs; use nn.Dropout")

    def _stacks_well(self) -> bool:
        """Padding spoils running statistics, large models fill the device alone, a CPU convolves better row by row."""
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in self._template.modules())
        small = self._params.size <= STACKED_PARAMETERS
        plain = not self._stats.size and not self.normalises
        return plain and small and not (convolves and self.device.type == "cpu")

    def _module(self, training: bool) -> nn.Module:
        """This thread's own copy: functional_call puts its tensors into the module while it runs."""
        if not hasattr(self._own, "modules"):
            self._own.modules = {mode: copy.deepcopy(self._template).train(mode) for mode in (True, False)}
        return self._own.modules[training]  # type: ignore[no-any-return]

    def init(self, seed: int) -> Net:
        """A random model that depends on the seed alone."""
        module = _seeded(self._build, derive(seed, "init")).to(dtype=self.dtype)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        params, stats = self._params.flatten(tensors), self._stats.flatten(tensors)
        return Net(params.to(self.device), stats.to(self.device, self.dtype))

    def grad(self, params: Tensor, stats: Tensor, batch: Batch) -> Net:
        """Gradient of each row's mean loss over its mini-batch, and its statistics afterwards.

        Several models a row are taken one block of rows after another: the batch is repeated for each.
        """
        models = len(params) // len(batch.x)
        if models > 1:
            batch = Batch(*(part.repeat(models, *[1] * (part.ndim - 1)) for part in batch))
        if self.device.type == "cuda" or not (self.stacked or len(params) <= REPLAYED_ROWS):
            return self._grad(params, stats, *batch)
        if not hasattr(self._own, "replays"):
            self._own.replays = Replays(self._grad)
        return Net(*self._own.replays(params, stats, *batch))

    def _grad(self, params: Tensor, stats: Tensor, *parts: Tensor) -> Net:
        batch = Batch(*parts)
        if not self.stacked:
            return self._grad_row_by_row(params, stats, batch)
        folds = self._fits(params, stats, batch)
        gradient = self._folded_grad(params, batch) if folds else self._vmapped_grad(params, stats, batch)
        return Net(gradient, stats)

    def plain_grad(self, params: Tensor, stats: Tensor, batch: Batch) -> Net:
        """As `grad`, by autograd on the module itself, one row after another: what the faster ways must agree with."""
        batches = [Batch(*(part[i % len(batch.x)] for part in batch)) for i in range(len(params))]
        rows = [self._plain_row_grad(*row) for row in zip(params, stats, batches, strict=True)]
        return Net(*(torch.stack(parts) for parts in zip(*rows, strict=True)))

    def _plain_row_grad(self, params: Tensor, stats: Tensor, batch: Batch) -> Net:
        leaf = params.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss, after = self._row_loss(leaf, stats.clone(), *batch)
            (gradient,) = torch.autograd.grad(loss, leaf)
        return Net(gradient, after.detach())

    def _fits(self, params: Tensor, stats: Tensor, batch: Batch) -> bool:
        if self._folds is None:
            self._folds = self._folding_is_right(params, stats, batch)
        return self._folds

    def _grad_row_by_row(self, params: Tensor, stats: Tensor, batch: Batch) -> Net:
        """Each row in a vessel of its own, as many abreast as the device bears."""
        batch = batch._replace(weight=batch.weight / batch.weight.sum(dim=1, keepdim=True).clamp(min=1))
        gradient, after = params.new_empty(params.shape), stats.new_empty(stats.shape)
        for start in range(0, len(params), self.abreast):
            rows = range(start, min(start + self.abreast, len(params)))
            vessels = self._vessels()[: len(rows)]
            with abreast(vessels):
                for vessel, i in zip(vessels, rows, strict=True):
                    with torch.cuda.stream(vessel.stream) if vessel.stream else nullcontext():
                        vessel.fill(params[i], stats[i])
                        self._row_grad(vessel, Batch(*(part[i] for part in batch)), gradient[i])
                        if self.stats_size:
                            after[i] = vessel.settled()
        return Net(gradient, after)

    def _row_grad(self, vessel: Vessel, batch: Batch, gradient: Tensor) -> None:
        with torch.enable_grad():
            output = self._in_precision(vessel, batch.x, batch.key, self.compiled)
            vessel.differentiate(self._loss(output, batch.y), batch.weight, gradient)

    @property
    def abreast(self) -> int:
        """How many rows of an unstacked model train at the same time in this process."""
        return ABREAST if self.device.type == "cuda" else 1

    def _vessels(self) -> list[Vessel]:
        if not hasattr(self._own, "vessels"):
            self._own.vessels = [Vessel(self._template, self._params, self._stats) for _ in range(self.abreast)]
        return self._own.vessels  # type: ignore[no-any-return]

    def _in_precision(self, call: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if self.precision != "bf16":
            return call(*arguments)
        with torch.autocast(self.device.type, torch.bfloat16):
            return call(*arguments).to(self.dtype)

    def _folded_grad(self, params: Tensor, batch: Batch) -> Tensor:
        if len(params) == 1:  # a stack of one would add up in another order: its bits must not depend on company
            return self._folded_grad(params.expand(2, -1), Batch(*(part.expand(2, *part.shape[1:]) for part in batch)))[
                :1
            ]
        rows = len(params)
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            with Stacking(batch.key, self.products) as stack:
                output = stack.settled(self._call(self._params.unflatten(leaf), batch.x.flatten(0, 1)))
            losses = self._loss(output, batch.y.flatten(0, 1)).view(rows, -1)
            per_row = (losses * batch.weight).sum(dim=1) / batch.weight.sum(dim=1).clamp(min=1)
            (gradient,) = torch.autograd.grad(per_row.sum(), leaf)
        return gradient

    def _vmapped_grad(self, params: Tensor, stats: Tensor, batch: Batch) -> Tensor:
        gradient = torch.func.grad(self._row_loss, has_aux=True)
        return torch.vmap(gradient, randomness="error")(params, stats, *batch)[0]  # type: ignore[no-any-return]

    def _folding_is_right(self, params: Tensor, stats: Tensor, batch: Batch) -> bool:
        """Compare the folded pass with vmap's on a few samples, in float64 and on the CPU, where both are quick."""
        pick = torch.arange(3, device=params.device) % len(params)
        few = [part[pick].cpu() for part in (params, stats, *batch)]
        few = [part.double() if part.is_floating_point() else part for part in few]
        small = Batch(*(part[:, :2] if part.ndim > 1 else part for part in few[2:]))
        twin = FlatModel(self._build, loss=self._loss, precision="float64", stacked=True)
        try:
            folded = twin._folded_grad(few[0], small)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return False
        expected = twin._vmapped_grad(few[0], few[1], small)
        return torch.allclose(folded, expected, rtol=1e-8, atol=1e-10, equal_nan=True)

    def _row_loss(
        self, params: Tensor, stats: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        buffers = self._stats.unflatten(stats)
        with SeededDropout(key):
            output = self._call({**self._params.unflatten(params), **buffers}, x)
        loss = (self._loss(output, y) * weight).sum() / weight.sum().clamp(min=1)
        return loss, self._stats.flatten(buffers) if buffers else stats

    def _call(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return self._in_precision(torch.func.functional_call, self._module(training=True), tensors, (x,))

    @torch.no_grad()
    def predict(self, params: Tensor, stats: Tensor, x: Tensor) -> Tensor:
        """Outputs of one model, its statistics frozen."""
        tensors = {**self._params.unflatten(params), **self._stats.unflatten(stats)}
        return torch.func.functional_call(self._module(training=False), tensors, (x,))  # type: ignore[no-any-return]

    def features(self, params: Tensor, stats: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of one model, and what its last linear layer was given; the samples, where it has no such layer."""
        seen = [x]
        layers = [part for part in self._module(training=False).modules() if isinstance(part, nn.Linear)]
        hooks = [layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in layers]
        try:
            output = self.predict(params, stats, x)
        finally:
            for hook in hooks:
                hook.remove()
        return output, seen[-1].flatten(1)

    @torch.no_grad()
    def predict_rows(self, params: Tensor, x: Tensor) -> Tensor:
        """Outputs of many models without running statistics, each on samples of its own: (N, B, ...)."""
        if not self._folds:
            return torch.stack([self.predict(p, p[:0], samples) for p, samples in zip(params, x, strict=True)])
        keys = torch.zeros(len(params), dtype=torch.int64, device=self.device)
        with Stacking(keys, self.products) as stack:
            tensors = self._params.unflatten(params)
            output = torch.func.functional_call(self._module(training=False), tensors, (x.flatten(0, 1),))
            output = stack.settled(output)
        return output.view(*x.shape[:2], *output.shape[1:])  # type: ignore[no-any-return]

    @torch.no_grad()
    def batch_losses(self, params: Tensor, stats: Tensor, batch: Batch) -> Tensor:
        """(N, B): what each row's model, its statistics frozen, loses on each sample of its batch; 0 on padding."""
        if self.stacked and self._fits(params, stats, batch):
            pair = params.expand(2, -1) if len(params) == 1 else params  # a stack of one adds up in another order
            output = self.predict_rows(pair, batch.x.expand(len(pair), *batch.x.shape[1:]))[: len(params)]
        else:
            output = torch.stack([self.predict(*row) for row in zip(params, stats, batch.x, strict=True)])
        losses = self._loss(output.flatten(0, 1), batch.y.flatten()).view(batch.weight.shape)
        return torch.where(batch.weight > 0, losses, 0.0)

    @property
    def products(self) -> str:
        """How kernels of our own multiply: in TF32, or in three TF32 products that together are exact float32."""
        return "tf32" if self.precision == "tf32" else "tf32x3"

    def module(self) -> nn.Module:
        """This thread's copy of the network, in evaluation mode; what its parameters hold has no meaning."""
        return self._module(training=False)

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


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
