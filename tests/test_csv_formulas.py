"""Labels and names that a spreadsheet would run as formulas are quoted as text in every CSV file."""

from __future__ import annotations

import ast
import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

import waffle_fl
from cli_support import waffle
from waffle_fl.spreadsheet import cell, to_csv

EVIL = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)"]
SIGNS = ("=", "+", "-", "@", "\t", "\r")


def cells(text: str, delimiter: str = ",") -> list[str]:
    return [value for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) for value in row]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def formulas(text: str) -> list[str]:
    """Return the cells that a spreadsheet would run."""
    return [value for value in cells(text) if value.startswith(SIGNS) and not is_number(value)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run whose four classes and agents are named like formulas."""
    folder = tmp_path_factory.mktemp("formulas")
    data, rng = folder / "data", np.random.default_rng(0)
    data.mkdir()
    for name in ("=1+1", "@north", "-south"):
        lines = [f"{4 * (i % 4) + rng.normal():.3f},{rng.normal():.3f},{EVIL[i % 4]}" for i in range(60)]
        (data / f"{name}.csv").write_text("dose,age,drug\n" + "\n".join(lines) + "\n")
    lines = [f"{4 * (i % 4)},0.1" for i in range(12)]
    (folder / "new.csv").write_text("dose,age\n" + "\n".join(lines) + "\n")
    line = ["run", "waffle-paper", "--data", data, "--target", "drug", "--alice", "=1+1", "--rounds", "8", "--quiet"]
    shown = waffle(*line, "--batch-size", "8", "--training", "given", "--no-baselines", "--out", folder / "run")
    assert shown.code == 0, shown.err
    return folder


def test_predictions_contain_no_formula(trained: Path) -> None:
    """`waffle predict` quotes labels in CSV on stdout and in files; JSON keeps them unchanged."""
    shown = waffle("predict", trained / "run", trained / "new.csv")
    assert shown.code == 0
    assert formulas(shown.out) == []
    assert {value[0] for value in cells(shown.out) if value[1:] in EVIL} == {"'"}
    assert waffle("predict", trained / "run", trained / "new.csv", "--out", trained / "out.csv").code == 0
    assert (trained / "out.csv").read_text() == shown.out
    predictions = json.loads(waffle("predict", trained / "run", trained / "new.csv", "--json").out)["predictions"]
    assert {line["prediction"] for line in predictions} <= set(EVIL)
    assert len({line["prediction"] for line in predictions}) > 1


def test_the_report_table_contains_no_formula(trained: Path) -> None:
    """`waffle report` quotes the agent's name."""
    assert waffle("report", trained / "run", "--out", trained / "report").code == 0
    text = (trained / "report" / "table.csv").read_text()
    assert formulas(text) == []
    assert "'=1+1" in cells(text)


def test_negative_numbers_stay_numbers(tmp_path: Path) -> None:
    """Negative predictions of a regression are not quoted."""
    rng = np.random.default_rng(1)
    (tmp_path / "data").mkdir()
    for name in ("north", "south"):
        lines = [f"{x:.3f},{-5 + x:.3f}" for x in rng.normal(size=60)]
        (tmp_path / "data" / f"{name}.csv").write_text("x,y\n" + "\n".join(lines) + "\n")
    (tmp_path / "new.csv").write_text("x\n-1\n0\n")
    line = ["run", "fedavg", "--data", tmp_path / "data", "--target", "y", "--task", "regression", "--alice", "north"]
    assert waffle(*line, "--rounds", "3", "--quiet", "--no-baselines", "--out", tmp_path / "run").code == 0
    _, *values = waffle("predict", tmp_path / "run", tmp_path / "new.csv").out.split()
    assert all(float(value) < 0 for value in values)


@pytest.mark.parametrize("text", [*EVIL, "\tx", "\rx", "\n=1", "＝1", "-1", "+49 30", "@x"])
def test_a_text_that_begins_like_a_formula_gets_a_quote(text: str) -> None:
    """Texts with OWASP's leading characters are quoted, also those that look like numbers."""
    assert cells(to_csv([[text, 1]])) == [f"'{text}", "1"]


@pytest.mark.parametrize("text", ["a;=1+1", "a\t=1+1", "a\r=1+1", "a\n=1+1", 'a",=1+1', 'a"\n=1+1', '";=1+1'])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_no_text_can_start_a_new_cell(text: str, delimiter: str) -> None:
    """Whatever delimiter the reader uses, a formula in a text does not become a cell."""
    assert not any(value.startswith("=") for value in cells(to_csv([[text]]), delimiter))


@pytest.mark.parametrize("value", ["north", "a=b", "1-2", "'=1", "", -1.5, -3, 0.25, 1e-7])
def test_other_values_stay_as_they_are(value: object) -> None:
    """Other texts and all numbers are written unchanged."""
    assert cell(value) == str(value)


def test_only_one_module_writes_csv() -> None:
    """No other module writes CSV, so none can omit the quoting."""
    root = Path(waffle_fl.__file__).parent
    names = ("writer", "DictWriter", "to_csv")
    writers = {
        (path.name, node.value.id)
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name)
    }
    assert writers <= {("tables.py", "spreadsheet"), ("inference.py", "found")}
