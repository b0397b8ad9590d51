"""Predictions for tables: kept columns, values outside the training range, and ONNX models that take raw columns."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_support import refusal, strict, waffle
from waffle_fl.inference.exporting import export
from waffle_fl.inference.predicting import outside_training_range, predict
from waffle_fl.inference.trained_run import open_run
from waffle_fl.user_data.preprocessing import Column, Preprocessing
from waffle_fl.user_data.tables import read_table

HEADER = "id,age,sex,code,lab,output,ill"


def rows(seed: int, n: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [
        [
            f"={seed}{i:03}", f"{rng.uniform(20, 80):.1f}", ("F", "m", "", "Other")[i % 4], f"{i % 3}.0",
            ("-9", "", f"{rng.uniform(1, 5):.3f}")[min(2, i % 5)], "7", ("No", "yes")[i % 2],
        ]
        for i in range(n)
    ]  # fmt: skip


def write(path: Path, lines: list[list[str]], header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *map(",".join, lines)]) + "\n")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tables with numbers, categories, codes, missing values and a constant column."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "data").mkdir()
    for k, name in enumerate(("north", "south")):
        write(folder / "data" / f"{name}.csv", rows(k + 1, 40))
    shown = waffle(
        *("run", "fedavg", "--data", folder / "data", "--target", "ill", "--rounds", "2", "--quiet", "--no-baselines"),
        *("--out", folder / "run", "--drop", "id", "--missing", "-9", "--fold-case", "--categorical", "code"),
    )
    assert shown.code == 0, shown.err
    return folder / "run"


def test_columns_are_kept(run: Path, tmp_path: Path) -> None:
    """--keep copies columns of the file to the output as they are, before the prediction."""
    lines = [line[:-1] for line in rows(3, 6)]
    path = write(tmp_path / "new.csv", lines, HEADER.removesuffix(",ill"))
    shown = waffle("predict", run, path, "--keep", "id", "lab")
    header, *found = csv.reader(shown.out.splitlines())
    assert header == ["id", "lab", "prediction", "p(no)", "p(yes)"]
    assert [line[:2] for line in found] == [[f"'{line[0]}", line[4]] for line in lines]  # = would be a formula
    printed = strict(waffle("predict", run, path, "--keep", "id", "--json").out)["predictions"]
    assert [entry["keep"] for entry in printed] == [{"id": line[0]} for line in lines]
    assert "has no column 'idd', did you mean id?" in refusal(waffle("predict", run, path, "--keep", "idd"))
    write(path, [["50.0", "f", "1", "2", "7", "x"]], "age,sex,code,lab,output,prediction")
    assert "has a column of this name already" in refusal(waffle("predict", run, path, "--keep", "prediction"))


def test_values_outside_the_training_range_are_noted(run: Path, tmp_path: Path) -> None:
    """A value below or above all training values gives a note with the range, the value and the line."""
    lines = [["50.0", "F", "1", "2.0", "7"], ["200", "f", "2", "-9", "7"], ["-1", "m", "0", "3", "7"]]
    shown = waffle("predict", run, write(tmp_path / "new.csv", lines, "age,sex,code,lab,output"))
    fitted = {c["name"]: c for c in json.loads((run / "preprocessing.json").read_text())["columns"]}
    low, high = fitted["age"]["low"], fitted["age"]["high"]
    assert shown.err == (
        f"note: column 'age' has 2 values outside the training range {low:g} to {high:g}, the first 200 in line 3: "
        "the prediction may be wrong\n"
    )
    strict(waffle("export", run, "--out", tmp_path / "out", "--format", "none", "--json").out)
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert all("low" not in column for column in card["input"]["preprocessing"]["columns"])


def test_a_deployment_knows_no_range(tmp_path: Path) -> None:
    """Without the range, as in a deployment, values beyond six deviations from the mean are noted."""
    fitted = Preprocessing((Column("age", "numeric", 50.0, 10.0, rows=30),), "y", "regression")
    table = read_table(write(tmp_path / "new.csv", [["105"], ["120"]], "age"))
    (note,) = outside_training_range(table, fitted)
    assert "outside the training mean and 6 standard deviations, -10 to 110, the first 120 in line 3" in note


def columns_of(path: Path, fitted: Preprocessing) -> dict[str, Any]:
    """The inputs of the ONNX model: numbers, NaN for an empty cell, and texts as they are in the file."""
    with path.open() as stream:
        lines = list(csv.DictReader(stream))
    return {
        ("output (column)" if c.name == "output" else c.name): np.array([float(x[c.name] or "nan") for x in lines])
        if c.kind == "numeric"
        else np.array([x[c.name] for x in lines], object)
        for c in fitted.columns
    }


@pytest.mark.parametrize("engine", ["onnxruntime", "onnx.reference"])
def test_onnx_takes_raw_columns(run: Path, tmp_path: Path, engine: str) -> None:
    """The exported model standardises, encodes and marks missing values itself, to the run's own outputs."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"--format onnx needs {package}")
    runtime = pytest.importorskip(engine, reason=f"checking ONNX needs {engine}")
    trained = open_run(run)
    assert trained.preprocessing is not None
    (model,) = [path for path in export(trained, tmp_path, "onnx") if path.suffix == ".onnx"]
    lines = rows(9, 12)
    lines[0][1] = "10000"  # clipped at three deviations
    path = write(tmp_path / "new.csv", lines)
    inputs = columns_of(path, trained.preprocessing)
    session = runtime.InferenceSession(model) if engine == "onnxruntime" else runtime.ReferenceEvaluator(str(model))
    (scores,) = session.run(None, inputs)
    expected = np.log(predict(trained, path).probabilities)
    np.testing.assert_allclose(
        scores - scores.mean(axis=1, keepdims=True), expected - expected.mean(1)[:, None], 0, 1e-5
    )
    (odd,) = session.run(None, {**{k: v[:1] for k, v in inputs.items()}, "sex": np.array(["unknown"], object)})
    assert np.isfinite(odd).all()


