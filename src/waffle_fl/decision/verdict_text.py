"""The verdict sentences of the decision page, written for physicians."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev

from waffle_fl.algorithms import title_of
from waffle_fl.decision.bootstrap import FEW, Hint, Interval, Metric, in_percent
from waffle_fl.decision.distances import Distances
from waffle_fl.decision.study import ALONE, Decision, View, gainers, mean_over

SMALL = 100
TINY = 20  # test samples below which an agent is not the least favourable one
METRIC_TITLES: dict[Metric, str] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "rmse": "root mean squared error",
}
MINUS = "−"


def number(value: float, metric: Metric) -> str:
    """Return the value as text: 74.2 % for an accuracy, 0.742 for an AUC, 3.14 for an error."""
    if in_percent(metric):
        return f"{100 * value:.1f} %"
    return f"{value:.3f}" if metric == "auc" else f"{value:.3g}"


def signed(value: float, metric: Metric) -> str:
    """Return the value with its sign: +7.0 (points) for an accuracy, +0.07 for an AUC."""
    shown = f"{100 * value:+.1f}" if in_percent(metric) else f"{value:+.3g}"
    return shown.replace("-", MINUS) if float(shown) else shown.lstrip("+-")


def difference(found: Interval, metric: Metric) -> str:
    """Return "+7.2 points (95 % interval +2.1 to +12.0)"; for RMSE "error lower by 0.3 (95 % interval ...)"."""
    if metric == "rmse":
        ends = (found.low, found.high) if found.value >= 0 else (-found.high, -found.low)
        low, high = (signed(v, metric) for v in ends)
        direction = "lower" if found.value >= 0 else "higher"
        return f"error {direction} by {number(abs(found.value), metric)} (95 % interval {low} to {high})"
    unit = " points" if in_percent(metric) else ""
    low, high = signed(found.low, metric), signed(found.high, metric)
    return f"{signed(found.value, metric)}{unit} (95 % interval {low} to {high})"


def verdict(view: View, method: str, metric: Metric) -> str:
    """Return whether this agent gains by joining: both scores, the difference and its interval."""
    title = title_of(method)
    if method not in view.standings:
        return f"No run of {title} finished for {view.name}, so there is no verdict."
    found = view.standings[method].gains[metric]
    ours, alone = (number(view.standings[m].scores[metric].value, metric) for m in (method, ALONE))
    if metric == "accuracy":
        compared = f"{title} classifies {ours} of its {view.tests} test samples correctly, training alone {alone}"
    elif metric == "rmse":
        compared = f"its error is {ours} with {title} and {alone} when training alone"
    else:
        compared = f"its {METRIC_TITLES[metric]} is {ours} with {title} and {alone} when training alone"
    change = difference(found, metric)
    opening = {
        1: f"{view.name} gains by joining",
        -1: f"{view.name} loses by joining",
        0: f"No clear difference for {view.name}",
    }[found.sign]
    if isinstance(found, Hint):
        opening = f"Too few test samples to say whether {view.name} gains by joining"
    return f"{opening}: {compared}. Difference: {change}."


def caution(view: View, decision: Decision) -> list[str]:
    """Return the statistical caveats that apply to this agent's verdict."""
    sentences = []
    if view.tests < SMALL:
        one = f": one sample more or less is {100 / view.tests:.1f} points" if decision.metric == "accuracy" else ""
        tests = "test sample" if view.tests == 1 else "test samples"
        sentences.append(f"{view.name} has only {view.tests} {tests}{one}. Read this as a hint, not as proof.")
    known = [s.scores["accuracy"].value for s in view.standings.values() if "accuracy" in s.scores]
    if known and max(known) <= view.majority_share < 1:
        sentences.append(
            f"No method beats always predicting the most frequent class, which is correct for "
            f"{number(view.majority_share, 'accuracy')}: check the balanced accuracy before using any of these models."
        )
    present = [n for n in view.classes if n]
    if len(present) == 1:
        sentences.append("Its test data contain only one class: how well the models recognise the others is not known.")
    elif len(present) < len(view.classes):
        sentences.append(f"Its test data lack {len(view.classes) - len(present)} of {len(view.classes)} classes.")
    if len(present) > 1 and min(present) < FEW:
        sentences.append(f"Its rarest class has {min(present)} test sample{'s' if min(present) > 1 else ''}.")
    compared = [view.standings[m] for m in (ALONE, decision.method) if m in view.standings]
    if any(len(standing.seeds) == 1 for standing in compared):
        sentences.append(
            "Each model was trained once, so the interval does not cover the randomness of training: use several seeds."
        )
    return [*sentences, *(f"{note}." for note in view.notes)]


def reference(view: View, metric: Metric) -> list[str]:
    """Return how training alone compares with scikit-learn on the same data; what to try if it is clearly worse."""
    found = view.reference
    if found is None or ALONE not in view.standings:
        return []
    theirs, ours = number(found.score, metric), number(view.standings[ALONE].scores[metric].value, metric)
    compared = f"{found.name} on {view.name}'s data alone has {theirs}, the model trained alone {ours}"
    if found.gain.sign > 0:
        return [
            f"Training alone is weak here: {compared}. Gains over it say little before it is better: try another "
            "--model, or set --lr and --rounds by hand."
        ]
    return [f"For reference: {compared}."]


