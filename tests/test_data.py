"""Data files and arrays: what is read, what is verified, and what is refused with one line."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import resource
import struct
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import refusal
from waffle_fl import data
from waffle_fl.algorithms import ALGORITHMS, SGD
from waffle_fl.config import RunConfig, Settings
from waffle_fl.data import cifar
from waffle_fl.data.files import checksum, data_dir, is_official, verify
from waffle_fl.data.idx import read_idx
from waffle_fl.data.sources import CIFAR_BINARY, CIFAR_INEXACT, CIFAR_PYTHON, SOURCES
from waffle_fl.data.synthetic import gaussian_classes, quadratics
from waffle_fl.engines.cells import Cell
from waffle_fl.engines.simulate import simulate
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import advice
from waffle_fl.federation import Federation, build, index_of
from waffle_fl.models import FlatModel, mlp
from waffle_fl.partition import split

MEGABYTE = 1 << 20
AGAIN = "delete it and fetch it again"


def answer(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the call returns, or the text with which it is refused, where either may be right."""
    try:
        return call(*args, **options)
    except WaffleError as error:
        return str(error)


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """What happens inside allocates less than so many bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were allocated at once"


# ---------------------------------------------------------------------------------------------------------- idx files


def idx_bytes(shape: tuple[int, ...], body: bytes, magic: bytes = b"") -> bytes:
    return (magic or struct.pack(">HBB", 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + body


def write_idx(path: Path, shape: tuple[int, ...], body: bytes, magic: bytes = b"") -> Path:
    path.write_bytes(gzip.compress(idx_bytes(shape, body, magic), 1))
    return path


def noise(size: int) -> bytes:
    return np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()


def test_idx_reads_what_was_written(tmp_path: Path) -> None:
    """An idx file of unsigned bytes is read row by row, in the order of its bytes."""
    body = noise(3 * 4 * 5)
    read = read_idx(write_idx(tmp_path / "a.gz", (3, 4, 5), body), (3, 4, 5))
    assert read.dtype == np.uint8
    assert read.shape == (3, 4, 5)
    assert read[2, 1, 3] == body[2 * 20 + 1 * 5 + 3]
    assert read.tobytes() == body


@pytest.mark.parametrize("kept", [0, 1, 9, 17, 400, -9, -8, -1])
def test_truncated_gzip_is_refused(tmp_path: Path, kept: int) -> None:
    """D1: a gzip file that was cut anywhere is refused as damaged, whole, with its name and what to do."""
    path = write_idx(tmp_path / "cut.gz", (10, 10, 10), noise(1000))
    path.write_bytes(path.read_bytes()[:kept])
    text = refusal(read_idx, path, (10, 10, 10))
    assert f"{path} is damaged" in text
    assert AGAIN in text


@pytest.mark.parametrize("kept", [400, -8])
def test_truncated_gzip_is_refused_with_its_sizes(tmp_path: Path, kept: int) -> None:
    """D1: the refusal of a cut gzip file names the bytes that were expected."""
    path = write_idx(tmp_path / "cut.gz", (10, 10, 10), noise(1000))
    path.write_bytes(path.read_bytes()[:kept])
    assert "expected 1000 bytes" in refusal(read_idx, path, (10, 10, 10))


def test_short_body_is_refused_with_both_sizes(tmp_path: Path) -> None:
    """D1: a sound gzip file with too few bytes inside is refused with the expected and the read number."""
    text = refusal(read_idx, write_idx(tmp_path / "short.gz", (10, 10), noise(99)), (10, 10))
    assert "expected 100 bytes" in text
    assert "read 99 bytes" in text
    assert AGAIN in text


def test_long_body_is_refused(tmp_path: Path) -> None:
    """One byte more than the dimensions promise is as wrong as one byte less."""
    text = refusal(read_idx, write_idx(tmp_path / "long.gz", (10, 10), noise(101)), (10, 10))
    assert "expected 100 bytes of data, read more" in text


def test_crc_error_is_refused(tmp_path: Path) -> None:
    """D1: a gzip file whose checksum does not fit its content is refused and says CRC."""
    path = write_idx(tmp_path / "crc.gz", (10, 10), noise(100))
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    text = refusal(read_idx, path, (10, 10))
    assert "CRC" in text
    assert AGAIN in text


def test_flipped_bytes_inside_are_refused(tmp_path: Path) -> None:
    """D1: no single flipped byte in the compressed body passes unnoticed."""
    path = write_idx(tmp_path / "flip.gz", (10, 10), noise(100))
    sound = path.read_bytes()
    for position in range(10, len(sound)):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 0x5A]) + sound[position + 1 :])
        assert str(path) in refusal(read_idx, path, (10, 10))


@pytest.mark.parametrize("junk", [b"not gzip at all", b"\x00" * 64, b"\x1f\x8b", b"<html>404</html>"])
def test_other_files_are_refused(tmp_path: Path, junk: bytes) -> None:
    """D1: a file that is no gzip file is refused with its name."""
    path = tmp_path / "junk.gz"
    path.write_bytes(junk)
    assert str(path) in refusal(read_idx, path, (10, 10))


def test_rubbish_after_the_gzip_stream_is_refused(tmp_path: Path) -> None:
    """Bytes after the end of the gzip stream make a file damaged."""
    path = write_idx(tmp_path / "tail.gz", (10, 10), noise(100))
    path.write_bytes(path.read_bytes() + b"rubbish")
    assert AGAIN in refusal(read_idx, path, (10, 10))


def test_absent_and_folder_paths_are_refused(tmp_path: Path) -> None:
    """D13: neither a missing file nor a folder in its place ends in anything but the one line."""
    assert str(tmp_path / "none.gz") in refusal(read_idx, tmp_path / "none.gz", (1,))
    assert str(tmp_path) in refusal(read_idx, tmp_path, (1,))


@pytest.mark.parametrize("magic", [b"\x00\x00\x0d\x02", b"\x08\x02\x00\x00", b"\x01\x00\x08\x02", b"\x00\x00\x00\x02"])
def test_wrong_magic_is_refused(tmp_path: Path, magic: bytes) -> None:
    """D2: another magic number is refused with both numbers."""
    text = refusal(read_idx, write_idx(tmp_path / "magic.gz", (10, 10), noise(100), magic), (10, 10))
    assert "expected the magic number 0x00000802" in text
    assert f"got 0x{magic.hex()}" in text


@pytest.mark.parametrize("shape", [(10,), (10, 5, 2), (10, 2, 5, 1)])
def test_wrong_rank_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """D2: another number of dimensions is refused with both numbers."""
    text = refusal(read_idx, write_idx(tmp_path / "rank.gz", shape, noise(100)), (10, 10))
    assert f"expected rank 2, got {len(shape)}" in text


def test_wrong_count_is_refused(tmp_path: Path) -> None:
    """D2: another number of items is refused with both shapes, even where the bytes would fit."""
    text = refusal(read_idx, write_idx(tmp_path / "count.gz", (20, 5), noise(100)), (10, 10))
    assert "expected the dimensions (10, 10), got (20, 5)" in text


@pytest.mark.parametrize("length", range(12))
def test_short_header_is_refused(tmp_path: Path, length: int) -> None:
    """D2: a header that ends early is refused with its length."""
    path = tmp_path / "header.gz"
    path.write_bytes(gzip.compress(idx_bytes((10, 10), b"")[:length]))
    assert f"header ends after {length} bytes" in refusal(read_idx, path, (10, 10))


def test_header_of_a_trillion_items_is_refused_before_allocation(tmp_path: Path) -> None:
    """D3: a header that promises 10^12 items is refused while memory stays below two megabytes."""
    path = write_idx(tmp_path / "bomb.gz", (10**4, 10**4, 10**4), noise(1000))
    with memory_below(2 * MEGABYTE):
        text = refusal(read_idx, path, (60000, 28, 28))
    assert "(60000, 28, 28)" in text
    assert "(10000, 10000, 10000)" in text


def test_gzip_bomb_is_not_inflated(tmp_path: Path) -> None:
    """D3: a file that inflates to 100 megabytes in place of 400 bytes is refused while memory stays below two."""
    path = write_idx(tmp_path / "bomb.gz", (10, 40), bytes(100 * MEGABYTE))
    assert path.stat().st_size < MEGABYTE
    with memory_below(2 * MEGABYTE):
        text = refusal(read_idx, path, (10, 40))
    assert "expected 400 bytes of data, read more" in text


# -------------------------------------------------------------------------------------- MNIST-sized sets in a folder


FILES = tuple(file.name for file in SOURCES["mnist"].files)


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with four files of MNIST's shape: image i is filled with byte i mod 256, its label is i mod 10."""
    root = tmp_path_factory.mktemp("fakes")
    (root / "mnist").mkdir()
    for images, labels, n in ((FILES[0], FILES[1], 60000), (FILES[2], FILES[3], 10000)):
        pixels = np.broadcast_to(np.arange(n).astype(np.uint8)[:, None], (n, 784)).tobytes()
        write_idx(root / "mnist" / images, (n, 28, 28), pixels)
        write_idx(root / "mnist" / labels, (n,), (np.arange(n) % 10).astype(np.uint8).tobytes())
    return root


