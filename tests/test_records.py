"""Run folders: what is written, what is read back, and what is refused."""

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from waffle_fl import cli, experiment, records, tensorfile
from waffle_fl.config import RunConfig, check_run
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Listener, Place, execute
from waffle_fl.federation import Federation
from waffle_fl.records import Run, read_json, read_rounds, summary
from waffle_fl.storage import write_atomically
from waffle_fl.tensorfile import MAX_HEADER, pack, read_tensors, write_tensors

TEMPLATE = {
    "server.x": torch.zeros(5),
    "server.past": torch.zeros(2, 3, dtype=torch.float64),
    "agents.y": torch.zeros(3, 5),
}
BINDING = {"binding": {"results_version": "1", "torch": "2", "device": "cpu", "data": "d474"}}
ROUNDS = 6


def config(method: str = "waffle", **settings: Any) -> RunConfig:
    given = {"data": "synthetic", "model": "linear", "rounds": ROUNDS, "samples_per_agent": 20, **settings}
    return check_run(method, given, {})


def state(r: int) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, r) for name, tensor in TEMPLATE.items()}


def line(r: int, **more: Any) -> dict[str, Any]:
    return {"round": r, "accuracy": 0.5, "loss": 1.0, **more}


def recorded(folder: Path, checkpoints: tuple[int, ...], rounds: int) -> Path:
    """A run folder with this many logged rounds and with these checkpoints."""
    with Run.opened(folder, config(), BINDING) as run:
        for r in range(1, rounds + 1):
            run.append(line(r))
            if r in checkpoints:
                run.checkpoint(r, state(r))
    return folder


def resumed(folder: Path) -> tuple[int, dict[str, Tensor] | None, list[str]]:
    with Run.opened(folder, config(), BINDING) as run:
        return run.resume(TEMPLATE)


def checkpoint(folder: Path, r: int) -> Path:
    return folder / f"checkpoint-{r:08d}.safetensors"


