"""Predict with a finished run's model: on a table like the training tables, or on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from waffle_fl.atomic_files import check_regular
from waffle_fl.errors import WaffleError
from waffle_fl.inference.trained_run import Trained
from waffle_fl.metrics import measure
from waffle_fl.spreadsheet import to_csv
from waffle_fl.user_data.array_checks import as_integers, is_real, model_inputs, native

ARRAYS = (".npz", ".npy")


@dataclass(frozen=True)
class Predictions:
    """One prediction per row: a class name and the probability of each class, or a number."""

    values: Sequence[str] | Sequence[float]
    classes: tuple[str, ...]  # empty for regression
    probabilities: list[list[float]]  # one list per row, one value per class
    metrics: dict[str, float | None] | None  # None if the data have no targets

    def to_csv(self) -> str:
        """Return a header and one line per row; a label that a spreadsheet would run as a formula is quoted."""
        head = ["prediction", *(f"p({name})" for name in self.classes)]
        rows = zip(self.values, self.probabilities, strict=True)
        return to_csv([head, *([value, *(f"{p:.6f}" for p in row)] for value, row in rows)])

    def to_json(self) -> list[dict[str, Any]]:
        if not self.classes:
            return [{"prediction": value} for value in self.values]
        return [
            {"prediction": value, "probabilities": dict(zip(self.classes, row, strict=True))}
            for value, row in zip(self.values, self.probabilities, strict=True)
        ]


def predict(trained: Trained, path: Path) -> Predictions:
    """Return the model's predictions for the rows of a file."""
    x, y = _table(trained, path) if trained.preprocessing else _arrays(trained, path)
    output = trained.outputs(torch.from_numpy(x))
    bad = (~output.isfinite()).reshape(len(output), -1).any(dim=1).nonzero()
    if len(bad):
        raise WaffleError(
            f"{path}: the model's output for row {int(bad[0]) + 1} is not finite: "
            "check that its values are in the range of the training data"
        )
    return to_predictions(trained, output, None if y is None else torch.from_numpy(y))


def to_predictions(trained: Trained, output: Tensor, target: Tensor | None = None) -> Predictions:
    """Return the model's outputs as class names and probabilities, or as numbers in the target's unit."""
    metrics = None if target is None else measure(output, target)
    if trained.task == "regression":
        values = output.view(-1).tolist()
        return Predictions(values, (), [[] for _ in values], metrics)
    chosen = [trained.classes[k] for k in output.argmax(dim=1).tolist()]
    return Predictions(chosen, trained.classes, output.double().softmax(dim=1).tolist(), metrics)


def _table(trained: Trained, path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    assert trained.preprocessing is not None
    if path.suffix.lower() in ARRAYS:
        columns = ", ".join(column.name for column in trained.preprocessing.columns)
        raise WaffleError(f"{path}: this run was trained on tables: expected .csv or .parquet with columns {columns}")
    x, y = trained.preprocessing.transform_table(path)
    if y is None or trained.task == "classification":
        return x, y
    return x, trained.preprocessing.target_mean + trained.preprocessing.target_deviation * y.astype(np.float64)


def _arrays(trained: Trained, path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    x, y = read_arrays(path)
    if not is_real(x):
        raise WaffleError(f"{path}: expected numbers in x, got {x.dtype}")
    x = model_inputs(x)
    if x.shape[1:] != trained.shape or not x.ndim:
        hint = "; a single sample also needs an axis of rows" if x.shape == trained.shape else ""
        raise WaffleError(f"{path}: expected x of shape (rows, {_sides(trained.shape)}), got ({_sides(x.shape)}){hint}")
    if not len(x):
        raise WaffleError(f"{path} is empty: expected at least one row")
    with np.errstate(over="ignore"):
        bad = np.flatnonzero(~np.isfinite(x.astype(np.float32).reshape(len(x), -1)).all(axis=1))
    if len(bad):
        raise WaffleError(f"{path}: x holds NaN or infinity, first in row {bad[0] + 1}: drop or repair it")
    return x, None if y is None else _targets(trained, path, y, len(x))


def _targets(trained: Trained, path: Path, y: NDArray[Any], rows: int) -> NDArray[Any]:
    if y.shape != (rows,):
        raise WaffleError(f"{path}: expected y of shape ({rows},), got ({_sides(y.shape)})")
    if trained.task == "regression":
        if not is_real(y) or not np.isfinite(y).all():
            raise WaffleError(f"{path}: expected finite numbers in y")
        return y.astype(np.float64)
    if not is_real(y) or (as_integers(y) != y).any() or y.min() < 0 or y.max() >= len(trained.classes):
        raise WaffleError(f"{path}: expected integers from 0 to {len(trained.classes) - 1} in y")
    return y.astype(np.int64)


def read_arrays(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return x, and y if a .npz contains it, else None. Nothing is unpickled."""
    if path.suffix.lower() not in ARRAYS:
        raise WaffleError(f"{path}: this run was trained on arrays: expected a .npz with x (and y), or a .npy")
    check_regular(path)
    try:
        with path.open("rb") as stream:
            found = np.load(stream, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return native(found), None
            if "x" in found.files:
                return native(found["x"]), native(found["y"]) if "y" in found.files else None
            names = " ".join(", ".join(found.files).split()) or "nothing"
    except Exception as error:  # zipfile and NumPy raise many types for a damaged file
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or "it is truncated"
        raise WaffleError(f"cannot read {path} as plain arrays: {reason}") from None
    raise WaffleError(f"{path}: expected the array x (and y, for metrics), got {names}")


def _sides(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))
