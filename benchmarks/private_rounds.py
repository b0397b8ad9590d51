"""Cost and error of private rounds: python -m benchmarks.private_rounds > results/private-rounds.jsonl

Four kinds of lines, or only those that the arguments name; MNIST, CIFAR-10 and Heart Disease are in $WAFFLE_DATA:

cost     CPU seconds per round and bytes per agent beside the clear run; both runs compute their rounds in turn, and the
         ratio is the median over the rounds, so other work on the machine does not distort it
error    L1 error of WAFFLE's weights by the size of the sketch, for distances between q d_max and d_max
runs     weights and accuracy of masked runs beside clear runs of the same seed, with the spread of the seeds. Accuracy
         should differ by at most twice the standard error of a difference of two means of so many seeds. The mean
         error of the weights should be at most 0.02 where q is at most 0.8. Both were stated before the runs. With
         three seeds one of six was outside; all were then repeated with ten.
attacks  accuracy under attack without and with the guard, in the clear and masked; the attackers follow the protocol,
         or in the last column sketch, and report the lengths of, the update that they would have sent honestly
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import mean, median, stdev
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from waffle_fl.algorithms import Net, Round
from waffle_fl.algorithms.contract import Seen
from waffle_fl.algorithms.waffle_paper import WafflePaper
from waffle_fl.attacks import tamper_of
from waffle_fl.config import check_run
from waffle_fl.engines.aggregation import registered
from waffle_fl.engines.masked_agent import UpdateNumbers, UpdateReader
from waffle_fl.engines.masked_parts import TrainedRow
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.engines.tree import rows_of, tree_map
from waffle_fl.experiment import Runtime, device_of, federation_of, model_of
from waffle_fl.experiment.factories import round_settings, simulation_options
from waffle_fl.privacy.masks import derive
from waffle_fl.privacy.sketch import compress

SERIAL = Runtime(workers=1, allow_unverified=True)  # costs do not depend on which images a test set has
KINDS = ("cost", "error", "runs", "attacks")
AGENTS = {4: 2500, 10: 2500, 30: 500, 100: 100}  # samples per agent by the number of agents
COSTS = [("lenet5", "mnist", method, *pair, 6) for method in ("waffle-paper", "fedavg") for pair in AGENTS.items()]
COSTS += [("lenet5", "mnist", "waffle", 10, 2500, 6)]
COSTS += [("dla", "cifar10", "waffle-paper", 4, 32, 4)]  # the last number: rounds
SEEDS = 10
KEYS = 10
NOISE = 2 * (2 / SEEDS) ** 0.5  # largest difference of accuracies, in standard deviations of the seeds
NUMBERS = 20_000  # of an update in `weight_error`
SIZES, SPREADS = (256, 1024, 4096, 16384), (0.3, 0.8, 0.95)
AGENTS_UNDER_ATTACK = 10
HONEST: dict[int, Any] = {}  # by agent: the update that an attacker would have sent
ATTACKS = ("sign-flip(3)", "free-rider", "mimic", "far(100)", "alie(1.5)")
DIGITS = {"data": "digits", "split": "A", "rounds": 12, "attackers": 3}
HEART = {"data": "heart-disease", "target": "disease", "rounds": 40, "batch_size": 16, "lr": 0.02}
RUNS: dict[str, dict[str, Any]] = {
    **{
        f"mnist {split}": {
            "data": "mnist",
            "split": split,
            "samples_per_agent": 500,
            "rounds": 20,
            "permutation_seed": 1,
        }
        for split in ("A", "B", "C", "A*", "B*")
    },
    "heart-disease": HEART,
}


def trained(method: str, runtime: Runtime = SERIAL, **settings: Any) -> list[dict[str, Any]]:
    """Return the measurements of a run's rounds."""
    return list(rounds_of(method, runtime, **settings)[0])


def rounds_of(method: str, runtime: Runtime = SERIAL, **settings: Any) -> tuple[Iterator[dict[str, Any]], int]:
    """Return the measurements of a run, computed round by round, and the bytes of an update in the clear."""
    config = check_run(method, settings, {})
    s = config.settings
    federation = federation_of(s, "", runtime.allow_unverified)
    model = model_of(s, federation, runtime, device_of("cpu"))
    poison = tamper_of(federation, s.attack, s.attackers, s.seed) if s.attack != "none" else None

    def tamper(up: Any, r: int) -> Any:
        HONEST.update((i, rows_of(up, slice(i, i + 1))) for i in range(len(up.dy)))
        HONEST.update((i, tree_map(Tensor.clone, one)) for i, one in HONEST.items())
        return poison(up, r) if poison else up

    spec = RunSpec(config.algorithm(), federation, s.seed, tamper=tamper if poison else None)
    stream = simulate([spec], model, **simulation_options(s, runtime))
    return (dict(outcomes[0].measured) for outcomes in stream), 4 * (model.size + model.stats_size)


