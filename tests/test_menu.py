"""`waffle --help` and `waffle --version` import no torch, and the menu shows the docstrings of the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from waffle_fl.cli.menu import COMMANDS

PROBE = """
import json, sys
from waffle_fl.cli import main
sys.argv = ["waffle", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    print(json.dumps([stop.code, sorted({"torch", "numpy", "sklearn", "altair", "tyro"} & set(sys.modules))]))
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["-h"], 0), (["--version"], 0), ([], 2), (["rum"], 2)], ids=str
)
def test_help_imports_no_large_packages(arguments: list[str], code: int) -> None:
    """Printing the help, the version or a misspelt name imports neither torch, numpy nor chart packages."""
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [code, []]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_menu_shows_the_docstrings(name: str) -> None:
    """Each command exists, and its menu line is the first line of its docstring."""
    command = COMMANDS[name]
    function = getattr(import_module(f"waffle_fl.cli.{command.module}"), command.function)
    assert (function.__doc__ or "").splitlines()[0] == command.summary