def flipped(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


class Halt(Exception):
    """Ends a run in its middle."""


class Watcher(Listener):
    """Keeps what it hears, and halts the run after a round."""

    def __init__(self, halt_after: int = 0) -> None:
        self.halt_after = halt_after
        self.warnings: list[str] = []
        self.rounds: list[int] = []

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        self.rounds.append(measured["round"])
        if measured["round"] == self.halt_after:
            raise Halt

    def warned(self, message: str) -> None:
        self.warnings.append(message)


def finish(folder: Path, chosen: RunConfig, listener: Listener | None = None, **place: Any) -> dict[str, Any]:
    (result,) = execute([(chosen, folder)], Place(**place), listener)
    return result


def halted(folder: Path, chosen: RunConfig, after: int = 3, **place: Any) -> Path:
    """A run folder that was left in the middle of its run."""
    with pytest.raises(Halt):
        finish(folder, chosen, Watcher(after), **place)
    return folder


def bits(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The final model, and every round but for its wall-clock time."""
    lines = [{k: v for k, v in entry.items() if k != "seconds"} for entry in read_rounds(folder / "rounds.jsonl")]
    return (folder / "model.safetensors").read_bytes(), lines


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of every file but the lock."""
    files = [path for path in folder.iterdir() if path.name != ".lock"]
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """The exit code of the command line."""
    monkeypatch.setattr(sys, "argv", ["waffle", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


# --- summary: the three protocols


def test_best_is_the_first_of_the_best_rounds() -> None:
    """Of rounds with the same best accuracy the earliest is reported."""
    rounds = [line(1, accuracy=0.2), line(2, accuracy=0.9), line(3, accuracy=0.9), line(4, accuracy=0.4)]
    assert summary(rounds, "finished")["best"] == {"round": 2, "accuracy": 0.9}


def test_last_is_the_last_round() -> None:
    """The last protocol reports the last round, however bad it is."""
    rounds = [line(1, accuracy=0.9), line(2, accuracy=0.1)]
    assert summary(rounds, "finished")["last"] == {"round": 2, "accuracy": 0.1}


def test_selected_is_chosen_by_validation_and_reports_the_test_accuracy() -> None:
    """Validation accuracy chooses the round, a smaller validation loss breaks ties, the earlier round the rest."""
    rounds = [
        line(1, accuracy=0.99, validation_accuracy=0.5, validation_loss=0.1),
        line(2, accuracy=0.60, validation_accuracy=0.8, validation_loss=0.4),
        line(3, accuracy=0.70, validation_accuracy=0.8, validation_loss=0.3),
        line(4, accuracy=0.80, validation_accuracy=0.8, validation_loss=0.3),
    ]
    assert summary(rounds, "finished")["selected"] == {"round": 3, "accuracy": 0.7}


def test_without_validation_nothing_is_selected() -> None:
    """A run without validation data reports best and last alone."""
    result = summary([line(1)], "finished")
    assert {"best", "last"} <= set(result)
    assert "selected" not in result


def test_rounds_without_a_finite_loss_score_nothing() -> None:
    """A round whose loss is no finite number is neither best nor last, but it is counted."""
    result = summary([line(1, accuracy=0.3), line(2, accuracy=0.9, loss=None)], "diverged", "round 3")
    assert result["best"] == result["last"] == {"round": 1, "accuracy": 0.3}
    assert (result["status"], result["message"], result["rounds"]) == ("diverged", "round 3", 2)


def test_rounds_of_which_no_score_was_told() -> None:
    """A round of which a site told no accuracy, or none but its loss, is neither best nor last."""
    rounds = [line(1, accuracy=None), line(2, accuracy=0.3), {"round": 3, "loss": 0.1}]
    result = summary(rounds, "finished")
    assert result["best"] == result["last"] == {"round": 2, "accuracy": 0.3}
    untold = line(3, accuracy=0.9, validation_accuracy=None, validation_loss=0.1)
    assert summary([*rounds[:2], untold], "finished")["selected"] == {"round": 3, "accuracy": 0.9}


def test_a_run_that_scored_nothing_has_a_status_alone() -> None:
    """The summary of no rounds claims no accuracy."""
    assert summary([], "diverged") == {"schema": 1, "status": "diverged", "rounds": 0}


# --- the log (P13)


GOOD = b'{"round":1}\n{"round":2}\n'


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"round":3,"accu',
        b'{"round":3}',
        b"\x00\xff\xfe\n",
        b"not json\n",
        b"[3]\n",
        b"null\n",
        b'{"round":4}\n{"round":5}\n',
        b'{"round":2}\n{"round":3}\n',
        b'{"accuracy":1}\n',
        b"\n\n",
        b"9" * 5000 + b"\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=[
        "nothing", "half line", "no newline", "binary", "garbage", "list", "null", "gap", "repeat", "no round", "blank",
        "huge number", "deep nesting",
    ],
)  # fmt: skip
def test_a_log_is_read_up_to_its_first_flaw(tmp_path: Path, tail: bytes) -> None:
    """Whole rounds before the first half line, garbage or gap are read, and nothing after it."""
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(GOOD + tail)
    assert read_rounds(path) == [{"round": 1}, {"round": 2}]


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    """A log that does not exist holds no rounds."""
    assert read_rounds(tmp_path / "rounds.jsonl") == []


def test_a_half_line_is_cut_off_before_the_next_round_is_added(tmp_path: Path) -> None:
    """Resuming cuts the log back to the checkpoint, so that half lines and later rounds are written anew."""
    folder = recorded(tmp_path / "run", (1, 2), rounds=3)
    with (folder / "rounds.jsonl").open("ab") as log:
        log.write(b'{"round":4,"accu')
    with Run.opened(folder, config(), BINDING) as run:
        r, _, warnings = run.resume(TEMPLATE)
        run.append(line(3, accuracy=0.75))
    assert (r, warnings) == (2, [])
    assert read_rounds(folder / "rounds.jsonl") == [line(1), line(2), line(3, accuracy=0.75)]
    assert (folder / "rounds.jsonl").read_bytes().count(b"\n") == 3


def test_without_a_checkpoint_the_log_starts_anew(tmp_path: Path) -> None:
    """A run that died before its first checkpoint starts at round 0 with an empty log."""
    folder = recorded(tmp_path / "run", (), rounds=2)
    assert resumed(folder) == (0, None, [])
    assert (folder / "rounds.jsonl").read_bytes() == b""


@pytest.mark.parametrize("content", [b"", b'{"round":1}\n', b'garbage\n{"round":2}\n'])
def test_a_log_that_lacks_rounds_before_its_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    """A checkpoint without the rounds that led to it is an error, not a run with holes."""
    folder = recorded(tmp_path / "run", (1, 2), rounds=2)
    (folder / "rounds.jsonl").write_bytes(content)
    with pytest.raises(WaffleError, match=r"rounds\.jsonl lacks rounds before 2"):
        resumed(folder)


def test_numbers_that_are_not_finite_never_reach_the_log(tmp_path: Path) -> None:
    """NaN is no JSON, so a round that holds one is refused and the log stays readable."""
    folder = tmp_path / "run"
    with Run.opened(folder, config(), BINDING) as run:
        run.append(line(1))
        with pytest.raises(ValueError, match="not JSON compliant"):
            run.append(line(2, weight=float("nan")))
    assert (folder / "rounds.jsonl").read_bytes().count(b"\n") == 1


# --- atomic writing


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_fault_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, where: str
) -> None:
    """Whatever interrupts the writing of a file, its old content is whole."""

    def fail(*_: object) -> None:
        raise fault

    path = tmp_path / "result.json"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync", fail) if where == "fsync" else (Path, "replace", fail)))
        with pytest.raises(type(fault)):
            write_atomically(path, b"new content")
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new content")
    assert path.read_bytes() == b"new content"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_full_disk_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing fails for want of space, the half-written copy is removed."""
    path = tmp_path / "file"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            write_atomically(path, b"x" * 1000)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_serialised_leaves_the_old_file(tmp_path: Path) -> None:
    """Content that is no JSON fails before the file is touched."""
    path = tmp_path / "config.json"
    records.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        records.write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}


def test_the_same_tensors_make_the_same_file() -> None:
    """A file is a function of its content: equal tensors and metadata give equal bytes every time."""
    assert len({pack(state(3), {"round": "3"}) for _ in range(40)}) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000], ids=str)
def test_a_damaged_json_file_is_named(tmp_path: Path, content: bytes) -> None:
    """A record that is no JSON object is an error that names the file."""
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(WaffleError, match=r"result\.json"):
        read_json(path)


# --- checkpoints (P6)


def test_the_two_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    """Old checkpoints are removed once two newer ones are safe, and the newest is the one that is read."""
    folder = recorded(tmp_path / "run", (1, 2, 3, 4), rounds=5)
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == [checkpoint(folder, r).name for r in (3, 4)]
    r, tensors, warnings = resumed(folder)
    assert (r, warnings) == (4, [])
    assert tensors is not None
    assert list(tensors) == list(TEMPLATE)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state(4).items())


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    """Round 10 is newer than round 9, and round 100 newer than both."""
    folder = recorded(tmp_path / "run", (9, 10, 100), rounds=100)
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == [checkpoint(folder, r).name for r in (10, 100)]
    assert resumed(folder)[0] == 100


def header_length(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "first data byte": lambda path: flipped(path, 8 + header_length(path)),
    "last data byte": lambda path: flipped(path, -1, bit=7),
    "header length": lambda path: flipped(path, 0, bit=1),
    "header brace": lambda path: flipped(path, 8),
    "header middle": lambda path: flipped(path, 8 + header_length(path) // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "header only": lambda path: os.truncate(path, 8 + header_length(path)),
    "seven bytes": lambda path: os.truncate(path, 7),
    "empty": lambda path: os.truncate(path, 0),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "a folder": lambda path: path.rename(path.with_name("elsewhere")) and path.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """A bit flip or a truncation of the newest checkpoint is noticed, warned of, and the one before it is used."""
    folder = recorded(tmp_path / "run", (2, 4), rounds=5)
    damage(checkpoint(folder, 4))
    r, tensors, warnings = resumed(folder)
    assert r == 2
    assert tensors is not None
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state(2).items())
    assert len(warnings) == 1
    assert checkpoint(folder, 4).name in warnings[0]
    assert "checkpoint before it" in warnings[0]
    assert len(read_rounds(folder / "rounds.jsonl")) == 2


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_two_damaged_checkpoints_are_an_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Without a sound checkpoint a run is not silently started anew: the error names the folder and its log is kept."""
    folder = recorded(tmp_path / "run", (2, 4), rounds=5)
    damage(checkpoint(folder, 2))
    damage(checkpoint(folder, 4))
    with pytest.raises(WaffleError, match="no sound checkpoint is left in") as error:
        resumed(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(read_rounds(folder / "rounds.jsonl")) == 5


def test_no_single_bit_flip_in_a_header_goes_unnoticed(tmp_path: Path) -> None:
    """Each bit of a checkpoint's header, flipped, is refused or changes nothing: neither tensors nor the round."""
    path = tmp_path / "checkpoint-00000038.safetensors"
    tensors = state(38)
    write_tensors(path, {"round": "38"}, tensors)
    sound = path.read_bytes()
    believed = []
    for position in range(8 + header_length(path)):
        for bit in range(8):
            path.write_bytes(sound)
            flipped(path, position, bit)
            try:
                metadata, found = read_tensors(path, TEMPLATE)
                r = int(metadata["round"])
            except (WaffleError, KeyError, ValueError):
                continue
            if r != 38 or any(not torch.equal(found[name], tensors[name]) for name in tensors):
                believed.append(r)
    assert believed == []


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_sound_one(tmp_path: Path) -> None:
    """After the retreat from a damaged checkpoint, the newest two sound ones are kept as before."""
    folder = recorded(tmp_path / "run", (4, 9), rounds=9)
    os.truncate(checkpoint(folder, 9), 50)
    with Run.opened(folder, config(), BINDING) as run:
        assert run.resume(TEMPLATE)[0] == 4
        for r in (5, 6, 7):
            run.append(line(r))
            run.checkpoint(r, state(r))
    flipped(checkpoint(folder, 7), -1)
    assert resumed(folder)[0] == 6


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    """A real run whose newest checkpoint is damaged ends with the bits of the unbroken run, and says so."""
    chosen = config()
    finish(tmp_path / "whole", chosen)
    folder = halted(tmp_path / "broken", chosen, after=4, checkpoint_seconds=0)
    flipped(checkpoint(folder, 4), -1)
    watcher = Watcher()
    finish(folder, chosen, watcher)
    assert watcher.rounds == [4, 5, 6]
    assert any(checkpoint(folder, 4).name in warning for warning in watcher.warnings)
    assert bits(folder) == bits(tmp_path / "whole")


# --- what a checkpoint may hold (P7, P8)


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("kind", ["pickle", "torch zip", "torch legacy"])
def test_a_pickle_named_as_checkpoint_is_refused_and_never_loaded(tmp_path: Path, kind: str) -> None:
    """A pickle is no safetensors file, whatever its name, and what it would do does not happen."""
    canary = tmp_path / "canary"
    folder = recorded(tmp_path / "run", (), rounds=1)
    path = checkpoint(folder, 1)
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(canary)))
    else:
        torch.save({"server.x": Bomb(canary)}, path, _use_new_zipfile_serialization=kind == "torch zip")
    with pytest.raises(WaffleError, match="not a safetensors file"):
        resumed(folder)
    assert not canary.exists()
    if kind == "pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path.rename(tmp_path / "bomb.pt"), weights_only=False)
    assert canary.exists(), "the bomb must be live, or this test shows nothing"


