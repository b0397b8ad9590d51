"""Compare rules that combine the predictions of several models for Alice, on the tuning partition of the tournament.

    python -m benchmarks.one_waffle DATA_DIR PREDICTIONS    # writes results/one-waffle.jsonl and its table in docs/

PREDICTIONS is a folder for what the base methods predict, which is used again. Lines that the record has are kept.

The data sets, columns and settings are those of experiments/tournament.toml, partition 101, seed 1, two values of lr. A
quarter of each agent's training rows is held out as pseudo-test; no test row is read. Of HAR, whole runs of an activity
are held out, as in its test data. The base methods train with their defaults. A line of the record has, per column and
rule, the mean points over at most ten Alices in the round selected on validation rows, and in the last round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.doc_tables import write_between
from waffle_fl.algorithms import title_of
from waffle_fl.algorithms.knn_per import KNNPer, neighbours
from waffle_fl.algorithms.mixture import class_weights, value_weights
from waffle_fl.config import RunConfig
from waffle_fl.engines.mixed_outputs import output_of
from waffle_fl.engines.run_spec import RunSpec, on_device, own_net
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment import Runtime, device_of, federation_of, model_of
from waffle_fl.experiment.factories import simulation_options
from waffle_fl.federation import Federation
from waffle_fl.metrics import measure
from waffle_fl.tournament.plan import TaskSet, Tournament, TuningTrial, load_tournament
from waffle_fl.tournament.record import append_lines, column_name, read_lines
from waffle_fl.tournament.standings import LOWEST
from waffle_fl.tournament.tasks import AFTER_DRIFT, alices_of

TOURNAMENT = Path("experiments/tournament.toml")
PARTITION, SEED, ALICES, HELD_OUT = 101, 1, 10, 0.25
LRS = (0.5, 0.15)
RECORD, PAGE = Path("results/one-waffle.jsonl"), Path("docs/one-waffle.md")
BASES = ("local", "fedavg", "waffle", "fedavg-ft", "weight-erosion", "waffle-paper")
WITH_NEIGHBOURS = ("local", "fedavg", "waffle", "weight-erosion")
IN_RUNS = "har-described"  # its windows follow one another in time
SMALLEST = 1e-30
NAMES = {
    "digits": "Digits (16)",
    "heart-disease": "Heart Disease",
    "landmine-whole": "Landmine",
    "school-whole": "School",
    "parkinson": "Parkinson",
    "har-described": "HAR",
    "digit-domains-described": "Digit domains",
    "office-described": "Office",
}
TITLES = {base: title_of(base) for base in (*BASES, "knn-per")} | {
    "waffle": "WAFFLE, one model",
    "mixture": "**mixture**",
}

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Parts: TypeAlias = Mapping[str, Array]  # name of a base -> its predictions (rounds, rows, outputs)


class Shown(NamedTuple):
    """What a rule may use, and what it is judged by: one Alice's predictions and targets."""

    validation: Parts
    test: Parts
    target: Array  # of the validation rows
    tested: Array  # targets of the pseudo-test rows
    drifts: bool


# ---- training


def with_pseudo_test(federation: Federation, in_runs: bool) -> Federation:
    """Return the federation with a share of each agent's training rows in place of its test rows."""
    train, test = [], []
    for i, rows in enumerate(federation.train):
        rng = np.random.default_rng([SEED, i])
        if in_runs:
            labels = federation.labels(i, rows).numpy()
            runs = np.concatenate([[0], np.cumsum(labels[1:] != labels[:-1])])
            held = np.zeros(len(rows), bool)
            for label in np.unique(labels):
                some = rng.permutation(np.unique(runs[labels == label]))
                held |= np.isin(runs, some[: max(1, round(HELD_OUT * len(some)))]) & (len(some) > 1)
        else:
            held = rng.permutation(len(rows)) < round(HELD_OUT * len(rows))
        mask = torch.from_numpy(held)
        train.append(rows[~mask])
        test.append(rows[mask])
    return replace(federation, train=tuple(train), test=tuple(test), backdoor=None)


