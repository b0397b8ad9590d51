"""The decision page: verdicts, then charts, in one HTML file that works offline and can be printed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from waffle_fl.algorithms import about_of, title_of
from waffle_fl.decision import verdict_text
from waffle_fl.decision.bootstrap import FEW, RESAMPLES, in_percent
from waffle_fl.decision.charts import (
    MARKS,
    gains_chart,
    methods_chart,
    partners_chart,
    recommended_chart,
    sources_chart,
)
from waffle_fl.decision.markup import (
    actions,
    figure,
    gain,
    heat,
    interval,
    paragraphs,
    part,
    select,
    share_cell,
    table,
)
from waffle_fl.decision.recommendation import excluded, measured_by, recommend, share_text, share_that_gains
from waffle_fl.decision.study import ALONE, Decision, View, gainers, mean_over, phases
from waffle_fl.report.page import facts_of, put, script_json, training_text

KINDS = {
    "label": (
        "Labels",
        "Half the sum of the absolute differences between the label shares of two agents: 0 means the same mix, 1 no "
        "label in common. For regression: the difference between the mean targets, in standard deviations.",
    ),
    "feature": (
        "Features",
        "The difference between the two agents' means of a feature, in standard deviations of all training samples, "
        "averaged over features. Around 0.2 is small, above 0.8 is large.",
    ),
    "gradient": (
        "Gradients",
        "The angle between the gradients of two agents at the same untrained model: 0 means the same direction, "
        "0.7 a right angle, 1 opposite directions.",
    ),
}

REDUCED = "What was reduced to keep the training short"
UNKNOWN = "Not available: each agent standardised its features with its own means."


def write_page(decision: Decision, path: Path) -> Path:
    """Write the page to `path` and return the path."""
    matrices = {f"matrix-{m}": _stops(decision, m) for m in _weighing(decision)}
    style, script = (
        resources.files("waffle_fl.decision").joinpath(f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(_title(decision))}</title><style>{style}</style></head>
<body><main>{_body(decision)}</main>
<script type="application/json" id="data">{script_json({"matrices": matrices})}</script>
<script type="module">{script}</script></body></html>
"""
    return put(path, page.encode())


def _title(decision: Decision) -> str:
    return f"Should {decision.views[0].name} join?" if len(decision.views) == 1 else "Who gains by joining?"


def _body(decision: Decision) -> str:
    several = len(decision.views) > 1
    parts = [
        f"<header><h1>{escape(_title(decision))}</h1>{paragraphs([_lead(decision)], 'soft')}"
        f"{paragraphs(decision.not_assessed)}{_less(decision)}"
        '<button id="print" class="screen" type="button">Print this page</button></header>',
        _recommendation(decision),
        _federation(decision) if several else "",
        _agents(decision),
        _collaboration(decision) if several else "",
        _heterogeneity(decision),
        _reading(decision),
    ]
    return "\n".join(part for part in parts if part)


def _lead(decision: Decision) -> str:
    others = [title_of(m) for m in decision.methods if m != ALONE]
    runs = f"as the mean of {decision.seeds} training runs" if decision.seeds > 1 else "in one training run"
    return (
        f"{decision.data}, {len(decision.names)} agents. An agent is a hospital or other site that does not share its "
        f"data. Each can train alone or together with the others ({verdict_text.listed(others)}). Every number is "
        f"measured on the agent's own held-out data, {runs}, with a 95 % interval."
    )


def _less(decision: Decision) -> str:
    """Return a link to what was reduced, if anything was."""
    if not decision.reduced:
        return ""
    return '<p class="soft">Less was trained than could be: <a href="#reduced">what, and how to ask for more</a>.</p>'


def _recommendation(decision: Decision) -> str:
    found = [(view, one) for view in decision.views if (one := recommend(view, decision))]
    if not found or decision.partners is None:
        return ""
    several = len(decision.views) > 1
    lines = actions([(v.name, one.action, one.reason, MARKS[one.sign]) for v, one in found], single=not several)
    chart = ""
    if several and any(view.recommended for view in decision.views):
        caption = "Gain of each agent with its best group over training alone, on its own test samples"
        chart = figure(recommended_chart(decision), caption)
    method = paragraphs([measured_by(decision.partners), *excluded(decision.partners)], "soft")
    return f"<section><h2>Recommendation</h2>{lines}{chart}{method}</section>"


def _federation(decision: Decision) -> str:
    joint = [decision.method, *(m for m in decision.methods if m not in (ALONE, decision.method))]
    parts = []
    for method in joint:
        found = gainers(decision.views, method, decision.metric)
        caption = f"Gain of each agent with {title_of(method)} over training alone"
        chart = figure(gains_chart(decision, method), caption) if found else ""
        sentences = verdict_text.federation_summary(decision, method)
        summary = paragraphs([*sentences, share_text(decision, method)] if found else sentences)
        parts.append(
            f'<div data-of="method" data-is="{escape(method)}">{summary}{chart}'
            f"<details><summary>Scores and samples</summary>{_scores_table(decision, method)}</details></div>"
        )
    choice = select("method", "Method for joining", {m: title_of(m) for m in joint})
    return f"<section><h2>The federation</h2>{choice}{''.join(parts)}{_all_gains(decision, joint)}</section>"


