"""A changed run folder is detected: every attack here runs against the real commands."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli_support import refusal, waffle
from test_inference import rows, write
from waffle_fl import manifest, records, tensorfile
from waffle_fl.algorithms import schedules
from waffle_fl.config import RunConfig, check_run
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, execute
from waffle_fl.inference.trained_run import open_run
from waffle_fl.manifest import Digest, inspect, seal, verify
from waffle_fl.records import Run, read_json
from waffle_fl.tensorfile import pack
from waffle_fl.user_key import FILE, state_dir, user_key

ROUNDS = 4
JSON = ("config.json", "provenance.json", "preprocessing.json", "result.json")


def run_config(**settings: Any) -> RunConfig:
    given = {"data": "synthetic", "model": "linear", "rounds": ROUNDS, "samples_per_agent": 20, **settings}
    return check_run("waffle-paper", given, {})


def paused_run(folder: Path, rounds: int = 2, **settings: Any) -> Path:
    """Create an unfinished run with one checkpoint per round."""
    execute([(run_config(**settings), folder)], Runtime(checkpoint_seconds=0), until=rounds)
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file as an editor would."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def reverse_classes(run: Path) -> None:
    edit_json(run / "provenance.json", lambda content: content["classes"].reverse())


def rewrite_tensors(path: Path) -> None:
    """Change the tensors in a file and recompute its digest."""
    tensors = load_file(path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    metadata = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
    changed = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    path.write_bytes(pack(changed, {key: value for key, value in metadata.items() if key != "digest"}))


def bits(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "model.safetensors").read_bytes(), (folder / "predictions.safetensors").read_bytes()


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run on tables, its baselines and a table of new patients."""
    folder = tmp_path_factory.mktemp("hospital")
    (folder / "data").mkdir()
    for k, name in enumerate(("north", "south")):
        write(folder / "data" / f"{name}.csv", rows(k, 40))
    write(folder / "new.csv", rows(5, 12))
    line = ["--data", folder / "data", "--target", "ill", "--alice", "north", "--rounds", "12", "--batch-size", "8"]
    shown = waffle("run", "waffle-paper", *line, "--lr", "0.1", "--quiet", "--device", "cpu", "--out", folder / "run")
    assert shown.code == 0, shown.err
    return folder


