"""CPU benchmark: our simulator, a plain loop and two public peers on the same work, in one run.

    python -m benchmarks.cpu --out results/speed-cpu.jsonl

Two workloads: LeNet-5 with 10 agents of 600 MNIST images (noise of that shape if $WAFFLE_DATA is not set), and a grid
of 25 federations of 10 agents with the embedded digits. FedAvg, batch 32, one epoch. The implementations take turns,
and the median of several rounds counts; start-up is reported separately. The last line is the smallest of the ratios
over its bar. Flower's simulation and pfl-research are included if `make bench` has installed them (see
benchmarks/peers). Each takes turns only with ours, because their processes keep the cores busy while they wait.

No implementation evaluates: ours, which always does, evaluates a single sample. On the digits all others make 25 rounds
in a row where ours makes one round of 25 federations, so that all caches are equally warm. A third part measures the
cost of an agent among 10, 100 and 1,000: LeNet-5, 96 samples of noise per agent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers import Peer, installed, peers
from benchmarks.plain import PlainLoop
from waffle_fl import SGD, FedAvg, Federation, FlatModel, RunSpec, build, load, simulate, split
from waffle_fl.config import Settings
from waffle_fl.data import Dataset
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.experiment import federation_of
from waffle_fl.models import LeNet5, mlp

ROUNDS = 15
SETTLED = {"lenet5": 6, "digits": 60}  # rounds after which ours has started its workers and traced its gradients
AGENTS = (10, 100, 1000)
TRAINING: dict[str, Any] = {"batch_size": 32, "remainder": "keep"}  # the peers' batches: full ones, and a smaller last
BARS = {
    "lenet5": {
        "plain loop, one thread": 2.5,
        "plain loop, two processes": 1.7,
        "Flower simulation": 1.0,
        "pfl-research": 1.0,
    },
    "digits": {"plain loop": 5.0, "Flower simulation": 40.0, "pfl-research": 10.0},
}
COST_BAR = 1.3  # largest cost of an agent over the smallest, among the sizes


def lenet_federation() -> Federation:
    if os.environ.get("WAFFLE_DATA"):
        return almost_without_evaluation(federation_of(Settings(data="mnist", split="A", samples_per_agent=600)))
    rng = np.random.default_rng(0)
    y, y_test = np.arange(6000) % 10, np.arange(1000) % 10
    x, x_test = (rng.standard_normal((n, 1, 28, 28), np.float32) for n in (6000, 1000))
    noise = Dataset("noise", x, y, x_test, y_test, tuple("0123456789"), "noise", verified=False)
    return almost_without_evaluation(build(noise, split(y, y_test, "A")))


def digits_federations() -> list[Federation]:
    digits = load("digits")
    federations = [build(digits, split(digits.y_train, digits.y_test, kind)) for kind in ("A", "B", "C", "A*", "B*")]
    return [almost_without_evaluation(replace(f, x=federations[0].x, y=federations[0].y)) for f in federations]


def almost_without_evaluation(federation: Federation) -> Federation:
    """Return the federation with one test sample, the least that ours accepts."""
    nothing = tuple(rows[:0] for rows in federation.validation)
    return replace(federation, test=tuple(rows[:1] for rows in federation.test), validation=nothing)


def seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


_half: dict[str, Any] = {}


def _prepare(agents: tuple[int, ...]) -> None:
    """Prepare a plain loop over half of the agents in a worker process."""
    torch.set_num_threads(1)
    full = lenet_federation()
    half = replace(
        full,
        names=tuple(full.names[i] for i in agents),
        train=tuple(full.train[i] for i in agents),
        validation=tuple(full.validation[i] for i in agents),
        test=tuple(full.test[i] for i in agents),
        relabel=full.relabel[list(agents)],
        ids=tuple(full.ids[i] for i in agents),
    )
    _half["loop"] = PlainLoop(LeNet5(), FlatModel(LeNet5), half, 1, **TRAINING, lr=0.1)
    _half["batches"] = _half["loop"].prepared(1)


def _half_round(x: torch.Tensor) -> torch.Tensor:
    loop = _half["loop"]
    loop.x = x
    loop.round(_half["batches"], scaffold=False)
    return loop.x


def lenet5() -> dict[str, Any]:
    """LeNet-5, 10 agents x 600 images: 190 steps per round."""
    torch.set_num_threads(1)
    federation, model = lenet_federation(), FlatModel(LeNet5)
    plain, untrained = (PlainLoop(LeNet5(), model, federation, 1, **TRAINING, lr=0.1) for _ in range(2))
    plain.round(plain.prepared(1), scaffold=False)
    first = plain.x
    context = get_context("spawn")
    halves = [ProcessPoolExecutor(1, context, _prepare, (tuple(half),)) for half in (range(5), range(5, 10))]
    start = model.init(1).params
    joined = torch.stack([pool.submit(_half_round, start).result() for pool in halves]).mean(dim=0)
    ours, outcome, start_up = _settled("lenet5", [RunSpec(FedAvg(SGD(0.1)), federation, 1)], model)

    def one_thread(r: int) -> float:
        batches = plain.prepared(r)
        return seconds(lambda: plain.round(batches, scaffold=False))

    def two_processes(r: int) -> float:
        return seconds(lambda: [f.result() for f in [pool.submit(_half_round, start) for pool in halves]])

    sides = {"plain loop, one thread": one_thread, "plain loop, two processes": two_processes}
    turns = [_alternating(lambda: next(ours), sides)]
    for pool in halves:
        pool.shutdown()
    models = {"plain loop, one thread": first, "plain loop, two processes": joined}
    others = []
    for peer in peers("lenet5", untrained, ROUNDS + 1):
        models[peer.name] = torch.from_numpy(peer.model())
        turns.append(_alternating(lambda: next(ours), {peer.name: lambda r, p=peer: p.round()}))
        others.append(peer)
    return _compared("lenet5", turns, _differences(outcome.state.server.x, models)) | _apart(others, start_up)


def digits() -> dict[str, Any]:
    """Digits, MLP 64-64-10, 25 federations x 10 agents, per federation and round; others make 25 rounds per turn."""
    torch.set_num_threads(1)
    federations, model = digits_federations(), FlatModel(lambda: mlp((1, 8, 8), 10))
    specs = [RunSpec(FedAvg(SGD(0.1)), f, seed) for seed in range(1, 6) for f in federations]
    plain, untrained = (PlainLoop(mlp((1, 8, 8), 10), model, federations[0], 1, **TRAINING, lr=0.1) for _ in range(2))
    plain.round(plain.prepared(1), scaffold=False)
    first = plain.x
    ours, outcome, start_up = _settled("digits", specs, model)

    def loop(r: int) -> float:
        turn = [plain.prepared(1 + len(specs) * (r - 2) + k) for k in range(1, len(specs) + 1)]
        return seconds(lambda: [plain.round(batches, scaffold=False) for batches in turn])

    turns = [_alternating(lambda: next(ours), {"plain loop": loop}, len(specs))]
    models, others = {"plain loop": first}, []
    for peer in peers("mlp", untrained, 1 + ROUNDS * len(specs)):
        models[peer.name] = torch.from_numpy(peer.model())
        rounds = {peer.name: lambda r, p=peer: sum(p.round() for _ in specs)}
        turns.append(_alternating(lambda: next(ours), rounds, len(specs)))
        others.append(peer)
    return _compared("digits", turns, _differences(outcome.state.server.x, models)) | _apart(others, start_up)


def _alternating(
    ours: Callable[[], Any], sides: dict[str, Callable[[int], float]], federations: int = 1
) -> dict[str, float]:
    """Return the median seconds per federation and round of each implementation, all taking turns."""
    times: dict[str, list[float]] = {name: [] for name in ("ours", *sides)}
    for r in range(2, ROUNDS + 2):
        times["ours"].append(seconds(ours))
        for name, side in sides.items():
            times[name].append(side(r))
    return {name: median(values) / federations for name, values in times.items()}


def agents() -> dict[str, Any]:
    """Time FedAvg per agent and round by the number of agents, each size in its own process to measure memory."""
    costs: dict[str, dict[str, float]] = {}
    for count in AGENTS:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            costs[str(count)] = pool.submit(_cost, count).result()
    spent = [cost["ms_an_agent_and_round"] for cost in costs.values()]
    ratio = max(spent) / min(spent)
    return {"sizes": costs, "dearest_over_cheapest": round(ratio, 3), "bar": COST_BAR}


def _cost(count: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((count, 97, 1, 28, 28), np.float32)
    labels = rng.integers(0, 10, (count, 97))
    federation = Federation.from_arrays(
        {f"agent {i}": (x[:96], y[:96], x[96:], y[96:]) for i, (x, y) in enumerate(zip(samples, labels, strict=True))},
        class_names=tuple("0123456789"),
    )
    rounds = max(5, 200 // count)
    stream = simulate([RunSpec(FedAvg(SGD(0.1)), federation, 1)], FlatModel(LeNet5), rounds=rounds + 3, batch_size=32)
    for _ in range(3):
        next(stream)
    took = median(seconds(lambda: next(stream)) for _ in range(rounds))
    stream.close()
    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"ms_an_agent_and_round": round(1000 * took / count, 4), "peak_mib": round(peak / 1024)}


def _settled(part: str, specs: list[RunSpec], model: FlatModel) -> tuple[Iterator[list[Outcome]], Outcome, float]:
    """Return our simulation after its start-up, its first outcome, and the seconds of the start-up."""
    began = time.perf_counter()
    ours = simulate(specs, model, rounds=1 + SETTLED[part] + 3 * ROUNDS, **TRAINING)
    outcome = next(ours)[0]
    for _ in range(SETTLED[part]):
        next(ours)
    return ours, outcome, time.perf_counter() - began


def _differences(ours: Tensor, models: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative difference of each model from ours; raise if it is more than rounding."""
    differences = {name: float((x - ours).norm() / ours.norm()) for name, x in models.items()}
    if max(differences.values()) > 1e-4:
        raise RuntimeError(
            f"expected the same model from every implementation up to rounding, got differences {differences}"
        )
    return differences