def with_other(fakes: Path, root: Path, name: str) -> Path:
    """A data folder of links to the fakes, but for one file, whose path is returned."""
    (root / "mnist").mkdir()
    for file in FILES:
        if file != name:
            (root / "mnist" / file).symlink_to(fakes / "mnist" / file)
    return root / "mnist" / name


def test_wrong_checksum_is_refused(fakes: Path) -> None:
    """D4: a published set with another sha256 is refused, with the file and the flag that allows it."""
    text = refusal(data.load, "mnist", str(fakes))
    assert str(fakes / "mnist" / FILES[0]) in text
    assert "not the official file" in text
    assert "--allow-unverified" in text


def test_allowed_unverified_set_says_so(fakes: Path) -> None:
    """D4: with the flag the same set loads, normalised, and says that it is not verified."""
    found = data.load("mnist", str(fakes), allow_unverified=True)
    assert found.verified is False
    assert found.x_train.shape == (60000, 1, 28, 28)
    assert found.x_test.shape == (10000, 1, 28, 28)
    assert found.x_train.dtype == np.float32
    assert found.y_train.dtype == np.int64
    assert found.y_train[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert found.x_train[255, 0, 9, 9] == pytest.approx((1 - 0.1307) / 0.3081, rel=1e-6)
    assert found.x_test[256, 0, 9, 9] == pytest.approx(-0.1307 / 0.3081, rel=1e-6)
    assert found.classes == 10
    assert found.origin == str(fakes / "mnist")


def test_truncated_file_gives_no_partial_set(fakes: Path, tmp_path: Path) -> None:
    """D1: one cut file refuses the whole set, even where unverified files are allowed."""
    path = with_other(fakes, tmp_path, FILES[2])
    path.write_bytes((fakes / "mnist" / FILES[2]).read_bytes()[:-100])
    text = refusal(data.load, "mnist", str(tmp_path), allow_unverified=True)
    assert f"{path} is damaged" in text
    assert AGAIN in text


def test_fewer_labels_than_images_are_refused(fakes: Path, tmp_path: Path) -> None:
    """D2: a label file that is one short of the images is refused with both counts."""
    path = write_idx(with_other(fakes, tmp_path, FILES[1]), (59999,), bytes(59999))
    text = refusal(data.load, "mnist", str(tmp_path), allow_unverified=True)
    assert str(path) in text
    assert "(60000,)" in text
    assert "(59999,)" in text


def test_label_ten_is_refused(fakes: Path, tmp_path: Path) -> None:
    """D5: a label above nine in a file is refused with the file, the label and its first index."""
    labels = bytearray(60000)
    labels[1234] = labels[2000] = 10
    path = write_idx(with_other(fakes, tmp_path, FILES[1]), (60000,), bytes(labels))
    text = refusal(data.load, "mnist", str(tmp_path), allow_unverified=True)
    assert f"{path}: expected labels 0 to 9, got 10 at index 1234" in text


def test_one_missing_file_is_named_alone(fakes: Path, tmp_path: Path) -> None:
    """D13: of four files only the missing one is asked for, with its path and its address."""
    path = with_other(fakes, tmp_path, FILES[3])
    text = refusal(data.load, "mnist", str(tmp_path))
    assert f"{path} from {SOURCES['mnist'].files[3].url}" in text
    assert FILES[0] not in text


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_missing_folder_is_named_exactly(tmp_path: Path, name: str) -> None:
    """D13: without its folder a set is refused with the command that fetches it and the exact path of each file."""
    text = refusal(data.load, name, str(tmp_path / "nowhere"))
    assert f"`waffle data {name}`" in text
    source = SOURCES[name]
    for file in source.files:
        assert f"{tmp_path / 'nowhere' / source.folder / file.name} from {file.url}" in text


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """D13: a file where the folder should be counts as a missing folder."""
    (tmp_path / "mnist").write_text("x")
    assert "`waffle data mnist`" in refusal(data.load, "mnist", str(tmp_path))


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_unreadable_folder_is_refused(tmp_path: Path, name: str) -> None:
    """D13: a folder that may not be entered is refused with its path."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        text = refusal(data.load, name, str(folder))
    finally:
        if root:
            os.seteuid(0)
    assert str(folder) in text


@pytest.mark.parametrize("folder", ["~no-such-user-here/data", "x" * 300])
def test_impossible_folder_is_refused(folder: str) -> None:
    """D13: a folder name that cannot exist is refused with that name."""
    assert folder.removeprefix("~") in refusal(data.load, "mnist", folder)


def test_unknown_set_is_refused_with_a_suggestion() -> None:
    """An unknown data set is refused with the nearest known one."""
    text = refusal(data.load, "mnits")
    assert "'mnits'" in text
    assert "did you mean mnist?" in text


def test_data_folder_is_the_flag_then_the_variable_then_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data folder is the one given, else $WAFFLE_DATA, else waffle-fl in the user's cache."""
    monkeypatch.setenv("WAFFLE_DATA", "/variable")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_dir("/flag") == Path("/flag")
    assert data_dir() == Path("/variable")
    monkeypatch.delenv("WAFFLE_DATA")
    assert data_dir() == Path("/cache/waffle-fl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_dir() == Path.home() / ".cache" / "waffle-fl"
    assert data_dir("~/x") == Path.home() / "x"


def test_verify_knows_both_algorithms(tmp_path: Path) -> None:
    """A checksum is written as algorithm:digest, for sha256 and for md5, and an empty one is never met."""
    path = tmp_path / "f"
    path.write_bytes(b"waffle")
    for algorithm in ("sha256", "md5"):
        digest = hashlib.new(algorithm, b"waffle").hexdigest()
        assert checksum(path, algorithm) == digest
        assert is_official(path, f"{algorithm}:{digest}")
        assert not is_official(path, f"{algorithm}:{digest[::-1]}")
        assert verify(path, f"{algorithm}:{digest}", allow_unverified=False) is True
    assert not is_official(path, "")
    assert verify(path, "", allow_unverified=True) is False
    assert "no official checksum" in refusal(verify, path, "", allow_unverified=False)


def test_unreadable_file_has_no_checksum(tmp_path: Path) -> None:
    """D13: a file that cannot be read is refused with its path and the system's reason."""
    text = refusal(checksum, tmp_path / "none", "sha256")
    assert str(tmp_path / "none") in text
    assert "No such file" in text


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "first", "mean"), [("mnist", [5, 0, 4, 1, 9], 0.1307), ("fashion-mnist", [9, 0, 0, 3, 0], 0.2860)]
)
def test_published_sets(published: Path, name: str, first: list[int], mean: float) -> None:
    """The official files are verified, have 60,000 and 10,000 images and begin with the known labels."""
    if not (published / name).is_dir():
        pytest.skip(f"{published} has no folder {name}")
    found = data.load(name, str(published))
    assert found.verified is True
    assert found.x_train.shape == (60000, 1, 28, 28)
    assert found.x_test.shape == (10000, 1, 28, 28)
    assert found.y_train[:5].tolist() == first
    assert set(found.y_test.tolist()) == set(range(10))
    assert abs(float(found.x_train.mean(dtype=np.float64))) < 1e-3
    assert float(found.x_train.std(dtype=np.float64)) == pytest.approx(1, abs=1e-3)
    assert float(found.x_train.min()) == pytest.approx(-mean / SOURCES[name].std[0], rel=1e-5)


