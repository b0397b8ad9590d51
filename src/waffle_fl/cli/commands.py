"""The commands that train and report: parse, do, show. `menu.py` lists all commands."""

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
from waffle_fl.claims.file_claims import judge, stated
from waffle_fl.claims.record_files import problems, read_part
from waffle_fl.cli.console import console_for
from waffle_fl.cli.decide import PAGE, companions, note_distances, page_of, read_back, sentences
from waffle_fl.cli.display import show_everyone, show_result, show_tables, show_verdicts
from waffle_fl.cli.flags import options_class, parse, settings_class
from waffle_fl.cli.progress import Folder, Notes, Output, ProgressFlags, default_folder, live
from waffle_fl.config import Experiment, RunConfig, check_name, check_run, load_experiment, load_experiments
from waffle_fl.decision.study import decidable
from waffle_fl.errors import WaffleError, writable
from waffle_fl.experiment import ALL_ALICES, Runtime, execute, plan
from waffle_fl.manifest import no_warning
from waffle_fl.records import read_json, read_rounds
from waffle_fl.report import write_report
from waffle_fl.results import Details, condense, config_of, read_runs

ALONE_HELP = (
    "On data of your own: train this method only, and not, beside it, what tells whether Alice gains by joining."
)
OUT_HELP = (
    "The run's folder; by default runs/DATA-SPLIT-METHOD-SEED, numbered where that holds other settings. "
    "A folder that holds this run resumes it."
)


def run(arguments: Sequence[str]) -> int:
    """Train one method: waffle run METHOD [flags]."""
    method = arguments[0] if arguments else ""
    if method in ("", "-h", "--help"):
        methods = "\n".join(f"  {name:<15}{summary_of(kind)}" for name, kind in ALGORITHMS.items())
        console_for().print(
            f"usage: waffle run METHOD [flags]; waffle run METHOD --help lists its flags\n\n{methods}\n"
            "  module:Class   A method of your own.",
            highlight=False,
        )
        return 0 if method else 2
    algorithm = algorithm_of(method)
    kind = dataclasses.make_dataclass(
        "Run",
        [
            ("settings", settings_class(), field(default_factory=settings_class())),
            ("options", options_class(method), field(default_factory=options_class(method))),
            ("out", Annotated[str, tyro.conf.arg(help=OUT_HELP)], field(default="")),
            ("alone", Annotated[bool, tyro.conf.arg(help=ALONE_HELP)], field(default=False)),
            ("runtime", Runtime, field(default_factory=Runtime)),
            ("output", ProgressFlags, field(default_factory=ProgressFlags)),
        ],
    )
    kind.__doc__ = algorithm.__doc__
    args: Any = parse(kind, arguments[1:], f"run {method}")
    config = check_run(method, dataclasses.asdict(args.settings), dataclasses.asdict(args.options))
    folder = Path(args.out or Path("runs") / config.label)
    check_name(folder.name)
    everyone = config.settings.alice == ALL_ALICES
    compared = not everyone and config.settings.is_own and config.method != "local" and not args.alone
    if not args.out:
        runs = _for_everyone(config, folder, args.runtime) if everyone else _compared(config, folder, compared)
        folder = default_folder(folder, runs, args.runtime, args.output)
    if everyone:
        return _finish_everyone(config, folder, args.runtime, args.output)
    return _finish(config, folder, args.runtime, args.output, compared)


def resume(arguments: Sequence[str]) -> int:
    """Go on with an interrupted run: waffle resume RUN."""

    @dataclass(frozen=True)
    class Resume:
        """Go on with an interrupted run; a finished one is left as it is."""

        run: tyro.conf.Positional[Path]
        """The run's folder."""
        trust: bool = False
        """Import the code (module:name) that the run folder names."""
        runtime: Runtime = field(default_factory=Runtime)
        output: ProgressFlags = field(default_factory=ProgressFlags)

    args = parse(Resume, arguments, "resume")
    if read_json(args.run / "config.json") is None:
        raise WaffleError(f"{args.run} is no run folder: it has no config.json")
    config = config_of(args.run, args.trust, args.runtime.force)
    compared = (args.run / "local" / "config.json").exists()
    return _finish(config, args.run, args.runtime, args.output, compared)


