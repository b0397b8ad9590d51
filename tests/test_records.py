"""Run folders: writing, reading back and rejecting invalid files."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from records_support import (
    BINDING,
    TEMPLATE,
    Watcher,
    bits,
    checkpoint,
    config,
    finish,
    flipped,
    halted,
    line,
    recorded,
    resumed,
    state,
)
from waffle_fl import records, tensorfile
from waffle_fl.atomic_files import write_atomically
from waffle_fl.errors import WaffleError
from waffle_fl.records import Run, read_json, read_rounds, summary
from waffle_fl.tensorfile import MAX_HEADER, pack, read_tensors, write_tensors

# --- summary: the three protocols


def test_best_is_the_first_of_the_best_rounds() -> None:
    """`best` is the earliest of the rounds with the best accuracy."""
    rounds = [line(1, accuracy=0.2), line(2, accuracy=0.9), line(3, accuracy=0.9), line(4, accuracy=0.4)]
    assert summary(rounds, "finished")["best"] == {"round": 2, "accuracy": 0.9}


def test_last_is_the_last_round() -> None:
    """`last` is the last round, whatever its accuracy."""
    rounds = [line(1, accuracy=0.9), line(2, accuracy=0.1)]
    assert summary(rounds, "finished")["last"] == {"round": 2, "accuracy": 0.1}


def test_selected_is_chosen_by_validation_and_reports_the_test_accuracy() -> None:
    """Ties in validation accuracy are broken by the smaller validation loss, then by the earlier round."""
    rounds = [
        line(1, accuracy=0.99, validation_accuracy=0.5, validation_loss=0.1),
        line(2, accuracy=0.60, validation_accuracy=0.8, validation_loss=0.4),
        line(3, accuracy=0.70, validation_accuracy=0.8, validation_loss=0.3),
        line(4, accuracy=0.80, validation_accuracy=0.8, validation_loss=0.3),
    ]
    assert summary(rounds, "finished")["selected"] == {"round": 3, "accuracy": 0.7}


def test_without_validation_nothing_is_selected() -> None:
    """A run without validation data reports only best and last."""
    result = summary([line(1)], "finished")
    assert {"best", "last"} <= set(result)
    assert "selected" not in result


def test_rounds_without_a_finite_loss_are_not_scored() -> None:
    """A round without a finite loss is neither best nor last, but it is counted."""
    result = summary([line(1, accuracy=0.3), line(2, accuracy=0.9, loss=None)], "diverged", "round 3")
    assert result["best"] == result["last"] == {"round": 1, "accuracy": 0.3}
    assert (result["status"], result["message"], result["rounds"]) == ("diverged", "round 3", 2)


def test_rounds_without_an_accuracy_are_not_scored() -> None:
    """A round whose site reported no accuracy is neither best nor last."""
    rounds = [line(1, accuracy=None), line(2, accuracy=0.3), {"round": 3, "loss": 0.1}]
    result = summary(rounds, "finished")
    assert result["best"] == result["last"] == {"round": 2, "accuracy": 0.3}
    unvalidated = line(3, accuracy=0.9, validation_accuracy=None, validation_loss=0.1)
    assert summary([*rounds[:2], unvalidated], "finished")["selected"] == {"round": 3, "accuracy": 0.9}


def test_a_run_without_rounds_has_only_a_status() -> None:
    """The summary of no rounds contains no accuracy."""
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
def test_a_log_is_read_up_to_its_first_invalid_line(tmp_path: Path, tail: bytes) -> None:
    """Only complete rounds before the first partial line, garbage or gap are read."""
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(GOOD + tail)
    assert read_rounds(path) == [{"round": 1}, {"round": 2}]


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    """A log that does not exist holds no rounds."""
    assert read_rounds(tmp_path / "rounds.jsonl") == []


def test_a_partial_line_is_removed_before_the_next_round_is_added(tmp_path: Path) -> None:
    """Resuming truncates the log to the checkpoint, so partial lines and later rounds are written again."""
    folder = recorded(tmp_path / "run", (1, 2), rounds=3)
    with (folder / "rounds.jsonl").open("ab") as log:
        log.write(b'{"round":4,"accu')
    with Run.opened(folder, config(), BINDING) as run:
        r, _, warnings = run.resume(TEMPLATE)
        run.append(line(3, accuracy=0.75))
    assert (r, warnings) == (2, [])
    assert read_rounds(folder / "rounds.jsonl") == [line(1), line(2), line(3, accuracy=0.75)]
    assert (folder / "rounds.jsonl").read_bytes().count(b"\n") == 3


def test_without_a_checkpoint_the_log_starts_empty(tmp_path: Path) -> None:
    """A run that died before its first checkpoint starts at round 0 with an empty log."""
    folder = recorded(tmp_path / "run", (), rounds=2)
    assert resumed(folder) == (0, None, [])
    assert (folder / "rounds.jsonl").read_bytes() == b""


@pytest.mark.parametrize("content", [b"", b'{"round":1}\n', b'garbage\n{"round":2}\n'])
def test_a_log_that_lacks_rounds_before_its_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    """A checkpoint whose log lacks earlier rounds is an error."""
    folder = recorded(tmp_path / "run", (1, 2), rounds=2)
    (folder / "rounds.jsonl").write_bytes(content)
    with pytest.raises(WaffleError, match=r"rounds\.jsonl lacks rounds before 2"):
        resumed(folder)


def test_numbers_that_are_not_finite_never_reach_the_log(tmp_path: Path) -> None:
    """NaN is not valid JSON, so a round that contains it is rejected and the log stays readable."""
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
    """If writing a file is interrupted, its old content is intact."""

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
    """If there is no space to write a file, the partial copy is removed."""
    path = tmp_path / "file"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            write_atomically(path, b"x" * 1000)
    assert list(tmp_path.iterdir()) == []


def test_unserialisable_content_leaves_the_old_file(tmp_path: Path) -> None:
    """Content that is not JSON fails before the file is changed."""
    path = tmp_path / "config.json"
    records.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        records.write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}


def test_the_same_tensors_make_the_same_file() -> None:
    """Equal tensors and metadata give equal bytes."""
    assert len({pack(state(3), {"round": "3"}) for _ in range(40)}) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000], ids=str)
def test_a_damaged_json_file_is_named(tmp_path: Path, content: bytes) -> None:
    """The error for a record that is not a JSON object names the file."""
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(WaffleError, match=r"result\.json"):
        read_json(path)


# --- checkpoints (P6)


def test_the_two_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    """Only the two newest checkpoints are kept, and the newest is read."""
    folder = recorded(tmp_path / "run", (1, 2, 3, 4), rounds=5)
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == [checkpoint(folder, r).name for r in (3, 4)]
    r, tensors, warnings = resumed(folder)
    assert (r, warnings) == (4, [])
    assert tensors is not None
    assert list(tensors) == list(TEMPLATE)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state(4).items())


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    """Checkpoints are ordered by round number, not by name."""
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
def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """A bit flip or truncation of the newest checkpoint is detected with a warning, and the previous one is used."""
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
    """Without a valid checkpoint a run does not restart: the error names the folder, and the log is kept."""
    folder = recorded(tmp_path / "run", (2, 4), rounds=5)
    damage(checkpoint(folder, 2))
    damage(checkpoint(folder, 4))
    with pytest.raises(WaffleError, match="no valid checkpoint is left in") as error:
        resumed(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(read_rounds(folder / "rounds.jsonl")) == 5


def test_no_single_bit_flip_in_a_header_goes_unnoticed(tmp_path: Path) -> None:
    """A flipped bit in a checkpoint's header is rejected or changes neither tensors nor round."""
    path = tmp_path / "checkpoint-00000038.safetensors"
    tensors = state(38)
    write_tensors(path, {"round": "38"}, tensors)
    original = path.read_bytes()
    undetected = []
    for position in range(8 + header_length(path)):
        for bit in range(8):
            path.write_bytes(original)
            flipped(path, position, bit)
            try:
                metadata, found = read_tensors(path, TEMPLATE)
                r = int(metadata["round"])
            except (WaffleError, KeyError, ValueError):
                continue
            if r != 38 or any(not torch.equal(found[name], tensors[name]) for name in tensors):
                undetected.append(r)
    assert undetected == []