def cost(model: str, data: str, method: str, agents: int, samples: int, rounds: int) -> dict[str, Any]:
    """Measure one process that computes all agents and the server; the first half of the rounds is not counted."""
    options = {"data": data, "model": model, "agents": agents, "samples_per_agent": samples, "rounds": rounds}
    (clear, size), (masked, _) = (rounds_of(method, **options, privacy=p) for p in ("off", "masked"))
    pairs, uploaded = [], 0.0
    for r in range(rounds - 1):  # in the last round Alice may hold all weight
        began = time.process_time()
        next(clear)
        between = time.process_time()
        line = next(masked)
        pairs += [(between - began, time.process_time() - between)] if r >= rounds // 2 - 1 else []
        uploaded = line["uploaded"] if r == 0 else uploaded
    return {
        "kind": "cost",
        "model": model,
        "method": method,
        "agents": agents,
        "samples": samples,
        "clear_seconds": round(median(a for a, _ in pairs), 3),
        "masked_seconds": round(median(b for _, b in pairs), 3),
        "ratio": round(median(b / a for a, b in pairs), 2),
        "clear_bytes": size,
        "masked_bytes": round(uploaded / agents),
    }


def weight_error(size: int, spread: float, tries: int = 3) -> dict[str, Any]:
    """Return the mean L1 error of WAFFLE's weights over a run of 100 rounds, for ten agents and real count sketches."""
    others = np.linspace(spread, 1, 9)
    rng, errors = np.random.default_rng(0), []
    server, _ = WafflePaper().init(Net(torch.zeros(1), torch.zeros(0)), 10)
    known = torch.ones(10) > 0
    for attempt in range(tries):
        states = [server, server]
        for r in range(1, 95):
            rows = rng.normal(size=(9, NUMBERS))
            rows *= (others / np.linalg.norm(rows, axis=1))[:, None]
            key = derive(bytes(32), f"{attempt} {r}")
            found = [others, [np.linalg.norm(compress(row, size, key)) for row in rows]]
            now = Round(r, 100, torch.tensor(0), known, known, known.long(), known.long(), 32)
            weights = []
            for i, distances in enumerate(found):
                seen = torch.tensor([0.0, *distances], dtype=torch.float64)
                states[i], found_weights, _ = WafflePaper().weigh(states[i], Seen(seen), now)
                weights.append(found_weights["dy"])
            errors.append(float((weights[0] - weights[1]).abs().sum()))
    return {"kind": "error", "sketch": size, "spread": spread, "error": round(mean(errors), 4)}


def error_on_equal_updates(settings: dict[str, Any]) -> dict[str, float]:
    """Return the L1 error of the weights from sketches of 4,096 sums, for the updates of a clear run of WAFFLE.

    Two runs differ in all later updates once their weights differ; this is the error of the sketches alone, of `KEYS`
    series of sketches.
    """
    config = check_run("waffle-paper", settings, {})
    s = config.settings
    federation = federation_of(s, "", False)
    model = model_of(s, federation, SERIAL, device_of("cpu"))
    known = registered(federation, round_settings(s), model.device)
    everyone, alice = known.samples > 0, federation.alice
    sent: list[Any] = []

    def keep(up: Any, r: int) -> Any:
        sent.append(up.dy.double().numpy())
        return up

    spec = RunSpec(config.algorithm(), federation, s.seed, tamper=keep)
    method: Any = spec.algorithm
    past: list[Any] = [None] * KEYS
    errors, spreads = [], []
    for outcomes in simulate([spec], model, **simulation_options(s, SERIAL)):
        rows, r = sent[-1], outcomes[0].round
        server = outcomes[0].state.server
        now = Round(r, s.rounds, known.alice, everyone, everyone, known.samples, known.steps, s.batch_size)
        exact = torch.tensor(outcomes[0].measured["weights"], dtype=torch.float64)
        for k in range(KEYS):
            key = derive(bytes(32), f"{k} {r}")
            distances = [np.linalg.norm(compress(row - rows[alice], 4096, key)) for row in rows]
            equal = torch.full_like(server.past, 1 / len(rows))
            before = server._replace(past=equal if past[k] is None else past[k])
            after, weights, _ = method.weigh(before, Seen(torch.tensor(distances)), now)
            past[k] = after.past
            errors.append(float((weights["dy"] - exact).abs().sum()))
        others = np.delete(np.linalg.norm(rows - rows[alice], axis=1), alice)
        spreads.append(float(others.min() / others.max()))
    return {"error_mean": round(mean(errors), 4), "error_max": round(max(errors), 4), "q": round(mean(spreads), 2)}


