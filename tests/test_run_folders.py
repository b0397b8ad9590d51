"""Run folders: locking, and changes of config, data, code and files."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from records_support import (
    BINDING,
    ROUNDS,
    TEMPLATE,
    Halt,
    Watcher,
    bits,
    command,
    config,
    finish,
    halted,
    recorded,
    resumed,
    snapshot,
)
from waffle_fl import experiment
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation
from waffle_fl.records import Run, read_json

# --- one process per folder (P4)

HOLDER = """
import sys, time
from pathlib import Path
from waffle_fl.config import check_run
from waffle_fl.records import Run

chosen = check_run("waffle-paper", {"data": "synthetic", "model": "linear", "rounds": 6, "samples_per_agent": 20}, {})
with Run.opened(Path(sys.argv[1]), chosen, {}):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_the_lock_names_its_holder_and_is_freed_by_its_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second process is rejected with the holder's pid and host, and accepted once SIGKILL ended the holder."""
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
    """An error inside a run frees its folder for the next attempt in the same process."""
    folder = tmp_path / "run"
    with pytest.raises(Halt), Run.opened(folder, config(), BINDING):
        raise Halt
    assert resumed(folder) == (0, None, [])


# --- a changed config, data set or code (P5)


def bound(**binding: str) -> dict[str, Any]:
    return {"binding": {**BINDING["binding"], **binding}}


