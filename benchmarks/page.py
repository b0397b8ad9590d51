"""Write docs/speed.md and the tables of docs/examples/digits.md from the records: python -m benchmarks.page"""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks import batches, scale_page
from benchmarks.cpu import BARS
from waffle_fl.report.tables import to_markdown
from waffle_fl.results import read_runs

ROOT = Path(__file__).parent.parent
DELETED = ("look-ahead", "eight steps per graph")


def records(name: str) -> dict[str, Any]:
    """Return the lines of a record by part."""
    lines = (ROOT / "results" / name).read_text(encoding="utf-8").splitlines()
    return {line["part"]: line for line in map(json.loads, lines)}


def page() -> str:
    """Return docs/speed.md."""
    gpu, cpu = records("speed-gpu.jsonl"), records("speed-cpu.jsonl")
    table, steps, loop, agents, repeat = (gpu[part] for part in ("table", "steps", "loop", "agents", "repeat"))
    dla = gpu["dla"]
    methods = "".join(f"| {m} | {s} |\n" for m, s in table["ended_after_seconds"].items())
    sizes = "".join(
        f"| {n} | {agents[n]['ms_an_agent_and_round']} | {agents[n]['peak_gib']} |\n" for n in ("10", "100", "1000")
    )
    ratios = [
        (ratio, bars[name]) for part, bars in BARS.items() for name, ratio in cpu[part]["times_faster_than"].items()
    ]
    smallest = round(min(ratio / bar for ratio, bar in ratios), 3)
    repeats = "is bit-identical" if repeat["repeats_bit_for_bit"] else "DIFFERS"
    stacked = "is bit-identical too" if repeat["same_bits_in_company"] else "differs"
    cpu_rows = overview(cpu["lenet5"], "FedAvg, LeNet-5, 10 x 600 images", "plain loop, one thread")
    cpu_rows += overview(cpu["digits"], "FedAvg, MLP, 25 federations of 10 agents", "plain loop")
    gpu_row = [table["gpu"], f"{loop['ours_seconds']} s", f"{loop['plain_seconds']} s", str(loop["ratio"])]
    text = f"""# Speed

```sh
make bench  # python -m benchmarks.cpu, then benchmarks.cohorts and benchmarks.cluster
```

```text
smallest ratio over its bar: {smallest}
```

The benchmark compares our simulator with a plain loop over the agents, Flower's simulation and pfl-research on the same
mini-batches. Each comparison has a bar, the speed-up that we require; a ratio above 1 means that all of them are met.

| workload | machine | ours | plain loop | speed-up |
| --- | --- | --- | --- | --- |
| SCAFFOLD, LeNet-5, 10 x 6,000 images | {" | ".join(gpu_row)} |
{cpu_rows}
Times are per federation and round. `python -m benchmarks.page` writes this page from the records that the commands
below made.

## On one {table["gpu"]} (torch {table["torch"]})

`python -m benchmarks.gpu --out results/speed-gpu.jsonl`, in three calls: `dla`, then `steps loop agents repeat`, then
`table`.

The paper's whole MNIST table, 5 distributions x 5 seeds x 10 agents x 6,000 samples, batch 32, 100 rounds,
takes **{table["total_seconds"]} s** for six methods. This includes run folders, records, evaluation and the
compilation of all kernels. Methods with the same local training (FedAvg and Weight Erosion, SCAFFOLD and WAFFLE)
train in one stack.

| method | seconds until its 25 runs ended |
| --- | --- |
{methods}
One step of {steps["rows"]} stacked LeNet-5 with batch {steps["batch_size"]} each takes
{steps["fedavg_tf32_ms"]} ms for FedAvg and {steps["scaffold_tf32_ms"]} ms for SCAFFOLD in TF32, and
{steps["scaffold_float32_ms"]} ms for SCAFFOLD in float32. The lower bound from the memory traffic is about
{steps["floor_ms"]} ms. The relative error of the gradient, compared with float64, is
{steps["gradient_error_float32"]:.1e} in float32 and {steps["gradient_error_tf32"]:.1e} in TF32.

SCAFFOLD takes {loop["ours_seconds"]} s per federation and round. A plain loop over the agents with its data
on the GPU takes {loop["plain_seconds"]} s: ours is **{loop["ratio"]} times faster**. After two rounds in
float32 the two models differ by {loop["difference_in_float32"]:.1e} of their norm.

WAFFLE with DLA on 10 agents with 5,000 images each of CIFAR-10's shape, bf16, takes **{dla["ms_a_step"]} ms**
per step of {dla["batch_size"]} images, including aggregation and evaluation ({dla["steps_a_round"]} steps per
round). The first round, which compiles the kernels, takes {dla["round_seconds"][0]:.0f} s. The peak
memory is {dla["peak_gib"]} GiB.

| agents with 60 samples each | ms per agent and round | peak GiB |
| --- | --- | --- |
{sizes}
A repeated run of one config {repeats}. The same run stacked with other runs {stacked}: the GPU's matrix
products use other kernels for other stack sizes, which gives a relative difference of
{repeat["difference_in_company"]:.1e} in the model after four rounds in TF32. On a CPU the result is
bit-identical regardless of what else is in the stack.

## On {cpu["lenet5"]["cores"]} CPU cores (torch {cpu["lenet5"]["torch"]})

`python -m benchmarks.cpu --out results/speed-cpu.jsonl`

FedAvg, 10 agents, batch 32, one epoch; median milliseconds per federation and round. The implementations take turns.

LeNet-5, 600 images per agent:

{sides(cpu["lenet5"])}
Digits, MLP, a grid of 25 federations:

{sides(cpu["digits"])}{peers(cpu)}{growth(cpu)}{scale_page.cohorts()}{scale_page.cluster()}{scale_page.for_all()}
## Gain of each part of the fast engine

`python -m benchmarks.ablation gpu --out results/ablation.jsonl`, then the same with `cpu` and the folder of MNIST as
`--data-dir`.

Each row is the same work with one part switched off, and how many times longer a round takes without it.
Parts that gained less than 15 % in every workload were deleted: {deleted()}.

{ablation()}"""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(block if block.startswith(("#", "|", "```")) else prose(block) for block in blocks) + "\n"