def raw(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[Any], begin: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, stop]}


def changed(**tensors: Tensor | None) -> bytes:
    """A sound file whose tensors are the template's but for these."""
    names = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    content = {**TEMPLATE, **names}
    return pack({name: t for name, t in content.items() if t is not None}, {"round": "1"})


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a missing name": lambda: changed(server__x=None),
    "one name too many": lambda: changed(server__y=torch.zeros(5)),
    "another name": lambda: changed(server__x=None, server__z=torch.zeros(5)),
    "no tensors": lambda: pack({}, {"round": "1"}),
    "another length": lambda: changed(server__x=torch.zeros(6)),
    "a broadcastable shape": lambda: changed(server__x=torch.zeros(1)),
    "a scalar": lambda: changed(server__x=torch.zeros(())),
    "a transposed matrix": lambda: changed(agents__y=torch.zeros(5, 3)),
    "a flat matrix": lambda: changed(agents__y=torch.zeros(15)),
    "double for float": lambda: changed(server__x=torch.zeros(5, dtype=torch.float64)),
    "float for double": lambda: changed(server__past=torch.zeros(2, 3)),
    "integers of the same width": lambda: changed(server__past=torch.zeros(2, 3, dtype=torch.int64)),
    "half precision": lambda: changed(server__x=torch.zeros(5, dtype=torch.float16)),
    "bytes": lambda: changed(server__x=torch.zeros(5, dtype=torch.uint8)),
    "100k entries": lambda: raw({f"t{i}": entry([0], 0, 0) for i in range(100_000)}),
    "ten thousand entries": lambda: raw({f"t{i}": entry([0], 0, 0) for i in range(10_000)}),
    "a header of 2^60 bytes": lambda: (1 << 60).to_bytes(8, "little") + b"{}",
    "a header of more than a MiB": lambda: raw(b"{" + b" " * MAX_HEADER + b"}"),
    "a header that is no JSON": lambda: raw(b"\x80\x04\x95"),
    "a header that is a list": lambda: raw([1, 2]),
    "a header nested deeply": lambda: raw(b"[" * 100_000),
    "a shape of 10^12": lambda: raw({"server.x": entry([10**12], 0, 4 * 10**12)}),
    "a negative shape": lambda: raw({"server.x": entry([-5], 0, -20)}),
    "shapes whose product overflows": lambda: raw({"server.x": entry([2**32, 2**32, 4], 0, 0)}),
    "a shape of floats": lambda: raw({"server.x": entry([5.0], 0, 20)}, bytes(20)),
    "a shape of true": lambda: raw({"server.x": entry([True], 0, 4)}, bytes(4)),
    "offsets beyond the file": lambda: raw({"server.x": entry([5], 1000, 1020)}, bytes(20)),
    "negative offsets": lambda: raw({"server.x": entry([5], -20, 0)}),
    "offsets that are text": lambda: raw({"server.x": {"dtype": "F32", "shape": [5], "data_offsets": ["a", "b"]}}),
    "no offsets": lambda: raw({"server.x": {"dtype": "F32", "shape": [5]}}),
    "an unknown type": lambda: raw({"server.x": entry([5], 0, 20, dtype="F128")}, bytes(20)),
    "a type that is a list": lambda: raw({"server.x": {"dtype": [], "shape": [5], "data_offsets": [0, 20]}}, bytes(20)),
    "metadata that is no table": lambda: raw({"__metadata__": 3}),
    "metadata of numbers": lambda: raw({"__metadata__": {"round": 3}}),
    "an entry that is null": lambda: raw({"server.x": None}),
    "data after the end": lambda: changed() + b"more",
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_file_that_is_not_this_state_is_refused_before_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: Callable[[], bytes]
) -> None:
    """Names, shapes, types and sizes are compared with the run's own before a tensor is made of the file."""

    def load(_: bytes) -> None:
        pytest.fail("a tensor was made")

    monkeypatch.setattr(tensorfile, "load", load)
    path = tmp_path / "checkpoint-00000001.safetensors"
    path.write_bytes(payload())
    with pytest.raises(WaffleError, match=r"checkpoint-00000001\.safetensors") as error:
        read_tensors(path, TEMPLATE)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000 + len(str(path))


