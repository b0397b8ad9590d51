"""Claims written in an experiment file, checked against the file's record.

    [[claims]]
    claim = "without an attack the guard costs at most half a point"
    of = { guard = "standard", attack = "none" }    # the claim is about all cells with these settings and options
    against = { guard = "off" }                     # compare each with the same cell under this change
    within = 0.5                                    # points of accuracy that a cell may lie below the other
    at = [0.94, 1.0]                                # at these shares of the rounds, or "best", "last", "selected"

Instead of `against`, `published` lists accuracies of others in percent, each a table like `of` with a `mean`; the mean
of the cells that it selects has to be within `within` points of it, above or below. A claim holds if all its cells do;
the verdict counts them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from waffle_fl.algorithms import title_of
from waffle_fl.claims.record_files import Part, unseeded
from waffle_fl.claims.verdict import Verdict
from waffle_fl.config import RunConfig, read_toml
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.results import FinishedRun, round_at

SHOWN = 4  # cases listed in a verdict
ROUNDING = 1e-9


@dataclass(frozen=True)
class Claim:
    """One claim about cells. A cell is the set of runs whose configs differ only in the seed."""

    claim: str
    of: Mapping[str, Any]
    against: Mapping[str, Any] = field(default_factory=dict)
    within: float = 0.0
    at: Sequence[float | str] = ("last",)
    published: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Case:
    """The accuracy of a cell at one point of the run, and the accuracy that the claim requires."""

    config: RunConfig
    at: float | str
    found: float
    required: float


def read_claims(file: Path) -> list[Claim]:
    """Return the claims of an experiment file."""
    claims = []
    for table in read_toml(file)[1].get("claims", []):
        known = list(Claim.__dataclass_fields__)
        for key in table:
            if key not in known:
                raise WaffleError(f"{file}: unknown key {key!r} in a claim{suggest(key, known)}")
        claim = Claim(**table)
        if bool(claim.against) == bool(claim.published):
            raise WaffleError(f"{file}: expected a claim with either against or published, got {claim.claim!r}")
        claims.append(replace(claim, at=(claim.at,)) if isinstance(claim.at, str) else claim)
    return claims


def check_claims(claims: Sequence[Claim], part: Part) -> list[Verdict]:
    """Return one verdict per claim. A claim does not hold while the record lacks runs that it needs."""
    cells: dict[str, list[FinishedRun]] = {}
    for run in part.all_runs:
        cells.setdefault(unseeded(run.config), []).append(run)
    incomplete = {unseeded(config) for config in part.missing().values()}
    complete = {key: runs for key, runs in cells.items() if key not in incomplete}
    planned = list({unseeded(config): config for config in part.planned().values()}.values())
    return [(_agreement if claim.published else _verdict)(claim, planned, complete) for claim in claims]


def _agreement(claim: Claim, planned: Sequence[RunConfig], cells: Mapping[str, Sequence[FinishedRun]]) -> Verdict:
    """Compare the mean over seeds, and over the selected cells, with each published mean."""
    gaps, missing = {}, []
    for number in claim.published:
        where = {key: value for key, value in number.items() if key != "mean"}
        about = [unseeded(config) for config in planned if matches(config, {**claim.of, **where})]
        found = [100 * mean(accuracies(cells[key], at)) for key in about if key in cells for at in claim.at]
        name = " ".join(map(str, where.values()))
        if len(found) < max(1, len(about)):
            missing.append(name)
        else:
            gaps[name] = mean(found) - number["mean"]
    if missing:
        return Verdict(claim.claim, False, f"no complete record of {', '.join(missing)}")
    held = sum(abs(gap) <= claim.within + ROUNDING for gap in gaps.values())
    shown = ", ".join(f"{name} {gap:+.2f}" for name, gap in gaps.items())
    return Verdict(claim.claim, held == len(gaps), f"{held} of {len(gaps)} hold; ours minus published: {shown}")


def _verdict(claim: Claim, planned: Sequence[RunConfig], cells: Mapping[str, Sequence[FinishedRun]]) -> Verdict:
    about = [config for config in planned if matches(config, claim.of)]
    pairs = [(config, _compared(claim, config)) for config in about]
    needed = {unseeded(config): config for pair in pairs for config in pair}
    incomplete = [config for key, config in needed.items() if key not in cells]
    if incomplete or not about:
        first = f", such as {_named(incomplete[0])}" if incomplete else ""
        return Verdict(claim.claim, False, f"no complete record of {len(incomplete)} of {len(needed)} cells{first}")
    cases = sorted(
        (_case(claim, config, other, at, cells) for config, other in pairs for at in claim.at),
        key=lambda case: case.found - case.required,
    )
    failed = [case for case in cases if not case.found >= case.required]
    worst = failed[:SHOWN] or cases[:1]
    more = f" and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
    numbers = f"{len(cases) - len(failed)} of {len(cases)} hold; " + "; ".join(map(_shown, worst)) + more
    return Verdict(claim.claim, not failed, numbers)


def _case(
    claim: Claim,
    config: RunConfig,
    other: RunConfig,
    at: float | str,
    cells: Mapping[str, Sequence[FinishedRun]],
) -> Case:
    found = 100 * mean(accuracies(cells[unseeded(config)], at))
    required = 100 * mean(accuracies(cells[unseeded(other)], at)) - claim.within - ROUNDING
    return Case(config, at, found, required)


def _compared(claim: Claim, config: RunConfig) -> RunConfig:
    """Return the config to compare a cell with: itself changed by `against`."""
    other = changed(config, claim.against)
    if unseeded(other) == unseeded(config):
        raise WaffleError(f"a claim compares {_named(config)} with itself: `of` and `against` have to differ")
    return other


def changed(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the config with these settings or options changed."""
    content = config.contents
    known = {**content["settings"], **content["options"]}
    for key in values:
        if key not in known:
            raise WaffleError(f"a claim compares with another {key!r}, which is not a setting{suggest(key, known)}")
    parts = {part: {**content[part], **_present(values, content[part])} for part in ("settings", "options")}
    return RunConfig.from_json(json.loads(json.dumps({**content, **parts})))


