"""Data files: reading, verification, and refusals in one line."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import refusal
from data_support import FETCH_AGAIN, MEGABYTE, memory_below
from waffle_fl import data
from waffle_fl.data.files import checksum, data_dir, is_official, verify
from waffle_fl.data.idx import read_idx
from waffle_fl.data.sources import SOURCES
from waffle_fl.data.synthetic import gaussian_classes, quadratics

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
    """D1: a gzip file truncated anywhere is refused as damaged, with its name and what to do."""
    path = write_idx(tmp_path / "cut.gz", (10, 10, 10), noise(1000))
    path.write_bytes(path.read_bytes()[:kept])
    text = refusal(read_idx, path, (10, 10, 10))
    assert f"{path} is damaged" in text
    assert FETCH_AGAIN in text


@pytest.mark.parametrize("kept", [400, -8])
def test_truncated_gzip_is_refused_with_its_sizes(tmp_path: Path, kept: int) -> None:
    """D1: the refusal of a truncated gzip file states the expected number of bytes."""
    path = write_idx(tmp_path / "cut.gz", (10, 10, 10), noise(1000))
    path.write_bytes(path.read_bytes()[:kept])
    assert "expected 1000 bytes" in refusal(read_idx, path, (10, 10, 10))


def test_short_body_is_refused_with_both_sizes(tmp_path: Path) -> None:
    """D1: a valid gzip file with too few bytes is refused with the expected and the actual number."""
    text = refusal(read_idx, write_idx(tmp_path / "short.gz", (10, 10), noise(99)), (10, 10))
    assert "expected 100 bytes" in text
    assert "read 99 bytes" in text
    assert FETCH_AGAIN in text


def test_long_body_is_refused(tmp_path: Path) -> None:
    """One byte more than the dimensions require is refused."""
    text = refusal(read_idx, write_idx(tmp_path / "long.gz", (10, 10), noise(101)), (10, 10))
    assert "expected 100 bytes of data, read more" in text


def test_crc_error_is_refused(tmp_path: Path) -> None:
    """D1: a gzip file with a wrong checksum is refused as a CRC error."""
    path = write_idx(tmp_path / "crc.gz", (10, 10), noise(100))
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    text = refusal(read_idx, path, (10, 10))
    assert "CRC" in text
    assert FETCH_AGAIN in text


def test_flipped_bytes_inside_are_refused(tmp_path: Path) -> None:
    """D1: every flipped byte in the compressed body is detected."""
    path = write_idx(tmp_path / "flip.gz", (10, 10), noise(100))
    sound = path.read_bytes()
    for position in range(10, len(sound)):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 0x5A]) + sound[position + 1 :])
        assert str(path) in refusal(read_idx, path, (10, 10))


@pytest.mark.parametrize("junk", [b"not gzip at all", b"\x00" * 64, b"\x1f\x8b", b"<html>404</html>"])
def test_other_files_are_refused(tmp_path: Path, junk: bytes) -> None:
    """D1: a file that is not gzip is refused with its name."""
    path = tmp_path / "junk.gz"
    path.write_bytes(junk)
    assert str(path) in refusal(read_idx, path, (10, 10))


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    """Bytes after the end of the gzip stream are refused."""
    path = write_idx(tmp_path / "tail.gz", (10, 10), noise(100))
    path.write_bytes(path.read_bytes() + b"rubbish")
    assert FETCH_AGAIN in refusal(read_idx, path, (10, 10))


def test_absent_and_folder_paths_are_refused(tmp_path: Path) -> None:
    """D13: a missing file and a folder in its place are refused in one line."""
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
    """D3: a header that claims 10^12 items is refused while memory stays below two megabytes."""
    path = write_idx(tmp_path / "bomb.gz", (10**4, 10**4, 10**4), noise(1000))
    with memory_below(2 * MEGABYTE):
        text = refusal(read_idx, path, (60000, 28, 28))
    assert "(60000, 28, 28)" in text
    assert "(10000, 10000, 10000)" in text


def test_gzip_bomb_is_not_inflated(tmp_path: Path) -> None:
    """D3: a file that inflates to 100 megabytes instead of 400 bytes is refused using less than two megabytes."""
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


def folder_without(fakes: Path, root: Path, name: str) -> Path:
    """A data folder of links to the fakes except one file, whose path is returned."""
    (root / "mnist").mkdir()
    for file in FILES:
        if file != name:
            (root / "mnist" / file).symlink_to(fakes / "mnist" / file)
    return root / "mnist" / name


def test_wrong_checksum_is_refused(fakes: Path) -> None:
    """D4: a published set with another sha256 is refused with the file and the flag that allows it."""
    text = refusal(data.load, "mnist", str(fakes))
    assert str(fakes / "mnist" / FILES[0]) in text
    assert "not the official file" in text
    assert "--allow-unverified" in text


def test_an_allowed_unverified_set_is_marked(fakes: Path) -> None:
    """D4: with the flag the same set loads, normalised, and is marked as unverified."""
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
    """D1: one truncated file refuses the whole set, also when unverified files are allowed."""
    path = folder_without(fakes, tmp_path, FILES[2])
    path.write_bytes((fakes / "mnist" / FILES[2]).read_bytes()[:-100])
    text = refusal(data.load, "mnist", str(tmp_path), allow_unverified=True)
    assert f"{path} is damaged" in text
    assert FETCH_AGAIN in text


def test_fewer_labels_than_images_are_refused(fakes: Path, tmp_path: Path) -> None:
    """D2: a label file with one label too few is refused with both counts."""
    path = write_idx(folder_without(fakes, tmp_path, FILES[1]), (59999,), bytes(59999))
    text = refusal(data.load, "mnist", str(tmp_path), allow_unverified=True)
    assert str(path) in text
    assert "(60000,)" in text
    assert "(59999,)" in text


def test_label_ten_is_refused(fakes: Path, tmp_path: Path) -> None:
    """D5: a label above nine in a file is refused with the file, the label and its first index."""
    labels = bytearray(60000)
    labels[1234] = labels[2000] = 10
    path = write_idx(folder_without(fakes, tmp_path, FILES[1]), (60000,), bytes(labels))
    text = refusal(data.load, "mnist", str(tmp_path), allow_unverified=True)
    assert f"{path}: expected labels 0 to 9, got 10 at index 1234" in text


def test_one_missing_file_is_named_alone(fakes: Path, tmp_path: Path) -> None:
    """D13: only the missing one of four files is named, with its path and its address."""
    path = folder_without(fakes, tmp_path, FILES[3])
    text = refusal(data.load, "mnist", str(tmp_path))
    assert f"{path} from {SOURCES['mnist'].files[3].url}" in text
    assert FILES[0] not in text


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_missing_folder_is_named_exactly(tmp_path: Path, name: str) -> None:
    """D13: a set without its folder is refused with the command that fetches it and the path of each file."""
    text = refusal(data.load, name, str(tmp_path / "nowhere"))
    assert f"`waffle data {name}`" in text
    source = SOURCES[name]
    for file in source.files:
        assert f"{tmp_path / 'nowhere' / source.folder / file.name} from {file.url}" in text


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """D13: a file in place of the folder counts as a missing folder."""
    (tmp_path / "mnist").write_text("x")
    assert "`waffle data mnist`" in refusal(data.load, "mnist", str(tmp_path))


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_unreadable_folder_is_refused(tmp_path: Path, name: str) -> None:
    """D13: a folder without permission is refused with its path."""
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
    """D13: an invalid folder name is refused with that name."""
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


def test_verify_supports_both_algorithms(tmp_path: Path) -> None:
    """A checksum is algorithm:digest, with sha256 or md5; an empty checksum never matches."""
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


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that is read directly and scikit-learn's own function give the same table."""
    found = data._digits_table()
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    assert np.array_equal(found, data._digits_table())
    assert found.shape == (1797, 65)


def test_digits() -> None:
    """Digits are 1,797 normalised 8x8 images, a quarter of them for testing, and deterministic."""
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
    """The synthetic set has ten Gaussian classes in 20 dimensions and is deterministic."""
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
    """Another seed gives other centres; the classes are separable and overlap more as spread grows."""
    x, y, _, _ = gaussian_classes(1)
    assert not np.array_equal(x, gaussian_classes(2)[0])
    centres = np.stack([x[y == k].mean(axis=0) for k in range(10)])
    nearest = ((x[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == y).mean() > 0.99
    wide, y, _, _ = gaussian_classes(1, spread=8)
    centres = np.stack([wide[y == k].mean(axis=0) for k in range(10)])
    assert (((wide[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1) == y).mean() < 0.9


def test_the_optimum_of_the_quadratics() -> None:
    """At the returned optimum the weighted gradient of the quadratics is zero."""
    problem = quadratics(seed=3)
    weights = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    theta = problem.optimum(weights)
    gradients = torch.stack([(problem.curvature * (theta - b)).mean(dim=0) for b in problem.samples])
    assert torch.allclose(weights @ gradients, torch.zeros(4, dtype=torch.float64), atol=1e-12)
    assert torch.equal(theta, quadratics(seed=3).optimum(weights))
