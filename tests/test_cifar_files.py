"""CIFAR-10 as binary batches, pickles and archives: reading, verification, and refusals in one line."""

from __future__ import annotations

import io
import pickle
import resource
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import refusal
from data_support import FETCH_AGAIN, MEGABYTE, memory_below, result_or_message
from fork_server import shared
from waffle_fl import data
from waffle_fl.data import cifar
from waffle_fl.data.files import checksum
from waffle_fl.data.sources import CIFAR_BINARY, CIFAR_INEXACT, CIFAR_PYTHON, SOURCES

# ------------------------------------------------------------------------------------------------------------- CIFAR

N = cifar.IMAGES


def cifar_arrays(seed: int, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    """Mostly black images, so that they compress well; the first 50 are noise."""
    rng = np.random.default_rng(seed)
    images = np.zeros((n, 3, 32, 32), np.uint8)
    images[:50] = rng.integers(0, 256, images[:50].shape)
    images[7, 0], images[7, 1], images[7, 2] = 10, 20, 30
    images[7, 1, 2, 5] = 99
    return images, (np.arange(n) + seed) % 10


def binary_batch(images: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None].astype(np.uint8), images.reshape(len(images), -1)], axis=1).tobytes()


def protocol_2(content: Any, module: str = "numpy._core") -> bytes:
    """A pickle of protocol 2 with NumPy's modules under the given name."""
    dumped = pickle.dumps(content, protocol=2)
    return dumped.replace(b"cnumpy._core.", f"c{module}.".encode()).replace(b"cnumpy.core.", f"c{module}.".encode())


