"""Checks of the agents' arrays, made before any other work."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.preprocessing import TaskOption

Array: TypeAlias = NDArray[Any]

CHANNELS = (1, 3, 4)  # grey, colour, colour with transparency


def as_arrays(name: str, given: Any) -> list[Array]:
    """Return (x, y) or (x_train, y_train, x_test, y_test) as arrays."""
    try:
        arrays = [native(array) for array in given]
    except (ValueError, TypeError):
        raise WaffleError(f"{name}: expected arrays, got nested lists of unequal lengths or another type") from None
    if len(arrays) not in (2, 4) or any(array.ndim == 0 for array in arrays):
        raise WaffleError(
            f"{name}: expected the four arrays x_train, y_train, x_test, y_test, or x and y, got {len(arrays)}"
        )
    if any(labels.ndim != 1 for labels in arrays[1::2]):
        raise WaffleError(
            f"{name}: expected labels with one axis: one integer per sample (or one number, for regression)"
        )
    return arrays


def native(given: Any) -> Array:
    """Return the array in native byte order and a dtype that torch supports."""
    array = np.asarray(given)
    kind = np.dtype(np.float64) if array.dtype == np.longdouble else array.dtype.newbyteorder("=")
    return array.astype(kind, copy=False)


def model_inputs(x: Array) -> Array:
    """Return samples as a model takes them: bytes as numbers from -1 to 1, and the channels of images first.

    Bytes with two axes per sample are grey images. Images whose last axis has 1, 3 or 4 entries and whose first does
    not are taken to have their channels last.
    """
    if x.dtype == np.uint8:
        x = (x / np.float32(127.5) - 1).astype(np.float32)
        x = x[:, None] if x.ndim == 3 else x
    if x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x


def check_names(names: Sequence[str]) -> None:
    if not names:
        raise WaffleError("expected at least one agent, got none")
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise WaffleError(f"two agents are called {doubled!r}: give each agent its own name")


def check_samples(name: str, arrays: Sequence[Array], task: TaskOption) -> None:
    """Check that there are as many targets as samples, that all are finite, and that labels are at least 0."""
    words = ("training", "test") if len(arrays) == 4 else ("given",)
    for part, x, y in zip(words, arrays[::2], arrays[1::2], strict=True):
        if len(x) != len(y):
            raise WaffleError(f"{name}: {len(x)} {part} samples but {len(y)} labels")
        if task == "classification":
            _check_labels(name, part, y)
        elif not is_real(y):
            raise WaffleError(f"{name}: expected numeric targets, the {part} targets are {y.dtype}")
        if not is_real(x):
            raise WaffleError(f"{name}: expected numeric features, the {part} features are {x.dtype}")
        wrong = np.flatnonzero(~(_finite(x) & _finite(y)))
        if len(wrong):
            they = "samples hold" if len(wrong) > 1 else "sample holds"
            raise WaffleError(
                f"{name}: {len(wrong)} {part} {they} NaN or infinity, the first at index {wrong[0]}: "
                "drop or repair them"
            )


def _check_labels(name: str, part: str, labels: Array) -> None:
    if labels.dtype.kind not in "iu":
        raise WaffleError(f"{name}: expected integer labels, the {part} labels are {labels.dtype}")
    bad = np.flatnonzero(labels < 0)
    if len(bad):
        raise WaffleError(f"{name}: expected labels >= 0, got {labels[bad[0]]} at {part} index {bad[0]}")


def is_real(array: Array) -> bool:
    return array.dtype.kind in "iuf"


def as_integers(labels: Array) -> Array:
    """Return float labels cast to integers; a value that is no integer changes."""
    with np.errstate(invalid="ignore"):
        return labels.astype(np.int64) if labels.dtype.kind == "f" else labels


def _finite(array: Array) -> NDArray[np.bool_]:
    """Return which samples are finite after the conversion to float32."""
    flat = array.reshape(len(array), -1) if len(array) else np.empty((0, 1))
    with np.errstate(over="ignore"):
        return np.all(np.isfinite(flat.astype(np.float32)), axis=1)  # type: ignore[no-any-return]


def check_kinds(agents: Mapping[str, Sequence[Array]]) -> None:
    first_name, (first, *_) = next(iter(agents.items()))
    for name, arrays in agents.items():
        for x in arrays[::2]:
            if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
                raise WaffleError(
                    f"all agents need the same dtype and shape: {first_name} has {first.dtype} {first.shape[1:]}, "
                    f"{name} has {x.dtype} {x.shape[1:]}"
                )


def check_range(agents: Mapping[str, Sequence[Array]], classes: int, advice: str = "") -> None:
    for name, arrays in agents.items():
        for y in arrays[1::2]:
            bad = np.flatnonzero(y >= classes)
            if len(bad):
                raise WaffleError(f"{name}: expected labels below {classes}, got {y[bad[0]]} at index {bad[0]}{advice}")


def keys_of(x: Array, y: Array) -> list[bytes]:
    """Return a hash of each sample and its target."""
    return [
        hashlib.blake2b(row.tobytes() + label.tobytes(), digest_size=16).digest()
        for row, label in zip(x, y, strict=True)
    ]
