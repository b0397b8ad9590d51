"""How good are joint models of images, beside pooled training of the same network on as many gradients?

    python -m benchmarks.joint_training FOLDER [NAME ...]

FOLDER holds one folder or file per agent. A fifth of the training rows is held out, by two different seeds of the
split; test rows are not used. Each line of results/joint-training.jsonl is one way to train, as in VARIANTS, or as in
PHOTOGRAPHS for data of such a name (`benchmarks.decide_time` writes photographs-750): the accuracy on held-out rows in
percent, per agent and as their mean, averaged over the last quarter of the rounds and over the seeds.

Pooled training is a plain loop in PyTorch on the rows of all agents; everything else is this software.
Every row is used as often in each of them, unless the name says otherwise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from benchmarks.doc_tables import write_between
from waffle_fl.augment import darkest, shift_and_flip
from waffle_fl.config import RunConfig, Settings
from waffle_fl.decision.measurement import joint_options
from waffle_fl.experiment import Listener, Runtime, alices, all_alices_of, execute
from waffle_fl.federation import Federation
from waffle_fl.models.nets import cnn_pooled_gn
from waffle_fl.records import read_rounds

RECORD, PAGE = Path("results/joint-training.jsonl"), Path("docs/decision.md")
SEEDS = (0, 1)  # of the split into training and held-out rows
ROUNDS, BATCH, LR = 20, 32, 0.003
SHIFTS = {"augment": True, "flips": False}
FLIPS = {"augment": True}
AVERAGED = {"momentum_between_rounds": "average"}
SIX = {"rounds": 6 * ROUNDS, "epochs": 1 / 6}  # averages per epoch
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pooled": ("pooled", {}),
    "pooled, shifts": ("pooled", SHIFTS),
    "Local": ("local", {}),
    "Local, shifts": ("local", SHIFTS),
    "FedAvg": ("fedavg", {}),
    "FedAvg, shifts": ("fedavg", SHIFTS),
    "FedAvg, moments reset": ("fedavg", {"momentum_between_rounds": "reset"}),
    "FedAvg, lr 0.01": ("fedavg", {"lr": 0.01}),
    "FedAvg, lr 0.01, four averages per epoch": ("fedavg", {"lr": 0.01, "rounds": 4 * ROUNDS, "epochs": 0.25}),
    "FedAvg+FT": ("fedavg-ft", {}),
    "FedAvg+FT, shifts": ("fedavg-ft", SHIFTS),
    "FedAvg+FT, lr 0.01": ("fedavg-ft", {"lr": 0.01}),
    "FedAvg+FT, shifts, 40 rounds": ("fedavg-ft", {**SHIFTS, "rounds": 2 * ROUNDS}),
    "WAFFLE, shifts": ("waffle-paper", SHIFTS),
    "FedAvg, batches of 10": ("fedavg", {"batch_size": 10}),
    "FedAvg, batches of 10, lr 0.006, six averages per epoch": ("fedavg", {"batch_size": 10, "lr": 0.006, **SIX}),
    "FedAvg, moments averaged": ("fedavg", AVERAGED),
    "FedAvg, moments averaged, batches of 10": ("fedavg", {**AVERAGED, "batch_size": 10}),
    "FedAvg+FT, batches of 10": ("fedavg-ft", {"batch_size": 10}),
    "FedAvg+FT, moments averaged": ("fedavg-ft", AVERAGED),
    "FedAvg+FT, moments averaged, batches of 10": ("fedavg-ft", {**AVERAGED, "batch_size": 10}),
    "FedAvg+FT, moments averaged, batches of 10, shifts": ("fedavg-ft", {**AVERAGED, "batch_size": 10, **SHIFTS}),
}
PHOTOGRAPHS: dict[str, tuple[str, dict[str, Any]]] = {
    "Local, shifts and flips": ("local", FLIPS),
    "FedAvg+FT, shifts and flips": ("fedavg-ft", FLIPS),
    "FedAvg+FT, moments averaged, shifts and flips": ("fedavg-ft", {**AVERAGED, **FLIPS}),
    "FedAvg+FT, moments averaged, batches of 8, shifts and flips": (
        "fedavg-ft",
        {**AVERAGED, **FLIPS, "batch_size": 8},
    ),
}


def variants_of(data: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the ways to train that are measured on a data set, by its name."""
    return PHOTOGRAPHS if data.startswith("photographs") else VARIANTS


def settings_of(data: str, split_seed: int, **changed: Any) -> Settings:
    """Return the settings of a run: a fifth of the training rows is held out, and test rows are not read."""
    given: dict[str, Any] = {"rounds": ROUNDS, "lr": LR, "optimiser": "adam", "momentum_between_rounds": "keep"}
    reading = Settings(data=data, alice="all", validation=0.2, test="none", split_seed=split_seed, duplicates="keep")
    return replace(reading, **{"batch_size": BATCH, **given, **changed})


