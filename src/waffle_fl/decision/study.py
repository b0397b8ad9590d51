"""Plan the runs that show whether an agent should join, and compare their results: settings -> runs -> Decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from waffle_fl.config import Experiment, RunConfig, Settings
from waffle_fl.decision.bootstrap import Array, Interval, Metric, estimate, figures, gain, metrics_of
from waffle_fl.decision.distances import Distances
from waffle_fl.decision.measurement import JOINT, SHARED
from waffle_fl.decision.partners import Advice, PartnerStudy
from waffle_fl.decision.references import Reference
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, all_alices_of, handle, plan
from waffle_fl.federation import Federation, index_of
from waffle_fl.manifest import Warn, verify_all
from waffle_fl.results import WEIGHING, FinishedRun, check_alike, methods_of
from waffle_fl.tensorfile import read_named

ALONE = "local"
DEFAULT = (ALONE, SHARED, "waffle", "ditto")
PREDICTIONS = "predictions.safetensors"
CHOSEN = (  # may differ between methods
    *("lr", "weight_decay", "model", "augment", "flips", "final_model", "final_round"),
    *("batch_size", "momentum_between_rounds"),
)
PHASES = 20  # maximum number of slider positions
LONGEST_LABEL = 120  # characters of a folder's name


@dataclass(frozen=True)
class Standing:
    """The results of one agent with one method."""

    method: str
    scores: dict[Metric, Interval]
    gains: dict[Metric, Interval]  # over training alone; empty for training alone
    seeds: tuple[float, ...]  # the main metric of each seed


@dataclass(frozen=True)
class ComparedReference:
    """A reference for training alone: its score by the main metric, and how much better it is than Local."""

    name: str
    score: float
    gain: Interval


@dataclass(frozen=True)
class View:
    """The results of one agent with all methods."""

    name: str
    training: int
    tests: int
    classes: tuple[int, ...]  # test samples per class, 0 for absent classes; empty for regression
    standings: dict[str, Standing]
    update_weights: dict[str, list[list[float]]]  # method -> round -> weight of each agent's update, mean over seeds
    notes: tuple[str, ...] = ()
    advice: Advice | None = None  # what each partner contributes, and the best group; None if not measured
    recommended: Interval | None = None  # gain of the best group over training alone, on test data
    reference: ComparedReference | None = None  # scikit-learn on this agent's data alone

    @property
    def majority_share(self) -> float:
        """The share of the most frequent class in the test data: the accuracy of always predicting it."""
        return max(self.classes) / sum(self.classes)

    @property
    def weighing(self) -> list[str]:
        return [method for method in ("waffle", "weight-erosion") if method in self.update_weights]


@dataclass(frozen=True)
class Decision:
    """The content of the decision page."""

    data: str
    metrics: tuple[Metric, ...]  # the first decides the verdict
    method: str  # represents joining; selected before any result is known
    methods: tuple[str, ...]
    names: tuple[str, ...]  # all agents, in order
    views: tuple[View, ...]  # the agents that a model was trained for
    seeds: int
    examples: Mapping[str, FinishedRun]  # method -> one of its runs with all agents
    not_assessed: tuple[str, ...] = ()  # a reason for each agent that was trained for but has no view
    distances: Distances | None = None
    partners: PartnerStudy | None = None
    reduced: tuple[str, ...] = ()  # what was reduced to keep within the budget, and how to ask for more

    @property
    def metric(self) -> Metric:
        return self.metrics[0]


def headline(methods: Sequence[str]) -> str:
    """Return the method that represents joining: WAFFLE, else the first personalised one, else the shared model."""
    able = [m for m in methods if m not in (ALONE, *JOINT)] or [m for m in methods if m != ALONE]
    if not able:
        raise WaffleError("expected at least one method besides local, to compare with training alone")
    return "waffle" if "waffle" in able else able[0]


def runs_for(
    settings: Settings,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    runtime: Runtime,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    metric: Metric | None = None,
) -> list[tuple[RunConfig, Path]]:
    """Return the runs of every method for every chosen agent and seed.

    Raise WaffleError if `metric` is not defined on the test data of any chosen agent."""
    methods = tuple(dict.fromkeys((ALONE, *methods)))
    headline(methods)
    grid = Experiment(
        methods=methods, splits=(settings.split,), seeds=tuple(seeds), settings=settings, options=options or {}
    )
    runs = plan(grid, out, runtime)
    federation = all_alices_of(settings, runtime)
    _check_metric(metric, federation, alices_of(runs, federation.names))
    return runs


def alices_of(runs: Sequence[tuple[RunConfig, Path]], names: Sequence[str]) -> list[int]:
    """Return the agents that these runs train a model for."""
    return sorted({index_of(config.settings.alice, names) for config, _ in runs})


def group_runs(
    study: PartnerStudy,
    settings: Settings,
    seeds: Sequence[int],
    names: Sequence[str],
    out: Path,
    options: Mapping[str, Mapping[str, Any]],
) -> list[tuple[RunConfig, Path]]:
    """Return the runs that train every agent's best group on all training rows, to be measured on test data."""
    runs = []
    for name, advice in study.advice.items():
        members = {name, *advice.partners}
        absent = tuple(handle(i, other) for i, other in enumerate(names) if other not in members)
        chosen = replace(settings, alice=handle(names.index(name), name), leave_out=absent)
        for seed in seeds:
            config = RunConfig(
                method=advice.method, settings=replace(chosen, seed=seed), options=options.get(advice.method, {})
            )
            label = config.label
            if len(label) > LONGEST_LABEL:
                label = f"{label[:LONGEST_LABEL]}-{sha256(label.encode()).hexdigest()[:8]}"
            runs.append((config, out / label))
    return runs


