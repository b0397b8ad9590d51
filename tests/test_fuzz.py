"""Ten thousand random or damaged inputs per parser: each is read correctly or refused in one line.

Run as a program, this file feeds pickles to the reader of the python version of CIFAR-10. They are read in a separate
process, so that a crash of the reader fails one test and does not stop the test session.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import resource
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fork_server import shared
from waffle_fl.config import Experiment, load_experiment
from waffle_fl.data import cifar
from waffle_fl.data.idx import read_idx
from waffle_fl.errors import WaffleError
from waffle_fl.tensorfile import pack, parse_header, unpack

COUNT = 10_000
GIGABYTE = 1 << 30


class Tally:
    """Counts of inputs read and refused, and the first input of each kind of failure."""

    def __init__(self) -> None:
        self.read, self.refused = 0, 0
        self.offences: dict[str, str] = {}

    def report(self) -> str:
        return "".join(f"\n{offence} <- {content}" for offence, content in self.offences.items())

    def feed(self, content: bytes, parse: Callable[[], Any], sound: Callable[[Any], bool] = lambda found: True) -> None:
        shown = repr(content[:300])
        try:
            found = parse()
        except WaffleError as error:
            self.refused += 1
            if "\n" in str(error) or not str(error):
                self.offences.setdefault("a message that is not one line", shown)
        except Exception as error:
            self.offences.setdefault(f"{type(error).__name__}: {error}"[:120], shown)
        else:
            self.read += 1
            if not sound(found):
                self.offences.setdefault("read, but wrongly", shown)


def mutated(rng: random.Random, content: bytes, other: bytes = b"") -> bytes:
    """The content after one to four flips, cuts, splices, repetitions or fills."""
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del out[at:]
            case 3:
                del out[at : at + rng.randrange(1, 9)]
            case 4:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 5:
                start = rng.randrange(len(out) + 1)
                out[at:at] = out[start : start + rng.randrange(1, 33)]
            case 6:
                out[at : at + 4] = struct.pack(rng.choice("<>") + "I", rng.choice((0, 1, 2**31 - 1, 2**32 - 1)))
            case 7 if other:
                start = rng.randrange(len(other) + 1)
                out[at : at + 16] = other[start : start + 16]
    return bytes(out)


# --------------------------------------------------------------------------------------------------------------- idx

SHAPE = (3, 4, 5)
BODY = bytes(range(60))


def idx_inputs(rng: random.Random) -> Iterator[bytes]:
    plain = struct.pack(">HBB3I", 0, 8, 3, *SHAPE) + BODY
    packed = gzip.compress(plain, mtime=0)
    for i in range(COUNT):
        match i % 4:
            case 0:
                yield mutated(rng, packed, plain)
            case 1:
                yield gzip.compress(mutated(rng, plain, packed), 1, mtime=0)
            case 2:
                header = [rng.choice((0, 0, 0, 8, rng.randrange(256))) for _ in range(4)]
                sizes = [rng.choice((0, 1, 3, 4, 5, 2**31, 2**32 - 1)) for _ in range(rng.randrange(6))]
                body = rng.randbytes(rng.choice((0, 1, 59, 60, 61, 100)))
                yield gzip.compress(bytes(header) + struct.pack(f">{len(sizes)}I", *sizes) + body, 1, mtime=0)
            case 3:
                yield rng.choice((b"", b"\x1f\x8b\x08")) + rng.randbytes(rng.randrange(80))


def test_idx(tmp_path: Path) -> None:
    """Ten thousand damaged idx files are refused in one line or read as 3 x 4 x 5 bytes."""
    path = tmp_path / "fuzz.gz"
    path.write_bytes(gzip.compress(struct.pack(">HBB3I", 0, 8, 3, *SHAPE) + BODY))
    assert read_idx(path, SHAPE).tobytes() == BODY
    tally = Tally()
    for content in idx_inputs(random.Random(1)):
        path.write_bytes(content)
        tally.feed(content, lambda: read_idx(path, SHAPE), lambda found: found.shape == SHAPE)
    assert not tally.offences, tally.report()
    assert tally.read + tally.refused == COUNT
    assert tally.refused > COUNT // 2


# ------------------------------------------------------------------------------------------------------ CIFAR, binary


def test_cifar_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand damaged binary batches are refused in one line or read with labels 0 to 9."""
    n = 2
    monkeypatch.setattr(cifar, "IMAGES", n)
    rng = random.Random(2)
    sound = b"".join(bytes([label]) + rng.randbytes(3072) for label in (3, 9))
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(sound)
    images, labels = cifar.read_binary(path)
    assert labels.tolist() == [3, 9]
    assert images.tobytes() == sound[1:3073] + sound[3074:]
    tally = Tally()

    def right(found: tuple[np.ndarray, np.ndarray]) -> bool:
        return found[0].shape == (n, 3, 32, 32) and found[1].shape == (n,) and set(found[1]) <= set(range(10))

    for i in range(COUNT):
        content = mutated(rng, sound)
        if i % 3 == 1:
            content = bytes([rng.randrange(256)]) + sound[1:3073] + bytes([rng.randrange(256)]) + sound[3074:]
        elif i % 3 == 2:
            content = rng.randbytes(rng.choice((0, 1, 3073, n * 3073, n * 3073, n * 3073 + 1)))
        path.write_bytes(content)
        tally.feed(content, lambda: cifar.read_binary(path), right)
    assert not tally.offences, tally.report()
    assert tally.read + tally.refused == COUNT
    assert min(tally.read, tally.refused) > 100


