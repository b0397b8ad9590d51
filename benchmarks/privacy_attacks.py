"""Measure attacks on privacy on Heart Disease: python -m benchmarks.privacy_attacks

The attacker is the server. It sees every update in the clear, and only their weighted sum if rounds are masked; with
differential privacy the gradients are noised. Writes results/privacy-attacks.jsonl and the table of
docs/privacy-attacks.md; with `table` only the table, from the record. Three kinds of lines:

reconstruction  training rows recovered from one update of one step; the server chose the weights, or they are random
membership      is a row among a site's training rows? A likelihood-ratio attack with shadow runs (LiRA)
property        are 30 % or 60 % of a site's rows women? A linear classifier of updates, trained on shadow runs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from paper.markdown import table
from torch import Tensor

from benchmarks.doc_tables import write_between
from waffle_fl import Federation, FlatModel, RunSpec, simulate
from waffle_fl.algorithms import ALGORITHMS, SGD, Net
from waffle_fl.config import check_run
from waffle_fl.engines.run_spec import fitted, initial_state
from waffle_fl.experiment import federation_of
from waffle_fl.models import mlp
from waffle_fl.randomness import generator

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "results" / "privacy-attacks.jsonl", ROOT / "docs" / "privacy-attacks.md"
KINDS = ("reconstruction", "membership", "property")
MODES = ("clear", "masked", "dp 8", "dp 1", "masked+dp 8", "masked+dp 1")  # the number is epsilon
DELTA = 1e-4
TRAPS = 2048  # hidden units of the network whose weights the server chose
SMALL = 29  # rows of a small table
NEAR = 0.05  # a row is recovered if no column is off by more: numbers in deviations, categories 0 or 1
MEMBERSHIP: dict[str, Any] = {"runs": 48, "rounds": 60, "batch_size": 16, "lr": 0.2}
LATE = 10  # rounds at the end whose models are averaged
PROPERTY: dict[str, Any] = {"runs": 160, "rounds": 5, "batch_size": 16, "lr": 0.1}
SHARES, ROWS, SEX = (0.3, 0.6), 60, 1  # of women; rows of the site; column
RIDGE = 0.1

Hospital: TypeAlias = tuple[Tensor, Tensor]  # rows and labels
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class View(NamedTuple):
    """What the server sees of an agent in one round: a model before, and one after."""

    before: Tensor
    after: Tensor


def hospitals() -> dict[str, Hospital]:
    """Return the rows of the four hospitals, with columns standardised together."""
    s = check_run("fedavg", {"data": "heart-disease", "target": "disease"}, {}).settings
    f = federation_of(s, "", False)
    rows = [torch.cat([train, test]) for train, test in zip(f.train, f.test, strict=True)]
    return {name: (f.x[some].float(), f.y[some]) for name, some in zip(f.names, rows, strict=True)}


def privacy_of(mode: str) -> dict[str, Any]:
    """Return the options of `simulate` for a mode."""
    privacy, _, epsilon = mode.partition(" ")
    return {
        "privacy": "off" if mode == "clear" else privacy,
        **({"epsilon": float(epsilon), "delta": DELTA} if epsilon else {}),
    }


def federation(parts: dict[str, Hospital], test: Hospital) -> Federation:
    """Return a federation with these training rows; the test rows only serve to score models."""
    arrays = {name: (x.numpy(), y.numpy(), test[0].numpy(), test[1].numpy()) for name, (x, y) in parts.items()}
    return Federation.from_arrays(arrays, class_names=("no", "yes"), duplicates="keep")


def views(
    federations: Sequence[Federation], model: FlatModel, mode: str, start: Tensor | None = None, **options: Any
) -> list[list[list[View]]]:
    """Train FedAvg on all federations; return what the server sees, by federation, round and agent.

    All runs start from the same model, which the server knows.
    """
    algorithm = ALGORITHMS["fedavg"](sgd=SGD(options.pop("lr")))
    sent: list[list[Tensor]] = [[] for _ in federations]

    def listener(k: int) -> Any:
        def tamper(up: Any, r: int) -> Any:
            sent[k].append(up.dy.clone())
            return up

        return tamper

    state = initial_state(fitted(RunSpec(algorithm, federations[0], 0), model), model)
    if start is not None:
        state = state._replace(server=state.server._replace(x=start))
    specs = [
        RunSpec(algorithm, f, seed, state=state, tamper=listener(seed) if "masked" not in mode else None)
        for seed, f in enumerate(federations)
    ]
    models = [[state.server.x] for _ in specs]
    for outcomes in simulate(specs, model, workers=1, **options, **privacy_of(mode)):
        for outcome in outcomes:
            models[outcome.index].append(outcome.state.server.x.clone())
    found = []
    for k, f in enumerate(federations):
        pairs = list(zip(models[k], models[k][1:], strict=False))
        found.append(
            [
                [View(before, before + sent[k][r][i] if sent[k] else after) for i in range(f.agents)]
                for r, (before, after) in enumerate(pairs)
            ]
        )
    return found


def trap(model: FlatModel, rows: Tensor) -> Tensor:
    """Return weights whose hidden units are active beyond one threshold each along one direction; neighbours differ by
    few rows. The server knows the columns' distribution, here that of all rows.
    """
    shapes = {name: value.shape for name, value in model.state_dict(model.init(0)).items()}
    first_weight, first_bias, last_weight, last_bias = shapes
    hidden, features = shapes[first_weight]
    direction = torch.from_numpy(generator(0, "trap").standard_normal(features)).float() / features**0.5
    along = (rows @ direction).sort().values
    thresholds = torch.linspace(float(along[0]) - 0.01, float(along[-1]) + 0.01, hidden)
    signs = torch.tensor([0.5, -0.5]).repeat(hidden // 2)  # so that the outputs nearly cancel
    parts = {
        first_weight: direction.expand(hidden, features),
        first_bias: -thresholds,
        last_weight: torch.stack([signs, -signs]),
        last_bias: torch.zeros(shapes[last_bias]),
    }
    return torch.cat([parts[name].reshape(-1) for name in shapes])


def recovered(model: FlatModel, start: Tensor, update: Tensor, rows: Tensor) -> int:
    """Return how many of the rows can be read from an update: from single units, and from differences of neighbours."""
    last = list(model.state_dict(Net(start, start[:0])).values())[2]
    weight, bias, *_ = model.state_dict(Net(update, update[:0])).values()
    scale = (last[0] - last[1])[:, None]
    weight, bias = (weight / scale).double(), (bias[:, None] / scale).double()
    candidates = []
    for w, b in ((weight, bias), (weight[:-1] - weight[1:], bias[:-1] - bias[1:])):
        used = b.abs().flatten() > 1e-9
        candidates.append(w[used] / b[used])
    found = torch.cat(candidates)
    if not len(found):
        return 0
    return int(((found[:, None] - rows[None].double()).abs().amax(dim=2) < NEAR).any(dim=0).sum())


def reconstruction(mode: str) -> Iterator[dict[str, Any]]:
    """Attack one update of one step from all rows of each hospital, for small tables and for whole ones."""
    for weights, hidden, most in (("chosen", TRAPS, SMALL), ("chosen", TRAPS, 10**6), ("random", 64, SMALL)):
        data = {name: (x[:most], y[:most]) for name, (x, y) in hospitals().items()}
        rows = torch.cat([x for x, _ in data.values()])
        network = partial(mlp, (rows.shape[1],), 2, hidden=hidden)
        model = FlatModel(network)
        start = trap(model, rows) if weights == "chosen" else model.init(0).params
        options: dict[str, Any] = {"rounds": 1, "batch_size": 512, "lr": 1.0}
        (((seen,),)) = views([federation(data, next(iter(data.values())))], model, mode, start, **options)
        counts = [
            recovered(model, start, view.after - view.before, x)
            for view, (x, _) in zip(seen, data.values(), strict=True)
        ]
        about = {"kind": "reconstruction", "mode": mode, "weights": weights, "rows": [len(x) for x, _ in data.values()]}
        yield {**about, "recovered": counts}


def without_runs(given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the number of runs, and the options of each."""
    return given["runs"], {name: value for name, value in given.items() if name != "runs"}