# ---------------------------------------------------------------------------------------------- digits and synthetic


def rows(x: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in x}


def test_digits() -> None:
    """Digits are 1,797 normalised images of 8x8, a quarter of them for testing, the same each time."""
    a, b = data.load("digits"), data.load("digits")
    assert a.x_train.shape == (1348, 1, 8, 8)
    assert a.x_test.shape == (449, 1, 8, 8)
    assert a.x_train.dtype == np.float32
    assert a.y_train.dtype == np.int64
    assert a.verified
    assert a.classes == 10
    assert set(a.y_train.tolist()) == set(a.y_test.tolist()) == set(range(10))
    assert np.array_equal(a.x_train, b.x_train)
    assert np.array_equal(a.y_test, b.y_test)
    both = np.concatenate([a.x_train, a.x_test])
    assert abs(both.mean()) < 1e-3
    assert both.std() == pytest.approx(1, abs=1e-3)


def test_synthetic() -> None:
    """The synthetic set is ten Gaussian classes in 20 dimensions, the same each time."""
    a, b = data.load("synthetic"), data.load("synthetic")
    assert a.x_train.shape == (2000, 20)
    assert a.x_test.shape == (1000, 20)
    assert a.x_train.dtype == np.float32
    assert a.y_train.dtype == np.int64
    assert a.verified
    assert a.classes == 10
    assert np.bincount(a.y_train).tolist() == [200] * 10
    assert np.array_equal(a.x_train, b.x_train)
    assert np.array_equal(a.x_test, b.x_test)


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_training_and_test_data_are_disjoint(name: str) -> None:
    """No test sample of the built-in sets is also a training sample."""
    found = data.load(name)
    assert not rows(found.x_train) & rows(found.x_test)
    assert len(rows(found.x_train)) == len(found.x_train)


