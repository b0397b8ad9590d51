"""Layers: which entries of a network's flat vectors belong to which of its modules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from torch import nn

from waffle_fl.errors import WaffleError
from waffle_fl.models.row_module import Layout

Stretches: TypeAlias = tuple[tuple[str, int], ...]  # (layer, number of entries), in the order of the flat vector


@dataclass(frozen=True)
class Layers:
    """The modules with parameters or statistics of their own, in definition order, and their parts of flat vectors."""

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