@pytest.fixture
def run(hospital: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that a test may change."""
    return Path(shutil.copytree(hospital / "run", tmp_path / "run"))


@pytest.fixture
def patients(hospital: Path) -> Path:
    return hospital / "new.csv"


def commands(run: Path, patients: Path) -> dict[str, list[str | Path]]:
    return {
        "predict": ["predict", run, patients],
        "export": ["export", run, "--format", "none", "--out", run / "out"],
        "report": ["report", run, "--out", run / "page"],
        "resume": ["resume", run, "--quiet"],
    }


# --- changed files


def test_reversed_classes_do_not_swap_diagnoses(run: Path, patients: Path) -> None:
    """With `classes` reversed in provenance.json predict fails; --force warns and uses the changed order."""
    original = waffle("predict", run, patients)
    assert (original.code, original.out.splitlines()[0]) == (0, "prediction,p(no),p(yes)")
    reverse_classes(run)
    line = refusal(waffle("predict", run, patients))
    assert f"{run / 'provenance.json'} was changed or damaged" in line
    assert "--force" in line
    forced = waffle("predict", run, patients, "--force")
    assert forced.code == 0
    assert "note: " in forced.err
    assert "provenance.json was changed" in forced.err
    assert forced.out.splitlines()[0] == "prediction,p(yes),p(no)"


@pytest.mark.parametrize("command", ["predict", "export", "report", "resume"])
@pytest.mark.parametrize("name", [*JSON, "rounds.jsonl"])
def test_an_edited_file_is_refused_by_every_command(run: Path, patients: Path, name: str, command: str) -> None:
    """One extra byte in a listed file is a one-line error with exit code 2, and nothing is written."""
    with (run / name).open("ab") as stream:
        stream.write(b"\n")
    before = sorted(path.name for path in run.iterdir())
    line = refusal(waffle(*commands(run, patients)[command]))
    assert str(run / name) in line
    assert "--force" in line
    assert sorted(path.name for path in run.iterdir()) == before
    assert waffle(*commands(run, patients)[command], "--force").code == 0


@pytest.mark.parametrize("name", JSON)
def test_a_file_that_was_removed_or_added_is_refused(run: Path, patients: Path, name: str) -> None:
    """A missing file and a file that the run never wrote are both named."""
    original_bytes = (run / name).read_bytes()
    (run / name).unlink()
    assert name in refusal(waffle("predict", run, patients)) or name in ("config.json", "result.json")
    (run / name).write_bytes(original_bytes)
    assert waffle("predict", run, patients).err.count("note") == 0
    (run / "manifest.json").unlink()
    (run / name).rename(run / "elsewhere")
    seal(run)
    (run / "elsewhere").rename(run / name)
    assert "does not list it" in refusal(waffle("predict", run, patients))


@pytest.mark.parametrize("command", ["predict", "export"])
def test_a_rewritten_model_is_refused(run: Path, patients: Path, command: str) -> None:
    """A changed model is rejected although its own unkeyed digest is correct."""
    rewrite_tensors(run / "model.safetensors")
    assert "model.safetensors was changed" in refusal(waffle(*commands(run, patients)[command]))


def test_rewritten_predictions_are_refused_by_the_report(run: Path, patients: Path) -> None:
    """The report rejects predictions that differ from what the runs wrote."""
    rewrite_tensors(run / "local" / "predictions.safetensors")
    assert "predictions.safetensors was changed" in refusal(waffle("report", run, "--out", run / "page"))
    shown = waffle("report", run, "--out", run / "page", "--force")
    assert shown.code == 0
    assert "predictions.safetensors was changed" in shown.err


def test_bench_does_not_reuse_a_changed_run(tmp_path: Path) -> None:
    """Finished runs of a grid are verified before they are reused."""
    grid = tmp_path / "grid.toml"
    grid.write_text('methods = ["fedavg", "local"]\ndata = "synthetic"\nmodel = "linear"\nrounds = 2\n')
    line = ["bench", grid, "--out", tmp_path / "runs", "--quiet", "--json"]
    assert waffle(*line).code == 0
    result = tmp_path / "runs" / "synthetic-C-fedavg-1" / "result.json"
    edit_json(result, lambda content: content["best"].update(accuracy=1.0))
    assert str(result) in refusal(waffle(*line))
    assert waffle(*line, "--force").code == 0


def test_tune_does_not_continue_from_a_changed_log(tmp_path: Path) -> None:
    """The logged rounds of every trial, also of pruned ones, are verified before they are used again."""
    pytest.importorskip("optuna")
    line = ["tune", "fedavg", "--data", "synthetic", "--model", "linear", "--rounds", "4", "--samples-per-agent", "20"]
    line += ["--only", "lr", "--out", str(tmp_path / "tune"), "--quiet", "--parallel-trials", "1", "--trials"]
    assert waffle(*line, "1").code == 0
    log = next((tmp_path / "tune").glob("trial-0000/*/rounds.jsonl"))
    log.write_bytes(log.read_bytes().replace(b'"validation_accuracy":0', b'"validation_accuracy":1'))
    assert str(log) in refusal(waffle(*line, "2"))


# --- unfinished runs


def test_an_edited_learning_rate_is_not_resumed(tmp_path: Path) -> None:
    """`waffle resume` rejects an edited config; --force continues, and the record lists the change."""
    folder = paused_run(tmp_path / "run")
    edit_json(folder / "config.json", lambda content: content["settings"].update(lr=0.4))
    assert "config.json was changed" in refusal(waffle("resume", folder, "--quiet"))
    assert not (folder / "result.json").exists()
    assert waffle("resume", folder, "--quiet", "--force").code == 0
    (forced,) = (read_json(folder / "provenance.json") or {})["forced"]
    assert "config.json was changed" in forced[0]
    assert inspect(folder, ("model.safetensors",)) is None


@pytest.mark.parametrize("which", ["newest", "both"])
def test_a_rewritten_checkpoint_is_not_resumed(tmp_path: Path, which: str) -> None:
    """A checkpoint with a correct own digest that differs from the manifest is rejected."""
    folder = paused_run(tmp_path / "run", 3)
    first, last = sorted(folder.glob("checkpoint-*"))
    original_bytes = last.read_bytes()
    rewrite_tensors(last)
    if which == "both":
        rewrite_tensors(first)
    assert f"{last} was changed" in refusal(waffle("resume", folder, "--quiet"))
    if which == "newest":
        last.write_bytes(original_bytes)
        assert waffle("resume", folder, "--quiet").code == 0
        execute([(run_config(), tmp_path / "uninterrupted")], Runtime())
        assert bits(folder) == bits(tmp_path / "uninterrupted")
    else:
        shown = waffle("resume", folder, "--force")
        assert shown.code == 0
        assert "was changed" in shown.words


def test_a_checkpoint_of_another_round_is_not_resumed(tmp_path: Path) -> None:
    """An old checkpoint under the name of a newer one is rejected."""
    folder = paused_run(tmp_path / "run", 3)
    first, last = sorted(folder.glob("checkpoint-*"))
    last.write_bytes(first.read_bytes())
    assert f"{last} was changed" in refusal(waffle("resume", folder, "--quiet"))


def test_edited_rounds_are_not_resumed(tmp_path: Path) -> None:
    """Edited rounds before a checkpoint are rejected; later rounds and a partial line are cut off as usual."""
    folder = paused_run(tmp_path / "run")
    log = folder / "rounds.jsonl"
    original = log.read_bytes()
    log.write_bytes(original.replace(b'"accuracy":0', b'"accuracy":1', 1))
    assert f"{log} was changed" in refusal(waffle("resume", folder, "--quiet"))
    log.write_bytes(original + b'{"round":3,"accuracy":1.0}\n{"rou')
    assert waffle("resume", folder, "--quiet").code == 0
    execute([(run_config(), tmp_path / "uninterrupted")], Runtime())
    assert bits(folder) == bits(tmp_path / "uninterrupted")


def test_a_folder_is_valid_before_and_after_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies at any write leaves a folder that passes verification, also when forced."""
    folder, real_write = tmp_path / "run", tensorfile.write_atomically
    seen: list[str] = []

    def check(when: str) -> None:
        finding = inspect(folder, ("model.safetensors", "predictions.safetensors")) if seen else None
        assert finding is None, (when, finding)

    def checked_write(path: Path, content: bytes) -> None:
        check(f"before {path.name}")
        real_write(path, content)
        seen.append(path.name)
        check(f"after {path.name}")

    for module in (records, tensorfile, manifest):
        monkeypatch.setattr(module, "write_atomically", checked_write)
    paused_run(folder, 2)
    newest = max(folder.glob("checkpoint-*"))
    os.truncate(newest, 50)  # the run resumes from the previous checkpoint and truncates its log
    execute([(run_config(lr=0.2), folder)], Runtime(checkpoint_seconds=0, force=True), until=3)
    execute([(run_config(lr=0.2), folder)], Runtime(checkpoint_seconds=0))
    assert {"manifest.json", "config.json", "rounds.jsonl", "result.json", "model.safetensors"} <= set(seen)
    assert seen[0] == "manifest.json"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert all(len(digests) == 1 for digests in listed.values())
    assert set(listed) == {path.name for path in folder.iterdir()} - {".lock", "manifest.json"}


def test_the_manifest_lists_a_file_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot write a file keeps the digest of the old one and can be resumed."""
    folder = paused_run(tmp_path / "run")
    real_write = records.write_atomically

    def write_without_space(path: Path, content: bytes) -> None:
        if path.name == "result.json":
            raise OSError(28, "No space left on device")
        real_write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(records, "write_atomically", write_without_space)
        with pytest.raises(WaffleError, match="No space left"):
            execute([(run_config(), folder)], Runtime())
    assert inspect(folder) is None
    assert waffle("resume", folder, "--quiet").code == 0
    execute([(run_config(), tmp_path / "uninterrupted")], Runtime())
    assert bits(folder) == bits(tmp_path / "uninterrupted")


# --- code named in a run folder

HOSTILE = """
from pathlib import Path
Path({canary!r}).touch()

def build(shape, classes):
    import torch
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(20, classes))

