"""Runs on a Ray cluster: the bits of one machine, one listener, and no run lost with its worker."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import waffle_fl
from cli_support import refusal, strict, toml, waffle
from records_support import bits
from waffle_fl.config import RunConfig, check_run
from waffle_fl.errors import Interrupted, WaffleError
from waffle_fl.experiment import Listener, Runtime, execute
from waffle_fl.experiment.grouping import stacks_of
from waffle_fl.experiment.prepared_run import prepare
from waffle_fl.ray_cluster import connection
from waffle_fl.ray_cluster.driver import execute_on_ray
from waffle_fl.ray_cluster.folder_copies import fill_folder, read_folder, write_changes

ROOT = Path(__file__).parent.parent
CPU = Runtime(device="cpu", workers=1, checkpoint_seconds=0)
ON_RAY = Runtime(device="cpu", workers=1, checkpoint_seconds=0, on="ray", address="local")
SMALL: dict[str, Any] = {"data": "digits", "rounds": 4, "samples_per_agent": 20, "agents": 4}
FATAL = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from waffle_fl import FedAvg

@dataclass(frozen=True)
class Fatal(FedAvg):
    '''FedAvg that once kills its process in round 3.'''
    def aggregate(self, server, up, now):
        if now.r == 3 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return FedAvg.aggregate(self, server, up, now)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of one node on this machine, which no other process joins."""
    yield connection.connect("local")
    connection.require_ray().shutdown()
    connection._connected.clear()


class Recorder(Listener):
    """Counts what it receives."""

    def __init__(self) -> None:
        self.rounds: Counter[str] = Counter()
        self.started: dict[str, int] = {}
        self.ends: list[str] = []
        self.notes: list[str] = []

    def resumed(self, config: RunConfig, start: int) -> None:
        self.started[config.label] = start

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        self.rounds[config.label] += 1

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        self.ends.append(config.label)

    def warned(self, message: str) -> None:
        self.notes.append(message)


def grid(out: Path, methods: Sequence[str] = ("fedavg", "waffle-paper", "apfl"), **settings: Any) -> list[Any]:
    configs = [check_run(m, {**SMALL, "seed": seed, **settings}, {}) for m in methods for seed in (1, 2)]
    return [(config, out / config.label) for config in configs]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The bits of each run of the grid on this machine."""
    runs = grid(tmp_path_factory.mktemp("local"))
    execute(runs, CPU)
    return {folder.name: bits(folder) for _, folder in runs}


@pytest.mark.parametrize("shares_disk", [True, False])
def test_a_cluster_gives_the_bits_of_one_machine(
    shares_disk: bool, cluster: Any, local: dict[str, Any], tmp_path: Path
) -> None:
    """Paused runs continue on the cluster, with or without its disk; one listener receives every round once."""
    runs, listener = grid(tmp_path), Recorder()
    execute(runs[:3], CPU, until=2)
    results = execute_on_ray(runs, ON_RAY, listener, shares_disk=shares_disk)
    assert [result["status"] for result in results] == ["finished"] * 6
    assert {folder.name: bits(folder) for _, folder in runs} == local
    assert listener.started == dict.fromkeys([folder.name for _, folder in runs[:3]], 2)
    assert {name: n + listener.started.get(name, 0) for name, n in listener.rounds.items()} == dict.fromkeys(local, 4)
    assert sorted(listener.ends) == sorted(local)
    assert {path.name for path in tmp_path.iterdir()} == set(local)  # the marker file is gone
    assert execute(runs, CPU) == results  # finished folders pass every check on this machine
    assert execute_on_ray(runs, ON_RAY, Recorder()) == results


def test_a_killed_worker_loses_no_run(
    cluster: Any,
    local: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs whose worker is killed continue from their checkpoints; no round is reported twice."""
    (tmp_path / "fatal.py").write_text(FATAL)
    monkeypatch.chdir(tmp_path)
    runs, listener = grid(tmp_path / "runs", ["fatal:Fatal"]), Recorder()
    results = execute(runs, ON_RAY, listener)
    assert [result["status"] for result in results] == ["finished"] * 2
    assert (tmp_path / "killed").exists()
    assert any("worker was lost" in note for note in listener.notes)
    assert dict(listener.rounds) == {folder.name: 4 for _, folder in runs}
    twins = [local[f"digits-C-fedavg-{seed}"] for seed in (1, 2)]
    assert [bits(folder)[0] for _, folder in runs] == [model for model, _ in twins]
    assert capsys.readouterr() == ("", "")
    sys.modules.pop("fatal", None)


