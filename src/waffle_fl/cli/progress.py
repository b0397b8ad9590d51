"""Output flags of the commands, and the listeners of a training: terminal progress and the requested loggers."""

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
from waffle_fl.loggers import ListenerGroup, Log, Logger, logger


@dataclass(frozen=True)
class Output:
    """What to print."""

    quiet: bool = False
    """Do not print progress on stderr."""
    json: bool = False
    """Print results as JSON on stdout."""


@dataclass(frozen=True)
class ProgressFlags(Output):
    """What to print and log."""

    log: tyro.conf.UseAppendAction[tuple[Log, ...]] = ()
    """Also log every round to tensorboard (in the run folder) or mlflow. May be given twice."""


@dataclass(frozen=True)
class Folder:
    """Checks of the run folder."""

    force: bool = False
    """Continue even if files of the run folder have been changed since the run wrote them."""
    trust: bool = False
    """Allow importing the code (module:name) that the run folder refers to."""


class Notes:
    """Notes for stderr without duplicates. They are printed after everything has been read, so not before an error."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        if line not in self._lines:
            self._lines.append(line)

    def show(self) -> None:
        for line in self._lines:
            print(f"note: {line}", file=sys.stderr)


def default_folder(preferred: Path, runs: Sequence[tuple[RunConfig, Path]], runtime: Runtime, output: Output) -> Path:
    """Return the folder to use without --out: the preferred one, or a numbered one if that holds other settings."""
    if runtime.force:
        return preferred
    folder, reason = free_folder(preferred, runs)
    if reason and not output.quiet:
        print(f"note: {preferred} holds a run with other settings ({reason}): writing to {folder}", file=sys.stderr)
    return folder


@contextmanager
def live(output: ProgressFlags) -> Iterator[Listener]:
    """Open the listeners of a training and close them when it ends."""
    listeners: list[Logger | ProgressDisplay] = [logger(name) for name in dict.fromkeys(output.log)]
    if not output.quiet:
        listeners.append(ProgressDisplay(console_for(stderr=True)))
    with ExitStack() as stack:
        yield ListenerGroup([stack.enter_context(listener) for listener in listeners])