def _apart(others: list[Peer], ours: float) -> dict[str, Any]:
    """Return the peers' versions, and the start-up of all implementations including the first round."""
    start_up = {"ours": ours, **{peer.name: peer.start_up_seconds for peer in others}}
    return {
        "peers": {peer.name: peer.version for peer in others} or "left out",
        "start_up_seconds": {name: round(seconds, 1) for name, seconds in start_up.items()},
    }


def _compared(part: str, turns: list[dict[str, float]], differences: dict[str, float]) -> dict[str, Any]:
    """Return each implementation compared with ours of the same turns; the loops come first."""
    times = dict(turns[0])
    for turn in turns[1:]:
        (peer,) = turn.keys() - {"ours"}
        times |= {f"ours, in turns with {peer}": turn["ours"], peer: turn[peer]}
    ratios = {name: round(took / turn["ours"], 2) for turn in turns for name, took in turn.items() if name != "ours"}
    return {
        "ms_a_round": {name: round(1000 * took, 3) for name, took in times.items()},
        "times_faster_than": ratios,
        "smallest_ratio_over_its_bar": round(min(ratio / BARS[part][name] for name, ratio in ratios.items()), 3),
        "difference_after_one_round": differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/speed-cpu.jsonl"))
    arguments = parser.parse_args()
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    if not installed():
        print("Flower and pfl-research are not installed and are skipped: `make bench` installs them.")
    lines = []
    for part in (lenet5, digits, agents):
        lines.append({"part": part.__name__, **machine, **part()})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(json.dumps(line, indent=2))
    print("smallest ratio over its bar:", min(line["smallest_ratio_over_its_bar"] for line in lines[:2]))


if __name__ == "__main__":
    main()