def half(r, rounds):
    return 0.5
"""


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that exists once the importable module `hostile_code` was imported."""
    canary, modules = tmp_path / "imported", tmp_path / "modules"
    modules.mkdir()
    (modules / "hostile_code.py").write_text(HOSTILE.format(canary=str(canary)))
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.delitem(sys.modules, "hostile_code", raising=False)
    schedules.parse.cache_clear()
    return canary


@pytest.mark.parametrize("command", ["predict", "export", "resume"])
@pytest.mark.parametrize("flags", [(), ("--force",), ("--trust",)])
def test_a_module_in_a_changed_folder_is_never_imported(
    run: Path, patients: Path, canary: Path, command: str, flags: tuple[str, ...]
) -> None:
    """Neither --force nor --trust alone imports a module that was written into config.json."""
    edit_json(run / "config.json", lambda content: content["settings"].update(model="hostile_code:build"))
    line = refusal(waffle(*commands(run, patients)[command], *flags))
    assert ("hostile_code:build" in line and "--trust" in line) or "config.json was changed" in line
    assert not canary.exists()


@pytest.mark.parametrize("command", ["predict", "export", "report", "resume"])
def test_a_schedule_in_a_folder_is_imported_only_with_trust(
    run: Path, patients: Path, canary: Path, command: str
) -> None:
    """A function named as omega is not imported without --trust, even if the folder is sealed."""
    edit_json(run / "config.json", lambda content: content["options"].update(omega="hostile_code:half"))
    seal(run)
    assert "omega = 'hostile_code:half'" in refusal(waffle(*commands(run, patients)[command]))
    assert not canary.exists()
    waffle(*commands(run, patients)[command], "--trust")
    assert canary.exists()


