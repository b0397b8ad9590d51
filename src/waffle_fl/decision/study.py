"""Which runs tell whether an agent should join, and what they say: settings -> runs -> Decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from waffle_fl.config import Experiment, RunConfig, Settings
from waffle_fl.decision.bootstrap import Array, Interval, Metric, estimate, figures, gain, metrics_of
from waffle_fl.decision.distances import Distances
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import ALL_ALICES, Runtime, all_alices_of, handle, plan
from waffle_fl.federation import Federation, index_of
from waffle_fl.manifest import Warn, verify_all
from waffle_fl.results import WEIGHING, FinishedRun, check_alike, methods_of
from waffle_fl.tensorfile import read_named

ALONE, SHARED = "local", "fedavg"
DEFAULT = (ALONE, SHARED, "weight-erosion", "waffle", "ditto")
SAID = "predictions.safetensors"
PHASES = 20  # steps of a matrix over time, at most


@dataclass(frozen=True)
class Standing:
    """How one agent fares with one method."""

    method: str
    scores: dict[Metric, Interval]
    gains: dict[Metric, Interval]  # over training alone; none for that itself
    seeds: tuple[float, ...]  # the headline figure of each seed


@dataclass(frozen=True)
class View:
    """All that is known of one agent's decision."""

    name: str
    training: int
    tests: int
    classes: tuple[int, ...]  # test samples of each class, also of those it lacks; none of numbers
    standings: dict[str, Standing]
    taken: dict[str, list[list[float]]]  # method -> round -> whose updates it took, mean over seeds
    partners: dict[str, Interval]  # partner -> what its presence is worth to this agent
    notes: tuple[str, ...] = ()

    @property
    def commonest(self) -> float:
        """The share of its commonest class: what a model would get right that always says the same."""
        return max(self.classes) / sum(self.classes)

    @property
    def weighing(self) -> list[str]:
        return [method for method in ("waffle", "weight-erosion") if method in self.taken]


@dataclass(frozen=True)
class Decision:
    """What the page shows."""

    data: str
    metrics: tuple[Metric, ...]  # the first is the headline
    method: str  # stands for joining; chosen before any result is seen
    methods: tuple[str, ...]
    names: tuple[str, ...]  # all agents, in order
    views: tuple[View, ...]  # those a model was trained for
    seeds: int
    first: FinishedRun
    unjudged: tuple[str, ...] = ()  # of each agent that has no view though a model was trained for it: why
    distances: Distances | None = None

    @property
    def metric(self) -> Metric:
        return self.metrics[0]


def headline(methods: Sequence[str]) -> str:
    """The method that stands for joining: WAFFLE, else the first that personalises, else the shared model."""
    able = [m for m in methods if m not in (ALONE, SHARED)] or [m for m in methods if m != ALONE]
    if not able:
        raise WaffleError("expected a method besides local: nothing else tells what joining brings")
    return "waffle" if "waffle" in able else able[0]


def runs_for(
    settings: Settings,
    methods: Sequence[str],
    seeds: Sequence[int],
    without: Sequence[str],
    out: Path,
    runtime: Runtime,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    metric: Metric | None = None,
) -> list[tuple[RunConfig, Path]]:
    """Every method for every chosen agent and seed; for agents in `without`, also with each partner left out.

    A `metric` that none of the chosen agents' test data define is refused."""
    methods = tuple(dict.fromkeys((ALONE, *methods)))
    method = headline(methods)
    grid = Experiment(
        methods=methods, splits=(settings.split,), seeds=tuple(seeds), settings=settings, options=options or {}
    )
    runs = plan(grid, out, runtime)
    whole = all_alices_of(settings, runtime)
    chosen = {index_of(config.settings.alice, whole.names): config.settings.alice for config, _ in runs}
    _check_metric(metric, whole, list(chosen))
    asked = list(chosen) if ALL_ALICES in without else [index_of(name, whole.names) for name in without]
    strangers = [whole.names[i] for i in asked if i not in chosen]
    if strangers:
        raise WaffleError(f"--leave-one-out: no model is trained for {strangers[0]}; use --alice all")
    for i in asked:
        for j in range(whole.agents):
            if j != i and len(whole.train[j]):
                for seed in seeds:
                    left = replace(settings, alice=chosen[i], seed=seed, leave_out=(handle(j, whole.names[j]),))
                    config = RunConfig(method=method, settings=left, options=grid.options.get(method, {}))
                    runs.append((config, out / config.label))
    return runs


