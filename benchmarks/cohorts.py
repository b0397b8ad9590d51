"""Cost of a round by the number of agents, with a cohort of 100 and the states of all agents on disk.

    python -m benchmarks.cohorts --out results/cohorts.jsonl

LeNet-5, MNIST, split C, 32 samples per agent drawn by index, batch 32, one epoch, one core: six methods with 1,000,
10,000 and 100,000 agents. Every agent has a saved state from the start, so each round reads and writes 100 of them; the
files are sparse, because 100,000 states take 25 GB. Each size runs in a process of its own. The sizes take turns, round
by round, and the median counts, of the wall clock and of the process's CPU time. The part `peers` is FedAvg beside
Flower's simulation and pfl-research, which sample 100 of 1,000 agents per round, if `make bench` has installed them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.peers import cohort_peers, installed
from waffle_fl import APFL, SGD, Ditto, FedAvg, FlatModel, RunSpec, Scaffold, WafflePaper, WeightErosion, simulate
from waffle_fl.config import Settings
from waffle_fl.engines.row_store import RowStore, StoredAgents, initial_rows
from waffle_fl.engines.run_spec import Outcome, State
from waffle_fl.engines.tree import tree_map
from waffle_fl.experiment import federation_of
from waffle_fl.federation import Federation
from waffle_fl.models import LeNet5

SIZES = (1_000, 10_000, 100_000)
METHODS = {
    "fedavg": FedAvg,
    "scaffold": Scaffold,
    "waffle-paper": WafflePaper,
    "weight-erosion": WeightErosion,
    "ditto": Ditto,
    "apfl": APFL,
}
COHORT, SAMPLES, WARM, ROUNDS = 100, 32, 3, 11
PEERS_OF = 1_000  # agents of the peers' part
FLAT = 1.3  # largest cost of a round over the smallest, among the sizes
GIB = 1 << 30


class Cost(NamedTuple):
    """One round of one size."""

    seconds: float
    cpu_seconds: float


def federation_with(agents: int) -> Federation:
    """Return agents that draw their samples of MNIST by index, with one test sample each."""
    s = Settings(data="mnist", split="C", agents=agents, division="drawn", samples_per_agent=SAMPLES)
    return federation_of(s)


def filled(spec: RunSpec, model: FlatModel, store: RowStore) -> State:
    """Return a state in which every agent has a row in the store: that of an agent that has not trained."""
    server, initial = initial_rows(spec.algorithm, model.init(spec.seed), spec.federation.agents)
    agents = spec.federation.agents
    blank = StoredAgents(torch.full((agents,), -1), torch.zeros(agents, dtype=torch.int64))
    zeros = tree_map(torch.zeros_like, initial)
    stored = store.write(blank, [0], zeros)
    if not len(stored.slots[stored.slots >= 0]):
        return State(server, stored)  # the method has no states of agents
    full = StoredAgents(torch.arange(agents), stored.digests[:1].expand(agents).clone())
    size = sum(field[:1].numel() * field.element_size() for field in initial)
    _extend(store.folder, agents, size)
    return State(server, full)


def _extend(folder: Path, agents: int, size: int) -> None:
    """Extend the files of a store to the rows of all agents; what was not written reads as zeros and takes no space."""
    from waffle_fl.engines.row_store import FILE_BYTES

    per_file = max(1, FILE_BYTES // size)
    for number in range(-(-agents // per_file)):
        path = folder / f"rows-{number:06d}.bin"
        path.touch()
        os.truncate(path, min(per_file, agents - number * per_file) * size)


def serve(pipe: Connection, agents: int, folder: Path) -> None:
    """Run rounds on request in a process of this size."""
    torch.set_num_threads(1)
    federation, model = federation_with(agents), FlatModel(LeNet5)
    while (name := pipe.recv()) is not None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory starts anew
        store = RowStore(folder / f"{name}-{agents}")
        spec = RunSpec(METHODS[name](SGD(0.05)), federation, 1, store=store)
        state = filled(spec, model, store)
        store.close()
        store = RowStore(store.folder)
        stream = _stream(RunSpec(spec.algorithm, federation, 1, state, store=store), model, agents)
        pipe.send(None)
        while pipe.recv():
            wall, cpu = time.perf_counter(), time.process_time()
            next(stream)
            pipe.send(Cost(time.perf_counter() - wall, time.process_time() - cpu))
        needs = int(state.agents.slots.max() + 1) * _row_bytes(spec, model)
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        pipe.send((int(peak.split()[1]) * 1024, needs))
        store.delete()


def _row_bytes(spec: RunSpec, model: FlatModel) -> int:
    _, initial = initial_rows(spec.algorithm, model.init(spec.seed), spec.federation.agents)
    return sum(field[:1].numel() * field.element_size() for field in initial)


def _stream(spec: RunSpec, model: FlatModel, agents: int) -> Iterator[list[Outcome]]:
    return simulate([spec], model, rounds=WARM + ROUNDS + 1, participation=COHORT / agents, workers=1)


def methods(names: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the costs of each method by size."""
    context = get_context("spawn")
    with ExitStack() as stack:
        pipes = {}
        for agents in SIZES:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, agents, folder), daemon=True)
            process.start()
            stack.callback(process.join, 60)
            stack.callback(ours.send, None)
            pipes[agents] = ours
        for name in names:
            yield _method(name, pipes)


