"""The commands run, resume, bench, demo and report. `menu.py` lists all commands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import tyro

from waffle_fl.algorithms import ALGORITHMS, algorithm_of
from waffle_fl.algorithms.registry import summary_of
from waffle_fl.algorithms.waffle_paper import AS_PRINTED
from waffle_fl.claims.file_claims import check_claims, read_claims
from waffle_fl.claims.record_files import problems, read_part
from waffle_fl.cli.console import console_for
from waffle_fl.cli.decide import (
    PAGE,
    read_finished,
    sentences,
    with_baselines,
    write_decision,
    write_distances,
    write_references,
)
from waffle_fl.cli.display import show_all_agents, show_result, show_tables, show_verdicts
from waffle_fl.cli.flags import options_class, parse, settings_class
from waffle_fl.cli.progress import Folder, Notes, Output, ProgressFlags, default_folder, live
from waffle_fl.cli.tournament import check_tournament, run_tournament
from waffle_fl.cli.training import TRAINING_HELP, TrainingOption, chosen_training
from waffle_fl.config import (
    Experiment,
    RunConfig,
    check_name,
    check_run,
    load_experiment,
    load_experiments,
    option_types,
)
from waffle_fl.decision.measurement import SHARED
from waffle_fl.decision.study import ALONE, decidable
from waffle_fl.errors import WaffleError, writable
from waffle_fl.experiment import ALL_ALICES, Runtime, execute, plan
from waffle_fl.experiment.planning import moved_to
from waffle_fl.manifest import no_warning
from waffle_fl.records import read_json
from waffle_fl.report import write_report
from waffle_fl.results import Details, condense, config_of, mean_weights, read_runs
from waffle_fl.tournament.plan import is_tournament

BASELINES_HELP = (
    "Train the Local and FedAvg baselines as well, so that the run can say whether Alice gains by joining. "
    "Applies only to your own data."
)
OUT_HELP = (
    "Run folder. Default: runs/DATA-SPLIT-METHOD-SEED, with a number appended if that folder holds other settings. "
    "If the folder already holds this run, the run is resumed."
)
PRINTED_HELP = "Train the algorithm exactly as the paper prints it: {}. It takes the flags of waffle-paper."


def run(arguments: Sequence[str]) -> int:
    """Train one method: waffle run METHOD [flags]."""
    method = arguments[0] if arguments else ""
    if method in ("", "-h", "--help"):
        methods = "\n".join(f"  {name:<15}{summary_of(kind)}" for name, kind in ALGORITHMS.items())
        console_for().print(
            f"usage: waffle run METHOD [flags]; waffle run METHOD --help lists its flags\n\n{methods}\n"
            "  module:Class   Your own method.",
            highlight=False,
        )
        return 0 if method else 2
    if method == "waffle" and "--as-printed" in arguments:
        return run(["waffle-paper", *_printed_flags(arguments), *(a for a in arguments[1:] if a != "--as-printed")])
    if method == "waffle":
        _check_names_of_the_paper(arguments)
    algorithm, settings = algorithm_of(method), settings_class(method=method)
    printed = Annotated[bool, tyro.conf.arg(help=PRINTED_HELP.format(f"waffle-paper {' '.join(_printed_flags())}"))]
    kind = dataclasses.make_dataclass(
        "Run",
        [
            ("settings", settings, field(default_factory=settings)),
            ("options", options_class(method), field(default_factory=options_class(method))),
            *([("as_printed", printed, field(default=False))] if method == "waffle" else []),
            ("out", Annotated[str, tyro.conf.arg(help=OUT_HELP)], field(default="")),
            ("baselines", Annotated[bool, tyro.conf.arg(help=BASELINES_HELP)], field(default=True)),
            ("training", Annotated[TrainingOption, tyro.conf.arg(help=TRAINING_HELP)], field(default="auto")),
            ("runtime", Runtime, field(default_factory=Runtime)),
            ("output", ProgressFlags, field(default_factory=ProgressFlags)),
        ],
    )
    kind.__doc__ = algorithm.__doc__
    args: Any = parse(kind, arguments[1:], f"run {method}")
    config = check_run(method, dataclasses.asdict(args.settings), dataclasses.asdict(args.options))
    folder = Path(args.out or Path("runs") / config.label)
    check_name(folder.name)
    s, options = config.settings, {method: dict(config.options)} if config.options else {}
    all_agents = s.alice == ALL_ALICES
    baselines = not all_agents and s.is_own and config.method != "local" and args.baselines
    runs = _run_per_agent(config, folder, args.runtime) if all_agents else _runs(config, folder, baselines)
    trained = [SHARED, *(one.method for one, _ in runs)]
    training = chosen_training(args.training, s, trained, options, arguments, folder, args.runtime, args.output)
    if training:
        runs = [(training.applied(one), out) for one, out in runs]
    if not args.out:
        default, folder = folder, default_folder(folder, runs, args.runtime, args.output)
        runs = moved_to(runs, default, folder)
    if all_agents:
        return _finish_all_agents(runs, folder, args.runtime, args.output)
    return _finish(runs, args.runtime, args.output)


def _check_names_of_the_paper(arguments: Sequence[str]) -> None:
    """Raise if a flag of the paper's algorithm is given to WAFFLE, which has other options."""
    own, other = ({name.replace("_", "-") for name in option_types(m)} for m in ("waffle", "waffle-paper"))
    odd = next((a for a in arguments if a.startswith("--") and a[2:].split("=")[0] in other - own), None)
    if odd:
        raise WaffleError(f"{odd.split('=')[0]} belongs to the paper's algorithm: waffle run waffle-paper")


