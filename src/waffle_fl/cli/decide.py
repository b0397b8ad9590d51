"""`waffle decide`: should an agent join? Also writes the decision page of a run on the user's own data."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from waffle_fl.cli.console import console_for
from waffle_fl.cli.flags import parse, settings_class
from waffle_fl.cli.method_options import read_options
from waffle_fl.cli.partners import measure_partners, read_study, without_old_flags
from waffle_fl.cli.progress import Output, ProgressFlags, default_folder, live
from waffle_fl.cli.training import TRAINING_HELP, TrainingOption, chooses_rounds, chosen_training
from waffle_fl.config import RunConfig, Settings, check_name, check_run
from waffle_fl.decision import verdict_text
from waffle_fl.decision.bootstrap import Metric
from waffle_fl.decision.budget import LEFT_OUT, ONE_SEED, WITHOUT, budget_for, is_expensive, seeds_within
from waffle_fl.decision.distances import Distances, distances
from waffle_fl.decision.measurement import SHARED, PartnerOption, joint_method, joint_options
from waffle_fl.decision.recommendation import recommend, recommendations, share_text
from waffle_fl.decision.references import Reference, fit_references
from waffle_fl.decision.study import ALONE, DEFAULT, Decision, alices_of, decide, runs_for
from waffle_fl.errors import WaffleError, writable
from waffle_fl.experiment import Runtime, alices, all_alices_of, device_of, execute, model_of
from waffle_fl.experiment.planning import moved_to
from waffle_fl.manifest import Warn, no_warning
from waffle_fl.records import read_json, write_json
from waffle_fl.results import FinishedRun, read_runs
from waffle_fl.tuning.default_training import MOST_ROUNDS, rounds_for

REFERENCE_VALIDATION = 0.2  # share of the training rows on which a reference is chosen, if no other share is held out
SEEDS = (1, 2, 3)  # if none are given; the first one alone if training takes long
PAGE, DISTANCES, REFERENCES, REDUCED = "decision.html", "distances.json", "references.json", "reduced.json"


@dataclass(frozen=True)
class DecisionFlags:
    """What to compare."""

    methods: tuple[str, ...] = ()
    """Methods to compare. Default: local, fedavg, waffle and ditto; for images and series fedavg-ft instead of fedavg,
    and no ditto if training takes long. local is always added, because gains are measured against training alone."""
    seeds: tuple[int, ...] = ()
    """Seeds. Each method is trained once per seed. Default: 1 2 3, or 1 if training on images takes long."""
    partners: PartnerOption = "auto"
    """Measure which partners help each agent: exact Shapley values (sampled for more than 8 agents), or the effect of
    leaving out each. auto: Shapley values with up to 8 agents, leave-one-out for more; less if training takes long."""
    budget: float = 1.0
    """Factor of the work above which a study of images or series is reduced: 1 is about five minutes on two cores for
    small images. 0: no limit."""
    options: tuple[str, ...] = ()
    """Hyperparameters as METHOD.NAME=VALUE, such as ditto.lam=0.5, or a .toml file with one table per method."""
    training: Annotated[TrainingOption, tyro.conf.arg(help=TRAINING_HELP)] = "auto"
    metric: Literal["auto", "accuracy", "balanced_accuracy", "auc", "rmse"] = "auto"
    """Metric to compare by. auto is accuracy for classes and rmse for numbers."""
    out: str = ""
    """Folder of the runs and the page. Default: runs/DATA-decision. Finished runs in it are not run again."""


def decide_command(arguments: Sequence[str]) -> int:
    """Compare training alone with federated training for each agent: waffle decide DATA."""
    settings = settings_class(exclude=("data", "seed", "leave_out", "newcomers", "newcomer_rounds"), alice="all")
    kind = dataclasses.make_dataclass(
        "Decide",
        [
            ("data", Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="Name of a data set, or a folder.")]),
            ("comparison", DecisionFlags, field(default_factory=DecisionFlags)),
            ("settings", settings, field(default_factory=settings)),
            ("runtime", Runtime, field(default_factory=Runtime)),
            ("output", ProgressFlags, field(default_factory=ProgressFlags)),
        ],
    )
    kind.__doc__ = (
        "Train every method, compare them on each agent's held-out data, and write a page that shows which agents gain."
    )
    args: Any = parse(kind, without_old_flags(arguments), "decide")
    flags, given = args.comparison, {"data": args.data, **dataclasses.asdict(args.settings)}
    _check_flags(flags)
    first = check_run(ALONE, given, {}).settings
    reduced = Reduced(args.output)
    shared = joint_method(all_alices_of(first, args.runtime))
    methods = flags.methods or _default_methods(first, shared, args, arguments)
    methods = tuple(dict.fromkeys((*methods, *((shared,) if flags.partners != "none" else ()))))
    if not flags.methods and LEFT_OUT not in methods:
        reduced.add(WITHOUT)
    rounds = MOST_ROUNDS if chooses_rounds(flags.training, first, arguments) else first.rounds
    options = joint_options(shared, rounds, read_options(flags.options, (ALONE, *methods)))
    seeds = flags.seeds or SEEDS
    configs = [check_run(m, {**given, "seed": seed}, options.get(m, {})) for m in methods for seed in seeds]
    options = {config.method: dict(config.options) for config in configs if config.options}
    s = configs[0].settings
    out = Path(flags.out or Path("runs") / f"{s.data_name}-decision")
    check_name(out.name)
    metric: Metric | None = None if flags.metric == "auto" else flags.metric
    runs = runs_for(s, methods, seeds, out, args.runtime, options, metric)
    training = chosen_training(
        flags.training, s, (shared, *methods), options, arguments, out, args.runtime, args.output, flags.budget
    )
    if training:
        runs = [(training.applied(config), folder) for config, folder in runs]
        s = training.applied(RunConfig(method=shared, settings=s)).settings
        options |= {name: {**options.get(name, {}), **changed} for name, changed in training.options.items()}
        reduced.add(*training.reduced)
    federation = all_alices_of(s, args.runtime)
    budget = budget_for(s, federation, args.runtime, flags.budget)
    if not flags.seeds:
        trained = tuple(dict.fromkeys((ALONE, *methods)))
        seeds = seeds_within(budget, SEEDS, trained, federation, s.rounds, alices_of(runs, federation.names))
        runs = [(config, folder) for config, folder in runs if config.settings.seed in seeds]
        reduced.add(*([ONE_SEED.format(len(SEEDS))] if len(seeds) < len(SEEDS) else []))
    if not flags.out:
        default, out = out, default_folder(out, runs, args.runtime, args.output)
        runs = moved_to(runs, default, out)
    with live(args.output) as listener:
        execute(runs, args.runtime, listener)
    groups = measure_partners(
        flags.partners, s, runs, seeds, options, metric, args.runtime, out, args.output, budget, reduced.add
    )
    groups = [(training.applied(config) if training else config, folder) for config, folder in groups]
    groups = [run for run in groups if run not in runs]
    if groups:
        with live(args.output) as listener:
            execute(groups, args.runtime, listener)
    reduced.write(out)
    write_distances(s, args.runtime, out)
    write_references(s, runs, args.runtime, out)
    finished = read_finished([folder for _, folder in (*runs, *groups)], args.runtime)
    decision = write_decision(finished, out, out, metric, args.runtime.force, no_warning)
    _print_decision(decision, out / PAGE, args.output)
    return 0


def _check_flags(flags: DecisionFlags) -> None:
    """Raise unless methods and seeds have no duplicates and the budget is a factor."""
    for name, chosen in (("methods", flags.methods), ("seeds", flags.seeds)):
        if len(set(chosen)) < len(chosen):
            raise WaffleError(f"{name}: expected no duplicates, got {chosen!r}")
    if not 0 <= flags.budget < inf:
        raise WaffleError(f"budget: expected a factor of at least 0, 0 for no limit, got {flags.budget}")


def _default_methods(s: Settings, shared: str, args: Any, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the methods to compare if none are given: without LEFT_OUT if training takes long."""
    default = tuple(shared if method == SHARED else method for method in DEFAULT)
    if any(option.startswith(f"{LEFT_OUT}.") for option in args.comparison.options):
        return default
    federation = all_alices_of(s, args.runtime)
    rounds = rounds_for(s, federation) if chooses_rounds(args.comparison.training, s, arguments) else s.rounds
    budget = budget_for(s, federation, args.runtime, args.comparison.budget)
    expensive = is_expensive(budget, federation, rounds, len(alices(s, args.runtime)))
    return tuple(method for method in default if method != LEFT_OUT or not expensive)