def test_gaussian_classes_depend_on_the_seed() -> None:
    """Another seed gives other centres; the classes can be told apart and overlap more as spread grows."""
    x, y, _, _ = gaussian_classes(1)
    assert not np.array_equal(x, gaussian_classes(2)[0])
    centres = np.stack([x[y == k].mean(axis=0) for k in range(10)])
    nearest = ((x[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == y).mean() > 0.99
    wide, y, _, _ = gaussian_classes(1, spread=8)
    centres = np.stack([wide[y == k].mean(axis=0) for k in range(10)])
    assert (((wide[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1) == y).mean() < 0.9


def test_quadratics_have_the_optimum_they_claim() -> None:
    """At the stated optimum the weighted gradient of the quadratics is zero."""
    problem = quadratics(seed=3)
    weights = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    theta = problem.optimum(weights)
    gradients = torch.stack([(problem.curvature * (theta - b)).mean(dim=0) for b in problem.samples])
    assert torch.allclose(weights @ gradients, torch.zeros(4, dtype=torch.float64), atol=1e-12)
    assert torch.equal(theta, quadratics(seed=3).optimum(weights))


# ------------------------------------------------------------------------------------------------------------- CIFAR

N = cifar.IMAGES


def cifar_arrays(seed: int, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    """Mostly black images, so that they pack well; the first 50 are noise."""
    rng = np.random.default_rng(seed)
    images = np.zeros((n, 3, 32, 32), np.uint8)
    images[:50] = rng.integers(0, 256, images[:50].shape)
    images[7, 0], images[7, 1], images[7, 2] = 10, 20, 30
    images[7, 1, 2, 5] = 99
    return images, (np.arange(n) + seed) % 10


def binary_batch(images: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None].astype(np.uint8), images.reshape(len(images), -1)], axis=1).tobytes()


def protocol_2(content: Any, module: str = "numpy._core") -> bytes:
    """A pickle of protocol 2, with NumPy's own modules under the given name."""
    dumped = pickle.dumps(content, protocol=2)
    return dumped.replace(b"cnumpy._core.", f"c{module}.".encode()).replace(b"cnumpy.core.", f"c{module}.".encode())


def python_2_batch(images: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch opcode by opcode as Python 2 pickled the official files in 2009: byte strings, and integers for flags."""

    def text(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content

    n, raw = len(images), images.tobytes()
    dtype = (
        b"cnumpy\ndtype\nq\x0b" + text(b"u1") + b"K\x00K\x01\x87Rq\x0c(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb"
    )
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\x09" + text(b"b") + b"\x87Rq\x0a"
        b"(K\x01M" + struct.pack("<H", n) + b"M\x00\x0c\x86" + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw
        + b"tb"
    )  # fmt: skip
    return (
        b"\x80\x02}q\x01(" + text(b"batch_label") + b"q\x02" + text(b"training batch 1 of 5") + b"q\x03"
        + text(b"labels") + b"q\x04]q\x05(" + b"".join(b"K" + bytes([k]) for k in labels.tolist()) + b"e"
        + text(b"data") + b"q\x06" + array
        + text(b"filenames") + b"](" + b"".join(text(b"frog_s_%06d.png" % i) for i in range(n)) + b"eu."
    )  # fmt: skip


@pytest.fixture(scope="session")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the six batches of the binary version, of the official size."""
    place = tmp_path_factory.mktemp("cifar") / "cifar10" / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    for seed, name in enumerate(CIFAR_BINARY):
        (place / name).write_bytes(binary_batch(*cifar_arrays(seed)))
    return place


def few(monkeypatch: pytest.MonkeyPatch, n: int = 60) -> None:
    """Batches of a few images, where what is tested does not depend on their number."""
    monkeypatch.setattr(cifar, "IMAGES", n)


def small_binaries(n: int = 60) -> dict[str, bytes]:
    return {name: binary_batch(*cifar_arrays(seed, n)) for seed, name in enumerate(CIFAR_BINARY)}


def unpacked(root: Path, batches: dict[str, bytes]) -> Path:
    place = root / "cifar10" / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    for name, content in batches.items():
        (place / name).write_bytes(content)
    return place


def make_archive(root: Path, batches: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, official: bool = True) -> Path:
    """A tar.gz with the official layout and two members that want to escape; its checksum passes as the official."""
    path = root / "cifar10" / "cifar-10-binary.tar.gz"
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        extra = {
            "../evil": b"evil",
            "cifar-10-batches-bin/../../evil": b"evil",
            "cifar-10-batches-bin/readme.html": b"x",
        }
        members = {f"cifar-10-batches-bin/{name}": content for name, content in batches.items()}
        for name, content in {**extra, **members}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    if official:
        source = SOURCES["cifar10"]
        file = replace(source.files[0], checksum=f"md5:{checksum(path, 'md5')}")
        monkeypatch.setitem(SOURCES, "cifar10", replace(source, files=(file,)))
    return path


def test_binary_batch_is_a_label_byte_and_three_planes(binaries: Path) -> None:
    """A binary record is its label, then the red, the green and the blue plane, row by row."""
    images, labels = cifar.read_binary(binaries / "data_batch_3.bin")
    wanted, wanted_labels = cifar_arrays(2)
    assert images.shape == (N, 3, 32, 32)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert np.array_equal(images, wanted)
    assert np.array_equal(labels, wanted_labels)
    assert images[7, :, 0, 0].tolist() == [10, 20, 30]
    assert images[7, 1, 2, 5] == 99


def test_binary_set_loads_unverified(binaries: Path) -> None:
    """Five batches are the training data, the sixth the test data, each channel normalised by its own numbers."""
    found = data.load("cifar10", str(binaries.parent.parent), allow_unverified=True)
    assert found.verified is False
    assert found.x_train.shape == (50000, 3, 32, 32)
    assert found.x_test.shape == (10000, 3, 32, 32)
    assert found.y_train[[0, 10000, 20000, 30000, 40000]].tolist() == [0, 1, 2, 3, 4]
    assert found.y_test[:3].tolist() == [5, 6, 7]
    source = SOURCES["cifar10"]
    for channel, value in enumerate((10, 20, 30)):
        wanted = (value / 255 - source.mean[channel]) / source.std[channel]
        assert found.x_train[10007, channel, 0, 0] == pytest.approx(wanted, rel=1e-5)
    assert found.class_names[3] == "cat"


def test_images_known_to_be_inexact_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test batch known by its checksum to hold inexact images loses them, and the data set says so."""
    few(monkeypatch)
    place = unpacked(tmp_path, small_binaries())
    whole = data.load("cifar10", str(tmp_path), allow_unverified=True)
    monkeypatch.setitem(CIFAR_INEXACT, f"sha256:{checksum(place / 'test_batch.bin', 'sha256')}", (3, 59))
    found = data.load("cifar10", str(tmp_path), allow_unverified=True)
    kept = [i for i in range(60) if i not in (3, 59)]
    assert np.array_equal(found.x_test, whole.x_test[kept])
    assert np.array_equal(found.y_test, whole.y_test[kept])
    assert len(found.y_train) == len(whole.y_train)
    assert (whole.note, found.note) == ("", "2 test images left out: this copy does not hold them exactly")


def test_binary_set_with_wrong_checksums_is_refused(binaries: Path) -> None:
    """D4: unpacked batches that are not the official ones are refused with the file and the flag."""
    text = refusal(data.load, "cifar10", str(binaries.parent.parent))
    assert str(binaries / "data_batch_1.bin") in text
    assert "--allow-unverified" in text


@pytest.mark.parametrize("size", [0, 1, N * 3073 - 1, N * 3073 + 1, N * 3072])
def test_binary_batch_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    """D1: a binary batch of any other size is refused with both sizes."""
    path = tmp_path / "data_batch_1.bin"
    with path.open("wb") as stream:
        stream.truncate(size)
    text = refusal(cifar.read_binary, path)
    assert f"expected {N * 3073} bytes, it has {size}" in text
    assert AGAIN in text


def test_label_ten_in_a_binary_batch_is_refused(tmp_path: Path) -> None:
    """D5: a label byte of 10 is refused with the file and the index of its record."""
    images, labels = cifar_arrays(0)
    labels[4321] = 10
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(binary_batch(images, labels))
    assert f"{path}: expected labels 0 to 9, got 10 at index 4321" in refusal(cifar.read_binary, path)


@pytest.mark.parametrize("read", [cifar.read_binary, cifar.read_python])
def test_a_batch_that_cannot_be_opened_is_refused(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """D13: a batch that cannot be opened is refused with its path."""
    assert str(tmp_path / "none") in refusal(read, tmp_path / "none")


@pytest.mark.parametrize("module", ["numpy.core", "numpy._core"])
def test_python_batch_is_read(tmp_path: Path, module: str) -> None:
    """A pickle of protocol 2 with `data` and `labels` is read under NumPy's old and its new module names."""
    images, labels = cifar_arrays(4)
    content = {"data": images.reshape(N, 3072), "labels": labels.tolist(), "batch_label": "batch 1", "filenames": ["a"]}
    dumped = protocol_2(content, module)
    assert f"c{module}.multiarray\n_reconstruct".encode() in dumped
    path = tmp_path / "data_batch_1"
    path.write_bytes(dumped)
    found, found_labels = cifar.read_python(path)
    assert found.dtype == np.uint8
    assert found_labels.dtype == np.int64
    assert np.array_equal(found, images)
    assert np.array_equal(found_labels, labels)


def test_python_2_batch_is_read(tmp_path: Path) -> None:
    """A batch pickled by Python 2, as the official files were, is read without a warning."""
    images, labels = cifar_arrays(5)
    path = tmp_path / "data_batch_1"
    path.write_bytes(python_2_batch(images, labels))
    found, found_labels = cifar.read_python(path)
    assert np.array_equal(found, images)
    assert np.array_equal(found_labels, labels)


def test_python_folder_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the python version is found, read in order, and counts as unverified unless its checksums fit."""
    few(monkeypatch)
    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    for seed, name in enumerate(CIFAR_PYTHON):
        (place / name).write_bytes(python_2_batch(*cifar_arrays(seed, 60)))
    assert str(place / "data_batch_1") in refusal(data.load, "cifar10", str(tmp_path))
    found = data.load("cifar10", str(tmp_path), allow_unverified=True)
    assert found.verified is False
    assert found.y_train[::60].tolist() == [0, 1, 2, 3, 4]
    assert found.y_test[0] == 5
    for name in CIFAR_PYTHON:
        monkeypatch.setitem(CIFAR_PYTHON, name, f"md5:{checksum(place / name, 'md5')}")
    assert data.load("cifar10", str(tmp_path)).verified is True


def small_python(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    few(monkeypatch, 2)
    content = {"data": np.zeros((2, 3072), np.uint8), "labels": [3, 4], **changes}
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": [1]},
        {"labels": [1, 2, 3]},
        {"labels": ["cat", "dog"]},
        {"labels": [[1, 2], [3]]},
        {"labels": None},
        {"labels": [1, 2**70]},
        {"data": np.zeros((2, 3071), np.uint8)},
        {"data": [1, 2, 3]},
        {"data": None},
        {"data": "text"},
    ],
)
def test_python_batch_of_another_shape_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """A python batch without 10,000 images and as many labels is refused with its name."""
    path = small_python(tmp_path / "data_batch_1", monkeypatch, **changes)
    text = refusal(cifar.read_python, path)
    assert f"{path} is no CIFAR-10 batch" in text
    assert AGAIN in text


@pytest.mark.parametrize("label", [10, -1, 255])
def test_wrong_label_in_a_python_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: int) -> None:
    """D5: a label outside 0 to 9 in a python batch is refused with its index."""
    path = small_python(tmp_path / "data_batch_1", monkeypatch, labels=[9, label])
    assert f"{path}: expected labels 0 to 9, got {label} at index 1" in refusal(cifar.read_python, path)


@pytest.mark.parametrize("changes", [{"labels": [1.5, 2.7]}, {"data": np.full((2, 3072), 3.5, np.float32)}])
def test_fractions_in_a_python_batch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """D5: labels and pixels that are no integers are refused, not rounded."""
    path = small_python(tmp_path / "data_batch_1", monkeypatch, **changes)
    if "data" in changes:
        monkeypatch.setattr(cifar, "RECORD", 4 * 3073)
    assert str(path) in refusal(cifar.read_python, path)


@pytest.mark.parametrize("content", [[1, 2], "text", 7, None, {}, {"data": 1}])
def test_python_batch_of_other_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    """A pickle of anything but the dictionary of a batch is refused with its name."""
    few(monkeypatch, 2)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content))
    assert str(path) in refusal(cifar.read_python, path)


def test_oversized_python_batch_is_refused_unread(tmp_path: Path) -> None:
    """D3: a python batch of a hundred gigabytes is refused by its size, before it is read."""
    path = tmp_path / "data_batch_1"
    with path.open("wb") as stream:
        stream.truncate(100 << 30)
    with memory_below(MEGABYTE):
        assert "larger than any CIFAR-10 batch" in refusal(cifar.read_python, path)


def called(module: str, name: str, *arguments: str, protocol: int = 2) -> bytes:
    """A pickle that calls module.name with text arguments."""
    if protocol == 4:
        found = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)) + b"\x93"
    else:
        found = f"c{module}\n{name}\n".encode()
    texts = b"".join(b"X" + struct.pack("<I", len(a.encode())) + a.encode() for a in arguments)
    return (b"\x80" + bytes([protocol]) if protocol else b"") + found + b"(" + texts + b"tR."


def hostile(canary: Path) -> dict[str, bytes]:
    """Pickles that would write the canary file if any of them ran."""
    python = f"open({str(canary)!r}, 'w').close()"
    inst = f"(S{f'touch {canary}'!r}\nios\nsystem\n.".encode()
    return {
        "os.system": called("os", "system", f"touch {canary}"),
        "os.system, protocol 0": called("os", "system", f"touch {canary}", protocol=0),
        "os.system, protocol 4": called("os", "system", f"touch {canary}", protocol=4),
        "os.system, INST": inst,
        "posix.system": called("posix", "system", f"touch {canary}"),
        "builtins.eval": called("builtins", "eval", python),
        "builtins.exec": called("builtins", "exec", python),
        "__builtin__.eval": called("__builtin__", "eval", python),
        "io.open": called("io", "open", str(canary), "w"),
        "subprocess.getoutput": called("subprocess", "getoutput", f"touch {canary}"),
        "pathlib.Path.touch": called("pathlib", "Path.touch", str(canary), protocol=4),
        "numpy.save": called("numpy", "save", str(canary), "x"),
        "numpy attribute": called("numpy", "ndarray.tofile", str(canary), protocol=4),
        "nested pickle": called("pickle", "loads", "x"),
        "codecs.open": called("codecs", "open", str(canary), "w"),
        "inside a batch": b"\x80\x02}(U\x04data" + called("os", "system", f"touch {canary}")[2:-1] + b"u.",
    }


@pytest.mark.parametrize("kind", list(hostile(Path("x"))))
def test_malicious_pickle_is_refused_and_never_run(tmp_path: Path, kind: str) -> None:
    """A pickle that names any function but NumPy's own is refused, and the function never runs."""
    canary = tmp_path / "canary"
    path = tmp_path / "data_batch_1"
    path.write_bytes(hostile(canary)[kind])
    text = refusal(cifar.read_python, path)
    assert "refused to load" in text
    assert "no CIFAR-10 batch" in text
    assert not canary.exists()


def test_the_canary_would_sing(tmp_path: Path) -> None:
    """The hostile pickles are real: an ordinary unpickler runs them."""
    canary = tmp_path / "canary"
    pickle.loads(hostile(canary)["builtins.eval"])
    assert canary.exists()


def test_refused_pickle_is_named(tmp_path: Path) -> None:
    """The refusal of a hostile batch names the file that must go."""
    path = tmp_path / "data_batch_1"
    path.write_bytes(called("os", "system", "true"))
    assert str(path) in refusal(cifar.read_python, path)


def test_refused_name_cannot_break_the_line(tmp_path: Path) -> None:
    """A line break in a hostile name does not reach the message."""
    path = tmp_path / "data_batch_1"
    path.write_bytes(called("os", "system\nwaffle: all is well", "true", protocol=4))
    assert "refused to load" in refusal(cifar.read_python, path)


class Call:
    """Pickles as a call of `function` with `arguments`, then __setstate__(state)."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: tuple[Any, ...] | None = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def forged_dtype(kind: str) -> Call:
    """A NumPy type whose pickled state claims that its eight bytes hold something else."""
    reference, byte = np.dtype("O"), np.dtype("u1")
    subarray, names, fields = {
        "field of objects": (None, ("a",), {"a": (reference, 0)}),
        "subarray of objects": ((reference, (1,)), None, None),
        "field far outside": (None, ("a",), {"a": (byte, 1 << 30)}),
    }[kind]
    return Call(np.dtype, ("V8", False, True), (3, "|", subarray, names, fields, 8, 1, 0))


@pytest.mark.parametrize("kind", ["field of objects", "subarray of objects", "field far outside"])
def test_forged_array_type_cannot_crash_the_reader(tmp_path: Path, kind: str) -> None:
    """A batch whose array type makes addresses of the file's bytes is refused, and the process survives it."""
    template = np.zeros(1, np.uint8).__reduce__()
    array = Call(template[0], template[1], (1, (100,), forged_dtype(kind), False, b"AAAAAA\x00\x00" * 100))
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": array, "labels": [0] * N}, protocol=2))
    program = (
        "import sys, pathlib\nfrom waffle_fl.data.cifar import read_python\nfrom waffle_fl.errors import WaffleError\n"
        "try:\n    read_python(pathlib.Path(sys.argv[1]))\nexcept WaffleError as error:\n    print('refused', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"the process ended with {done.returncode}"
    assert done.stdout.startswith("refused")


def memory_bombs() -> dict[str, bytes]:
    huge = Call(np.ndarray, ((1 << 25,), "u1"))
    return {
        "memo index": b"\x80\x02Nr" + struct.pack("<I", 1 << 23) + b".",
        "array of labels": pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": huge}, protocol=2),
        "bytes never sent": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 28) + b".",
        "bytearray never sent": b"\x80\x05\x96" + struct.pack("<Q", 1 << 28) + b".",
    }


@pytest.mark.parametrize("kind", list(memory_bombs()))
def test_small_python_batch_cannot_take_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """D3: a python batch of a few bytes is refused without allocating more than a whole batch would need."""
    few(monkeypatch, 2)
    path = tmp_path / "data_batch_1"
    path.write_bytes(memory_bombs()[kind])
    assert path.stat().st_size < 20_000
    with memory_below(64 * MEGABYTE):
        assert str(path) in refusal(cifar.read_python, path)


def test_archive_is_unpacked_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The official archive is unpacked beside itself, its batches only, and nothing outside its folder is written."""
    few(monkeypatch)
    batches = small_binaries()
    root = tmp_path / "deep" / "er"
    root.mkdir(parents=True)
    archive = make_archive(root, batches, monkeypatch)
    found = data.load("cifar10", str(root))
    assert found.verified is True
    assert found.y_train[:3].tolist() == [0, 1, 2]
    target = archive.parent / "cifar-10-batches-bin"
    assert sorted(path.name for path in target.iterdir()) == sorted(CIFAR_BINARY)
    assert not list(tmp_path.rglob("evil"))
    assert all((target / name).read_bytes() == content for name, content in batches.items())


def test_unpacked_archive_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once unpacked, the set loads from its folder, still verified by the archive beside it."""
    few(monkeypatch)
    make_archive(tmp_path, small_binaries(), monkeypatch)
    first = data.load("cifar10", str(tmp_path))
    again = data.load("cifar10", str(tmp_path))
    assert first.verified is True
    assert again.verified is True
    assert np.array_equal(first.x_test, again.x_test)


def test_other_archive_is_refused_and_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: an archive with another checksum is refused before a byte of it is unpacked."""
    few(monkeypatch)
    archive = make_archive(tmp_path, small_binaries(), monkeypatch, official=False)
    text = refusal(data.load, "cifar10", str(tmp_path))
    assert str(archive) in text
    assert "not the official file" in text
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


def test_the_flag_that_was_given_is_not_advised_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: an archive that is refused although unverified files are allowed does not advise to allow them."""
    few(monkeypatch)
    make_archive(tmp_path, small_binaries(), monkeypatch, official=False)
    found = answer(data.load, "cifar10", str(tmp_path), allow_unverified=True)
    assert "--allow-unverified" not in found if isinstance(found, str) else found.verified is False


def test_archive_without_a_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that lacks a batch is refused with both names."""
    few(monkeypatch)
    batches = small_binaries()
    del batches["data_batch_4.bin"]
    archive = make_archive(tmp_path, batches, monkeypatch)
    text = refusal(data.load, "cifar10", str(tmp_path))
    assert str(archive) in text
    assert "data_batch_4.bin" in text


def test_full_disk_while_unpacking_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes no more while the archive is unpacked ends in one line with the place."""
    few(monkeypatch)
    make_archive(tmp_path, small_binaries(), monkeypatch)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # a batch has 184,380 bytes
    try:
        text = refusal(data.load, "cifar10", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in text


def test_half_unpacked_archive_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that an interrupted unpacking left incomplete is completed by the command that the message names."""
    few(monkeypatch)
    batches = small_binaries()
    make_archive(tmp_path, batches, monkeypatch)
    unpacked(tmp_path, dict(list(batches.items())[:3]))
    data.fetch("cifar10", str(tmp_path))
    assert data.load("cifar10", str(tmp_path)).verified is True


def test_cut_batch_beside_its_archive_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut batch that is deleted as the message says comes back from the archive beside it."""
    few(monkeypatch)
    batches = small_binaries()
    make_archive(tmp_path, batches, monkeypatch)
    batches["data_batch_5.bin"] = batches["data_batch_5.bin"][:-1]
    place = unpacked(tmp_path, batches)
    assert AGAIN in refusal(data.load, "cifar10", str(tmp_path))
    (place / "data_batch_5.bin").unlink()
    data.fetch("cifar10", str(tmp_path))
    assert data.load("cifar10", str(tmp_path)).verified is True


def test_changed_batch_beside_the_archive_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: a batch that differs from the official one is not covered by the archive that lies beside it."""
    few(monkeypatch)
    batches = small_binaries()
    make_archive(tmp_path, batches, monkeypatch)
    batches["data_batch_2.bin"] = binary_batch(*cifar_arrays(77, 60))
    unpacked(tmp_path, batches)
    assert "data_batch_2.bin" in refusal(data.load, "cifar10", str(tmp_path))


def test_python_batches_are_not_covered_by_the_binary_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: the checksum of the binary archive says nothing about a folder of the python version beside it."""
    few(monkeypatch)
    make_archive(tmp_path, small_binaries(), monkeypatch)
    place = tmp_path / "cifar10" / "cifar-10-batches-py"
    place.mkdir()
    for seed, name in enumerate(CIFAR_PYTHON):
        (place / name).write_bytes(python_2_batch(*cifar_arrays(seed + 50, 60)))
    assert "not the official file" in refusal(data.load, "cifar10", str(tmp_path))


@pytest.mark.parametrize("parent", ["cifar10", "", "cifar-10"])
def test_cifar_is_found_where_it_usually_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str) -> None:
    """The unpacked folder is found under cifar10, under cifar-10, and in the data folder itself."""
    few(monkeypatch)
    place = tmp_path / parent / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    for name, content in small_binaries().items():
        (place / name).write_bytes(content)
    found = data.load("cifar10", str(tmp_path), allow_unverified=True)
    assert found.origin == str(place)
    assert found.verified is False


def test_missing_batch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D13: of six batches only the missing one is asked for, with its exact path."""
    few(monkeypatch)
    place = unpacked(tmp_path, small_binaries())
    (place / "data_batch_5.bin").unlink()
    text = refusal(data.load, "cifar10", str(tmp_path), allow_unverified=True)
    assert str(place / "data_batch_5.bin") in text
    assert "data_batch_4.bin" not in text
    assert "`waffle data cifar10`" in text


def test_test_batch_alone_has_no_official_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: with five official batches and no archive the test batch is refused, for want of a published checksum."""
    few(monkeypatch)
    place = unpacked(tmp_path, small_binaries())
    for name in list(CIFAR_BINARY)[:5]:
        monkeypatch.setitem(CIFAR_BINARY, name, f"sha256:{checksum(place / name, 'sha256')}")
    text = refusal(data.load, "cifar10", str(tmp_path))
    assert str(place / "test_batch.bin") in text
    assert "no official checksum" in text
    assert data.load("cifar10", str(tmp_path), allow_unverified=True).verified is False


# ------------------------------------------------------------------------------------------------------ from_arrays

Arrays = tuple[Any, Any, Any, Any]


def agent(seed: int, train: int = 12, test: int = 6, classes: int = 3, features: int = 4) -> Arrays:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((train + test, features)).astype(np.float32)
    y = np.arange(train + test) % classes
    return x[:train], y[:train], x[train:], y[train:]


def federation(**agents: Arrays) -> Federation:
    return Federation.from_arrays(agents)


def trained(made: Federation, rounds: int = 3, batch_size: int = 64) -> list[dict[str, Any]]:
    """What WAFFLE measures in a few rounds on the federation."""
    shape, classes = made.shape, len(made.class_names)
    model = FlatModel(lambda: mlp(shape, classes, hidden=4))
    cell = Cell(ALGORITHMS["waffle"](sgd=SGD(0.1)), made, 1)
    stream = simulate([cell], model, rounds=rounds, batch_size=batch_size, workers=1)
    return [outcomes[0].measured for outcomes in stream]


def test_from_arrays_keeps_everyones_samples() -> None:
    """Each agent's rows point at exactly the samples and labels it gave."""
    a, b = agent(1), agent(2, train=5)
    made = federation(alice=a, bob=b)
    assert made.names == ("alice", "bob")
    assert made.samples.tolist() == [12, 5]
    assert made.shape == (4,)
    assert made.class_names == ("0", "1", "2")
    for i, (x, y, x_test, y_test) in enumerate((a, b)):
        assert np.array_equal(made.x[made.train[i]].numpy(), x)
        assert np.array_equal(made.labels(i, made.train[i]).numpy(), y)
        assert np.array_equal(made.x[made.test[i]].numpy(), x_test)
        assert np.array_equal(made.labels(i, made.test[i]).numpy(), y_test)
    assert made.label_counts().tolist() == [[4, 4, 4], [2, 2, 1]]


def test_from_arrays_takes_lists_tensors_and_pairs() -> None:
    """Lists, tensors and a sequence of pairs make the same federation as arrays in a mapping."""
    x, y, x_test, y_test = agent(1)
    plain = federation(a=(x, y, x_test, y_test))
    tensors = Federation.from_arrays([("a", tuple(map(torch.from_numpy, (x, y, x_test, y_test))))])
    lists = federation(a=(x.astype(float).tolist(), y.tolist(), x_test.astype(float).tolist(), y_test.tolist()))
    assert plain.digest() == tensors.digest() == lists.digest()


def test_digest_sees_every_change() -> None:
    """Another sample, another label or another name gives another digest."""
    x, y, x_test, y_test = agent(1)
    base = federation(a=(x, y, x_test, y_test)).digest()
    assert federation(a=(x, y, x_test, y_test)).digest() == base
    other = x.copy()
    other[3, 2] += 1
    assert federation(a=(other, y, x_test, y_test)).digest() != base
    assert federation(a=(x, np.roll(y, 1), x_test, y_test)).digest() != base
    assert federation(b=(x, y, x_test, y_test)).digest() != base


def test_only_is_what_one_site_sees() -> None:
    """A federation of one keeps its agent's samples and id, and makes it Alice."""
    made = federation(alice=agent(1), bob=agent(2)).only(1)
    assert made.names == ("bob",)
    assert made.ids == (1,)
    assert made.alice == 0
    assert np.array_equal(made.x[made.train[0]].numpy(), agent(2)[0])


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint8, np.uint16, np.uint64])
def test_labels_of_every_integer_type_are_taken(kind: type) -> None:
    """Labels may be of any integer type, MNIST's unsigned bytes among them."""
    x, y, x_test, y_test = agent(1)
    made = federation(a=(x, y.astype(kind), x_test, y_test.astype(kind)))
    assert made.y.dtype == torch.int64
    assert made.y.tolist() == [*y.tolist(), *y_test.tolist()]


@pytest.mark.parametrize(("part", "word"), [(1, "training"), (3, "test")])
def test_negative_label_is_refused(part: int, word: str) -> None:
    """D5: a negative label is refused with the agent, the label and its first index."""
    arrays = [a.copy() for a in agent(2)]
    arrays[part][3] = arrays[part][5] = -7
    text = refusal(federation, alice=agent(1), bob=tuple(arrays))
    assert text == f"bob: expected labels >= 0, got -7 at {word} index 3"


def test_label_beyond_the_classes_is_refused() -> None:
    """D5: a label beyond the class names is refused with both numbers."""
    x, y, x_test, y_test = agent(2)
    y = y.copy()
    y[4] = 9
    agents = {"alice": agent(1), "bob": (x, y, x_test, y_test)}
    text = refusal(Federation.from_arrays, agents, class_names=("a", "b", "c"))
    assert "below 3" in text
    assert "got 9" in text


def test_label_beyond_the_classes_is_refused_with_agent_and_index() -> None:
    """D5: a label beyond the class names is refused with the agent and the index that hold it."""
    x, y, x_test, y_test = agent(2)
    y = y.copy()
    y[4] = 9
    agents = {"alice": agent(1), "bob": (x, y, x_test, y_test)}
    text = refusal(Federation.from_arrays, agents, class_names=("a", "b", "c"))
    assert "bob" in text
    assert "index 4" in text


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.bool_, np.complex64, np.str_, object])
def test_labels_that_are_no_integers_are_refused(kind: type) -> None:
    """D5: labels of any type but integers are refused with the agent and the type."""
    x, y, x_test, y_test = agent(2)
    text = refusal(federation, alice=agent(1), bob=(x, y.astype(kind), x_test, y_test))
    assert text == f"bob: expected integer labels, the training labels are {y.astype(kind).dtype}"


