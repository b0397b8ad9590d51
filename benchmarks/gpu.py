"""GPU benchmark: the paper's whole MNIST table, the time of a step, the plain loop, DLA, many agents, repeatability.

    python -m benchmarks.gpu table steps loop dla agents repeat --out results/speed-gpu.jsonl

Each part appends one JSON line to the record, so that parts can run in separate calls. MNIST is read from $WAFFLE_DATA;
if it is absent, noise of the same shapes is used, which takes the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import platform
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.plain import PlainLoop
from waffle_fl import SGD, FlatModel, RunSpec, Scaffold, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.batches import Batches
from waffle_fl.config import Experiment, RunConfig, Settings
from waffle_fl.data import Dataset
from waffle_fl.data.files import data_dir
from waffle_fl.data.idx import UNSIGNED_BYTE
from waffle_fl.data.sources import SOURCES
from waffle_fl.engines.arithmetic import products
from waffle_fl.engines.cuda_graphs import one_step
from waffle_fl.experiment import Listener, Runtime, execute, federation_of, plan
from waffle_fl.federation import Federation, build
from waffle_fl.models import DLA, LeNet5
from waffle_fl.partition import split
from waffle_fl.results import condense, read_runs, scores

METHODS = ("local", "fedavg", "scaffold", "weight-erosion", "waffle-paper", "apfl")
SPLITS, SEEDS, ROUNDS = ("A", "B", "C", "A*", "B*"), (1, 2, 3, 4, 5), 100
MNIST = Settings(data="mnist", batch_size=32, lr=0.1, precision="tf32", rounds=ROUNDS)


@contextlib.contextmanager
def runtime_for(device: str = "cuda") -> Iterator[Runtime]:
    """Yield a runtime with MNIST as published or, if it is absent, with noise in files of the same shapes."""
    source = SOURCES["mnist"]
    if all((data_dir() / source.folder / file.name).exists() for file in source.files):
        yield Runtime(device=device)
        return
    print(f"{data_dir()} does not hold MNIST: noise of the same shapes is used", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        write_noise(Path(folder) / source.folder)
        yield Runtime(device=device, data_dir=folder, allow_unverified=True)


def write_noise(folder: Path) -> None:
    """Write noise, and labels from 0 to 9 in turn, in the files and shapes of MNIST."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    names = [file.name for file in SOURCES["mnist"].files]
    for count, images, labels in ((60000, *names[:2]), (10000, *names[2:])):
        pixels = rng.integers(0, 256, (count, 28, 28), np.uint8)
        for name, values in ((images, pixels), (labels, (np.arange(count) % 10).astype(np.uint8))):
            header = struct.pack(f">HBB{values.ndim}I", 0, UNSIGNED_BYTE, values.ndim, *values.shape)
            (folder / name).write_bytes(gzip.compress(header + values.tobytes(), compresslevel=0))


def mnist_federations() -> list[Federation]:
    """Return the five splits of MNIST, or of noise in its shapes."""
    with runtime_for() as runtime:
        source = runtime.data_dir, runtime.allow_unverified
        return [federation_of(replace(MNIST, split=kind), *source) for kind in SPLITS]


class Ends(Listener):
    """Records when the last run of each method ended; methods with the same training share a stack and end together."""

    def __init__(self) -> None:
        self.began, self.seconds = time.perf_counter(), dict[str, float]()

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        if config.method not in self.seconds:
            print(f"{config.method}: {time.perf_counter() - self.began:.1f} s", flush=True)
        self.seconds[config.method] = round(time.perf_counter() - self.began, 2)


def table(
    keep: Path | None = None, settings: Settings = MNIST, seeds: Sequence[int] = SEEDS, device: str = "cuda"
) -> dict[str, Any]:
    """Time all 150 runs of the paper's MNIST table, including run folders, records and evaluation."""
    options = {"weight-erosion": {"p_d": {"A": 0.006, "B": 0.0067, "C": 0.006, "A*": 0.0088, "B*": 0.0088}}}
    experiment = Experiment(methods=METHODS, splits=SPLITS, seeds=tuple(seeds), settings=settings, options=options)
    with tempfile.TemporaryDirectory() as folder, runtime_for(device) as runtime:
        ends = Ends()
        execute(plan(experiment, Path(folder), runtime), runtime, ends)
        total = round(time.perf_counter() - ends.began, 2)
        runs = read_runs([Path(folder)])
    if keep:
        keep.write_text("\n".join(condense(runs)) + "\n")
    accuracy = {f"{row} {method}": round(spec.mean, 4) for (row, method), spec in scores(runs, "best").items()}
    data = {"data": "noise"} if runtime.allow_unverified else {}
    return {**data, "ended_after_seconds": ends.seconds, "total_seconds": total, "best_accuracy": accuracy}