class CtrlC(Recorder):
    """Presses Ctrl-C once every run has made a round."""

    def __init__(self, runs: int) -> None:
        super().__init__()
        self.runs = runs

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        super().advanced(config, measured)
        if len(self.rounds) == self.runs:
            self.runs = 0
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("shares_disk", [True, False])
def test_a_stopped_driver_leaves_every_run_resumable(shares_disk: bool, cluster: Any, tmp_path: Path) -> None:
    """After Ctrl-C all runs are saved after their round, and continue from it on another engine."""
    runs = grid(tmp_path / "runs", ["ditto"], rounds=5000)
    with pytest.raises(Interrupted):
        execute_on_ray(runs, ON_RAY, CtrlC(len(runs)), shares_disk=shares_disk)
    rounds = [len((folder / "rounds.jsonl").read_text().splitlines()) for _, folder in runs]
    assert all(0 < r < 5000 for r in rounds)
    listener = Recorder()
    execute(runs, CPU, listener, until=max(rounds) + 1)
    assert sorted(listener.started.values()) == sorted(rounds)


def test_a_core_trains_one_task_at_a_time(cluster: Any, tmp_path: Path) -> None:
    """A task keeps its core while it reports, so no more tasks train at once than the cluster has cores."""
    cores = sum(cluster.cpus())
    configs = [check_run("fedavg", {**SMALL, "rounds": 1500, "seed": seed}, {}) for seed in range(1, 3 * cores + 1)]
    runs = [(config, tmp_path / str(config.settings.seed)) for config in configs]
    execute(runs, replace(ON_RAY, stack=1))
    times = [tuple((folder / name).stat().st_mtime for name in ("config.json", "result.json")) for _, folder in runs]
    assert max(sum(start <= begin < end for start, end in times) for begin, _ in times) <= cores


def test_mistakes_end_in_one_line(cluster: Any, tmp_path: Path) -> None:
    """A GPU that no node has, more cores than a node has, a folder in use: one line, and no task starts."""
    runs = grid(tmp_path / "runs", ["fedavg"])
    for changed, text in [
        ({"device": "cuda"}, "the cluster has no GPU"),
        ({"device": "cuda:1"}, "device: expected auto, cpu or cuda with --on ray"),
        ({"workers": 1000}, "workers: expected at most"),
    ]:
        with pytest.raises(WaffleError, match=text):
            execute(runs, Runtime(**{**vars(ON_RAY), **changed}))
    with pytest.raises(WaffleError, match="only with --on ray"):
        execute(runs, Runtime(device="cpu", address="local"))


def test_the_command_line_reaches_a_cluster(cluster: Any, here: Path) -> None:
    """`--on ray` prints what a run on one machine prints."""
    flags = ("fedavg", "--rounds", "2", "--samples-per-agent", "20", "--device", "cpu", "--quiet", "--json")
    shown = waffle("run", *flags, "--out", "there", "--on", "ray", "--address", "local")
    assert shown.code == 0, shown.err
    assert strict(shown.out) == {**strict(waffle("run", *flags, "--out", "here").out), "run": "there"}