def _check_metric(metric: Metric | None, whole: Federation, agents: Sequence[int]) -> None:
    targets = [whole.labels(i, whole.test[i]).numpy() for i in agents]
    able = dict.fromkeys(known for target in targets for known in metrics_of(target, whole.outputs))
    if metric and metric not in able:
        raise WaffleError(f"metric: {metric} is not defined on anybody's test data; there is {', '.join(able)}")


def decide(
    runs: Sequence[FinishedRun],
    distances: Distances | None = None,
    metric: Metric | None = None,
    force: bool = False,
    warn: Warn | None = None,
) -> Decision:
    """Compare the methods on each agent's own test data, by this metric: else by accuracy, or the error of numbers.

    The predictions are checked against their manifests, as by `manifest.verify`."""
    check_alike(runs, ("seed", "alice", "leave_out"))
    verify_all([run.folder for run in runs if run.folder.is_dir()], (SAID,), force, warn)
    _check_same_data(runs)
    absent = min((run.config.settings.leave_out for run in runs), key=len, default=())
    whole = [run for run in runs if run.config.settings.leave_out == absent]
    by_agent: dict[str, list[FinishedRun]] = {}
    for run in whole:
        by_agent.setdefault(_alice(run), []).append(run)
    methods = methods_of(whole)
    if ALONE not in methods or not by_agent:
        raise WaffleError("expected runs of local among them: without it nothing tells what joining brings")
    names = tuple(whole[0].provenance["agents"])
    less = [run for run in runs if not absent and len(run.config.settings.leave_out) == 1]
    method = headline(methods)
    views, metrics, unjudged = [], set(), []
    for name in sorted(by_agent, key=names.index):
        mine = [run for run in less if _alice(run) == name and run.config.method == method]
        try:
            view, measured = _view(name, names, methods, method, by_agent[name], mine, metric)
        except Unjudged as reason:
            unjudged.append(f"{name} is not judged: {reason}")
            continue
        views.append(view)
        metrics.add(measured)
    if not views:
        raise WaffleError(unjudged[0])
    first = whole[0]
    return Decision(
        data=first.config.settings.data_name,
        metrics=max(metrics, key=len),
        method=method,
        methods=tuple(methods),
        names=names,
        views=tuple(views),
        seeds=len({run.config.settings.seed for run in whole}),
        first=first,
        unjudged=tuple(f"{why}." for why in unjudged),
        distances=distances,
    )


def decidable(runs: Sequence[FinishedRun]) -> bool:
    """Do these runs, of one split, hold training alone and another method, and what each said of the test data?"""
    told = {run.config.method for run in runs if (run.folder / SAID).exists()}
    return ALONE in told and len(told) > 1 and len({run.config.settings.column for run in runs}) == 1


class Unjudged(Exception):
    """Why nothing can be said of one agent."""


def _check_same_data(runs: Sequence[FinishedRun]) -> None:
    """Runs for one agent, in one company, from before and after a change of the data tell nothing together."""
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