def test_labels_with_two_axes_are_refused() -> None:
    """D5: one-hot labels, which have an axis too many, are refused with the agent."""
    x, y, x_test, y_test = agent(2)
    one_hot = np.eye(3, dtype=np.int64)
    assert "bob" in refusal(federation, alice=agent(1), bob=(x, one_hot[y], x_test, one_hot[y_test]))


def test_more_samples_than_labels_are_refused() -> None:
    """D2: an agent with more samples than labels is refused with both counts."""
    x, y, x_test, y_test = agent(2)
    assert refusal(federation, bob=(x, y[:-1], x_test, y_test)) == "bob: 12 training samples but 11 labels"
    assert refusal(federation, bob=(x, y, x_test[:2], y_test)) == "bob: 2 test samples but 6 labels"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("part", "word"), [(0, "training"), (2, "test")])
def test_features_that_are_not_finite_are_refused(value: float, part: int, word: str) -> None:
    """D6: NaN and infinity are refused with the agent, their count in samples and the first index."""
    arrays = [a.copy() for a in agent(2)]
    arrays[part][4, 1] = arrays[part][4, 2] = arrays[part][5, 0] = value
    text = refusal(federation, alice=agent(1), bob=tuple(arrays))
    assert text.startswith(f"bob: 2 {word} samples hold NaN or infinity, the first at index 4")