def python_2_batch(images: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch with the opcodes of Python 2, as the official files of 2009: byte strings, and integers for flags."""

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
    folder = tmp_path_factory.mktemp("cifar") / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for seed, name in enumerate(CIFAR_BINARY):
        (folder / name).write_bytes(binary_batch(*cifar_arrays(seed)))
    return folder


def set_batch_size(monkeypatch: pytest.MonkeyPatch, n: int = 60) -> None:
    """Set the number of images per batch to a small one."""
    monkeypatch.setattr(cifar, "IMAGES", n)


def small_binaries(n: int = 60) -> dict[str, bytes]:
    return {name: binary_batch(*cifar_arrays(seed, n)) for seed, name in enumerate(CIFAR_BINARY)}


def unpacked(root: Path, batches: dict[str, bytes]) -> Path:
    folder = root / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, content in batches.items():
        (folder / name).write_bytes(content)
    return folder


def make_archive(root: Path, batches: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, official: bool = True) -> Path:
    """A tar.gz with the official layout and two members with unsafe paths; its checksum is made official."""
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
    """A binary record is its label, then the red, green and blue plane, row by row."""
    images, labels = cifar.read_binary(binaries / "data_batch_3.bin")
    expected, expected_labels = cifar_arrays(2)
    assert images.shape == (N, 3, 32, 32)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert np.array_equal(images, expected)
    assert np.array_equal(labels, expected_labels)
    assert images[7, :, 0, 0].tolist() == [10, 20, 30]
    assert images[7, 1, 2, 5] == 99


def test_binary_set_loads_unverified(binaries: Path) -> None:
    """Five batches are the training data, the sixth the test data, and each channel is normalised separately."""
    found = data.load("cifar10", str(binaries.parent.parent), allow_unverified=True)
    assert found.verified is False
    assert found.x_train.shape == (50000, 3, 32, 32)
    assert found.x_test.shape == (10000, 3, 32, 32)
    assert found.y_train[[0, 10000, 20000, 30000, 40000]].tolist() == [0, 1, 2, 3, 4]
    assert found.y_test[:3].tolist() == [5, 6, 7]
    source = SOURCES["cifar10"]
    for channel, value in enumerate((10, 20, 30)):
        expected = (value / 255 - source.mean[channel]) / source.std[channel]
        assert found.x_train[10007, channel, 0, 0] == pytest.approx(expected, rel=1e-5)
    assert found.class_names[3] == "cat"


def test_images_known_to_be_inexact_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images known to be inexact, by the checksum of the test batch, are left out, and a note says so."""
    set_batch_size(monkeypatch)
    folder = unpacked(tmp_path, small_binaries())
    complete = data.load("cifar10", str(tmp_path), allow_unverified=True)
    monkeypatch.setitem(CIFAR_INEXACT, f"sha256:{checksum(folder / 'test_batch.bin', 'sha256')}", (3, 59))
    found = data.load("cifar10", str(tmp_path), allow_unverified=True)
    kept = [i for i in range(60) if i not in (3, 59)]
    assert np.array_equal(found.x_test, complete.x_test[kept])
    assert np.array_equal(found.y_test, complete.y_test[kept])
    assert len(found.y_train) == len(complete.y_train)
    assert (complete.note, found.note) == ("", "2 test images left out: this copy does not hold them exactly")


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
    assert FETCH_AGAIN in text


def test_label_ten_in_a_binary_batch_is_refused(tmp_path: Path) -> None:
    """D5: a label byte of 10 is refused with the file and the index of the record."""
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
    """A pickle of protocol 2 with `data` and `labels` is read with NumPy's old and new module names."""
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
    """A batch pickled by Python 2, like the official files, is read without a warning."""
    images, labels = cifar_arrays(5)
    path = tmp_path / "data_batch_1"
    path.write_bytes(python_2_batch(images, labels))
    found, found_labels = cifar.read_python(path)
    assert np.array_equal(found, images)
    assert np.array_equal(found_labels, labels)


def test_python_folder_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the python version is found, read in order, and unverified unless its checksums match."""
    set_batch_size(monkeypatch)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate(CIFAR_PYTHON):
        (folder / name).write_bytes(python_2_batch(*cifar_arrays(seed, 60)))
    assert str(folder / "data_batch_1") in refusal(data.load, "cifar10", str(tmp_path))
    found = data.load("cifar10", str(tmp_path), allow_unverified=True)
    assert found.verified is False
    assert found.y_train[::60].tolist() == [0, 1, 2, 3, 4]
    assert found.y_test[0] == 5
    for name in CIFAR_PYTHON:
        monkeypatch.setitem(CIFAR_PYTHON, name, f"md5:{checksum(folder / name, 'md5')}")
    assert data.load("cifar10", str(tmp_path)).verified is True


def small_python(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    set_batch_size(monkeypatch, 2)
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
    """A python batch without 10,000 images and labels is refused with its name."""
    path = small_python(tmp_path / "data_batch_1", monkeypatch, **changes)
    text = refusal(cifar.read_python, path)
    assert f"{path} is not a CIFAR-10 batch" in text
    assert FETCH_AGAIN in text


@pytest.mark.parametrize("label", [10, -1, 255])
def test_wrong_label_in_a_python_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: int) -> None:
    """D5: a label outside 0 to 9 in a python batch is refused with its index."""
    path = small_python(tmp_path / "data_batch_1", monkeypatch, labels=[9, label])
    assert f"{path}: expected labels 0 to 9, got {label} at index 1" in refusal(cifar.read_python, path)


@pytest.mark.parametrize("changes", [{"labels": [1.5, 2.7]}, {"data": np.full((2, 3072), 3.5, np.float32)}])
def test_fractions_in_a_python_batch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """D5: labels and pixels that are not integers are refused, not rounded."""
    path = small_python(tmp_path / "data_batch_1", monkeypatch, **changes)
    if "data" in changes:
        monkeypatch.setattr(cifar, "RECORD", 4 * 3073)
    assert str(path) in refusal(cifar.read_python, path)


@pytest.mark.parametrize("content", [[1, 2], "text", 7, None, {}, {"data": 1}])
def test_python_batch_of_other_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    """A pickle of anything other than a batch dictionary is refused with its name."""
    set_batch_size(monkeypatch, 2)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content))
    assert str(path) in refusal(cifar.read_python, path)


def test_oversized_python_batch_is_refused_unread(tmp_path: Path) -> None:
    """D3: a python batch of a hundred gigabytes is refused by its size, before reading."""
    path = tmp_path / "data_batch_1"
    with path.open("wb") as stream:
        stream.truncate(100 << 30)
    with memory_below(MEGABYTE):
        assert "larger than any CIFAR-10 batch" in refusal(cifar.read_python, path)


def pickle_call(module: str, name: str, *arguments: str, protocol: int = 2) -> bytes:
    """A pickle that calls module.name with text arguments."""
    if protocol == 4:
        found = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)) + b"\x93"
    else:
        found = f"c{module}\n{name}\n".encode()
    texts = b"".join(b"X" + struct.pack("<I", len(a.encode())) + a.encode() for a in arguments)
    return (b"\x80" + bytes([protocol]) if protocol else b"") + found + b"(" + texts + b"tR."


def malicious_pickles(canary: Path) -> dict[str, bytes]:
    """Pickles that create the canary file when executed."""
    python = f"open({str(canary)!r}, 'w').close()"
    inst = f"(S{f'touch {canary}'!r}\nios\nsystem\n.".encode()
    return {
        "os.system": pickle_call("os", "system", f"touch {canary}"),
        "os.system, protocol 0": pickle_call("os", "system", f"touch {canary}", protocol=0),
        "os.system, protocol 4": pickle_call("os", "system", f"touch {canary}", protocol=4),
        "os.system, INST": inst,
        "posix.system": pickle_call("posix", "system", f"touch {canary}"),
        "builtins.eval": pickle_call("builtins", "eval", python),
        "builtins.exec": pickle_call("builtins", "exec", python),
        "__builtin__.eval": pickle_call("__builtin__", "eval", python),
        "io.open": pickle_call("io", "open", str(canary), "w"),
        "subprocess.getoutput": pickle_call("subprocess", "getoutput", f"touch {canary}"),
        "pathlib.Path.touch": pickle_call("pathlib", "Path.touch", str(canary), protocol=4),
        "numpy.save": pickle_call("numpy", "save", str(canary), "x"),
        "numpy attribute": pickle_call("numpy", "ndarray.tofile", str(canary), protocol=4),
        "nested pickle": pickle_call("pickle", "loads", "x"),
        "codecs.open": pickle_call("codecs", "open", str(canary), "w"),
        "inside a batch": b"\x80\x02}(U\x04data" + pickle_call("os", "system", f"touch {canary}")[2:-1] + b"u.",
    }


@pytest.mark.parametrize("kind", list(malicious_pickles(Path("x"))))
def test_malicious_pickle_is_refused_and_never_run(tmp_path: Path, kind: str) -> None:
    """A pickle that names a function other than NumPy's is refused, and the function never runs."""
    canary = tmp_path / "canary"
    path = tmp_path / "data_batch_1"
    path.write_bytes(malicious_pickles(canary)[kind])
    text = refusal(cifar.read_python, path)
    assert "refused to load" in text
    assert "not a CIFAR-10 batch" in text
    assert not canary.exists()


def test_malicious_pickles_work(tmp_path: Path) -> None:
    """An ordinary unpickler executes the malicious pickles."""
    canary = tmp_path / "canary"
    pickle.loads(malicious_pickles(canary)["builtins.eval"])
    assert canary.exists()


def test_refused_pickle_is_named(tmp_path: Path) -> None:
    """The refusal of a malicious batch names the file."""
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle_call("os", "system", "true"))
    assert str(path) in refusal(cifar.read_python, path)