def test_a_record_is_not_imported_without_trust(run: Path, patients: Path, canary: Path, tmp_path: Path) -> None:
    """A .jsonl record that names a schedule function is rejected by the report without --trust."""
    record = tmp_path / "record.jsonl"
    alone = shutil.copytree(run, tmp_path / "alone", ignore=shutil.ignore_patterns("local", "fedavg"))
    assert waffle("report", alone, "--record", record, "--out", tmp_path / "page").code == 0
    record.write_text(record.read_text().replace("sigmoid(3.2)", "hostile_code:half"))
    assert "hostile_code:half" in refusal(waffle("report", record, "--out", tmp_path / "page"))
    assert not canary.exists()


def test_the_run_command_needs_no_trust_for_its_model(canary: Path, tmp_path: Path) -> None:
    """`waffle run --model module:name` needs no --trust; resume and export of its folder do."""
    line = ["run", "local", "--data", "synthetic", "--model", "hostile_code:build", "--rounds", "2", "--quiet"]
    assert waffle(*line, "--out", tmp_path / "run").code == 0
    assert waffle(*line, "--out", tmp_path / "run").code == 0
    assert "--trust" in refusal(waffle("resume", tmp_path / "run"))
    assert waffle("resume", tmp_path / "run", "--trust", "--quiet").code == 0
    assert "--trust" in refusal(waffle("export", tmp_path / "run"))
    shown = waffle("export", tmp_path / "run", "--trust", "--format", "none")
    assert (shown.code, shown.err) == (0, "")
    assert waffle("report", tmp_path / "run").code == 0  # the report builds no model
    with pytest.raises(WaffleError, match="trust=True"):
        open_run(tmp_path / "run")
    assert open_run(tmp_path / "run", trust=True).shape == (20,)


# --- signatures


def rewrite_manifest(run: Path, key: bytes | None = None) -> None:
    """Write a manifest with correct digests, unsigned or signed with another key."""
    path = run / "manifest.json"
    content = json.loads(path.read_text())
    for name in content["files"]:
        content["files"][name] = [Digest.at(run / name)._asdict()]
    if key:
        content["key"] = hashlib.sha256(b"waffle-fl manifest key\0" + key).hexdigest()[:16]
        body = {name: content[name] for name in ("schema", "key", "files")}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        content["hmac"] = hmac.new(key, text.encode(), "sha256").hexdigest()
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("command", ["predict", "export", "report", "resume"])
def test_a_rewritten_manifest_is_refused(run: Path, patients: Path, command: str) -> None:
    """Recomputed digests without the user's key are detected."""
    reverse_classes(run)
    rewrite_manifest(run)
    assert "manifest.json was changed after it was signed" in refusal(waffle(*commands(run, patients)[command]))


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 1}', '{"schema": 2, "key": "", "files": {}, "hmac": ""}'])
def test_a_damaged_manifest_is_refused(run: Path, patients: Path, content: str) -> None:
    """An invalid manifest is a one-line error, and --force continues."""
    (run / "manifest.json").write_text(content)
    assert "manifest.json" in refusal(waffle("predict", run, patients))
    assert waffle("predict", run, patients, "--force").code == 0


