"""load(name) -> Dataset: find, verify and normalise a data set. Nothing is downloaded unless `fetch` is called."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
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
    """Normalisation of the published values of a sample: (value / divisor - mean) / std, per channel."""

    divisor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


DIGITS = Normalisation(16, (0.3053,), (0.3761,))
NAMES = ("digits", "mnist", "fashion-mnist", "cifar10", "synthetic")


@dataclass(frozen=True)
class Dataset:
    """Normalised features and integer labels, with the published split into training and test data."""

    name: str
    x_train: NDArray[np.float32]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    class_names: tuple[str, ...]
    origin: str  # description of the source
    verified: bool
    note: str = ""  # caveat for results on this data

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


def load(name: str, folder: str = "", allow_unverified: bool = False) -> Dataset:
    """Return the named data set, built in or from the data folder."""
    loaders: dict[str, Callable[[], Dataset]] = {
        "digits": _digits,
        "synthetic": _synthetic,
        "cifar10": lambda: _cifar10(data_dir(folder), allow_unverified),
    }
    if name not in NAMES:
        raise WaffleError(f"unknown data set {name!r}{suggest(name, NAMES)} (or the path of a data folder)")
    try:
        return loaders.get(name, lambda: _idx_set(name, data_dir(folder), allow_unverified))()
    except OSError as error:
        raise WaffleError(f"cannot use {error.filename or data_dir(folder)}: {error.strerror}") from None


def fetch(name: str, folder: str = "", progress: Progress = lambda name, done, total: None) -> list[Path]:
    """Download the missing files of a published data set; return the new files."""
    if name not in SOURCES or (name == "cifar10" and _is_complete(_cifar_folder(data_dir(folder)))):
        return []
    source = SOURCES[name]
    directory = data_dir(folder) / source.folder
    missing = [file for file in source.files if not (directory / file.name).exists()]
    try:
        return [download(file, directory, progress) for file in missing]
    except WaffleError as error:
        others = [f"{f.url} at {directory / f.name}" for f in missing if not (directory / f.name).exists()][1:]
        raise WaffleError(f"{error}" + (f"; likewise {', '.join(others)}" if others else "")) from None


def normalisation_of(name: str) -> Normalisation | None:
    """Return the normalisation of a data set; None if it is not normalised."""
    if name == "digits":
        return DIGITS
    source = SOURCES.get(name)
    return Normalisation(PIXEL, source.mean, source.std) if source else None


def _digits() -> Dataset:
    table = _digits_table()
    divisor, (mean,), (std,) = DIGITS
    x = ((table[:, :-1].reshape(-1, 1, 8, 8) / divisor - mean) / std).astype(np.float32)
    y = table[:, -1].astype(np.int64)
    test = np.arange(len(y)) % 4 == 3
    origin = "UCI optical digits, 1,797 images of 8x8 pixels, embedded in scikit-learn"
    return Dataset("digits", x[~test], y[~test], x[test], y[test], tuple("0123456789"), origin, verified=True)


def _digits_table() -> NDArray[np.float64]:
    """Return scikit-learn's digits, one row per image: 64 pixels and the label.

    Importing scikit-learn takes seconds, so its file is read directly where it is found.
    """
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    return np.column_stack([bunch.data, bunch.target])


def _synthetic() -> Dataset:
    names = tuple(f"class {k}" for k in range(10))
    return Dataset(
        "synthetic", *gaussian_classes(seed=0), names, "ten Gaussian classes in 20 dimensions", verified=True
    )


def _idx_set(name: str, root: Path, allow_unverified: bool) -> Dataset:
    source = SOURCES[name]
    directory = root / source.folder
    _require(name, directory, source.files)
    verified = [verify(directory / f.name, f.checksum, allow_unverified) for f in source.files]
    shapes = ((60000, 28, 28), (60000,), (10000, 28, 28), (10000,))
    x, y, x_test, y_test = (read_idx(directory / f.name, shape) for f, shape in zip(source.files, shapes, strict=True))
    for labels, file in ((y, source.files[1]), (y_test, source.files[3])):
        bad = np.flatnonzero(labels > 9)
        if len(bad):
            raise WaffleError(
                f"{directory / file.name}: expected labels 0 to 9, got {labels[bad[0]]} at index {bad[0]}"
            )
    return _images(name, source, x[:, None], y, x_test[:, None], y_test, str(directory), all(verified))


def _cifar_folder(root: Path) -> Path | None:
    """Return the first usual location that contains the unpacked official folder, binary or python; else None."""
    names = ("cifar-10-batches-bin", "cifar-10-batches-py")
    places = (root / "cifar10" / n for n in names), (root / n for n in names), (root / "cifar-10" / n for n in names)
    return next((directory for group in places for directory in group if directory.is_dir()), None)


def _cifar10(root: Path, allow_unverified: bool) -> Dataset:
    source = SOURCES["cifar10"]
    (packed,) = source.files
    directory = _cifar_folder(root)
    if directory is None or (not _is_complete(directory) and (directory.parent / packed.name).is_file()):
        directory = _unpacked(root / source.folder, packed, allow_unverified)
    members, read = _cifar_members(directory), read_binary if directory.name.endswith("bin") else read_python
    _require("cifar10", directory, [File(name, "", 0, "") for name in members])
    verified = [verify(directory / name, digest, allow_unverified) for name, digest in members.items()]
    batches = [read(directory / name) for name in members]
    x = np.concatenate([images for images, _ in batches[:5]])
    y = np.concatenate([labels for _, labels in batches[:5]])
    x_test, y_test = batches[5]
    left_out = _inexact(directory / list(members)[5]) if not verified[5] else ()
    if left_out:
        x_test, y_test = np.delete(x_test, left_out, axis=0), np.delete(y_test, left_out)
    found = _images("cifar10", source, x, y, x_test, y_test, str(directory), all(verified))
    note = f"{len(left_out)} test images left out: this copy does not hold them exactly" if left_out else ""
    return replace(found, note=note)


def _inexact(path: Path) -> tuple[int, ...]:
    """Return the indices of the images in a test batch that are known to differ from the official ones."""
    return next((images for digest, images in CIFAR_INEXACT.items() if is_official(path, digest)), ())


def _cifar_members(directory: Path) -> dict[str, str]:
    """Return the batches of an unpacked folder and their checksums, from the official archive if it is present."""
    if not directory.name.endswith("bin"):
        return CIFAR_PYTHON
    (packed,) = SOURCES["cifar10"].files
    archive = directory.parent / packed.name
    if not archive.is_file() or not is_official(archive, packed.checksum):
        return CIFAR_BINARY
    with _archive(archive) as members:
        return {name: f"sha256:{hashlib.sha256(members(name)).hexdigest()}" for name in CIFAR_BINARY}


def _is_complete(directory: Path | None) -> bool:
    members = CIFAR_BINARY if directory and directory.name.endswith("bin") else CIFAR_PYTHON
    return directory is not None and all((directory / name).is_file() for name in members)


def _unpacked(directory: Path, packed: File, allow_unverified: bool) -> Path:
    """Unpack the six batches of the official archive into its folder and return their folder; ignore other members."""
    _require("cifar10", directory, [packed])
    verify(directory / packed.name, packed.checksum, allow_unverified)
    target = directory / "cifar-10-batches-bin"
    target.mkdir(exist_ok=True)
    with _archive(directory / packed.name) as members:
        for name in CIFAR_BINARY:
            (target / name).write_bytes(members(name))
    return target


@contextmanager
def _archive(path: Path) -> Iterator[Callable[[str], bytes]]:
    """Yield a function that reads one batch from the archive."""

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


def _require(name: str, directory: Path, files: tuple[File, ...] | list[File]) -> None:
    missing = [file for file in files if not (directory / file.name).is_file()]
    if missing:
        sources = "; ".join(f"{directory / f.name}" + (f" from {f.url}" if f.url else "") for f in missing)
        raise WaffleError(
            f"{name} is not complete: run `waffle data {name}` with a network connection, or put {sources}"
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
        x = images.astype(np.float32)
        x /= PIXEL  # in place: another copy of a data set takes longer than the arithmetic
        x -= mean
        x /= std
        return x

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