def _compared(config: RunConfig, folder: Path, compared: bool) -> list[tuple[RunConfig, Path]]:
    """The run, and those that it is compared with."""
    return companions(config, folder) if compared else [(config, folder)]


def _for_everyone(config: RunConfig, folder: Path, runtime: Runtime) -> list[tuple[RunConfig, Path]]:
    """One run per agent, each agent the Alice of its own."""
    s = config.settings
    grid = Experiment(
        methods=(config.method,),
        splits=(s.split,),
        seeds=(s.seed,),
        settings=s,
        options={config.method: config.options},
    )
    return plan(grid, folder, runtime)


def _finish(config: RunConfig, folder: Path, runtime: Runtime, output: ProgressFlags, compared: bool = False) -> int:
    """Bring a run to its end and show it; a compared one also gets a page that says what joining brings."""
    runs = _compared(config, folder, compared)
    with live(output) as listener:
        result, *others = execute(runs, runtime, listener)
    if result["status"] == "diverged":
        if output.json:
            print(json.dumps({"run": str(folder), "config": config.to_json(), **result}))
        raise WaffleError(result["message"])
    says, compared = [], compared and all(other["status"] == "finished" for other in others)
    if compared:
        note_distances(config.settings, runtime, folder)
        finished = read_back([run for _, run in runs], runtime)
        says = sentences(page_of(finished, folder, folder, force=runtime.force, warn=no_warning))
    if output.json:
        more = {"page": str(folder / PAGE), "says": says} if compared else {}
        print(json.dumps({"run": str(folder), "config": config.to_json(), **result, **more}))
        return 0
    console, rounds = console_for(), read_rounds(folder / "rounds.jsonl")
    show_result(config, result, rounds[-1] if rounds else {}, console)
    for line in [*says, *([f"page: {(folder / PAGE).resolve()}"] if compared else []), f"run folder: {folder}"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _finish_everyone(config: RunConfig, folder: Path, runtime: Runtime, output: ProgressFlags) -> int:
    """Bring the runs of all agents to their end, trained together, and show them."""
    s, runs = config.settings, _for_everyone(config, folder, runtime)
    with live(output) as listener:
        results = execute(runs, runtime, listener)
    if output.json:
        print(json.dumps([{"run": str(run), **r} for (_, run), r in zip(runs, results, strict=True)]))
    else:
        console = console_for()
        show_everyone([(c.settings.alice, r) for (c, _), r in zip(runs, results, strict=True)], console)
        console.print(f"run folders: {folder}", highlight=False, markup=False, soft_wrap=True)
        if s.is_own:
            console.print(f"waffle decide {s.data} tells who of them gains by joining", highlight=False, markup=False)
    lost = {
        c.settings.alice: r["message"] for (c, _), r in zip(runs, results, strict=True) if r["status"] == "diverged"
    }
    if lost:
        first, message = next(iter(lost.items()))
        raise WaffleError(f"{len(lost)} of {len(runs)} runs diverged, those for {', '.join(lost)}; {first}: {message}")
    return 0


def bench(arguments: Sequence[str]) -> int:
    """Run a grid: waffle bench FILE.toml."""

    @dataclass(frozen=True)
    class Bench:
        """Run every method x split x seed of an experiment file; finished runs are skipped, broken ones resume.

        A file with variants is several experiments, each in a folder of its own."""

        file: tyro.conf.Positional[Path]
        """The experiment file."""
        out: str = ""
        """Folder of the runs; by default runs/NAME."""
        plan: bool = False
        """Print the plan and stop."""
        check: bool = False
        """Run nothing; exit with 1 unless the committed record is the file's and every claim it states holds."""
        runtime: Runtime = field(default_factory=Runtime)
        output: ProgressFlags = field(default_factory=ProgressFlags)

    args = parse(Bench, arguments, "bench")
    experiments = load_experiments(args.file)
    if args.check:
        return _check(args.file.resolve(), args.output)
    out = Path(args.out or Path("runs") / args.file.stem)
    check_name(out.name)
    folders = [Path(*experiment.name.split("/")[1:]) for experiment in experiments]
    if not args.out:
        grids = zip(experiments, folders, strict=True)
        runs = [run for experiment, folder in grids for run in plan(experiment, out / folder, args.runtime)]
        out = default_folder(out, runs, args.runtime, args.output)
    for experiment, folder in zip(experiments, folders, strict=True):
        if args.plan:
            print("\n".join(str(run) for _, run in plan(experiment, out / folder, args.runtime)))
        else:
            _grid(experiment, out / folder, args.runtime, args.output, f"{experiment.name}: {experiment.settings.data}")
    return 0


def _check(file: Path, output: ProgressFlags) -> int:
    """Hold the record beside an experiment file to the file, and to the claims in it."""
    part = read_part(file.parent.parent, file.stem)
    wrong, judged = problems({part.name: part}), judge(stated(file), part)
    if output.json:
        print(json.dumps({"problems": wrong, "claims": [dataclasses.asdict(verdict) for verdict in judged]}))
    else:
        show_verdicts(wrong, judged, console_for())
    return 1 if wrong or not all(verdict.holds for verdict in judged) else 0


def _grid(experiment: Experiment, out: Path, runtime: Runtime, output: ProgressFlags, title: str) -> int:
    runs = plan(experiment, out, runtime)
    with live(output) as listener:
        results = execute(runs, runtime, listener)
    finished = read_back([folder for _, folder in runs], runtime)
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
    """Seven methods on five splits of the embedded digits: waffle demo."""

    @dataclass(frozen=True)
    class Demo:
        """Seven methods on five splits of the embedded digits, in a minute or two."""

        out: Path = Path("demo")
        """Folder of the runs and of the report."""
        runtime: Runtime = field(default_factory=Runtime)
        output: ProgressFlags = field(default_factory=ProgressFlags)

    args = parse(Demo, arguments, "demo")
    with resources.as_file(resources.files("waffle_fl.cli").joinpath("demo.toml")) as file:
        experiment = load_experiment(file)
    return _grid(experiment, args.out, args.runtime, args.output, "WAFFLE and its companions on digits")


def report(arguments: Sequence[str]) -> int:
    """Tables and page from finished runs or committed records: waffle report RUNS."""

    @dataclass(frozen=True)
    class Report:
        """Tables, charts and one self-contained page from finished runs."""

        runs: tyro.conf.Positional[tuple[Path, ...]]
        """Run folders, folders of runs, or .jsonl records."""
        out: str = ""
        """Folder of the report; by default `report` beside the first of the runs."""
        record: str = ""
        """Also write the runs as one condensed .jsonl record, small enough to commit."""
        details: Details = "all"
        """What the record keeps of the rounds: all that charts need, the accuracy, that late in the run, or nothing."""
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
    alike = len(alices) == 1 or not decides
    pages = [write_report(finished, out, args.title)] if alike else []
    says = sentences(page_of(finished, first, out, force=force, warn=notes.add)) if decides else []
    pages += [out / PAGE] if decides else []
    if args.record:
        with writable(Path(args.record)):
            Path(args.record).write_text("\n".join(condense(finished, args.details)) + "\n", encoding="utf-8")
    notes.show()
    if args.output.json:
        print(json.dumps({"report": str(pages[0]), "runs": [{"run": str(r.folder), **r.result} for r in finished]}))
        return 0
    console = console_for()
    if alike:
        show_tables(finished, console)
    for line in [*says, *(f"page: {page.resolve()}" for page in pages)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0