def federated(data: str, method: str, split_seed: int, changed: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the held-out accuracy of every agent in each round."""
    s = settings_of(data, split_seed, **{name: value for name, value in changed.items() if name != "epochs"})
    runtime = Runtime(workers=1)
    if "epochs" in changed:  # a part of an epoch per round
        most = max(s.steps(n) for n in all_alices_of(s, runtime).samples.tolist())
        s = replace(s, steps_per_round=round(changed["epochs"] * most))
    options = joint_options(method, s.rounds, {}).get(method, {})
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            (RunConfig(method=method, settings=replace(s, alice=alice), options=options), Path(folder) / alice)
            for alice in alices(s, runtime)
        ]
        execute(runs, runtime, Listener())
        return {
            config.settings.alice: [line["validation_accuracy"] for line in read_rounds(out / "rounds.jsonl")]
            for config, out in runs
        }


def pooled(federation: Federation, changed: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the same for the default network, trained by Adam on the rows of all agents."""
    x = torch.cat([federation.x[rows] for rows in federation.train])
    y = torch.cat([federation.labels(i, rows) for i, rows in enumerate(federation.train)])
    border = darkest(federation.x)
    torch.manual_seed(1)
    net = cnn_pooled_gn(federation.shape, federation.outputs)
    optimiser = torch.optim.Adam(net.parameters(), LR)
    found: dict[str, list[float]] = {name: [] for name in federation.names}
    for r in range(ROUNDS):
        for b, batch in enumerate(torch.randperm(len(x)).tensor_split(-(-len(x) // BATCH))):
            inputs = x[batch]
            if changed:
                inputs = shift_and_flip(inputs[None], torch.tensor([(r << 40) + (b << 16)]), border, flips=False)[0]
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(inputs), y[batch]).backward()
            optimiser.step()
        for name, share in accuracy(net, federation).items():
            found[name].append(share)
    return found


@torch.no_grad()
def accuracy(net: nn.Module, federation: Federation) -> dict[str, float]:
    """Return the accuracy of one model on each agent's held-out rows."""
    return {
        name: float((net(federation.x[rows]).argmax(dim=1) == federation.labels(i, rows)).double().mean())
        for i, (name, rows) in enumerate(zip(federation.names, federation.validation, strict=True))
    }


def line_of(data: Path, name: str) -> dict[str, Any]:
    """Return one line of the record."""
    method, changed = variants_of(data.name)[name]
    scores: dict[str, list[float]] = {}
    for seed in SEEDS:
        federation = all_alices_of(settings_of(str(data), seed), Runtime())
        found = pooled(federation, changed) if method == "pooled" else federated(str(data), method, seed, changed)
        for agent, rounds in found.items():
            scores.setdefault(agent, []).append(100 * fmean(rounds[-max(1, len(rounds) // 4) :]))
    by_agent = {agent: round(fmean(values), 2) for agent, values in scores.items()}
    means = [fmean(values) for values in zip(*scores.values(), strict=True)]
    return {
        "data": data.name,
        "training": name,
        "mean": round(fmean(means), 2),
        "by_agent": by_agent,
        "means": [round(value, 2) for value in means],
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    agents = list(lines[0]["by_agent"])
    head = ["training", *agents, "mean"]
    rows = [[line["training"], *(line["by_agent"][a] for a in agents), line["mean"]] for line in lines]
    texts = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([texts[0], "|" + " --- |" * len(head), *texts[1:]])


def read_record() -> list[dict[str, Any]]:
    """Return the lines of the record, by data set and in the order of its ways to train."""
    lines = [json.loads(text) for text in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []
    return sorted(lines, key=lambda line: (line["data"], list(variants_of(line["data"])).index(line["training"])))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint_training", description=__doc__)
    parser.add_argument("data", type=Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of VARIANTS; default: those that the record lacks")
    given = parser.parse_args()
    variants = variants_of(given.data.name)
    odd = [name for name in given.names if name not in variants]
    if odd:
        parser.error(f"expected names from {', '.join(map(repr, variants))}, got {odd[0]!r}")
    known = {line["training"] for line in read_record() if line["data"] == given.data.name}
    for name in given.names or [name for name in variants if name not in known]:
        line = line_of(given.data, name)
        print(json.dumps(line), flush=True)
        kept = [one for one in read_record() if (one["data"], one["training"]) != (given.data.name, name)]
        RECORD.write_text("".join(f"{json.dumps(one)}\n" for one in [*kept, line]), encoding="utf-8")
    for data in {line["data"] for line in read_record()}:
        write_between(PAGE, f"joint training of {data}", table([one for one in read_record() if one["data"] == data]))


if __name__ == "__main__":
    main()
