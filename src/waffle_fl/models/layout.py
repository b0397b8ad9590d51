"""The position of each named tensor in a flat vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Layout:
    """The position of each named tensor in a flat vector."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self._sizes = [t.numel() for t in tensors.values()]
        self.size = sum(self._sizes)

    def flatten(self, tensors: dict[str, Any]) -> Tensor:
        parts = [tensors[name].detach().reshape(-1) for name in self.shapes]
        return torch.cat(parts) if parts else torch.empty(0)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return named views of a vector (P,), or of rows (N, P) with the rows as first dimension."""
        parts, rows = torch.split(flat, self._sizes, dim=-1), flat.shape[:-1]
        return {n: part.view((*rows, *shape)) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}
