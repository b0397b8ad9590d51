"""Layers: which entries of a network's flat vectors belong to which of its modules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

from torch import nn

from waffle_fl.errors import WaffleError
from waffle_fl.models.layout import Layout

Stretches: TypeAlias = tuple[tuple[str, int], ...]  # (layer, number of entries), in the order of the flat vector


class LastLinear(NamedTuple):
    """The last linear layer: where its tensors are in flat vectors, and its sizes."""

    name: str
    weight: int  # position of the first entry of its weight (outputs, features)
    bias: int  # position of the first entry of its bias; -1 if it has none
    outputs: int
    features: int


@dataclass(frozen=True)
class Layers:
    """The modules with parameters or statistics of their own, in definition order, and their parts of flat vectors."""

    names: tuple[str, ...]
    batch_norms: frozenset[str]
    params: Stretches
    stats: Stretches
    last_linear: LastLinear | None = None

    @classmethod
    def of(cls, module: nn.Module, params: Layout, stats: Layout) -> Layers:
        trained, carried = _stretches(params), _stretches(stats)
        holders = {layer for layer, _ in (*trained, *carried)}
        modules = {name: part for name, part in module.named_modules() if name in holders}
        norms = (name for name, part in modules.items() if isinstance(part, nn.modules.batchnorm._BatchNorm))
        return cls(tuple(modules), frozenset(norms), trained, carried, _last_linear(module, params))

    def head(self, count: int) -> frozenset[str]:
        """Return the last `count` layers that train, and all layers defined after the first of these."""
        trained = {layer for layer, _ in self.params}
        starts = [i for i, name in enumerate(self.names) if name in trained]
        if count > len(starts):
            raise WaffleError(
                f"expected head_layers of at most {len(starts)}, which is all this model has, got {count}"
            )
        return frozenset(self.names[starts[-count] :] if count else ())


def _stretches(layout: Layout) -> Stretches:
    return tuple((_layer_of(name), prod(shape)) for name, shape in layout.shapes.items())


def _layer_of(name: str) -> str:
    """Return the module that owns a tensor; a parametrised weight (such as weight norm's) belongs to its layer."""
    return re.sub(r"(^|\.)parametrizations\..*|(^|\.)[^.]*$", "", name, count=1)


def _last_linear(module: nn.Module, layout: Layout) -> LastLinear | None:
    """Return the linear layer that is defined last; None if there is none, or if its weight is no plain parameter."""
    linears = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linears:
        return None
    name, layer = linears[-1]
    prefix = f"{name}." if name else ""
    at, starts = 0, {}
    for tensor, shape in layout.shapes.items():
        starts[tensor], at = at, at + prod(shape)
    weight, bias = starts.get(f"{prefix}weight"), starts.get(f"{prefix}bias", -1)
    return None if weight is None else LastLinear(name, weight, bias, layer.out_features, layer.in_features)
