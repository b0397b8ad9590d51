"""waffle decide: should an agent join? And the small page that a run on data of one's own gets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from waffle_fl.cli.console import console_for
from waffle_fl.cli.flags import parse, settings_class
from waffle_fl.cli.progress import Output, ProgressFlags, default_folder, live
from waffle_fl.config import RunConfig, Settings, check_name, check_run
from waffle_fl.decision import verdict_text
from waffle_fl.decision.bootstrap import Metric
from waffle_fl.decision.distances import Distances, distances
from waffle_fl.decision.page import write_page
from waffle_fl.decision.study import ALONE, DEFAULT, SHARED, Decision, decide, runs_for
from waffle_fl.errors import WaffleError, writable
from waffle_fl.experiment import Runtime, all_alices_of, device_of, execute, model_of
from waffle_fl.experiment.planning import moved
from waffle_fl.manifest import Warn, no_warning
from waffle_fl.records import read_json, write_json
from waffle_fl.results import FinishedRun, read_runs

PAGE, UNLIKE = "decision.html", "distances.json"


@dataclass(frozen=True)
class DecisionFlags:
    """what to compare"""

    methods: tuple[str, ...] = DEFAULT
    """Ways to train; local is always among them, since every gain is one over training alone."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Each method is trained once with each."""
    without: tuple[str, ...] = ()
    """Agents (or `all`) for whom WAFFLE is also trained with each partner left out in turn: who helps them?"""
    metric: Literal["auto", "accuracy", "balanced_accuracy", "auc", "rmse"] = "auto"
    """What decides; auto takes accuracy, or the root mean squared error of numbers."""
    out: str = ""
    """Folder of the runs and of the page; by default runs/DATA-decision. Finished runs in it are not run again."""


def decide_command(arguments: Sequence[str]) -> int:
    """Should an agent join? Train alone and together, compare, write the page: waffle decide DATA."""
    settings = settings_class(besides=("data", "seed", "leave_out"), alice="all")
    kind = dataclasses.make_dataclass(
        "Decide",
        [
            ("data", Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="A data set by name, or a folder.")]),
            ("comparison", DecisionFlags, field(default_factory=DecisionFlags)),
            ("settings", settings, field(default_factory=settings)),
            ("runtime", Runtime, field(default_factory=Runtime)),
            ("output", ProgressFlags, field(default_factory=ProgressFlags)),
        ],
    )
    kind.__doc__ = (
        "Train alone and together, compare on each agent's own held-out data, and write one page that says who gains."
    )
    args: Any = parse(kind, arguments, "decide")
    asked, given = args.comparison, {"data": args.data, **dataclasses.asdict(args.settings)}
    for name, chosen in (("methods", asked.methods), ("seeds", asked.seeds)):
        if not chosen or len(set(chosen)) < len(chosen):
            raise WaffleError(f"{name}: expected at least one, none of them twice, got {chosen!r}")
    configs = [check_run(method, {**given, "seed": seed}, {}) for method in asked.methods for seed in asked.seeds]
    s = configs[0].settings
    out = Path(asked.out or Path("runs") / f"{s.data_name}-decision")
    check_name(out.name)
    metric: Metric | None = None if asked.metric == "auto" else asked.metric
    runs = runs_for(s, asked.methods, asked.seeds, asked.without, out, args.runtime, metric=metric)
    if not asked.out:
        wanted, out = out, default_folder(out, runs, args.runtime, args.output)
        runs = moved(runs, wanted, out)
    with live(args.output) as listener:
        execute(runs, args.runtime, listener)
    note_distances(s, args.runtime, out)
    finished = read_back([folder for _, folder in runs], args.runtime)
    decision = page_of(finished, out, out, metric, args.runtime.force, no_warning)
    _tell(decision, out / PAGE, args.output)
    return 0


def read_back(folders: Sequence[Path], runtime: Runtime) -> list[FinishedRun]:
    """Runs that were just brought to their end: their configs are the user's own, and `execute` has warned of them."""
    return read_runs(folders, trust=True, force=runtime.force, warn=no_warning)


def page_of(
    runs: Sequence[FinishedRun],
    source: Path,
    out: Path,
    metric: Metric | None = None,
    force: bool = False,
    warn: Warn | None = None,
) -> Decision:
    """Write the page of these runs, with the distances that lie at their source."""
    found = read_json(source / UNLIKE)
    decision = decide(runs, Distances.from_json(found) if found else None, metric, force, warn)
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
    write_page(decision, out / PAGE)
    return decision


def note_distances(settings: Settings, runtime: Runtime, out: Path) -> None:
    """Measure how unlike the agents are, and keep it beside the runs."""
    federation = all_alices_of(settings, runtime)
    found = distances(federation, model_of(settings, federation, runtime, device_of(runtime.device)))
    with writable(out):
        write_json(out / UNLIKE, found.to_json())


def companions(config: RunConfig, folder: Path) -> list[tuple[RunConfig, Path]]:
    """A run on data of one's own, and the runs it is compared with: alone, and one model for all."""
    others = [method for method in (ALONE, SHARED) if method != config.method]
    runs = [(RunConfig(method=method, settings=config.settings), folder / method) for method in others]
    return [(config, folder), *runs]


def sentences(decision: Decision) -> list[str]:
    """What the terminal says of a decision: of one agent its verdict, of many who gains."""
    if len(decision.views) > 1:
        return [*verdict_text.federation_summary(decision, decision.method), *decision.not_assessed]
    (view,) = decision.views
    said = [verdict_text.verdict(view, decision.method, decision.metric), *verdict_text.caution(view, decision)]
    return [*said, *decision.not_assessed]


def _tell(decision: Decision, page: Path, output: Output) -> None:
    if output.json:
        gains = {
            view.name: {m: {k: tuple(v) for k, v in s.gains.items()} for m, s in view.standings.items() if s.gains}
            for view in decision.views
        }
        print(json.dumps({"page": str(page), "says": sentences(decision), "gains": gains}))
        return
    console = console_for()
    for sentence in sentences(decision):
        console.print(sentence, highlight=False, markup=False)
    console.print(f"page: {page.resolve()}", highlight=False, markup=False, soft_wrap=True)