@pytest.mark.parametrize(
    "payload",
    [save(TEMPLATE, {"round": "1"}), save(TEMPLATE, {"round": "1", "digest": "0" * 32}), save(TEMPLATE)],
    ids=["no digest", "another digest", "no metadata"],
)
def test_a_file_without_its_own_digest_is_refused(tmp_path: Path, payload: bytes) -> None:
    """A file of the right names and shapes still needs the digest of its content."""
    path = tmp_path / "checkpoint-00000001.safetensors"
    path.write_bytes(payload)
    with pytest.raises(WaffleError, match="another digest"):
        read_tensors(path, TEMPLATE)


@pytest.mark.parametrize("metadata", [{}, {"round": "soon"}, {"round": ""}], ids=["no round", "a word", "nothing"])
def test_a_checkpoint_without_a_round_is_refused(tmp_path: Path, metadata: dict[str, str]) -> None:
    """A sound file that does not say which round it holds is no checkpoint."""
    folder = recorded(tmp_path / "run", (1,), rounds=2)
    write_tensors(checkpoint(folder, 2), metadata, state(2))
    r, _, warnings = resumed(folder)
    assert (r, len(warnings)) == (1, 1)


def test_a_file_larger_than_the_state_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a terabyte is refused by its size, unread."""
    path = tmp_path / "checkpoint-00000001.safetensors"
    path.write_bytes(changed())
    os.truncate(path, 1 << 40)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("the file was read"))
    with pytest.raises(WaffleError, match="larger than this run's state can be"):
        read_tensors(path, TEMPLATE)


# --- one process a folder (P4)

HOLDER = """
import sys, time
from pathlib import Path
from waffle_fl.config import check_run
from waffle_fl.records import Run