def graph_ms(work: Callable[[], Any], repeats: int = 30) -> float:
    """Return the milliseconds of one replay of a captured CUDA graph, median of five."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return median(times)


def steps() -> dict[str, Any]:
    """Time one step of 250 stacked LeNet-5, batch 32 each, for every method; and measure the error of its gradient."""
    federations = [f.to("cuda", torch.float32) for f in mnist_federations()]
    federations = [replace(f, x=federations[0].x, y=federations[0].y) for f in federations]
    result: dict[str, Any] = {"rows": 250, "batch_size": 32, "floor_ms": 0.15}
    batches = Batches(federations * 5, [s for s in SEEDS for _ in SPLITS], 32, 1, torch.float32)
    for precision in ("tf32", "float32"):
        model = FlatModel(LeNet5, precision=precision, device="cuda")
        with products(precision):
            for method in METHODS[1:] if precision == "tf32" else ("scaffold",):
                algorithm = ALGORITHMS[method](sgd=SGD(0.1))
                state = algorithm.init(model.init(1), 250)
                local = algorithm.begin(algorithm.broadcast(state[0], 250), state[1])
                plan_, t = batches.plan(1, 0, slice(None)), torch.zeros(1, dtype=torch.int64, device="cuda")
                work = partial(one_step, algorithm, model, batches, local, plan_, t, 32, True)
                result[f"{method}_{precision}_ms"] = round(graph_ms(work), 4)
    sample = batches.batch(batches.plan(1, 0, slice(0, 20)), torch.zeros(1, dtype=torch.int64, device="cuda"), 32)
    exact = FlatModel(LeNet5, precision="float64", device="cuda", stacked=True)
    params = torch.stack([exact.init(s).params for s in range(20)])
    stats = params[:, :0]
    truth = exact.passes.vmapped(params, sample._replace(x=sample.x.double(), weight=sample.weight.double()))
    for precision in ("tf32", "float32"):
        model = FlatModel(LeNet5, precision=precision, device="cuda")
        with products(precision):
            found = model.grad(params.float(), stats.float(), sample).params
        result[f"gradient_error_{precision}"] = float((found - truth).norm() / truth.norm())
    return result


def loop() -> dict[str, Any]:
    """Time the plain loop and ours per federation and round: SCAFFOLD, 10 agents x 6,000 samples."""
    federations = [f.to("cuda", torch.float32) for f in mnist_federations()]
    federations = [replace(f, x=federations[0].x, y=federations[0].y) for f in federations]
    model = FlatModel(LeNet5, precision="tf32", device="cuda")
    ours, plain = [], []
    specs = [RunSpec(Scaffold(SGD(0.1), clip=0.0), f, seed) for seed in SEEDS for f in federations]
    stream = simulate(specs, model, rounds=8, batch_size=32)
    next(stream)
    with products("tf32"):
        peer = PlainLoop(LeNet5(), model, federations[0], 1, batch_size=32, lr=0.1)
        peer.round(peer.prepared(1), scaffold=True)
        for r in (2, 3, 4):
            prepared = peer.prepared(r)
            torch.cuda.synchronize()
            began = time.perf_counter()
            peer.round(prepared, scaffold=True)
            torch.cuda.synchronize()
            plain.append(time.perf_counter() - began)
            began = time.perf_counter()
            next(stream)
            next(stream)
            torch.cuda.synchronize()
            ours.append((time.perf_counter() - began) / 2 / len(specs))
    return {
        "plain_seconds": round(median(plain), 4),
        "ours_seconds": round(median(ours), 6),
        "ratio": round(median(plain) / median(ours), 1),
        "difference_in_float32": agreement(federations[0]),
    }


def agreement(federation: Federation) -> float:
    """Return the relative difference of the plain loop and ours after two rounds, with agents of 140 to 320 samples."""
    federation = replace(federation, train=tuple(rows[: 320 - 20 * i] for i, rows in enumerate(federation.train)))
    model = FlatModel(LeNet5, device="cuda")
    spec = RunSpec(Scaffold(SGD(0.1), clip=0.0), federation, 1)
    ours = list(simulate([spec], model, rounds=2, batch_size=32))[-1][0].state.server.x
    with products("float32"):
        peer = PlainLoop(LeNet5(), model, federation, 1, batch_size=32, lr=0.1)
        for r in (1, 2):
            peer.round(peer.prepared(r), scaffold=True)
    return float((peer.x - ours).norm() / ours.norm())


def dla() -> dict[str, Any]:
    """Time WAFFLE with DLA, 10 agents x 5,000 images of CIFAR-10's shape: milliseconds per step, with evaluation."""
    model = FlatModel(DLA, precision="bf16", device="cuda")
    rng = np.random.default_rng(0)
    y = np.arange(50000) % 10
    x = rng.standard_normal((50000, 3, 32, 32), np.float32)
    noise = Dataset("noise", x, y, x[:1000], y[:1000], tuple("0123456789"), "noise", verified=False)
    federation = build(noise, split(y, y[:1000], "A"))
    algorithm = ALGORITHMS["waffle-paper"](sgd=SGD(0.01, 0.9, 5e-4))
    steps = sum(-(-n // 128) for n in federation.samples.tolist())
    times = []
    for outcomes in simulate([RunSpec(algorithm, federation, 1)], model, rounds=5, batch_size=128):
        times.append(outcomes[0].measured["seconds"])
    return {
        "batch_size": 128,
        "steps_a_round": steps,
        "ms_a_step": round(1000 * median(times[2:]) / steps, 3),
        "round_seconds": times,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def agents() -> dict[str, Any]:
    """Time FedAvg on 10, 100 and 1,000 agents of 60 samples: cost per agent and round, and peak memory."""
    result: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    y = np.arange(60000) % 10
    x = rng.standard_normal((60000, 1, 28, 28), np.float32)
    noise = Dataset("noise", x, y, x[:1000], y[:1000], tuple("0123456789"), "noise", verified=False)
    for count in (10, 100, 1000):
        federation = build(noise, split(y, y[:1000], "A", agents=count, samples_per_agent=60, test="all"))
        model = FlatModel(LeNet5, precision="tf32", device="cuda")
        torch.cuda.reset_peak_memory_stats()
        spec = RunSpec(ALGORITHMS["fedavg"](sgd=SGD(0.1)), federation, 1)
        times = [o[0].measured["seconds"] for o in simulate([spec], model, rounds=6, batch_size=32)]
        result[str(count)] = {
            "ms_an_agent_and_round": round(1000 * median(times[2:]) / count, 5),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        }
    return result


def repeat() -> dict[str, Any]:
    """Compare two GPU runs of one config, and one stacked with other runs, bit for bit."""
    federations = mnist_federations()[:2]
    federations = [replace(f, train=tuple(t[:300] for t in f.train)) for f in federations]
    model = FlatModel(LeNet5, precision="tf32", device="cuda")

    def last(specs: list[RunSpec]) -> torch.Tensor:
        return list(simulate(specs, model, rounds=4, batch_size=32))[-1][0].state.server.x

    algorithm = ALGORITHMS["waffle-paper"](sgd=SGD(0.1))
    specs = [
        RunSpec(algorithm, federations[0], 1),
        RunSpec(algorithm, federations[1], 2),
        RunSpec(algorithm, federations[0], 3),
    ]
    alone, again, stacked = last(specs[:1]), last(specs[:1]), last(specs)
    return {
        "repeats_bit_for_bit": torch.equal(alone, again),
        "same_bits_in_company": torch.equal(alone, stacked),
        "difference_in_company": float((alone - stacked).norm() / alone.norm()),
    }


PARTS = {f.__name__: f for f in (table, steps, loop, dla, agents, repeat)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--out", type=Path, default=Path("results/speed-gpu.jsonl"))
    parser.add_argument("--keep", type=Path, help="also write the table's runs as a condensed record")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks.gpu needs a CUDA device, and this machine shows none: see benchmarks.cpu\n")
    parts = {**PARTS, "table": partial(table, arguments.keep)}
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    for part in arguments.parts or PARTS:
        began = time.perf_counter()
        line = {"part": part, **machine, **parts[part](), "wall_seconds": round(time.perf_counter() - began, 1)}
        print(json.dumps(line), flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
