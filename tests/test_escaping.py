"""No text of a run folder, of data or of a user is markup or script in a page that we write."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import waffle_fl
from browser import launched
from cli_support import waffle
from test_decision import folder_of_tables
from waffle_fl.manifest import seal
from waffle_fl.report.page import script_json

PAYLOADS = [
    "<script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 1">',
    "'><svg onload=window.pwned=1>",
    "</script><script>window.pwned = 1</script>",
    "<!--<script>",
    "${window.pwned = 1}`",
]
EVIL = "".join(PAYLOADS)
PLAIN = EVIL.replace("/", "")  # where a path would be cut
ELEMENTS = {"index.html": 2, "decision.html": 3}  # scripts of our own


class Elements(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, and what stands in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check(page: Path) -> Elements:
    """The elements of a page, none of which came out of a text."""
    found = Elements(page.read_text())
    assert found.tags.count("script") == ELEMENTS[page.name]
    assert not {"img", "svg", "iframe"} & set(found.tags)
    assert not [name for name in found.attributes if name.startswith("on")]
    return found


def evil(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on data of one's own, with the runs it is compared with."""
    folder = tmp_path_factory.mktemp("compared")
    data = folder_of_tables(folder / "data", numbers=False)
    line = ["run", "waffle", "--data", data, "--target", "outcome", "--alice", "north", "--rounds", "4", "--quiet"]
    shown = waffle(*line, "--out", folder / "run")
    assert shown.code == 0, shown.err
    return folder / "run"


@pytest.fixture
def poisoned(compared: Path, tmp_path: Path) -> Path:
    """The same folder as somebody sends it who wants to run code in the reader's browser."""
    run = Path(shutil.copytree(compared, tmp_path / "run"))
    for folder in (run, run / "local", run / "fedavg"):
        agents = [f"{PLAIN} {i}" for i in range(3)]
        evil(folder / "config.json", lambda c: c["settings"].update(alice=EVIL, data=PLAIN, model=EVIL))
        evil(
            folder / "provenance.json",
            lambda c: c.update(
                agents=agents,  # noqa: B023
                classes=[f"{EVIL} {k}" for k in c["classes"]],
                statistics=EVIL,
                notes=[EVIL],
                parameters=EVIL,
                waffle=EVIL,
                data_note=EVIL,
                test_samples=EVIL,
                binding={**dict.fromkeys(c["binding"], EVIL)},
            ),
        )
        evil(folder / "result.json", lambda c: c.update(rounds=EVIL, message=EVIL))
        seal(folder)
    evil(run / "distances.json", lambda c: c.update(names=[f"{PLAIN} {i}" for i in range(3)]))
    return run


def pages_of(run: Path) -> list[Path]:
    shown = waffle("report", run, "--out", run / "page", "--title", EVIL)
    assert shown.code == 0, shown.err
    return [run / "page" / name for name in ("index.html", "decision.html")]


def test_nothing_in_a_run_folder_is_markup_in_its_pages(poisoned: Path) -> None:
    """Rounds, agents, classes, settings, bindings, notes and title are texts in the report and the decision page."""
    report, decision = pages_of(poisoned)
    shown = check(report)
    assert EVIL in "".join(shown.texts)
    assert PLAIN in "".join(check(decision).texts)
    for page in (report, decision):
        text = page.read_text()
        assert [payload for payload in PAYLOADS[:4] if payload in text] == []


def test_a_status_is_a_text(poisoned: Path) -> None:
    """`status` of result.json stands in the report page as it is written, and runs nothing."""
    for folder in (poisoned, poisoned / "local", poisoned / "fedavg"):
        evil(folder / "result.json", lambda content: content.update(status=EVIL))
        seal(folder)
    shown = waffle("report", poisoned / "local", "--out", poisoned / "page")
    assert shown.code == 0, shown.err
    assert EVIL in "".join(check(poisoned / "page" / "index.html").texts)


def test_tables_for_papers_hold_no_markup(poisoned: Path) -> None:
    """Markdown and LaTeX hold an agent's name without HTML, other columns or commands."""
    evil(poisoned / "local" / "config.json", lambda c: c["settings"].update(alice=r"<b>a|b</b>\input{x}_$&%"))
    seal(poisoned / "local")
    assert waffle("report", poisoned / "local", "--out", poisoned / "page").code == 0
    markdown = (poisoned / "page" / "table.md").read_text()
    assert "<b>" not in markdown
    assert r"a\|b" in markdown
    latex = (poisoned / "page" / "table.tex").read_text()
    assert r"\input" not in latex
    assert r"\textbackslash{}input\{x\}\_\$\&\%" in latex


def test_a_script_ends_where_it_ends() -> None:
    """JSON inside a script element holds no sign with which one could begin or end an element."""
    text = script_json({EVIL: [EVIL, {"x": EVIL}]})
    assert "<" not in text
    assert json.loads(text) == {EVIL: [EVIL, {"x": EVIL}]}


def test_no_script_runs_in_a_browser(poisoned: Path) -> None:
    """Chromium draws both pages, charts and all, and nothing of the payloads runs."""
    with launched() as browser:
        for page in pages_of(poisoned):
            tab = browser.new_context(offline=True).new_page()
            asked: list[str] = []
            tab.on("request", lambda request: asked.append(request.url))  # noqa: B023
            tab.on("dialog", lambda dialog: asked.append(dialog.message))  # noqa: B023
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-charts]", timeout=60_000)
            for chart in tab.locator("svg, canvas").all():
                if chart.is_visible():
                    chart.hover()  # the tooltip holds names too
            assert tab.evaluate("window.pwned") is None
            assert asked == [page.as_uri()]


def test_every_page_is_written_by_a_module_that_is_tested_here() -> None:
    """HTML is written by these modules alone; another one belongs into these tests."""
    root = Path(waffle_fl.__file__).parent
    makers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if any(mark in node.value for mark in ("<td", "<p>", "<p ", "<section", "<html", "<script", "<div", "<dt>"))
    }
    assert makers == {"report/page.py", "report/tables.py", "decision/page.py", "decision/markup.py"}