def test_a_damaged_checkpoint_does_not_replace_a_valid_one(tmp_path: Path) -> None:
    """After falling back from a damaged checkpoint, the two newest valid ones are kept."""
    folder = recorded(tmp_path / "run", (4, 9), rounds=9)
    os.truncate(checkpoint(folder, 9), 50)
    with Run.opened(folder, config(), BINDING) as run:
        assert run.resume(TEMPLATE)[0] == 4
        for r in (5, 6, 7):
            run.append(line(r))
            run.checkpoint(r, state(r))
    flipped(checkpoint(folder, 7), -1)
    assert resumed(folder)[0] == 6


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    """A run with a damaged newest checkpoint warns and ends with the bits of the uninterrupted run."""
    chosen = config()
    finish(tmp_path / "uninterrupted", chosen)
    folder = halted(tmp_path / "broken", chosen, after=4, checkpoint_seconds=0)
    flipped(checkpoint(folder, 4), -1)
    watcher = Watcher()
    finish(folder, chosen, watcher)
    assert watcher.rounds == [4, 5, 6]
    assert any(checkpoint(folder, 4).name in warning for warning in watcher.warnings)
    assert bits(folder) == bits(tmp_path / "uninterrupted")


# --- content of a checkpoint (P7, P8)


class Bomb:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("kind", ["pickle", "torch zip", "torch legacy"])
def test_a_pickle_named_as_checkpoint_is_refused_and_never_loaded(tmp_path: Path, kind: str) -> None:
    """A pickle is not a safetensors file, whatever its name, and its code does not run."""
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
    assert canary.exists(), "the pickle must create the file when loaded, or this test proves nothing"