def prose(text: str) -> str:
    """Return a text as one wrapped paragraph."""
    return fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def overview(line: dict[str, Any], workload: str, loop: str) -> str:
    """Return the row of the first table for a CPU workload."""
    ms = line["ms_a_round"]
    machine, speedup = f"{line['cores']} CPU cores", line["times_faster_than"][loop]
    return f"| {workload} | {machine} | {ms['ours']} ms | {ms[loop]} ms | {speedup} |\n"


def gains() -> list[dict[str, Any]]:
    """Return the lines of the record of the ablation."""
    return [json.loads(line) for line in (ROOT / "results" / "ablation.jsonl").read_text().splitlines()]


def ablation() -> str:
    """Return one row per part and workload of the record, without deleted parts."""
    rows = [
        f"| {part} | {line['workload']} | {line['machine'].upper()} | {gain:.2f} |\n"
        for part in dict.fromkeys(part for line in gains() for part in line["gains"])
        if part not in DELETED
        for line in gains()
        if (gain := line["gains"].get(part)) is not None
    ]
    return f"| without | workload | on | times longer |\n| --- | --- | --- | --- |\n{''.join(rows)}"


def deleted() -> str:
    """Return the deleted parts, each with its largest gain."""
    most = {part: max(line["gains"].get(part, 0.0) for line in gains()) for part in DELETED}
    return ", ".join(f"{part} ({100 * (gain - 1):.0f} % at most)" for part, gain in most.items())


def sides(line: dict[str, Any]) -> str:
    """Return one row per implementation."""
    ratios, bars = line["times_faster_than"], BARS[line["part"]]
    rows = "".join(
        f"| {name} | {ms} | {ratios.get(name, 1)} | {verdict(ratios[name], bars[name]) if name in bars else ''} |\n"
        for name, ms in line["ms_a_round"].items()
    )
    return f"| implementation | ms per round | speed-up of ours | bar |\n| --- | --- | --- | --- |\n{rows}"


def verdict(ratio: float, bar: float) -> str:
    """Return a bar, and whether the ratio misses it."""
    return f"{bar}" if ratio >= bar else f"{bar}, **missed**"


def peers(cpu: dict[str, Any]) -> str:
    """Return how the peers were measured, or "" if they were not."""
    lenet5, digits = cpu["lenet5"], cpu["digits"]
    if lenet5["peers"] == "left out":
        return ""
    start_up = ", ".join(
        f"{name} {seconds} s and {digits['start_up_seconds'][name]} s"
        for name, seconds in lenet5["start_up_seconds"].items()
    )
    furthest = max(max(line["difference_after_one_round"].values()) for line in (lenet5, digits))
    versions = " and ".join(f"{name} {version}" for name, version in lenet5["peers"].items())
    return f"""
{versions} run on both cores with two processes of one thread each. No implementation evaluates; ours, which
always does, evaluates one sample. On the digits the others make 25 rounds in a row where ours makes one round of
25 federations. The peers' processes keep the cores busy while they wait, so each peer takes turns only with
ours. Start-up is not included above. It contains the first round, and for ours all rounds until workers are
started and gradients are traced: {start_up} (LeNet-5 and digits). After one round the largest difference between
a model and ours is {furthest:.1e} of its norm.
"""


def growth(cpu: dict[str, Any]) -> str:
    """Return the cost of an agent by the number of agents, or "" if it was not measured."""
    if "agents" not in cpu:
        return ""
    rows = "".join(
        f"| {count} | {cost['ms_an_agent_and_round']} | {cost['peak_mib']} |\n"
        for count, cost in cpu["agents"]["sizes"].items()
    )
    return f"""
FedAvg on one federation, LeNet-5, 96 samples of noise per agent. Memory is that of both processes, including the data:

| agents | ms per agent and round | peak MiB |
| --- | --- | --- |
{rows}"""


def with_tables(text: str) -> str:
    """Return a page with the tables between its markers made from their records."""

    def table_of(match: re.Match[str]) -> str:
        return f"{match[1]}{to_markdown(read_runs([ROOT / match[2]]))}{match[3]}"

    return re.sub(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", table_of, text, flags=re.DOTALL)


def with_batches(text: str) -> str:
    """Return docs/how-to/small-sites.md with the tables of its record."""
    record = (ROOT / "results" / "batches.jsonl").read_text(encoding="utf-8")
    made = batches.tables([json.loads(line) for line in record.splitlines()])
    marked = r"(<!-- batches: (\w+) -->\n).*?(<!-- end of batches -->)"
    return re.sub(marked, lambda match: f"{match[1]}{made[match[2]]}{match[3]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    small_sites = ROOT / "docs" / "how-to" / "small-sites.md"
    small_sites.write_text(with_batches(small_sites.read_text(encoding="utf-8")), encoding="utf-8")
    digits = ROOT / "docs" / "examples" / "digits.md"
    digits.write_text(with_tables(digits.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs" / "speed.md").write_text(page(), encoding="utf-8")