def test_runs_are_divided_among_workers(tmp_path: Path) -> None:
    """One worker gets the stacks of one machine; several get small stacks of about one size, all runs once."""
    configs = [check_run(m, {**SMALL, "seed": seed}, {}) for m in ("fedavg", "pfedme") for seed in range(40)]
    prepared = [prepare(config, tmp_path, CPU, torch.device("cpu")) for config in configs]
    assert [len(stack) for stack in stacks_of(prepared, 32)] == [32, 8, 32, 8]
    assert [len(stack) for stack in stacks_of(prepared, 64, workers=2)] == [20, 20] * 2
    assert [len(stack) for stack in stacks_of(prepared[:3], 64, workers=8)] == [1, 1, 1]
    divided = [run.config for stack in stacks_of(prepared, 64, workers=100) for run in stack]
    assert sorted(map(str, divided)) == sorted(map(str, configs))


def test_stacks_that_train_longest_come_first(tmp_path: Path) -> None:
    """Runs that another run carries add no work: FedAvg's agents are trained by Ditto, whose stack comes last here."""
    sizes = {"fedavg": 12, "ditto": 12, "pfedme": 15}
    configs = [check_run(m, {**SMALL, "seed": seed}, {}) for m, count in sizes.items() for seed in range(count)]
    prepared = [prepare(config, tmp_path, CPU, torch.device("cpu")) for config in configs]
    found = [[run.config.method for run in stack] for stack in stacks_of(prepared, 64, workers=2)]
    assert found == [["pfedme"] * 15, ["ditto", "fedavg"] * 12]


def test_a_worker_writes_only_files_of_a_run(tmp_path: Path) -> None:
    """The driver writes no file of another name or place."""
    for name in ("../config.json", "run.py", "checkpoint-1.safetensors"):
        with pytest.raises(WaffleError, match="expected a file of a run folder"):
            write_changes(tmp_path / "run", {name: b""}, [])
    assert not list(tmp_path.glob("*.json"))


def test_a_changed_checkpoint_is_not_continued_elsewhere(tmp_path: Path) -> None:
    """A worker checks the files that it gets against the manifest, as a machine that resumes a run does."""
    ((config, folder),) = grid(tmp_path / "runs", ["fedavg"])[:1]
    execute([(config, folder)], CPU, until=2)
    files, _ = read_folder(folder)
    fill_folder(tmp_path / "copy", files, force=False)
    files["checkpoint-00000002.safetensors"] += b"x"
    with pytest.raises(WaffleError, match="changed or damaged"):
        fill_folder(tmp_path / "changed", files, force=False)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """Without Ray the command says what to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    file = toml(here, 'methods = ["fedavg"]\nrounds = 1\nsamples_per_agent = 20\n')
    assert 'pip install "waffle-fl[ray]"' in refusal(waffle("bench", file, "--on", "ray"))


def test_a_wrong_address_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """A misspelt address is reported at once, wherever it comes from: Ray would try to connect for minutes."""
    file = toml(here, 'methods = ["fedavg"]\nrounds = 1\nsamples_per_agent = 20\n')
    for address, text in [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://[::1]:1", "no Ray cluster answers at"),
        ("127.0.0.1:99999", "no Ray cluster answers at"),
        ("6379", "expected the address of a Ray cluster such as"),
    ]:
        assert f"--address: {text}" in refusal(waffle("bench", file, "--on", "ray", "--address", address))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "RAY_ADDRESS: no Ray cluster" in refusal(waffle("bench", file, "--on", "ray"))


def test_the_page_shows_the_files_of_schedulers() -> None:
    """docs/how-to/cluster.md has the files of packaging/ray as they are; shell and YAML can be read."""
    page = (ROOT / "docs" / "how-to" / "cluster.md").read_text()
    for path in (ROOT / "packaging" / "ray").iterdir():
        assert path.read_text() in page
    assert subprocess.run(["bash", "-n", ROOT / "packaging" / "ray" / "slurm.sh"], check=False).returncode == 0
    job = yaml.safe_load((ROOT / "packaging" / "ray" / "rayjob.yaml").read_text())
    groups = [job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert container["volumeMounts"] == [{"name": "study", "mountPath": "/study"}]
        assert waffle_fl.__version__ in container["image"]