chosen = check_run("waffle", {"data": "synthetic", "model": "linear", "rounds": 6, "samples_per_agent": 20}, {})
with Run.opened(Path(sys.argv[1]), chosen, {}):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_the_lock_names_its_holder_and_is_free_after_its_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second process is refused with the holder's pid and host, and let in once the holder was killed by SIGKILL."""
    folder = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        try:
            with pytest.raises(WaffleError, match=rf"in use by process {holder.pid} on {socket.gethostname()}"):
                resumed(folder)
            assert command(monkeypatch, "resume", folder, "--quiet") == 2
            message = capsys.readouterr().err
            assert message.startswith("waffle: ")
            assert message.count("\n") == 1
            assert f"process {holder.pid} on {socket.gethostname()}" in message
        finally:
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
    with Run.opened(folder, config(), {}) as run:
        assert run.resume(TEMPLATE) == (0, None, [])
        assert f"process {os.getpid()} on" in (folder / ".lock").read_text()


def test_a_lock_is_freed_when_its_run_fails(tmp_path: Path) -> None:
    """An error inside a run frees the folder for the next try in the same process."""
    folder = tmp_path / "run"
    with pytest.raises(Halt), Run.opened(folder, config(), BINDING):
        raise Halt
    assert resumed(folder) == (0, None, [])