def partners(view: View, decision: Decision) -> str:
    """Return which partners help and which hurt, measured on held-out training rows."""
    if view.advice is None:
        return ""
    ranked = sorted(view.advice.contributions.items(), key=lambda item: -item[1].value)
    clear = {sign: [name for name, found in ranked if found.sign == sign] for sign in (1, -1)}
    parts = [f"{listed(clear[1])} clearly help{'s' if len(clear[1]) == 1 else ''} {view.name}"] if clear[1] else []
    parts += [f"{listed(clear[-1])} clearly hurt{'s' if len(clear[-1]) == 1 else ''} it"] if clear[-1] else []
    if parts:
        return f"{'; '.join(parts)}."
    name, found = ranked[0]
    metric = decision.partners.metric if decision.partners else decision.metric
    return (
        f"No single partner makes a clear difference to {view.name}. The most helpful is {name}: "
        f"{difference(found, metric)}."
    )


def update_sources(view: View, decision: Decision) -> str:
    """Return which agents' updates entered this agent's model, in percent."""
    method = view.weighing[0]
    shares = mean_over(view.update_weights[method])
    own = decision.names.index(view.name)
    percent = {
        name: round(100 * share) for name, share in zip(decision.names, shares, strict=True) if name != view.name
    }
    if not percent:
        return f"{view.name} has no partners."
    by_share = {share: listed([name for name in percent if percent[name] == share]) for share in percent.values()}
    most, least = max(by_share), min(by_share)
    own_share = f"{100 * shares[own]:.0f} % of the updates in {view.name}'s {title_of(method)} model were its own"
    text = f"Over all rounds, {own_share}."
    if most == least:
        return f"{text} {by_share[most]} contributed {most} %{' each' if len(percent) > 1 else ''}."
    return (
        f"{text} Among its partners, {by_share[most]} contributed the most ({most} %), {by_share[least]} the least "
        f"({least} %)."
    )


def federation_summary(decision: Decision, method: str) -> list[str]:
    """Return which agents gain and lose by joining, the least favourable change, and the spread."""
    metric, found = decision.metric, gainers(decision.views, method, decision.metric)
    if not found:
        return [f"No run of {title_of(method)} finished for any agent."]
    counts = {sign: [v.name for v, gain in found if gain.sign == sign] for sign in (1, 0, -1)}
    up, level, down = (counts[sign] for sign in (1, 0, -1))
    rest = f", and for {len(level)} there is no clear difference" if level else ""
    summary = f"{_count(up, 'gain')} clearly, {_count(down, 'lose')} clearly{rest}"
    if len(level) == len(found):
        summary = f"none of the {len(level)} agents clearly gains or loses"
    sentences = [f"With {title_of(method)}, {summary}."]
    if down:
        sentences.append(f"Clearly worse by joining: {listed(down)}.")
    tiny = [view.name for view, _ in found if view.tests < TINY]
    found = [(view, gain) for view, gain in found if view.tests >= TINY]
    if len(found) > 1:
        worst, gain = found[-1]
        sentences.append(f"The least favourable change is that of {worst.name}: {difference(gain, metric)}.")
        before = pstdev([v.standings[ALONE].scores[metric].value for v, _ in found])
        after = pstdev([v.standings[method].scores[metric].value for v, _ in found])
        scale = 100 if in_percent(metric) else 1
        unit = " points" if scale == 100 else ""
        sentences.append(
            f"The standard deviation of the {METRIC_TITLES[metric]} between agents is {scale * after:.3g}{unit}, "
            f"and {scale * before:.3g}{unit} when each trains alone."
        )
        if tiny:
            sentences.append(f"Not compared here, with fewer than {TINY} test samples: {listed(tiny)}.")
    return sentences


def data_differences(found: Distances, name: str) -> str:
    """Return how an agent's data differ from those of the other agents, before training."""
    i = found.names.index(name)
    others = [j for j in range(len(found.names)) if j != i]
    if not others:
        return f"{name} has no partners."
    near = min(others, key=lambda j: found.gradient[i][j])
    far = max(others, key=lambda j: found.gradient[i][j])
    mix = [found.label[i][j] for j in others]
    text = f"By their first gradients, the data of {found.names[near]} are most similar to those of {name}"
    text += f" and the data of {found.names[far]} least similar" if far != near else ""
    return f"{text}. The label distances to its partners are {min(mix):.2f} to {max(mix):.2f} (see below)."


def listed(names: Sequence[str]) -> str:
    """Return the names as "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(names: Sequence[str], verb: str) -> str:
    """Return "no agent loses", "1 agent loses" or "2 agents lose"."""
    if len(names) > 1:
        return f"{len(names)} agents {verb}"
    return f"{len(names) or 'no'} agent {verb}s"
