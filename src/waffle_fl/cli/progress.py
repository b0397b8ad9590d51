"""Who hears of a training: the terminal, unless it is to be quiet, and the loggers that were asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from waffle_fl.cli.console import console_for
from waffle_fl.cli.display import ProgressDisplay
from waffle_fl.config import RunConfig
from waffle_fl.experiment import Listener, Runtime, free_folder
from waffle_fl.loggers import Log, Logger, Several, logger


@dataclass(frozen=True)
class Output:
    """What to print."""

    quiet: bool = False
    """No progress on stderr."""
    json: bool = False
    """Results as JSON on stdout."""


@dataclass(frozen=True)
class ProgressFlags(Output):
    """What to print, and who else is told."""

    log: tyro.conf.UseAppendAction[tuple[Log, ...]] = ()
    """Also log every round to tensorboard (in the run's folder) or mlflow; may be given twice."""


@dataclass(frozen=True)
class Folder:
    """a run folder that may have been changed"""

    force: bool = False
    """Go on although a file of the run folder is not what the run wrote."""
    trust: bool = False
    """Import the code (module:name) that the run folder names."""


class Notes:
    """Lines for stderr, each of them once, printed when all has been read: an error comes alone."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        if line not in self._lines:
            self._lines.append(line)

    def show(self) -> None:
        for line in self._lines:
            print(f"note: {line}", file=sys.stderr)


def default_folder(wanted: Path, runs: Sequence[tuple[RunConfig, Path]], runtime: Runtime, output: Output) -> Path:
    """The folder that no --out named: the wanted one or, where it holds runs with other settings, a numbered one."""
    if runtime.force:
        return wanted
    folder, reason = free_folder(wanted, runs)
    if reason and not output.quiet:
        print(f"note: {wanted} holds a run with other settings ({reason}): writing to {folder}", file=sys.stderr)
    return folder


@contextmanager
def live(output: ProgressFlags) -> Iterator[Listener]:
    """The listeners of a training; they are closed when it ends."""
    listeners: list[Logger | ProgressDisplay] = [logger(name) for name in dict.fromkeys(output.log)]
    if not output.quiet:
        listeners.append(ProgressDisplay(console_for(stderr=True)))
    with ExitStack() as stack:
        yield Several([stack.enter_context(listener) for listener in listeners])
