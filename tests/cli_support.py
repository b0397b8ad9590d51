"""Helpers for tests of the command line."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from waffle_fl import cli

SMALL = ("--data", "synthetic", "--model", "linear", "--samples-per-agent", "20", "--rounds", "3")


@dataclass(frozen=True)
class Shown:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Standard error as one line, without line wrapping."""
        return " ".join(self.err.split())


def waffle(*arguments: str | Path) -> Shown:
    """Run the command in this process; unexpected errors pass through and fail the test."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["waffle", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    return Shown(code, out.getvalue(), err.getvalue())


def process(*arguments: str | Path) -> Shown:
    """Run the command in a separate process."""
    line = [sys.executable, "-m", "waffle_fl", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    return Shown(done.returncode, done.stdout, done.stderr)


def refusal(shown: Shown) -> str:
    """The one line of an error message, with exit code 2 and nothing on stdout."""
    assert shown.code == 2
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if line.strip()]
    assert len(lines) == 1, shown.err
    assert lines[0].startswith("waffle: ")
    assert "Traceback" not in shown.err
    return lines[0]


def strict(text: str) -> Any:
    """Parse one JSON document; NaN and infinity fail the test."""
    assert text.endswith("\n")
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not valid JSON"))


def toml(folder: Path, text: str, name: str = "grid.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name