def test_features_that_overflow_single_precision_are_refused() -> None:
    """D6: a finite double that becomes infinite in single precision is refused or kept finite."""
    x, y, x_test, y_test = agent(2)
    x = x.astype(np.float64)
    x[4, 1] = 1e39
    made = answer(federation, bob=(x, y, x_test.astype(np.float64), y_test))
    assert "index 4" in made if isinstance(made, str) else bool(made.x.isfinite().all())


@pytest.mark.parametrize("kind", [np.complex64, np.str_, object, np.bool_])
def test_features_that_are_no_numbers_are_refused(kind: type) -> None:
    """D12: features that are no real numbers are refused with the agent and the type."""
    x, y, x_test, y_test = agent(2)
    text = refusal(federation, bob=(x.astype(kind), y, x_test, y_test))
    assert text == f"bob: expected numbers as features, the training features are {x.astype(kind).dtype}"


@pytest.mark.parametrize(
    "arrays",
    [
        pytest.param(([[1.0, 2.0], [3.0]], [0, 1], [[4.0, 5.0]], [0]), id="ragged"),
        pytest.param(([[1.0, 2.0], [3.0, 4.0]], [0, 1], [[4.0, 5.0]]), id="three arrays"),
        pytest.param((1.0, 0, 2.0, 1), id="scalars"),
        pytest.param((None, None, None, None), id="nothing"),
    ],
)
def test_arrays_of_no_use_are_refused(arrays: Any) -> None:
    """What is no set of four equal-sided arrays is refused with the agent."""
    assert "bob" in refusal(federation, bob=arrays)


