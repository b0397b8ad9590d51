"""Command-line flags from dataclasses: tyro parses and prints help; an error becomes one line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import tyro
from tyro import _errors as tyro_errors

from waffle_fl.algorithms import algorithm_of
from waffle_fl.config import COMMON, Settings, option_types
from waffle_fl.constraints import parameters_of
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.user_data import ReadOptions

T = TypeVar("T")

# Help texts are docstrings, so tyro need not parse and tokenize the source once more for comments.
CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)

# Old names of flags per command. They work for one more release: delete them in 0.2.
RENAMED: dict[str, dict[str, str]] = {
    "run": {"--alone": "--no-baselines", "--no-alone": "--baselines"},
    "bench": {"--plan": "--dry-run", "--no-plan": "--no-dry-run"},
    "tune": {"--together": "--parallel-trials", "--over": "--only"},
    "reproduce": {"--anew": "--rerun", "--no-anew": "--no-rerun"},
}


def parse(kind: type[T], arguments: Sequence[str], command: str) -> T:
    """Parse a command's arguments into its dataclass."""

    def fail(event: tyro_errors.ParseErrorEvent) -> None:
        raise WaffleError(_error_text(event, kind) + f" (see `waffle {command} --help`)")

    if os.environ.get("NO_COLOR"):
        os.environ["TERM"] = "dumb"  # tyro's help reads no other variable
    with tyro_errors.on_parse_error(fail):
        args = replace_old_flags(arguments, command)
        _check_repeated(args, kind)
        return tyro.cli(kind, args=args, prog=f"waffle {command}", config=CONFIG)


def replace_old_flags(arguments: Sequence[str], command: str) -> list[str]:
    """Return the arguments with renamed flags under their new names, and print a note on stderr for each of them."""
    renamed = RENAMED.get(command.split()[0], {})
    replaced = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in renamed:
            print(f"note: {flag} is now {renamed[flag]}", file=sys.stderr)
        replaced.append(f"{renamed.get(flag, flag)}{equals}{value}")
    return replaced


def _check_repeated(arguments: Sequence[str], kind: type) -> None:
    """Raise if a flag that takes several values is given twice: only the last values would count."""
    given = [argument.split("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")]
    for flag in _flags(kind, lists=True):
        if (times := given.count(flag)) > 1:
            raise WaffleError(f"{flag} is given {times} times: list all values after one, as in {flag} A B")


def _error_text(event: tyro_errors.ParseErrorEvent, kind: type) -> str:
    match event:
        case tyro_errors.UnrecognizedArgs(tokens=tokens):
            wrong = tokens[0]
            if not wrong.startswith("--"):
                return f"did not expect {wrong!r} here"
            name = wrong.split("=")[0]
            return f"unknown flag {name}{suggest(name, _flags(kind))}"
        case tyro_errors.InvalidChoice(argument=argument, value=value, choices=choices):
            return f"{_name(argument)}: expected {' or '.join(choices)}, got {value!r}"
        case tyro_errors.MissingArgs(missing_arguments=missing):
            return f"missing {', '.join(_name(m.arg) for m in missing)}"
        case tyro_errors.BadValue(argument=argument):
            return f"{_name(argument)} needs a value"
        case tyro_errors.InstantiationFailure(message=message, argument=argument):
            reason = " ".join(message.split())
            return f"{_name(argument)}: {reason}" if argument else reason
    return "these arguments cannot be understood"


def _name(argument: Any) -> str:
    return str(argument.lowered.name_or_flags[0])


def _flags(kind: Any, lists: bool = False) -> list[str]:
    """Return every flag of a dataclass and of the dataclasses inside it, or those that take a list at once."""
    names: list[str] = []
    hints = typing.get_type_hints(kind, include_extras=True) if lists else {}
    for field in dataclasses.fields(kind):
        inner = field.default_factory if field.default_factory is not dataclasses.MISSING else None
        if inner is not None and dataclasses.is_dataclass(inner):
            names += _flags(inner, lists)
        elif not lists or _takes_a_list(hints[field.name]):
            flag = field.name.replace("_", "-")
            names += [f"--{flag}", f"--no-{flag}"] if field.default is True else [f"--{flag}"]
    return names


def _takes_a_list(hint: Any) -> bool:
    """Return whether a flag takes several values at once. A flag that appends takes one, and may be given again."""
    markers = getattr(hint, "__metadata__", ())
    kind = typing.get_args(hint)[0] if markers else hint
    return typing.get_origin(kind) is tuple and tyro.conf.UseAppendAction not in markers


@cache
def options_class(method: str) -> type:
    """Return a dataclass of a method's hyperparameters, without those of the optimiser."""
    return _flags_of(algorithm_of(method), option_types(method), "Hyperparameters of the method.")


@cache
def settings_class(exclude: tuple[str, ...] = (), method: str = "", **defaults: Any) -> type:
    """Return a dataclass of all settings that a flag can express, except `exclude`.

    `shares` is a matrix and has no flag: set it in an experiment file. For a single method, a common setting that is
    also its hyperparameter has one flag, that of the method; `weighting` has none unless the method averages.
    """
    hints = typing.get_type_hints(Settings)
    own = {"weighting", *set(COMMON).intersection(option_types(method))} if method else set()
    left_out = ("shares", *exclude, *own)
    types = {name: kind for name, kind in hints.items() if name not in left_out}
    return _flags_of(Settings, types, "Data, agents, model and local training.", defaults)


@cache
def reading_class() -> type:
    """Return a dataclass of the settings that decide how a data folder is read."""
    hints = typing.get_type_hints(Settings)
    types = {field.name: hints[field.name] for field in dataclasses.fields(ReadOptions)}
    return _flags_of(Settings, types, "How your own data folder is read.")


def _flags_of(kind: Any, types: dict[str, Any], title: str, changed: Mapping[str, Any] | None = None) -> type:
    help_of = {name: _with_limits(text, kind, name) for name, text in field_help(kind).items()}
    defaults = {f.name: f.default for f in dataclasses.fields(kind)} | dict(changed or {})
    fields = [
        (name, Annotated[hint, tyro.conf.arg(help=help_of.get(name, ""))], dataclasses.field(default=defaults[name]))
        for name, hint in types.items()
    ]
    made = dataclasses.make_dataclass(f"{kind.__name__}Flags", fields, frozen=True)
    made.__doc__ = title
    return made


def _with_limits(text: str, kind: Any, name: str) -> str:
    """Return a field's help text, with the values that its constraint allows."""
    constraint = parameters_of(kind)[name].constraint if name in parameters_of(kind) else None
    return f"{text} Expected: {constraint.words}." if constraint else text


def field_help(kind: type) -> dict[str, str]:
    """Return the docstring that follows each field in the source of a dataclass."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    return {
        node.target.id: after.value.value
        for node, after in pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }
