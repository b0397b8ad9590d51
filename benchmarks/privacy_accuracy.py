"""Accuracy against epsilon: python -m benchmarks.privacy_accuracy PREPARED [DATA ...]

PREPARED has the folder `har-described-1` (python -m paper.descriptors); MNIST and Heart Disease are published data.
What results/privacy-accuracy.jsonl lacks is trained and appended; then the tables and the figure of
docs/privacy-accuracy.md are written.

Per data set and epsilon all methods have equally many trials, scored on a quarter of the training rows: pairs of lr
and clip norm, then four values of one more option, with the best pair. The result is trained on all training rows with
the chosen values, and scored once on test rows. A score is the mean accuracy of the Alices' models in the last round.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
import torch
from paper.flamby import logistic, prepare
from torch import nn

from benchmarks import privacy_accuracy_page
from benchmarks.privacy_accuracy_page import METHODS, RECORD
from waffle_fl import Federation, FlatModel, RunSpec, build, load, simulate, split
from waffle_fl.algorithms import ALGORITHMS, SGD
from waffle_fl.data_folder import data_dir
from waffle_fl.models import mlp
from waffle_fl.randomness import generator
from waffle_fl.tournament.record import append_lines, read_lines

PERSONAL = ("local", "fedavg", "mr-mtl")  # one run has the models of all agents
VALIDATION = 0.25  # of the training rows, in trials
CLIPS = (0.3, 1.0)  # norms of a sample's gradient; without noise largest norms of a step's gradient
MORE: dict[str, list[dict[str, Any]]] = {  # the four last trials
    "local": [{"weight_decay": value} for value in (0.001, 0.01, 0.1, 0.3)],
    "fedavg": [{"weight_decay": value} for value in (0.001, 0.01, 0.1, 0.3)],
    "waffle-paper": [{"correction": 0.0}, {"correction": 0.3}, {"compared": "gradients"}, {"compared": "directions"}],
    "mr-mtl": [{"lam": value} for value in (0.1, 0.3, 3.0, 5.0)],
}
OF_SGD = ("weight_decay",)
NONE = math.inf  # the epsilon of runs without noise

Part: TypeAlias = tuple[Any, Any, Any, Any]  # x_train, y_train, x_test, y_test
Options: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A data set with its protocol, which is fixed before the first run."""

    name: str
    parts: dict[str, Part]
    module: Any  # a function that returns the network
    alices: tuple[int, ...]
    rounds: int
    steps: int  # of a round
    batch_size: int
    lrs: tuple[float, ...]
    delta: float
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...]
    trial_seeds: int = 2  # each with other rows for validation


def heart(_: Path) -> Study:
    """FLamby's Fed-Heart-Disease: its rows, its model, its initial weights, its 15 rounds of 100 updates.

    The largest lr was added after a look at validation scores: 0.08 was chosen often.
    """
    with tempfile.TemporaryDirectory() as folder:
        prepare(data_dir() / "heart-disease", Path(folder))
        parts = arrays_in(Path(folder) / "flamby-heart")
    columns = next(iter(parts.values()))[0].shape[1]
    return Study(
        "heart-disease",
        parts,
        lambda: logistic((columns,), 2),
        (0, 1, 2, 3),
        *(15, 100, 4, (0.001, 0.005, 0.02, 0.08, 0.32), 1e-4, (0.1, 1.0, 3.0, 10.0, NONE), (42, 43, 44, 45, 46)),
    )


def har(prepared: Path) -> Study:
    """Human activity recognition: 30 people, 90 numbers per window, every sixth person as Alice."""
    found = arrays_in(prepared / "har-described-1")
    rows = np.concatenate([x for x, *_ in found.values()])
    mean, deviation = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    parts = {
        name: (*(standardised(x, mean, deviation), y), *(standardised(u, mean, deviation), v))
        for name, (x, y, u, v) in found.items()
    }
    return Study(
        "har",
        parts,
        lambda: nn.Linear(rows.shape[1], 6),
        (0, 6, 12, 18, 24),
        *(25, 5, 25, (0.02, 0.1, 0.5, 2.0), 1e-3, (0.5, 2.0, 8.0, NONE), (1, 2, 3)),
    )


def mnist(_: Path) -> Study:
    """MNIST, split B: ten agents with 500 samples of four classes each, 7 x 7 pixels, one hidden layer."""
    digits = load("mnist")
    f = build(digits, split(digits.y_train, digits.y_test, "B", agents=10, samples_per_agent=500, seed=1))
    small = nn.functional.avg_pool2d(f.x.float(), 4).flatten(1).numpy()
    parts = {
        name: (small[own], f.labels(i, own).numpy(), small[held_out], f.labels(i, held_out).numpy())
        for i, (name, own, held_out) in enumerate(zip(f.names, f.train, f.test, strict=True))
    }
    return Study(
        "mnist",
        parts,
        lambda: mlp((49,), 10, hidden=32),
        (0, 3, 6),
        *(20, 10, 50, (0.02, 0.1, 0.5, 2.0), 1e-4, (0.5, 2.0, 8.0, NONE), (1, 2, 3), 1),
    )


STUDIES = {"heart-disease": heart, "har": har, "mnist": mnist}


