"""CIFAR-10: the official binary version, and the python version read without running its pickles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError

IMAGES, RECORD, SHAPE = 10000, 3073, (3, 32, 32)
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


def read_binary(path: Path) -> tuple[Images, Labels]:
    """One batch of 10,000 records: a label byte and 3,072 pixels."""
    expected = IMAGES * RECORD
    size = path.stat().st_size
    if size != expected:
        raise WaffleError(f"{path} is damaged: expected {expected} bytes, it has {size}; delete it and fetch it again")
    records = np.fromfile(path, np.uint8).reshape(IMAGES, RECORD)
    return _checked(path, records[:, 1:].reshape(IMAGES, *SHAPE), records[:, 0].astype(np.int64))


def read_python(path: Path) -> tuple[Images, Labels]:
    """One batch of the python version."""
    if path.stat().st_size > 2 * IMAGES * RECORD:
        raise WaffleError(f"{path} is larger than any CIFAR-10 batch; delete it and fetch it again")
    try:
        content = _Restricted(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        images = np.asarray(content["data"], np.uint8).reshape(IMAGES, *SHAPE)
        labels = np.asarray(content["labels"], np.int64).reshape(IMAGES)
    except WaffleError:
        raise
    except Exception as error:  # whatever a damaged or hostile stream raises while it is decoded
        raise WaffleError(
            f"{path} is no CIFAR-10 batch ({type(error).__name__}); delete it and fetch it again"
        ) from None
    return _checked(path, images, labels)


def _checked(path: Path, images: Images, labels: Labels) -> tuple[Images, Labels]:
    bad = np.flatnonzero((labels < 0) | (labels > 9))
    if len(bad):
        raise WaffleError(f"{path}: expected labels 0 to 9, got {labels[bad[0]]} at index {bad[0]}")
    return images, labels


def _reconstruct(subtype: Any, shape: Any, dtype: Any) -> NDArray[Any]:
    return np.ndarray.__new__(np.ndarray, (0,), "u1")


class _Restricted(pickle.Unpickler):
    """Builds arrays of bytes and nothing else: any other name in the stream is refused before it is looked up."""

    _ALLOWED: ClassVar[dict[tuple[str, str], Callable[..., Any]]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("_codecs", "encode"): lambda text, encoding="latin1": text.encode("latin1"),
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise WaffleError(f"refused to load {module}.{name} from a data file: this is no CIFAR-10 batch") from None
