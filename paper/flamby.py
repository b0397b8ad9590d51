"""Prepare FLamby's Fed-Heart-Disease: python -m paper.flamby SOURCE OUT

SOURCE is the folder with the four files processed.*.data of UCI Heart Disease. OUT receives three folders with one
.npz per hospital (x_train y_train x_test y_test):

flamby-heart               features standardised with each hospital's own training rows
flamby-heart-pooled        FLamby's pooled training: all training rows, standardised together; test rows as above
flamby-heart-pooled-same   the same with training rows standardised per hospital, as the test rows are

The preparation follows the description and the code of FLamby (du Terrail et al., NeurIPS 2022; owkin/FLamby).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from waffle_fl.randomness import derive

CENTRES = ("cleveland", "hungarian", "switzerland", "va")
DROPPED, CATEGORICAL = (10, 11, 12), (2, 6)  # columns: mostly missing outside Cleveland; chest pain, resting ECG
TRAIN_SHARE, SPLIT_SEED = 0.66, 43
SEEDS = range(42, 47)
Table = NDArray[np.float64]


class Logistic(nn.Module):
    """Binary logistic regression: one logit z, given as the logits (0, z) of two classes."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.linear(x), (1, 0))


def logistic(shape: Sequence[int], classes: int) -> nn.Module:
    """Return FLamby's model; cross-entropy of its two logits is the binary cross-entropy of its one.

    A run with one of FLamby's seeds starts from the weights that FLamby's code draws with this seed.
    """
    seed = {derive(seed, "init"): seed for seed in SEEDS}.get(torch.initial_seed())
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        return Logistic(*shape)


def read(file: Path) -> Table:
    """Return the complete rows of a hospital without the dropped columns; the last column is the label, 0 or 1."""
    lines = [line.split(",") for line in file.read_text(encoding="utf-8").split()]
    kept = [[cell for k, cell in enumerate(line) if k not in DROPPED] for line in lines]
    rows = np.array([[float(cell) for cell in row] for row in kept if "?" not in row])
    rows[:, -1] = rows[:, -1] > 0
    return rows


def features(tables: Sequence[Table]) -> list[Table]:
    """Return the inputs: numbers first, then one column per category except the first."""
    columns = range(tables[0].shape[1] - 1)
    values = {k: np.unique(np.concatenate([table[:, k] for table in tables]))[1:] for k in CATEGORICAL}
    numeric = [k for k in columns if k not in CATEGORICAL]
    return [
        np.column_stack([table[:, numeric], *(table[:, [k]] == values[k] for k in CATEGORICAL)]).astype(np.float64)
        for table in tables
    ]


def split(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the training and test rows of a hospital in the order of its file.

    They are stratified by label if both labels occur more than twice; Switzerland has a single healthy patient.
    """
    from sklearn.model_selection import train_test_split  # the model above needs only torch

    stratified = len(np.unique(labels)) > 1 and min(np.bincount(labels)) > 2
    train, test = train_test_split(
        np.arange(len(labels)),
        train_size=TRAIN_SHARE,
        test_size=1 - TRAIN_SHARE,
        random_state=SPLIT_SEED,
        stratify=labels if stratified else None,
    )
    return np.sort(train), np.sort(test)


def standardised(rows: Table, like: Table) -> NDArray[np.float32]:
    """Return the rows minus the mean of `like`, divided by its standard deviation."""
    return ((rows - like.mean(axis=0)) / (like.std(axis=0, ddof=1) + 1e-9)).astype(np.float32)


def prepare(source: Path, out: Path) -> None:
    """Write the three folders."""
    tables = [read(source / f"processed.{name}.data") for name in CENTRES]
    inputs, labels = features(tables), [table[:, -1].astype(np.int64) for table in tables]
    splits = [split(y) for y in labels]
    train = [x[rows] for x, (rows, _) in zip(inputs, splits, strict=True)]
    pooled = np.concatenate(train)
    own = [standardised(x, x) for x in train]
    y_pooled = np.concatenate([y[rows] for y, (rows, _) in zip(labels, splits, strict=True)])
    for k, name in enumerate(CENTRES):
        rows, held_out = splits[k]
        test = {"x_test": standardised(inputs[k][held_out], train[k]), "y_test": labels[k][held_out]}
        parts = {
            "flamby-heart": {"x_train": own[k], "y_train": labels[k][rows]},
            "flamby-heart-pooled": {"x_train": standardised(pooled, pooled), "y_train": y_pooled},
            "flamby-heart-pooled-same": {"x_train": np.concatenate(own), "y_train": y_pooled},
        }
        for folder, arrays in parts.items():
            (out / folder).mkdir(parents=True, exist_ok=True)
            np.savez(out / folder / f"{name}.npz", **arrays, **test)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m paper.flamby", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    prepare(given.source, given.out)


if __name__ == "__main__":
    main(sys.argv[1:])
