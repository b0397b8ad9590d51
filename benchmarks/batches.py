"""Measure what the small last mini-batch does: python -m benchmarks.batches > results/batches.jsonl

remainder   Local and FedAvg on ten agents with 33 digits each, batch size 32: accuracy after 40 rounds, and its
            standard deviation over the last ten rounds
rows        weight that WAFFLE gives an ally with 185 to 195 rows, and the ally's own error when it trains alone
weighting   the same as `remainder`, with the gradient of each mini-batch multiplied by its relative size
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from waffle_fl import SGD, FedAvg, Federation, FlatModel, Local, RunSpec, WafflePaper, build, load, simulate, split
from waffle_fl.algorithms import Net
from waffle_fl.batches import Remainder
from waffle_fl.models.batch import squared_error
from waffle_fl.models.passes import Passes

SEEDS = range(1, 6)
ROWS = range(195, 184, -1)
NOISE = 3.0  # of the targets; the coefficients have variance 1
REMAINDERS: tuple[Remainder, ...] = ("keep", "drop", "spread")


def digits() -> tuple[Federation, FlatModel]:
    """Ten agents with 33 training images each, and a linear model."""
    data = load("digits")
    parts = split(data.y_train, data.y_test, "A", agents=10, samples_per_agent=33, test="all")
    return build(data, parts), FlatModel(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def remainder() -> Iterator[dict[str, Any]]:
    """Yield accuracy and scatter of Local and FedAvg for each treatment of the remainder."""
    federation, model = digits()
    for method in (Local, FedAvg):
        for how in REMAINDERS:
            yield {"part": "remainder", "remainder": how, **_scatter(method, federation, model, how)}


def weighting() -> Iterator[dict[str, Any]]:
    """Yield the same for `spread`, with and without each gradient multiplied by the relative size of its mini-batch."""
    federation, model = digits()
    plain = Passes.plain

    def weighted(self: Passes, params: Any, stats: Any, batch: Any) -> Net:
        net = plain(self, params, stats, batch)
        return net._replace(params=net.params * batch.weight.sum() / 16.5)

    for method in (Local, FedAvg):
        for by_size in (False, True):
            with patch.object(Passes, "plain", weighted if by_size else plain):
                found = _scatter(method, federation, model, "spread", engine="loop")
            yield {"part": "weighting", "by_size": by_size, **found}


def _scatter(method: Any, federation: Federation, model: FlatModel, how: Remainder, **more: Any) -> dict[str, Any]:
    specs = [RunSpec(method(SGD(lr=0.5)), federation, seed) for seed in SEEDS]
    accuracy: list[list[float]] = [[] for _ in specs]
    for outcomes in simulate(specs, model, rounds=40, batch_size=32, remainder=how, **more):
        for outcome in outcomes:
            accuracy[outcome.index].append(100 * outcome.measured["accuracy"])
    return {
        "method": method.about.title,
        "accuracy": round(mean(run[-1] for run in accuracy), 2),
        "scatter": round(mean(stdev(run[-10:]) for run in accuracy), 3),
    }


def three_sites(ally_rows: int) -> Federation:
    """Alice, an ally with the same coefficients and so many rows, and a stranger with others; linear regression."""
    random = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 10, generator=random)
    sites = {}
    for name, coefficients in (("alice", ours), ("ally", ours), ("stranger", theirs)):
        x = torch.randn(260, 10, generator=random)
        y = x @ coefficients + NOISE * torch.randn(260, generator=random)
        rows = ally_rows if name == "ally" else 195
        train = torch.arange(rows)
        sites[name] = tuple(part.numpy() for part in (x[train], y[train], x[200:], y[200:]))
    return Federation.from_arrays(sites, alice="alice", task="regression")


def rows() -> Iterator[dict[str, Any]]:
    """Yield the ally's weight in Alice's model and its error alone, for each number of its rows."""
    for how in REMAINDERS:
        for n in ROWS:
            federation = three_sites(n)
            model = FlatModel(lambda: nn.Linear(10, 1), loss=squared_error)
            waffle = [RunSpec(WafflePaper(SGD(0.1)), federation, seed) for seed in SEEDS]
            weights = [
                outcome.measured["weights"][1]
                for outcomes in simulate(waffle, model, rounds=40, batch_size=32, remainder=how)
                for outcome in outcomes
            ]
            alone = [RunSpec(Local(SGD(0.1)), federation.only(1), seed) for seed in SEEDS]
            *_, last = simulate(alone, model, rounds=40, batch_size=32, remainder=how)
            error = mean(outcome.measured["rmse"] for outcome in last)
            yield {
                "part": "rows",
                "remainder": how,
                "rows": n,
                "weight": round(mean(weights), 4),
                "rmse": round(error, 4),
            }


def tables(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the Markdown table of each part, for docs/how-to/small-sites.md."""
    parts = {part: [line for line in lines if line["part"] == part] for part in ("remainder", "weighting", "rows")}
    by_rows = {(line["remainder"], line["rows"]): line for line in parts["rows"]}
    return {
        "remainder": _table(
            ("method", "remainder", "accuracy", "scatter"),
            [(line["method"], line["remainder"], line["accuracy"], line["scatter"]) for line in parts["remainder"]],
        ),
        "weighting": _table(
            ("method", "gradients", "accuracy", "scatter"),
            [
                (line["method"], "by size" if line["by_size"] else "equal", line["accuracy"], line["scatter"])
                for line in parts["weighting"]
            ],
        ),
        "rows": _table(
            ("rows", "weight: keep", "spread", "error: keep", "spread"),
            [
                (n, *(by_rows[how, n][key] for key in ("weight", "rmse") for how in ("keep", "spread")))
                for n in dict.fromkeys(line["rows"] for line in parts["rows"])
            ],
        ),
    }


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    for part in (remainder, weighting, rows):
        for line in part():
            print(json.dumps(line), flush=True)
