"""The commands by name. Torch takes seconds to import, so each command's module is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, TypeAlias

from waffle_fl.data_folder import data_dir
from waffle_fl.errors import WaffleError, suggest

Function: TypeAlias = Callable[[Sequence[str]], int]


class Command(NamedTuple):
    """Where a command's function is, and the line that `waffle --help` prints of it."""

    module: str
    function: str
    line: str

    def __call__(self, arguments: Sequence[str]) -> int:
        function: Function = getattr(import_module(f"waffle_fl.cli.{self.module}"), self.function)
        return function(arguments)


COMMANDS = {
    "run": Command("commands", "run", "Train one method: waffle run METHOD [flags]."),
    "decide": Command(
        "decide",
        "decide_command",
        "Should an agent join? Train alone and together, compare, write the page: waffle decide DATA.",
    ),
    "bench": Command("commands", "bench", "Run a grid: waffle bench FILE.toml."),
    "tune": Command("tune", "tune", "Search for hyperparameters on validation data: waffle tune METHOD [flags]."),
    "predict": Command("inference", "predict", "What a run's model says of new data: waffle predict RUN data.csv."),
    "export": Command("inference", "export", "A run's model for other programs, with a card: waffle export RUN."),
    "report": Command(
        "commands", "report", "Tables and page from finished runs or committed records: waffle report RUNS."
    ),
    "reproduce": Command(
        "reproduce", "reproduce", "The paper's tables and figures beside its own numbers: waffle reproduce mnist."
    ),
    "data": Command("data", "data_command", "Find, verify, fetch and describe a data set: waffle data NAME."),
    "demo": Command("commands", "demo", "Seven methods on five splits of the embedded digits: waffle demo."),
    "resume": Command("commands", "resume", "Go on with an interrupted run: waffle resume RUN."),
    "deploy": Command("deploy", "deploy", "The same methods on real machines, through Flower: waffle deploy init."),
    "completion": Command("completion", "completion", "Print a completion script: waffle completion bash|zsh|fish."),
}


def usage() -> str:
    lines = "\n".join(f"  {name:<10} {command.line}" for name, command in COMMANDS.items())
    return f"usage: waffle COMMAND ...\n\n{lines}\n\nwaffle COMMAND --help explains one; data sets lie in {data_dir()}"


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        raise WaffleError(f"unknown command {name!r}{suggest(name, COMMANDS)}")
    return COMMANDS[name](rest)