def test_alice_without_training_samples_is_refused() -> None:
    """D7: an Alice without training samples is refused by name."""
    text = refusal(federation, alice=agent(1, train=0), bob=agent(2))
    assert "Alice (alice) has no training samples" in text


def test_another_agent_without_samples_is_kept_at_weight_zero() -> None:
    """D7: another agent without samples is kept, warned about, and weighs nothing in any round."""
    made = federation(alice=agent(1), bob=agent(2, train=0), carol=agent(3))
    assert made.samples.tolist() == [12, 0, 12]
    notes = advice(RunConfig(method="waffle", settings=Settings()), made)
    assert [note for note in notes if "bob" in note] == ["bob without training samples: weight 0 throughout"]
    for measured in trained(made):
        assert measured["weights"][1] == 0
        assert sum(measured["weights"]) == pytest.approx(1)
        assert measured["loss"] is not None


def test_agent_of_a_single_class_is_kept() -> None:
    """D9: an agent that holds one class only is kept, and its measurements are finite."""
    x, _, x_test, _ = agent(2)
    made = federation(alice=(x, np.full(12, 2), x_test, np.full(6, 2)), bob=agent(1))
    assert made.label_counts().tolist() == [[0, 0, 12], [4, 4, 4]]
    for measured in trained(made):
        assert np.isfinite(measured["loss"])
        assert 0 <= measured["accuracy"] <= 1


