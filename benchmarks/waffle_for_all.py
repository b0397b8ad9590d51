"""WAFFLE for all agents at once beside WAFFLE trained for every Alice: accuracy, and seconds by the number of agents.

    python -m benchmarks.waffle_for_all --out results/waffle-for-all.jsonl

Accuracy: digits, MLP, 20 agents with 30 samples each, 50 rounds, batch 16, lr 0.1, two seeds, last round, mean over the
test samples of all agents; nothing is tuned. WAFFLE needs 400 trainings of an agent per round for this, the others 20.
Growth: seconds per round and agent with 100 to 4,000 agents that draw 30 samples each, 10 near agents, one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from waffle_fl import SGD, FedAvg, Federation, FlatModel, Local, RunSpec, WafflePaper, simulate
from waffle_fl.algorithms.waffle_for_all import WaffleForAll
from waffle_fl.config import Settings
from waffle_fl.experiment import federation_of
from waffle_fl.models import mlp

SPLITS, SEEDS, ROUNDS, AGENTS = ("B", "C", "A*", "B*"), (1, 2), 50, 20
METHODS: dict[str, Any] = {
    "Local": Local(SGD(0.1)),
    "FedAvg": FedAvg(SGD(0.1)),
    "WAFFLE for all, 5 near agents": WaffleForAll(SGD(0.1), neighbours=5),
    "WAFFLE for all, 10 near agents": WaffleForAll(SGD(0.1), neighbours=10),
    "WAFFLE for all, all agents near": WaffleForAll(SGD(0.1), neighbours=AGENTS - 1),
}
EACH = "WAFFLE for every Alice"
SIZES = (100, 1_000, 4_000)


def accuracy() -> dict[str, Any]:
    """Return the accuracy of each method in percent by split, mean over the seeds."""
    model = FlatModel(lambda: mlp((1, 8, 8), 10))
    found: dict[str, dict[str, float]] = {}
    for split in SPLITS:
        s = Settings(data="digits", split=split, agents=AGENTS, samples_per_agent=30, test="all")
        federation = federation_of(s)
        scores = {
            name: [_score([RunSpec(method, federation, seed, everyone=True)], model) for seed in SEEDS]
            for name, method in METHODS.items()
        }
        alices = [replace(federation, alice=i) for i in range(AGENTS)]
        scores[EACH] = [_score([RunSpec(WafflePaper(SGD(0.1)), f, seed) for f in alices], model) for seed in SEEDS]
        found[split] = {name: round(100 * mean(values), 2) for name, values in scores.items()}
        print(split, found[split], flush=True)
    names = [name for name in METHODS if name.startswith("WAFFLE")]
    costs = {name: {split: round(row[name] - row[EACH], 2) for split, row in found.items()} for name in names}
    return {"accuracy": found, "minus_waffle_for_every_alice": costs}


def _score(specs: list[RunSpec], model: FlatModel) -> float:
    """Return the share of correct predictions on the test samples of all agents, after the last round."""
    *_, last = simulate(specs, model, rounds=ROUNDS, batch_size=16, workers=1)
    samples = [len(spec.federation.test[spec.federation.alice]) for spec in specs]
    return sum(o.measured["accuracy"] * n for o, n in zip(last, samples, strict=True)) / sum(samples)


def growth() -> dict[str, Any]:
    """Return milliseconds per agent and round by the number of agents."""
    model, found = FlatModel(lambda: mlp((1, 8, 8), 10)), {}
    for agents in SIZES:
        spec = RunSpec(WaffleForAll(SGD(0.1)), _drawn(agents), 1)
        stream = simulate([spec], model, rounds=9, batch_size=16, workers=1)
        cpu = list(_cpu_seconds(stream))
        found[str(agents)] = round(1000 * median(cpu[2:]) / agents, 4)
    return {"cpu_ms_per_agent_and_round": found}


def _drawn(agents: int) -> Federation:
    return federation_of(Settings(data="digits", agents=agents, samples_per_agent=30, division="drawn"))


def _cpu_seconds(stream: Iterator[Any]) -> Iterator[float]:
    began = time.process_time()
    for _ in stream:
        yield time.process_time() - began
        began = time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/waffle-for-all.jsonl"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    lines = [{"part": part.__name__, **machine, **part()} for part in (growth, accuracy)]
    given.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(json.dumps(line, indent=2))


if __name__ == "__main__":
    main()
