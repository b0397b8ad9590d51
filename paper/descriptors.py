"""Describe images and signals by short vectors, for networks that train in seconds on a CPU.

    python -m paper.descriptors PREPARED DATA

PREPARED has `har`, `office` and `digit-domains`, one .npz per agent with x_train y_train x_test y_test. Writes one .npz
per agent to DATA/office-described and DATA/digit-domains-described (x y, so that each partition holds out other
samples), and to DATA/har-described-SEED, where whole segments of each activity are held out: its windows overlap.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

ORIENTATIONS = 8
CELLS = 8  # most cells per side of an image
PARTITIONS = (1, 2, 3, 101)  # of experiments/tournament.toml
HELD_OUT = 0.25  # of the segments of an activity
BANDS = 6  # of the spectrum of a signal


def oriented_gradients(images: Array) -> Array:
    """Return per image the histograms of gradient directions in a grid of cells (Dalal and Triggs 2005)."""
    grey = images.astype(np.float32).mean(axis=3) / 255
    down, right = np.gradient(grey, axis=(1, 2))
    strength, turn = np.hypot(down, right), np.mod(np.arctan2(down, right), np.pi) / np.pi * ORIENTATIONS
    first = np.floor(turn).astype(int)
    side = next(n for n in range(CELLS, 0, -1) if grey.shape[1] % n == 0)
    pixels = grey.shape[1] // side
    found = np.zeros((len(grey), side, side, ORIENTATIONS), np.float32)
    for k in range(ORIENTATIONS):
        near = np.where(first % ORIENTATIONS == k, 1 - (turn - first), 0)
        near = near + np.where((first + 1) % ORIENTATIONS == k, turn - first, 0)
        found[..., k] = (strength * near).reshape(len(grey), side, pixels, side, pixels).sum(axis=(2, 4))
    flat: Array = found.reshape(len(grey), -1)
    return np.sqrt(flat / np.maximum(flat.sum(axis=1, keepdims=True), 1e-6))


def summaries(windows: Array) -> Array:
    """Return per window and channel: mean, deviation, extremes, and the logarithm of the energy in bands."""
    power = np.abs(np.fft.rfft(windows - windows.mean(axis=2, keepdims=True), axis=2)) ** 2
    edges = np.geomspace(1, power.shape[2] - 1, BANDS + 1).astype(int)
    bands = [power[..., a : max(a + 1, b)].sum(axis=2) for a, b in pairwise(edges)]
    basic = [windows.mean(axis=2), windows.std(axis=2), windows.min(axis=2), windows.max(axis=2)]
    return np.concatenate([*basic, *(np.log(band + 1e-6) for band in bands)], axis=1).astype(np.float32)


def segments(windows: Array) -> Array:
    """Return the number of each window's segment: a window that starts in the middle of the one before continues it."""
    half = windows.shape[2] // 2
    continues = (windows[1:, :, :half] == windows[:-1, :, half:]).all(axis=(1, 2))
    return np.concatenate([[0], np.cumsum(~continues)])


def held_out(labels: Array, numbers: Array, seed: int) -> Array:
    """Return which windows are test data: a share of the segments of each label."""
    rng = np.random.default_rng(seed)
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        some = rng.permutation(np.unique(numbers[labels == label]))
        if len(some) > 1:
            test |= np.isin(numbers, some[: max(1, round(HELD_OUT * len(some)))])
    return test


def whole(file: Path) -> tuple[Array, Array]:
    """Return all samples of an agent."""
    with np.load(file) as arrays:
        return tuple(np.concatenate([arrays[f"{key}_train"], arrays[f"{key}_test"]]) for key in "xy")  # type: ignore[return-value]


def describe_images(source: Path, target: Path) -> None:
    """Write the described images of each agent."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob("*.npz")):
        x, y = whole(file)
        np.savez_compressed(target / file.name, x=oriented_gradients(x), y=y)


def describe_signals(source: Path, target: Path) -> None:
    """Write the described windows of each agent that do not overlap, with other test segments per partition."""
    for seed in PARTITIONS:
        folder = target.with_name(f"{target.name}-{seed}")
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.glob("*.npz")):
            x, y = whole(file)
            numbers = segments(x)
            place = np.arange(len(x)) - np.searchsorted(numbers, numbers)  # in its segment
            test = held_out(y, numbers, seed)
            described = summaries(x)
            parts = {name: (place % 2 == 0) & (test == (name == "test")) for name in ("train", "test")}
            arrays = {
                f"{key}_{name}": values[rows]
                for name, rows in parts.items()
                for key, values in (("x", described), ("y", y))
            }
            np.savez_compressed(folder / file.name, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paper.descriptors", description=__doc__)
    for name in ("prepared", "data"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    for name in ("office", "digit-domains"):
        describe_images(given.prepared / name, given.data / f"{name}-described")
    describe_signals(given.prepared / "har", given.data / "har-described")


if __name__ == "__main__":
    main()
