"""Is training alone any good? Local with its defaults beside scikit-learn and a small CNN, on the agents' own data.

    python -m benchmarks.references --data FOLDER heart-disease parkinson ...

FOLDER holds one folder per data set, with one file per agent. `photographs` are class folders of CIFAR-10 images, 1,000
for each of four agents, which are written first. Every agent trains alone, with the training that `decide` chooses. The
references are those of the decision page, chosen on the same validation rows, and, for images and series, a small CNN
with BatchNorm trained by Adam for 15 epochs. Scores are on test rows: accuracy, AUC for Landmine, and the share of the
variance that is explained for regression, each in percent. The lines replace those of the same data in the file --out,
as they come; several processes may write to it. `--page` writes the table of docs/examples/training-alone.md from it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from waffle_fl.config import RunConfig, Settings
from waffle_fl.data import load
from waffle_fl.decision.references import fit_reference
from waffle_fl.experiment import Listener, Runtime, alices, all_alices_of, execute
from waffle_fl.federation import Federation
from waffle_fl.metrics import measure
from waffle_fl.tensorfile import read_named
from waffle_fl.tuning.default_training import choose_training

TARGETS = {"parkinson": "motor_UPDRS"}
DROPPED = {"parkinson": ("total_UPDRS",)}
METRICS = {"landmine": "auc"}
NAMES = {"accuracy": "accuracy", "auc": "AUC", "r2": "explained variance"}
SEEDS = (1, 2)
RECORD, PAGE = Path("results/references.jsonl"), Path("docs/examples/training-alone.md")
EPOCHS = 15
GOAL = -1.0  # points: Local minus the better reference, mean over these data sets
GOAL_DATA = ("heart-disease", "parkinson", "har", "landmine", "school", "digit-domains", "office", "photographs")


def local_scores(s: Settings, metric: str, folder: Path, runtime: Runtime) -> tuple[dict[str, float], dict[str, Any]]:
    """Train every agent alone and return each one's test score, and the chosen settings."""
    training = choose_training(s, ["local"], {}, (), folder / "training", runtime, Listener())
    runs = {
        (alice, seed): training.applied(RunConfig(method="local", settings=replace(s, alice=alice, seed=seed)))
        for alice in alices(s, runtime)
        for seed in SEEDS
    }
    execute([(config, folder / f"{alice}-{seed}") for (alice, seed), config in runs.items()], runtime, Listener())
    scores = {a: fmean(_score(folder / f"{a}-{seed}", metric) for seed in SEEDS) for a, _ in runs}
    return scores, dict(training.chosen["local"])


def _score(folder: Path, metric: str) -> float:
    tensors = read_named(folder / "predictions.safetensors", ("output", "target"))
    return score(tensors["output"].double(), tensors["target"], metric)


def score(output: torch.Tensor, target: torch.Tensor, metric: str) -> float:
    """Return a score in percent; for regression the explained share of the variance."""
    if metric == "r2":
        error = float(((output.view(-1) - target) ** 2).mean())
        return 100 * (1 - error / max(float(target.double().var(correction=0)), 1e-12))
    found = measure(output, target)[metric]
    return 100 * found if found is not None else float("nan")


def cnn_score(federation: Federation, agent: int, metric: str) -> float:
    """Return the test score of a small CNN with BatchNorm, trained by Adam for 15 epochs on all training rows."""
    rows = torch.cat([federation.train[agent], federation.validation[agent]])
    net = trained_cnn(federation.x[rows], federation.labels(agent, rows), federation.outputs)
    test = federation.test[agent]
    with torch.no_grad():
        return score(net(federation.x[test]).double(), federation.labels(agent, test), metric)


def trained_cnn(x: torch.Tensor, y: torch.Tensor, classes: int) -> nn.Module:
    """Return a small CNN with BatchNorm, trained by Adam for 15 epochs in plain PyTorch, ready to predict."""
    signal = x.ndim == 3
    conv: Any = nn.Conv1d if signal else nn.Conv2d
    norm: Any = nn.BatchNorm1d if signal else nn.BatchNorm2d
    pool: Any = nn.MaxPool1d if signal else nn.MaxPool2d
    torch.manual_seed(0)
    net = nn.Sequential(
        *(conv(x.shape[1], 32, 3, padding=1), norm(32), nn.ReLU(), pool(2)),
        *(conv(32, 64, 3, padding=1), norm(64), nn.ReLU(), pool(2), nn.Flatten(), nn.LazyLinear(128), nn.ReLU()),
        nn.Linear(128, classes),
    )
    net(x[:2])
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(32):
            if len(batch) > 1:
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
                optimiser.step()
    return net.eval()


def write_photographs(folder: Path, per_agent: int = 1000) -> None:
    """Write CIFAR-10 images as PNG files: four agents with random training images, one folder per class."""
    from PIL import Image

    images = load("cifar10", allow_unverified=True)
    rows = np.random.default_rng(0).permutation(len(images.y_train))[: 4 * per_agent].reshape(4, per_agent)
    low, high = images.x_train.min((0, 2, 3), keepdims=True), images.x_train.max((0, 2, 3), keepdims=True)
    pixels = (255 * (images.x_train[rows.ravel()] - low) / (high - low)).round().astype(np.uint8)
    for k, (row, image) in enumerate(zip(rows.ravel(), pixels.transpose(0, 2, 3, 1), strict=True)):
        home = folder / f"site-{k // per_agent + 1}" / images.class_names[images.y_train[row]]
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(home / f"{row}.png")


