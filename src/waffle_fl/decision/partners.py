"""Which partners help each agent: choose the coalitions to train, cross-validate them, and summarise per agent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from waffle_fl.config import RunConfig, Settings
from waffle_fl.decision import shapley
from waffle_fl.decision.bootstrap import (
    Hint,
    Interval,
    Metric,
    Seeds,
    Target,
    better_if_lower,
    contrasts,
    figures,
    metrics_of,
)
from waffle_fl.decision.coalitions import (
    FOLDS,
    CrossValidation,
    Plan,
    Progress,
    able_agents,
    cross_validate,
)
from waffle_fl.decision.measurement import (
    SHARED,
    Measurement,
    contributions_of,
    joint_method,
    plans_of,
    whole_plans,
)
from waffle_fl.decision.shapley import Coalition
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime
from waffle_fl.federation import Federation
from waffle_fl.versions import RESULTS_VERSION

RULE = 2  # a study that was made by another rule is made again
MARGIN = 0.5  # standard errors of a lead that counts
TRAININGS = 1200  # more trainings than this use one seed


@dataclass(frozen=True)
class Advice:
    """What one agent's held-out training rows say about its partners."""

    contributions: dict[str, Interval]  # partner -> contribution to this agent's score
    sampling_errors: dict[str, float]  # partner -> standard error of the sampling of orders; empty if not sampled
    method: str  # of the best group
    partners: tuple[str, ...]  # of the best group
    join: bool  # whether the best group is recommended over training alone
    alone: float  # held-out score of training alone
    joined: float  # held-out score of the best group