def raw(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[Any], begin: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, stop]}


def changed(**tensors: Tensor | None) -> bytes:
    """Return a valid file with the template's tensors except for these."""
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
def test_a_file_of_another_state_is_rejected_before_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: Callable[[], bytes]
) -> None:
    """Names, shapes, types and sizes are compared with the run's before a tensor is created from the file."""

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
def test_a_file_without_a_correct_digest_is_rejected(tmp_path: Path, payload: bytes) -> None:
    """A file with correct names and shapes still needs the digest of its content."""
    path = tmp_path / "checkpoint-00000001.safetensors"
    path.write_bytes(payload)
    with pytest.raises(WaffleError, match="does not match its digest"):
        read_tensors(path, TEMPLATE)


@pytest.mark.parametrize("metadata", [{}, {"round": "soon"}, {"round": ""}], ids=["no round", "a word", "nothing"])
def test_a_checkpoint_without_a_round_is_refused(tmp_path: Path, metadata: dict[str, str]) -> None:
    """A valid file that has no round number is not a checkpoint."""
    folder = recorded(tmp_path / "run", (1,), rounds=2)
    write_tensors(checkpoint(folder, 2), metadata, state(2))
    r, _, warnings = resumed(folder)
    assert (r, len(warnings)) == (1, 1)


def test_a_file_larger_than_the_state_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a terabyte is rejected by its size without being read."""
    path = tmp_path / "checkpoint-00000001.safetensors"
    path.write_bytes(changed())
    os.truncate(path, 1 << 40)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("the file was read"))
    with pytest.raises(WaffleError, match="larger than this run's state can be"):
        read_tensors(path, TEMPLATE)
