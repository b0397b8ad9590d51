"""A study of 100 runs on Ray beside the local engine, and on two nodes beside one of half the cores.

    python -m benchmarks.cluster --out results/cluster.jsonl

Digits, MLP, 4 methods x 5 splits x 5 seeds. The local engine has two cores; a Ray cluster has one or two nodes on
loopback with one core each, beside a head without cores. All processes of a node, its raylet and its workers, are bound
to the node's core, on Linux and in this benchmark only; the head and the driver may use every core. The sides take
turns, each in a process of its own that starts for the turn, so that no idle cluster disturbs another side. A study of
a few rounds, which is not counted, starts the workers. Medians are compared. The CPU time is that of all processes of a
side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from waffle_fl.config import Experiment, Settings
from waffle_fl.experiment import Listener, Runtime, execute, plan
from waffle_fl.ray_cluster import connection

SIDES = {"local engine": 0, "two nodes": 2, "one node": 1}
GRID: dict[str, Any] = {
    "methods": ("fedavg", "waffle-paper", "ditto", "apfl"),
    "splits": ("A", "B", "C", "A*", "B*"),
    "seeds": (1, 2, 3, 4, 5),
}
BARS = {"overhead": 1.05, "scaling": 1.8}
WARM_UP = 10  # rounds of the study that starts the workers
TICKS = os.sysconf("SC_CLK_TCK")


def serve(pipe: Connection, nodes: int, rounds: int, folder: Path) -> None:
    """Start a side and warm it up; on request run the study, and report seconds and CPU seconds of all processes."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    with ExitStack() as stack:
        runtime = Runtime(device="cpu", workers=2)
        if nodes:
            os.environ.update(RAY_worker_niceness="0")  # that of the local engine
            connection.require_ray()
            head = {"num_cpus": 0, "include_dashboard": False, **free_ports()}
            cluster = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
            stack.callback(cluster.shutdown)
            for core in sorted(os.sched_getaffinity(0))[:nodes]:
                with bound_to(core):
                    cluster.add_node(num_cpus=1, **free_ports())
            cluster.wait_for_nodes()
            runtime = Runtime(device="cpu", workers=1, on="ray", address=cluster.address)
            connection.connect(cluster.address)
            stack.callback(connection.require_ray().shutdown)
        start_up = time.perf_counter() - began
        study(WARM_UP, folder / "warm-up", runtime)
        pipe.send(start_up)
        pipe.recv()
        before, cpu = time.perf_counter(), cpu_seconds(os.getpid())
        study(rounds, folder / "study", runtime)
        used = sum(spent - cpu.get(one, 0.0) for one, spent in cpu_seconds(os.getpid()).items())
        pipe.send((time.perf_counter() - before, used))


def study(rounds: int, folder: Path, runtime: Runtime) -> None:
    """Train all runs of the grid."""
    experiment = Experiment(**GRID, settings=Settings(data="digits", batch_size=16, rounds=rounds))
    results = execute(plan(experiment, folder), runtime, Listener())
    assert all(result["status"] == "finished" for result in results)


@contextmanager
def bound_to(core: int) -> Iterator[None]:
    """Bind the processes that start inside, and their children, to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_ports() -> dict[str, int]:
    """Return ports of the agents of a node. A busy node that chooses them itself gives up after 30 s."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}


def cpu_seconds(root: int) -> dict[int, float]:
    """Return the CPU time of a process and each of its descendants, with that of the children that have ended."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        process = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(process)
        used[process] = sum(map(int, fields[11:15])) / TICKS
    waiting, found = [root], {}
    while waiting:
        process = waiting.pop()
        found[process] = used.get(process, 0.0)
        waiting += children.get(process, [])
    return found


def measure(rounds: int, turns: int, folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Return the medians of all sides, and the two ratios, of these turns and those of a record with as many rounds."""
    context = get_context("spawn")
    seconds: dict[str, list[float]] = {name: list(known.get("all_seconds", {}).get(name, [])) for name in SIDES}
    cpu: dict[str, list[float]] = {name: list(known.get("all_cpu_seconds", {}).get(name, [])) for name in SIDES}
    start_up: dict[str, float] = {}
    loads: list[float] = list(known.get("load", []))
    for turn in range(turns):
        for name, nodes in SIDES.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, nodes, rounds, folder / f"{turn}" / name))
            process.start()
            start_up[name] = round(ours.recv(), 1)
            loads.append(round(os.getloadavg()[0], 1))
            ours.send(None)
            took, used = ours.recv()
            process.join()
            seconds[name].append(round(took, 2))
            cpu[name].append(round(used, 2))
            print(turn, name, seconds[name][-1], cpu[name][-1], flush=True)
    middle = {name: median(values) for name, values in seconds.items()}
    work = {name: median(values) for name, values in cpu.items()}
    return {
        "runs": 100,
        "calls": known.get("calls", 0) + 1,
        "rounds": rounds,
        "seconds": middle,
        "cpu_seconds": work,
        "cluster_start_up_seconds": start_up,
        "all_seconds": seconds,
        "all_cpu_seconds": cpu,
        "load": loads,
        "overhead": round(middle["two nodes"] / middle["local engine"], 3),
        "overhead_cpu": round(work["two nodes"] / work["local engine"], 3),
        "scaling": round(middle["one node"] / middle["two nodes"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/cluster.jsonl"))
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--add", action="store_true", help="add the turns to those of the record")
    given = parser.parse_args()
    known = json.loads(given.out.read_text()) if given.add else {}
    if known and known["rounds"] != given.rounds:
        parser.error(f"expected the record's {known['rounds']} rounds with --add, got {given.rounds}")
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as folder:
        line = {"part": "cluster", **machine, **measure(given.rounds, given.turns, Path(folder), known)}
    given.out.write_text(json.dumps(line) + "\n")
    print(json.dumps(line, indent=2))
    ratios = BARS["overhead"] / line["overhead"], line["scaling"] / BARS["scaling"]
    print("smallest ratio over its bar:", round(min(ratios), 3))


if __name__ == "__main__":
    main()
