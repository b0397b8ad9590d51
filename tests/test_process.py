"""Real processes that are killed, stopped, out of disk space or diverging: rows P1-P3, P10 and P11."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fork_server import Command, shared
from waffle_fl import cli
from waffle_fl.config import RunConfig, check_run
from waffle_fl.engines.run_spec import Outcome, RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Listener, Runtime, execute, federation_of
from waffle_fl.models import FlatModel, builder
from waffle_fl.records import read_json, read_rounds

ROUNDS = 40
SETTINGS = ["--data", "digits", "--samples-per-agent", "64", "--batch-size", "16", "--rounds", str(ROUNDS)]
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("COV_", "PYTEST_"))}


def start(*arguments: str | Path, limits: dict[str, int] | None = None) -> Command:
    """Start the command in its own process."""
    return shared().start("waffle", *arguments, environment=ENVIRONMENT, limits=limits)


def waffle(*arguments: str | Path, limits: dict[str, int] | None = None) -> tuple[int, str, str]:
    """Run the command in its own process and return (exit code, stdout, stderr)."""
    return shared().run("waffle", *arguments, environment=ENVIRONMENT, limits=limits)


def run(method: str, folder: Path, *flags: str) -> list[str]:
    return ["run", method, *SETTINGS, "--quiet", "--out", str(folder), *flags]


def logged(folder: Path) -> int:
    """Return the number of complete lines in a log that may be growing."""
    try:
        return (folder / "rounds.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_for_rounds(process: Command, folder: Path, rounds: int) -> None:
    while logged(folder) < rounds:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)


def bits(folder: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, Any] | None]:
    """Return the final model, every round without its wall-clock time, and the result."""
    text = (folder / "rounds.jsonl").read_text()
    assert text.endswith("\n")
    lines = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in text.splitlines()]
    return (folder / "model.safetensors").read_bytes(), lines, read_json(folder / "result.json")


def one_line(err: str) -> bool:
    return err.startswith("waffle: ") and err.count("\n") == 1 and err.endswith("\n")


def small_config(method: str, **settings: Any) -> RunConfig:
    given = {"data": "synthetic", "model": "linear", "samples_per_agent": 20, "rounds": 8, **settings}
    return check_run(method, given, {})


def finish(config: RunConfig, folder: Path, **runtime: Any) -> dict[str, Any]:
    (result,) = execute([(config, folder)], Runtime(**runtime))
    return result


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted WAFFLE run by the real command."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    code, _, err = waffle(*run("waffle-paper", folder, "--checkpoint-seconds", "0"))
    assert (code, err) == (0, "")
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Return (exit code, stderr, folder) of a WAFFLE run that SIGTERM stopped before its first regular checkpoint."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    process = start(*run("waffle-paper", folder, "--checkpoint-seconds", "1000"))
    wait_for_rounds(process, folder, 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    return process.returncode, err, folder


@pytest.fixture
def unfinished(stopped: tuple[int, str, Path], tmp_path: Path) -> Path:
    """Return a copy of the stopped run that a test may resume."""
    shutil.copytree(stopped[2], tmp_path / "run")
    return tmp_path / "run"


# --- P1: SIGKILL

FORKS = '''
"""Fork a child for every command line; nothing is computed before a fork."""
import json, os, random, signal, sys, time, traceback
from pathlib import Path

from waffle_fl import cli, experiment, manifest, records, tensorfile
from waffle_fl.cli import commands



def logged(folder):
    try:
        return (folder / "rounds.jsonl").read_bytes().count(b"\\n")
    except FileNotFoundError:
        return 0


def fork(work, prepare=lambda: None):
    """Return the pid of a child process that does this work."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        prepare()
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def start(arguments):
    """Return the pid of a child process that runs this command line as `waffle` would."""
    sys.argv = ["waffle", *arguments]
    return fork(cli.main)


