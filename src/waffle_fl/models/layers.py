"""Layers: which of a network's flat numbers belong to which of its modules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from torch import nn

from waffle_fl.errors import WaffleError
from waffle_fl.models.row_module import Layout

Stretches: TypeAlias = tuple[tuple[str, int], ...]  # (layer, count of numbers), as they lie in a flat vector


@dataclass(frozen=True)
class Layers:
    """The modules that hold numbers of their own, in the order of their definition, and where those numbers lie."""

    names: tuple[str, ...]
    batch_norms: frozenset[str]
    params: Stretches
    stats: Stretches

    @classmethod
    def of(cls, module: nn.Module, params: Layout, stats: Layout) -> Layers:
        trained, carried = _stretches(params), _stretches(stats)
        holders = {layer for layer, _ in (*trained, *carried)}
        modules = {name: part for name, part in module.named_modules() if name in holders}
        norms = (name for name, part in modules.items() if isinstance(part, nn.modules.batchnorm._BatchNorm))
        return cls(tuple(modules), frozenset(norms), trained, carried)

    def head(self, count: int) -> frozenset[str]:
        """The last `count` layers that train, and whatever was defined after the first of them."""
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
    """The module that a tensor belongs to; a parametrised weight, such as weight norm's, to the layer that uses it."""
    return re.sub(r"(^|\.)parametrizations\..*|(^|\.)[^.]*$", "", name, count=1)