def test_a_line_break_in_a_function_name_is_escaped(tmp_path: Path) -> None:
    """A line break in a function name does not reach the message."""
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle_call("os", "system\nwaffle: all is well", "true", protocol=4))
    assert "refused to load" in refusal(cifar.read_python, path)


class Call:
    """Pickles as a call of `function` with `arguments`, then __setstate__(state)."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: tuple[Any, ...] | None = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def forged_dtype(kind: str) -> Call:
    """A NumPy dtype whose pickled state misstates the content of its eight bytes."""
    reference, byte = np.dtype("O"), np.dtype("u1")
    subarray, names, fields = {
        "field of objects": (None, ("a",), {"a": (reference, 0)}),
        "subarray of objects": ((reference, (1,)), None, None),
        "field far outside": (None, ("a",), {"a": (byte, 1 << 30)}),
    }[kind]
    return Call(np.dtype, ("V8", False, True), (3, "|", subarray, names, fields, 8, 1, 0))


def test_forged_array_types_cannot_crash_the_reader(tmp_path: Path) -> None:
    """A batch whose dtype interprets its bytes as pointers is refused without a crash."""
    template = np.zeros(1, np.uint8).__reduce__()
    kinds = ("field of objects", "subarray of objects", "field far outside")
    for kind in kinds:
        array = Call(template[0], template[1], (1, (100,), forged_dtype(kind), False, b"AAAAAA\x00\x00" * 100))
        (tmp_path / kind).write_bytes(pickle.dumps({"data": array, "labels": [0] * N}, protocol=2))
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, pathlib\nfrom waffle_fl.data.cifar import read_python\nfrom waffle_fl.errors import WaffleError\n"
        "for path in map(pathlib.Path, sys.argv[1:]):\n    try:\n        read_python(path)\n"
        "    except WaffleError as error:\n        print('refused', error, flush=True)\n"
    )
    code, out, _ = shared().run(program, *(tmp_path / kind for kind in kinds))
    assert code == 0, f"the process ended with {code} after {out}"
    assert [line.split()[0] for line in out.splitlines()] == ["refused"] * len(kinds)


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
    """D3: a small python batch is refused without allocating more than a full batch needs."""
    set_batch_size(monkeypatch, 2)
    path = tmp_path / "data_batch_1"
    path.write_bytes(memory_bombs()[kind])
    assert path.stat().st_size < 20_000
    with memory_below(64 * MEGABYTE):
        assert str(path) in refusal(cifar.read_python, path)


def test_archive_is_unpacked_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the batches of the official archive are unpacked, into its folder, and nothing outside is written."""
    set_batch_size(monkeypatch)
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
    """Once unpacked, the set loads from its folder and is verified by the archive."""
    set_batch_size(monkeypatch)
    make_archive(tmp_path, small_binaries(), monkeypatch)
    first = data.load("cifar10", str(tmp_path))
    again = data.load("cifar10", str(tmp_path))
    assert first.verified is True
    assert again.verified is True
    assert np.array_equal(first.x_test, again.x_test)