def _printed_flags(given: Sequence[str] = ()) -> list[str]:
    """Return the flags that make `waffle-paper` the algorithm as printed, except those that are given."""
    return [
        f"--{name}={value}"
        for name, value in AS_PRINTED.items()
        if not any(flag.split("=")[0] == f"--{name}" for flag in given)
    ]


def resume(arguments: Sequence[str]) -> int:
    """Resume an interrupted run: waffle resume RUN."""

    @dataclass(frozen=True)
    class Resume:
        """Resume an interrupted run. A finished run is left unchanged."""

        run: tyro.conf.Positional[Path]
        """Run folder."""
        trust: bool = False
        """Allow importing the code (module:name) that the run folder refers to."""
        runtime: Runtime = field(default_factory=Runtime)
        output: ProgressFlags = field(default_factory=ProgressFlags)

    args = parse(Resume, arguments, "resume")
    if read_json(args.run / "config.json") is None:
        raise WaffleError(f"{args.run} is not a run folder: it has no config.json")
    config = config_of(args.run, args.trust, args.runtime.force)
    others = [args.run / method for method in (ALONE, SHARED) if (args.run / method / "config.json").exists()]
    runs = [(config, args.run), *((config_of(other, args.trust, args.runtime.force), other) for other in others)]
    return _finish(runs, args.runtime, args.output)


def _runs(config: RunConfig, folder: Path, baselines: bool) -> list[tuple[RunConfig, Path]]:
    """Return the run, followed by its baselines if requested."""
    return with_baselines(config, folder) if baselines else [(config, folder)]


def _run_per_agent(config: RunConfig, folder: Path, runtime: Runtime) -> list[tuple[RunConfig, Path]]:
    """Return one run per agent, in which that agent is Alice."""
    s = config.settings
    grid = Experiment(
        methods=(config.method,),
        splits=(s.split,),
        seeds=(s.seed,),
        settings=s,
        options={config.method: config.options},
    )
    return plan(grid, folder, runtime)


