"""Inference with a finished run: predictions on new data, and exported programs that give the run's predictions."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cli_support import refusal, strict, waffle
from test_budget import write_images
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import federation_of
from waffle_fl.inference.predicting import to_predictions
from waffle_fl.inference.trained_run import open_run
from waffle_fl.models import BY_AXES
from waffle_fl.results import read_run

HEADER = "age,sex,ill"


def rows(seed: int, n: int, target: bool = True) -> list[list[Any]]:
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(n):
        ill = i % 2
        lines.append(
            [f"{rng.normal(40 + 25 * ill, 5):.2f}", "fm"[i % 3 == 0], *(["yes" if ill else "no"] if target else [])]
        )
    return lines


def write(path: Path, lines: list[list[Any]], header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, line)) for line in lines)]) + "\n")
    return path


def trained(folder: Path, *arguments: str) -> Path:
    """Train three rounds of WAFFLE in a folder."""
    shown = waffle("run", "waffle-paper", "--rounds", "3", "--quiet", "--device", "cpu", "--out", folder, *arguments)
    assert shown.code == 0, shown.err
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on arrays, on tables for classification and regression, and with BatchNorm."""
    folder = tmp_path_factory.mktemp("runs")
    trained(folder / "digits", "--data", "digits", "--samples-per-agent", "40")
    trained(folder / "exact", "--data", "synthetic", "--samples-per-agent", "40", "--precision", "float64")
    trained(
        folder / "lenet", "--data", "digits", "--samples-per-agent", "40", "--model", "test_inference:batch_norm_model"
    )
    for task in ("ill", "cost"):
        data = folder / task
        data.mkdir()
        for k, name in enumerate(("north", "south", "west")):
            lines = rows(k, 40)
            if task == "cost":
                lines = [[*line[:2], f"{1000 + 50 * float(line[0])}"] for line in lines]
            write(data / f"{name}.csv", lines, f"age,sex,{task}")
        trained(folder / f"{task}-run", "--data", str(data), "--target", task, "--alice", "south", "--batch-size", "8")
    return folder