def _check_metric(metric: Metric | None, federation: Federation, agents: Sequence[int]) -> None:
    targets = [federation.labels(i, federation.test[i]).numpy() for i in agents]
    defined = dict.fromkeys(known for target in targets for known in metrics_of(target, federation.outputs))
    if metric and metric not in defined:
        raise WaffleError(f"metric: {metric} is not defined on any agent's test data; available: {', '.join(defined)}")


def decide(
    runs: Sequence[FinishedRun],
    distances: Distances | None = None,
    metric: Metric | None = None,
    force: bool = False,
    warn: Warn | None = None,
    partners: PartnerStudy | None = None,
    references: Mapping[str, Reference] | None = None,
    reduced: tuple[str, ...] = (),
) -> Decision:
    """Compare the methods on each agent's own test data.

    The default metric is accuracy, or RMSE for regression. The predictions are checked against their manifests, as by
    `manifest.verify`."""
    check_alike(runs, ("seed", "alice", "leave_out", *CHOSEN))
    for method in methods_of(runs):
        check_alike([run for run in runs if run.config.method == method], ("seed", "alice", "leave_out"))
    verify_all([run.folder for run in runs if run.folder.is_dir()], (PREDICTIONS,), force, warn)
    _check_same_data(runs)
    absent = min((run.config.settings.leave_out for run in runs), key=len, default=())
    full = [run for run in runs if run.config.settings.leave_out == absent]
    by_agent: dict[str, list[FinishedRun]] = {}
    for run in full:
        by_agent.setdefault(_alice(run), []).append(run)
    methods = methods_of(full)
    if ALONE not in methods or not by_agent:
        raise WaffleError("expected runs of local among the runs, to compare with training alone; run local too")
    names = tuple(full[0].provenance["agents"])
    method = headline(methods)
    views, metrics, not_assessed = [], set(), []
    for name in sorted(by_agent, key=names.index):
        advice = partners.advice.get(name) if partners and not absent else None
        group = _group_runs(runs, name, names, advice) if advice else []
        try:
            view, measured = _view(name, names, methods, by_agent[name], metric, advice, group)
            view = replace(view, reference=_compared(by_agent[name], measured[0], (references or {}).get(name)))
        except NotAssessed as reason:
            not_assessed.append(f"{name} is not assessed: {reason}")
            continue
        views.append(view)
        metrics.add(measured)
    if not views:
        raise WaffleError(not_assessed[0])
    return Decision(
        data=full[0].config.settings.data_name,
        metrics=max(metrics, key=len),
        method=method,
        methods=tuple(methods),
        names=names,
        views=tuple(views),
        seeds=len({run.config.settings.seed for run in full}),
        examples={run.config.method: run for run in reversed(full)},
        not_assessed=tuple(f"{reason}." for reason in not_assessed),
        distances=distances,
        partners=partners if any(view.advice for view in views) else None,
        reduced=reduced,
    )


def decidable(runs: Sequence[FinishedRun]) -> bool:
    """Return whether these runs are of one split and hold test predictions of local and of another method."""
    methods = {run.config.method for run in runs if (run.folder / PREDICTIONS).exists()}
    return ALONE in methods and len(methods) > 1 and len({run.config.settings.column for run in runs}) == 1


class NotAssessed(Exception):
    """The reason why one agent has no verdict."""


def _check_same_data(runs: Sequence[FinishedRun]) -> None:
    """Raise WaffleError if runs for the same agent and partners used different data."""
    known: dict[tuple[str, tuple[str, ...]], FinishedRun] = {}
    for run in runs:
        other = known.setdefault((_alice(run), run.config.settings.leave_out), run)
        seen, before = (r.provenance.get("binding", {}).get("data") for r in (run, other))
        if seen != before:
            raise WaffleError(
                f"{other.folder} and {run.folder} were made on different data: delete the folder of each run made "
                "before the data changed, and run again"
            )


def _alice(run: FinishedRun) -> str:
    return str(run.provenance["agents"][run.provenance["alice"]])


