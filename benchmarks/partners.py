"""Compare rules that choose an agent's partners: python -m benchmarks.partners tune > results/partner-rules.jsonl

`tune` draws the federations on which the rule was chosen, `confirm` new ones (append it with >>). In each the right
partners of every agent are known. A rule sees the cross-validated scores of all coalitions, computed from training rows
alone. The true value of a coalition is the accuracy of the same training on 4,000 new rows of the agent. The regret of
a rule is the value of the best coalition minus that of the chosen one.

allies      four agents with one concept
enemy       three with one concept, one with flipped labels
strangers   four unrelated concepts
clusters    three with one concept, two with another
mixed       three with one concept, one with flipped labels, one with random labels
near        four concepts at 30 degrees from a common one

`python -m benchmarks.partners speed > results/partner-speed.jsonl` measures the time of a study.

The agents have 30, 60 and 120 rows, ten features and 10 % label noise. One seed, four folds, 40 rounds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from waffle_fl import SGD, FedAvg, Federation, RunSpec, simulate
from waffle_fl.config import Settings
from waffle_fl.decision.bootstrap import Interval, contrasts, figures
from waffle_fl.decision.coalitions import Plan, cross_validate
from waffle_fl.decision.partners import study_partners
from waffle_fl.decision.shapley import Coalition, Contributions, coalitions_of, exact, leave_one_out
from waffle_fl.engines.run_spec import own_net
from waffle_fl.experiment import Runtime, model_of

FEATURES, NEW_ROWS, NOISE = 10, 4000, 0.1
DRAWS = {"tune": range(6), "confirm": range(100, 106)}
SETTINGS = Settings(data="tables", rounds=40, batch_size=16)
Federations = dict[str, list[tuple[str, float, float]]]  # name -> (concept, angle to it, share of flipped labels)

KINDS: Federations = {
    "allies": [("a", 0, 0)] * 4,
    "enemy": [*[("a", 0.0, 0.0)] * 3, ("a", 0, 1)],
    "strangers": [("a", 0, 0), ("b", 0, 0), ("c", 0, 0), ("d", 0, 0)],
    "clusters": [*[("a", 0.0, 0.0)] * 3, *[("b", 0.0, 0.0)] * 2],
    "mixed": [*[("a", 0.0, 0.0)] * 3, ("a", 0, 1), ("a", 0, 0.5)],
    "near": [("a", 30, 0)] * 4,
}
SIZES = (30, 60, 120)


def federation_of(kind: str, draw: int) -> Federation:
    """Return a federation with training rows, and new rows as test rows."""
    rng = np.random.default_rng([draw, list(KINDS).index(kind)])
    basis = np.linalg.qr(rng.normal(size=(FEATURES, FEATURES)))[0]
    concepts = dict(zip("abcd", basis, strict=False))
    agents = {}
    for i, (name, angle, flipped) in enumerate(KINDS[kind]):
        other = rng.normal(size=FEATURES)
        other -= concepts[name] * (other @ concepts[name])
        turned = np.deg2rad(angle)
        effect = np.cos(turned) * concepts[name] + np.sin(turned) * other / np.linalg.norm(other)
        parts = []
        for rows in (SIZES[i % 3], NEW_ROWS):
            x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
            wrong = (rng.random(rows) < NOISE) ^ (rng.random(rows) < flipped)
            parts += [x, ((x @ effect > 0) ^ wrong).astype(np.int64)]
        agents[f"{kind}{i}"] = parts
    return Federation.from_arrays(agents)


def true_values(federation: Federation, plans: Sequence[Plan]) -> dict[tuple[Coalition, int], float]:
    """Return the accuracy of every coalition's model on each member's new rows."""
    model = model_of(SETTINGS, federation, Runtime(), torch.device("cpu"))
    everyone = range(federation.agents)
    specs = []
    for plan in plans:
        gone = [str(i) for i in everyone if i not in plan.members]
        one_row = tuple(rows[:1] for rows in federation.train)
        reduced = replace(federation, alice=min(plan.members), test=one_row).without(*gone)
        specs.append(RunSpec(FedAvg(SGD(SETTINGS.lr)), reduced, 1))
    *_, last = simulate(specs, model, rounds=SETTINGS.rounds, batch_size=SETTINGS.batch_size, workers=1)
    found = {}
    for plan, spec, outcome in zip(plans, specs, last, strict=True):
        net = own_net(spec, outcome.state, model)
        for i in plan.members:
            rows = federation.test[i]
            right = model.predict(*net, federation.x[rows]).argmax(dim=1) == federation.labels(i, rows)
            found[plan.members, i] = float(right.double().mean())
    return found


class Evidence(NamedTuple):
    """What a rule may use: cross-validated scores of one agent."""

    alice: int
    values: Mapping[Coalition, float]
    shapley: Mapping[int, Interval]
    left_out: Mapping[int, Interval]  # partner -> value of everyone minus that of everyone without the partner
    difference: Callable[[Coalition, Coalition], Interval]

    @property
    def alone(self) -> Coalition:
        return Coalition([self.alice])

    @property
    def everyone(self) -> Coalition:
        return max(self.values, key=len)

    def prefixes(self) -> list[Coalition]:
        """Coalitions that the partners join in the order of their Shapley values."""
        ranked = sorted(self.shapley, key=lambda partner: -self.shapley[partner].value)
        return [Coalition([self.alice, *ranked[:k]]) for k in range(len(ranked) + 1)]


def best(seen: Evidence, among: Sequence[Coalition], larger: bool = False) -> Coalition:
    return max(among, key=lambda c: (round(seen.values[c], 9), len(c) if larger else -len(c)))


def within(seen: Evidence, among: Sequence[Coalition], errors: float) -> list[Coalition]:
    top = best(seen, among)
    near = [top]
    for coalition in (c for c in among if c != top):
        lead = seen.difference(top, coalition)
        near += [coalition] if lead.value <= errors * lead.standard_error else []
    return near


def unless(seen: Evidence, chosen: Coalition, errors: float) -> Coalition:
    """Return the chosen coalition if its lead over training alone exceeds `errors` standard errors, else alone."""
    if chosen == seen.alone:
        return chosen
    lead = seen.difference(chosen, seen.alone)
    return chosen if lead.value > errors * lead.standard_error else seen.alone


def positive(seen: Evidence, errors: float) -> Coalition:
    """Keep the partners whose Shapley value exceeds `errors` standard errors."""
    kept = [p for p, value in seen.shapley.items() if value.value > errors * value.standard_error]
    return Coalition([seen.alice, *kept])


def not_harmful(seen: Evidence, errors: float) -> Coalition:
    """Keep the partners whose removal from the coalition of all does not help by more than `errors` standard errors."""
    kept = [p for p, value in seen.left_out.items() if value.value > -errors * value.standard_error]
    return Coalition([seen.alice, *kept])


def tried(seen: Evidence, errors: float) -> list[Coalition]:
    """Return the candidates of a study that leaves out each partner: alone, the kept partners, everyone."""
    return [seen.alone, not_harmful(seen, errors), seen.everyone]


RULES: dict[str, Callable[[Evidence], Coalition]] = {
    "alone": lambda s: s.alone,
    "everyone": lambda s: s.everyone,
    "best coalition": lambda s: best(s, list(s.values)),
    "best coalition, ties larger": lambda s: best(s, list(s.values), larger=True),
    "smallest coalition within 1 se of the best": lambda s: min(within(s, list(s.values), 1), key=len),
    "largest coalition within 1 se of the best": lambda s: max(within(s, list(s.values), 1), key=len),
    "best prefix by Shapley value": lambda s: best(s, s.prefixes()),
    "smallest prefix within 1 se of the best": lambda s: min(within(s, s.prefixes(), 1), key=len),
    "Shapley value > 1 se, if better than alone": lambda s: unless(s, positive(s, 1), 0),
    "Shapley value > -0.5 se, if better than alone": lambda s: unless(s, positive(s, -0.5), 0),
    "Shapley value > 0": lambda s: positive(s, 0),
    "Shapley value > 0, if better than alone": lambda s: unless(s, positive(s, 0), 0),
    "Shapley value > 0, if better than alone by 1 se": lambda s: unless(s, positive(s, 0), 1),
    "Shapley value > 0, if not worse than alone": lambda s: unless(s, positive(s, 0), -1e-9),
    "Shapley value > 0, if not worse than alone by 0.5 se": lambda s: unless(s, positive(s, 0), -0.5),
    "Shapley value > 0, if not worse than alone by 1 se": lambda s: unless(s, positive(s, 0), -1),
    "left out > 0, if not worse than alone by 0.5 se": lambda s: unless(s, not_harmful(s, 0), -0.5),
    "left out > -0.5 se, if not worse than alone by 0.5 se": lambda s: unless(s, not_harmful(s, 0.5), -0.5),
    "left out > -1 se, if not worse than alone by 0.5 se": lambda s: unless(s, not_harmful(s, 1), -0.5),
    "left out > -0.5 se, if better than alone": lambda s: unless(s, not_harmful(s, 0.5), 0),
    "best of alone, left out > 0 and everyone, ties larger": lambda s: best(s, tried(s, 0), larger=True),
    "best of alone, left out > -0.5 se and everyone, ties larger": lambda s: best(s, tried(s, 0.5), larger=True),
    "largest of alone, left out > 0 and everyone within 0.5 se of the best": lambda s: max(
        within(s, tried(s, 0), 0.5), key=len
    ),
}


def measured(kind: str, draw: int) -> Iterator[dict[str, Any]]:
    """Yield one line per agent: the true value of its best coalition, and the regret of every rule."""
    federation = federation_of(kind, draw)
    agents = list(range(federation.agents))
    plans = [Plan("fedavg", c) for i in agents for c in coalitions_of(i, agents[i:])]
    true = true_values(federation, plans)
    held = cross_validate(plans, federation, SETTINGS, (1,), {}, Runtime(workers=1))
    for alice in agents:
        known = coalitions_of(alice, agents)
        outputs = {c: held.outputs[Plan("fedavg", c), alice] for c in known}
        target = held.target[alice]

        def intervals(contributions: Contributions, known=known, seen=outputs, truth=target) -> dict[int, Interval]:  # type: ignore[no-untyped-def]
            table = [[one.get(c, 0.0) for c in known] for one in contributions.values()]
            found = contrasts("accuracy", list(seen.values()), table, truth)
            return dict(zip(contributions, found, strict=True))

        def difference(c: Coalition, d: Coalition, seen=outputs, truth=target) -> Interval:  # type: ignore[no-untyped-def]
            return contrasts("accuracy", [seen[c], seen[d]], [[1, -1]], truth)[0]

        values = {c: fmean(figures("accuracy", o, target).values()) for c, o in outputs.items()}
        measures = intervals(exact(alice, agents)), intervals(leave_one_out(alice, agents))
        seen = Evidence(alice, values, *measures, difference)
        top = max(true[c, alice] for c in known)
        yield {
            "federation": kind,
            "draw": draw,
            "agent": alice,
            "rows": len(federation.train[alice]),
            "best": round(top, 5),
            "alone": round(true[seen.alone, alice], 5),
            "regret": {name: round(top - true[rule(seen), alice], 5) for name, rule in RULES.items()},
        }


def speed() -> Iterator[dict[str, Any]]:
    """Yield the seconds of a study with the default settings: agents with 200 rows and 13 features."""
    settings = Settings(data="tables")
    for agents in (4, 8):
        rng = np.random.default_rng(agents)
        effect = rng.normal(size=13)
        tables = {}
        for i in range(agents):
            x = rng.normal(size=(200, 13)).astype(np.float32)
            tables[f"site {i}"] = (x, (x @ effect + rng.normal(size=200) > 0).astype(np.int64))
        federation = Federation.from_arrays(tables)
        began, used = time.perf_counter(), sum(os.times()[:4])
        found = study_partners("shapley", federation, settings, "waffle-paper", range(agents), (1, 2, 3), {}, Runtime())
        seconds = round(time.perf_counter() - began, 1)
        line = {"agents": agents, "trainings": found.trainings, "seeds": found.seeds, "seconds": seconds}
        yield {**line, "cpu_seconds": round(sum(os.times()[:4]) - used, 1), "load": round(os.getloadavg()[0], 1)}


def main(which: str) -> None:
    """Print a line per agent of every federation, or per number of agents for the speed."""
    if which == "speed":
        for line in speed():
            print(json.dumps({**line, "cores": os.cpu_count()}), flush=True)
        return
    for draw in DRAWS[which]:
        for kind in KINDS:
            for line in measured(kind, draw):
                print(json.dumps({"draws": which, **line}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tune")
