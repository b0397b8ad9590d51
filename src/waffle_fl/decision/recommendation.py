"""The recommendation per agent, the share of agents that gain, and their sentences."""

from __future__ import annotations

from typing import NamedTuple

from waffle_fl.algorithms import title_of
from waffle_fl.decision.bootstrap import Hint, Interval, share_above_zero
from waffle_fl.decision.partners import SHARED, Advice, PartnerStudy
from waffle_fl.decision.study import Decision, View, gainers
from waffle_fl.decision.verdict_text import difference, listed, number

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
    how = "" if advice.method == SHARED else f" and {title_of(advice.method)}"
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
            return Recommendation("stay alone", f"No group was better on its held-out training rows than {group}.", -1)
        text = f"The best group found, {title} with {group}: {difference(found, decision.metric)} on its test samples."
        return Recommendation("stay alone", text, -1)
    if found is None:
        return Recommendation(action(view, decision), f"No run of {title} with this group finished.", 0)
    text = f"Expected gain with {title}: {difference(found, decision.metric)}"
    if isinstance(found, Hint):
        text += ", from too few test samples to be clear"
    elif found.sign == 0:
        text += ", no clear difference"
    elif found.sign < 0:
        text += ": the test samples contradict the choice, so do not join before more data confirm it"
    return Recommendation(action(view, decision), f"{text}.", max(0, found.sign))


def recommendations(decision: Decision) -> list[str]:
    """Return one line per agent: "alice: join, without feind. Expected gain ..."."""
    found = [(view.name, recommend(view, decision)) for view in decision.views]
    return [f"{name}: {one.action}. {one.reason}" for name, one in found if one]


def share_that_gains(decision: Decision, method: str) -> Interval:
    """Return the share of agents that score better with the method than alone.

    This is FedCollab's IPR, the incentivised participation rate. A tie is no gain."""
    return share_above_zero([gain for _, gain in gainers(decision.views, method, decision.metric)])


def share_text(decision: Decision, method: str) -> str:
    """Return how many agents gain, with the interval of their number."""
    agents, found = len(gainers(decision.views, method, decision.metric)), share_that_gains(decision, method)
    better, low, high = (round(agents * value) for value in found)
    return (
        f"{better} of {agents} agents score higher with {title_of(method)} than alone "
        f"({number(found.value, 'accuracy')}; 95 % interval {low} to {high} agents)."
    )


def measured_by(study: PartnerStudy) -> str:
    """Return how the contributions were measured."""
    seeds = "one seed" if study.seeds == 1 else f"{study.seeds} seeds"
    return (
        f"The contribution of a partner is {MEASURES[study.measurement]}: how much it changes the score of FedAvg models "
        f"on training rows that were held out ({study.trainings:,} trainings, {seeds}). Test samples were not used."
    )


def _group(view: View, decision: Decision) -> str:
    partners = _advice(view).partners
    return "all partners" if len(partners) == len(decision.names) - 1 > 1 else listed(partners)


def _advice(view: View) -> Advice:
    assert view.advice is not None
    return view.advice
