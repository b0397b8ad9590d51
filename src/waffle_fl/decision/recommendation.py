"""The recommendation per agent, the share of agents that gain, and their sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from waffle_fl.algorithms import title_of
from waffle_fl.decision.bootstrap import Hint, Interval, share_above_zero
from waffle_fl.decision.measurement import JOINT
from waffle_fl.decision.partners import Advice, PartnerStudy
from waffle_fl.decision.study import Decision, View, gainers
from waffle_fl.decision.verdict_text import difference, listed

MEASURES = {
    "shapley": "the exact Shapley value",
    "sampled": "the Shapley value, sampled over random orders",
    "leave-one-out": "the effect of leaving it out",
}


class Recommendation(NamedTuple):
    """What an agent should do, and why."""

    action: str  # "join, without Feind", "join with A and B", "stay alone"
    reason: str  # the gain on its test data, with the interval
    sign: int  # 1: join, 0: no clear gain, -1: stay alone


def action(view: View, decision: Decision) -> str:
    """Return what the agent should do in a few words."""
    advice = _advice(view)
    if not advice.join:
        return "stay alone"
    others = [name for name in decision.names if name != view.name]
    absent = [name for name in others if name not in advice.partners]
    how = "" if advice.method in JOINT else f" and {title_of(advice.method)}"
    if not absent:
        return f"join with {'all partners' if len(others) > 1 else others[0]}{how}"
    if len(absent) < len(advice.partners):
        return f"join, without {listed(absent)}"
    return f"join with {listed(advice.partners)}"


def recommend(view: View, decision: Decision) -> Recommendation | None:
    """Return the recommendation of an agent whose partners were measured, else None."""
    if view.advice is None:
        return None
    found, advice = view.recommended, view.advice
    title = title_of(advice.method)
    if not advice.join:
        group = _group(view, decision)
        if found is None:
            return Recommendation("stay alone", "No group was better than training alone on its held-out rows.", -1)
        text = f"Expected change in the best group found, {title} with {group}: {difference(found, decision.metric)}."
        return Recommendation("stay alone", text, -1)
    if found is None:
        return Recommendation(action(view, decision), f"No run of {title} with this group finished.", 0)
    text = f"Expected {'gain' if found.value > 0 else 'change'} with {title}: {difference(found, decision.metric)}."
    if isinstance(found, Hint):
        text += " It has too few test samples for a clear result."
    elif found.sign == 0 and found.value > 0:
        text += " The difference is not clear."
    elif found.sign == 0:
        text += " The test samples show no gain and do not rule one out."
    elif found.sign < 0:
        text += " The test samples contradict the choice: confirm it on new data before joining."
    return Recommendation(action(view, decision), text, max(0, found.sign))


def recommendations(decision: Decision) -> list[str]:
    """Return one line per agent: "alice: join, without feind. Expected gain ..."."""
    found = [(view.name, recommend(view, decision)) for view in decision.views]
    return [f"{name}: {one.action}. {one.reason}" for name, one in found if one]


def share_that_gains(gains: Sequence[Interval]) -> Interval | None:
    """Return the share of agents that score better than alone; None without agents.

    This is FedCollab's IPR, the incentivised participation rate. A tie is no gain."""
    return share_above_zero(gains) if gains else None


def share_text(decision: Decision, method: str) -> str:
    """Return how many agents gain, with the interval of their number; empty if no run finished."""
    gains = [gain for _, gain in gainers(decision.views, method, decision.metric)]
    found = share_that_gains(gains)
    if found is None:
        return ""
    better, low, high = (round(len(gains) * value) for value in found)
    return (
        f"{better} of {len(gains)} agents score better with {title_of(method)} than alone "
        f"(95 % interval {low} to {high})."
    )


def excluded(study: PartnerStudy) -> list[str]:
    """Return a sentence on the agents that have too few rows to be measured."""
    if not study.excluded:
        return []
    return [f"Too few training rows to be measured: {listed(study.excluded)}."]


def measured_by(study: PartnerStudy) -> str:
    """Return how the contributions were measured."""
    seeds = "one seed" if study.seeds == 1 else f"{study.seeds} seeds"
    return (
        f"Each group was chosen by its partners' contributions ({MEASURES[study.measurement]}) to the score of "
        f"{title_of(study.shared)} models on held-out training rows: {study.trainings:,} trainings, {seeds}. The gain "
        "was then measured on test samples, which the choice did not use."
    )


def _group(view: View, decision: Decision) -> str:
    partners = _advice(view).partners
    return "all partners" if len(partners) == len(decision.names) - 1 > 1 else listed(partners)


def _advice(view: View) -> Advice:
    assert view.advice is not None
    return view.advice
