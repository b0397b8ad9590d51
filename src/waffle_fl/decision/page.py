"""The decision page: words first, then charts; one file that needs no network, and prints."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from waffle_fl.algorithms import about_of, title_of
from waffle_fl.decision import verdict_text
from waffle_fl.decision.bootstrap import FEW, RESAMPLES
from waffle_fl.decision.charts import company_chart, gains_chart, methods_chart, partners_chart
from waffle_fl.decision.markup import MARKS, figure, gain, heat, interval, paragraphs, part, select, table
from waffle_fl.decision.study import ALONE, Decision, View, gainers, mean_over, phases
from waffle_fl.report.page import bundle, facts_of, put, script_json

KINDS = {
    "label": (
        "Labels",
        "Half the sum of the differences between the label shares of two agents: 0 is the same mix, 1 no label in "
        "common. Of numbers to predict, the difference of their means in standard deviations.",
    ),
    "feature": (
        "Features",
        "How far apart the means of a feature lie, in standard deviations of all training samples; the mean over "
        "features. Around 0.2 is little, above 0.8 much.",
    ),
    "gradient": (
        "Gradients",
        "How differently the data of two agents would pull one and the same untrained model, by the angle between "
        "the two: 0 the same way, 0.7 at right angles, 1 opposite ways.",
    ),
}

UNKNOWN = "Each agent standardised its columns by its own means, so that none are left to compare."


def write_page(decision: Decision, path: Path) -> Path:
    """Write the page, whole."""
    charts: dict[str, Mapping[str, Any]] = {}
    body = _body(decision, charts)
    matrices = {f"matrix-{m}": _stops(decision, m) for m in _weighing(decision)}
    content = script_json({"charts": charts, "matrices": matrices})
    style, script = (
        resources.files("waffle_fl.decision").joinpath(f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(_title(decision))}</title><style>{style}</style></head>
<body><main>{body}</main>
<script type="application/json" id="data">{content}</script>
<script type="module">{bundle()}</script>
<script type="module">{script}</script></body></html>
"""
    return put(path, page.encode())


def _title(decision: Decision) -> str:
    return f"Should {decision.views[0].name} join?" if len(decision.views) == 1 else "Who gains by joining?"


def _body(decision: Decision, charts: dict[str, Mapping[str, Any]]) -> str:
    several = len(decision.views) > 1
    parts = [
        f"<header><h1>{escape(_title(decision))}</h1>{paragraphs([_lead(decision)], 'soft')}"
        f"{paragraphs(decision.unjudged)}"
        '<button id="print" class="screen" type="button">Print this page</button></header>',
        _federation(decision, charts) if several else "",
        _agents(decision, charts),
        _collaboration(decision) if several else "",
        _heterogeneity(decision),
        _reading(decision),
    ]
    return "\n".join(part for part in parts if part)


def _lead(decision: Decision) -> str:
    others = [title_of(m) for m in decision.methods if m != ALONE]
    runs = f"mean of {decision.seeds} training runs" if decision.seeds > 1 else "of one training run"
    return (
        f"{decision.data}, {len(decision.names)} agents; an agent is a hospital, or any other site, that keeps its "
        f"data to itself. Each could train alone or together with the others ({verdict_text.listed(others)}). Every "
        f"figure here is measured on held-out data of the agent itself, {runs}, with 95 % intervals."
    )


def _federation(decision: Decision, charts: dict[str, Mapping[str, Any]]) -> str:
    joint = [m for m in decision.methods if m != ALONE]
    parts = []
    for method in [decision.method, *(m for m in joint if m != decision.method)]:
        found = gainers(decision.views, method, decision.metric)
        if found:
            charts[f"gains-{method}"] = gains_chart(decision, method)
        caption = f"What {title_of(method)} brings each agent over training alone"
        chart = figure(f"gains-{method}", caption) if found else ""
        said = paragraphs(verdict_text.everyone(decision, method))
        parts.append(
            f'<div data-of="method" data-is="{method}">{said}{chart}'
            f"<details><summary>The same in numbers</summary>{_gains_table(decision, method)}</details></div>"
        )
    names = {m: title_of(m) for m in [decision.method, *(m for m in joint if m != decision.method)]}
    return f"<section><h2>The federation</h2>{select('method', 'Joining by means of', names)}{''.join(parts)}</section>"


