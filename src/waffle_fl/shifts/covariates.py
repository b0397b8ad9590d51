"""Covariate shifts: rotation, blur, noise, contrast, colour, feature scaling.

They use only element-wise sums and products in a fixed order, so that every machine computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from waffle_fl.errors import WaffleError
from waffle_fl.randomness import generator
from waffle_fl.shifts.groups import Member, check_groups, members


@runtime_checkable
class Covariate(Protocol):
    """A shift of the features; shapes do not change."""

    @property
    def groups(self) -> int: ...

    def transform(self, x: Tensor, member: Member, part: str, black: Tensor) -> Tensor:
        """Return the samples x of a part (train, validation, test), shifted for this agent; `black` (C,) of images."""
        ...


@dataclass(frozen=True)
class Rotate:
    """Rotate images anticlockwise about their centre, with bilinear interpolation; pixels from outside are black."""

    degrees: float
    groups: int = 2

    def __post_init__(self) -> None:
        if not abs(self.degrees) <= 360:
            raise WaffleError(f"rotate: expected degrees from -360 to 360, got {self.degrees:g}")
        check_groups("rotate", self.groups)

    def transform(self, x: Tensor, member: Member, part: str, black: Tensor) -> Tensor:
        check_images("rotate", x)
        return rotated(x, self.degrees * member.degree, black)


@dataclass(frozen=True)
class Blur:
    """Blur images with a Gaussian of `sigma` pixels."""

    sigma: float
    groups: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.sigma <= 10:
            raise WaffleError(f"blur: expected sigma above 0 and up to 10 pixels, got {self.sigma:g}")
        check_groups("blur", self.groups)

    def transform(self, x: Tensor, member: Member, part: str, black: Tensor) -> Tensor:
        check_images("blur", x)
        return blurred(x, self.sigma * member.degree)


@dataclass(frozen=True)
class Noise:
    """Add Gaussian noise of standard deviation `std` to every feature; it is the same every time a sample is used."""

    std: float
    groups: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.std <= 100:
            raise WaffleError(f"noise: expected a deviation above 0 and up to 100, got {self.std:g}")
        check_groups("noise", self.groups)

    def transform(self, x: Tensor, member: Member, part: str, black: Tensor) -> Tensor:
        drawn = generator(member.seed, "noise", member.agent, part).standard_normal(tuple(x.shape), dtype=np.float32)
        return x + self.std * member.degree * torch.from_numpy(drawn)


@dataclass(frozen=True)
class Contrast:
    """Scale all features about 0, the data set's mean; a factor below 1 lowers the contrast."""

    factor: float
    groups: int = 2

    def __post_init__(self) -> None:
        if not 0.01 <= self.factor <= 100:
            raise WaffleError(f"contrast: expected a factor from 0.01 to 100, got {self.factor:g}")
        check_groups("contrast", self.groups)

    def transform(self, x: Tensor, member: Member, part: str, black: Tensor) -> Tensor:
        return x * math.pow(self.factor, member.degree)


@dataclass(frozen=True)
class Colour:
    """Scale the brightness of each colour channel by exp(sigma z), one z per group and channel; black stays black."""

    sigma: float
    groups: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.sigma <= 3:
            raise WaffleError(f"colour: expected sigma above 0 and up to 3, got {self.sigma:g}")
        check_groups("colour", self.groups)

    def transform(self, x: Tensor, member: Member, part: str, black: Tensor) -> Tensor:
        check_images("colour", x)
        if not member.group:
            return x
        dark = black.view(-1, 1, 1)
        return dark + (x - dark) * _gains(self.sigma, "colour", member, tuple(dark.shape))


@dataclass(frozen=True)
class Scale:
    """Scale every feature by exp(sigma z), one z per group and feature, like differently calibrated instruments."""

    sigma: float
    groups: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.sigma <= 3:
            raise WaffleError(f"scale: expected sigma above 0 and up to 3, got {self.sigma:g}")
        check_groups("scale", self.groups)

    def transform(self, x: Tensor, member: Member, part: str, black: Tensor) -> Tensor:
        return x * _gains(self.sigma, "scale", member, tuple(x.shape[1:])) if member.group else x


def _gains(sigma: float, purpose: str, member: Member, shape: tuple[int, ...]) -> Tensor:
    drawn = generator(member.seed, purpose, member.group).standard_normal(shape)
    return torch.from_numpy(np.exp(sigma * drawn).astype(np.float32))


def check_images(kind: str, x: Tensor) -> None:
    if x.ndim != 4:
        raise WaffleError(f"{kind}: expected images, got samples of shape {tuple(x.shape[1:])}: choose another shift")


def rotated(x: Tensor, degrees: float, black: Tensor) -> Tensor:
    """Return images (n, C, H, W) rotated with bilinear interpolation."""
    if not degrees:
        return x
    height, width = x.shape[-2:]
    angle = math.radians(degrees)
    down = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    across = torch.arange(width, dtype=torch.float64)[None] - (width - 1) / 2
    i = down * math.cos(angle) + across * math.sin(angle) + (height - 1) / 2
    j = across * math.cos(angle) - down * math.sin(angle) + (width - 1) / 2
    light = x - black.view(-1, 1, 1)
    found = torch.zeros_like(x)
    for top in (0, 1):
        for left in (0, 1):
            row, column = i.floor() + top, j.floor() + left
            weight = (1 - (i - row).abs()) * (1 - (j - column).abs())
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            index = row.clamp(0, height - 1).long() * width + column.clamp(0, width - 1).long()
            pixels = light.flatten(2)[:, :, index.flatten()].view(x.shape)
            found += pixels * (weight * inside).to(x.dtype)
    return found + black.view(-1, 1, 1)


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Return images (n, C, H, W) blurred by a Gaussian, truncated at three sigma; edge pixels are repeated."""
    if not sigma:
        return x
    reach = math.ceil(3 * sigma)
    weights = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(-reach, reach + 1)]
    for axis in (2, 3):
        at = torch.arange(x.shape[axis])
        moved = (x.index_select(axis, (at + step).clamp(0, len(at) - 1)) for step in range(-reach, reach + 1))
        x = sum((w / sum(weights) * m for w, m in zip(weights, moved, strict=True)), torch.zeros_like(x))
    return x


def materialise(
    x: Tensor, parts: dict[str, tuple[Tensor, ...]], shifts: Sequence[Covariate], alice: int, seed: int
) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, ...]]]:
    """Return a pool of each agent's shifted samples: (samples, their indices in the old pool, the new parts)."""
    black = x.amin(dim=(0, 2, 3)) if x.ndim == 4 else x[:0]
    agents = len(parts["train"])
    memberships = [members(agents, alice, shift.groups, seed) for shift in shifts]
    seen, origin, moved = [], [], {}
    edge = 0
    for part, rows in parts.items():
        positions = []
        for agent, held in enumerate(rows):
            samples = x[held]
            for shift, agents_of in zip(shifts, memberships, strict=True):
                samples = shift.transform(samples, agents_of[agent], part, black)
            seen.append(samples)
            origin.append(held)
            positions.append(torch.arange(edge, edge + len(held)))
            edge += len(held)
        moved[part] = tuple(positions)
    return torch.cat(seen), torch.cat(origin), moved
