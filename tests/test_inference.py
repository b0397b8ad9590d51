"""A finished run is used: new data is predicted, and the exported program says what the run itself said."""

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
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import federation_of
from waffle_fl.inference.predicting import to_predictions
from waffle_fl.inference.trained_run import open_run
from waffle_fl.results import read_run

HEADER = "age,sex,ill"


def rows(seed: int, n: int, target: bool = True) -> list[list[Any]]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        ill = i % 2
        made.append(
            [f"{rng.normal(40 + 25 * ill, 5):.2f}", "fm"[i % 3 == 0], *(["yes" if ill else "no"] if target else [])]
        )
    return made


def write(path: Path, lines: list[list[Any]], header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, line)) for line in lines)]) + "\n")
    return path


def trained(folder: Path, *arguments: str) -> Path:
    """Train three rounds of WAFFLE in a folder."""
    shown = waffle("run", "waffle", "--rounds", "3", "--quiet", "--device", "cpu", "--out", folder, *arguments)
    assert shown.code == 0, shown.err
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on arrays, on tables of classes and of numbers, and with BatchNorm."""
    folder = tmp_path_factory.mktemp("runs")
    trained(folder / "digits", "--data", "digits", "--samples-per-agent", "40")
    trained(folder / "exact", "--data", "synthetic", "--samples-per-agent", "40", "--precision", "float64")
    trained(folder / "lenet", "--data", "digits", "--samples-per-agent", "40", "--model", "test_inference:normalised")
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


def normalised(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """A small convolutional network with running statistics."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(shape[0], 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(4 * (shape[1] - 2) * (shape[2] - 2), classes),
    )  # fmt: skip


RUNS = ["digits", "exact", "lenet", "ill-run", "cost-run"]


def test_samples(run: Path) -> torch.Tensor:
    """Alice's own test samples, as the run saw them."""
    federation = federation_of(read_run(run).config.settings)
    return federation.x[federation.test[federation.alice]]


test_samples.__test__ = False  # type: ignore[attr-defined]


def csv_rows(text: str) -> list[list[str]]:
    return list(csv.reader(text.splitlines()))


# ----------------------------------------------------------------------------------------------------------- predict


@pytest.mark.parametrize("name", RUNS)
def test_an_opened_run_says_what_it_said(made: Path, name: str) -> None:
    """The model read back gives the run's own predictions, and the run's own metrics follow from them."""
    run = open_run(made / name, trust=name == "lenet")
    said = load_file(made / name / "predictions.safetensors")
    output = run.outputs(test_samples(made / name))
    torch.testing.assert_close(output, said["output"], rtol=1e-5, atol=1e-5)
    assert to_predictions(run, said["output"], said["target"]).metrics == run.run.result["metrics"]


def test_a_table_is_predicted_row_by_row(made: Path, tmp_path: Path) -> None:
    """One line a row, in order: the class and the probability of each; the metrics are told beside."""
    shown = waffle("predict", made / "ill-run", write(tmp_path / "new.csv", rows(9, 12)))
    header, *lines = csv_rows(shown.out)
    assert shown.code == 0
    assert header == ["prediction", "p(no)", "p(yes)"]
    assert len(lines) == 12
    for chosen, no, yes in lines:
        assert float(no) + float(yes) == pytest.approx(1, abs=2e-6)
        assert chosen == ("yes" if float(yes) > float(no) else "no")
    assert "12 rows: accuracy " in shown.err


def test_the_target_and_the_order_of_columns_do_not_matter(made: Path, tmp_path: Path) -> None:
    """Without its target, with columns in another order and one more, a table is predicted alike."""
    full = waffle("predict", made / "ill-run", write(tmp_path / "full.csv", rows(9, 12)))
    turned = [[sex, "note", age] for age, sex in rows(9, 12, target=False)]
    bare = waffle("predict", made / "ill-run", write(tmp_path / "bare.csv", turned, "sex,note,age"))
    assert (bare.code, bare.out, bare.err) == (0, full.out, "")


