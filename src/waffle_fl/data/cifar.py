"""CIFAR-10: read the official binary version, and the python version without executing its pickles."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError

IMAGES, RECORD, SHAPE = 10000, 3073, (3, 32, 32)
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


def read_binary(path: Path) -> tuple[Images, Labels]:
    """Return the images and labels of a binary batch: 10,000 records of a label byte and 3,072 pixels."""
    expected = IMAGES * RECORD
    size = _size(path)
    if size != expected:
        raise WaffleError(f"{path} is damaged: expected {expected} bytes, it has {size}; delete it and fetch it again")
    records = np.fromfile(path, np.uint8).reshape(IMAGES, RECORD)
    return _checked(path, records[:, 1:].reshape(IMAGES, *SHAPE), records[:, 0].astype(np.int64))


def read_python(path: Path) -> tuple[Images, Labels]:
    """Return the images and labels of a batch of the python version."""
    if _size(path) > 2 * IMAGES * RECORD:
        raise WaffleError(f"{path} is larger than any CIFAR-10 batch; delete it and fetch it again")
    try:
        content = _Restricted(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        if not all(type(label) is int for label in content["labels"]):
            raise ValueError("labels")
        images = content["data"].values.reshape(IMAGES, *SHAPE)
        labels = np.asarray(content["labels"], np.int64).reshape(IMAGES)
    except WaffleError as error:
        raise WaffleError(f"{path}: {error}") from None
    except Exception as error:  # a damaged or hostile stream can raise any type
        raise WaffleError(
            f"{path} is not a CIFAR-10 batch ({type(error).__name__}); delete it and fetch it again"
        ) from None
    return _checked(path, images, labels)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None


def _checked(path: Path, images: Images, labels: Labels) -> tuple[Images, Labels]:
    bad = np.flatnonzero((labels < 0) | (labels > 9))
    if len(bad):
        raise WaffleError(f"{path}: expected labels 0 to 9, got {labels[bad[0]]} at index {bad[0]}")
    return images, labels


class _Type:
    """Replacement for numpy.dtype that accepts unsigned bytes only."""

    def __init__(self, *arguments: Any) -> None:
        if not arguments or arguments[0] not in ("u1", "|u1"):
            raise ValueError("dtype")

    def __setstate__(self, state: Any) -> None:
        """Ignore the state (byte order and the like), which does not apply to bytes."""


class _Array:
    """Replacement for numpy.ndarray: checks shape and bytes before it builds an array."""

    values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if type(kind) is not _Type or fortran:
            raise ValueError("array")
        content = raw.encode("latin1") if isinstance(raw, str) else bytes(raw) if type(raw) is bytes else b""
        self.values = np.frombuffer(content, np.uint8).reshape([int(n) for n in shape])


def _array(*arguments: Any) -> _Array:
    return _Array()


def _bytes(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


class _Restricted(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """Unpickler that builds arrays of bytes only; any other name in the stream raises before it is looked up.

    It derives from the Python implementation: the C one allocates memory for any memo index in the stream.
    """

    _ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): None,  # an unused argument of _reconstruct
        ("numpy", "dtype"): _Type,
        ("numpy.core.multiarray", "_reconstruct"): _array,
        ("numpy._core.multiarray", "_reconstruct"): _array,
        ("_codecs", "encode"): _bytes,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise WaffleError(f"refused to load {f'{module}.{name}'!r} from it: this is not a CIFAR-10 batch") from None

    dispatch: ClassVar = {c: read for c, read in pickle._Unpickler.dispatch.items() if c != pickle.BYTEARRAY8[0]}  # type: ignore[attr-defined]
