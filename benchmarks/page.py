"""Write docs/speed.md, and the tables of the README, from the committed records: python -m benchmarks.page"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from waffle_fl.report.tables import to_markdown
from waffle_fl.results import read_runs

ROOT = Path(__file__).parent.parent
DELETED = ("look-ahead", "eight steps per graph")


def records(name: str) -> dict[str, Any]:
    lines = (ROOT / "results" / name).read_text(encoding="utf-8").splitlines()
    return {line["part"]: line for line in map(json.loads, lines)}


def page() -> str:
    gpu, cpu = records("speed-gpu.jsonl"), records("speed-cpu.jsonl")
    table, steps, loop, agents, repeat = (gpu[part] for part in ("table", "steps", "loop", "agents", "repeat"))
    methods = "".join(f"| {m} | {s} |\n" for m, s in table["ended_after_seconds"].items())
    sizes = "".join(
        f"| {n} | {agents[n]['ms_an_agent_and_round']} | {agents[n]['peak_gib']} |\n" for n in ("10", "100", "1000")
    )
    return f"""# Speed

Written by `python -m benchmarks.page` from the records that the commands below made.

## On one {table["gpu"]} (torch {table["torch"]})

`python -m benchmarks.gpu --out results/speed-gpu.jsonl`, part by part: `dla`, then `steps loop agents repeat` in one
call, then `table`.

The paper's whole MNIST table, 5 distributions x 5 seeds x 10 agents x 6,000 samples, batch 32, 100 rounds, end to end
with run folders, records, evaluation and the compilation of all kernels: **{table["total_seconds"]} s** for six
methods. Methods whose agents do the same work (FedAvg and Weight Erosion, SCAFFOLD and WAFFLE) train in one stack.

| method | its 25 runs had ended after, seconds |
| --- | --- |
{methods}
One step of {steps["rows"]} stacked LeNet-5, batch {steps["batch_size"]} each: {steps["fedavg_tf32_ms"]} ms for FedAvg
and {steps["scaffold_tf32_ms"]} ms for SCAFFOLD in TF32, {steps["scaffold_float32_ms"]} ms in float32; the memory
floor, as counted from the bytes that must move, is about {steps["floor_ms"]} ms. Against a gradient in float64 the
relative error is
{steps["gradient_error_float32"]:.1e} in float32 and {steps["gradient_error_tf32"]:.1e} in TF32.

SCAFFOLD, a federation and round: {loop["ours_seconds"]} s, against {loop["plain_seconds"]} s of a plain loop over the
agents with its data on the GPU: **{loop["ratio"]} times faster**. After two rounds in float32 the two models differ by
{loop["difference_in_float32"]:.1e} of their norm.

WAFFLE with DLA on 10 agents of 5,000 images of CIFAR-10's shape, bf16, compiled, four rows abreast:
**{gpu["dla"]["ms_a_step"]} ms** a step of {gpu["dla"]["batch_size"]} images, aggregation and evaluation included
({gpu["dla"]["steps_a_round"]} steps a round); the first round, with its compilation, took
{gpu["dla"]["round_seconds"][0]:.0f} s; {gpu["dla"]["peak_gib"]} GiB at most.

| agents of 60 samples | ms an agent and round | peak GiB |
| --- | --- | --- |
{sizes}
Two runs of one config in one stack {"repeat bit for bit" if repeat["repeats_bit_for_bit"] else "DIFFER"}. In other
company {"the bits are the same too" if repeat["same_bits_in_company"] else "the bits differ"}: the GPU's matrix
products choose other kernels for other stacks, a relative difference of {repeat["difference_in_company"]:.1e} in the
model after four rounds in TF32. On a CPU the bits are the same in any company.

## On {cpu["lenet5"]["cores"]} CPU cores (torch {cpu["lenet5"]["torch"]})

`python -m benchmarks.cpu --out results/speed-cpu.jsonl`

FedAvg, 10 agents, batch 32, one epoch; milliseconds a federation and round. The sides alternate, medians.

LeNet-5, 600 images an agent:

{sides(cpu["lenet5"])}
Digits, MLP, a grid of 25 federations:

{sides(cpu["digits"])}{peers(cpu)}{growth(cpu)}
## What each part of the fast engine gains

`python -m benchmarks.ablation gpu --out results/ablation.jsonl`, then the same with `cpu` and the folder of MNIST as
`--data-dir`. Each line is the same work with one part switched off: how many times longer a round takes without it.
Parts that gained less than 15 % in every workload were deleted: {deleted()}.

{ablation()}"""


def gains() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "results" / "ablation.jsonl").read_text().splitlines()]


def ablation() -> str:
    """A row for each part and workload of the record; parts that were deleted are left out."""
    rows = [
        f"| {part} | {line['workload']} | {line['machine'].upper()} | {gain:.2f} |\n"
        for part in dict.fromkeys(part for line in gains() for part in line["gains"])
        if part not in DELETED
        for line in gains()
        if (gain := line["gains"].get(part)) is not None
    ]
    return f"| without | workload | on | times longer |\n| --- | --- | --- | --- |\n{''.join(rows)}"


def deleted() -> str:
    """The parts that were deleted, each with the most that it gained."""
    most = {part: max(line["gains"].get(part, 0.0) for line in gains()) for part in DELETED}
    return ", ".join(f"{part} ({100 * (gain - 1):.0f} % at most)" for part, gain in most.items())


def sides(line: dict[str, Any]) -> str:
    rows = "".join(
        f"| {name} | {ms} | {line['times_faster_than'].get(name, 1)} |\n" for name, ms in line["ms_a_round"].items()
    )
    return f"| side | ms a round | ours is faster, times |\n| --- | --- | --- |\n{rows}"


def peers(cpu: dict[str, Any]) -> str:
    """How the peers took part, where they did."""
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
{versions} run on both cores, two processes of one thread each. No side evaluates (ours, on one sample). On the digits
the others make 25 rounds in a row for ours of 25 federations. The peers' processes keep the
cores busy even while they wait, so each has turns of its own with ours. Start-up, the first round
included, and with us those until workers are hired and gradients traced, is left out above: {start_up} (LeNet-5 and
digits). After one round no side's model is further from ours than {furthest:.1e} of its norm.
"""


def growth(cpu: dict[str, Any]) -> str:
    """What an agent costs among few and among many, where it was measured."""
    if "agents" not in cpu:
        return ""
    rows = "".join(
        f"| {count} | {cost['ms_an_agent_and_round']} | {cost['peak_mib']} |\n"
        for count, cost in cpu["agents"]["sizes"].items()
    )
    return f"""
FedAvg on one federation, LeNet-5, 96 samples of noise an agent; memory is that of both processes, data included:

| agents | ms an agent and round | peak MiB |
| --- | --- | --- |
{rows}"""


def with_tables(text: str) -> str:
    """A page whose marked tables are those of their records."""

    def fresh(match: re.Match[str]) -> str:
        return f"{match[1]}{to_markdown(read_runs([ROOT / match[2]]))}{match[3]}"

    return re.sub(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", fresh, text, flags=re.DOTALL)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs" / "speed.md").write_text(page(), encoding="utf-8")