# ------------------------------------------------------------------------------------------------------ CIFAR, python

ATOMS = (
    b"N", b"\x88", b"\x89", b"K\x01", b"K\xff", b"M\x00\x0c", b"J\xff\xff\xff\xff", b"I01\n", b"L7L\n", b"F1.5\n",
    b"U\x04data", b"U\x06labels", b"X\x01\x00\x00\x00b", b"C\x02ab", b"]", b"}", b")", b"(", b"\x8f", b"\x8a\x01\x07",
    b"T\x04\x00\x00\x00abcd", b"U\x02u1", b"U\x01|", b"U\x02V8", b"U\x01O", b"U\x03<f8", b"\x8c\x05numpy",
    b"G\x7f\xf0\x00\x00\x00\x00\x00\x00",
)  # fmt: skip
NAMES = (
    b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n",
    b"cnumpy._core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n", b"cos\nsystem\n", b"cnumpy\nload\n",
    b"\x8c\x02os\x8c\x06sys\ntem\x93",
)  # fmt: skip
ACTIONS = (
    b"R", b"b", b"t", b"e", b"a", b"s", b"u", b"\x85", b"\x86", b"\x87", b"\x81", b"\x92", b"o", b"0", b"1", b"2", b"l",
    b"q\x00", b"h\x00", b"q\x09", b"h\x09", b"r\x00\x01\x00\x00", b"\x94", b"\x90", b"\x91", b"\x93", b"Q", b"d",
    b"\x82\x01", b"inumpy\ndtype\n",
)  # fmt: skip


def sound_pickles() -> list[bytes]:
    content = {"data": np.zeros((2, 3072), np.uint8), "labels": [3, 9], "filenames": ["a", "b"]}
    dumped = [pickle.dumps(content, protocol) for protocol in (2, 2, 4)]
    dumped[1] = dumped[1].replace(b"numpy._core.", b"numpy.core.")
    return dumped


def pickle_inputs(rng: random.Random) -> Iterator[bytes]:
    """Damaged batches, half of them damaged outside the pixels, and programs of random instructions."""
    sound = sound_pickles()
    small = [pickle.dumps({"data": np.zeros(8, np.uint8), "labels": [3, 9]}, protocol) for protocol in (0, 2, 4)]
    for i in range(COUNT):
        match i % 4:
            case 0:
                yield mutated(rng, rng.choice(sound), rng.choice(small))
            case 1:
                yield mutated(rng, rng.choice(small), rng.choice(sound)[:400])
            case 2:
                whole = rng.choice(sound)
                zeros = whole.index(bytes(3000))
                cut = mutated(rng, whole[:zeros] + whole[zeros + 6000 :])
                yield cut[:zeros] + bytes(6000) + cut[zeros:]
            case 3:
                words = rng.choices((ATOMS, NAMES, ACTIONS), (4, 2, 4), k=rng.randrange(2, 25))
                yield b"\x80\x04" + b"".join(rng.choice(word) for word in words) + b"."