def test_parquet_is_predicted_as_csv(made: Path, tmp_path: Path) -> None:
    """The same rows as Parquet give the same lines."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = rows(9, 12)
    columns = {"age": [float(a) for a, _, _ in lines], "sex": [s for _, s, _ in lines], "ill": [y for *_, y in lines]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "new.parquet")
    from_csv = waffle("predict", made / "ill-run", write(tmp_path / "new.csv", lines))
    assert waffle("predict", made / "ill-run", tmp_path / "new.parquet").out == from_csv.out


def test_numbers_are_predicted_in_the_target_s_unit(made: Path, tmp_path: Path) -> None:
    """A regression gives one number a row, and its error in the same unit."""
    lines = [[age, sex, 1000 + 50 * float(age)] for age, sex, _ in rows(9, 12)]
    shown = waffle("predict", made / "cost-run", write(tmp_path / "new.csv", lines, "age,sex,cost"), "--json")
    told = strict(shown.out)
    errors = [p["prediction"] - line[2] for p, line in zip(told["predictions"], lines, strict=True)]
    assert told["metrics"]["rmse"] == pytest.approx(float(np.sqrt(np.mean(np.square(errors)))), rel=1e-4)
    assert 1000 < told["predictions"][0]["prediction"] < 8000


def test_a_large_number_keeps_its_digits(tmp_path: Path) -> None:
    """Where targets are far from 0 beside their deviation, as times are, the run and predict tell one error."""
    data = tmp_path / "times"
    data.mkdir()
    for k, name in enumerate(("north", "south")):
        lines = [[age, sex, f"{1.7e9 + 2 * float(age)}"] for age, sex, _ in rows(k, 40)]
        write(data / f"{name}.csv", lines, "age,sex,time")
    run = read_run(trained(tmp_path / "run", "--data", str(data), "--target", "time", "--batch-size", "8"))
    rmse = run.result["metrics"]["rmse"]
    assert rmse == pytest.approx(run.result["last"]["rmse"], rel=1e-4)
    said = load_file(tmp_path / "run" / "predictions.safetensors")
    opened = open_run(run.folder).outputs(test_samples(run.folder))
    torch.testing.assert_close(opened, said["output"], rtol=0, atol=1e-3)
    new = [[age, sex, f"{1.7e9 + 2 * float(age)}"] for age, sex, _ in rows(9, 12)]
    shown = waffle("predict", run.folder, write(tmp_path / "new.csv", new, "age,sex,time"), "--json")
    told = strict(shown.out)
    errors = [p["prediction"] - float(line[2]) for p, line in zip(told["predictions"], new, strict=True)]
    assert told["metrics"]["rmse"] == pytest.approx(float(np.sqrt(np.mean(np.square(errors)))), rel=1e-4)


def test_arrays_are_predicted(made: Path, tmp_path: Path) -> None:
    """x in .npy, or in .npz with y to measure against; --out takes the lines, --json the rest."""
    x = test_samples(made / "digits").numpy()[:6]
    target = load_file(made / "digits" / "predictions.safetensors")["target"][:6]
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x, y=target.numpy())
    plain = waffle("predict", made / "digits", tmp_path / "x.npy")
    told = strict(waffle("predict", made / "digits", tmp_path / "x.npz", "--json").out)
    assert [p["prediction"] for p in told["predictions"]] == [line[0] for line in csv_rows(plain.out)[1:]]
    assert sum(told["predictions"][0]["probabilities"].values()) == pytest.approx(1)
    shown = waffle("predict", made / "digits", tmp_path / "x.npz", "--out", tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text() == plain.out
    assert shown.out == f"6 rows: accuracy {told['metrics']['accuracy']:.4f}, " + shown.out.split(", ", 1)[1]


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
def test_wrong_tables_are_refused(made: Path, tmp_path: Path, what: str) -> None:
    """One line that names the place, exit code 2, and no file."""
    text, word = WRONG_TABLES[what]
    (tmp_path / "new.csv").write_text(text)
    shown = waffle("predict", made / "ill-run", tmp_path / "new.csv", "--out", tmp_path / "p.csv")
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
def test_wrong_arrays_are_refused(made: Path, tmp_path: Path, what: str) -> None:
    """The same for arrays."""
    make, word = WRONG_ARRAYS[what]
    make(tmp_path / "x.npz")
    assert word in refusal(waffle("predict", made / "digits", tmp_path / "x.npz"))


def test_the_kind_of_file_must_fit_the_run(made: Path, tmp_path: Path) -> None:
    """A run on tables takes no arrays, and one on arrays no table."""
    np.save(tmp_path / "x.npy", np.zeros((1, 3)))
    assert "trained on tables" in refusal(waffle("predict", made / "ill-run", tmp_path / "x.npy"))
    assert "trained on arrays" in refusal(waffle("predict", made / "digits", write(tmp_path / "x.csv", rows(0, 2))))


@pytest.mark.parametrize("command", [("predict", "x.npy"), ("export",)])
def test_a_run_that_has_no_model_is_refused(made: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    """No run at all, an unfinished one, a diverged one, a damaged model: each is told in one line."""
    name, *rest = command
    run = tmp_path / "run"
    assert "is not a run folder" in refusal(waffle(name, run, *rest))
    shutil.copytree(made / "digits", run)
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "model.safetensors").write_bytes(content)
    assert "damaged" in refusal(waffle(name, run, *rest))
    (run / "result.json").write_text('{"status": "diverged", "rounds": 2, "message": "lower lr"}')
    assert "has no model: lower lr" in refusal(waffle(name, run, *rest))
    (run / "result.json").unlink()
    assert "is not finished" in refusal(waffle(name, run, *rest))


# ------------------------------------------------------------------------------------------------------------ export


def answer(path: Path, x: torch.Tensor) -> torch.Tensor:
    """What an exported program says, run without this library."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(x)
    if path.suffix == ".pt":
        return torch.jit.load(str(path))(x)
    runtime = pytest.importorskip("onnxruntime", reason="checking ONNX needs onnxruntime")
    return torch.from_numpy(runtime.InferenceSession(path).run(None, {"x": x.numpy()})[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("form", ["exported", "torchscript", "onnx"])
@pytest.mark.parametrize("name", RUNS)
def test_the_program_says_what_the_run_said(made: Path, tmp_path: Path, name: str, form: str) -> None:
    """A program of any format gives the run's own predictions, for any number of rows."""
    if form == "onnx":
        for package in ("onnx", "onnxscript"):
            pytest.importorskip(package, reason=f"--format onnx needs {package}")
    shown = waffle("export", made / name, "--out", tmp_path / "out", "--format", form, "--trust")
    assert (shown.code, shown.err) == (0, "")
    _, program, _ = map(Path, shown.out.splitlines())
    said = load_file(made / name / "predictions.safetensors")["output"]
    x = test_samples(made / name).to(open_run(made / name, trust=True).dtype)
    torch.testing.assert_close(answer(program, x), said, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(answer(program, x[:1]), said[:1], rtol=1e-5, atol=1e-5)


def test_the_card_tells_all(made: Path, tmp_path: Path) -> None:
    """The card holds method, Alice, metrics, digests, contributors, preprocessing, classes, versions, limits."""
    strict(waffle("export", made / "ill-run", "--out", tmp_path, "--format", "none", "--json").out)
    card = json.loads((tmp_path / "card.json").read_text())
    run = read_run(made / "ill-run")
    assert (card["method"], card["alice"], card["classes"]) == ("waffle", "south", ["no", "yes"])
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
    assert str(made) not in json.dumps(card)  # no path of the machine it was made on


def test_a_second_format_joins_the_first(made: Path, tmp_path: Path) -> None:
    """The card names every file of the model that lies beside it, by its digest."""
    for form in ("exported", "none"):
        waffle("export", made / "digits", "--out", tmp_path, "--format", form)
    assert list(json.loads((tmp_path / "card.json").read_text())["files"]) == ["model.safetensors", "model.pt2"]


def test_a_model_that_cannot_be_followed_is_told(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter's failure is one line, and nothing is written."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("data-dependent\ncontrol flow")

    monkeypatch.setattr(torch.export, "export", fail)
    shown = waffle("export", made / "digits", "--out", tmp_path / "out")
    assert "data-dependent control flow): choose another --format" in refusal(shown)
    assert not (tmp_path / "out").exists()


def test_onnx_says_what_it_needs(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its packages, --format onnx names the extra to install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnxscript" else find(name, *a))
    assert 'onnxscript: pip install "waffle-fl[onnx]"' in refusal(waffle("export", made / "digits", "--format", "onnx"))


def test_a_run_of_an_older_waffle_is_told(made: Path, tmp_path: Path) -> None:
    """A run folder that does not say what a sample looks like cannot be opened."""
    shutil.copytree(made / "digits", tmp_path / "run")
    content = json.loads((tmp_path / "run" / "provenance.json").read_text())
    del content["sample"]
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(content))
    with pytest.raises(WaffleError, match="run it again"):
        open_run(tmp_path / "run")


def test_the_program_needs_torch_alone(made: Path, tmp_path: Path) -> None:
    """The exported program runs in a process that never heard of this library."""
    waffle("export", made / "digits", "--out", tmp_path)
    code = (
        "import sys, torch; sys.modules['waffle_fl'] = None; "
        f"print(tuple(torch.export.load({str(tmp_path / 'model.pt2')!r}).module()(torch.zeros(3, 1, 8, 8)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(3, 10)", done.stderr