def _agents(decision: Decision, charts: dict[str, Mapping[str, Any]]) -> str:
    several = len(decision.views) > 1
    parts = [_agent(decision, view, i, charts) for i, view in enumerate(decision.views)]
    choice = select("agent", "Agent", {str(i): v.name for i, v in enumerate(decision.views)}) if several else ""
    title = "<h2>Agent by agent</h2>" if several else ""
    return f"<section>{title}{choice}{''.join(parts)}</section>"


def _agent(decision: Decision, view: View, i: int, charts: dict[str, Mapping[str, Any]]) -> str:
    method, metric = decision.method, decision.metric
    standing = view.standings.get(method)
    mark = MARKS[standing.gains[metric].sign] if standing else "level"
    said = [verdict_text.verdict(view, method, metric), " ".join(verdict_text.caution(view, decision))]
    charts[f"methods-{i}"] = methods_chart(view, metric)
    parts = [
        f'<div class="verdict {mark}">{paragraphs(said)}</div>',
        figure(f"methods-{i}", f"{view.name}: each way to train, on its own {view.tests} test samples"),
        _standings_table(decision, view),
    ]
    if view.weighing:
        charts[f"company-{i}"] = company_chart(view, decision, view.weighing[0])
        title = title_of(view.weighing[0])
        chart = figure(f"company-{i}", f"Shares of the updates that entered {view.name}'s {title} model")
        parts.append(part("Whose updates it took", verdict_text.company(view, decision), chart))
    if view.partners:
        charts[f"partners-{i}"] = partners_chart(view, metric)
        caption = f"{title_of(method)} with everybody, compared with {title_of(method)} without this partner"
        chart = figure(f"partners-{i}", caption)
        parts.append(part("Which partners help it", verdict_text.partners(view, decision), chart))
    if decision.distances and view.name in decision.distances.names:
        parts.append(part("How unlike the others it is", verdict_text.unlike(decision.distances, view.name)))
    return f'<div data-of="agent" data-is="{i}">{"".join(parts)}</div>'


def _standings_table(decision: Decision, view: View) -> str:
    metrics = [m for m in decision.metrics if m in view.standings[ALONE].scores]
    head = ["method", *(verdict_text.METRIC_TITLES[m] for m in metrics), "gain over training alone", "seed by seed"]
    rows = []
    for method, standing in view.standings.items():
        won = standing.gains.get(decision.metric)
        ends = (verdict_text.number(pick(standing.seeds), decision.metric).removesuffix(" %") for pick in (min, max))
        spread = " to ".join(dict.fromkeys(ends))
        specs = [interval(standing.scores[m], m) for m in metrics]
        specs += [gain(won, decision.metric) if won else "<td>–</td>", f"<td>{spread}</td>"]
        rows.append(f'<tr><th scope="row">{escape(title_of(method))}</th>{"".join(specs)}</tr>')
    return table(head, rows, f"{view.name}: all figures, with 95 % intervals")


def _gains_table(decision: Decision, method: str) -> str:
    rows = []
    for view, won in gainers(decision.views, method, decision.metric):
        scores = [view.standings[m].scores[decision.metric] for m in (ALONE, method)]
        specs = "".join(interval(found, decision.metric) for found in scores) + gain(won, decision.metric)
        samples = f"<td>{view.training or '–'}</td><td>{view.tests}</td>"
        rows.append(f'<tr><th scope="row">{escape(view.name)}</th>{specs}{samples}</tr>')
    unit = verdict_text.METRIC_TITLES[decision.metric]
    return table(
        ["agent", "alone", title_of(method), "gain", "trained on", "tested on"], rows, f"{unit}, with 95 % intervals"
    )


