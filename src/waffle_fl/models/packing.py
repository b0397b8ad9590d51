"""Moves a row of flat parameters to the tensors of a module and back, each way in one Triton kernel.

The weights of convolutions and linear layers have the dtype and layout in which the GPU multiplies them: channels last,
perhaps bfloat16. All other parameters stay float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from waffle_fl.models.layout import Layout

ELEMENTS = 2048  # moved by a program
HIGH, LOW, TURNED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of blocks: see `Packing._blocks`
LOWERED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    flat, low, high, table, BACK: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Move one block between the flat row and its tensor: I x K numbers, in the flat row K fastest, there I."""
    entry = table + tl.program_id(0) * 6
    source, target, size = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    taps, inputs, kind = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    i, k = tl.arange(0, BI)[:, None], tl.arange(0, BK)[None, :]
    element = i * taps + k
    held = (k < taps) & (element < size)
    turned = target + k * inputs + i
    if kind == TURNED:
        if BACK:
            tl.store(flat + source + element, tl.load(low + turned, mask=held).to(tl.float32), mask=held)
        else:
            tl.store(low + turned, tl.load(flat + source + element, mask=held), mask=held)
    elif kind == LOW:
        if BACK:
            tl.store(flat + source + element, tl.load(low + target + element, mask=held).to(tl.float32), mask=held)
        else:
            tl.store(low + target + element, tl.load(flat + source + element, mask=held), mask=held)
    else:
        if BACK:
            tl.store(flat + source + element, tl.load(high + target + element, mask=held), mask=held)
        else:
            tl.store(high + target + element, tl.load(flat + source + element, mask=held), mask=held)


class Packing:
    """The tensors of a module as views of two vectors: `low` has the dtype of products, `high` is float32.

    `padded` names convolution weights whose input channels are filled up with zeros to a number that is given.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, padded: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        weights = {id(part.weight) for part in module.modules() if isinstance(part, LOWERED)}
        named = dict(module.named_parameters())
        self._places = _places(layout.shapes, padded, {name for name in layout.shapes if id(named[name]) in weights})
        turned = [place.taps for place in self._places.values() if place.kind == TURNED.value]
        self._bk = int(triton.next_power_of_2(max([1, *turned])))
        self._bi = max(1, ELEMENTS // self._bk)
        low, high = (
            sum(place.size for place in self._places.values() if place.lowered == lowered) for lowered in (True, False)
        )
        self.low = torch.zeros(low, dtype=dtype, device=device)
        self.high = torch.zeros(high, dtype=torch.float32, device=device)
        blocks = [block for place in self._places.values() for block in self._blocks(place)]
        self._table = torch.tensor(blocks, dtype=torch.int32).to(device)

    def _blocks(self, place: _Place) -> list[tuple[int, ...]]:
        """Cut one tensor into blocks: where each starts in the flat row and in its vector, its size and kind."""
        if place.kind != TURNED.value:
            step = self._bi * self._bk
            return [
                (place.source + at, place.start + at, min(step, place.size - at), self._bk, 1, place.kind)
                for at in range(0, place.size, step)
            ]
        taps, inputs, width = place.taps, place.shape[1], place.width
        return [
            (place.source + (o * inputs + i) * taps, place.start + o * width * taps + i,
             min(self._bi, inputs - i) * taps, taps, width, place.kind)
            for o in range(place.shape[0])
            for i in range(0, inputs, self._bi)
        ]  # fmt: skip

    def views(self) -> dict[str, Tensor]:
        """Return the tensor of each parameter."""
        found = {}
        for name, place in self._places.items():
            part = (self.low if place.lowered else self.high)[place.start : place.start + place.size]
            if place.kind == TURNED.value:
                found[name] = part.view(place.shape[0], *place.shape[2:], place.width).movedim(-1, 1)
            else:
                found[name] = part.view(place.shape)
        return found

    def pack(self, flat: Tensor) -> None:
        """Fill the tensors from a row of flat parameters."""
        self._run(flat, self.low, self.high, back=False)

    def unpack(self, parts: dict[str, Tensor], flat: Tensor) -> None:
        """Write gradients of the tensors into a row of flat parameters."""
        low = [_in_layout(part) for name, part in parts.items() if self._places[name].lowered]
        high = [part.reshape(-1) for name, part in parts.items() if not self._places[name].lowered]
        empty = self.high.new_empty(0)
        self._run(flat, torch.cat(low) if low else empty, torch.cat(high) if high else empty, back=True)

    def _run(self, flat: Tensor, low: Tensor, high: Tensor, back: bool) -> None:
        _move[(len(self._table),)](flat, low, high, self._table, BACK=back, BI=self._bi, BK=self._bk, num_warps=4)


def _in_layout(part: Tensor) -> Tensor:
    return (part.movedim(1, -1) if part.ndim > 2 else part).reshape(-1)


class _Place(NamedTuple):
    """Where a tensor is in a flat row and in its vector."""

    source: int
    start: int
    shape: tuple[int, ...]
    width: int  # input channels, filled up
    taps: int
    kind: int

    @property
    def lowered(self) -> bool:
        return self.kind != HIGH.value  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Number of elements in its vector."""
        return prod(self.shape) // self.shape[1] * self.width if self.kind == TURNED.value else prod(self.shape)


def _places(
    shapes: Mapping[str, tuple[int, ...]], padded: Mapping[str, int], lowered: Collection[str]
) -> dict[str, _Place]:
    """Return the place of each tensor; only weights of several taps, or filled up, change their layout."""
    places, source, ends = {}, 0, {True: 0, False: 0}
    for name, shape in shapes.items():
        taps = prod(shape[2:])
        kind = HIGH if name not in lowered else TURNED if taps > 1 or name in padded else LOW
        low = name in lowered
        place = _Place(source, ends[low], shape, padded.get(name, shape[1] if len(shape) > 1 else 1), taps, kind.value)
        places[name] = place
        source += prod(shape)
        ends[low] += place.size
    return places