class Reduced:
    """What was reduced to keep within the budget, in sentences that are printed as they come."""

    def __init__(self, output: Output) -> None:
        self._output, self._sentences = output, list[str]()

    def add(self, *sentences: str) -> None:
        for sentence in () if self._output.quiet else sentences:
            print(f"note: {sentence}", file=sys.stderr)
        self._sentences += sentences

    def write(self, out: Path) -> None:
        """Write the sentences to reduced.json, for the page."""
        with writable(out):
            write_json(out / REDUCED, {"reduced": self._sentences})


def write_references(s: Settings, runs: Sequence[tuple[RunConfig, Path]], runtime: Runtime, out: Path) -> None:
    """Fit scikit-learn on each agent's own data and write its predictions to references.json; not for named data."""
    if not s.is_own:
        return
    federation = all_alices_of(dataclasses.replace(s, validation=s.validation or REFERENCE_VALIDATION), runtime)
    found = fit_references(federation, alices_of(runs, federation.names))
    with writable(out):
        write_json(out / REFERENCES, {name: reference.to_json() for name, reference in found.items()})


def read_references(folder: Path) -> dict[str, Reference]:
    """Return the references in this folder by agent, if there are any."""
    return {name: Reference.from_json(content) for name, content in (read_json(folder / REFERENCES) or {}).items()}


