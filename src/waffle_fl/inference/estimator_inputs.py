"""Checks of the inputs of estimators; each error is one line that names the agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError

Array: TypeAlias = NDArray[Any]


def check_pairs(agents: Any) -> dict[str, tuple[Any, Any]]:
    """Return the (X, y) of each agent by name."""
    expected = "expected a Federation, or a mapping from the name of each agent to its (X, y)"
    if not isinstance(agents, Mapping):
        raise WaffleError(f"{expected}; got {type(agents).__name__}")
    if not agents:
        raise WaffleError(f"{expected}; got no agent")
    for name, pair in agents.items():
        if not isinstance(name, str):
            raise WaffleError(f"{expected}; got the name {name!r}")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise WaffleError(f"{expected}; {name!r} has no such pair")
    return {name: (pair[0], pair[1]) for name, pair in agents.items()}


def check_samples(X: Any, whose: str = "") -> Array:
    """Return X as float32: at least one row and one feature, all values finite."""
    if hasattr(X, "toarray"):
        raise WaffleError(f"{whose}sparse X is not supported: pass X.toarray()")
    try:
        x = np.asarray(X)
        x = x.astype(np.float64) if x.dtype.kind == "O" else x
    except (TypeError, ValueError):
        raise WaffleError(f"{whose}expected X as an array of numbers, its rows of equal length") from None
    if x.dtype.kind == "c":
        raise WaffleError(f"{whose}Complex data not supported: expected real numbers in X, got {x.dtype}")
    if x.dtype.kind not in "fiub":
        raise WaffleError(f"{whose}expected numbers in X, got {x.dtype}")
    if x.ndim < 2:
        raise WaffleError(f"{whose}expected X of shape (rows, features), got {x.shape}. Reshape your data")
    if not len(x):
        raise WaffleError(f"{whose}X is empty: expected at least one row")
    if not x.size:
        raise WaffleError(f"{whose}X has 0 feature(s) (shape={x.shape}) while a minimum of 1 is required.")
    with np.errstate(over="ignore"):
        numbers = x.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(numbers.reshape(len(x), -1)).all(axis=1))
    if len(bad):
        raise WaffleError(f"{whose}X has NaN, infinity or a number beyond float32 in row {bad[0] + 1}: drop or fill it")
    return numbers


def column_names(X: Any) -> tuple[str, ...] | None:
    """Return the column names of a table if all are strings, else None."""
    names = tuple(X.columns) if hasattr(X, "columns") else ()
    return names if names and all(isinstance(name, str) for name in names) else None


def check_column(y: Any, rows: int, whose: str = "") -> Array:
    """Return y with one value per row, none missing; a table of one column becomes that column."""
    if y is None:
        raise WaffleError(f"{whose}requires y to be passed, but the target y is None")
    if hasattr(y, "toarray"):
        raise WaffleError(f"{whose}sparse y is not supported: pass y.toarray()")
    try:
        column = np.asarray(y)
        given = np.asarray(y, dtype=object).reshape(-1)  # numpy would turn NaN among texts into a text
    except (TypeError, ValueError):
        raise WaffleError(f"{whose}expected y of shape ({rows},), got rows of unequal length") from None
    if column.shape == (rows, 1):
        column = column[:, 0]
    if column.shape != (rows,):
        raise WaffleError(f"{whose}expected y of shape ({rows},), a value for each row of X, got {column.shape}")
    missing = next((i for i, value in enumerate(given) if _is_missing(value)), None)
    if missing is not None:
        raise WaffleError(f"{whose}y has no value in row {missing + 1} ({given[missing]}): drop such rows")
    return column


def _is_missing(value: Any) -> bool:
    """Return whether the value is None, NaN or NaT (which differ from themselves) or pandas' NA (not comparable)."""
    return value is None or type(value).__name__ == "NAType" or value != value


def check_labels(y: Any, rows: int, whose: str = "") -> Array:
    """Return y as a column of classes: texts, booleans or integers."""
    column = check_column(y, rows, whose)
    if column.dtype.kind == "c":
        raise WaffleError(f"{whose}Complex data not supported: expected classes in y, got {column.dtype}")
    if column.dtype.kind == "f" and not (np.isfinite(column) & (column == np.floor(column))).all():
        raise WaffleError(f"{whose}Unknown label type: continuous; expected classes in y, use a regressor for numbers")
    return column


def check_reals(y: Any, rows: int, whose: str = "") -> Array:
    """Return y as a column of finite numbers."""
    column = check_column(y, rows, whose)
    if column.dtype.kind == "c":
        raise WaffleError(f"{whose}Complex data not supported: expected real numbers in y, got {column.dtype}")
    try:
        numbers = column.astype(np.float64)
    except (TypeError, ValueError):
        raise WaffleError(f"{whose}expected numbers in y, got {column.dtype}") from None
    if not np.isfinite(numbers).all():
        raise WaffleError(f"{whose}expected finite numbers in y, got infinity")
    return numbers