def feed_pickles(folder: Path) -> None:
    """Read every input under a memory limit and print the tally; `latest` holds the current input."""
    warnings.simplefilter("error")
    cifar.IMAGES = 2
    if Path("/proc/self/statm").exists():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + GIGABYTE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    path, tally = folder / "latest", Tally()
    for content in sound_pickles():
        path.write_bytes(content)
        assert cifar.read_python(path)[1].tolist() == [3, 9]

    def right(found: tuple[np.ndarray, np.ndarray]) -> bool:
        images, labels = found
        kinds = images.dtype == np.uint8 and labels.dtype == np.int64
        return kinds and images.shape == (2, 3, 32, 32) and labels.shape == (2,) and set(labels) <= set(range(10))

    for content in pickle_inputs(random.Random(3)):
        path.write_bytes(content)
        tally.feed(content, lambda: cifar.read_python(path), right)
    print(json.dumps([tally.read, tally.refused, tally.offences]))


def test_cifar_python(tmp_path: Path) -> None:
    """Ten thousand damaged or malicious pickles are refused in one line or read as a batch, without a crash."""
    code, out, err = shared().run(__file__, tmp_path, timeout=300)
    latest = (tmp_path / "latest").read_bytes()
    assert code == 0, f"ended with {code} {err[-500:]} at {latest[:400]!r}"
    read, refused, offences = json.loads(out)
    assert not offences, str(offences)
    assert read + refused == COUNT
    assert refused > COUNT // 2


# -------------------------------------------------------------------------------------------------------------- TOML

EXPERIMENT = """\
# a grid
schema = 1
methods = ["local", "fedavg", "waffle-paper"]
splits = ["A", "B", "C*"]
seeds = [1, 2]
data = "digits"
agents = 10
lr = 0.1
test = "all"
shared_permutation = true
shares = [[0.5, 0.5], [1, 0]]

[waffle-paper]
omega = "sigmoid(3.2)"
clip = 2
denominator = "max"

[waffle-paper.eta_g]
A = 1.0
B = 1.0
"C*" = 0.5
"""
KEYS = (
    "schema", "methods", "splits", "seeds", "data", "agents", "lr", "test", "shared_permutation", "shares", "alice",
    "validation", "rounds", "seed", "momentum", "lerning_rate", "waffle-paper",
    "waffle-paper.omega", "waffle-paper.psi", "waffle-paper.clip",
    "waffle-paper.eta_g.A", "ditto.lam", "apfl", "a.b.c", "sizes", "variants", "variants.a", "variants.a.lr",
    "variants.a.waffle-paper", '""', '"a\\nb"', "'é'", "1",
)  # fmt: skip
VALUES = (
    "0", "1", "-1", "1.5", "-0.0", "inf", "-inf", "nan", "1e400", "9" * 25, "1" + "0" * 400, "9" * 5000, "0x1f", "true",
    '""', '"C"', '"waffle"', '"a\\u0000b"', '"\\U0001F600"', "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "[]",
    "[[]]", "[[1, 2], [3]]", "[1, 'a']", "['A', 'A']", "['local']", "['unknown']", "[1, 1]", "[-1]", "[true]", "{}",
    "{A = 1}", "{A = {B = 2}}", '"sigmoid(3.2)"', '"sigmoid(-1)"', '"sigmoid(1,2,3)"', '"linear(nan)"', '"linear(x)"',
    '"nowhere:f"', '":"', '"math:pi"', '".a:b"', '"..:b"', '"math:"', '"²"', "[" * 50 + "]" * 50, "'''a\nb'''",
    "[waffle-paper]",
)  # fmt: skip


def toml_inputs(rng: random.Random) -> Iterator[bytes]:
    sound = EXPERIMENT.encode()
    lines = EXPERIMENT.splitlines()
    for i in range(COUNT):
        match i % 4:
            case 0:
                yield mutated(rng, sound, sound)
            case 1:
                chosen = list(lines)
                for _ in range(rng.randrange(1, 4)):
                    at = rng.randrange(len(chosen))
                    key = chosen[at].partition("=")[0] if "=" in chosen[at] else "x "
                    chosen[at] = f"{key}= {rng.choice(VALUES)}"
                yield "\n".join(chosen).encode()
            case 2:
                rows = (f"{rng.choice(KEYS)} = {rng.choice(VALUES)}" for _ in range(rng.randrange(1, 5)))
                yield "\n".join(['methods = ["waffle-paper"]', *rows]).encode()
            case 3:
                yield rng.choice((b"", b'methods = ["waffle-paper"]\n')) + rng.randbytes(rng.randrange(40))