def read_finished(folders: Sequence[Path], runtime: Runtime) -> list[FinishedRun]:
    """Read runs that this command has just finished. They are trusted, and `execute` has already printed warnings."""
    return read_runs(folders, trust=True, force=runtime.force, warn=no_warning)


def write_decision(
    runs: Sequence[FinishedRun],
    source: Path,
    out: Path,
    metric: Metric | None = None,
    force: bool = False,
    warn: Warn | None = None,
) -> Decision:
    """Write the decision page of these runs, with the distances stored in `source`, and return the decision."""
    from waffle_fl.decision.page import write_page  # imports Altair, which takes seconds

    found = read_json(source / DISTANCES)
    known = Distances.from_json(found) if found else None
    study, references = read_study(source), read_references(source)
    reduced = (read_json(source / REDUCED) or {}).get("reduced", ())
    decision = decide(runs, known, metric, force, warn, study, references, tuple(reduced))
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
    write_page(decision, out / PAGE)
    return decision


def write_distances(settings: Settings, runtime: Runtime, out: Path) -> None:
    """Compute the distances between the agents' data and write them to distances.json."""
    federation = all_alices_of(settings, runtime)
    found = distances(federation, model_of(settings, federation, runtime, device_of(runtime.device)))
    with writable(out):
        write_json(out / DISTANCES, found.to_json())


def with_baselines(config: RunConfig, folder: Path) -> list[tuple[RunConfig, Path]]:
    """Return a run followed by its baselines: Local and FedAvg."""
    others = [method for method in (ALONE, SHARED) if method != config.method]
    runs = [(RunConfig(method=method, settings=config.settings), folder / method) for method in others]
    return [(config, folder), *runs]


def sentences(decision: Decision) -> list[str]:
    """Return the lines to print: the verdict of a single agent or which agents gain, then the recommendations."""
    if len(decision.views) > 1:
        lines = [*verdict_text.federation_summary(decision, decision.method), share_text(decision, decision.method)]
    else:
        (view,) = decision.views
        lines = [verdict_text.verdict(view, decision.method, decision.metric), *verdict_text.caution(view, decision)]
        lines += verdict_text.reference(view, decision.metric)
    return [*filter(None, lines), *decision.not_assessed, *recommendations(decision)]


def _print_decision(decision: Decision, page: Path, output: Output) -> None:
    if output.json:
        gains = {
            view.name: {m: {k: tuple(v) for k, v in s.gains.items()} for m, s in view.standings.items() if s.gains}
            for view in decision.views
        }
        advised = {view.name: found._asdict() for view in decision.views if (found := recommend(view, decision))}
        content = {"page": str(page), "says": sentences(decision), "gains": gains, "recommendations": advised}
        print(json.dumps(content))
        return
    console = console_for()
    for sentence in sentences(decision):
        console.print(sentence, highlight=False, markup=False)
    console.print(f"page: {page.resolve()}", highlight=False, markup=False, soft_wrap=True)