@pytest.mark.parametrize("command", ["predict", "export", "report", "resume"])
def test_a_folder_from_another_machine_is_used_with_a_note(
    run: Path, patients: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature with another user's key causes one note, and changes are still detected."""
    monkeypatch.setenv("WAFFLE_STATE_DIR", str(tmp_path / "other"))
    line = [word for word in commands(run, patients)[command] if word != "--quiet"]
    shown = waffle(*line)
    assert shown.code == 0
    assert " ".join(shown.err.split()).count("made with another key") == 1
    assert "the signature cannot be checked here" in " ".join(shown.err.split())
    with (run / "provenance.json").open("ab") as stream:
        stream.write(b" ")
    assert "provenance.json was changed" in refusal(waffle(*commands(run, patients)[command]))


def test_resuming_a_run_from_another_machine_signs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming a run signs it with the current user's key."""
    folder = paused_run(tmp_path / "run")
    monkeypatch.setenv("WAFFLE_STATE_DIR", str(tmp_path / "other"))
    assert waffle("resume", folder, "--quiet").code == 0
    assert inspect(folder) is None


@pytest.mark.parametrize("command", ["predict", "export", "report", "resume"])
def test_a_folder_without_a_manifest_is_refused(run: Path, patients: Path, command: str) -> None:
    """Removing the manifest does not bypass the check; the error explains --force."""
    reverse_classes(run)
    for path in (run, run / "local", run / "fedavg"):
        (path / "manifest.json").unlink()
    line = refusal(waffle(*commands(run, patients)[command]))
    assert f"{run} has no manifest.json" in line
    assert "`waffle resume RUN --force` once to write it" in line
    assert not (run / "manifest.json").exists()


@pytest.mark.parametrize("command", ["predict", "export", "report"])
def test_a_folder_without_a_manifest_is_used_with_force(run: Path, patients: Path, command: str) -> None:
    """With --force a run of an older version is used, and one note says that it has no manifest."""
    for path in (run, run / "local", run / "fedavg"):
        (path / "manifest.json").unlink()
    shown = waffle(*commands(run, patients)[command], "--force")
    assert shown.code == 0
    notes = [line for line in shown.err.splitlines() if line.startswith("note: ")]
    assert ["has no manifest.json" in line for line in notes] == [True]
    assert not (run / "manifest.json").exists()


def test_a_folder_without_results_needs_no_manifest(tmp_path: Path) -> None:
    """A folder with only a config causes a warning."""
    (tmp_path / "config.json").write_text("{}")
    warnings_seen: list[str] = []
    verify(tmp_path, warn=warnings_seen.append)
    assert ["older version without a manifest" in line for line in warnings_seen] == [True]


def test_resuming_a_folder_without_a_manifest_writes_one(tmp_path: Path) -> None:
    """Forcing an older run once, unfinished or finished, writes its manifest and gives the same bits."""
    folder = paused_run(tmp_path / "run")
    with (folder / "rounds.jsonl").open("ab") as log:
        log.write(b'{"half')
    (folder / "manifest.json").unlink()
    assert "has no manifest.json" in refusal(waffle("resume", folder, "--quiet"))
    shown = waffle("resume", folder, "--force")
    assert shown.code == 0
    assert "has no manifest.json" in shown.words
    assert "has no manifest.json" in str(json.loads((folder / "provenance.json").read_text())["forced"])
    execute([(run_config(), tmp_path / "uninterrupted")], Runtime())
    assert bits(folder) == bits(tmp_path / "uninterrupted")
    assert inspect(folder, ("model.safetensors",)) is None
    (folder / "manifest.json").unlink()
    assert "has no manifest.json" in waffle("resume", folder, "--force").words
    assert "manifest" not in waffle("resume", folder).words


# --- the key

CONCURRENT = "from waffle_fl.user_key import user_key; print(user_key().hex())"


def test_the_key_is_created_once_and_private(tmp_path: Path) -> None:
    """Concurrent processes get the same key, and only its user may read it."""
    environment = {**os.environ, "WAFFLE_STATE_DIR": str(tmp_path / "state")}
    line = [sys.executable, "-c", CONCURRENT]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(line, stdout=pipe, text=True, env=environment) for _ in range(6)]
    assert len({process.communicate(timeout=60)[0] for process in processes}) == 1
    assert [path.name for path in (tmp_path / "state").iterdir()] == [FILE]
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_the_location_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is in $WAFFLE_STATE_DIR, else in $XDG_STATE_HOME, else in ~/.local/state."""
    assert str(state_dir()) == os.environ["WAFFLE_STATE_DIR"]
    monkeypatch.delenv("WAFFLE_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_dir() == tmp_path / "waffle-fl"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert state_dir() == tmp_path / "home" / ".local" / "state" / "waffle-fl"


def test_an_invalid_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid key file is named and not overwritten."""
    monkeypatch.setenv("WAFFLE_STATE_DIR", str(tmp_path))
    (tmp_path / FILE).write_text("no key")
    line = refusal(waffle("run", "local", "--data", "synthetic", "--rounds", "1", "--out", tmp_path / "run"))
    assert str(tmp_path / FILE) in line
    assert (tmp_path / FILE).read_text() == "no key"


