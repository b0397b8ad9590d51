"""I/O faults: FIFOs and devices in place of files, missing folder syncs, huge grids, and lack of memory."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli_support import refusal, waffle
from test_process import ENVIRONMENT, one_line
from test_process import waffle as process
from waffle_fl import experiment
from waffle_fl.atomic_files import remove, sync_folder, write_atomically
from waffle_fl.config import check_run
from waffle_fl.config.files import MAX_COMBINATIONS
from waffle_fl.engines.workers import Workers
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, execute
from waffle_fl.out_of_memory import is_shortage
from waffle_fl.records import read_rounds

LINE = ["--data", "synthetic", "--model", "linear", "--samples-per-agent", "20", "--rounds", "5"]


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fail if the body takes longer than this many seconds."""

    def fail(*_: object) -> None:
        raise AssertionError(f"still waiting after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def error_of(*arguments: str | Path) -> str:
    """Return the one-line error of a command that must not hang."""
    with time_limit(20):
        return refusal(waffle(*arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run on arrays."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert waffle("run", "local", *LINE, "--quiet", "--out", folder).code == 0
    return folder


@pytest.fixture
def fifo(tmp_path: Path) -> Callable[[str], Path]:
    def make_fifo(name: str) -> Path:
        os.mkfifo(tmp_path / name)
        return tmp_path / name

    return make_fifo


# --- FIFOs and devices


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_a_fifo_of_samples_is_refused(run: Path, fifo: Callable[[str], Path], name: str) -> None:
    """`waffle predict RUN FIFO` fails with an error and does not wait."""
    assert "is a FIFO" in error_of("predict", run, fifo(name))


@pytest.mark.parametrize("name", ["x.csv", "x.parquet", "/dev/zero", "/dev/stdin"])
def test_a_fifo_or_device_as_a_table_is_refused(tmp_path: Path, fifo: Callable[[str], Path], name: str) -> None:
    """A FIFO or device in place of a table is rejected, since it may have no end."""
    data = tables(tmp_path / "data")
    line = ["run", "local", "--data", data, "--target", "y", "--alice", "north", "--rounds", "1", "--quiet"]
    assert waffle(*line, "--out", tmp_path / "run").code == 0
    path = Path(name)
    if name == "/dev/zero":
        path = tmp_path / "zeros.csv"
        path.symlink_to("/dev/zero")
    elif name == "/dev/stdin":
        path = fifo("stdin.csv")
    else:
        path = fifo(name)
    assert "expected a regular file" in error_of("predict", tmp_path / "run", path)


def tables(folder: Path) -> Path:
    folder.mkdir()
    for k, name in enumerate(("north", "south")):
        rng = np.random.default_rng(k)
        lines = [f"{x:.3f},{'yes' if x > 0 else 'no'}" for x in rng.normal(size=40)]
        (folder / f"{name}.csv").write_text("x,y\n" + "\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("name", ["west.csv", "west.npz", "west.parquet"])
def test_an_agent_whose_file_is_a_fifo_is_named(tmp_path: Path, name: str) -> None:
    """A FIFO in place of an agent's file is an error; the run neither waits for it nor ignores the agent."""
    data = tables(tmp_path / "data")
    if name.endswith("npz"):
        for path in data.iterdir():
            path.unlink()
    os.mkfifo(data / name)
    line = error_of("run", "local", "--data", data, "--target", "" if name.endswith("npz") else "y", "--out", "run")
    assert f"{data / name} is a FIFO" in line


def test_an_image_that_is_a_fifo_is_named(tmp_path: Path) -> None:
    """A FIFO in a folder of images is an error."""
    pytest.importorskip("PIL")
    for name in ("a", "b"):
        (tmp_path / "data" / "north" / name).mkdir(parents=True)
        os.mkfifo(tmp_path / "data" / "north" / name / "x.png")
    assert "is a FIFO" in error_of("run", "local", "--data", tmp_path / "data", "--out", "run")


@pytest.mark.parametrize("command", ["bench", "tune", "report"])
def test_a_fifo_as_an_experiment_a_space_or_a_record_is_refused(fifo: Callable[[str], Path], command: str) -> None:
    """Arguments that name a file must name a regular file."""
    lines: dict[str, Callable[[], list[str | Path]]] = {
        "bench": lambda: ["bench", fifo("grid.toml")],
        "tune": lambda: ["tune", "fedavg", *LINE, "--space", fifo("space.toml"), "--out", "tune"],
        "report": lambda: ["report", fifo("record.jsonl")],
    }
    assert "is a FIFO" in error_of(*lines[command]())


NAMES = ["config.json", "provenance.json", "result.json", "rounds.jsonl", "manifest.json", ".lock"]


@pytest.mark.parametrize("name", [*NAMES, "checkpoint-00000002.safetensors"])
def test_a_fifo_in_a_run_folder_does_not_hang_a_resume(tmp_path: Path, name: str) -> None:
    """If a file of an unfinished run is a FIFO, resume fails in one line or uses the previous checkpoint."""
    folder = tmp_path / "run"
    settings = {"data": "synthetic", "model": "linear", "samples_per_agent": 20, "rounds": 3}
    execute([(check_run("local", settings, {}), folder)], Runtime(checkpoint_seconds=0), until=2)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with time_limit(30):
        shown = waffle("resume", folder, "--quiet")
    if name.startswith("checkpoint"):
        assert shown.code == 0
    else:
        assert "is a FIFO" in refusal(shown)


@pytest.mark.parametrize("name", ["model.safetensors", *NAMES[:-1]])
def test_a_fifo_in_a_finished_run_does_not_hang_a_prediction(run: Path, tmp_path: Path, name: str) -> None:
    """predict reads only regular files of a run folder."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in run.iterdir():
        if path.name != name:
            (copy / path.name).write_bytes(path.read_bytes())
    os.mkfifo(copy / name)
    np.save(tmp_path / "x.npy", np.zeros((1, 20), np.float32))
    line = error_of("predict", copy, tmp_path / "x.npy")
    assert "is a FIFO" in line or "no config.json" in line


# --- folder sync after rename and unlink


def test_every_rename_and_unlink_of_a_run_is_followed_by_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run syncs its folder after each change of the folder's entries."""
    events: list[tuple[str, Path]] = []
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def record_fsync(handle: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    def record_replace(path: Path, target: Path) -> Path:
        events.append(("rename", path.parent))
        return replace(path, target)

    def record_unlink(path: Path, missing_ok: bool = False) -> None:
        events.append(("unlink", path.parent))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    monkeypatch.setattr(Path, "unlink", record_unlink)
    folder = tmp_path / "run"
    assert waffle("run", "local", *LINE, "--checkpoint-seconds", "0", "--quiet", "--out", folder).code == 0
    for kind in ("rename", "unlink"):
        changes = [i for i, event in enumerate(events) if event == (kind, folder)]
        assert changes
        assert all(("sync", folder) in events[i:] for i in changes)
    renames = [i for i, event in enumerate(events) if event[0] == "rename"]
    assert all(events[i - 1][0] == "sync" and events[i + 1] == ("sync", folder) for i in renames)


def test_a_file_system_that_cannot_sync_folders_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL from fsync on a folder is ignored; other errors are raised."""

    def failing(number: int) -> Callable[[int], None]:
        def fsync(handle: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)
    with pytest.raises(OSError, match="Input/output"):
        write_atomically(tmp_path / "file", b"")


def test_remove_deletes_all_given_files(tmp_path: Path) -> None:
    """remove deletes all given files and accepts none."""
    remove()
    for name in "ab":
        (tmp_path / name).write_text("")
    remove(tmp_path / "a", tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


# --- [vary]


def test_a_trillion_combinations_are_rejected_at_once(tmp_path: Path) -> None:
    """Twelve lists of ten values are counted without being expanded."""
    names = ["lr", "momentum", "weight_decay", "batch_size", "epochs", "seed", "rounds", "agents"]
    names += ["waffle.clip", "waffle.eta_g", "waffle.correction", "split_seed"]
    lists = "\n".join(f'"{name}" = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]' for name in names)
    (tmp_path / "grid.toml").write_text(f'methods = ["waffle-paper"]\n[vary]\n{lists}\n')
    line = error_of("bench", tmp_path / "grid.toml", "--dry-run")
    assert "1,000,000,000,000 combinations" in line
    assert f"at most {MAX_COMBINATIONS:,}" in line


def test_a_few_combinations_are_planned(tmp_path: Path) -> None:
    """A grid below the limit is planned."""
    (tmp_path / "grid.toml").write_text('methods = ["local"]\n[vary]\nlr = [0.1, 0.2]\nbatch_size = [8, 16, 32]\n')
    shown = waffle("bench", tmp_path / "grid.toml", "--dry-run")
    assert (shown.code, len(shown.out.splitlines())) == (0, 6)


# --- memory

SHORTAGES = {
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
    "python": MemoryError(),
    "fork": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "gpu": torch.OutOfMemoryError("CUDA out of memory"),
}


@pytest.mark.parametrize("kind", SHORTAGES)
def test_out_of_memory_is_one_line_and_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Lack of memory in round 3 exits with code 2, and the same command resumes to the same bits."""
    simulate = experiment.execution.simulate

    def fail_in_round_3(*arguments: Any, **options: Any) -> Iterator[Any]:
        for i, outcomes in enumerate(simulate(*arguments, **options)):
            if i == 2:
                raise SHORTAGES[kind]
            yield outcomes

    folder = tmp_path / "run"
    line = ["run", "scaffold", *LINE, "--quiet", "--checkpoint-seconds", "1000", "--out"]
    with monkeypatch.context() as patch:
        patch.setattr(experiment.execution, "simulate", fail_in_round_3)
        text = refusal(waffle(*line, folder))
    assert "out of memory" in text
    assert "run the same command again" in text
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-00000002.safetensors"]
    assert waffle(*line, folder).code == 0
    assert waffle(*line, tmp_path / "uninterrupted").code == 0
    assert (folder / "model.safetensors").read_bytes() == (
        tmp_path / "uninterrupted" / "model.safetensors"
    ).read_bytes()


HOG = """
import os
from pathlib import Path
import torch

class Hog(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.linear = torch.nn.Linear(20, classes)

    def forward(self, x):
        log = Path(os.environ["HOG_LOG"])
        if "HOG_FULL" not in os.environ and log.exists() and log.read_bytes().count(b"\\n") >= 2:
            torch.empty(48 << 30, dtype=torch.uint8)
        return self.linear(x.flatten(1))

def build(shape, classes):
    return Hog(classes)
"""


def test_a_real_limit_of_memory_is_one_line_and_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that exceeds RLIMIT_AS in its third round fails in one line and can be resumed."""
    (tmp_path / "hog_model.py").write_text(HOG)
    folder = tmp_path / "run"
    for name, value in {"PYTHONPATH": str(tmp_path), "HOG_LOG": str(folder / "rounds.jsonl")}.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    line = ["run", "fedavg", "--data", "synthetic", "--samples-per-agent", "20", "--rounds", "5", "--quiet"]
    line += ["--model", "hog_model:build", "--workers", "1", "--rows", "single", "--out", str(folder)]
    limit = 40 << 30
    code, _, err = process(*line, limits={"RLIMIT_AS": limit})
    assert code == 2, err
    assert one_line(err)
    assert "out of memory" in err
    assert len(read_rounds(folder / "rounds.jsonl")) == 2
    assert (folder / "checkpoint-00000002.safetensors").exists()
    monkeypatch.setitem(ENVIRONMENT, "HOG_FULL", "yes")
    code, _, err = process(*line)
    assert (code, err) == (0, "")
    assert json.loads((folder / "result.json").read_text())["rounds"] == 5


def test_a_worker_without_memory_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker that lacks memory prints no traceback; one with another error does."""

    def work(share: int, r: int, attempt: int) -> None:
        if share:
            raise MemoryError if r == 1 else ZeroDivisionError

    for r, has_traceback in ((1, False), (2, True)):
        workers = Workers(work, 2)
        with pytest.raises(RuntimeError, match="training process ended") as caught:
            workers(r, 0)
        workers.close()
        assert is_shortage(caught.value) is not has_traceback
        assert ("Traceback" in capfd.readouterr().err) is has_traceback


def test_other_errors_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other errors are not reported as lack of memory."""

    def wrong(*_: Any, **__: Any) -> Iterator[Any]:
        raise RuntimeError("shapes differ")
        yield

    monkeypatch.setattr(experiment.execution, "simulate", wrong)
    with pytest.raises(RuntimeError, match="shapes differ"):
        execute([(check_run("local", {"data": "synthetic", "rounds": 1}, {}), tmp_path / "run")], Runtime())
    assert not issubclass(RuntimeError, WaffleError)
    assert sys.exc_info() == (None, None, None)
