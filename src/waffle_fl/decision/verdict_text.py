"""Verdicts in plain English: what a physician reads first."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev

from waffle_fl.algorithms import title_of
from waffle_fl.decision.bootstrap import FEW, Hint, Interval, Metric, in_percent
from waffle_fl.decision.distances import Distances
from waffle_fl.decision.study import ALONE, Decision, View, gainers, mean_over

SMALL = 100
METRIC_TITLES: dict[Metric, str] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "rmse": "root mean squared error",
}
MINUS = "−"


def number(value: float, metric: Metric) -> str:
    """74.2 % of an accuracy, 0.742 of an AUC, 3.14 of an error."""
    if in_percent(metric):
        return f"{100 * value:.1f} %"
    return f"{value:.3f}" if metric == "auc" else f"{value:.3g}"


def signed(value: float, metric: Metric) -> str:
    """+7.0 points of an accuracy, +0.070 of an AUC."""
    shown = f"{100 * value:+.1f}" if in_percent(metric) else f"{value:+.3g}"
    return shown.replace("-", MINUS) if float(shown) else shown.lstrip("+-")


def difference(found: Interval, metric: Metric) -> str:
    """+7.2 points (95 % interval +2.1 to +12.0); of an error: less by 0.3 (95 % interval +0.1 to +0.5)."""
    if metric == "rmse":
        ends = (found.low, found.high) if found.value >= 0 else (-found.high, -found.low)
        low, high = (signed(v, metric) for v in ends)
        way = "less" if found.value >= 0 else "greater"
        return f"error {way} by {number(abs(found.value), metric)} (95 % interval {low} to {high})"
    unit = " points" if in_percent(metric) else ""
    low, high = signed(found.low, metric), signed(found.high, metric)
    return f"{signed(found.value, metric)}{unit} (95 % interval {low} to {high})"


def verdict(view: View, method: str, metric: Metric) -> str:
    """Does this agent gain by joining? One sentence, with the interval."""
    title = title_of(method)
    if method not in view.standings:
        return f"{title} did not come to its end for {view.name}: nothing can be said."
    found = view.standings[method].gains[metric]
    ours, alone = (number(view.standings[m].scores[metric].value, metric) for m in (method, ALONE))
    if metric == "accuracy":
        compared = f"with {title} {ours} of its {view.tests} test samples are right, instead of {alone} alone"
    elif metric == "rmse":
        compared = f"with {title} the error is {ours}, instead of {alone} alone"
    else:
        compared = f"with {title} its {METRIC_TITLES[metric]} is {ours}, instead of {alone} alone"
    change = difference(found, metric)
    opening = {
        1: f"{view.name} gains by joining",
        -1: f"{view.name} loses by joining",
        0: f"No clear difference for {view.name}",
    }[found.sign]
    if isinstance(found, Hint):
        opening = f"Too few test samples to say whether {view.name} gains by joining"
    return f"{opening}: {compared}: {change}."


def caution(view: View, decision: Decision) -> list[str]:
    """What a careful statistician would add."""
    said = []
    if view.tests < SMALL:
        one = f": one sample more or less is {100 / view.tests:.1f} points" if decision.metric == "accuracy" else ""
        tests = "test sample" if view.tests == 1 else "test samples"
        said.append(f"{view.name} has only {view.tests} {tests}{one}. Read this as a hint, not as proof.")
    known = [s.scores["accuracy"].value for s in view.standings.values() if "accuracy" in s.scores]
    if known and max(known) <= view.commonest < 1:
        said.append(
            f"No method does better than always giving the commonest answer, which is right for "
            f"{number(view.commonest, 'accuracy')}: look at the balanced accuracy before using any of these models."
        )
    present = [n for n in view.classes if n]
    if len(present) == 1:
        said.append("There is only one class in its test data: how well others are recognised is not known.")
    elif len(present) < len(view.classes):
        said.append(f"Its test data lack {len(view.classes) - len(present)} of {len(view.classes)} classes.")
    if len(present) > 1 and min(present) < FEW:
        said.append(f"Its rarest class has {min(present)} test sample{'s' if min(present) > 1 else ''}.")
    compared = [view.standings[m] for m in (ALONE, decision.method) if m in view.standings]
    if any(len(standing.seeds) == 1 for standing in compared):
        said.append("Models were trained once, so the interval leaves out chance in training: give several seeds.")
    return [*said, *(f"{note}." for note in view.notes)]


def partners(view: View, decision: Decision) -> str:
    """Who helps and who hurts, by leaving each out in turn."""
    ranked = sorted(view.partners.items(), key=lambda item: -item[1].value)
    clear = {sign: [name for name, found in ranked if found.sign == sign] for sign in (1, -1)}
    parts = [f"{listed(clear[1])} clearly help{'s' if len(clear[1]) == 1 else ''} {view.name}"] if clear[1] else []
    parts += [f"{listed(clear[-1])} clearly hurt{'s' if len(clear[-1]) == 1 else ''} it"] if clear[-1] else []
    if parts:
        return f"{'; '.join(parts)}, judged by what its model loses or wins without them."
    name, found = ranked[0]
    return (
        f"No single partner makes a clear difference to {view.name}; the most helpful is {name}, "
        f"worth {difference(found, decision.metric)}."
    )


def company(view: View, decision: Decision) -> str:
    """Whose updates entered its model."""
    method = view.weighing[0]
    shares = mean_over(view.taken[method])
    own = decision.names.index(view.name)
    others = sorted((i for i in range(len(shares)) if i != own), key=lambda i: -shares[i])
    if not others:
        return f"{view.name} trained alone."
    most, least = others[0], others[-1]
    text = (
        f"Over all rounds, {100 * shares[own]:.0f} % of what entered {view.name}'s {title_of(method)} model was its "
        f"own; most of the rest came from {decision.names[most]} ({100 * shares[most]:.0f} %)"
    )
    return (
        f"{text}, least from {decision.names[least]} ({100 * shares[least]:.0f} %)." if len(others) > 1 else f"{text}."
    )


def everyone(decision: Decision, method: str) -> list[str]:
    """Who gains and who loses in the federation; the worst off and the spread."""
    metric, found = decision.metric, gainers(decision.views, method, decision.metric)
    if not found:
        return [f"{title_of(method)} came to its end for no agent."]
    counts = {sign: [v.name for v, gain in found if gain.sign == sign] for sign in (1, 0, -1)}
    up, level, down = (counts[sign] for sign in (1, 0, -1))
    rest = f", and for {len(level)} there is no clear difference" if level else ""
    said = f"{_count(up, 'gain')} clearly, {_count(down, 'lose')} clearly{rest}"
    if len(level) == len(found):
        said = f"none of the {len(level)} agents clearly gains or loses"
    sentences = [f"With {title_of(method)}, {said}."]
    if down:
        sentences.append(f"Clearly worse off: {listed(down)}.")
    if len(found) > 1:
        worst, gain = found[-1]
        sentences.append(f"Least well served is {worst.name}: {difference(gain, metric)}.")
        before = pstdev([v.standings[ALONE].scores[metric].value for v, _ in found])
        after = pstdev([v.standings[method].scores[metric].value for v, _ in found])
        scale = 100 if in_percent(metric) else 1
        unit = " points" if scale == 100 else ""
        sentences.append(
            f"Between agents, the {METRIC_TITLES[metric]} spreads by {scale * after:.3g}{unit} (standard deviation), "
            f"alone by {scale * before:.3g}{unit}."
        )
    return sentences


def unlike(found: Distances, name: str) -> str:
    """How an agent's data differ from the others', before training."""
    i = found.names.index(name)
    others = [j for j in range(len(found.names)) if j != i]
    if not others:
        return f"{name} has no partners."
    near = min(others, key=lambda j: found.gradient[i][j])
    far = max(others, key=lambda j: found.gradient[i][j])
    mix = [found.label[i][j] for j in others]
    text = f"Before training, {found.names[near]}'s data pull a model most nearly the way {name}'s do"
    text += f" and {found.names[far]}'s least so" if far != near else ""
    return f"{text}. Its labels differ from theirs by {min(mix):.2f} to {max(mix):.2f} (see below)."


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(names: Sequence[str], verb: str) -> str:
    """no agent loses, 1 agent loses, 2 agents lose."""
    if len(names) > 1:
        return f"{len(names)} agents {verb}"
    return f"{len(names) or 'no'} agent {verb}s"
