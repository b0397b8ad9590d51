"""Table of all commands. Torch takes seconds to import, so a command's module is imported only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, TypeAlias

from waffle_fl.data_folder import data_dir
from waffle_fl.errors import WaffleError, suggest

Function: TypeAlias = Callable[[Sequence[str]], int]


class Command(NamedTuple):
    """The module and function of a command, and its summary in `waffle --help`."""

    module: str
    function: str
    summary: str

    def __call__(self, arguments: Sequence[str]) -> int:
        function: Function = getattr(import_module(f"waffle_fl.cli.{self.module}"), self.function)
        return function(arguments)


COMMANDS = {
    "run": Command("commands", "run", "Train one method: waffle run METHOD [flags]."),
    "decide": Command(
        "decide",
        "decide_command",
        "Compare training alone with federated training for each agent: waffle decide DATA.",
    ),
    "bench": Command("commands", "bench", "Run all experiments of a file: waffle bench FILE.toml."),
    "tune": Command("tune", "tune", "Search for hyperparameters on validation data: waffle tune METHOD [flags]."),
    "predict": Command("inference", "predict", "Apply a run's model to new data: waffle predict RUN data.csv."),
    "export": Command("inference", "export", "Export a run's model for other programs: waffle export RUN."),
    "report": Command("commands", "report", "Write tables and charts of finished runs: waffle report RUNS."),
    "reproduce": Command("reproduce", "reproduce", "Reproduce the paper's tables and figures: waffle reproduce mnist."),
    "data": Command("data", "data_command", "Describe a data set, or check your own folder: waffle data NAME."),
    "demo": Command("commands", "demo", "Train eight methods on five splits of the included digits: waffle demo."),
    "resume": Command("commands", "resume", "Resume an interrupted run: waffle resume RUN."),
    "deploy": Command("deploy", "deploy", "The same methods on real machines, through Flower: waffle deploy init."),
    "completion": Command("completion", "completion", "Print a completion script: waffle completion bash|zsh|fish."),
}


def usage() -> str:
    lines = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return (
        f"usage: waffle COMMAND ...\n\n{lines}\n\n"
        f"waffle COMMAND --help lists the flags of a command; data sets are stored in {data_dir()}"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        raise WaffleError(f"unknown command {name!r}{suggest(name, COMMANDS)}")
    return COMMANDS[name](rest)
