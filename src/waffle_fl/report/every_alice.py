"""Table of runs in which every agent is Alice once: mean over agents, worst agent, share of agents that gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from waffle_fl.algorithms import title_of
from waffle_fl.errors import WaffleError
from waffle_fl.results import FinishedRun, methods_of

MEASURES = {
    "accuracy": "Accuracy in percent",
    "balanced_accuracy": "Balanced accuracy in percent",
    "auc": "Area under the ROC curve in percent",
}
ALONE = "local"

Agents = Mapping[str, float]  # agent -> score of one seed; agents without a score are absent


def agents_of(runs: Sequence[FinishedRun], measure: str) -> dict[str, list[Agents]]:
    """Return method -> the agents' scores in the last round, per seed; an agent with one class has no AUC."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for run in runs:
        value = run.result.get("metrics", {}).get(measure)
        if value is not None:
            seeds = found.setdefault(run.config.method, {})
            seeds.setdefault(run.config.settings.seed, {})[run.row] = 100 * value
    if not found:
        raise WaffleError(f"no run has the measure {measure!r}: choose from {', '.join(MEASURES)}")
    return {method: [found[method][seed] for seed in sorted(found[method])] for method in methods_of(runs)}


def to_markdown(runs: Sequence[FinishedRun], measure: str) -> str:
    """Return a table with one row per method; the best mean and the best worst agent are in bold."""
    scores = agents_of(runs, measure)
    means = {method: [mean(agents.values()) for agents in seeds] for method, seeds in scores.items()}
    worst = {method: [min(agents.values()) for agents in seeds] for method, seeds in scores.items()}
    agents = len({run.row for run in runs})
    lines = [
        f"{MEASURES[measure]}, last round, {agents} agents, each as Alice, {len(means[ALONE])} seeds:",
        "",
        "| method | mean over agents | worst agent | agents better than alone |",
        "| --- | --- | --- | --- |",
    ]
    for method in scores:
        gains = [_gaining(*pair) for pair in zip(scores[method], scores[ALONE], strict=True)]
        cells = [_cell(means, method), _cell(worst, method), "–" if method == ALONE else f"{mean(gains):.0%}"]
        lines.append(f"| {title_of(method)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _gaining(agents: Agents, alone: Agents) -> float:
    return mean(agents[name] > alone[name] for name in agents)


def _cell(values: Mapping[str, Sequence[float]], method: str) -> str:
    text = f"{mean(values[method]):.2f}" + (f" ± {stdev(values[method]):.2f}" if len(values[method]) > 1 else "")
    best = max(round(mean(seeds), 2) for seeds in values.values())
    return f"**{text}**" if round(mean(values[method]), 2) == best else text
