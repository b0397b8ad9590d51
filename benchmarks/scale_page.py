"""The sections of docs/speed.md on clusters, cohorts and WAFFLE for all agents, from their records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"


def lines(name: str) -> list[dict[str, Any]]:
    """Return the lines of a record; none if it was not made."""
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *rows))


def holds(is_met: bool) -> str:
    """Return the verdict on a bar."""
    return "holds" if is_met else "**does not hold**"


def cohorts() -> str:
    """Return the section on 100,000 agents."""
    found = lines("cohorts.jsonl")
    methods = [line for line in found if line["part"].startswith("cohort ")]
    if not methods:
        return ""
    sizes = list(methods[0]["sizes"])
    rows = [
        [
            line["method"],
            *(f"{line['sizes'][n]['seconds']:.2f} ({line['sizes'][n]['cpu_seconds']:.2f})" for n in sizes),
            f"{line['seconds_ratio']:.2f} ({line['cpu_seconds_ratio']:.2f})",
            f"{line['sizes'][sizes[-1]]['states_gib']:.1f}",
            f"{line['sizes'][sizes[-1]]['peak_gib']:.2f}",
        ]
        for line in methods
    ]
    heads = [
        "method",
        *(f"{int(n):,} agents" for n in sizes),
        "largest over smallest",
        "GiB of states",
        "GiB of memory",
    ]
    wall = max(line["seconds_ratio"] for line in methods)
    cpu = max(line["cpu_seconds_ratio"] for line in methods)
    memory = max(line["sizes"][sizes[-1]]["peak_gib"] for line in methods)
    loads = [line["load"] for line in methods]
    text = f"""
## Cohorts of 100 of up to {int(sizes[-1]):,} agents

`python -m benchmarks.cohorts`

LeNet-5, MNIST, 32 samples per agent, drawn by index; the states of all agents are on disk. Seconds per round on one
core, with CPU seconds in parentheses; states and memory are those of {int(sizes[-1]):,} agents. Every agent has a saved
state from the start. The files are sparse, so rows that were not written in these rounds are not read from the disk.

{table(heads, rows)}
A round of any size takes at most 1.3 times as long as the shortest: by CPU time this {holds(cpu <= 1.3)} (at most
{cpu:.2f}), by the wall clock it {holds(wall <= 1.3)} (at most {wall:.2f}; the load of the machine was {min(loads)} to
{max(loads)} on two cores). The memory of the process is at most {memory:.2f} GiB, with the samples of MNIST; the bar is
2 GiB more than the states take on disk.
"""
    return text + _cohort_peers(next((line for line in found if line["part"] == "peers"), None))


def _cohort_peers(line: dict[str, Any] | None) -> str:
    if not line:
        return ""
    rows = [[name, f"{seconds:.2f}"] for name, seconds in line["seconds"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    ratios = ", ".join(
        f"{disk} and {memory} times {name}" for name, (disk, memory) in line["times_faster_than"].items()
    )
    start_up = ", ".join(f"{name} {seconds} s" for name, seconds in line["start_up_seconds"].items())
    return f"""
FedAvg with a cohort of {line["cohort"]} of {line["agents"]:,} agents, beside {versions}, each with two processes of one
thread in turns with ours (load {line["load"]}):

{table(["implementation", "seconds per round"], rows)}
With states on disk and in memory, ours is {ratios} as fast. Start-up, not included: {start_up}.
"""


def cluster() -> str:
    """Return the section on Ray."""
    found = lines("cluster.jsonl")
    if not found:
        return ""
    (line,) = found
    sides = list(line["seconds"])
    rows = [
        [
            side,
            f"{line['seconds'][side]:.1f}",
            f"{line['cpu_seconds'][side]:.1f}",
        ]
        for side in sides
    ]
    turns, calls = len(line["all_seconds"][sides[0]]), line["calls"]
    guide = f"by up to {_spread(line):.2f} times, so they are a rough guide only.\n"
    spread = f"CPU seconds of one side differ between turns {guide}" if turns > 1 else ""
    added = f", and the same with `--add` {calls - 1} times" if calls > 1 else ""
    overhead = f"{line['overhead']:.2f} by the clock, {line['overhead_cpu']:.2f} by CPU time"
    bars = [
        ["two nodes take at most 1.05 times as long as the local engine", overhead, holds(line["overhead"] <= 1.05)],
        ["two nodes are at least 1.8 times one", f"{line['scaling']:.2f} by the clock", holds(line["scaling"] >= 1.8)],
    ]
    return f"""
## A study of {line["runs"]} runs on Ray

`python -m benchmarks.cluster --rounds {line["rounds"]} --turns {turns // calls}`{added}

Digits, MLP, 4 methods x 5 splits x 5 seeds, {line["rounds"]} rounds. The local engine uses two cores, the nodes of a
cluster on loopback have one core each. All processes of a node are bound to its core (`os.sched_setaffinity`: Linux
only, and in this benchmark only); the head of the cluster and the driver may use both cores. Each side starts for its
turn, with a study of a few rounds that is not counted. Medians of {turns} turn{"s" * (turns > 1)}.

{table(["side", "seconds", "CPU seconds"], rows)}
{table(["bar", "measured", "verdict"], bars)}
{spread}The load at the start of a turn was {min(line["load"])} to {max(line["load"])} on two cores. Starting a cluster
took {line["cluster_start_up_seconds"]["two nodes"]:.0f} s, which is not included.
"""


def _spread(line: dict[str, Any]) -> float:
    """Return the largest ratio of the CPU seconds of two turns of one side."""
    return max(max(turns) / min(turns) for turns in line["all_cpu_seconds"].values())


def for_all() -> str:
    """Return the section on WAFFLE for all agents at once."""
    found = {line["part"]: line for line in lines("waffle-for-all.jsonl")}
    if not found:
        return ""
    accuracy, costs = found["accuracy"]["accuracy"], found["accuracy"]["minus_waffle_for_every_alice"]
    names = list(next(iter(accuracy.values())))
    rows = [[name, *(f"{accuracy[split][name]:.1f}" for split in accuracy)] for name in names]
    growth = ", ".join(f"{int(n):,}: {ms:.2f}" for n, ms in found["growth"]["cpu_ms_per_agent_and_round"].items())
    ten = costs["WAFFLE for all, 10 near agents"]
    differences = ", ".join(f"{ten[split]:+.1f} on {split}" for split in ten)
    return f"""
## A model for every agent in linear time

`python -m benchmarks.waffle_for_all`

WAFFLE for each of N Alices takes N x N trainings per round.
[`waffle_fl.algorithms.waffle_for_all:WaffleForAll`](algorithms/waffle-paper.md#for-all-agents-at-once) takes N.
Accuracy in percent over the test samples of all agents: digits, 20 agents with 30 samples each, 50 rounds, last round,
two seeds, nothing tuned.

{table(["method", *accuracy], rows)}
With 10 near agents it differs from WAFFLE for every Alice by {differences} points. CPU
milliseconds per agent and round by the number of agents, with 10 near agents: {growth}.
"""