def _view(
    name: str,
    names: Sequence[str],
    methods: Sequence[str],
    method: str,
    runs: list[FinishedRun],
    less: list[FinishedRun],
    metric: Metric | None,
) -> tuple[View, tuple[Metric, ...]]:
    said, target = _said(runs)
    if ALONE not in said:
        raise Unjudged("no run of local came to its end, so nothing can be compared with it")
    outputs = next(iter(said[ALONE].values())).shape[-1]
    able = metrics_of(target, outputs)
    if metric and metric not in able:
        raise Unjudged(f"{metric} is not defined on its test data; there is {', '.join(able)}")
    metrics = tuple(sorted(able, key=lambda m: m != metric))
    standings = {}
    for m in (m for m in methods if m in said):
        gains = {k: gain(k, said[m], said[ALONE], target) for k in metrics} if m != ALONE else {}
        seeds = tuple(figures(metrics[0], said[m], target).values())
        standings[m] = Standing(m, {k: estimate(k, said[m], target) for k in metrics}, gains, seeds)
    partners = {}
    for partner in (p for p in names if p != name):
        absent = [run for run in less if names[index_of(run.config.settings.leave_out[0], names)] == partner]
        if absent and method in said:
            others, _ = _said(absent, target)
            if method in others:
                partners[partner] = gain(metrics[0], said[method], others[method], target)
    counts = next((run.provenance.get("label_counts") for run in runs if run.provenance.get("label_counts")), None)
    classes = np.bincount(target, minlength=outputs).tolist() if metrics[0] != "rmse" else []
    lost = sorted({run.title for run in [*runs, *less] if run.result["status"] != "finished"})
    view = View(
        name=name,
        training=sum(counts[names.index(name)]) if counts and counts[0] else 0,
        tests=len(target),
        classes=tuple(classes),
        standings=standings,
        taken={m: _taken([run for run in runs if run.config.method == m]) for m in WEIGHING if m in said},
        partners=partners,
        notes=tuple(f"{title} diverged in some runs, which are left out" for title in lost),
    )
    return view, metrics


def _said(runs: Sequence[FinishedRun], target: Any = None) -> tuple[dict[str, dict[int, Array]], Any]:
    """(method -> what each seed's model said of the test samples, the truth)."""
    said: dict[str, dict[int, Array]] = {}
    for run in sorted(runs, key=lambda run: run.config.settings.seed):
        if run.result["status"] != "finished":
            continue
        tensors = read_named(run.folder / SAID, ("output", "target"))
        truth = tensors["target"].numpy()
        if target is not None and not np.array_equal(target, truth):
            raise WaffleError(f"{run.folder.name} was tested on other samples than the runs beside it: run them anew")
        target = truth
        said.setdefault(run.config.method, {})[run.config.settings.seed] = tensors["output"].double().numpy()
    return said, target


def _taken(runs: Sequence[FinishedRun]) -> list[list[float]]:
    """Round by round, whose updates entered the model: mean over seeds."""
    logs = [[line["weights"] for line in run.rounds] for run in runs if run.result["status"] == "finished"]
    return [[fmean(column) for column in zip(*same, strict=True)] for same in zip(*logs, strict=True)]


def phases(rounds: int) -> list[range]:
    """The rounds in a few stretches of one length, so that a slider has few stops."""
    length = -(-rounds // PHASES)
    return [range(start, min(start + length, rounds)) for start in range(0, rounds, max(1, length))]


def mean_over(rounds: Sequence[Sequence[float]], part: range | None = None) -> list[float]:
    """Each agent's mean weight over a stretch of rounds, or over all."""
    chosen = [rounds[r] for r in part] if part is not None else list(rounds)
    return [fmean(column) for column in zip(*chosen, strict=True)]


def gainers(views: Sequence[View], method: str, metric: Metric) -> list[tuple[View, Interval]]:
    """Agents and what the method brings them, the greatest gain first."""
    known = [(v, v.standings[method].gains[metric]) for v in views if metric in _gains(v, method)]
    return sorted(known, key=lambda pair: -pair[1].value)


def _gains(view: View, method: str) -> Mapping[Metric, Interval]:
    return view.standings[method].gains if method in view.standings else {}