def test_other_archive_is_refused_and_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: an archive with another checksum is refused before unpacking."""
    set_batch_size(monkeypatch)
    archive = make_archive(tmp_path, small_binaries(), monkeypatch, official=False)
    text = refusal(data.load, "cifar10", str(tmp_path))
    assert str(archive) in text
    assert "not the official file" in text
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


def test_the_flag_that_was_given_is_not_advised_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: the message does not suggest allowing unverified files when they are already allowed."""
    set_batch_size(monkeypatch)
    make_archive(tmp_path, small_binaries(), monkeypatch, official=False)
    found = result_or_message(data.load, "cifar10", str(tmp_path), allow_unverified=True)
    assert "--allow-unverified" not in found if isinstance(found, str) else found.verified is False


def test_archive_without_a_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that lacks a batch is refused with both names."""
    set_batch_size(monkeypatch)
    batches = small_binaries()
    del batches["data_batch_4.bin"]
    archive = make_archive(tmp_path, batches, monkeypatch)
    text = refusal(data.load, "cifar10", str(tmp_path))
    assert str(archive) in text
    assert "data_batch_4.bin" in text


def test_full_disk_while_unpacking_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk during unpacking is refused in one line with the path."""
    set_batch_size(monkeypatch)
    make_archive(tmp_path, small_binaries(), monkeypatch)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # smaller than a batch of 184,380 bytes
    try:
        text = refusal(data.load, "cifar10", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in text


def test_a_partly_unpacked_archive_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder left incomplete by an interrupted unpacking is completed by the suggested command."""
    set_batch_size(monkeypatch)
    batches = small_binaries()
    make_archive(tmp_path, batches, monkeypatch)
    unpacked(tmp_path, dict(list(batches.items())[:3]))
    data.fetch("cifar10", str(tmp_path))
    assert data.load("cifar10", str(tmp_path)).verified is True


def test_a_deleted_batch_is_restored_from_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A truncated batch that is deleted as suggested is restored from the archive."""
    set_batch_size(monkeypatch)
    batches = small_binaries()
    make_archive(tmp_path, batches, monkeypatch)
    batches["data_batch_5.bin"] = batches["data_batch_5.bin"][:-1]
    folder = unpacked(tmp_path, batches)
    assert FETCH_AGAIN in refusal(data.load, "cifar10", str(tmp_path))
    (folder / "data_batch_5.bin").unlink()
    data.fetch("cifar10", str(tmp_path))
    assert data.load("cifar10", str(tmp_path)).verified is True


def test_changed_batch_beside_the_archive_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: a changed batch is not verified by the archive in its folder."""
    set_batch_size(monkeypatch)
    batches = small_binaries()
    make_archive(tmp_path, batches, monkeypatch)
    batches["data_batch_2.bin"] = binary_batch(*cifar_arrays(77, 60))
    unpacked(tmp_path, batches)
    assert "data_batch_2.bin" in refusal(data.load, "cifar10", str(tmp_path))


def test_python_batches_are_not_covered_by_the_binary_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: the checksum of the binary archive does not verify a folder of the python version."""
    set_batch_size(monkeypatch)
    make_archive(tmp_path, small_binaries(), monkeypatch)
    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate(CIFAR_PYTHON):
        (folder / name).write_bytes(python_2_batch(*cifar_arrays(seed + 50, 60)))
    assert "not the official file" in refusal(data.load, "cifar10", str(tmp_path))


@pytest.mark.parametrize("parent", ["cifar10", "", "cifar-10"])
def test_cifar_is_found_in_the_usual_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str) -> None:
    """The unpacked folder is found under cifar10, under cifar-10, and in the data folder itself."""
    set_batch_size(monkeypatch)
    folder = tmp_path / parent / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, content in small_binaries().items():
        (folder / name).write_bytes(content)
    found = data.load("cifar10", str(tmp_path), allow_unverified=True)
    assert found.origin == str(folder)
    assert found.verified is False


def test_missing_batch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D13: only the missing one of six batches is named, with its path."""
    set_batch_size(monkeypatch)
    folder = unpacked(tmp_path, small_binaries())
    (folder / "data_batch_5.bin").unlink()
    text = refusal(data.load, "cifar10", str(tmp_path), allow_unverified=True)
    assert str(folder / "data_batch_5.bin") in text
    assert "data_batch_4.bin" not in text
    assert "`waffle data cifar10`" in text


def test_test_batch_alone_has_no_official_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: five official batches without the archive are refused: the test batch has no published checksum."""
    set_batch_size(monkeypatch)
    folder = unpacked(tmp_path, small_binaries())
    for name in list(CIFAR_BINARY)[:5]:
        monkeypatch.setitem(CIFAR_BINARY, name, f"sha256:{checksum(folder / name, 'sha256')}")
    text = refusal(data.load, "cifar10", str(tmp_path))
    assert str(folder / "test_batch.bin") in text
    assert "no official checksum" in text
    assert data.load("cifar10", str(tmp_path), allow_unverified=True).verified is False