def arrays_in(folder: Path) -> dict[str, Part]:
    """Return the arrays of each agent of a prepared folder."""
    found = {}
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as arrays:
            found[file.stem] = tuple(arrays[f"{key}_{part}"] for part in ("train", "test") for key in "xy")
    if not found:
        raise SystemExit(f"expected files .npz in {folder}: see the commands in benchmarks/privacy_accuracy.py")
    return found  # type: ignore[return-value]


def standardised(rows: Any, mean: Any, deviation: Any) -> Any:
    return np.clip((rows - mean) / deviation, -3, 3).astype(np.float32)


def for_trials(study: Study, seed: int) -> Study:
    """Return the study with a part of the training rows in place of the test rows."""
    parts = {}
    for name, (x, y, *_) in study.parts.items():
        order = generator(seed, "validation", name).permutation(len(y))
        cut = round(VALIDATION * len(y))
        parts[name] = (x[order[cut:]], y[order[cut:]], x[order[:cut]], y[order[:cut]])
    return replace(study, parts=parts)


def score(study: Study, method: str, epsilon: float, options: Options, seeds: Sequence[int]) -> list[float]:
    """Return the mean accuracy of the Alices' models, per seed; runs whose training diverges score 0."""
    noised, given = epsilon < NONE, dict(options)
    clip = given.pop("clip")
    sgd = SGD(given.pop("lr"), **{name: given.pop(name) for name in OF_SGD if name in given})
    algorithm = ALGORITHMS[method](sgd=sgd, clip=0.0 if noised else clip, **given)
    names = [str(k) for k in range(int(max(y.max() for _, y, *_ in study.parts.values())) + 1)]
    federation = Federation.from_arrays(study.parts, class_names=names, duplicates="keep")
    specs = [
        RunSpec(algorithm, replace(federation, alice=alice), seed, everyone=method in PERSONAL)
        for seed in seeds
        for alice in (study.alices[:1] if method in PERSONAL else study.alices)
    ]
    dp: Options = {"privacy": "dp", "epsilon": epsilon, "delta": study.delta, "sample_clip": clip} if noised else {}
    stream = simulate(
        specs,
        FlatModel(study.module),
        rounds=study.rounds,
        steps_per_round=study.steps,
        batch_size=study.batch_size,
        remainder="keep",
        workers=1,
        **dp,
    )
    found: dict[int, list[float]] = {seed: [] for seed in seeds}
    for outcome in last(stream):
        if outcome.error:
            continue
        measured: Any = outcome.measured
        own = [measured["by_agent"][i] for i in study.alices] if method in PERSONAL else [measured["accuracy"]]
        found[specs[outcome.index].seed] += own
    return [100 * fmean(own) if len(own) == len(study.alices) else 0.0 for own in found.values()]


def last(stream: Iterator[list[Any]]) -> list[Any]:
    """Return the last list of a stream; empty if it has none."""
    return next(iter(deque(stream, maxlen=1)), [])


def lines(study: Study, known: Sequence[Options]) -> Iterator[Options]:
    """Yield the lines of the record that are not known yet."""
    in_trials = [(seed, for_trials(study, seed)) for seed in study.seeds[: study.trial_seeds]]
    for epsilon, method in product(study.epsilons, METHODS):
        about = {"data": study.name, "epsilon": None if epsilon == NONE else epsilon, "method": method}
        have = [line for line in known if about.items() <= line.items()]
        trials = [line for line in have if line["kind"] == "trial"]

        def tried(options: Options, about: Options = about, trials: list[Options] = trials) -> Iterator[Options]:
            if not any(line["options"] == options for line in trials):
                scores = [score(held_out, method, epsilon, options, [seed])[0] for seed, held_out in in_trials]  # noqa: B023
                trials.append({"kind": "trial", **about, "options": options, "score": round(fmean(scores), 2)})
                yield trials[-1]

        for lr, clip in product(study.lrs, CLIPS):
            yield from tried({"lr": lr, "clip": clip})
        pair = best([line for line in trials if set(line["options"]) == {"lr", "clip"}])
        for more in MORE[method]:
            yield from tried({**pair, **more})
        if not any(line["kind"] == "result" for line in have):
            chosen, began = best(trials), time.process_time()
            accuracies = score(study, method, epsilon, chosen, study.seeds)
            yield {
                "kind": "result",
                **about,
                "options": chosen,
                "delta": None if epsilon == NONE else study.delta,
                "seeds": list(study.seeds),
                "accuracies": [round(accuracy, 2) for accuracy in accuracies],
                "seconds": round(time.process_time() - began, 1),
            }


def best(trials: Sequence[Options]) -> Options:
    """Return the options with the highest score, the first of equal ones."""
    return dict(max(trials, key=lambda line: line["score"])["options"])


def main(arguments: Sequence[str]) -> None:
    """Train what the record lacks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.privacy_accuracy", description=__doc__)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("data", nargs="*", choices=[*STUDIES, []], help="only these data sets")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in given.data or STUDIES:
        known = read_lines(RECORD)
        for line in lines(STUDIES[name](given.prepared), known):
            append_lines(RECORD, [line])
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    privacy_accuracy_page.main()


if __name__ == "__main__":
    main(sys.argv[1:])