def compare(folder: Path, name: str, runtime: Runtime) -> dict[str, Any]:
    """Return one line of the record: mean scores over agents of a data set."""
    if name == "photographs" and not (folder / name).exists():
        write_photographs(folder / name)
    reading = {"target": TARGETS.get(name, ""), "drop": DROPPED.get(name, ()), "duplicates": "keep"}
    s = Settings(data=str(folder / name), alice="all", validation=0.2, **reading)  # type: ignore[arg-type]
    federation = all_alices_of(s, runtime)
    metric = METRICS.get(name, "accuracy" if federation.task == "classification" else "r2")
    began = _cpu_seconds()
    with tempfile.TemporaryDirectory() as runs:
        local, chosen = local_scores(replace(s, validation=0.0), metric, Path(runs), runtime)
    seconds = round(_cpu_seconds() - began)
    by_agent = {name: i for i, name in enumerate(federation.names)}
    references: dict[str, float] = {}
    cnn: dict[str, float] = {}
    for alice in local:
        agent = by_agent[alice]
        found = fit_reference(federation, agent)
        if found is not None:
            target = torch.as_tensor(found.target)
            references[alice] = score(torch.as_tensor(found.output), target, metric)
        if len(federation.shape) > 1:
            cnn[alice] = cnn_score(federation, agent, metric)
    compared = [a for a in local if a in references]
    ours, theirs, networks = (
        _mean({a: found[a] for a in compared if a in found}) for found in (local, references, cnn)
    )
    best = max(value for value in (theirs, networks) if value is not None)
    return {
        "data": name,
        "metric": metric,
        "agents": len(compared),
        "local": ours,
        "reference": theirs,
        "cnn": networks,
        "local_minus_best": None if ours is None else round(ours - best, 2),
        "training": chosen,
        "by_agent": {a: round(v, 2) for a, v in local.items()} if len(local) <= 4 else {},
        "cpu_seconds": seconds,
    }


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its workers that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _mean(values: dict[str, float]) -> float | None:
    return round(float(np.nanmean(list(values.values()))), 2) if values else None


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the page."""
    rows = [
        [line["data"], NAMES[line["metric"]], line["agents"], line["local"], line["reference"], line["cnn"],
         f"{line['local_minus_best']:+.2f}"]
        for line in lines
    ]  # fmt: skip
    rows.append([f"mean of {len(lines)}", "", "", "", "", "", f"{mean_difference(lines):+.2f}"])
    head = ["data", "score in percent", "agents", "Local", "scikit-learn", "CNN", "Local minus the better one"]
    shown = [["–" if value is None else str(value) for value in row] for row in rows]
    texts = [f"| {' | '.join(row)} |" for row in (head, *shown)]
    return "\n".join([texts[0], "|" + " --- |" * len(head), *texts[1:]])


def mean_difference(lines: Sequence[Mapping[str, Any]]) -> float:
    return fmean(line["local_minus_best"] for line in lines)


def content(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table and the verdict on the goal, which is undecided unless all its data sets are measured."""
    missing = [name for name in GOAL_DATA if name not in {line["data"] for line in lines}]
    word = "reached" if mean_difference(lines) >= GOAL else "**not reached**"
    if missing:
        word = f"**undecided** without {' and '.join(missing)}"
    goal = f"The goal, Local at most one point below the better reference in the mean over the data sets, is {word}."
    return f"{table(lines)}\n\n{goal}"


def add_line(record: Path, line: Mapping[str, Any]) -> None:
    """Replace the line of the same data in a record, or add it; other processes wait meanwhile."""
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        known = {found["data"]: found for found in map(json.loads, stream)} | {line["data"]: line}
        stream.truncate(0)
        stream.writelines(f"{json.dumps(found)}\n" for _, found in sorted(known.items(), key=_place))


def _place(item: tuple[str, Any]) -> int:
    return GOAL_DATA.index(item[0])


def write_page(record: Path, page: Path) -> None:
    """Write the table of a record between the markers of a page."""
    made = content([json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()])
    text = page.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- references -->\n).*?(<!-- end of references -->)", re.DOTALL)
    page.write_text(marked.sub(lambda found: f"{found[1]}{made}\n{found[2]}", text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.references", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(GOAL_DATA))
    parser.add_argument("--data", type=Path, help="folder that holds a folder per name")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--workers", type=int, default=0, help="processes on a CPU; 0: one per core")
    parser.add_argument("--page", action="store_true", help="write the table of the page from --out")
    given = parser.parse_args()
    odd = next((name for name in given.names if name not in GOAL_DATA), None)
    if odd:
        parser.error(f"expected names from {', '.join(GOAL_DATA)}, got {odd!r}")
    if given.names and given.data is None:
        parser.error("expected --data FOLDER beside the names")
    runtime = Runtime(device=given.device, workers=given.workers)
    for name in given.names:
        line = compare(given.data, name, runtime)
        print(json.dumps(line), flush=True)
        add_line(given.out, line)
    if given.page:
        write_page(given.out, PAGE)


if __name__ == "__main__":
    main()
