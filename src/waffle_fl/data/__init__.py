"""load(name) -> Dataset: found, verified and normalised. Nothing is downloaded unless `fetch` is called."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from waffle_fl.data.cifar import read_binary, read_python
from waffle_fl.data.files import Progress, data_dir, download, is_official, verify
from waffle_fl.data.idx import read_idx
from waffle_fl.data.sources import CIFAR_BINARY, CIFAR_INEXACT, CIFAR_PYTHON, SOURCES, File, Source
from waffle_fl.data.synthetic import gaussian_classes
from waffle_fl.errors import WaffleError, suggest

PIXEL = 255  # the largest value of a byte


class Normalisation(NamedTuple):
    """What is done to the published values of a sample: (value / divisor - mean) / std, for each channel."""

    divisor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


DIGITS = Normalisation(16, (0.3053,), (0.3761,))
NAMES = ("digits", "mnist", "fashion-mnist", "cifar10", "synthetic")


@dataclass(frozen=True)
class Dataset:
    """Normalised features and integer labels, split into training and test data as published."""

    name: str
    x_train: NDArray[np.float32]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    class_names: tuple[str, ...]
    origin: str  # where it came from, in words
    verified: bool
    note: str = ""  # what a reader of results on it must know

    @property
    def classes(self) -> int:
        return len(self.class_names)


def load(name: str, folder: str = "", allow_unverified: bool = False) -> Dataset:
    """The named data set, from memory or from the data folder."""
    loaders: dict[str, Callable[[], Dataset]] = {
        "digits": _digits,
        "synthetic": _synthetic,
        "cifar10": lambda: _cifar10(data_dir(folder), allow_unverified),
    }
    if name not in NAMES:
        raise WaffleError(f"unknown data set {name!r}{suggest(name, NAMES)} (or the path of a folder of your own)")
    try:
        return loaders.get(name, lambda: _idx_set(name, data_dir(folder), allow_unverified))()
    except OSError as error:
        raise WaffleError(f"cannot use {error.filename or data_dir(folder)}: {error.strerror}") from None


def fetch(name: str, folder: str = "", progress: Progress = lambda name, done, total: None) -> list[Path]:
    """Download what is missing of a published data set; return the new files."""
    if name not in SOURCES or (name == "cifar10" and _is_whole(_cifar_folder(data_dir(folder)))):
        return []
    source = SOURCES[name]
    runtime = data_dir(folder) / source.folder
    missing = [file for file in source.files if not (runtime / file.name).exists()]
    try:
        return [download(file, runtime, progress) for file in missing]
    except WaffleError as error:
        others = [f"{f.url} at {runtime / f.name}" for f in missing if not (runtime / f.name).exists()][1:]
        raise WaffleError(f"{error}" + (f"; likewise {', '.join(others)}" if others else "")) from None


def normalisation_of(name: str) -> Normalisation | None:
    """How the samples of a published data set were normalised; None where they are used as they are."""
    if name == "digits":
        return DIGITS
    source = SOURCES.get(name)
    return Normalisation(PIXEL, source.mean, source.std) if source else None


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    divisor, (mean,), (std,) = DIGITS
    x = ((bunch.images / divisor - mean) / std).astype(np.float32)[:, None]
    y = bunch.target.astype(np.int64)
    test = np.arange(len(y)) % 4 == 3
    origin = "UCI optical digits, 1,797 images of 8x8 pixels, embedded in scikit-learn"
    return Dataset("digits", x[~test], y[~test], x[test], y[test], tuple("0123456789"), origin, verified=True)


def _synthetic() -> Dataset:
    names = tuple(f"class {k}" for k in range(10))
    return Dataset(
        "synthetic", *gaussian_classes(seed=0), names, "ten Gaussian classes in 20 dimensions", verified=True
    )


def _idx_set(name: str, root: Path, allow_unverified: bool) -> Dataset:
    source = SOURCES[name]
    runtime = root / source.folder
    _require(name, runtime, source.files)
    verified = [verify(runtime / f.name, f.checksum, allow_unverified) for f in source.files]
    shapes = ((60000, 28, 28), (60000,), (10000, 28, 28), (10000,))
    x, y, x_test, y_test = (read_idx(runtime / f.name, shape) for f, shape in zip(source.files, shapes, strict=True))
    for labels, file in ((y, source.files[1]), (y_test, source.files[3])):
        bad = np.flatnonzero(labels > 9)
        if len(bad):
            raise WaffleError(f"{runtime / file.name}: expected labels 0 to 9, got {labels[bad[0]]} at index {bad[0]}")
    return _images(name, source, x[:, None], y, x_test[:, None], y_test, str(runtime), all(verified))


def _cifar_folder(root: Path) -> Path | None:
    """The unpacked official folder, binary or python, wherever it usually lies."""
    names = ("cifar-10-batches-bin", "cifar-10-batches-py")
    places = (root / "cifar10" / n for n in names), (root / n for n in names), (root / "cifar-10" / n for n in names)
    return next((runtime for group in places for runtime in group if runtime.is_dir()), None)


def _cifar10(root: Path, allow_unverified: bool) -> Dataset:
    source = SOURCES["cifar10"]
    (packed,) = source.files
    runtime = _cifar_folder(root)
    if runtime is None or (not _is_whole(runtime) and (runtime.parent / packed.name).is_file()):
        runtime = _unpacked(root / source.folder, packed, allow_unverified)
    members, read = _cifar_members(runtime), read_binary if runtime.name.endswith("bin") else read_python
    _require("cifar10", runtime, [File(name, "", 0, "") for name in members])
    verified = [verify(runtime / name, digest, allow_unverified) for name, digest in members.items()]
    batches = [read(runtime / name) for name in members]
    x = np.concatenate([images for images, _ in batches[:5]])
    y = np.concatenate([labels for _, labels in batches[:5]])
    x_test, y_test = batches[5]
    left_out = _inexact(runtime / list(members)[5]) if not verified[5] else ()
    if left_out:
        x_test, y_test = np.delete(x_test, left_out, axis=0), np.delete(y_test, left_out)
    found = _images("cifar10", source, x, y, x_test, y_test, str(runtime), all(verified))
    note = f"{len(left_out)} test images left out: this copy does not hold them exactly" if left_out else ""
    return replace(found, note=note)


def _inexact(path: Path) -> tuple[int, ...]:
    """The images of a test batch that are known not to be the official ones."""
    return next((images for digest, images in CIFAR_INEXACT.items() if is_official(path, digest)), ())


def _cifar_members(runtime: Path) -> dict[str, str]:
    """The batches of an unpacked folder and their checksums; an official archive beside it vouches for the rest."""
    if not runtime.name.endswith("bin"):
        return CIFAR_PYTHON
    (packed,) = SOURCES["cifar10"].files
    archive = runtime.parent / packed.name
    if not archive.is_file() or not is_official(archive, packed.checksum):
        return CIFAR_BINARY
    with _archive(archive) as members:
        return {name: f"sha256:{hashlib.sha256(members(name)).hexdigest()}" for name in CIFAR_BINARY}


def _is_whole(runtime: Path | None) -> bool:
    members = CIFAR_BINARY if runtime and runtime.name.endswith("bin") else CIFAR_PYTHON
    return runtime is not None and all((runtime / name).is_file() for name in members)


def _unpacked(runtime: Path, packed: File, allow_unverified: bool) -> Path:
    """Unpack the official archive beside itself: its six known batches only, each under its own plain name."""
    _require("cifar10", runtime, [packed])
    verify(runtime / packed.name, packed.checksum, allow_unverified)
    target = runtime / "cifar-10-batches-bin"
    target.mkdir(exist_ok=True)
    with _archive(runtime / packed.name) as members:
        for name in CIFAR_BINARY:
            (target / name).write_bytes(members(name))
    return target


@contextmanager
def _archive(path: Path) -> Iterator[Callable[[str], bytes]]:
    """A function that reads one batch out of the archive."""

    def read(name: str) -> bytes:
        try:
            member = tar.extractfile(f"cifar-10-batches-bin/{name}")
        except KeyError:
            member = None
        if member is None:
            raise WaffleError(f"{path} lacks {name}; delete it and fetch it again")
        return member.read()

    try:
        with tarfile.open(path) as tar:
            yield read
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise WaffleError(f"{path} is damaged ({error}); delete it and fetch it again") from None


def _require(name: str, runtime: Path, files: tuple[File, ...] | list[File]) -> None:
    missing = [file for file in files if not (runtime / file.name).is_file()]
    if missing:
        sources = "; ".join(f"{runtime / f.name}" + (f" from {f.url}" if f.url else "") for f in missing)
        raise WaffleError(
            f"{name} is not complete: run `waffle data {name}` where there is a network, or put {sources}"
        )


def _images(
    name: str,
    source: Source,
    x: NDArray[np.uint8],
    y: NDArray[Any],
    x_test: NDArray[np.uint8],
    y_test: NDArray[Any],
    origin: str,
    verified: bool,
) -> Dataset:
    mean, std = (np.asarray(v, np.float32).reshape(1, -1, 1, 1) for v in (source.mean, source.std))

    def normalised(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        return ((images.astype(np.float32) / PIXEL - mean) / std).astype(np.float32)

    return Dataset(
        name,
        normalised(x),
        y.astype(np.int64),
        normalised(x_test),
        y_test.astype(np.int64),
        source.class_names,
        origin,
        verified,
    )