def matches(config: RunConfig, values: Mapping[str, Any]) -> bool:
    """Return whether a config has these settings and options. A list gives alternatives."""
    content = config.contents
    known = {**content["settings"], **content["options"], "method": config.method}
    required = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
    return all(key in known and known[key] in choice for key, choice in required.items())


def accuracies(runs: Sequence[FinishedRun], at: float | str) -> list[float]:
    """Return the accuracy of each run at a share of its rounds or by a protocol; 0 if it diverged before that."""
    if isinstance(at, str):
        return [_by_protocol(run, at) for run in runs]
    return [_at_share(run, at) for run in runs]


def _at_share(run: FinishedRun, at: float) -> float:
    line = round_at(run, at)
    if line is None and run.result["status"] != "diverged":
        raise WaffleError(
            f"a claim is about {at:g} of the rounds, which the record of {_named(run.config)} does not keep"
        )
    return float(line["accuracy"]) if line else 0.0


def _by_protocol(run: FinishedRun, at: str) -> float:
    if run.result["status"] == "diverged" and (at == "last" or at not in run.result):
        return 0.0
    if "accuracy" not in run.result.get(at, {}):
        raise WaffleError(f"a claim is about the accuracy by {at!r}, which {_named(run.config)} does not have")
    return float(run.result[at]["accuracy"])


def _present(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in known}


def _named(config: RunConfig) -> str:
    s, default = config.settings, RunConfig(method=config.method, settings=type(config.settings)()).to_json()
    odd = {k: v for k, v in config.to_json()["options"].items() if v != default["options"][k]}
    attack = [f"{s.attack} x {s.attackers}"] if s.attack != default["settings"]["attack"] else []
    guard = [f"guard {s.guard}"] if s.guard != default["settings"]["guard"] else []
    return " ".join([s.column, title_of(config.method), *map(str, odd.values()), *attack, *guard])


def _shown(case: Case) -> str:
    when = case.at if isinstance(case.at, str) else f"{case.at:g} R"
    return f"{_named(case.config)} at {when}: {case.found:.2f}, at least {case.required:.2f} wanted"