def _method(name: str, pipes: dict[int, Connection]) -> dict[str, Any]:
    for pipe in pipes.values():
        pipe.send(name)
        pipe.recv()
    costs: dict[int, list[Cost]] = {agents: [] for agents in pipes}
    for _ in range(WARM + ROUNDS):
        for agents, pipe in pipes.items():
            pipe.send(True)
            costs[agents].append(pipe.recv())
    sizes = {}
    for agents, pipe in pipes.items():
        pipe.send(False)
        peak, states = pipe.recv()
        counted = costs[agents][WARM:]
        sizes[str(agents)] = {
            "seconds": round(median(cost.seconds for cost in counted), 4),
            "cpu_seconds": round(median(cost.cpu_seconds for cost in counted), 4),
            "peak_gib": round(peak / GIB, 2),
            "states_gib": round(states / GIB, 3),
        }
    return {"method": name, "sizes": sizes} | {
        f"{key}_ratio": round(max(values) / min(values), 3)
        for key in ("seconds", "cpu_seconds")
        if (values := [size[key] for size in sizes.values()])
    }


def peers(folder: Path) -> dict[str, Any]:
    """Return the seconds of a round of FedAvg, in turns with each peer: two processes of one thread on each side.

    Ours twice: with the engine of the other parts, which keeps states on disk, and with that for states in memory.
    """
    federation, model = federation_with(PEERS_OF), FlatModel(LeNet5)
    rounds = WARM + ROUNDS
    found: dict[str, Any] = {"versions": {}, "seconds": {}, "times_faster_than": {}, "start_up_seconds": {}}
    stores = {"on disk": RowStore(folder / "peers"), "in memory": None}
    for peer in cohort_peers("lenet5", federation, model.init(1).params, COHORT, rounds + 1):
        streams = {
            f"ours, states {place}, in turns with {peer.name}": simulate(
                [RunSpec(FedAvg(SGD(0.05)), federation, 1, store=store)],
                model,
                rounds=rounds + 1,
                participation=COHORT / PEERS_OF,
                workers=2,
            )
            for place, store in stores.items()
        }
        took: dict[str, list[float]] = {name: [] for name in (*streams, peer.name)}
        for _ in range(rounds):
            for name, stream in streams.items():
                began = time.perf_counter()
                next(stream)
                took[name].append(time.perf_counter() - began)
            took[peer.name].append(peer.round())
        for stream in streams.values():
            stream.close()  # type: ignore[attr-defined]
        middle = {name: median(seconds[WARM:]) for name, seconds in took.items()}
        found["seconds"] |= {name: round(seconds, 4) for name, seconds in middle.items()}
        found["times_faster_than"][peer.name] = [round(middle[peer.name] / middle[name], 2) for name in streams]
        found["versions"][peer.name] = peer.version
        found["start_up_seconds"][peer.name] = round(peer.start_up_seconds, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/cohorts.jsonl"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the states are kept")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--parts", nargs="*", choices=("methods", "peers"), default=("methods", "peers"))
    given = parser.parse_args()
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    lines = {line["part"]: line for line in known}
    folder = Path(tempfile.mkdtemp(dir=given.folder, prefix="cohorts-"))
    try:
        for line in methods(given.methods, folder) if "methods" in given.parts else ():
            lines[f"cohort {line['method']}"] = {"part": f"cohort {line['method']}", **machine, **_with_load(line)}
            _write(given.out, lines)
        if "peers" in given.parts and installed():
            found = {"agents": PEERS_OF, "cohort": COHORT, **_with_load(peers(folder))}
            lines["peers"] = {"part": "peers", **machine, **found}
            _write(given.out, lines)
    finally:
        shutil.rmtree(folder)
    for line in lines.values():
        print(json.dumps(line))
    print("smallest ratio over its bar:", smallest(list(lines.values())))


def smallest(lines: list[dict[str, Any]]) -> float:
    """Return the smallest ratio over its bar: rounds as long for all sizes, and no longer than those of the peers."""
    flat = [FLAT / line["seconds_ratio"] for line in lines if "seconds_ratio" in line]
    faster = [ratio for line in lines for both in line.get("times_faster_than", {}).values() for ratio in both]
    return round(min([*flat, *faster]), 3)


def _with_load(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"load": round(os.getloadavg()[0], 1)}


def _write(path: Path, lines: dict[str, dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))


if __name__ == "__main__":
    main()