def test_toml(tmp_path: Path) -> None:
    """Ten thousand damaged experiment files are refused in one line or read as an experiment."""
    path = tmp_path / "fuzz.toml"
    path.write_text(EXPERIMENT)
    sound = load_experiment(path)
    assert sound.methods == ("local", "fedavg", "waffle-paper")
    assert sound.options["waffle-paper"]["eta_g"] == {"A": 1.0, "B": 1.0, "C*": 0.5}
    tally = Tally()
    for content in toml_inputs(random.Random(4)):
        path.write_bytes(content)
        tally.feed(content, lambda: load_experiment(path), lambda found: isinstance(found, Experiment))
    assert not tally.offences, tally.report()
    assert tally.read + tally.refused == COUNT
    assert min(tally.read, tally.refused) > 100


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("lr = 1" + "0" * 400, id="an integer beyond all floats"),
        pytest.param("shares = [[1" + "0" * 400 + "]]", id="a share beyond all floats"),
        pytest.param("lr = " + "9" * 5000, id="five thousand digits"),
        pytest.param('waffle.omega = ".a:b"', id="a relative import"),
        pytest.param("waffle.omega." + "a." * 3000 + "a = 1", id="three thousand levels of keys"),
        pytest.param("a." * 3000 + "a = 1", id="three thousand levels at the top"),
        pytest.param("data = " + "[" * 400 + "]" * 400, id="four hundred brackets"),
        pytest.param("data = " + "[" * 3000 + "]" * 3000, id="three thousand brackets"),
        pytest.param('waffle.omega = "a\\u0000b:c"', id="a NUL in a module's name"),
    ],
)
def test_hard_toml(tmp_path: Path, text: str) -> None:
    """Valid TOML that is too large, too deep or not an experiment is refused in one line."""
    path = tmp_path / "hard.toml"
    path.write_text(f'methods = ["waffle-paper"]\n{text}\n')
    tally = Tally()
    tally.feed(text.encode(), lambda: load_experiment(path))
    assert not tally.offences, tally.report()
    assert tally.refused == 1


# ------------------------------------------------------------------------------------------------------- safetensors

TEMPLATE = {"dy": torch.arange(6.0).reshape(2, 3), "n": torch.arange(2), "on": torch.tensor([True, False])}
IGNORED = ("dc",)
ODD = (
    None, True, -1, 0, 1, 2, 8, 24, 1.0, 24.0, 2**31, 2**62, 2**63, 2**70, 1e308, "", "F64", "BF16", "x\ny", "\ud800",
    [], {}, [0], [2], [0, 2**62], [0, 2**62, 2**62], [1] * 70, [0, 0], [0, 8], [8, 0], [[0, 8]], {"a": 1},
)  # fmt: skip


def sound_payload() -> bytes:
    return pack({**TEMPLATE, "dc": torch.ones(2)}, {"round": "3"})


def edited(rng: random.Random, payload: bytes) -> bytes:
    """The payload after changing one value in its header, which stays valid JSON."""
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    name = rng.choice(list(header))
    match rng.randrange(7):
        case 0:
            header[name] = rng.choice(ODD)
        case 1 | 2 | 3:
            entry = header[name]
            entry[rng.choice([*entry, "extra"])] = rng.choice(ODD)
        case 4:
            del header[name]
        case 5:
            header[rng.choice(("a\nb", "dc", "", "zz", "__metadata__", "dy", "\ud800"))] = header[name]
        case 6:
            stop = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
            shape = rng.choice(([0], [0, 2**62], [0, 2**62, 2**62], [0] + [1] * 70, [2**62, 0, 4], [2**40, "x"]))
            kind = rng.choice(("F32", "F64", "I64", "BOOL"))
            header["dc"] = {"dtype": kind, "shape": shape, "data_offsets": [stop, stop]}
            if rng.random() < 0.8:  # keep the file dense, so that only the changed shape is wrong
                plain = pack(TEMPLATE, {"round": "3"})
                size = int.from_bytes(plain[:8], "little")
                header = json.loads(plain[8 : 8 + size])
                end = len(plain) - 8 - size
                header["dc"] = {"dtype": kind, "shape": shape, "data_offsets": [end, end]}
                text = json.dumps(header).encode()
                return struct.pack("<Q", len(text)) + text + plain[8 + size :]
    text = json.dumps(header).encode(rng.choice(("utf-8",) * 9 + ("utf-16",)))
    return struct.pack("<Q", len(text) + rng.choice((0,) * 9 + (1,))) + text + payload[8 + length :]


