"""Passes: outputs and gradients of the rows of one module, computed in one of three ways.

Row by row works for any module. The two others stack rows: folded into the batch, or under vmap. `stacking_trial` finds
out which of them is exact for a module.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from waffle_fl.models import fused_row_module
from waffle_fl.models.batch import Batch, Loss, Net
from waffle_fl.models.building import Precision
from waffle_fl.models.folded import SeededDropout, Stacking
from waffle_fl.models.fused_row_module import FusedRowModule
from waffle_fl.models.layout import Layout
from waffle_fl.models.row_module import RowModule, accepts_channels_last, channels_last, synchronised_streams
from waffle_fl.models.seeding import seeded
from waffle_fl.randomness import derive

PARALLEL_ROWS = 10  # rows of a large model that train in parallel on a GPU: fewer leave it idle, more gain little


class Passes:
    """A module, the layout of its tensors in flat vectors, and its passes; takes ownership of the module."""

    def __init__(self, module: nn.Module, loss: Loss, precision: Precision) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        moving = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        self.params, self.stats = Layout(trained), Layout({**frozen, **moving})
        self.template, self.loss, self.precision = module.requires_grad_(False), loss, precision
        self.device = next(module.parameters(), torch.empty(0)).device
        self.seeded = False  # whether each forward pass must be seeded
        self._takes_last: bool | None = None  # whether it evaluates images in channels-last layout; None: not tried
        self._own = threading.local()

    def add_input_hook(self, hook: Callable[[nn.Module, tuple[Any, ...]], Any]) -> None:
        """Add a forward pre-hook to the module."""
        self.template.register_forward_pre_hook(hook)
        self._own = threading.local()

    def module(self, training: bool) -> nn.Module:
        """Return this thread's own copy: functional_call puts tensors into the module while it runs."""
        if not hasattr(self._own, "modules"):
            self._own.modules = {mode: copy.deepcopy(self.template).train(mode) for mode in (True, False)}
        return self._own.modules[training]  # type: ignore[no-any-return]

    @property
    def parallel_rows(self) -> int:
        """Number of single rows that train in parallel in this process."""
        return PARALLEL_ROWS if self.device.type == "cuda" else 1

    @property
    def products(self) -> str:
        """How the Triton kernels multiply: in TF32, or in three TF32 products that together are exact float32."""
        return "tf32" if self.precision == "tf32" else "tf32x3"

    def plain(self, params: Tensor, stats: Tensor, batch: Batch) -> Net:
        """Return the gradient of one row by autograd on the module itself, the reference for the faster ways."""
        leaf = params.detach().clone().requires_grad_()
        carried = {name: part.clone() for name, part in self.stats.unflatten(stats).items()}
        with torch.enable_grad(), self._seeded_for(batch.key), SeededDropout(batch.key):
            output = self._call({**self.params.unflatten(leaf), **carried}, batch.x)
            loss = (self.loss(output, batch.y) * batch.weight).sum() / batch.weight.sum().clamp(min=1)
            (gradient,) = torch.autograd.grad(loss, leaf)
        return Net(gradient, self.stats.flatten(carried) if carried else stats)

    def single(self, params: Tensor, stats: Tensor, batch: Batch) -> Net:
        """Return gradients computed row by row, up to `parallel_rows` rows at once, each in its own row module."""
        batch = batch._replace(weight=batch.weight / batch.weight.sum(dim=1, keepdim=True).clamp(min=1))
        gradient, after = params.new_empty(params.shape), stats.new_empty(stats.shape)
        for start in range(0, len(params), self.parallel_rows):
            rows = range(start, min(start + self.parallel_rows, len(params)))
            pool = self._row_modules()[: len(rows)]
            with synchronised_streams(pool):
                for row_module, i in zip(pool, rows, strict=True):
                    with torch.cuda.stream(row_module.stream) if row_module.stream else nullcontext():
                        row_module.fill(params[i], stats[i])
                        self._row_grad(row_module, Batch(*(part[i] for part in batch)), gradient[i])
                        if self.stats.size:
                            after[i] = row_module.current_stats()
        return Net(gradient, after)

    def single_without_padding(self, params: Tensor, stats: Tensor, batch: Batch) -> Tensor:
        """Return gradients computed row by row, for rows that were padded before the stacking test failed."""
        gradient = torch.zeros_like(params)
        for i, held in enumerate(batch.weight > 0):
            if held.any():
                x, y, weight = (part[i, held][None] for part in (batch.x, batch.y, batch.weight))
                row = slice(i, i + 1)
                gradient[row] = self.single(params[row], stats[row], Batch(x, y, weight, batch.key[row])).params
        return gradient

    def _row_grad(self, row_module: RowModule, batch: Batch, gradient: Tensor) -> None:
        with torch.enable_grad(), self._seeded_for(batch.key):
            output = self._in_precision(row_module, batch.x, batch.key)
            row_module.differentiate(self.loss(output, batch.y), batch.weight, gradient)

    def _seeded_for(self, key: Tensor | None) -> AbstractContextManager[None]:
        """Seed the draws by the key of the row's step; in evaluation, without a key, they are always the same."""
        if not self.seeded:
            return nullcontext()
        return seeded(derive(0 if key is None else int(key), "forward pass"), self.device)

    def _row_modules(self) -> list[RowModule]:
        if not hasattr(self._own, "pool"):
            fused = fused_row_module.applies(self.template, self.precision)
            kind = partial(FusedRowModule, precision=self.precision) if fused else RowModule
            self._own.pool = [kind(self.template, self.params, self.stats) for _ in range(self.parallel_rows)]
        return self._own.pool  # type: ignore[no-any-return]

    def _in_precision(self, call: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if self.precision != "bf16":
            return call(*arguments)
        with torch.autocast(self.device.type, torch.bfloat16):
            return call(*arguments).float()

    def folded(self, params: Tensor, batch: Batch) -> Tensor:
        """Return gradients of rows without statistics, folded into one batch."""
        if len(params) == 1:  # a stack of one would sum in another order: bits must not depend on the stack's size
            return self.folded(params.expand(2, -1), Batch(*(part.expand(2, *part.shape[1:]) for part in batch)))[:1]
        rows = len(params)
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            with Stacking(batch.key, self.products) as stack:
                output = stack.resolve(self._call(self.params.unflatten(leaf), batch.x.flatten(0, 1)))
            losses = self.loss(output, batch.y.flatten(0, 1)).view(rows, -1)
            per_row = (losses * batch.weight).sum(dim=1) / batch.weight.sum(dim=1).clamp(min=1)
            (gradient,) = torch.autograd.grad(per_row.sum(), leaf)
        return gradient

    def vmapped(self, params: Tensor, batch: Batch) -> Tensor:
        """Return gradients of rows without statistics, under vmap."""
        gradient = torch.func.grad(self._row_loss)
        return torch.vmap(gradient, randomness="error")(params, *batch)  # type: ignore[no-any-return]

    def _row_loss(self, params: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor) -> Tensor:
        with SeededDropout(key):
            output = self._call(self.params.unflatten(params), x)
        return (self.loss(output, y) * weight).sum() / weight.sum().clamp(min=1)

    def _call(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return self._in_precision(torch.func.functional_call, self.module(training=True), tensors, (x,))

    def output(self, params: Tensor, stats: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of one model in evaluation mode."""
        x = self._in_fast_layout(x)
        with self._seeded_for(None):
            if not x.is_cuda:
                own = self._row_module()
                own.fill(params, stats)
                return own.module(x)  # type: ignore[no-any-return]
            tensors = {**self.params.unflatten(params), **self.stats.unflatten(stats)}
            return torch.func.functional_call(self.module(training=False), tensors, (x,))  # type: ignore[no-any-return]

    def evaluated_module(self, x: Tensor) -> nn.Module:
        """Return the module that `output` runs in this thread."""
        return self.module(training=False) if x.is_cuda else self._row_module().module

    def _row_module(self) -> RowModule:
        """Return this thread's module for evaluation on a CPU: faster than a functional call if it is small."""
        if not hasattr(self._own, "filled"):
            self._own.filled = RowModule(self.template, self.params, self.stats)
            self._own.filled.module.eval()
        return self._own.filled  # type: ignore[no-any-return]

    def _in_fast_layout(self, x: Tensor) -> Tensor:
        """Return images in the layout that a CPU convolves and pools faster, if the module takes it."""
        if x.is_cuda or x.ndim != 4 or self.seeded:
            return x
        if self._takes_last is None:
            self._takes_last = accepts_channels_last(self.module(training=False), x)
        return channels_last(x) if self._takes_last else x

    def folded_outputs(self, params: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of many models without statistics, folded into one batch."""
        keys = torch.zeros(len(params), dtype=torch.int64, device=self.device)
        with Stacking(keys, self.products) as stack:
            tensors = self.params.unflatten(params)
            output = torch.func.functional_call(self.module(training=False), tensors, (x.flatten(0, 1),))
            output = stack.resolve(output)
        return output.view(*x.shape[:2], *output.shape[1:])  # type: ignore[no-any-return]

    def plain_outputs(self, params: Tensor, stats: Tensor, batch: Batch) -> Tensor:
        """Return the outputs (N, B, ...) in training mode, one row after another."""
        outputs = []
        for p, s, x, key in zip(params, stats, batch.x, batch.key, strict=True):
            carried = {name: part.clone() for name, part in self.stats.unflatten(s).items()}
            with self._seeded_for(key), SeededDropout(key):
                outputs.append(self._call({**self.params.unflatten(p), **carried}, x))
        return torch.stack(outputs)

    def folded_training(self, params: Tensor, batch: Batch) -> Tensor:
        """Return the outputs of rows without statistics in training mode, folded into one batch."""
        if len(params) == 1:  # a stack of one would sum in another order, as in `folded`
            return self.folded_training(params.expand(2, -1), Batch(*(p.expand(2, *p.shape[1:]) for p in batch)))[:1]
        with Stacking(batch.key, self.products) as stack:
            output = stack.resolve(self._call(self.params.unflatten(params), batch.x.flatten(0, 1)))
        return output.view(*batch.weight.shape, *output.shape[1:])  # type: ignore[no-any-return]

    def vmapped_training(self, params: Tensor, batch: Batch) -> Tensor:
        """Return the outputs of rows without statistics in training mode, under vmap."""

        def output(params: Tensor, x: Tensor, key: Tensor) -> Tensor:
            with SeededDropout(key):
                return self._call(self.params.unflatten(params), x)

        return torch.vmap(output, randomness="error")(params, batch.x, batch.key)  # type: ignore[no-any-return]

    def tensors(self, net: Net) -> dict[str, Tensor]:
        """Return one model's tensors under all their names; a tensor that the module shares has several."""
        tensors = {**self.params.unflatten(net.params), **self.stats.unflatten(net.stats)}
        first: dict[int, str] = {}
        for name, held in (
            *self.template.named_parameters(remove_duplicate=False),
            *self.template.named_buffers(remove_duplicate=False),
        ):
            if name in tensors:
                first[id(held)] = name
            elif id(held) in first:
                tensors[name] = tensors[first[id(held)]]
        return tensors