def test_every_difference_is_listed(tmp_path: Path) -> None:
    """Resuming with another config, data set, code, torch or device fails and lists each old and new value."""
    folder = recorded(tmp_path / "run", (1,), rounds=1)
    before = snapshot(folder)
    other = bound(results_version="2", torch="3", device="H200", data="d1")
    changes = [
        "method was 'waffle-paper', now 'scaffold'",
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
    """One changed part of the binding is enough to refuse, and only that part is listed."""
    folder = recorded(tmp_path / "run", (1,), rounds=1)
    with (
        pytest.raises(WaffleError, match=rf"another run: provenance\.{what} was '.*', now 'new'; choose"),
        Run.opened(folder, config(), bound(**{what: "new"})),
    ):
        pytest.fail("the folder was opened")


def test_force_continues_and_is_recorded(tmp_path: Path) -> None:
    """With force a changed run continues from its checkpoint, and provenance.json lists every forced change."""
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
    """`waffle run` with another step size on an unfinished run exits with code 2; with --force it finishes."""
    folder = halted(tmp_path / "run", config())
    arguments = ["run", "waffle-paper", "--data", "synthetic", "--model", "linear", "--rounds", ROUNDS]
    arguments += ["--samples-per-agent", 20, "--lr", 0.2, "--out", folder, "--quiet"]
    assert command(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    assert "settings.lr was 0.1, now 0.2" in message
    assert message.count("\n") == 1
    assert command(monkeypatch, *arguments, "--force") == 0
    assert (read_json(folder / "provenance.json") or {})["forced"] == [["settings.lr was 0.1, now 0.2"]]
    assert (read_json(folder / "result.json") or {})["rounds"] == ROUNDS


def test_other_data_behind_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished run whose data set changed on disk is rejected by the data digest."""
    folder = halted(tmp_path / "run", config())
    original_federation_of = experiment.federation_of

    def with_changed_label(*arguments: Any) -> Federation:
        federation = original_federation_of(*arguments)
        y = federation.y.clone()
        y[0] = (y[0] + 1) % 10
        return dataclasses.replace(federation, y=y)

    monkeypatch.setattr(experiment.prepared_run, "federation_of", with_changed_label)
    with pytest.raises(WaffleError, match=r"holds another run: provenance\.data was"):
        finish(folder, config())


def test_the_data_digest_depends_on_pixel_positions() -> None:
    """The data digest differs between images and the same images transposed."""
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(0, 256, (8, 1, 4, 4)).astype(np.float32) for _ in range(2))
    y = np.arange(8) % 2
    upright = Federation.from_arrays({"alice": (x, y, x_test, y)})
    turned = Federation.from_arrays({"alice": (x.swapaxes(2, 3), y, x_test.swapaxes(2, 3), y)})
    assert upright.digest() != turned.digest()


def test_the_number_of_threads_changes_nothing(tmp_path: Path) -> None:
    """A run resumed with another number of workers ends with the bits of the uninterrupted run."""
    chosen = config("scaffold")
    finish(tmp_path / "uninterrupted", chosen, workers=2)
    folder = halted(tmp_path / "broken", chosen, workers=1)
    finish(folder, chosen, workers=3)
    assert bits(folder) == bits(tmp_path / "uninterrupted")


# --- folders that cannot be written to (P9)


@pytest.mark.parametrize("location", ["a file", "under a file", "proc"])
def test_an_unwritable_folder_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], location: str
) -> None:
    """A run folder that cannot be created is a one-line error with exit code 2 before training starts."""
    file = tmp_path / "file"
    file.write_text("a file")
    folder = {"a file": file, "under a file": file / "run", "proc": Path("/proc/waffle/run")}[location]
    monkeypatch.setattr(experiment.execution, "simulate", lambda *_, **__: pytest.fail("training began"))
    arguments = ["run", "local", "--data", "synthetic", "--model", "linear", "--rounds", 3, "--quiet"]
    assert command(monkeypatch, *arguments, "--out", folder) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"waffle: cannot write to {folder}: ")
    assert message.count("\n") == 1
    assert file.read_text() == "a file"


# --- finished runs (P12)


@pytest.mark.parametrize("method", ["waffle-paper", "apfl"])
def test_a_finished_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Running a finished run again returns the same result, trains nothing and changes no file."""
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


def test_missing_settings_of_an_older_config_mean_their_defaults(tmp_path: Path) -> None:
    """Settings and options that an older config lacks count as their defaults."""
    folder = tmp_path / "run"
    first = finish(folder, config("waffle-paper"))
    path = folder / "config.json"
    content = json.loads(path.read_text())
    del content["settings"]["leave_out"], content["settings"]["augment"], content["options"]["eta_g"]
    path.write_text(json.dumps(content))
    (folder / "manifest.json").unlink()  # that version wrote none
    assert finish(folder, config("waffle-paper"), force=True) == first


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


def test_a_finished_run_with_a_damaged_log_gives_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run whose log was damaged is shown or rejected in one line."""
    folder = tmp_path / "run"
    finish(folder, config())
    (folder / "rounds.jsonl").write_bytes(b"garbage\n")
    assert command(monkeypatch, "resume", folder, "--quiet") in (0, 2)
    assert capsys.readouterr().err.count("\n") <= 1


def test_force_never_gives_a_finished_run_a_config_it_was_not_trained_with(tmp_path: Path) -> None:
    """Forcing another step size on a finished run trains it again, fails, or leaves its config unchanged."""
    folder = tmp_path / "run"
    finish(folder, config(lr=0.1))
    model = (folder / "model.safetensors").read_bytes()
    with contextlib.suppress(WaffleError):
        finish(folder, config(lr=0.4), force=True)
    claimed = (read_json(folder / "config.json") or {})["settings"]["lr"]
    trained_anew = (folder / "model.safetensors").read_bytes() != model
    assert trained_anew or claimed == 0.1


@pytest.mark.parametrize("method", ["local", "fedavg", "scaffold", "weight-erosion", "waffle-paper", "apfl", "ditto"])
def test_every_method_resumes_to_the_same_bits(tmp_path: Path, method: str) -> None:
    """A run of any method that was halted twice ends with the model and log of the uninterrupted run."""
    chosen = config(method)
    uninterrupted = finish(tmp_path / "uninterrupted", chosen)
    folder = halted(tmp_path / "broken", chosen, after=2)
    halted(folder, chosen, after=5)
    assert finish(folder, chosen) == uninterrupted
    assert bits(folder) == bits(tmp_path / "uninterrupted")
    assert list(folder.glob("checkpoint-*")) == []