def ended(pid, block=False):
    """Return the exit code of a child, or None while it runs."""
    found, status = os.waitpid(pid, 0 if block else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def kill_at(pid, moment):
    """Kill the child when moment() is true and return whether it was killed before its end."""
    while not moment():
        if ended(pid) is not None:
            return False
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return ended(pid, block=True) == -signal.SIGKILL


def after(seconds):
    due = time.monotonic() + seconds
    return lambda: time.monotonic() >= due


def in_round(folder, r, seconds):
    """Return a condition that is true this many seconds after round r was logged."""
    due = []

    def moment():
        if not due and logged(folder) >= r:
            due.append(time.monotonic() + seconds)
        return bool(due) and time.monotonic() >= due[0]

    return moment
'''

KILLS = (
    FORKS
    + """

command, rounds, out, count = json.loads(sys.argv[1])
began = time.monotonic()
assert ended(start([*command, "--out", f"{out}/unbroken"]), block=True) == 0
duration = time.monotonic() - began
for number in range(count):
    rng = random.Random(number)
    folder = Path(out) / f"run-{number}"
    every = rng.choice(["0", "0", "0.05", "1000"])
    arguments = [*command, "--out", str(folder), "--checkpoint-seconds", every]
    pid = start(arguments)
    if number % 5:  # anywhere between the first and the last round
        moment = in_round(folder, rng.randrange(1, rounds - 2), rng.uniform(0, duration / rounds))
    else:  # any time, start-up and end included
        moment = after(rng.uniform(0, duration))
    report = {"number": number, "every": every, "killed": kill_at(pid, moment), "logged": logged(folder)}
    report["partial"] = report["logged"] >= 1 and not (folder / "result.json").exists()
    if rng.random() < 0.25:  # once more, while it resumes
        kill_at(start(arguments), after(rng.uniform(0, duration / 4)))
    report["code"] = ended(start(arguments), block=True)
    print(json.dumps(report), flush=True)
"""
)


def kill_and_resume(tmp_path: Path, method: str, count: int) -> list[dict[str, Any]]:
    """Complete one run, kill and resume others, and return their reports."""
    script, rounds = tmp_path / "kills.py", ROUNDS // 2
    script.write_text(KILLS)
    command = ["run", method, *SETTINGS, "--rounds", str(rounds), "--quiet"]
    line = (script, json.dumps([command, rounds, str(tmp_path), count]))
    code, out, err = shared().run(*line, environment=ENVIRONMENT, timeout=600)
    assert (code, err) == (0, "")
    return [json.loads(text) for text in out.splitlines()]


@pytest.mark.slow_first
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.thorough)])
def test_runs_killed_at_random_moments_resume_to_the_same_bits(kills: int, tmp_path: Path) -> None:
    """WAFFLE runs killed by SIGKILL and resumed by the same command end like the uninterrupted run."""
    reports = kill_and_resume(tmp_path, "waffle-paper", kills)
    assert len(reports) == kills
    assert sum(report["partial"] for report in reports) >= kills / 2
    assert [report for report in reports if report["code"] != 0] == []
    expected = bits(tmp_path / "unbroken")
    assert len(expected[1]) == ROUNDS // 2
    assert [r for r in reports if bits(tmp_path / f"run-{r['number']}")[1:] != expected[1:]] == []
    assert [r for r in reports if bits(tmp_path / f"run-{r['number']}")[0] != expected[0]] == []
    assert list(tmp_path.glob("run-*/checkpoint-*")) == []


def test_runs_with_state_at_the_agents_resume_to_the_same_bits(tmp_path: Path) -> None:
    """APFL runs, whose agents have their own models, survive SIGKILL too."""
    reports = kill_and_resume(tmp_path, "apfl", 2)
    assert sum(report["partial"] for report in reports) >= 1
    assert [report["code"] for report in reports] == [0] * 2
    expected = bits(tmp_path / "unbroken")
    assert [r for r in reports if bits(tmp_path / f"run-{r['number']}") != expected] == []


STEPS = (
    FORKS
    + '''
from waffle_fl.config import check_run

settings = {"data": "synthetic", "model": "linear", "samples_per_agent": 20, "rounds": 3}
config, out = check_run("scaffold", settings, {}), Path(sys.argv[1])
real_write = tensorfile.write_atomically
real_append = records.Run.append


def dying(point, phase):
    """Return a function that makes the process die during or just after its point-th write."""
    calls = iter(range(1, 10**6))

    def write(path, content):
        if next(calls) != point:
            return real_write(path, content)
        if phase == "half":
            path.with_name(f".{path.name}.tmp").write_bytes(content[: len(content) // 2])
        else:
            real_write(path, content)
        os._exit(9)

    def append(run, measured):
        if next(calls) != point:
            return real_append(run, measured)
        line = records.json_line(measured)
        run._log.append(line[: len(line) // 2] if phase == "half" else line)
        os._exit(9)

    def prepare():
        records.write_atomically = tensorfile.write_atomically = manifest.write_atomically = write
        records.Run.append = append

    return prepare


def attempt(prepare):
    runtime = experiment.Runtime(checkpoint_seconds=every)
    return ended(fork(lambda: experiment.execute([(config, folder)], runtime), prepare), block=True)


for every in (0, 1000):
    died, point = 9, 1
    while died == 9:
        for phase in ("half", "after"):
            folder = out / f"{every}-{point}-{phase}"
            died = attempt(dying(point, phase))
            print(json.dumps([folder.name, died, attempt(lambda: None)]), flush=True)
        point += 1
'''
)


@pytest.mark.slow_first
def test_a_process_may_die_at_any_of_its_writes(tmp_path: Path) -> None:
    """A run that dies during or after any file write or log line resumes exactly."""
    script, out = tmp_path / "steps.py", tmp_path / "runs"
    script.write_text(STEPS)
    out.mkdir()
    code, output, err = shared().run(script, out, environment=ENVIRONMENT)
    assert (code, err) == (0, "")
    reports = [json.loads(text) for text in output.splitlines()]
    assert {died for _, died, _ in reports} == {0, 9}
    writes = {name.rpartition("-")[0] for name, died, _ in reports if died == 9}
    files = 6  # provenance, config, log, model, predictions, result
    manifests = {"0": 1 + 2 + 2, "1000": 1 + 1}  # at the start, with each save, at the end and after it
    assert len(writes) == (files + 3 + 2 + manifests["0"]) + (files + 3 + manifests["1000"])  # 3 rounds, 2 saves
    assert [name for name, _, finished in reports if finished != 0] == []
    expected = bits(out / reports[-1][0])
    assert [name for name, _, _ in reports if bits(out / name) != expected] == []


# --- P2: SIGINT and SIGTERM


def test_sigterm_saves_and_exits_with_143(stopped: tuple[int, str, Path]) -> None:
    """SIGTERM ends a run after its round with a checkpoint, a one-line message and exit code 143."""
    code, err, folder = stopped
    assert code == 143
    assert one_line(err)
    assert "saved" in err
    rounds = len(read_rounds(folder / "rounds.jsonl"))
    assert 3 <= rounds < ROUNDS
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{rounds:08d}.safetensors"]
    assert not (folder / "result.json").exists()


def test_a_run_that_sigterm_stopped_is_resumed_exactly(uninterrupted: Path, unfinished: Path) -> None:
    """`waffle resume` takes a stopped run to the bits of the uninterrupted one."""
    code, _, err = waffle("resume", unfinished, "--quiet")
    assert (code, err) == (0, "")
    assert bits(unfinished) == bits(uninterrupted)


def test_sigint_saves_and_the_same_command_resumes_even_after_a_kill(uninterrupted: Path, tmp_path: Path) -> None:
    """Ctrl-C exits with 130, and a run interrupted and then killed resumes to the uninterrupted bits."""
    folder = tmp_path / "run"
    command = run("waffle-paper", folder, "--checkpoint-seconds", "1000")
    process = start(*command)
    wait_for_rounds(process, folder, 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert one_line(err)
    saved = logged(folder)
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{saved:08d}.safetensors"]
    process = start(*command)
    wait_for_rounds(process, folder, saved + 3)
    process.kill()
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    code, _, err = waffle("resume", folder, "--quiet")
    assert (code, err) == (0, "")
    assert bits(folder) == bits(uninterrupted)


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["waffle", "run", "local", "--out", sys.argv[1]]
from waffle_fl.cli import main
main()
"""


def test_ctrl_c_while_the_program_loads_is_no_traceback(tmp_path: Path) -> None:
    """Ctrl-C while torch is imported exits with code 130 and no traceback."""
    line = [sys.executable, "-c", INTERRUPTED_IMPORT, str(tmp_path / "run")]
    done = subprocess.run(line, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode in (130, -signal.SIGINT)


# --- P3: disk full


def test_a_failed_checkpoint_write_keeps_the_previous_one(uninterrupted: Path, unfinished: Path) -> None:
    """If a checkpoint cannot be written the run exits with code 2, and the previous one is intact and resumes."""
    (before,) = unfinished.glob("checkpoint-*")
    content, rounds = before.read_bytes(), logged(unfinished)
    size = len(content) // 2
    assert size > 2 * (unfinished / "rounds.jsonl").stat().st_size
    command = run("waffle-paper", unfinished, "--checkpoint-seconds", "0")
    code, _, err = waffle(*command, limits={"RLIMIT_FSIZE": size})
    assert code == 2
    assert one_line(err)
    assert str(unfinished) in err
    assert "File too large" in err
    assert [path.name for path in unfinished.glob("*checkpoint-*")] == [before.name]
    assert before.read_bytes() == content
    assert logged(unfinished) >= rounds
    assert not (unfinished / "result.json").exists()
    assert waffle(*command)[0] == 0
    assert bits(unfinished) == bits(uninterrupted)


@contextlib.contextmanager
def disk_full(size: int) -> Iterator[None]:
    """Limit the file size of this process temporarily."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_log_write_stops_the_run(tmp_path: Path) -> None:
    """If a round cannot be logged the run stops with a WaffleError and resumes once there is space."""
    config = small_config("waffle-paper")
    finish(config, tmp_path / "uninterrupted")
    with disk_full(4000), pytest.raises(WaffleError, match=r"cannot write to .*: File too large"):
        finish(config, tmp_path / "run")
    assert 0 < len(read_rounds(tmp_path / "run" / "rounds.jsonl")) < 8
    finish(config, tmp_path / "run")
    assert bits(tmp_path / "run") == bits(tmp_path / "uninterrupted")


class Halt(Exception):
    """Raised to end a run before its last round."""


class HaltAfterRound3(Listener):
    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        if measured["round"] == 3:
            raise Halt


def test_a_log_that_cannot_be_truncated_is_kept(tmp_path: Path) -> None:
    """If the log cannot be truncated on resuming, a WaffleError is raised and nothing is lost."""
    config = small_config("waffle-paper")
    finish(config, tmp_path / "uninterrupted")
    with pytest.raises(Halt):
        execute([(config, tmp_path / "run")], Runtime(), HaltAfterRound3())
    before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    assert before.count(b"\n") == 3
    with disk_full(100), pytest.raises(WaffleError, match=r"cannot write to .*: File too large"):
        finish(config, tmp_path / "run")
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == before
    finish(config, tmp_path / "run")
    assert bits(tmp_path / "run") == bits(tmp_path / "uninterrupted")


# --- P10: the clock


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set another time zone during a test."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wall clock that goes back one day per call, a run gives the same bits and logs valid times."""
    config = small_config("waffle-paper")
    finish(config, tmp_path / "steady")
    clock = iter(range(2_000_000_000, 0, -86_400))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: float(next(clock)))
        patch.setattr(time, "time_ns", lambda: next(clock) * 10**9)
        finish(config, tmp_path / "jumping", checkpoint_seconds=0)
    assert bits(tmp_path / "jumping") == bits(tmp_path / "steady")
    assert all(0 <= line["seconds"] < 60 for line in read_rounds(tmp_path / "jumping" / "rounds.jsonl"))


def test_a_time_zone_changes_nothing(tmp_path: Path, tokyo: None) -> None:
    """Runs in different time zones give the same bits, and a run may be resumed in another zone."""
    assert time.tzname[0] == "JST"
    config = small_config("apfl")
    finish(config, tmp_path / "tokyo")
    os.environ["TZ"] = "America/Anchorage"
    time.tzset()
    finish(config, tmp_path / "anchorage")
    assert bits(tmp_path / "anchorage") == bits(tmp_path / "tokyo")
    assert finish(config, tmp_path / "tokyo")["status"] == "finished"


# --- P11: divergence

OVERFLOW = small_config("local", lr=1.0, weight_decay=3.0, rounds=400)  # each step doubles the model


def test_a_step_size_that_diverges_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`waffle run local --lr 1e38` exits with code 2 and one line that names the round and the agent."""
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["waffle", *run("local", folder, "--model", "linear", "--lr", "1e38")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert one_line(err)
    result = read_json(folder / "result.json") or {}
    assert result["status"] == "diverged"
    assert f"round {result['rounds'] + 1}: the training of Alice (agent 0) diverged" in err
    assert len(read_rounds(folder / "rounds.jsonl")) == result["rounds"]
    assert not (folder / "model.safetensors").exists()


def test_the_rounds_before_a_divergence_are_kept(tmp_path: Path) -> None:
    """A run that overflows keeps every finite round, and its result names the first non-finite one."""
    result = finish(OVERFLOW, tmp_path / "run")
    rounds = read_rounds(tmp_path / "run" / "rounds.jsonl")
    last = len(rounds)
    assert 10 < last < 400
    assert all(line["loss"] is not None for line in rounds)
    assert (result["status"], result["rounds"], result["last"]["round"]) == ("diverged", last, last)
    assert f"round {last + 1}: the training of Alice (agent 0) diverged" in result["message"]
    assert "\n" not in result["message"]
    assert read_json(tmp_path / "run" / "result.json") == result


@pytest.mark.parametrize("seconds", [0, 1000], ids=["often", "never due"])
def test_the_last_good_checkpoint_of_a_diverged_run_is_kept(tmp_path: Path, seconds: float) -> None:
    """After a divergence the state of the round before it is saved, whatever the checkpoint interval."""
    result = finish(OVERFLOW, tmp_path / "run", checkpoint_seconds=seconds)
    checkpoints = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert checkpoints[-1:] == [f"checkpoint-{result['rounds']:08d}.safetensors"]


def test_a_diverged_run_stays_diverged(tmp_path: Path) -> None:
    """Running a diverged run again trains nothing and returns the same result."""
    first = finish(OVERFLOW, tmp_path / "run")
    before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    assert finish(OVERFLOW, tmp_path / "run") == first
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == before


def simulate_runs(*specs: RunSpec, rounds: int = 6) -> list[list[Outcome]]:
    federation = specs[0].federation
    model = FlatModel(builder("linear", "synthetic", federation.shape, len(federation.class_names)))
    return list(simulate(specs, model, rounds=rounds))


def nan_update(row: int, since: int) -> Callable[[Any, int], Any]:
    """Return a function that makes an agent's update NaN from a round on."""

    def tamper(up: Any, r: int) -> Any:
        if r < since:
            return up
        dy = up.dy.clone()
        dy[row] = torch.nan
        return up._replace(dy=dy)

    return tamper


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "weight-erosion", "waffle-paper", "apfl", "ditto"])
def test_the_divergence_of_another_agent_does_not_stop_alice(method: str) -> None:
    """Agent 3's NaN updates from round 2 on are rejected and recorded, and every round of the run is finite."""
    config = small_config(method)
    spec = RunSpec(config.algorithm(), federation_of(config.settings), 1, tamper=nan_update(3, since=2))
    outcomes = [outcome for (outcome,) in simulate_runs(spec)]
    assert len(outcomes) == 6
    assert [outcome.error for outcome in outcomes] == [None] * 6
    assert "screened" not in outcomes[0].measured
    for outcome in outcomes[1:]:
        assert outcome.measured["screened"] == {"agent 3": "not finite"}
        assert outcome.measured["weights"][3] == 0
        assert sum(outcome.measured["weights"]) == pytest.approx(1, abs=1e-12)
        assert outcome.measured["loss"] is not None
    final = outcomes[-1].state
    assert all(torch.isfinite(field).all() for part in final for field in part if field.is_floating_point())


def test_the_divergence_of_one_run_does_not_affect_a_stacked_run() -> None:
    """Of two stacked runs the one whose Alice diverges in round 3 drops out; the other's bits are unchanged."""
    config = small_config("waffle-paper")
    federation = federation_of(config.settings)
    healthy = RunSpec(config.algorithm(), federation, 1)
    diverging = RunSpec(config.algorithm(), federation, 2, tamper=nan_update(0, since=3))
    alone = [outcome for (outcome,) in simulate_runs(healthy)]
    together = simulate_runs(diverging, healthy)
    assert [len(outcomes) for outcomes in together] == [2, 2, 2, 1, 1, 1]
    error = together[2][0].error
    assert error is not None
    assert "round 3: the training of Alice (agent 0) diverged" in str(error)
    stacked = [outcomes[-1] for outcomes in together]
    assert all(outcome.index == 1 and outcome.error is None for outcome in stacked)
    for a, b in zip(alone, stacked, strict=True):
        assert {**a.measured, "seconds": 0} == {**b.measured, "seconds": 0}
        assert torch.equal(a.state.server.x, b.state.server.x)
