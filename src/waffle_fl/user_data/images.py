"""Images in one folder per class: agent/class/*.png or .jpg, all of one size. Reading them needs Pillow."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waffle_fl.atomic_files import check_regular
from waffle_fl.errors import WaffleError
from waffle_fl.user_data.expansion import TIMES, check_expansion

SUFFIXES = (".png", ".jpg", ".jpeg")
GREY = ("1", "L", "LA", "F")


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def classes_of(folder: Path) -> list[str]:
    """Return the names of the subfolders that contain images."""
    found = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")]
    return sorted(p.name for p in found if any(is_image(f) for f in p.iterdir()))


def read_images(
    folder: Path, classes: Sequence[str], times: float = TIMES
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return every image of the folder's classes, sorted by name, and its class index."""
    files = [(f, k) for k, name in enumerate(classes) for f in sorted((folder / name).glob("*")) if is_image(f)]
    if not files:
        raise WaffleError(f"{folder}: expected images ({', '.join(SUFFIXES)}) in one folder per class, got none")
    images = [read_image(path, times) for path, _ in files]
    for image, (path, _) in zip(images, files, strict=True):
        if image.shape != images[0].shape:
            raise WaffleError(
                f"all images must have the same size and channels: {files[0][0]} has {_shown(images[0])}, "
                f"{path} has {_shown(image)}; convert them"
            )
    return np.stack(images), np.array([k for _, k in files], np.int64)


def read_image(path: Path, times: float = TIMES) -> NDArray[np.float32]:
    """Return (channels, height, width): one channel if grey, else three, from -1 (black) to 1 (white)."""
    try:
        image_module: Any = importlib.import_module("PIL.Image")
    except ImportError:
        raise WaffleError(f"{path}: images need Pillow: `pip install waffle-fl[images]`") from None
    check_regular(path)
    try:
        with _any_size(image_module), image_module.open(path) as image:
            check_expansion(path, image.width * image.height * len(image.getbands()), times)
            if image.mode.startswith("I"):  # 16 bits per pixel, as from scanners
                pixels = np.asarray(image, np.float32)[None] / 65535
            elif image.mode in GREY:
                pixels = np.asarray(image.convert("L"), np.float32)[None] / 255
            else:
                pixels = np.asarray(image.convert("RGB"), np.float32).transpose(2, 0, 1) / 255
    except WaffleError:
        raise
    except Exception as error:  # Pillow raises many types for a damaged image
        raise WaffleError(f"cannot read the image {path}: {' '.join(str(error).split())}") from None
    return (2 * pixels - 1).astype(np.float32)


@contextlib.contextmanager
def _any_size(image_module: Any) -> Iterator[None]:
    """Suspend Pillow's own limit, which no setting raises; `max_expansion` takes its place."""
    before = image_module.MAX_IMAGE_PIXELS
    image_module.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        image_module.MAX_IMAGE_PIXELS = before


def _shown(image: NDArray[Any]) -> str:
    return " x ".join(map(str, image.shape))