# --- a changed config, data set or code (P5)


def bound(**binding: str) -> dict[str, Any]:
    return {"binding": {**BINDING["binding"], **binding}}


def test_every_difference_is_listed(tmp_path: Path) -> None:
    """Going on with another config, data set, code, torch or device is refused with each change, old and new."""
    folder = recorded(tmp_path / "run", (1,), rounds=1)
    before = snapshot(folder)
    other = bound(results_version="2", torch="3", device="H200", data="d1")
    changes = [
        "method was 'waffle', now 'scaffold'",
        "settings.lr was 0.1, now 0.2",
        "settings.seed was 1, now 2",
        "provenance.results_version was '1', now '2'",
        "provenance.torch was '2', now '3'",
        "provenance.device was 'cpu', now 'H200'",
        "provenance.data was 'd474', now 'd1'",
    ]
    with pytest.raises(WaffleError) as error, Run.opened(folder, config("scaffold", lr=0.2, seed=2), other):
        pytest.fail("the folder was opened")
    assert [change for change in changes if change not in str(error.value)] == []
    assert "--force" in str(error.value)
    assert "\n" not in str(error.value)
    assert snapshot(folder) == before


@pytest.mark.parametrize("what", ["results_version", "torch", "device", "data"])
def test_each_binding_is_enough_to_refuse(tmp_path: Path, what: str) -> None:
    """One changed part of what a run is bound to is enough, and only that part is listed."""
    folder = recorded(tmp_path / "run", (1,), rounds=1)
    with (
        pytest.raises(WaffleError, match=rf"another run: provenance\.{what} was '.*', now 'new'; choose"),
        Run.opened(folder, config(), bound(**{what: "new"})),
    ):
        pytest.fail("the folder was opened")