def safetensors_inputs(rng: random.Random) -> Iterator[bytes]:
    sound = sound_payload()
    for i in range(COUNT):
        match i % 5:
            case 0:
                yield mutated(rng, sound, sound)
            case 1 | 2 | 3:
                yield edited(rng, sound)
            case 4:
                length = rng.choice((0, 1, 2, 10, 2**20, 2**20 + 1, 2**40, 2**64 - 1))
                yield struct.pack("<Q", length)[: rng.choice((8, 8, 8, 3))] + rng.randbytes(rng.randrange(40))


def test_safetensors() -> None:
    """Ten thousand damaged payloads are refused in one line or give the original tensors."""
    metadata, tensors = unpack(sound_payload(), TEMPLATE, IGNORED)
    assert metadata["round"] == "3"
    assert all(torch.equal(tensors[name], TEMPLATE[name]) for name in TEMPLATE)
    tally = Tally()

    def right(found: tuple[dict[str, str], dict[str, torch.Tensor]]) -> bool:
        return set(found[1]) == set(TEMPLATE) and all(torch.equal(found[1][name], TEMPLATE[name]) for name in TEMPLATE)

    for content in safetensors_inputs(random.Random(5)):
        tally.feed(content, lambda content=content: unpack(content, TEMPLATE, IGNORED), right)
    assert not tally.offences, tally.report()
    assert tally.read + tally.refused == COUNT
    assert min(tally.read, tally.refused) > 10


def test_safetensors_header() -> None:
    """Ten thousand damaged headers are refused in one line, or their entries fill the file."""
    sound = sound_payload()
    assert set(parse_header(sound, len(sound))) == {*TEMPLATE, "dc", "__metadata__"}
    tally = Tally()
    for content in safetensors_inputs(random.Random(6)):
        tally.feed(content, lambda content=content: parse_header(content, len(content)), dict.__instancecheck__)
    assert not tally.offences, tally.report()
    assert tally.read + tally.refused == COUNT
    assert min(tally.read, tally.refused) > 100


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param([0, 2**62], id="a huge axis"),
        pytest.param([0, 2**62, 2**62], id="two huge axes"),
        pytest.param([0] + [1] * 70, id="nothing in 71 axes"),
        pytest.param([1] * 70, id="one byte in 70 axes"),
        pytest.param([10**9, "x" * 900_000], id="a text a billion times"),
        pytest.param([True, 1], id="a truth value"),
    ],
)
def test_ignored_tensor_of_impossible_shape_is_refused(shape: list[int]) -> None:
    """W6: an ignored tensor with an impossible shape is refused."""
    plain = pack(TEMPLATE, {})
    size = int.from_bytes(plain[:8], "little")
    header, body = json.loads(plain[8 : 8 + size]), plain[8 + size :]
    extra = b"" if 0 in shape else b"\x01"
    header["dc"] = {"dtype": "BOOL", "shape": shape, "data_offsets": [len(body), len(body) + len(extra)]}
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + body + extra
    tally = Tally()
    tally.feed(content, lambda: unpack(content, TEMPLATE, IGNORED))
    assert not tally.offences, tally.report()


def test_a_line_break_in_a_tensor_name_is_escaped() -> None:
    """P8: a line break in the name of a tensor does not reach the message."""
    text = json.dumps({"a\nwaffle: all is well": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}).encode()
    content = struct.pack("<Q", len(text)) + text + b"\x01"
    with pytest.raises(WaffleError) as caught:
        unpack(content, TEMPLATE)
    assert "\n" not in str(caught.value)


if __name__ == "__main__":
    feed_pickles(Path(sys.argv[1]))
