"""A Ray cluster of three nodes on loopback: a node is killed, Ctrl-C, and every command that trains on a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster import free_ports

from cli_support import strict, toml, waffle
from records_support import bits
from test_ray_cluster import CPU, Recorder, grid
from waffle_fl.config import RunConfig
from waffle_fl.experiment import Runtime, execute
from waffle_fl.ray_cluster import connection
from waffle_fl.ray_cluster.driver import execute_on_ray

pytestmark = pytest.mark.cluster


class Nodes:
    """Three nodes with one core each; the first one is the head and the driver's."""

    def __init__(self) -> None:
        connection.require_ray()
        self.cluster: Any = import_module("ray.cluster_utils").Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **free_ports()}
        )
        self.others = [self.cluster.add_node(num_cpus=1, **free_ports()) for _ in range(2)]
        self.cluster.wait_for_nodes()

    @property
    def runtime(self) -> Runtime:
        return Runtime(device="cpu", checkpoint_seconds=0, on="ray", address=self.cluster.address)

    def kill_one(self) -> None:
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)

    def restore(self) -> None:
        while len(self.others) < 2:
            self.others.append(self.cluster.add_node(num_cpus=1, **free_ports()))
        self.cluster.wait_for_nodes()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    connection.require_ray().shutdown()
    connection._connected.clear()
    found.cluster.shutdown()


class Killer(Recorder):
    """Kills a node once the runs have made some rounds in total."""

    def __init__(self, nodes: Nodes, after: int) -> None:
        super().__init__()
        self.nodes, self.after = nodes, after

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        super().advanced(config, measured)
        if self.after and self.rounds.total() >= self.after:
            self.after = 0
            self.nodes.kill_one()


@pytest.mark.parametrize("shares_disk", [True, False])
def test_a_killed_node_loses_no_run(shares_disk: bool, nodes: Nodes, tmp_path: Path) -> None:
    """The runs of a killed node continue on others, with the bits of one machine and every round reported once."""
    nodes.restore()
    methods, settings = ("fedavg", "waffle-paper", "apfl", "ditto"), {"rounds": 150, "samples_per_agent": 40}
    alone, there = (grid(tmp_path / name, methods, **settings) for name in ("alone", "there"))
    execute(alone, CPU)
    listener = Killer(nodes, after=400)
    results = execute_on_ray(there, nodes.runtime, listener, shares_disk=shares_disk)
    assert [result["status"] for result in results] == ["finished"] * 8
    assert len(nodes.others) == 1
    assert any("a worker was lost" in note for note in listener.notes)
    assert [bits(folder) for _, folder in there] == [bits(folder) for _, folder in alone]
    assert set(listener.rounds.values()) == {150}


def test_ctrl_c_leaves_a_study_resumable(nodes: Nodes, here: Path) -> None:
    """`waffle bench --on ray` stops after Ctrl-C with every run saved; the same command finishes the study."""
    nodes.restore()
    file = toml(here, 'methods = ["fedavg", "waffle-paper"]\nseeds = [1, 2, 3]\nrounds = 600\nsamples_per_agent = 40\n')
    flags = [
        "bench",
        str(file),
        "--out",
        "runs/grid",
        "--on",
        "ray",
        "--address",
        nodes.cluster.address,
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "waffle_fl", *flags], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    logs = here / "runs" / "grid"
    while process.poll() is None and len(list(logs.glob("*/rounds.jsonl"))) < 3:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert list(logs.glob("*/checkpoint-*.safetensors"))
    assert not list(logs.parent.rglob(".ray-*"))
    shown = waffle(*flags, "--quiet", "--json")
    assert shown.code == 0, shown.err
    assert {run["status"] for run in strict(shown.out)["runs"]} == {"finished"}


def test_every_command_that_trains_runs_on_a_cluster(nodes: Nodes, here: Path) -> None:
    """`tune` and `decide` give the results of one machine."""
    where = ("--on", "ray", "--address", nodes.cluster.address)
    few = ("--device", "cpu", "--rounds", "8", "--samples-per-agent", "20", "--quiet", "--json")
    found = {}
    for name, flags in {"here": (), "there": where}.items():
        tuned = waffle("tune", "fedprox", "--trials", "4", *few, "--out", f"tune-{name}", *flags)
        assert tuned.code == 0, tuned.err
        decided = waffle(
            "decide", "digits", "--methods", "fedavg", "--seeds", "1", "--agents", "3", "--partners", "none",
            *few, "--out", f"decide-{name}", *flags,
        )  # fmt: skip
        assert decided.code == 0, decided.err
        found[name] = [json.loads(shown.out.replace(name, "")) for shown in (tuned, decided)]
    assert found["here"] == found["there"]