def test_force_goes_on_and_is_recorded(tmp_path: Path) -> None:
    """With force a changed run goes on from its checkpoint, and provenance.json lists every forced change."""
    folder = recorded(tmp_path / "run", (1, 2), rounds=2)
    with Run.opened(folder, config(lr=0.2), bound(data="new"), force=True) as run:
        assert run.resume(TEMPLATE)[0] == 2
    with Run.opened(folder, config(lr=0.3), bound(data="new"), force=True) as run:
        assert run.resume(TEMPLATE)[0] == 2
    provenance = read_json(folder / "provenance.json") or {}
    assert provenance["forced"] == [
        ["settings.lr was 0.1, now 0.2", "provenance.data was 'd474', now 'new'"],
        ["settings.lr was 0.2, now 0.3"],
    ]
    assert provenance["binding"]["data"] == "new"
    assert (read_json(folder / "config.json") or {})["settings"]["lr"] == 0.3
    with Run.opened(folder, config(lr=0.3), bound(data="new")) as run:
        assert run.resume(TEMPLATE)[0] == 2


def test_force_without_a_change_records_nothing(tmp_path: Path) -> None:
    """Force on an unchanged run leaves its records as they are."""
    folder = recorded(tmp_path / "run", (1,), rounds=1)
    before = snapshot(folder)
    with Run.opened(folder, config(), BINDING, force=True):
        pass
    assert snapshot(folder) == before


def test_the_command_line_refuses_and_forces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`waffle run` with another step size on a half-done run is one line and exit code 2; with --force it finishes."""
    folder = halted(tmp_path / "run", config())
    arguments = ["run", "waffle", "--data", "synthetic", "--model", "linear", "--rounds", ROUNDS]
    arguments += ["--samples-per-agent", 20, "--lr", 0.2, "--out", folder, "--quiet"]
    assert command(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    assert "settings.lr was 0.1, now 0.2" in message
    assert message.count("\n") == 1
    assert command(monkeypatch, *arguments, "--force") == 0
    assert (read_json(folder / "provenance.json") or {})["forced"] == [["settings.lr was 0.1, now 0.2"]]
    assert (read_json(folder / "result.json") or {})["rounds"] == ROUNDS


def test_other_data_behind_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-done run whose data set has changed on disk is refused by the digest of the data."""
    folder = halted(tmp_path / "run", config())
    sound = experiment.federation_of

    def mended(*arguments: Any) -> Federation:
        federation = sound(*arguments)
        y = federation.y.clone()
        y[0] = (y[0] + 1) % 10
        return dataclasses.replace(federation, y=y)

    monkeypatch.setattr(experiment.execution, "federation_of", mended)
    with pytest.raises(WaffleError, match=r"holds another run: provenance\.data was"):
        finish(folder, config())


def test_the_same_pixels_in_another_place_are_other_data() -> None:
    """The data digest tells images from the same images transposed: equal sums are not equal data."""
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(0, 256, (8, 1, 4, 4)).astype(np.float32) for _ in range(2))
    y = np.arange(8) % 2
    upright = Federation.from_arrays({"alice": (x, y, x_test, y)})
    turned = Federation.from_arrays({"alice": (x.swapaxes(2, 3), y, x_test.swapaxes(2, 3), y)})
    assert upright.digest() != turned.digest()


def test_the_number_of_threads_changes_nothing(tmp_path: Path) -> None:
    """A run that goes on with another number of workers is accepted and ends with the bits of the unbroken run."""
    chosen = config("scaffold")
    finish(tmp_path / "whole", chosen, workers=2)
    folder = halted(tmp_path / "broken", chosen, workers=1)
    finish(folder, chosen, workers=3)
    assert bits(folder) == bits(tmp_path / "whole")


# --- folders that cannot be written to (P9)