def test_runs_are_unsigned_if_no_key_can_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no key can be stored, the manifest has digests only and its finding is "unsigned"."""
    (tmp_path / "file").write_text("a file")
    monkeypatch.setenv("WAFFLE_STATE_DIR", str(tmp_path / "file" / "state"))
    assert user_key() is None
    folder = paused_run(tmp_path / "run")
    assert waffle("resume", folder, "--quiet").code == 0
    finding = inspect(folder)
    assert finding
    assert finding.kind == "unsigned"


# --- from Python


def test_seal_and_verify(tmp_path: Path) -> None:
    """A changed folder raises an error, with force a warning; large files are checked if named."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "result.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(pack({"x": torch.zeros(2)}, {}))
    seal(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify(folder, ("model.safetensors",))
    (folder / "model.safetensors").write_bytes(b"other")
    verify(folder)
    with pytest.raises(WaffleError, match="force=True"):
        verify(folder, ("model.safetensors",))
    with pytest.warns(UserWarning, match="used because of"):
        verify(folder, ("model.safetensors",), force=True)
    warnings_seen: list[str] = []
    verify(folder, ("model.safetensors",), force=True, warn=warnings_seen.append)
    assert len(warnings_seen) == 1


def test_open_run_warns_and_forces(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`open_run` raises for a changed folder and warns if the signature cannot be checked."""
    assert open_run(run).classes == ("no", "yes")
    monkeypatch.setenv("WAFFLE_STATE_DIR", str(tmp_path / "other"))
    with pytest.warns(UserWarning, match="another key"):
        open_run(run)
    reverse_classes(run)
    with pytest.raises(WaffleError, match=r"provenance\.json was changed"):
        open_run(run)
    with pytest.warns(UserWarning, match="used because of"):
        assert open_run(run, force=True).classes == ("yes", "no")


def test_many_folders_are_one_note(tmp_path: Path) -> None:
    """A forced report on many runs without a manifest prints one note."""
    folders = [tmp_path / f"run-{seed}" for seed in (1, 2, 3)]
    execute([(run_config(seed=seed), folder) for seed, folder in enumerate(folders, 1)], Runtime())
    for folder in folders:
        (folder / "manifest.json").unlink()
    shown = waffle("report", tmp_path, "--out", tmp_path / "page", "--force")
    assert shown.code == 0
    (line,) = shown.err.splitlines()
    assert f"{folders[0]} has no manifest.json" in line
    assert "2 more runs have none either" in line


def test_a_folder_with_only_a_manifest_is_a_new_run(tmp_path: Path) -> None:
    """A process that died after its first write left only a manifest, and the folder can be used again."""
    with Run.opened(tmp_path / "run", run_config(), {"binding": {}}):
        pass
    for name in ("config.json", "provenance.json", "rounds.jsonl"):
        (tmp_path / "run" / name).unlink()
    with Run.opened(tmp_path / "run", run_config(lr=0.3), {"binding": {}}) as run:
        assert run.findings == []
    assert inspect(tmp_path / "run") is None