def test_the_inputs_of_the_onnx_model_are_named_after_the_columns(run: Path, tmp_path: Path) -> None:
    """Each column is an input with its name and one value per row; one called output is renamed."""
    runtime = pytest.importorskip("onnxruntime", reason="checking ONNX needs onnxruntime")
    export(open_run(run), tmp_path, "onnx")
    inputs = {i.name: (i.type, i.shape) for i in runtime.InferenceSession(tmp_path / "model.onnx").get_inputs()}
    number, text = ("tensor(double)", ["rows"]), ("tensor(string)", ["rows"])
    assert inputs == {"age": number, "sex": text, "code": text, "lab": number, "output (column)": number}


# ---------------------------------------------------------------------------------------------------------- Excel


def excel(path: Path, lines: list[list[Any]], sheets: int = 1) -> Path:
    openpyxl = pytest.importorskip("openpyxl", reason="openpyxl is not installed")
    book = openpyxl.Workbook()
    for k in range(sheets):
        sheet = book.worksheets[0] if k == 0 else book.create_sheet()
        for line in lines:
            sheet.append(line)
    book.save(path)
    return path


def test_an_excel_file_is_a_table(tmp_path: Path) -> None:
    """An .xlsx is read like the same CSV, without blank rows and columns; two sheets with cells are an error."""
    lines = [["age", "sex", "ill", None], [50, "f", "no"], [None, None, None], [61.5, None, "yes"], [7, "m", True]]
    table = read_table(excel(tmp_path / "n.xlsx", lines))
    found = {name: cells.tolist() for name, cells in table.columns.items()}
    assert found == {"age": ["50", "61.5", "7"], "sex": ["f", "", "m"], "ill": ["no", "yes", "True"]}
    assert table.lines.tolist() == [2, 4, 5]
    from conftest import refusal as message

    assert "expected one sheet with cells, got 'Sheet', 'Sheet1'" in message(
        read_table, excel(tmp_path / "two.xlsx", lines, 2)
    )
    formula = excel(tmp_path / "f.xlsx", [["a", "y"], [1, "no"], ["=A2+1", "yes"]])
    assert "f.xlsx, line 3: the formula '=A2+1' has no stored value" in message(read_table, formula)
    (tmp_path / "bad.xlsx").write_bytes(b"no zip")
    assert "as an Excel file" in message(read_table, tmp_path / "bad.xlsx")


def test_excel_without_openpyxl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without openpyxl an .xlsx is not passed over: one line names the extra to install."""
    import sys

    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "n.xlsx").write_bytes(b"")
    shown = waffle("run", "fedavg", "--data", tmp_path / "d", "--target", "y")
    assert "Excel files need openpyxl: `pip install waffle-fl[excel]`, or save as CSV" in refusal(shown)