def _collaboration(decision: Decision) -> str:
    parts = []
    for method in _weighing(decision):
        name, stops = f"matrix-{method}", _stops(decision, method)
        control = (
            f'<div class="choose screen"><label for="range-{method}">Rounds</label><input type="range" min="0" '
            f'max="{len(stops) - 1}" value="0" id="range-{method}" data-matrix="{name}">'
            f"<output>{escape(stops[0]['title'])}</output></div>"
        )
        rows = [view.name for view in decision.views if method in view.taken]
        table = heat(name, rows, decision.names, stops[0]["shares"], percent=True)
        parts.append(f'<div class="keep"><h3>{escape(title_of(method))}</h3>{control}{table}</div>')
    if not parts:
        return ""
    said = (
        "Each row is one agent's model; its columns tell whose updates entered it, in percent. Move the slider to see "
        "how this changed as training went on. The other methods do not choose among partners."
    )
    return f"<section><h2>Who learned from whom</h2>{paragraphs([said])}{''.join(parts)}</section>"


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
    said = (
        "How unlike the agents' data are, known before any model is trained. Partners that are near are likelier to "
        "help; whether they do is told above, by measurement."
    )
    return (
        f"<section><h2>Before training: how unlike are the agents?</h2>{paragraphs([said])}{''.join(parts)}</section>"
    )


def _reading(decision: Decision) -> str:
    title = title_of(decision.method)
    said = [
        f"The verdict compares {title} with training alone. {title} was chosen to stand for joining before any result "
        "was seen; picking the best of several methods afterwards would flatter it.",
        f"For an interval the test samples are drawn anew {RESAMPLES:,} times, with replacement, and every method "
        f"faces the same draws, so a difference is judged sample by sample. {_chance(decision)}",
        "An agent is said to gain or lose when the whole interval lies on one side of 0. An AUC of fewer than "
        f"{FEW} samples of a class, and an error of fewer than {FEW} samples, are too uncertain for that.",
        "So that a small test set on which all samples agree does not look certain, the draws of an accuracy know two "
        "imagined samples more, one won and one lost; those of an AUC or an error are spread the wider, the fewer "
        "samples there are. Balanced accuracy and AUC are drawn class by class.",
    ]
    methods = {title_of(m): about_of(m).in_words for m in decision.methods}
    facts = "".join(
        f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in {**methods, **facts_of(decision.first)}.items()
    )
    return f"<section><h2>How to read this</h2>{paragraphs(said)}<dl>{facts}</dl></section>"


def _chance(decision: Decision) -> str:
    """What the intervals cover, and what they do not."""
    if decision.seeds == 1:
        return (
            "The models were trained once: an interval tells how much the choice of test samples matters, and nothing "
            "about the randomness of training. A clear difference may be that of one lucky training run."
        )
    return (
        "To each draw the randomness of training is added: the standard error over the seeds, in Student’s "
        "distribution. An interval so covers the choice of test samples and chance in training, but takes each "
        "agent’s training data as they are. Of 20 agents without any real difference, about one at most is said to "
        "have one; many agents are not corrected for."
    )


def _weighing(decision: Decision) -> list[str]:
    return list(dict.fromkeys(method for view in decision.views for method in view.weighing))


def _stops(decision: Decision, method: str) -> list[dict[str, Any]]:
    """What the slider shows: all rounds, then stretch by stretch."""
    taken = [view.taken[method] for view in decision.views if method in view.taken]
    stretches = phases(min(len(rounds) for rounds in taken))

    def shares(part: range | None) -> list[list[float]]:
        return [[round(share, 3) for share in mean_over(rounds, part)] for rounds in taken]

    titles = [f"rounds {p.start + 1} to {p.stop}" if len(p) > 1 else f"round {p.stop}" for p in stretches]
    later = [{"title": title, "shares": shares(p)} for title, p in zip(titles, stretches, strict=True)]
    return [{"title": "all rounds", "shares": shares(None)}, *later]