def _agents(decision: Decision) -> str:
    several = len(decision.views) > 1
    parts = [_agent(decision, view, i) for i, view in enumerate(decision.views)]
    choice = select("agent", "Agent", {str(i): v.name for i, v in enumerate(decision.views)}) if several else ""
    title = "<h2>Agent by agent</h2>" if several else "<h2>The evidence</h2>"
    return f"<section>{title}{choice}{''.join(parts)}</section>"


def _agent(decision: Decision, view: View, i: int) -> str:
    method, metric = decision.method, decision.metric
    standing = view.standings.get(method)
    mark = MARKS[standing.gains[metric].sign] if standing else "level"
    cautions = [*verdict_text.caution(view, decision), *verdict_text.reference(view, metric)]
    sentences = [verdict_text.verdict(view, method, metric), " ".join(cautions)]
    parts = [
        f'<div class="verdict {mark}">{paragraphs(sentences)}</div>',
        figure(methods_chart(view, metric), f"{view.name}: each method on its own {view.tests} test samples"),
        _standings_table(decision, view),
    ]
    if view.advice and decision.partners:
        caption = f"Contribution of each partner to {view.name}, on held-out training rows"
        chart = figure(partners_chart(view, decision.partners.metric), caption)
        parts.append(part("Which partners help it", verdict_text.partners(view, decision), chart))
    if view.weighing:
        title = title_of(view.weighing[0])
        caption = f"Shares of the updates that entered {view.name}'s {title} model"
        chart = figure(sources_chart(view, decision, view.weighing[0]), caption)
        parts.append(part("Whose updates its model uses", verdict_text.update_sources(view, decision), chart))
    if decision.distances and view.name in decision.distances.names:
        parts.append(part("How its data differ", verdict_text.data_differences(decision.distances, view.name)))
    one = recommend(view, decision)
    if one and len(decision.views) > 1:
        parts.append(f'<div class="keep"><h3>Recommendation for {escape(view.name)}</h3>')
        parts.append(actions([(view.name, one.action, one.reason, MARKS[one.sign])], single=True) + "</div>")
    return f'<div data-of="agent" data-is="{i}">{"".join(parts)}</div>'


def _standings_table(decision: Decision, view: View) -> str:
    metrics = [m for m in decision.metrics if m in view.standings[ALONE].scores]
    head = ["method", *(verdict_text.METRIC_TITLES[m] for m in metrics), "gain over training alone", "range over seeds"]
    rows = []
    for method, standing in view.standings.items():
        won = standing.gains.get(decision.metric)
        ends = (verdict_text.number(pick(standing.seeds), decision.metric).removesuffix(" %") for pick in (min, max))
        spread = " to ".join(dict.fromkeys(ends))
        cells = [interval(standing.scores[m], m) for m in metrics]
        cells += [gain(won, decision.metric) if won else "<td>–</td>", f"<td>{spread}</td>"]
        rows.append(f'<tr><th scope="row">{escape(title_of(method))}</th>{"".join(cells)}</tr>')
    return table(head, rows, f"{view.name}: all numbers, with 95 % intervals")


def _scores_table(decision: Decision, method: str) -> str:
    rows = []
    for view, won in gainers(decision.views, method, decision.metric):
        scores = [view.standings[m].scores[decision.metric] for m in (ALONE, method)]
        cells = "".join(interval(found, decision.metric) for found in scores) + gain(won, decision.metric)
        samples = f"<td>{view.training or '–'}</td><td>{view.tests}</td>"
        rows.append(f'<tr><th scope="row">{escape(view.name)}</th>{cells}{samples}</tr>')
    unit = verdict_text.METRIC_TITLES[decision.metric]
    return table(
        ["agent", "alone", title_of(method), "gain", "training", "test"],
        rows,
        f"{unit}, with 95 % intervals; training and test samples",
    )


def _all_gains(decision: Decision, methods: Sequence[str]) -> str:
    """Return one table of the gains of all agents with all methods, and the share of agents that gain."""
    groups = any(view.recommended for view in decision.views)
    rows = []
    for view in decision.views:
        found = [view.standings[m].gains.get(decision.metric) if m in view.standings else None for m in methods]
        found += [view.recommended] if groups else []
        cells = "".join(gain(one, decision.metric) if one else "<td>–</td>" for one in found)
        rows.append(f'<tr><th scope="row">{escape(view.name)}</th>{cells}</tr>')
    shares = [
        share_cell(share_that_gains([g for _, g in gainers(decision.views, m, decision.metric)])) for m in methods
    ]
    shares += [share_cell(share_that_gains([v.recommended for v in decision.views if v.recommended]))] if groups else []
    foot = f'<tr><th scope="row">agents that gain</th>{"".join(shares)}</tr>'
    unit = "points" if in_percent(decision.metric) else verdict_text.METRIC_TITLES[decision.metric]
    head = ["agent", *(title_of(m) for m in methods), *(["best group"] if groups else [])]
    return f"<h3>Every agent with every method</h3>{table(head, rows, f'Gain over training alone, in {unit}', foot)}"