@dataclass(frozen=True)
class PartnerStudy:
    """The partners of every studied agent."""

    measurement: Measurement
    metric: Metric
    seeds: int
    trainings: int
    advice: dict[str, Advice]
    excluded: tuple[str, ...] = ()  # agents with too few rows to be cross-validated
    key: str = ""  # identifies data and settings
    shared: str = SHARED  # the method of the groups

    def to_json(self) -> dict[str, Any]:
        """Return the study as plain values."""
        return {
            **{name: getattr(self, name) for name in ("measurement", "metric", "seeds", "trainings", "key", "shared")},
            "excluded": list(self.excluded),
            "advice": {name: _advice_json(one) for name, one in self.advice.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PartnerStudy:
        """Read a study that `to_json` wrote."""
        try:
            advice = {str(name): _read_advice(one) for name, one in content["advice"].items()}
            numbers = (int(content["seeds"]), int(content["trainings"]))
            excluded = tuple(map(str, content["excluded"]))
            texts = str(content["key"]), str(content.get("shared", SHARED))
            return cls(content["measurement"], content["metric"], *numbers, advice, excluded, *texts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WaffleError(f"partners.json is not a record of partners ({error}): delete it") from None


def study_partners(
    measurement: Measurement,
    federation: Federation,
    settings: Settings,
    method: str,
    alices: Sequence[int],
    seeds: Sequence[int],
    options: Mapping[str, Mapping[str, Any]],
    runtime: Runtime,
    metric: Metric | None = None,
    progress: Progress = lambda done, total: None,
    folds: int = FOLDS,
) -> PartnerStudy:
    """Return the contribution of each partner to each agent, and the group that each agent should train with.

    Groups train with FedAvg, which each agent of images or series fine-tunes. The group of the partners that help is
    recommended, if there are any, unless training alone leads by MARGIN.
    If partners are left out in turn, the best of that group, all agents and training alone is. The headline method
    `method` with all agents is a further candidate. With less than FOLDS `folds` it is not, and only these are held
    out, with the first seed. Test rows are not used."""
    agents = able_agents(federation)
    shared = joint_method(federation)
    method = shared if folds < FOLDS else method
    chosen = [i for i in alices if i in agents]
    plans = plans_of(measurement, shared, method, chosen, agents)
    used = seeds if len(plans) * FOLDS * len(seeds) <= TRAININGS and folds == FOLDS else seeds[:1]
    held = cross_validate(plans, federation, settings, used, options, runtime, progress, folds)
    decided = _metric(metric, held, chosen, federation)
    found = {i: _contributions(measurement, shared, i, agents, held, decided) for i in chosen}
    groups = {i: group_of(i, contributions) for i, (contributions, _) in found.items()}
    missing = {Plan(shared, group) for group in groups.values()} - {plan for plan, _ in held.outputs}
    if missing:
        ordered = sorted(missing, key=lambda plan: sorted(plan.members))
        held = held.with_more(cross_validate(ordered, federation, settings, used, options, runtime, folds=folds))
    advice = {}
    for i in chosen:
        alone, group = Plan(shared, Coalition([i])), Plan(shared, groups[i])
        if measurement == "leave-one-out":
            group = best_plan(held, i, decided, [group, Plan(shared, Coalition(agents))])
            join = best_plan(held, i, decided, [alone, group]) == group
        else:
            helps = any(value.value > 0 for value in found[i][0].values())
            join = helps and _ahead(held, i, decided, group, alone, -MARGIN)
        best = _replaced(held, i, decided, alone, group, whole_plans(shared, method, i, agents))
        contributions, errors = found[i]
        advice[federation.names[i]] = Advice(
            {federation.names[j]: interval for j, interval in contributions.items()},
            {federation.names[j]: error for j, error in errors.items()},
            best.method,
            tuple(federation.names[j] for j in sorted(best.members - {i})),
            join or best != group,
            _score(held, alone, i, decided),
            _score(held, best, i, decided),
        )
    excluded = tuple(name for i, name in enumerate(federation.names) if i not in agents)
    return PartnerStudy(measurement, decided, len(used), held.trainings, advice, excluded, shared=shared)


def key_of(
    measurement: str,
    federation: Federation,
    settings: Settings,
    method: str,
    alices: Sequence[int],
    seeds: Sequence[int],
    options: Mapping[str, Mapping[str, Any]],
    metric: Metric | None,
    folds: int = FOLDS,
) -> str:
    """Return a hash of everything that a study depends on."""
    neutral = replace(settings, alice="0", seed=0, leave_out=())
    configs = [
        RunConfig(method=m, settings=neutral, options=options.get(m, {})).to_json()
        for m in dict.fromkeys((joint_method(federation), method))
    ]
    parts = [
        measurement,
        federation.digest(),
        configs,
        sorted(alices),
        list(seeds),
        metric,
        folds,
        RULE,
        RESULTS_VERSION,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def group_of(alice: int, contributions: Mapping[int, Interval]) -> Coalition:
    """Return Alice and the partners whose contribution is above 0; if there are none, the most helpful partner.

    benchmarks/partners.py compares this rule with others."""
    helpful = [partner for partner, found in contributions.items() if found.value > 0]
    return Coalition([alice, *(helpful or [max(contributions, key=lambda partner: contributions[partner].value)])])


def leads(metric: Metric, ours: Seeds, theirs: Seeds, target: Target, errors: float) -> bool:
    """Return whether `ours` scores higher on held-out rows by more than this many standard errors of the rows."""
    (lead,) = contrasts(metric, [ours, theirs], [[1.0, -1.0]], target, training=False)
    return lead.value > errors * lead.standard_error


def _ahead(held: CrossValidation, alice: int, metric: Metric, one: Plan, other: Plan, errors: float) -> bool:
    return leads(metric, held.outputs[one, alice], held.outputs[other, alice], held.target[alice], errors)


def best_plan(held: CrossValidation, alice: int, metric: Metric, plans: Sequence[Plan]) -> Plan:
    """Return the plan with the best score on Alice's held-out rows; of equal ones, the plan with the most members."""
    sign = -1.0 if better_if_lower(metric) else 1.0
    return max(plans, key=lambda plan: (round(sign * _score(held, plan, alice, metric), 9), len(plan.members)))


def _replaced(
    held: CrossValidation, alice: int, metric: Metric, alone: Plan, group: Plan, whole: Sequence[Plan]
) -> Plan:
    """Return the headline method with all agents if it leads both training alone and the group by MARGIN."""
    rivals = (alone, group)
    leading = (plan for plan in whole if all(_ahead(held, alice, metric, plan, rival, MARGIN) for rival in rivals))
    return next(leading, group)


def _metric(metric: Metric | None, held: CrossValidation, alices: Sequence[int], federation: Federation) -> Metric:
    """Return the metric of the study: the given one if it is defined on the rows of every agent, else the main one."""
    defined = [metrics_of(held.target[i], federation.outputs) for i in alices]
    return metric if metric and all(metric in some for some in defined) else defined[0][0]


def _contributions(
    measurement: Measurement, shared: str, alice: int, agents: Sequence[int], held: CrossValidation, metric: Metric
) -> tuple[dict[int, Interval], dict[int, float]]:
    """Return each partner's contribution with its interval, and the standard error of sampling."""
    contributions, per_pair = contributions_of(measurement, alice, agents)
    coalitions = list(dict.fromkeys(c for one in contributions.values() for c in one))
    methods = [held.outputs[Plan(shared, coalition), alice] for coalition in coalitions]
    errors: dict[int, float] = {}
    if per_pair:
        values = {c: _score(held, Plan(shared, c), alice, metric) for c in coalitions}
        errors = shapley.sampling_errors(per_pair, values)
    table = [[one.get(coalition, 0.0) for coalition in coalitions] for one in contributions.values()]
    intervals = contrasts(metric, methods, table, held.target[alice], [errors[p] for p in contributions if p in errors])
    return dict(zip(contributions, intervals, strict=True)), errors


def _score(held: CrossValidation, plan: Plan, alice: int, metric: Metric) -> float:
    """Return the metric of a plan's model on Alice's held-out rows, the mean over seeds."""
    return fmean(figures(metric, held.outputs[plan, alice], held.target[alice]).values())


def _advice_json(one: Advice) -> dict[str, Any]:
    return {
        **{name: getattr(one, name) for name in ("method", "join", "alone", "joined", "sampling_errors")},
        "partners": list(one.partners),
        "contributions": {name: [*found, not isinstance(found, Hint)] for name, found in one.contributions.items()},
    }


def _read_advice(one: Mapping[str, Any]) -> Advice:
    contributions = {
        str(name): (Interval if clear else Hint)(*map(float, bounds))
        for name, (*bounds, clear) in one["contributions"].items()
    }
    errors = {str(name): float(error) for name, error in one["sampling_errors"].items()}
    partners = tuple(map(str, one["partners"]))
    return Advice(
        contributions,
        errors,
        str(one["method"]),
        partners,
        bool(one["join"]),
        float(one["alone"]),
        float(one["joined"]),
    )
