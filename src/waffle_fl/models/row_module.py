"""Row modules: one row at a time in a module of its own, for models that are too large to stack.

On a GPU several row modules run in parallel, each on its own CUDA stream, so that the small kernels of one row fill the
gaps of another.

What it gains  rows abreast: 1.4 x on DLA
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from waffle_fl.models.cpu_conv_pool import Rewriting
from waffle_fl.models.folded import SeededDropout
from waffle_fl.models.layout import Layout
from waffle_fl.models.seeding import seeded

TOLERANCE = 1e-3  # relative error of a rewritten gradient in float32: a wrong one is far off


class _Traits(NamedTuple):
    """What a caller must know about a module."""

    takes_last: bool  # accepts images in channels-last layout
    drops: bool  # uses dropout
    rewritten: bool  # is faster with its convolutions rewritten (cpu_conv_pool)


class RowModule:
    """A module whose parameters and statistics are views of two flat vectors, so that loading a row is two copies."""

    def __init__(self, template: nn.Module, params: Layout, stats: Layout) -> None:
        self.module = copy.deepcopy(template).train()
        self._layout = params
        self._rewriting = Rewriting()
        self._traits: dict[torch.Size, _Traits] = {}  # by batch shape, observed at the first call
        first = next(self.module.parameters())
        self.params, self.stats = first.new_empty(params.size), first.new_empty(stats.size)
        self.stream = torch.cuda.Stream() if first.is_cuda else None  # type: ignore[no-untyped-call]
        named = dict(self.module.named_parameters())
        trained, carried = params.unflatten(self.params), stats.unflatten(self.stats)
        for name, part in {**trained, **carried}.items():
            if name in named:
                named[name].data = part
        self._buffers = {name: part for name, part in carried.items() if name not in named}
        self._attach_buffers()
        self._leaves = [named[name].requires_grad_() for name in trained]

    def _attach_buffers(self) -> None:
        for name, part in self._buffers.items():
            owner, _, last = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[last] = part

    def fill(self, params: Tensor, stats: Tensor) -> None:
        self.params.copy_(params)
        if len(self.stats):
            self.stats.copy_(stats)

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        """Run the forward pass; images are in channels-last layout if possible, which CPU and GPU convolve faster."""
        if x.shape not in self._traits:
            with seeded(0, x.device):  # draws of the trial must not change later draws
                self._traits[x.shape] = self._observe(x.clone(), key)
        traits = self._traits[x.shape]
        x = channels_last(x) if traits.takes_last and not traits.rewritten else x
        with (
            self._rewriting if traits.rewritten else nullcontext(),
            SeededDropout(key) if traits.drops else nullcontext(),
        ):
            return self.module(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _observe(self, x: Tensor, key: Tensor) -> _Traits:
        """Try a copy of the module on two samples, and the rewriting on the whole batch."""
        rewritten = self._gains_by_rewriting(x, key)
        with SeededDropout(key):
            takes_last = accepts_channels_last(self.module, x)
        with SeededDropout(key) as seeded:
            copy.deepcopy(self.module)(x[:2])
        return _Traits(takes_last=takes_last, drops=seeded.dropouts > 0, rewritten=rewritten)

    def _gains_by_rewriting(self, x: Tensor, key: Tensor) -> bool:
        """Whether all convolutions can be computed as window products, with the same gradient."""
        if x.is_cuda or x.ndim != 4:
            return False
        rewriting = Rewriting()
        try:
            ours, plain = (self._probe(x, key, mode) for mode in (rewriting, nullcontext()))
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return False
        all_products = rewriting.products == rewriting.convolutions > 0
        return all_products and bool((ours - plain).norm() <= TOLERANCE * plain.norm())

    @torch.enable_grad()
    def _probe(self, x: Tensor, key: Tensor, mode: AbstractContextManager[Any]) -> Tensor:
        """Return a gradient of a copy of the module."""
        module = copy.deepcopy(self.module)
        with mode, SeededDropout(key):
            output = module(x)
        leaves = [p for p in module.parameters() if p.requires_grad]
        parts = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    def differentiate(self, losses: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """Write the gradient of the weighted sum of `losses` into the row `gradient`."""
        parts = torch.autograd.grad(losses, self._leaves, weight, allow_unused=True, materialize_grads=True)
        if gradient.is_cuda:
            copy_each(list(self._layout.unflatten(gradient).values()), parts)
        else:
            torch.cat([part.reshape(-1) for part in parts], out=gradient)

    def current_stats(self) -> Tensor:
        """Return the statistics after a pass, including buffers that the module replaced instead of updating."""
        for name, now in self.module.named_buffers():
            if name in self._buffers and now is not self._buffers[name]:
                self._buffers[name].copy_(now)
        self._attach_buffers()
        return self.stats


def copy_each(targets: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy each part to its target: parts with equal strides in a few kernels, the others one by one.

    `torch.cat` would copy the latter twice.
    """
    same_strides = [target.stride() == part.stride() for target, part in zip(targets, parts, strict=True)]
    if any(same_strides):
        torch._foreach_copy_(list(compress(targets, same_strides)), list(compress(parts, same_strides)))
    for target, part, same in zip(targets, parts, same_strides, strict=True):
        if not same:
            target.copy_(part)


@contextmanager
def synchronised_streams(modules: Sequence[RowModule]) -> Iterator[None]:
    """Synchronise the row modules' streams: their work starts after earlier work and ends before later work."""
    streams = [module.stream for module in modules if module.stream]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    yield
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


@torch.no_grad()
def accepts_channels_last(module: nn.Module, x: Tensor) -> bool:
    """Whether the module takes these samples in channels-last layout, and convolves them faster, as a trial shows."""
    if x.ndim != 4 or (x.dtype == torch.float64 and not x.is_cuda):  # much slower in float64 on a CPU
        return False
    try:
        copy.deepcopy(module)(channels_last(x[:2]))
    except RuntimeError:
        return False
    return True


def channels_last(images: Tensor) -> Tensor:
    """Return the images in channels-last layout; an explicit copy, because one channel matches either layout."""
    n, channels, height, width = images.shape
    copied = images.new_empty(n, height, width, channels)
    return copied.permute(0, 3, 1, 2).copy_(images)
