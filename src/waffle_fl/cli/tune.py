"""`waffle tune`: search for a method's hyperparameters on validation data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from waffle_fl.algorithms import ALGORITHMS, algorithm_of, title_of
from waffle_fl.cli.console import console_for
from waffle_fl.cli.flags import options_class, parse, settings_class
from waffle_fl.cli.progress import Output
from waffle_fl.config import RunConfig, check_name, check_run
from waffle_fl.experiment import Runtime
from waffle_fl.tuning.optuna_study import Pruning
from waffle_fl.tuning.report import BEST, CHART, command, record, test_of, values_of, write
from waffle_fl.tuning.search import DEFAULT, SearchListener, SearchResult, SearchSpec, Trial, search
from waffle_fl.tuning.space import space_of

SHOWN = 10


@dataclass(frozen=True)
class Budget:
    """Search space and budget."""

    trials: int = 32
    """Maximum number of trials. --minutes also limits a search. More trials in the same folder continue the search."""
    parallel_trials: int = 4
    """Trials per batch. They share lr and clip, differ only in server-side hyperparameters, and train in one stack."""
    pruning: Pruning = "median"
    """Stop trials after half and three quarters of the rounds: those below the median, the worse half, or none."""
    space: str = ""
    """TOML file with a table [METHOD] that defines the search space (docs/tune.md). Default: the method's own space."""
    only: tuple[str, ...] = ()
    """Search only these hyperparameters, such as --only omega psi. All others keep their values."""
    storage: str = ""
    """Storage of Optuna's study: journal:FILE, or a database such as postgresql://USER@HOST/NAME. Default: the folder.
    The runs stay in the folder."""
    out: str = ""
    """Folder of the search. Default: runs/tune-DATA-SPLIT-METHOD-SEED. A search in that folder is resumed."""


class TuningDisplay(SearchListener):
    """One progress bar over all trials, with the best validation score so far."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (BarColumn(bar_width=32), MofNCompleteColumn(), TextColumn("{task.fields[state]}", style="cyan"))
        self.progress = Progress(
            TextColumn("[bold]{task.description}"), *columns, TextColumn("finish in"), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._printed: set[str] = set()

    def __enter__(self) -> TuningDisplay:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def started(self, spec: SearchSpec, runs: int, ended: int) -> None:
        note = f", {ended} already done" if ended else ""
        self.console.print(f"{spec.trials} trials of {title_of(spec.config.method)}{note}", highlight=False)
        self._runs, self._rounds = runs, spec.config.settings.rounds * runs
        total = self._rounds * (1 + max(spec.trials, ended))  # the default is trained first
        done = self._rounds * (1 + ended) if ended else 0
        self._task = self.progress.add_task("rounds", total=total, completed=done, state="")

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        self.progress.advance(self._task)

    def trial_ended(self, trial: Trial, result: SearchResult) -> None:
        state = f"best on validation data {result.measure.text(result.best.validation or 0.0)}"
        saved = self._rounds - trial.rounds * self._runs  # by pruning
        self.progress.update(self._task, state=state, advance=max(saved, 0))

    def warned(self, message: str) -> None:
        note = message.partition(": ")[2] or message  # without the name of the trial: all trials give the same notes
        if note not in self._printed:
            self._printed.add(note)
            self.console.print(f"note: {note}", style="yellow", highlight=False)


def tune(arguments: Sequence[str]) -> int:
    """Search for hyperparameters on validation data: waffle tune METHOD [flags]."""
    method = arguments[0] if arguments else ""
    if method in ("", "-h", "--help"):
        console_for().print(
            f"usage: waffle tune METHOD [flags]; METHOD is one of {', '.join(ALGORITHMS)} or module:Class; "
            "waffle tune METHOD --help lists its flags",
            highlight=False,
        )
        return 0 if method else 2
    algorithm_of(method)
    settings = settings_class(method=method, validation=0.2)
    kind = dataclasses.make_dataclass(
        "Tune",
        [
            ("budget", Budget, field(default_factory=Budget)),
            ("settings", settings, field(default_factory=settings)),
            ("options", options_class(method), field(default_factory=options_class(method))),
            ("runtime", Runtime, field(default_factory=Runtime)),
            ("output", Output, field(default_factory=Output)),
        ],
    )
    kind.__doc__ = f"Search for hyperparameters of {title_of(method)} on validation data, never on test data."
    args: Any = parse(kind, arguments[1:], f"tune {method}")
    config = check_run(method, dataclasses.asdict(args.settings), dataclasses.asdict(args.options))
    budget: Budget = args.budget
    spec = SearchSpec(
        config, space_of(method, budget.space, budget.only), budget.trials, budget.parallel_trials, budget.pruning
    )
    out = Path(budget.out or Path("runs") / f"tune-{config.label}")
    check_name(out.name)
    with ExitStack() as stack:
        listener = (
            SearchListener() if args.output.quiet else stack.enter_context(TuningDisplay(console_for(stderr=True)))
        )
        result = search(spec, out, args.runtime, listener, budget.storage)
    write(result, spec.space, out)
    if args.output.json:
        entries = list(record(result, spec.space))
        best = "default" if result.best.number == DEFAULT else result.best.number
        print(json.dumps({"best": best, "file": str(out / BEST), "trials": entries}))
    else:
        _show(result, spec, out, console_for())
    return 0


def _show(result: SearchResult, spec: SearchSpec, out: Path, console: Console) -> None:
    """Print the default and the best trials. Test scores are shown only for the default and the best trial."""
    measure = result.measure
    names = [name for name in values_of(spec.config, spec.space) if not isinstance(spec.space[name], str)]
    table = Table(title=f"\n{measure.title}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("trial", "validation", "test", "rounds", *names):
        table.add_column(column, justify="left" if column in ("trial", *names) else "right", no_wrap=True)
    ranked = sorted(result.trials, key=lambda trial: (trial.state != "finished", -(trial.score or -1e300)))
    for trial in (result.default, *ranked[:SHOWN]):
        state = "" if trial.state == "finished" else f" {trial.state}"
        scores = [trial.validation, test_of(trial, measure.key) if trial in (result.default, result.best) else None]
        values = values_of(trial.config, spec.space)
        table.add_row(
            "default" if trial.number == DEFAULT else f"{trial.number}{state}",
            *("" if score is None else measure.text(score) for score in scores),
            str(trial.rounds),
            *(_number(values[name]) for name in names),
            style="bold" if trial == result.best else None,
        )
    console.print(table)
    for line in _sentences(result, spec, out):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _sentences(result: SearchResult, spec: SearchSpec, out: Path) -> list[str]:
    states = [trial.state for trial in result.trials]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("finished", "pruned", "diverged") if s in states)
    lines = [f"{len(states)} of {spec.trials} trials: {counts or 'none'}"]
    if result.timed_out:
        lines.append("the time limit is reached; run the same command again to continue")
    if result.best.number == DEFAULT:
        lines.append("no trial beat the default on validation data")
    else:
        tests = [test_of(trial, result.measure.key) for trial in (result.default, result.best)]
        default, best = ("nothing" if test is None else result.measure.text(test) for test in tests)
        lines.append(
            f"trial {result.best.number} was chosen on validation data; on test data, which the search did not see, "
            f"it reaches {best}, the default {default}"
        )
    chart = [f"chart: {out / CHART}"] if result.trials else []
    return [*lines, *chart, f"waffle bench {out / BEST}", command(result.best.config)]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