def _collaboration(decision: Decision) -> str:
    parts = []
    for method in _weighing(decision):
        name, stops = f"matrix-{method}", _stops(decision, method)
        control = (
            f'<div class="choose screen"><label for="range-{method}">Rounds</label><input type="range" min="0" '
            f'max="{len(stops) - 1}" value="0" id="range-{method}" data-matrix="{name}">'
            f"<output>{escape(stops[0]['title'])}</output></div>"
        )
        rows = [view.name for view in decision.views if method in view.update_weights]
        table = heat(name, rows, decision.names, stops[0]["shares"], percent=True)
        parts.append(f'<div class="keep"><h3>{escape(title_of(method))}</h3>{control}{table}</div>')
    if not parts:
        return ""
    text = (
        "Each row is one agent's model. Each column is the share of that agent's updates in it, in percent. Move the "
        "slider to see how the shares change during training. The other methods do not select partners."
    )
    return f"<section><h2>Who learned from whom</h2>{paragraphs([text])}{''.join(parts)}</section>"


def _heterogeneity(decision: Decision) -> str:
    found = decision.distances
    if found is None:
        return ""
    parts = [
        f'<div class="keep"><h3>{title}</h3>{paragraphs([about if matrix else UNKNOWN], "soft")}'
        f"{heat(f'distance-{kind}', found.names, found.names, matrix) if matrix else ''}</div>"
        for kind, (title, about) in KINDS.items()
        for matrix in [getattr(found, kind)]
    ]
    text = (
        "The distances between the agents' data, computed before training. Close partners are more likely to help; "
        "the results above show whether they do."
    )
    return f"<section><h2>Before training: how the data differ</h2>{paragraphs([text])}{''.join(parts)}</section>"


def _facts(decision: Decision) -> dict[str, str]:
    """Return software, data and model of the runs, and the training of each method; equal trainings share a line."""
    facts = facts_of(*decision.examples.values())
    same: dict[str, list[str]] = {}
    for method in decision.methods:
        same.setdefault(training_text(decision.examples[method].config.settings), []).append(title_of(method))
    del facts["training"]
    return facts | {f"training of {verdict_text.listed(titles)}": text for text, titles in same.items()}


def _reading(decision: Decision) -> str:
    title = title_of(decision.method)
    sentences = [
        f"The verdict compares {title} with training alone. {title} was selected before any result was known. "
        "Selecting the best of several methods afterwards would overstate the gain.",
        f"For each interval the test samples are drawn {RESAMPLES:,} times with replacement. All methods use the same "
        f"draws, so differences are paired by sample. {_chance(decision)}",
        "An agent gains or loses clearly when the whole interval lies on one side of 0. There is no verdict for an AUC "
        f"with fewer than {FEW} samples of a class or an error with fewer than {FEW} samples.",
        "In a small test set all samples may agree, and a plain interval would look certain. The draws of an accuracy "
        "therefore include two added samples, one for and one against; those of an AUC or an error are widened when "
        "there are few samples. Samples for balanced accuracy and AUC are drawn within each class.",
    ]
    methods = {title_of(m): about_of(m).in_words for m in decision.methods}
    reduced = ""
    if decision.reduced:
        reduced = f'<div class="keep" id="reduced"><h3>{REDUCED}</h3>{paragraphs(decision.reduced)}</div>'
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in {**methods, **_facts(decision)}.items())
    return f"<section><h2>How to read this page</h2>{paragraphs(sentences)}{reduced}<dl>{facts}</dl></section>"


def _chance(decision: Decision) -> str:
    """Return what the intervals cover and what they do not."""
    if decision.seeds == 1:
        return (
            "Each model was trained once: an interval covers the choice of test samples but not the randomness of "
            "training. A clear difference may come from one lucky training run."
        )
    return (
        "Each draw also includes the randomness of training: the standard error over the seeds, with Student’s "
        "distribution. The interval therefore covers the choice of test samples and the randomness of training, but "
        "not the choice of training data. Of 20 agents without a real difference, at most about one is reported to "
        "have one; there is no correction for many agents."
    )


def _weighing(decision: Decision) -> list[str]:
    return list(dict.fromkeys(method for view in decision.views for method in view.weighing))


def _stops(decision: Decision, method: str) -> list[dict[str, Any]]:
    """Return the matrices of the slider: one over all rounds, then one per phase."""
    update_weights = [view.update_weights[method] for view in decision.views if method in view.update_weights]
    spans = phases(min(len(rounds) for rounds in update_weights))

    def shares(part: range | None) -> list[list[float]]:
        return [[round(share, 5) for share in mean_over(rounds, part)] for rounds in update_weights]

    titles = [f"rounds {p.start + 1} to {p.stop}" if len(p) > 1 else f"round {p.stop}" for p in spans]
    later = [{"title": title, "shares": shares(p)} for title, p in zip(titles, spans, strict=True)]
    return [{"title": "all rounds", "shares": shares(None)}, *later]