def _finish(runs: Sequence[tuple[RunConfig, Path]], runtime: Runtime, output: ProgressFlags) -> int:
    """Train a run to its end and print its result. With baselines, also write the decision page."""
    (config, folder), *baseline_runs = runs
    with live(output) as listener:
        result, *others = execute(runs, runtime, listener)
    if result["status"] == "diverged":
        if output.json:
            print(json.dumps({"run": str(folder), "config": config.to_json(), **result}))
        raise WaffleError(result["message"])
    verdict, baselines = [], bool(baseline_runs) and all(other["status"] == "finished" for other in others)
    if baselines:
        write_distances(config.settings, runtime, folder)
        write_references(config.settings, runs, runtime, folder)
        finished = read_finished([run for _, run in runs], runtime)
        verdict = sentences(write_decision(finished, folder, folder, force=runtime.force, warn=no_warning))
    if output.json:
        more = {"page": str(folder / PAGE), "says": verdict} if baselines else {}
        print(json.dumps({"run": str(folder), "config": config.to_json(), **result, **more}))
        return 0
    console = console_for()
    show_result(config, result, mean_weights(folder), console)
    for line in [*verdict, *([f"page: {(folder / PAGE).resolve()}"] if baselines else []), f"run folder: {folder}"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _finish_all_agents(
    runs: Sequence[tuple[RunConfig, Path]], folder: Path, runtime: Runtime, output: ProgressFlags
) -> int:
    """Train one run per agent to its end, in one stack, and print the results."""
    s = runs[0][0].settings
    with live(output) as listener:
        results = execute(runs, runtime, listener)
    if output.json:
        print(json.dumps([{"run": str(run), **r} for (_, run), r in zip(runs, results, strict=True)]))
    else:
        console = console_for()
        show_all_agents([(c.settings.alice, r) for (c, _), r in zip(runs, results, strict=True)], console)
        console.print(f"run folders: {folder}", highlight=False, markup=False, soft_wrap=True)
        if s.is_own:
            console.print(f"to see which agents gain by joining: waffle decide {s.data}", highlight=False, markup=False)
    diverged = {
        c.settings.alice: r["message"] for (c, _), r in zip(runs, results, strict=True) if r["status"] == "diverged"
    }
    if diverged:
        first, message = next(iter(diverged.items()))
        names = ", ".join(diverged)
        raise WaffleError(f"{len(diverged)} of {len(runs)} runs diverged, those for {names}; {first}: {message}")
    return 0


def bench(arguments: Sequence[str]) -> int:
    """Run all experiments of a file: waffle bench FILE.toml."""

    @dataclass(frozen=True)
    class Bench:
        """Run every method x split x seed of an experiment file. Skip finished runs and resume interrupted ones.

        Each variant in the file is an experiment with its own folder."""

        file: tyro.conf.Positional[Path]
        """Experiment file (.toml)."""
        out: str = ""
        """Folder of the runs. Default: runs/NAME."""
        dry_run: bool = False
        """Print the folders of all runs and exit."""
        check: bool = False
        """Train nothing. Check the committed record against the file and its claims; exit with 1 unless it is whole."""
        strict: bool = False
        """With --check: also exit with 1 unless all claims of the file hold."""
        runtime: Runtime = field(default_factory=Runtime)
        output: ProgressFlags = field(default_factory=ProgressFlags)

    args = parse(Bench, arguments, "bench")
    if args.strict and not args.check:
        raise WaffleError("strict: expected --strict only with --check, which reads the committed record")
    if is_tournament(args.file):
        if args.check:
            return check_tournament(args.file.resolve(), args.output.json, args.strict)
        folder = Path(args.out or Path("runs") / args.file.stem)
        return run_tournament(args.file, folder, args.runtime, args.output.json)
    experiments = load_experiments(args.file)
    if args.check:
        return _check(args.file.resolve(), args.output, args.strict)
    out = Path(args.out or Path("runs") / args.file.stem)
    check_name(out.name)
    folders = [Path(*experiment.name.split("/")[1:]) for experiment in experiments]
    if not args.out:
        grids = zip(experiments, folders, strict=True)
        runs = [run for experiment, folder in grids for run in plan(experiment, out / folder, args.runtime)]
        out = default_folder(out, runs, args.runtime, args.output)
    for experiment, folder in zip(experiments, folders, strict=True):
        if args.dry_run:
            print("\n".join(str(run) for _, run in plan(experiment, out / folder, args.runtime)))
        else:
            _grid(experiment, out / folder, args.runtime, args.output, f"{experiment.name}: {experiment.settings.data}")
    return 0


def _check(file: Path, output: ProgressFlags, strict: bool) -> int:
    """Check that the committed record matches its experiment file and, if `strict`, that the file's claims hold."""
    part = read_part(file.parent.parent, file.stem)
    wrong, verdicts = problems({part.name: part}), check_claims(read_claims(file), part)
    if output.json:
        print(json.dumps({"problems": wrong, "claims": [dataclasses.asdict(verdict) for verdict in verdicts]}))
    else:
        show_verdicts(wrong, verdicts, console_for())
    return 1 if wrong or (strict and not all(verdict.holds for verdict in verdicts)) else 0


def _grid(experiment: Experiment, out: Path, runtime: Runtime, output: ProgressFlags, title: str) -> int:
    runs = plan(experiment, out, runtime)
    with live(output) as listener:
        results = execute(runs, runtime, listener)
    finished = read_finished([folder for _, folder in runs], runtime)
    page = write_report(finished, out / "report", title)
    if output.json:
        entries = [{"run": str(f), "config": c.to_json(), **r} for (c, f), r in zip(runs, results, strict=True)]
        print(json.dumps({"report": str(page), "runs": entries}))
    else:
        console = console_for()
        show_tables(finished, console)
        console.print(f"page: {page.resolve()}", highlight=False, markup=False, soft_wrap=True)
    return 0


def demo(arguments: Sequence[str]) -> int:
    """Train eight methods on five splits of the included digits: waffle demo."""

    @dataclass(frozen=True)
    class Demo:
        """Train eight methods on five splits of the included digits. Takes one to two minutes."""

        out: Path = Path("demo")
        """Folder of the runs and the report."""
        runtime: Runtime = field(default_factory=Runtime)
        output: ProgressFlags = field(default_factory=ProgressFlags)

    args = parse(Demo, arguments, "demo")
    with resources.as_file(resources.files("waffle_fl.cli").joinpath("demo.toml")) as file:
        experiment = load_experiment(file)
    return _grid(experiment, args.out, args.runtime, args.output, "WAFFLE and seven other methods on digits")


def report(arguments: Sequence[str]) -> int:
    """Write tables and charts of finished runs: waffle report RUNS."""

    @dataclass(frozen=True)
    class Report:
        """Write tables, charts and one self-contained HTML page of finished runs or committed records."""

        runs: tyro.conf.Positional[tuple[Path, ...]]
        """Run folders, folders that contain run folders, or .jsonl records."""
        out: str = ""
        """Folder of the report. Default: `report` in the first folder given, or next to the first record."""
        record: str = ""
        """Also write the runs to this .jsonl file, condensed so that it is small enough to commit."""
        details: Details = "all"
        """Values per round in the record: all (needed for charts), accuracy, late (accuracy near the end), or none."""
        title: str = "Personalised federated learning"
        """Title of the page."""
        folder: Folder = field(default_factory=Folder)
        output: Output = field(default_factory=Output)

    args = parse(Report, arguments, "report")
    if not args.runs:
        raise WaffleError("missing RUNS: give run folders or folders of runs")
    notes, force = Notes(), args.folder.force
    finished = read_runs(args.runs, trust=args.folder.trust, force=force, warn=notes.add)
    first = args.runs[0]
    out = Path(args.out) if args.out else (first if first.is_dir() else first.parent) / "report"
    alices = {(run.config.settings.alice, run.config.settings.leave_out) for run in finished}
    decides = decidable(finished)
    one_alice = len(alices) == 1 or not decides
    pages = [write_report(finished, out, args.title)] if one_alice else []
    verdict = sentences(write_decision(finished, first, out, force=force, warn=notes.add)) if decides else []
    pages += [out / PAGE] if decides else []
    if args.record:
        with writable(Path(args.record)):
            Path(args.record).write_text("\n".join(condense(finished, args.details)) + "\n", encoding="utf-8")
    notes.show()
    if args.output.json:
        print(json.dumps({"report": str(pages[0]), "runs": [{"run": str(r.folder), **r.result} for r in finished]}))
        return 0
    console = console_for()
    if one_alice:
        show_tables(finished, console)
    for line in [*verdict, *(f"page: {page.resolve()}" for page in pages)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0
