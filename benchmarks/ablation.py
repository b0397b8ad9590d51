"""Measure the gain of each part of the fast engine: the same rounds with one part switched off at a time.

    python -m benchmarks.ablation cpu --out results/ablation.jsonl
    python -m benchmarks.ablation gpu --out results/ablation.jsonl

Each variant of a workload is a separate simulation. After a warm-up the variants take turns, round by round, and the
median seconds per round count. A gain is the time without the part over the time with all parts. On a CPU: LeNet-5 with
10 agents of 600 images (noise without --data-dir), a grid of 25 federations of 10 agents with the embedded digits, and
APFL's models for each of 10 agents and for one agent, and cohorts of 100 of 1,000 agents of 32 images. On a GPU, with
noise: 25 federations of 10 agents of 6,000 images in the shape of the paper's MNIST table, the digits grid, five
federations in which one agent has ten times as many images as the others, and DLA on 10 agents of 1,280 images.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch

from waffle_fl import APFL, SGD, FedAvg, Federation, FlatModel, RunSpec, WafflePaper, build, load, simulate, split
from waffle_fl.config import Settings
from waffle_fl.data import Dataset
from waffle_fl.engines import aggregation, cohort_sums, cuda_graphs, evaluation, helper_agents, shared_training
from waffle_fl.engines.evaluation import Evaluator
from waffle_fl.experiment import federation_of
from waffle_fl.models import DLA, LeNet5, folded, fused_row_module, mlp, passes, row_module, traced

ROUNDS = 100_000  # never reached; so large that the engine starts its workers
NEVER: Callable[..., bool] = lambda *arguments: False  # noqa: E731


@dataclass(frozen=True)
class Part:
    """A part of the fast engine, and how to switch it off."""

    name: str
    patches: tuple[tuple[Any, str, Any], ...] = ()  # (object, attribute, replacement)
    model: Mapping[str, Any] = field(default_factory=dict)  # arguments of FlatModel
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of simulate

    @contextmanager
    def off(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, name, replacement in self.patches:
                stack.enter_context(patch.object(target, name, replacement))
            yield


NOTHING = Part("nothing")
STACKED_ROWS = Part("stacked rows", model={"stacked": False})
FOLDED = Part("folded pass", ((passes.Passes, "folded", None),))  # the trial then takes vmap
TRACED = Part("traced gradients", ((traced, "TRACED_AFTER", math.inf),))
CPU_CONVOLUTION = Part("CPU convolution", ((row_module.RowModule, "_gains_by_rewriting", NEVER),))
WORKERS = Part("worker processes", options={"workers": 1})
EVALUATION = Part("stacked evaluation", ((evaluation, "applies", NEVER),))
THREADS = Part("evaluation threads", ((Evaluator, "_each", lambda self, work, parts: map(work, parts)),))
SHARED = Part("shared training", ((shared_training, "groups_of", lambda specs: [[i] for i in range(len(specs))]),))
HELPERS = Part("helper agents", ((helper_agents, "applies", NEVER),))
COHORT_ROWS = Part("rows of cohorts alone", ((cohort_sums, "applies", NEVER),))
GRAPHS = Part("CUDA graphs", ((cuda_graphs, "applies", NEVER),))
LATE_ROWS = Part("rows that go on alone", ((cuda_graphs, "WORTH_A_CUT", 0.0),))
TOGETHER = Part("batched aggregation", ((aggregation, "applies", NEVER),))
KERNELS = Part("own kernels", ((folded, "has_kernels", NEVER),))
FUSED = Part("fused normalisation", ((fused_row_module, "applies", NEVER),))
ABREAST = Part("rows abreast", ((passes, "PARALLEL_ROWS", 1),))


@dataclass(frozen=True)
class Workload:
    """Some runs, the model that they train, and the parts to switch off."""

    specs: Sequence[RunSpec]
    build: Callable[..., FlatModel]
    parts: tuple[Part, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    settled: int = 3  # rounds before the first that is timed
    counted: int = 7


def noise(samples: int, shape: tuple[int, ...] = (1, 28, 28)) -> Dataset:
    rng = np.random.default_rng(0)
    y, y_test = np.arange(samples) % 10, np.arange(samples // 6) % 10
    x, x_test = (rng.standard_normal((len(labels), *shape), np.float32) for labels in (y, y_test))
    return Dataset("noise", x, y, x_test, y_test, tuple("0123456789"), "noise", verified=False)


def lenet_federation(data: str, test: Literal["share", "all"] = "share") -> Federation:
    if data:
        return federation_of(Settings(data="mnist", split="A", samples_per_agent=600, test=test), data)
    dataset = noise(60_000)
    return build(dataset, split(dataset.y_train, dataset.y_test, "A", samples_per_agent=600, test=test))


def many_agents(data: str) -> Federation:
    """Return 1,000 agents that draw their samples by index."""
    drawn: dict[str, Any] = {"agents": 1000, "samples_per_agent": 32, "division": "drawn"}
    if data:
        return federation_of(Settings(data="mnist", split="C", **drawn), data)
    dataset = noise(60_000)
    return build(dataset, split(dataset.y_train, dataset.y_test, "C", **drawn))


def grid(dataset: Dataset) -> list[Federation]:
    """Return five splits of one data set, which share its memory."""
    federations = [build(dataset, split(dataset.y_train, dataset.y_test, kind)) for kind in ("A", "B", "C", "A*", "B*")]
    return [replace(f, x=federations[0].x, y=federations[0].y) for f in federations]


def unequal(federation: Federation) -> Federation:
    """Return the federation with all samples of one agent and a tenth of the others'."""
    return replace(federation, train=tuple(t if i == 0 else t[: len(t) // 10] for i, t in enumerate(federation.train)))


def cpu_workloads(data: str) -> dict[str, Workload]:
    digits, lenet = grid(load("digits")), lenet_federation(data)
    grid_cells = [RunSpec(WafflePaper(SGD(0.1)), f, seed) for seed in range(1, 6) for f in digits]
    each = [replace(digits[0], alice=i) for i in range(10)]
    apfl = [RunSpec(APFL(SGD(0.1)), f, 1, requested=frozenset([f.alice])) for f in each]
    small = FlatModel
    return {
        "LeNet-5": Workload(
            [RunSpec(FedAvg(SGD(0.1)), lenet, 1)],
            lambda **o: small(LeNet5, **o),
            (TRACED, CPU_CONVOLUTION, WORKERS),
            settled=8,
            counted=25,
        ),
        "digits grid": Workload(
            grid_cells,
            lambda **o: small(lambda: mlp((1, 8, 8), 10), **o),
            (STACKED_ROWS, FOLDED, TRACED, WORKERS),
            settled=40,
            counted=25,
        ),
        "a model for each agent": Workload(
            apfl,
            lambda **o: small(lambda: mlp((1, 8, 8), 10), **o),
            (SHARED,),
            settled=20,
            counted=25,
        ),
        "LeNet-5, APFL": Workload(
            [RunSpec(APFL(SGD(0.1)), lenet, 1, requested=frozenset([0]))],
            lambda **o: small(LeNet5, **o),
            (HELPERS,),
            settled=4,
        ),
        "cohorts of LeNet-5": Workload(
            [RunSpec(FedAvg(SGD(0.05)), many_agents(data), 1)],
            lambda **o: small(LeNet5, **o),
            (COHORT_ROWS,),
            {"participation": 0.1},
        ),
        "LeNet-5, 10,000 test images": Workload(
            [RunSpec(FedAvg(SGD(0.1)), lenet_federation(data, "all"), 1)],
            lambda **o: small(LeNet5, **o),
            (THREADS,),
            settled=6,
        ),
    }


def gpu_workloads() -> dict[str, Workload]:
    table, images = grid(noise(60_000)), noise(12_800, (3, 32, 32))
    dla = build(images, split(images.y_train, images.y_test, "A"))
    fast = {"device": "cuda", "precision": "tf32"}
    half = {"device": "cuda", "precision": "bf16"}
    step, parts = SGD(0.01, 0.9, 5e-4), (FOLDED, GRAPHS, LATE_ROWS, TOGETHER, KERNELS, EVALUATION)
    return {
        "MNIST table": Workload(
            [RunSpec(WafflePaper(SGD(0.1)), f, seed) for seed in range(1, 6) for f in table],
            lambda **o: FlatModel(LeNet5, **{**fast, **o}),
            parts,
            settled=2,
            counted=3,
        ),
        "digits grid": Workload(
            [RunSpec(WafflePaper(SGD(0.1)), f, seed) for seed in range(1, 6) for f in grid(load("digits"))],
            lambda **o: FlatModel(lambda: mlp((1, 8, 8), 10), **{**fast, **o}),
            parts,
            settled=5,
            counted=15,
        ),
        "unequal agents": Workload(
            [RunSpec(WafflePaper(SGD(0.1)), unequal(table[0]), seed) for seed in range(1, 6)],
            lambda **o: FlatModel(LeNet5, **{**fast, **o}),
            (LATE_ROWS,),
            settled=3,
            counted=9,
        ),
        "DLA": Workload(
            [RunSpec(WafflePaper(step), dla, 1)],
            lambda **o: FlatModel(DLA, **{**half, **o}),
            (FUSED, ABREAST, GRAPHS),
            {"batch_size": 128},
            settled=2,
            counted=3,
        ),
    }


def measure(workload: Workload) -> dict[str, float]:
    """Return the median seconds per round, with every part and without each."""
    variants = (NOTHING, *workload.parts)
    with ExitStack() as stack:
        streams = {}
        for part in variants:
            with part.off():
                model = workload.build(**part.model)
                options = {"rounds": ROUNDS, **workload.options, **part.options}
                streams[part.name] = stack.enter_context(closing(simulate(workload.specs, model, **options)))
                for _ in range(workload.settled):
                    next(streams[part.name])
        times: dict[str, list[float]] = {part.name: [] for part in variants}
        for _ in range(workload.counted):
            for part in variants:
                with part.off():
                    times[part.name].append(_seconds(lambda name=part.name: next(streams[name])))
    return {name: median(values) for name, values in times.items()}


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=["cpu", "gpu"])
    parser.add_argument("--only", nargs="*", default=[], help="run only these workloads")
    parser.add_argument("--data-dir", default="", help="folder of MNIST; without it, noise is used")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    workloads = cpu_workloads(arguments.data_dir) if arguments.machine == "cpu" else gpu_workloads()
    for name, workload in workloads.items():
        if arguments.only and name not in arguments.only:
            continue
        seconds = measure(workload)
        line = {
            "machine": arguments.machine,
            "workload": name,
            "device": torch.cuda.get_device_name() if arguments.machine == "gpu" else platform.machine(),
            "torch": torch.__version__,
            "round_seconds": round(seconds[NOTHING.name], 6),
            "gains": {part.name: round(seconds[part.name] / seconds[NOTHING.name], 3) for part in workload.parts},
        }
        print(json.dumps(line), flush=True)
        if arguments.out:
            with arguments.out.open("a") as stream:
                stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