def _group_runs(runs: Sequence[FinishedRun], name: str, names: Sequence[str], advice: Advice) -> list[FinishedRun]:
    """Return the runs of an agent's best group."""
    absent = {other for other in names if other not in (name, *advice.partners)}
    return [
        run
        for run in runs
        if _alice(run) == name
        and run.config.method == advice.method
        and {names[index_of(one, names)] for one in run.config.settings.leave_out} == absent
    ]


def _view(
    name: str,
    names: Sequence[str],
    methods: Sequence[str],
    runs: list[FinishedRun],
    metric: Metric | None,
    advice: Advice | None,
    group: list[FinishedRun],
) -> tuple[View, tuple[Metric, ...]]:
    predicted, target = _predictions(runs)
    if ALONE not in predicted:
        raise NotAssessed("no run of local finished, so there is nothing to compare with")
    outputs = next(iter(predicted[ALONE].values())).shape[-1]
    defined = metrics_of(target, outputs)
    if metric and metric not in defined:
        raise NotAssessed(f"{metric} is not defined on its test data; available: {', '.join(defined)}")
    metrics = tuple(sorted(defined, key=lambda m: m != metric))
    standings = {}
    for m in (m for m in methods if m in predicted):
        gains = {k: gain(k, predicted[m], predicted[ALONE], target) for k in metrics} if m != ALONE else {}
        seeds = tuple(figures(metrics[0], predicted[m], target).values())
        standings[m] = Standing(m, {k: estimate(k, predicted[m], target) for k in metrics}, gains, seeds)
    joined, _ = _predictions(group, target)
    recommended = gain(metrics[0], joined[advice.method], predicted[ALONE], target) if advice and joined else None
    counts = next((run.provenance.get("label_counts") for run in runs if run.provenance.get("label_counts")), None)
    classes = np.bincount(target, minlength=outputs).tolist() if metrics[0] != "rmse" else []
    diverged = sorted({run.title for run in [*runs, *group] if run.result["status"] != "finished"})
    view = View(
        name=name,
        training=sum(counts[names.index(name)]) if counts and counts[0] else 0,
        tests=len(target),
        classes=tuple(classes),
        standings=standings,
        update_weights={
            m: _mean_weights([run for run in runs if run.config.method == m]) for m in WEIGHING if m in predicted
        },
        notes=tuple(f"{title} diverged in some runs, which are left out" for title in diverged),
        advice=advice,
        recommended=recommended,
    )
    return view, metrics


def _compared(runs: Sequence[FinishedRun], metric: Metric, reference: Reference | None) -> ComparedReference | None:
    """Compare a reference with training alone on the same test samples; None if they are not the same."""
    predicted, target = _predictions([run for run in runs if run.config.method == ALONE])
    if reference is None or not np.allclose(reference.target, target):
        return None
    output = {0: reference.output}
    (score,) = figures(metric, output, target).values()
    return ComparedReference(reference.name, score, gain(metric, output, predicted[ALONE], target))


def _predictions(runs: Sequence[FinishedRun], target: Any = None) -> tuple[dict[str, dict[int, Array]], Any]:
    """Return the outputs for the test samples, by method and seed, and the true targets."""
    predicted: dict[str, dict[int, Array]] = {}
    for run in sorted(runs, key=lambda run: run.config.settings.seed):
        if run.result["status"] != "finished":
            continue
        tensors = read_named(run.folder / PREDICTIONS, ("output", "target"))
        truth = tensors["target"].numpy()
        if target is not None and not np.array_equal(target, truth):
            raise WaffleError(f"{run.folder.name} was tested on other samples than the other runs: run them again")
        target = truth
        predicted.setdefault(run.config.method, {})[run.config.settings.seed] = tensors["output"].double().numpy()
    return predicted, target


def _mean_weights(runs: Sequence[FinishedRun]) -> list[list[float]]:
    """Return the weight of each agent's update in the model per round, mean over seeds."""
    logs = [[line["weights"] for line in run.rounds] for run in runs if run.result["status"] == "finished"]
    return [[fmean(column) for column in zip(*same, strict=True)] for same in zip(*logs, strict=True)]


def phases(rounds: int) -> list[range]:
    """Split the rounds into at most PHASES ranges of equal length, the positions of the slider."""
    length = -(-rounds // PHASES)
    return [range(start, min(start + length, rounds)) for start in range(0, rounds, max(1, length))]


def mean_over(rounds: Sequence[Sequence[float]], part: range | None = None) -> list[float]:
    """Return each agent's mean weight over a range of rounds, by default over all."""
    chosen = [rounds[r] for r in part] if part is not None else list(rounds)
    return [fmean(column) for column in zip(*chosen, strict=True)]


def gainers(views: Sequence[View], method: str, metric: Metric) -> list[tuple[View, Interval]]:
    """Return the agents and their gains with the method, the largest gain first."""
    known = [(v, v.standings[method].gains[metric]) for v in views if metric in _gains(v, method)]
    return sorted(known, key=lambda pair: -pair[1].value)


def _gains(view: View, method: str) -> Mapping[Metric, Interval]:
    return view.standings[method].gains if method in view.standings else {}