def batch_norm_model(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """A small convolutional network with running statistics."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(shape[0], 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(4 * (shape[1] - 2) * (shape[2] - 2), classes),
    )  # fmt: skip


RUNS = ["digits", "exact", "lenet", "ill-run", "cost-run"]


def alice_test_samples(run: Path) -> torch.Tensor:
    """Alice's test samples, as the run used them."""
    federation = federation_of(read_run(run).config.settings)
    return federation.x[federation.test[federation.alice]]


alice_test_samples.__test__ = False  # type: ignore[attr-defined]


def csv_rows(text: str) -> list[list[str]]:
    return list(csv.reader(text.splitlines()))


# ----------------------------------------------------------------------------------------------------------- predict


@pytest.mark.parametrize("name", RUNS)
def test_an_opened_run_gives_its_predictions(runs: Path, name: str) -> None:
    """The loaded model gives the predictions and metrics of the run."""
    run = open_run(runs / name, trust=name == "lenet")
    recorded = load_file(runs / name / "predictions.safetensors")
    output = run.outputs(alice_test_samples(runs / name))
    torch.testing.assert_close(output, recorded["output"], rtol=1e-5, atol=1e-5)
    assert to_predictions(run, recorded["output"], recorded["target"]).metrics == run.run.result["metrics"]


def test_a_table_is_predicted_row_by_row(runs: Path, tmp_path: Path) -> None:
    """The output has one line per row, in order, with the class and its probabilities; stderr has the metrics."""
    shown = waffle("predict", runs / "ill-run", write(tmp_path / "new.csv", rows(9, 12)))
    header, *lines = csv_rows(shown.out)
    assert shown.code == 0
    assert header == ["prediction", "p(no)", "p(yes)"]
    assert len(lines) == 12
    for chosen, no, yes in lines:
        assert float(no) + float(yes) == pytest.approx(1, abs=2e-6)
        assert chosen == ("yes" if float(yes) > float(no) else "no")
    assert "12 rows: accuracy " in shown.err


def test_the_target_and_the_order_of_columns_do_not_matter(runs: Path, tmp_path: Path) -> None:
    """A missing target, another order of columns and an additional column do not change the predictions."""
    full = waffle("predict", runs / "ill-run", write(tmp_path / "full.csv", rows(9, 12)))
    turned = [[sex, "note", age] for age, sex in rows(9, 12, target=False)]
    bare = waffle("predict", runs / "ill-run", write(tmp_path / "bare.csv", turned, "sex,note,age"))
    assert (bare.code, bare.out, bare.err) == (0, full.out, "")


def test_parquet_is_predicted_as_csv(runs: Path, tmp_path: Path) -> None:
    """The same rows as Parquet give the same predictions."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = rows(9, 12)
    columns = {"age": [float(a) for a, _, _ in lines], "sex": [s for _, s, _ in lines], "ill": [y for *_, y in lines]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "new.parquet")
    from_csv = waffle("predict", runs / "ill-run", write(tmp_path / "new.csv", lines))
    assert waffle("predict", runs / "ill-run", tmp_path / "new.parquet").out == from_csv.out


def test_regression_predicts_in_the_unit_of_the_target(runs: Path, tmp_path: Path) -> None:
    """A regression gives one number per row, and its error in the same unit."""
    lines = [[age, sex, 1000 + 50 * float(age)] for age, sex, _ in rows(9, 12)]
    shown = waffle("predict", runs / "cost-run", write(tmp_path / "new.csv", lines, "age,sex,cost"), "--json")
    printed = strict(shown.out)
    errors = [p["prediction"] - line[2] for p, line in zip(printed["predictions"], lines, strict=True)]
    assert printed["metrics"]["rmse"] == pytest.approx(float(np.sqrt(np.mean(np.square(errors)))), rel=1e-4)
    assert 1000 < printed["predictions"][0]["prediction"] < 8000


def test_large_targets_keep_their_precision(tmp_path: Path) -> None:
    """For targets far from 0, such as times, the run and predict report the same error."""
    data = tmp_path / "times"
    data.mkdir()
    for k, name in enumerate(("north", "south")):
        lines = [[age, sex, f"{1.7e9 + 2 * float(age)}"] for age, sex, _ in rows(k, 40)]
        write(data / f"{name}.csv", lines, "age,sex,time")
    run = read_run(trained(tmp_path / "run", "--data", str(data), "--target", "time", "--batch-size", "8"))
    rmse = run.result["metrics"]["rmse"]
    assert rmse == pytest.approx(run.result["last"]["rmse"], rel=1e-4)
    recorded = load_file(tmp_path / "run" / "predictions.safetensors")
    opened = open_run(run.folder).outputs(alice_test_samples(run.folder))
    torch.testing.assert_close(opened, recorded["output"], rtol=0, atol=1e-3)
    new = [[age, sex, f"{1.7e9 + 2 * float(age)}"] for age, sex, _ in rows(9, 12)]
    shown = waffle("predict", run.folder, write(tmp_path / "new.csv", new, "age,sex,time"), "--json")
    printed = strict(shown.out)
    errors = [p["prediction"] - float(line[2]) for p, line in zip(printed["predictions"], new, strict=True)]
    assert printed["metrics"]["rmse"] == pytest.approx(float(np.sqrt(np.mean(np.square(errors)))), rel=1e-4)


def test_arrays_are_predicted(runs: Path, tmp_path: Path) -> None:
    """.npy gives x, .npz may add y for metrics; --out writes the lines, and --json prints one document."""
    x = alice_test_samples(runs / "digits").numpy()[:6]
    target = load_file(runs / "digits" / "predictions.safetensors")["target"][:6]
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x, y=target.numpy())
    plain = waffle("predict", runs / "digits", tmp_path / "x.npy")
    printed = strict(waffle("predict", runs / "digits", tmp_path / "x.npz", "--json").out)
    assert [p["prediction"] for p in printed["predictions"]] == [line[0] for line in csv_rows(plain.out)[1:]]
    assert sum(printed["predictions"][0]["probabilities"].values()) == pytest.approx(1)
    shown = waffle("predict", runs / "digits", tmp_path / "x.npz", "--out", tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text() == plain.out
    assert shown.out == f"6 rows: accuracy {printed['metrics']['accuracy']:.4f}, " + shown.out.split(", ", 1)[1]


WRONG_TABLES = {
    "missing column": ("age,ill\n50,yes\n", "lacks the column 'sex'"),
    "unknown category": ("age,sex\n50,x\n", "column 'sex' has 'x'"),
    "text in a numeric column": ("age,sex\nold,f\n", "column 'age' holds numbers, but line 2 has 'old'"),
    "unknown class": ("age,sex,ill\n50,f,maybe\n", "column 'ill' has 'maybe'"),
    "empty": ("", "is empty"),
    "header alone": ("age,sex,ill\n", "no rows"),
    "ragged": ("age,sex\n50\n", "expected 2 cells"),
    "huge": ("age,sex\n1e300,f\n", "column 'age' has '1e300' in line 2, too large"),
}


@pytest.mark.parametrize("what", WRONG_TABLES)
def test_wrong_tables_are_refused(runs: Path, tmp_path: Path, what: str) -> None:
    """A wrong table is refused in one line with the position, and no file is written."""
    text, word = WRONG_TABLES[what]
    (tmp_path / "new.csv").write_text(text)
    shown = waffle("predict", runs / "ill-run", tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert word in refusal(shown)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["new.csv"]


def npz(**arrays: Any) -> Any:
    return lambda path: np.savez(path, **arrays)


WRONG_ARRAYS = {
    "shape": (npz(x=np.zeros((2, 64))), "expected x of shape (rows, 1, 8, 8), got (2, 64)"),
    "one sample": (npz(x=np.zeros((1, 8, 8))), "needs an axis of rows"),
    "no rows": (npz(x=np.zeros((0, 1, 8, 8))), "is empty"),
    "text": (npz(x=np.full((2, 1, 8, 8), "a")), "expected numbers in x"),
    "nan": (npz(x=np.full((2, 1, 8, 8), np.nan)), "NaN or infinity, first in row 1"),
    "no x": (npz(z=np.zeros(2)), "expected the array x"),
    "label": (npz(x=np.zeros((2, 1, 8, 8)), y=np.array([1, 10])), "integers from 0 to 9"),
    "labels": (npz(x=np.zeros((2, 1, 8, 8)), y=np.array([1])), "y of shape (2,)"),
    "pickled": (npz(x=np.array([{}], dtype=object)), "cannot read"),
    "truncated": (lambda path: path.write_bytes(b"PK\x03\x04"), "cannot read"),
    "absent": (lambda path: None, "No such file"),
}


@pytest.mark.parametrize("what", WRONG_ARRAYS)
def test_wrong_arrays_are_refused(runs: Path, tmp_path: Path, what: str) -> None:
    """A wrong array is refused in one line, and no file is written."""
    make, word = WRONG_ARRAYS[what]
    make(tmp_path / "x.npz")
    assert word in refusal(waffle("predict", runs / "digits", tmp_path / "x.npz"))


def test_the_kind_of_file_must_fit_the_run(runs: Path, tmp_path: Path) -> None:
    """A run on tables refuses arrays, and a run on arrays refuses tables."""
    np.save(tmp_path / "x.npy", np.zeros((1, 3)))
    assert "trained on tables" in refusal(waffle("predict", runs / "ill-run", tmp_path / "x.npy"))
    assert "trained on arrays" in refusal(waffle("predict", runs / "digits", write(tmp_path / "x.csv", rows(0, 2))))


@pytest.mark.parametrize("command", [("predict", "x.npy"), ("export",)])
def test_a_run_that_has_no_model_is_refused(runs: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    """A missing, unfinished, diverged or damaged run is refused in one line."""
    name, *rest = command
    run = tmp_path / "run"
    assert "is not a run folder" in refusal(waffle(name, run, *rest))
    shutil.copytree(runs / "digits", run)
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "model.safetensors").write_bytes(content)
    assert "damaged" in refusal(waffle(name, run, *rest))
    (run / "result.json").write_text('{"status": "diverged", "rounds": 2, "message": "lower lr"}')
    assert "has no model: lower lr" in refusal(waffle(name, run, *rest))
    (run / "result.json").unlink()
    assert "is not finished" in refusal(waffle(name, run, *rest))


# ------------------------------------------------------------------------------------------------------------ export


def output_of(path: Path, x: torch.Tensor, columns: dict[str, Any] | None = None) -> torch.Tensor:
    """The output of an exported program, computed without this library; for tables ONNX takes the columns."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(x)
    if path.suffix == ".pt":
        return torch.jit.load(str(path))(x)
    runtime = pytest.importorskip("onnxruntime", reason="checking ONNX needs onnxruntime")
    return torch.from_numpy(runtime.InferenceSession(path).run(None, columns or {"x": x.numpy()})[0])


def alice_test_columns(run: Path) -> dict[str, Any] | None:
    """The columns of Alice's test rows as they are in her table; None for arrays."""
    config = read_run(run).config.settings
    if not config.is_own:
        return None
    federation = federation_of(config)
    path = Path(config.data) / f"{federation.names[federation.alice]}.csv"
    lines = csv_rows(path.read_text())[1:]
    before = sum(len(csv_rows(p.read_text())) - 1 for p in sorted(Path(config.data).iterdir()) if p < path)
    test = [lines[row - before] for row in federation.test[federation.alice].tolist()]
    return {"age": np.array([float(line[0]) for line in test]), "sex": np.array([line[1] for line in test], object)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("form", ["exported", "torchscript", "onnx"])
@pytest.mark.parametrize("name", RUNS)
def test_exported_programs_give_the_runs_predictions(runs: Path, tmp_path: Path, name: str, form: str) -> None:
    """A program of any format gives the run's predictions, for any number of rows."""
    if form == "onnx":
        for package in ("onnx", "onnxscript"):
            pytest.importorskip(package, reason=f"--format onnx needs {package}")
    shown = waffle("export", runs / name, "--out", tmp_path / "out", "--format", form, "--trust")
    assert (shown.code, shown.err) == (0, "")
    _, program, _ = map(Path, shown.out.splitlines())
    recorded = load_file(runs / name / "predictions.safetensors")["output"]
    x = alice_test_samples(runs / name).to(open_run(runs / name, trust=True).dtype)
    columns = alice_test_columns(runs / name) if form == "onnx" else None
    torch.testing.assert_close(output_of(program, x, columns), recorded, rtol=1e-5, atol=1e-5)
    first = {key: values[:1] for key, values in columns.items()} if columns else None
    torch.testing.assert_close(output_of(program, x[:1], first), recorded[:1], rtol=1e-5, atol=1e-5)


def test_the_card_is_complete(runs: Path, tmp_path: Path) -> None:
    """The card holds method, Alice, metrics, digests, contributors, preprocessing, classes, versions, limits."""
    strict(waffle("export", runs / "ill-run", "--out", tmp_path, "--format", "none", "--json").out)
    card = json.loads((tmp_path / "card.json").read_text())
    run = read_run(runs / "ill-run")
    assert (card["method"], card["alice"], card["classes"]) == ("waffle-paper", "south", ["no", "yes"])
    assert card["metrics"] == {**run.result["metrics"], "test_samples": run.provenance["test_samples"]}
    assert (card["data"]["digest"], card["results_version"]) == (
        run.provenance["binding"]["data"],
        run.provenance["binding"]["results_version"],
    )
    assert list(card["contributors"]) == ["north", "south", "west"]
    assert sum(c["mean_weight"] for c in card["contributors"].values()) == pytest.approx(1)
    assert card["contributors"]["north"]["last_weight"] == run.rounds[-1]["weights"][0]
    assert [c["name"] for c in card["input"]["preprocessing"]["columns"]] == ["age", "sex"]
    assert set(card["software"]) == {"waffle-fl", "python", "torch"}
    assert "for south" in card["intended_use"]
    assert any("10 test samples of south" in limit for limit in card["limits"])
    assert str(runs) not in json.dumps(card)  # the card has no local path


def test_the_card_lists_all_formats(runs: Path, tmp_path: Path) -> None:
    """The card lists the digest of every model file in the folder."""
    for form in ("exported", "none"):
        waffle("export", runs / "digits", "--out", tmp_path, "--format", form)
    assert list(json.loads((tmp_path / "card.json").read_text())["files"]) == ["model.safetensors", "model.pt2"]


def test_a_failed_export_is_refused(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the exporter is refused in one line, and nothing is written."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("data-dependent\ncontrol flow")

    monkeypatch.setattr(torch.export, "export", fail)
    shown = waffle("export", runs / "digits", "--out", tmp_path / "out")
    assert "data-dependent control flow): choose another --format" in refusal(shown)
    assert not (tmp_path / "out").exists()


def test_onnx_names_the_missing_package(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its packages, --format onnx names the extra to install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnxscript" else find(name, *a))
    assert 'onnxscript: pip install "waffle-fl[onnx]"' in refusal(waffle("export", runs / "digits", "--format", "onnx"))


def test_a_run_of_an_older_version_is_refused(runs: Path, tmp_path: Path) -> None:
    """A run folder without the shape of a sample cannot be opened."""
    shutil.copytree(runs / "digits", tmp_path / "run")
    content = json.loads((tmp_path / "run" / "provenance.json").read_text())
    del content["sample"]
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(content))
    with pytest.raises(WaffleError, match="run it again"):
        open_run(tmp_path / "run")


def test_images_of_an_earlier_default_network_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with `model = auto` is opened with the network that auto selected when it was trained."""
    data = write_images(tmp_path / "images")
    with monkeypatch.context() as earlier:
        earlier.setitem(BY_AXES, 3, "cnn-gn")
        line = ("--data", str(data), "--alice", "north", "--no-baselines", "--training", "given", "--workers", "1")
        trained(tmp_path / "run", *line)
    run = open_run(tmp_path / "run")
    assert (run.run.config.settings.model, run.run.provenance["model"]) == ("auto", "cnn-gn")
    recorded = load_file(tmp_path / "run" / "predictions.safetensors")["output"]
    outputs = run.outputs(torch.from_numpy(np.load(data / "north.npz")["x"]))
    near = [(outputs - row).abs().amax(dim=1).min() for row in recorded]
    assert max(near) < 1e-4  # each test prediction is that of one of north's images


def test_the_program_needs_torch_alone(runs: Path, tmp_path: Path) -> None:
    """The exported program runs in a process without this library."""
    waffle("export", runs / "digits", "--out", tmp_path)
    code = (
        "import sys, torch; sys.modules['waffle_fl'] = None; "
        f"print(tuple(torch.export.load({str(tmp_path / 'model.pt2')!r}).module()(torch.zeros(3, 1, 8, 8)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(3, 10)", done.stderr