def compared(name: str, method: str, settings: dict[str, Any], seeds: int = SEEDS) -> dict[str, Any]:
    """Compare masked and clear runs: accuracy of the last five rounds, and the error of the weights."""
    runtime, both = Runtime(), {}
    for p in ("off", "masked"):
        both[p] = [trained(method, runtime, **settings, seed=seed, privacy=p) for seed in range(1, seeds + 1)]
    scores = {p: [mean(line["accuracy"] for line in lines[-5:]) for lines in runs] for p, runs in both.items()}
    return {
        "kind": "runs",
        "data": name,
        "method": method,
        "clear": round(100 * mean(scores["off"]), 2),
        "masked": round(100 * mean(scores["masked"]), 2),
        "seeds_sd": round(100 * stdev(scores["off"]), 2),
        **error_on_equal_updates({**settings, "seed": 1}),
    }


def attacked(method: str, attack: str) -> dict[str, Any]:
    """Return the mean accuracy of the last three rounds on the digits with three of ten agents malicious."""
    found = {}
    for p, guard in product(("off", "masked"), ("off", "standard")):
        lines = trained(method, **DIGITS, attack=attack, privacy=p, guard=guard)
        name = f"{'masked' if p == 'masked' else 'clear'}{'_guard' if guard == 'standard' else ''}"
        found[name] = round(100 * mean(line["accuracy"] for line in lines[-3:]), 2)
    with patch("waffle_fl.engines.masked.UpdateReader", LyingReader):
        lines = trained(method, **DIGITS, attack=attack, privacy="masked", guard="standard")
    found["masked_guard_lying"] = round(100 * mean(line["accuracy"] for line in lines[-3:]), 2)
    return {"kind": "attacks", "method": method, "attack": attack, **found}


class LyingReader(UpdateReader):
    """Reads an attacker's sums from its poisoned update, and all that the guard sees from its honest one."""

    def read(self, trained: TrainedRow, ident: int, r: int, attempt: int) -> UpdateNumbers:
        """Return the numbers of an agent; attackers are the last ones."""
        sent = super().read(trained, ident, r, attempt)
        if ident < AGENTS_UNDER_ATTACK - DIGITS["attackers"]:
            return sent
        honest = super().read(trained._replace(up=HONEST[ident]), ident, r, attempt)
        return honest._replace(summed=sent.summed) if sent.code == 0 else sent


def table_of(kind: str, record: Sequence[dict[str, Any]]) -> str:
    """Return the lines of a kind as the table in docs/privacy.md."""
    found = [line for line in record if line["kind"] == kind]
    if kind == "cost":
        head = ["network", "method", "agents", "samples", "s, clear", "s, masked", "ratio"]
        head += ["KB, clear", "KB, masked", "ratio"]
        keys = ("model", "method", "agents", "samples", "clear_seconds", "masked_seconds")
        rows = [
            [
                *(line[key] for key in keys),
                f"{line['ratio']:.2f}",
                *(f"{line[key] / 1000:.0f}" for key in ("clear_bytes", "masked_bytes")),
                f"{line['masked_bytes'] / line['clear_bytes']:.2f}",
            ]
            for line in found
        ]
    elif kind == "error":
        head = ["q", *(f"k = {size:,}" for size in SIZES)]
        rows = [[q, *(f"{line['error']:.3f}" for line in found if line["spread"] == q)] for q in SPREADS]
    elif kind == "attacks":
        head = ["method", "attack", "no guard, clear", "no guard, masked", "guard, clear", "guard, masked"]
        head += ["guard, masked, attackers lie"]
        keys = ("method", "attack", "clear", "masked", "clear_guard", "masked_guard", "masked_guard_lying")
        rows = [[line[key] for key in keys] for line in found]
    else:
        head = ["data", "clear", "masked", "sd of the seeds", "within seed noise", "q"]
        head += ["L1 error of the weights, mean", "largest"]
        keys = ("clear", "masked", "seeds_sd")
        rows = [
            [
                line["data"],
                *(f"{line[key]:.2f}" for key in keys),
                "yes" if abs(line["masked"] - line["clear"]) <= NOISE * line["seeds_sd"] else "no",
                *(line[key] for key in ("q", "error_mean", "error_max")),
            ]
            for line in found
        ]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))


def lines(kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of the record, of these kinds."""
    if "cost" in kinds:
        yield from (cost(*one) for one in COSTS)
    if "error" in kinds:
        yield from (weight_error(size, spread) for spread, size in product(SPREADS, SIZES))
    if "runs" in kinds:
        yield from (compared(name, "waffle-paper", settings) for name, settings in RUNS.items())
    if "attacks" in kinds:
        yield from (attacked(method, attack) for method, attack in product(("fedavg", "waffle-paper"), ATTACKS))


if __name__ == "__main__":
    for line in lines(sys.argv[1:] or KINDS):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