def test_alice_without_test_samples_is_refused() -> None:
    """D10: an Alice without test samples is refused by name; another agent needs none."""
    text = refusal(federation, alice=agent(1, test=0), bob=agent(2))
    assert "Alice (alice) has no test samples" in text
    assert federation(alice=agent(1), bob=agent(2, test=0)).agents == 2


def test_overlap_of_training_and_test_is_refused() -> None:
    """D11: training samples among an agent's test samples are refused with their count and first index."""
    x, y, x_test, y_test = agent(2)
    x_test, y_test = x_test.copy(), y_test.copy()
    x_test[3], y_test[3] = x[7], y[7]
    x_test[5], y_test[5] = x[0], y[0]
    agents = {"alice": agent(1), "bob": (x, y, x_test, y_test)}
    text = refusal(Federation.from_arrays, agents)
    assert text.startswith("bob: 2 test samples are training data of bob too, the first at index 3")
    assert Federation.from_arrays(agents, allow_duplicates=True).agents == 2


def test_overlap_is_found_whatever_the_type_of_the_labels() -> None:
    """D11: the overlap is found although training and test labels are of different integer types."""
    x, y, _, _ = agent(2)
    assert "training data of bob too" in refusal(federation, bob=(x, y.astype(np.int64), x, y.astype(np.int32)))


def test_test_sample_that_another_agent_trains_on_is_refused() -> None:
    """D11: Alice's test samples among the training samples of another agent are refused with both names."""
    a, b = agent(1), agent(2)
    leaked = (np.concatenate([b[0], a[2]]), np.concatenate([b[1], a[3]]), b[2], b[3])
    text = refusal(federation, alice=a, bob=leaked)
    assert "alice" in text
    assert "bob" in text


def test_data_counted_twice_is_refused() -> None:
    """D11: two agents with the same training data, in whatever order, are refused with both names."""
    x, y, x_test, y_test = agent(1)
    turned = (x[::-1], y[::-1], x_test, y_test)
    text = refusal(federation, alice=agent(3), bob=(x, y, x_test, y_test), carol=turned)
    assert text == "carol and bob hold the same training data: it would be counted twice"


@pytest.mark.parametrize(
    ("features", "kind", "named"), [(5, np.float32, "(5,)"), (4, np.float64, "float64"), (4, np.uint8, "uint8")]
)
def test_agents_of_another_kind_are_refused(features: int, kind: type, named: str) -> None:
    """D12: an agent with other features or another type is refused with both kinds and both names."""
    x, y, x_test, y_test = agent(2, features=features)
    text = refusal(federation, alice=agent(1), bob=(x.astype(kind), y, x_test.astype(kind), y_test))
    assert "alice has float32 (4,)" in text
    assert "bob has" in text
    assert named in text


def test_other_channels_are_refused() -> None:
    """D12: images with another number of channels are refused with both shapes, in test data too."""
    rng = np.random.default_rng(0)
    grey, colour = rng.random((6, 1, 8, 8)), rng.random((6, 3, 8, 8))
    y = np.arange(6) % 2
    text = refusal(federation, alice=(grey[:4], y[:4], grey[4:], y[4:]), bob=(colour[:4], y[:4], colour[4:], y[4:]))
    assert "(1, 8, 8)" in text
    assert "(3, 8, 8)" in text
    assert "(3, 8, 8)" in refusal(federation, alice=(grey[:4], y[:4], colour[4:], y[4:]))


def test_identical_agents_have_defined_weights() -> None:
    """D14: agents with identical data, at distance zero, get finite weights that sum to one."""
    same = agent(1)
    made = Federation.from_arrays({"alice": same, "bob": same, "carol": same}, allow_duplicates=True)
    for measured in trained(made, rounds=4):
        assert np.isfinite(measured["weights"]).all()
        assert sum(measured["weights"]) == pytest.approx(1)
        assert np.isfinite(measured["loss"])


def test_no_agents_and_doubled_names_are_refused() -> None:
    """C12: no agents at all, and two agents of one name, are refused."""
    assert "at least one agent" in refusal(Federation.from_arrays, {})
    assert "'bob'" in refusal(Federation.from_arrays, [("bob", agent(1)), ("bob", agent(2))])


@pytest.mark.parametrize("alice", [2, -1, "2", "-1", "zoe", "", "²", "9" * 5000])
def test_alice_who_is_not_there_is_refused(alice: int | str) -> None:
    """C3: an Alice out of range or unknown is refused with the names or the range."""
    text = refusal(index_of, alice, ("ann", "bob"))
    assert "ann, bob" in text or "between 0 and 1" in text


def test_alice_is_found_by_name_or_number() -> None:
    """Alice is given by her name, by her number, or by her number as text; a name goes before a number."""
    assert index_of("bob", ("ann", "bob")) == 1
    assert index_of(1, ("ann", "bob")) == 1
    assert index_of("1", ("ann", "bob")) == 1
    assert index_of("1", ("1", "0")) == 0
    made = Federation.from_arrays({"ann": agent(1), "bob": agent(2)}, alice="bob")
    assert made.alice == 1


def test_build_offsets_the_test_rows_and_refuses_shared_samples() -> None:
    """Test rows point behind the training rows of the pool, and a training sample of two agents is refused."""
    digits = data.load("digits")
    partition = split(digits.y_train, digits.y_test, "B*", seed=1)
    made = build(digits, partition)
    assert made.names[3] == "agent 3"
    assert np.array_equal(made.x[made.test[2]].numpy(), digits.x_test[partition.test[2]])
    assert np.array_equal(made.y[made.test[2]].numpy(), digits.y_test[partition.test[2]])
    wanted = partition.relabel[2][digits.y_train[partition.train[2]]]
    assert np.array_equal(made.labels(2, made.train[2]).numpy(), wanted)
    doubled = replace(partition, train=(partition.train[0],) * 10)
    assert "two agents" in refusal(build, digits, doubled)
    empty = np.empty(0, np.int64)
    assert "no test samples" in refusal(build, digits, replace(partition, test=(empty,) * 10))
