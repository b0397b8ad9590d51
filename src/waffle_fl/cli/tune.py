"""waffle tune: search for a method's hyperparameters on validation data."""

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
from waffle_fl.tuning.search import DEFAULT, Found, Trial, Watcher, Wish, search
from waffle_fl.tuning.space import space_of

SHOWN = 10


@dataclass(frozen=True)
class Budget:
    """the search"""

    trials: int = 32
    """Trials at most; --minutes ends a search too. A longer search goes on from a shorter one."""
    together: int = 4
    """Trials asked for at once: they share lr and clip, differ at the server, and train in one stack."""
    pruning: Pruning = "median"
    """Give up a trial at half or three quarters of its rounds: if below the median, or in the lower half, or never."""
    space: str = ""
    """A TOML file with a table [METHOD] that says what to search; docs/tune.md has the form, and what stands for it."""
    over: tuple[str, ...] = ()
    """Search only these of the space, such as --over omega psi; all else stays as given."""
    out: str = ""
    """Folder of the search; by default runs/tune-DATA-SPLIT-METHOD-SEED. A folder that holds it resumes it."""


class TuningDisplay(Watcher):
    """One bar of trials, and what the best of them has reached."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (BarColumn(bar_width=32), MofNCompleteColumn(), TextColumn("{task.fields[state]}", style="cyan"))
        self.progress = Progress(
            TextColumn("[bold]{task.description}"), *columns, TextColumn("finish in"), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._said: set[str] = set()

    def __enter__(self) -> TuningDisplay:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begun(self, wish: Wish, runs: int, ended: int) -> None:
        note = f", {ended} already done" if ended else ""
        self.console.print(f"{wish.trials} trials of {title_of(wish.config.method)}{note}", highlight=False)
        self._runs, self._rounds = runs, wish.config.settings.rounds * runs
        total = self._rounds * (1 + max(wish.trials, ended))  # the default is the first
        done = self._rounds * (1 + ended) if ended else 0
        self._task = self.progress.add_task("rounds", total=total, completed=done, state="")

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        self.progress.advance(self._task)

    def told(self, trial: Trial, found: Found) -> None:
        state = f"best on validation data {found.measure.text(found.best.validation or 0.0)}"
        saved = self._rounds - trial.rounds * self._runs  # by giving up
        self.progress.update(self._task, state=state, advance=max(saved, 0))

    def warned(self, message: str) -> None:
        note = message.partition(": ")[2] or message  # every trial has the same ones
        if note not in self._said:
            self._said.add(note)
            self.console.print(f"note: {note}", style="yellow", highlight=False)


def tune(arguments: Sequence[str]) -> int:
    """Search for hyperparameters on validation data: waffle tune METHOD [flags]."""
    method = arguments[0] if arguments else ""
    if method in ("", "-h", "--help"):
        console_for().print(
            f"usage: waffle tune METHOD [flags], METHOD one of {', '.join(ALGORITHMS)} or module:Class; "
            "waffle tune METHOD --help lists its flags",
            highlight=False,
        )
        return 0 if method else 2
    algorithm_of(method)
    settings = settings_class(validation=0.2)
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
    asked: Budget = args.budget
    wish = Wish(config, space_of(method, asked.space, asked.over), asked.trials, asked.together, asked.pruning)
    out = Path(asked.out or Path("runs") / f"tune-{config.label}")
    check_name(out.name)
    with ExitStack() as stack:
        watcher = Watcher() if args.output.quiet else stack.enter_context(TuningDisplay(console_for(stderr=True)))
        found = search(wish, out, args.runtime, watcher)
    write(found, wish.space, out)
    if args.output.json:
        entries = list(record(found, wish.space))
        best = "default" if found.best.number == DEFAULT else found.best.number
        print(json.dumps({"best": best, "file": str(out / BEST), "trials": entries}))
    else:
        _show(found, wish, out, console_for())
    return 0


def _show(found: Found, wish: Wish, out: Path, console: Console) -> None:
    """The default and the best trials; test data is shown for the default and for the winner alone."""
    measure = found.measure
    names = [name for name in values_of(wish.config, wish.space) if not isinstance(wish.space[name], str)]
    table = Table(title=f"\n{measure.title}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("trial", "validation", "test", "rounds", *names):
        table.add_column(column, justify="left" if column in ("trial", *names) else "right", no_wrap=True)
    ranked = sorted(found.trials, key=lambda trial: (trial.state != "finished", -(trial.score or -1e300)))
    for trial in (found.default, *ranked[:SHOWN]):
        state = "" if trial.state == "finished" else f" {trial.state}"
        scores = [trial.validation, test_of(trial, measure.key) if trial in (found.default, found.best) else None]
        values = values_of(trial.config, wish.space)
        table.add_row(
            "default" if trial.number == DEFAULT else f"{trial.number}{state}",
            *("" if score is None else measure.text(score) for score in scores),
            str(trial.rounds),
            *(_number(values[name]) for name in names),
            style="bold" if trial == found.best else None,
        )
    console.print(table)
    for line in _sentences(found, wish, out):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _sentences(found: Found, wish: Wish, out: Path) -> list[str]:
    states = [trial.state for trial in found.trials]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("finished", "pruned", "diverged") if s in states)
    lines = [f"{len(states)} of {wish.trials} trials: {counts or 'none'}"]
    if found.time_is_up:
        lines.append("the time is up; the same command goes on from here")
    if found.best.number == DEFAULT:
        lines.append("no trial beat the default on validation data")
    else:
        tests = [test_of(trial, found.measure.key) for trial in (found.default, found.best)]
        default, best = ("nothing" if test is None else found.measure.text(test) for test in tests)
        lines.append(
            f"trial {found.best.number} was chosen on validation data; on test data, which the search did not see, "
            f"it reaches {best}, the default {default}"
        )
    chart = [f"chart: {out / CHART}"] if found.trials else []
    return [*lines, *chart, f"waffle bench {out / BEST}", command(found.best.config)]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
