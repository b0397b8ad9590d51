"""Random shifts and reflections of training images, drawn in every step from its key."""

from __future__ import annotations

import torch
from torch import Tensor

from waffle_fl.randomness import noise

LARGEST_SHIFT = 8  # the largest shift is this fraction of the image: 4 pixels of 32
_OWN_DRAWS = 1 << 15  # dropout uses the same key, plus 1, 2, ... for its layers


def shift_and_flip(x: Tensor, keys: Tensor, border: Tensor, flips: bool = True) -> Tensor:
    """Shift each image of x (N, B, C, H, W) by up to an eighth in each direction; flip half of them horizontally.

    The draws for row i depend only on keys[i]. `border` (C,) is the colour outside the image.
    """
    rows, batch, channels, height, width = x.shape
    down, across, flip = noise(keys + _OWN_DRAWS, 3 * batch).view(rows, 3, batch).unbind(1)
    i = torch.arange(height, device=x.device) + _shift(down, height)[..., None]  # (N, B, H)
    j = torch.arange(width, device=x.device)
    if flips:
        j = torch.where((flip % 2 == 0)[..., None], j, width - 1 - j)
    j = j + _shift(across, width)[..., None]
    inside = _within(i, height)[..., :, None] & _within(j, width)[..., None, :]  # (N, B, H, W)
    source = i.clamp(0, height - 1)[..., :, None] * width + j.clamp(0, width - 1)[..., None, :]
    source = source.flatten(2)[:, :, None].expand(-1, -1, channels, -1)
    moved = x.flatten(3).gather(3, source).view(x.shape)
    return torch.where(inside[:, :, None], moved, border.view(-1, 1, 1))


def largest_shift(size: int) -> int:
    """Return the largest shift in pixels of an image with this height or width."""
    return max(1, size // LARGEST_SHIFT)


def _shift(draws: Tensor, size: int) -> Tensor:
    most = largest_shift(size)
    return draws % (2 * most + 1) - most


def _within(position: Tensor, size: int) -> Tensor:
    return (position >= 0) & (position < size)


def darkest(pool: Tensor) -> Tensor:
    """Return the smallest value of each channel: black, however the images were normalised."""
    return pool.amin(dim=(0, 2, 3))
