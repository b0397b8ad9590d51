"""Predict with a finished run's model: on a table like the training tables, or on arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from waffle_fl.atomic_files import check_regular
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.inference.trained_run import Trained
from waffle_fl.metrics import measure
from waffle_fl.spreadsheet import to_csv
from waffle_fl.user_data import Preprocessing
from waffle_fl.user_data.array_checks import as_integers, is_real, model_inputs, native
from waffle_fl.user_data.arrays import check_npz_size
from waffle_fl.user_data.cells import Table, number_of, numbers
from waffle_fl.user_data.expansion import TIMES
from waffle_fl.user_data.tables import read_raw

ARRAYS = (".npz", ".npy")
FAR = 6  # standard deviations from the mean


@dataclass(frozen=True)
class Predictions:
    """One prediction per row: a class name and the probability of each class, or a number."""

    values: Sequence[str] | Sequence[float]
    classes: tuple[str, ...]  # empty for regression
    probabilities: list[list[float]]  # one list per row, one value per class
    metrics: dict[str, float | None] | None  # None if the data have no targets
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)  # columns of the file, as they are in it
    notes: tuple[str, ...] = ()  # warnings for the user

    def to_csv(self) -> str:
        """Return a header and one line per row; a label that a spreadsheet would run as a formula is quoted."""
        head = [*self.kept, "prediction", *(f"p({name})" for name in self.classes)]
        rows = zip(self._kept_rows(), self.values, self.probabilities, strict=True)
        return to_csv([head, *([*map(_cell, kept), value, *(f"{p:.6f}" for p in row)] for kept, value, row in rows)])

    def to_json(self) -> list[dict[str, Any]]:
        kept = [{"keep": dict(zip(self.kept, row, strict=True))} if row else {} for row in self._kept_rows()]
        if not self.classes:
            return [{**own, "prediction": value} for own, value in zip(kept, self.values, strict=True)]
        return [
            {**own, "prediction": value, "probabilities": dict(zip(self.classes, row, strict=True))}
            for own, value, row in zip(kept, self.values, self.probabilities, strict=True)
        ]

    def _kept_rows(self) -> list[tuple[str, ...]]:
        return list(zip(*self.kept.values(), strict=True)) if self.kept else [()] * len(self.values)


def _cell(text: str) -> str | float | int:
    """Return a number as a number, since a spreadsheet does not run it as a formula, if it is written the same way."""
    value = number_of(text)
    plain = int(value) if value - value == 0 and value == int(value) else value
    return plain if str(plain) == text else text


def predict(trained: Trained, path: Path, keep: Sequence[str] = (), max_expansion: float | None = None) -> Predictions:
    """Return the model's predictions for the rows of a file.

    The columns `keep` of a table are copied to the output. `max_expansion` replaces that of the run's settings.
    """
    times = max_expansion or trained.run.config.settings.max_expansion
    kept: dict[str, list[str]] = {}
    notes: tuple[str, ...] = ()
    if trained.preprocessing:
        raw = _raw_table(trained, path, times)
        kept = {name: _kept(raw, name, trained) for name in keep}
        table = trained.preprocessing.read(raw)
        x, y = trained.preprocessing.transform(table), _table_targets(trained, table)
        notes = tuple(outside_training_range(table, trained.preprocessing))
    elif keep:
        raise WaffleError(
            f"--keep copies columns of a table, and this run was trained on arrays: leave out {keep[0]!r}"
        )
    else:
        x, y = _arrays(trained, path, times)
    output = trained.outputs(torch.from_numpy(x))
    bad = (~output.isfinite()).reshape(len(output), -1).any(dim=1).nonzero()
    if len(bad):
        raise WaffleError(
            f"{path}: the model's output for row {int(bad[0]) + 1} is not finite: "
            "check that its values are in the range of the training data"
        )
    made = to_predictions(trained, output, None if y is None else torch.from_numpy(y))
    return replace(made, kept=kept, notes=notes)


def to_predictions(trained: Trained, output: Tensor, target: Tensor | None = None) -> Predictions:
    """Return the model's outputs as class names and probabilities, or as numbers in the target's unit."""
    metrics = None if target is None else measure(output, target)
    if trained.task == "regression":
        values = output.view(-1).tolist()
        return Predictions(values, (), [[] for _ in values], metrics)
    chosen = [trained.classes[k] for k in output.argmax(dim=1).tolist()]
    return Predictions(chosen, trained.classes, output.double().softmax(dim=1).tolist(), metrics)


def _raw_table(trained: Trained, path: Path, times: float) -> Table:
    assert trained.preprocessing is not None
    if path.suffix.lower() in ARRAYS:
        columns = ", ".join(column.name for column in trained.preprocessing.columns)
        raise WaffleError(f"{path}: this run was trained on tables: expected .csv or .parquet with columns {columns}")
    return read_raw(path, times)


def _kept(raw: Table, name: str, trained: Trained) -> list[str]:
    """Return a column as it is in the file."""
    if name in ("prediction", *(f"p({c})" for c in trained.classes)):
        raise WaffleError(f"--keep {name}: the output has a column of this name already; rename it in {raw.path}")
    if name not in raw.columns:
        raise WaffleError(f"--keep: {raw.path} has no column {name!r}{suggest(name, raw.columns)}")
    return raw.columns[name].tolist()


def _table_targets(trained: Trained, table: Table) -> NDArray[Any] | None:
    assert trained.preprocessing is not None
    y = trained.preprocessing.targets(table)
    if y is None or trained.task == "classification":
        return y
    return np.asarray(trained.preprocessing.target_mean + trained.preprocessing.target_deviation * y.astype(np.float64))


def outside_training_range(table: Table, preprocessing: Preprocessing) -> Iterator[str]:
    """Yield a line per numeric column with values outside the range of the training data.

    The range is unknown for a deployment, where it does not leave a site: then it is the mean and FAR deviations.
    """
    for column in preprocessing.columns:
        if column.kind == "categorical" or not column.rows:
            continue
        low, high, what = column.low, column.high, "range"
        if low is None or high is None:
            low, high = column.mean - FAR * column.deviation, column.mean + FAR * column.deviation
            what = f"mean and {FAR} standard deviations,"
        values = numbers(table.columns[column.name])
        bad = np.flatnonzero((values < low) | (values > high))
        if len(bad):
            count = f"{len(bad)} value{'s' * (len(bad) > 1)}"
            yield (
                f"column {column.name!r} has {count} outside the training {what} {low:g} to {high:g}, the first "
                f"{table.columns[column.name][int(bad[0])]} in line {table.lines[bad[0]]}: the prediction may be wrong"
            )


def _arrays(trained: Trained, path: Path, times: float) -> tuple[NDArray[Any], NDArray[Any] | None]:
    x, y = read_arrays(path, times)
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


def read_arrays(path: Path, times: float = TIMES) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return x, and y if a .npz contains it, else None. Nothing is unpickled."""
    if path.suffix.lower() not in ARRAYS:
        raise WaffleError(f"{path}: this run was trained on arrays: expected a .npz with x (and y), or a .npy")
    check_regular(path)
    try:
        with path.open("rb") as stream:
            found = np.load(stream, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return native(found), None
            check_npz_size(path, found, times)
            if "x" in found.files:
                return native(found["x"]), native(found["y"]) if "y" in found.files else None
            names = " ".join(", ".join(found.files).split()) or "nothing"
    except WaffleError:
        raise
    except Exception as error:  # zipfile and NumPy raise many types for a damaged file
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or "it is truncated"
        raise WaffleError(f"cannot read {path} as plain arrays: {reason}") from None
    raise WaffleError(f"{path}: expected the array x (and y, for metrics), got {names}")


def _sides(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))