@pytest.mark.parametrize("place", ["a file", "under a file", "proc"])
def test_an_unwritable_folder_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """A run folder that cannot be made is one line and exit code 2 at the start, not at the first save."""
    file = tmp_path / "file"
    file.write_text("in the way")
    folder = {"a file": file, "under a file": file / "run", "proc": Path("/proc/waffle/run")}[place]
    monkeypatch.setattr(experiment.execution, "simulate", lambda *_, **__: pytest.fail("training began"))
    arguments = ["run", "local", "--data", "synthetic", "--model", "linear", "--rounds", 3, "--quiet"]
    assert command(monkeypatch, *arguments, "--out", folder) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"waffle: cannot write to {folder}: ")
    assert message.count("\n") == 1
    assert file.read_text() == "in the way"


# --- finished runs (P12)


@pytest.mark.parametrize("method", ["waffle", "apfl"])
def test_a_finished_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Asking for a finished run gives the same result, trains nothing and touches no file."""
    folder = tmp_path / "run"
    first = finish(folder, config(method))
    before = snapshot(folder)
    tensors = {"model.safetensors", "predictions.safetensors"}
    texts = {"config.json", "provenance.json", "rounds.jsonl", "result.json", "manifest.json"}
    assert set(before) == {*texts, *tensors}
    monkeypatch.setattr(experiment.execution, "simulate", lambda *_, **__: pytest.fail("training began"))
    watcher = Watcher()
    assert finish(folder, config(method), watcher) == first
    assert (first["status"], first["rounds"]) == ("finished", ROUNDS)
    assert watcher.rounds == []
    assert snapshot(folder) == before


def test_a_run_of_an_earlier_version_is_the_same_run(tmp_path: Path) -> None:
    """Settings and options that its config does not know yet count as their defaults."""
    folder = tmp_path / "run"
    first = finish(folder, config("waffle"))
    path = folder / "config.json"
    content = json.loads(path.read_text())
    del content["settings"]["leave_out"], content["settings"]["augment"], content["options"]["eta_g"]
    path.write_text(json.dumps(content))
    (folder / "manifest.json").unlink()  # it had none either
    assert finish(folder, config("waffle"), force=True) == first


def test_resuming_a_finished_run_exits_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`waffle resume` of a finished run prints its result and changes nothing."""
    folder = tmp_path / "run"
    first = finish(folder, config())
    before = snapshot(folder)
    assert command(monkeypatch, "resume", folder, "--json", "--quiet") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {key: shown[key] for key in first} == first
    assert snapshot(folder) == before


def test_a_finished_run_that_lost_its_log_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run whose log was damaged later is shown or refused in one line, without a traceback."""
    folder = tmp_path / "run"
    finish(folder, config())
    (folder / "rounds.jsonl").write_bytes(b"garbage\n")
    assert command(monkeypatch, "resume", folder, "--quiet") in (0, 2)
    assert capsys.readouterr().err.count("\n") <= 1


def test_force_never_gives_a_finished_run_a_config_it_was_not_trained_with(tmp_path: Path) -> None:
    """Forcing another step size on a finished run trains it, or is refused, or leaves its config as it was."""
    folder = tmp_path / "run"
    finish(folder, config(lr=0.1))
    model = (folder / "model.safetensors").read_bytes()
    with contextlib.suppress(WaffleError):
        finish(folder, config(lr=0.4), force=True)
    claimed = (read_json(folder / "config.json") or {})["settings"]["lr"]
    trained_anew = (folder / "model.safetensors").read_bytes() != model
    assert trained_anew or claimed == 0.1


@pytest.mark.parametrize("method", ["local", "fedavg", "scaffold", "weight-erosion", "waffle", "apfl", "ditto"])
def test_every_method_resumes_to_the_same_bits(tmp_path: Path, method: str) -> None:
    """A run of any method that was halted twice ends with the model and the log of the unbroken one."""
    chosen = config(method)
    whole = finish(tmp_path / "whole", chosen)
    folder = halted(tmp_path / "broken", chosen, after=2)
    halted(folder, chosen, after=5)
    assert finish(folder, chosen) == whole
    assert bits(folder) == bits(tmp_path / "whole")
    assert list(folder.glob("checkpoint-*")) == []
