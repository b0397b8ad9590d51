"""Every block of docs/tutorials that is marked bash or python runs, in order, in one folder per page."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import waffle_fl
from fork_server import shared

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
LONG = {"deploy-two-sites"}  # starts real Flower processes; its tests have the marker flower
FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced code block of a page."""

    language: str
    code: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["code"], text.count("\n", 0, found.start()) + 1)
        for found in FENCE.finditer(text)
    ]


def tutorials() -> list[Any]:
    """Return every tutorial as a parameter of a test."""
    return [pytest.param(page, id=page.stem, marks=[pytest.mark.flower] if page.stem in LONG else []) for page in PAGES]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run a page in; modules that the page writes there can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    written = re.findall(r"(\w+)\.py\b", "".join(page.read_text(encoding="utf-8") for page in PAGES))
    for name in set(written) & set(sys.modules):  # other tests import modules of the same names
        if not hasattr(sys.modules[name], "__path__"):
            monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield tmp_path
    for file in tmp_path.glob("*.pid"):  # background processes of a page that failed before it stopped them
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(file.read_text()), signal.SIGTERM)
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None)
        if origin and Path(origin).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program `waffle` that need not import torch for each command."""
    folder = tmp_path_factory.mktemp("bin")
    shared().write_client(folder)
    return folder


def run_bash(code: str, folder: Path, *programs: Path) -> None:
    """Run a block with `bash -e`, with this interpreter's programs and this package; fail with its output."""
    source = Path(waffle_fl.__file__).parent.parent
    paths = [str(source), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PATH": os.pathsep.join([*map(str, programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    with (folder / ".output").open("w+") as output:  # a file: background processes may keep it open
        command = ["bash", "-e", "-o", "pipefail", "-c", code]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, timeout=300)
        output.seek(0)
        assert done.returncode == 0, f"exit code {done.returncode}\n{code}\n{output.read()}"


@pytest.mark.slow_first
@pytest.mark.parametrize("page", tutorials())
def test_blocks_run(page: Path, folder: Path, programs: Path) -> None:
    """Each bash block exits with 0, and each python block ends without an exception; python blocks share names."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    first = () if page.stem in LONG else (programs,)  # a server in the background must be the process that is stopped
    executed = 0
    for block in blocks_of(page):
        if block.language == "bash":
            run_bash(block.code, folder, *first)
        elif block.language == "python":
            code = "\n" * block.line + block.code  # so that a traceback has the page's line numbers
            exec(compile(code, str(page), "exec"), names)
        else:
            continue
        executed += 1
    assert executed >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_marked(page: Path) -> None:
    """A block of a tutorial is code that runs, or expected output, or the content of a file; each fence is closed."""
    blocks = blocks_of(page)
    assert {block.language for block in blocks} <= {"bash", "python", "text", "toml"}
    fences = re.findall(r"^ *(?:```|~~~)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks)


def test_blocks_are_found(tmp_path: Path) -> None:
    """The language, the code and the line of each block are read."""
    page = tmp_path / "page.md"
    page.write_text("a\n```bash\nls\n```\nb\n\n```text\nx\n```\n")
    assert blocks_of(page) == [Block("bash", "ls\n", 2), Block("text", "x\n", 7)]


def test_a_failing_command_fails_the_page(tmp_path: Path) -> None:
    """`bash -e` stops at the first command that fails."""
    with pytest.raises(AssertionError, match="exit code 1"):
        run_bash("false\ntrue\n", tmp_path)