def margins(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> Array:
    """Return by how much the output of the right class exceeds the other."""
    output = model.predict(params, params[:0], x)
    right = output.gather(1, y[:, None]).squeeze(1)
    return (right - output.gather(1, 1 - y[:, None]).squeeze(1)).double().numpy()


def membership(mode: str) -> dict[str, Any]:
    """In each run half of every hospital's rows are members. The attacker knows the other runs' members and models."""
    data, (runs, options) = hospitals(), without_runs(MEMBERSHIP)
    members = {
        name: np.stack([generator(k, "members", name).permutation(len(x)) < len(x) // 2 for k in range(runs)])
        for name, (x, _) in data.items()
    }
    test = next(iter(data.values()))
    federations = [
        federation({name: (x[members[name][k]], y[members[name][k]]) for name, (x, y) in data.items()}, test)
        for k in range(runs)
    ]
    model = FlatModel(lambda: mlp((test[0].shape[1],), 2))
    seen = views(federations, model, mode, **options)
    scores = []
    for i, (name, (x, y)) in enumerate(data.items()):
        features = []
        for rounds in seen:
            after = np.stack([margins(model, one[i].after, x, y) for one in rounds])
            before = np.stack([margins(model, one[i].before, x, y) for one in rounds])
            features.append([after[-LATE:].mean(axis=0), (after - before).mean(axis=0)])
        scores.append(likelihood_ratios(np.asarray(features), members[name]))
    ratios, truth = np.concatenate(scores, axis=1), np.concatenate(list(members.values()), axis=1)
    each = [auc(s, t) for s, t in zip(ratios, truth, strict=True)]
    advantages = [float((s[t] > 0).mean() - (s[~t] > 0).mean()) for s, t in zip(ratios, truth, strict=True)]
    limit = np.quantile(ratios[~truth], 0.99)
    return {
        "kind": "membership",
        "mode": mode,
        "runs": runs,
        "auc": round(fmean(each), 3),
        "auc_sd": round(stdev(each), 3),
        "advantage": round(fmean(advantages), 3),
        "advantage_sd": round(stdev(advantages), 3),
        "found_at_1_percent": round(float((ratios[truth] > limit).mean()), 3),
    }


def likelihood_ratios(features: Array, members: Array) -> Array:
    """Return, per run and row, the log-likelihood ratio of membership, from the other runs (runs, features, rows).

    Per row and feature there are two normal distributions, with one variance for all rows (Carlini et al. 2022).
    """
    total = np.zeros(members.shape)
    for k in range(len(features)):
        others = np.arange(len(features)) != k
        inside = np.where(members[others][:, None], features[others], np.nan)
        outside = np.where(members[others][:, None], np.nan, features[others])
        means = [np.nanmean(part, axis=0) for part in (inside, outside)]
        spread = np.sqrt(np.nanmean([np.nanvar(part, axis=0) for part in (inside, outside)], axis=0))
        spread = spread.mean(axis=1, keepdims=True) + 1e-12
        distances = [((features[k] - mean) / spread) ** 2 for mean in means]
        total[k] = ((distances[1] - distances[0]) / 2).sum(axis=0)
    return total


def property_of(mode: str) -> dict[str, Any]:
    """In each run the first hospital has 60 rows with one of two shares of women, the others random halves."""
    data, (runs, options) = hospitals(), without_runs(PROPERTY)
    target, (x, y) = next(iter(data.items()))
    women = (x[:, SEX] < 0).numpy()
    federations, truth = [], np.arange(runs) % 2
    for k in range(runs):
        rng = generator(k, "property")
        count = round(SHARES[truth[k]] * ROWS)
        own = np.concatenate(
            [rng.permutation(np.flatnonzero(women))[:count], rng.permutation(np.flatnonzero(~women))[: ROWS - count]]
        )
        parts = {name: half(rng, some) for name, some in data.items()}
        federations.append(federation({**parts, target: (x[own], y[own])}, (x, y)))
    model = FlatModel(lambda: mlp((x.shape[1],), 2))
    seen = views(federations, model, mode, **options)
    features = np.stack(
        [torch.stack([one[0].after - one[0].before for one in rounds]).mean(dim=0).numpy() for rounds in seen]
    )
    scores, halves = np.zeros(runs), np.arange(runs) // 2 % 2
    for part in (0, 1):
        scores[halves == part] = classified(features[halves != part], truth[halves != part], features[halves == part])
    right = (scores > 0) == (truth == 1)
    return {
        "kind": "property",
        "mode": mode,
        "runs": runs,
        "auc": round(fmean(auc(scores[halves == part], truth[halves == part] == 1) for part in (0, 1)), 3),
        "right": round(float(right.mean()), 3),
        "right_se": round(float(right.std() / runs**0.5), 3),
    }


def half(rng: Any, rows: Hospital) -> Hospital:
    some = rng.permutation(len(rows[0]))[: len(rows[0]) // 2]
    return rows[0][some], rows[1][some]


def classified(known: Array, truth: Array, new: Array) -> Array:
    """Return scores of new updates by ridge regression on standardised numbers, with all weight in the known span."""
    mean, scale = known.mean(axis=0), known.std(axis=0) + 1e-12
    known, new = (known - mean) / scale, (new - mean) / scale
    products = known @ known.T / known.shape[1]
    weights = np.linalg.solve(products + RIDGE * np.eye(len(known)), 2.0 * truth - 1 - (2 * truth - 1).mean())
    scores: Array = new @ known.T @ weights
    return scores


def auc(scores: Array, truth: Array) -> float:
    """Return the probability that a positive case has the higher score."""
    inside, outside = scores[truth][:, None], scores[~truth][None]
    return float((inside > outside).mean() + (inside == outside).mean() / 2)


def lines(kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of the record, of these kinds."""
    for mode in MODES:
        if "reconstruction" in kinds:
            yield from reconstruction(mode)
        if "membership" in kinds:
            yield membership(mode)
        if "property" in kinds:
            yield property_of(mode)


def attack_table(record: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/privacy-attacks.md."""
    rows: dict[str, list[str]] = {}
    for line in record:
        for name, value in cells_of(line):
            rows.setdefault(name, []).append(value)
    return table(["attack", *(mode.replace(" ", ", epsilon ") for mode in MODES)], [[n, *v] for n, v in rows.items()])


def cells_of(line: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the cells of one line of the record, each with the name of its row."""
    if line["kind"] == "reconstruction":
        whole = "29 rows per site" if set(line["rows"]) == {SMALL} else "all rows"
        yield f"rows recovered, {line['weights']} weights, {whole}", f"{sum(line['recovered'])} of {sum(line['rows'])}"
    elif line["kind"] == "membership":
        yield "membership, AUC", f"{line['auc']:.3f} ± {line['auc_sd']:.3f}"
        yield "membership, advantage in points", f"{100 * line['advantage']:.1f} ± {100 * line['advantage_sd']:.1f}"
        yield "members found at 1 % false alarms, percent", f"{100 * line['found_at_1_percent']:.1f}"
    else:
        yield "share of women, AUC", f"{line['auc']:.3f}"
        yield "share of women, right answers in percent", f"{100 * line['right']:.0f} ± {100 * line['right_se']:.0f}"


def main(arguments: Sequence[str]) -> None:
    """Measure all attacks, or with `table` none; write the record, and the table of the page."""
    torch.set_num_threads(1)
    if arguments != ["table"]:
        found = []
        for line in lines(KINDS):
            found.append(json.dumps(line) + "\n")
            sys.stdout.write(found[-1])
            sys.stdout.flush()
        RECORD.write_text("".join(found))
    write_between(PAGE, "attacks", attack_table([json.loads(line) for line in RECORD.read_text().splitlines()]))


if __name__ == "__main__":
    main(sys.argv[1:])
