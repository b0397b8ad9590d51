"""No text from a run folder, data or a user becomes markup or script in a generated page."""

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
PLAIN = EVIL.replace("/", "")  # without path separators
ELEMENTS = {"index.html": 2, "decision.html": 2}  # number of our own script elements


class Elements(HTMLParser):
    """The elements, attributes and texts that a browser would parse from a page."""

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
    """Return the elements of a page after checking that none came from a text."""
    found = Elements(page.read_text())
    assert found.tags.count("script") == ELEMENTS[page.name]
    assert not {"img", "svg", "iframe"} & set(found.tags)
    assert not [name for name in found.attributes if name.startswith("on")]
    return found


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on user data with its baselines."""
    folder = tmp_path_factory.mktemp("compared")
    data = folder_of_tables(folder / "data", numbers=False)
    line = [
        "run",
        "waffle-paper",
        "--data",
        data,
        "--target",
        "outcome",
        "--alice",
        "north",
        "--rounds",
        "4",
        "--quiet",
    ]
    shown = waffle(*line, "--training", "given", "--out", folder / "run")
    assert shown.code == 0, shown.err
    return folder / "run"


@pytest.fixture
def poisoned(compared: Path, tmp_path: Path) -> Path:
    """Return the same folder with scripts and markup in all of its texts."""
    run = Path(shutil.copytree(compared, tmp_path / "run"))
    for folder in (run, run / "local", run / "fedavg"):
        agents = [f"{PLAIN} {i}" for i in range(3)]
        edit_json(folder / "config.json", lambda c: c["settings"].update(alice=EVIL, data=PLAIN, model=EVIL))
        edit_json(
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
        edit_json(folder / "result.json", lambda c: c.update(rounds=EVIL, message=EVIL))
        seal(folder)
    edit_json(run / "distances.json", lambda c: c.update(names=[f"{PLAIN} {i}" for i in range(3)]))
    return run


def pages_of(run: Path) -> list[Path]:
    shown = waffle("report", run, "--out", run / "page", "--title", EVIL)
    assert shown.code == 0, shown.err
    return [run / "page" / name for name in ("index.html", "decision.html")]


def test_nothing_in_a_run_folder_is_markup_in_its_pages(poisoned: Path) -> None:
    """Rounds, agents, classes, settings, bindings, notes and title appear as text in both pages."""
    report, decision = pages_of(poisoned)
    shown = check(report)
    assert EVIL in "".join(shown.texts)
    assert PLAIN in "".join(check(decision).texts)
    for page in (report, decision):
        text = page.read_text()
        assert [payload for payload in PAYLOADS[:4] if payload in text] == []


def test_a_status_is_a_text(poisoned: Path) -> None:
    """The `status` of result.json appears in the report page as text."""
    for folder in (poisoned, poisoned / "local", poisoned / "fedavg"):
        edit_json(folder / "result.json", lambda content: content.update(status=EVIL))
        seal(folder)
    shown = waffle("report", poisoned / "local", "--out", poisoned / "page")
    assert shown.code == 0, shown.err
    assert EVIL in "".join(check(poisoned / "page" / "index.html").texts)


def test_exported_tables_contain_no_markup(poisoned: Path) -> None:
    """Markdown and LaTeX tables contain an agent's name without HTML, extra columns or commands."""
    edit_json(poisoned / "local" / "config.json", lambda c: c["settings"].update(alice=r"<b>a|b</b>\input{x}_$&%"))
    seal(poisoned / "local")
    assert waffle("report", poisoned / "local", "--out", poisoned / "page").code == 0
    markdown = (poisoned / "page" / "table.md").read_text()
    assert "<b>" not in markdown
    assert r"a\|b" in markdown
    latex = (poisoned / "page" / "table.tex").read_text()
    assert r"\input" not in latex
    assert r"\textbackslash{}input\{x\}\_\$\&\%" in latex


def test_json_in_a_script_cannot_close_the_script() -> None:
    """JSON inside a script element contains no character that could open or close an element."""
    text = script_json({EVIL: [EVIL, {"x": EVIL}]})
    assert "<" not in text
    assert json.loads(text) == {EVIL: [EVIL, {"x": EVIL}]}


def test_no_script_runs_in_a_browser(poisoned: Path) -> None:
    """Chromium draws both pages with their charts, and no payload runs."""
    with launched() as browser:
        for page in pages_of(poisoned):
            tab = browser.new_context(offline=True).new_page()
            requests: list[str] = []
            tab.on("request", lambda request: requests.append(request.url))  # noqa: B023
            tab.on("dialog", lambda dialog: requests.append(dialog.message))  # noqa: B023
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-charts]", timeout=60_000)
            for chart in tab.locator("svg, canvas").all():
                if chart.is_visible():
                    chart.hover()  # the tooltip contains names too
            assert tab.evaluate("window.pwned") is None
            assert requests == [page.as_uri()]


def test_only_known_modules_write_html() -> None:
    """Only these modules write HTML; a new one must be added to these tests."""
    root = Path(waffle_fl.__file__).parent
    writers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if any(mark in node.value for mark in ("<td", "<p>", "<p ", "<section", "<html", "<script", "<div", "<dt>"))
    }
    assert writers == {
        "report/page.py",
        "report/tables.py",
        "decision/page.py",
        "decision/markup.py",
        "decision/charts.py",
    }