def some_alices(federation: Federation) -> list[int]:
    agents = alices_of(federation)
    return agents if len(agents) <= ALICES else [agents[i * len(agents) // ALICES] for i in range(ALICES)]


@torch.no_grad()
def predictions(config: RunConfig, federation: Federation, runtime: Runtime, model: Any) -> dict[str, Array]:
    """Return the predictions of a method, and of the nearest training rows in its features, of each Alice and round."""
    alices = some_alices(federation)
    own = [federation.only(i) if config.method == "local" else replace(federation, alice=i) for i in alices]
    specs = on_device([RunSpec(config.algorithm(), f, SEED, requested=frozenset([f.alice])) for f in own], model)
    found: dict[str, list[Array]] = {}
    for outcomes in simulate(specs, model, **simulation_options(config.settings, runtime)):
        for outcome in outcomes:
            spec, f = specs[outcome.index], specs[outcome.index].federation
            if outcome.error:
                raise RuntimeError(f"{config.method} diverged: {outcome.error}")
            net, progress = own_net(spec, outcome.state, model), outcome.round / config.settings.rounds
            predict = output_of(spec.algorithm, model, net)
            rows = f.train[f.alice]
            known, labels = model.features(*net, f.x[rows])[1], f.labels(f.alice, rows, progress)
            targets = F.one_hot(labels, f.outputs) if f.task == "classification" else labels[:, None]
            for part, ids in (("validation", f.validation[f.alice]), ("test", f.test[f.alice])):
                x = f.x[ids]
                output = predict(x).double().view(len(x), -1)
                own_part = output.softmax(dim=1) if f.task == "classification" else output
                found.setdefault(f"{outcome.index}/{config.method}/{part}", []).append(own_part.numpy())
                if config.method in WITH_NEIGHBOURS:
                    near = neighbours(model.features(*net, x)[1], known, targets, KNNPer.k, KNNPer.scale)
                    name = f"{outcome.index}/{config.method}+neighbours/{part}"
                    found.setdefault(name, []).append(near.numpy())
    return {name: np.stack(values).astype(np.float32) for name, values in found.items()}


def targets_of(federation: Federation, rounds: int) -> dict[str, Array]:
    """Return the targets of the validation rows by round, and of the pseudo-test rows at the end."""
    found = {}
    for k, i in enumerate(some_alices(federation)):
        steps = [federation.labels(i, federation.validation[i], r / rounds).numpy() for r in range(1, rounds + 1)]
        found[f"{k}/target"] = np.stack(steps)
        found[f"{k}/tested"] = federation.labels(i, federation.test[i], 1.0).numpy()
        found[f"{k}/drifts"] = np.array(federation.drifts(i))
    return found


def cached(folder: Path, name: str, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
    path = folder / f"{name}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **make())
    with np.load(path) as arrays:
        return dict(arrays)


def collect(t: Tournament, tasks: TaskSet, k: int, lr: float, runtime: Runtime, folder: Path) -> list[Shown]:
    """Return what every Alice of a column sees."""
    column = tasks.columns[k]
    trial = TuningTrial(lr, "weight_decay", 0.0)
    config = t.config("fedavg", column, trial, PARTITION, SEED)
    federation = with_pseudo_test(federation_of(config.settings, runtime.data_dir), tasks.name.startswith(IN_RUNS))
    model = model_of(config.settings, federation, runtime, device_of(runtime.device))
    stem = f"{tasks.name}-{k}-{lr:g}"
    arrays = cached(folder, f"{stem}-targets", lambda: targets_of(federation, config.settings.rounds))
    for base in BASES:
        make = t.config(base, column, trial, PARTITION, SEED)
        arrays |= cached(folder, f"{stem}-{base}", partial(predictions, make, federation, runtime, model))
    names = [*BASES, *(f"{base}+neighbours" for base in WITH_NEIGHBOURS)]
    return [
        Shown(
            {name: arrays[f"{i}/{name}/validation"] for name in names},
            {name: arrays[f"{i}/{name}/test"] for name in names},
            arrays[f"{i}/target"],
            arrays[f"{i}/tested"],
            bool(arrays[f"{i}/drifts"]),
        )
        for i in range(len(some_alices(federation)))
    ]


# ---- rules


class Rule(NamedTuple):
    """Parts and their pseudo-samples; or with `fixed` their weights, without validation rows."""

    parts: tuple[str, ...]
    prior: tuple[float, ...]
    fixed: bool = False


KIN, NEAR = "waffle", "waffle+neighbours"
PARTS, CHOSEN = (KIN, "fedavg", "local", NEAR), (1.0, 1.0, 0.2, 0.2)
WITHOUT = {"the shared model": 0, "the average model": 1, "the model trained alone": 2, "neighbours": 3}


def rules() -> dict[str, Rule]:
    """Return the rules by name: base methods, the mixture, what changes without a part, and other pseudo-samples."""
    found = {base: Rule((base,), (1.0,), fixed=True) for base in BASES}
    found["knn-per"] = Rule(("fedavg", "fedavg+neighbours"), (0.5, 0.5), fixed=True)
    found["mixture"] = Rule(PARTS, CHOSEN)
    for name, k in WITHOUT.items():
        found[f"without {name}"] = Rule(PARTS[:k] + PARTS[k + 1 :], CHOSEN[:k] + CHOSEN[k + 1 :])
    for factor in (0.1, 0.3, 3.0, 10.0):
        found[f"pseudo-samples x {factor:g}"] = Rule(PARTS, tuple(factor * count for count in CHOSEN))
    for count in (0.2, 1.0):
        found[f"{count:g} pseudo-samples each"] = Rule(PARTS, (count,) * 4)
    found["equal weights"] = Rule(PARTS, (0.25,) * 4, fixed=True)
    found["neighbours of the average model"] = Rule((*PARTS[:3], "fedavg+neighbours"), CHOSEN)
    found["and FedAvg+FT"] = Rule((*PARTS, "fedavg-ft"), (*CHOSEN, 1.0))
    return found


def weights_by(rule: Rule, shown: Shown, by_round: Tensor) -> Tensor:
    """Return the weights (rounds, K) of a rule, given its predictions (rounds, K, rows, outputs) of validation rows."""
    prior = torch.tensor(rule.prior, dtype=torch.float64)
    target = torch.from_numpy(shown.target)
    if rule.fixed:
        return prior.expand(len(by_round), -1)
    if target.is_floating_point():
        pairs = zip(by_round[..., 0], target.double(), strict=True)
        return torch.stack([value_weights(values, wanted, prior) for values, wanted in pairs])
    index = target[:, None, :, None].expand(-1, by_round.shape[1], -1, 1)
    return class_weights(by_round.gather(3, index).squeeze(3), prior)


def points_of(rule: Rule, shown: Shown, tasks: TaskSet, by: str) -> tuple[float | None, float | None]:
    """Return an Alice's points on pseudo-test rows in the selected round and in the last."""
    validation, test = (
        torch.stack([torch.from_numpy(part[name]).double() for name in rule.parts], dim=1)
        for part in (shown.validation, shown.test)
    )
    weights = weights_by(rule, shown, validation)
    mixed = [torch.einsum("rk,rknc->rnc", weights, part) for part in (validation, test)]
    rounds = len(weights)
    first = int(AFTER_DRIFT * rounds) if shown.drifts else 0
    ranks = [_rank(mixed[0][r], torch.from_numpy(shown.target[r]), by) for r in range(first, rounds)]
    best = first + max(range(len(ranks)), key=ranks.__getitem__)
    tested = torch.from_numpy(shown.tested)
    return _points(mixed[1][best], tested, tasks.measure), _points(mixed[1][-1], tested, tasks.measure)


def _rank(predicted: Tensor, target: Tensor, by: str) -> tuple[float, float]:
    """Return a sort key of a round, larger is better, as `records.Selection`."""
    if target.is_floating_point():
        return -float((predicted[:, 0] - target).square().mean()), 0.0
    loss = float(F.nll_loss(predicted.clamp(min=SMALLEST).log(), target))
    return (float((predicted.argmax(dim=1) == target).double().mean()) if by == "accuracy" else 0.0), -loss


def _points(predicted: Tensor, target: Tensor, kind: str) -> float | None:
    """Return points as in the tournament; targets of a regression are standardised, so their deviation is 1."""
    if kind == "error":
        return max(LOWEST, 100 * (1 - float((predicted[:, 0] - target).square().mean().sqrt())))
    value = measure(predicted.clamp(min=SMALLEST).log(), target)[kind]
    return None if value is None else 100 * value


def line_of(tasks: TaskSet, k: int, lr: float, alices: Sequence[Shown]) -> dict[str, Any]:
    """Return the line of a column."""
    column, found = tasks.columns[k], {}
    for name, rule in rules().items():
        pairs = [points_of(rule, shown, tasks, column.selected_by) for shown in alices if len(shown.tested)]
        known = [(selected, last) for selected, last in pairs if selected is not None and last is not None]
        found[name] = [round(fmean(values), 3) for values in zip(*known, strict=True)]
    return {"data": tasks.name, "column": column_name(column), "lr": lr, "alices": len(alices), "points": found}


# ---- table


def table_of(lines: Sequence[Mapping[str, Any]], lr: float, at: int) -> str:
    """Return a table of one lr: rules by data set, and the mean gap to the best rule of each column."""
    own = [line for line in lines if line["lr"] == lr]
    data = list(dict.fromkeys(line["data"] for line in own))
    best = [max(values[at] for values in line["points"].values()) for line in own]
    rows = [["rule", *(NAMES[name] for name in data), "mean gap", "largest gap"]]
    rows.append(["---"] * len(rows[0]))
    for rule in own[0]["points"]:
        means = [fmean(line["points"][rule][at] for line in own if line["data"] == name) for name in data]
        gaps = [top - line["points"][rule][at] for top, line in zip(best, own, strict=True)]
        rows.append(
            [TITLES.get(rule, rule), *(f"{value:.1f}" for value in (*means,)), f"{fmean(gaps):.2f}", f"{max(gaps):.1f}"]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def tables(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of the page."""
    kinds = (("Round selected on validation rows", 0), ("Last round", 1))
    return "\n\n".join(f"{title}, lr = {lr:g}:\n\n{table_of(lines, lr, at)}" for lr in LRS for title, at in kinds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_waffle", description=__doc__)
    parser.add_argument("data_dir", help="folder of the data sets of experiments/tournament.toml")
    parser.add_argument("predictions", type=Path, help="folder for the predictions of the base methods")
    given = parser.parse_args()
    tournament, runtime = load_tournament(TOURNAMENT), Runtime(device="cpu", data_dir=given.data_dir, workers=1)
    known = {(line["data"], line["column"], line["lr"]) for line in read_lines(RECORD)}
    for lr in LRS:
        for tasks in tournament.data.values():
            for k, column in enumerate(tasks.columns):
                if (tasks.name, column_name(column), lr) not in known:
                    alices = collect(tournament, tasks, k, lr, runtime, given.predictions)
                    append_lines(RECORD, [line_of(tasks, k, lr, alices)])
    write_between(PAGE, "study: one-waffle", tables(read_lines(RECORD)))


if __name__ == "__main__":
    main()
