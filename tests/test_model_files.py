"""Files of methods that predict with several models or training samples: a mixture, kNN-Per, APFL's mixed outputs."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cli_support import refusal, waffle
from conftest import make_federation
from conftest import refusal as error_of
from test_budget import write_images
from test_inference import alice_test_columns, alice_test_samples, csv_rows, output_of, rows, write
from waffle_fl import PersonalizedClassifier, PersonalizedRegressor
from waffle_fl.algorithms import knn_per
from waffle_fl.algorithms.mixture import PARTS
from waffle_fl.engines.mixed_outputs import MEMORY_NAMES
from waffle_fl.experiment import federation_of
from waffle_fl.inference.exporting import _distances
from waffle_fl.inference.model_files import MixedPredictions, WithNeighbours, memory_in
from waffle_fl.inference.trained_run import open_run
from waffle_fl.manifest import seal
from waffle_fl.results import read_run
from waffle_fl.tensorfile import pack

MIXTURE = ("waffle", "--prediction", "mixture")
OUTPUTS = ("apfl", "--mixing", "outputs")
DIGITS = ("--data", "digits", "--samples-per-agent", "40")
NET = ("--model", "test_inference:batch_norm_model")
RUNS: dict[str, tuple[str, ...]] = {
    "digits": (*MIXTURE, *DIGITS, "--validation", "0.3"),
    "last": (*MIXTURE, *DIGITS, "--validation", "0.3", "--final-model", "last", "--lr", "0.5"),
    "no-validation": (*MIXTURE, *DIGITS),
    "linear": (*MIXTURE, *DIGITS, "--validation", "0.3", "--model", "linear"),
    "exact": (*MIXTURE, "--data", "synthetic", "--samples-per-agent", "40", "--precision", "float64"),
    "batch-norm": (*MIXTURE, *DIGITS, "--validation", "0.3", *NET),
    "ill": (*MIXTURE, "--target", "ill", "--validation", "0.3"),
    "cost": (*MIXTURE, "--target", "cost", "--validation", "0.3"),
    "cost-no-validation": (*MIXTURE, "--target", "cost"),
    "images": (*MIXTURE, "--alice", "north", "--validation", "0.3"),
    "knn": ("knn-per", *DIGITS),
    "knn-cost": ("knn-per", "--target", "cost"),
    "apfl": (*OUTPUTS, *DIGITS),
    "apfl-batch-norm": (*OUTPUTS, *DIGITS, *NET),
}
MEMORIES = {name.partition(".")[0] for name in MEMORY_NAMES}
CONVOLVES = ("batch-norm", "images", "apfl-batch-norm")  # engines evaluate in another memory layout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three rounds of each run."""
    folder = tmp_path_factory.mktemp("runs")
    write_images(folder / "data-images")
    for task in ("ill", "cost"):
        (folder / f"data-{task}").mkdir()
        for k, name in enumerate(("north", "south", "west")):
            lines = rows(k, 40)
            if task == "cost":
                lines = [[*line[:2], f"{1000 + 50 * float(line[0])}"] for line in lines]
            write(folder / f"data-{task}" / f"{name}.csv", lines, f"age,sex,{task}")
    for name, arguments in RUNS.items():
        task = name.removesuffix("-no-validation").removeprefix("knn-")
        if task in ("ill", "cost", "images"):
            arguments += ("--data", str(folder / f"data-{task}"), "--no-baselines", "--batch-size", "8")
        line = ("--rounds", "3", "--quiet", "--device", "cpu", "--workers", "1", "--out", folder / name)
        shown = waffle("run", *arguments, *line)
        assert shown.code == 0, shown.err
    return folder


def x_of(run: Path) -> Tensor:
    """Return Alice's test samples as a program of the run takes them: of images as they are in the file."""
    if run.name != "images":
        return alice_test_samples(run)
    federation = federation_of(read_run(run).config.settings)
    return torch.from_numpy(np.load(run.parent / "data-images" / "north.npz")["x"])[federation.test[0]]


def recorded(run: Path) -> Tensor:
    return load_file(run / "predictions.safetensors")["output"]


# ----------------------------------------------------------------------------------------------------------- predict


@pytest.mark.parametrize("name", RUNS)
def test_a_file_gives_the_engines_predictions(runs: Path, name: str) -> None:
    """The module of a file has the bits of the engine on a CPU, within 1e-6 for convolutions."""
    run = open_run(runs / name, trust=True)
    output, expected = run.outputs(x_of(runs / name)).reshape(recorded(runs / name).shape), recorded(runs / name)
    if name in CONVOLVES:
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(output, expected)


def test_the_file_has_weights_features_and_labels(runs: Path) -> None:
    """The names are those of the documentation; without validation data the shared model predicts alone."""
    for name in ("digits", "no-validation", "linear", "cost"):
        tensors = load_file(runs / name / "model.safetensors")
        federation = federation_of(read_run(runs / name).config.settings)
        own = federation.train[federation.alice]
        weights, labels = tensors["mixture.weights"], tensors["mixture.labels"]
        assert {part.partition(".")[0] for part in tensors} == {*PARTS, "mixture"}
        assert weights.dtype == torch.float64
        assert float(weights.sum()) == pytest.approx(1)
        assert (weights.tolist() == [1, 0, 0, 0]) == (name == "no-validation")
        assert torch.equal(labels, federation.labels(federation.alice, own).to(labels.dtype))
        if name == "linear":  # its features are the samples
            assert torch.equal(tensors["mixture.features"], federation.x[own].flatten(1))
    assert not MEMORY_NAMES & set(load_file(runs / "apfl" / "model.safetensors"))


@pytest.mark.parametrize("name", ["digits", "knn", "apfl"])
def test_predict_prints_the_probabilities(runs: Path, tmp_path: Path, name: str) -> None:
    """`waffle predict` prints the engine's probabilities and the metrics of the run."""
    target = load_file(runs / name / "predictions.safetensors")["target"]
    np.savez(tmp_path / "x.npz", x=x_of(runs / name).numpy(), y=target.numpy())
    shown = waffle("predict", runs / name, tmp_path / "x.npz", "--json")
    assert shown.code == 0, shown.err
    printed = json.loads(shown.out)
    assert printed["metrics"]["accuracy"] == read_run(runs / name).result["metrics"]["accuracy"]
    expected = recorded(runs / name).double().softmax(dim=1)
    found = torch.tensor([list(p["probabilities"].values()) for p in printed["predictions"]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_predict_reads_tables(runs: Path, tmp_path: Path) -> None:
    """A table is predicted in classes, or in the unit of the target."""
    shown = waffle("predict", runs / "ill", write(tmp_path / "new.csv", rows(9, 12)))
    assert shown.code == 0, shown.err
    lines = csv_rows(shown.out)
    assert lines[0] == ["prediction", "p(no)", "p(yes)"]
    assert all(float(no) + float(yes) == pytest.approx(1, abs=2e-6) for _, no, yes in lines[1:])
    costs = [[age, sex, 1000 + 50 * float(age)] for age, sex, _ in rows(9, 12)]
    for name in ("cost", "knn-cost"):
        shown = waffle("predict", runs / name, write(tmp_path / "new.csv", costs, "age,sex,cost"), "--json")
        assert 1000 < json.loads(shown.out)["predictions"][0]["prediction"] < 8000


def test_threads_can_share_a_module(runs: Path) -> None:
    """Predictions in several threads at once are those of one thread."""
    run, x = open_run(runs / "digits"), x_of(runs / "digits").repeat(20, 1, 1, 1)
    expected, found = run.outputs(x), []
    threads = [threading.Thread(target=lambda: found.append(run.outputs(x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(output, expected) for output in found)


def test_blocks_of_distances_change_no_bit(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = open_run(runs / "digits"), x_of(runs / "digits")
    expected = run.outputs(x)
    monkeypatch.setattr(knn_per, "MAX_DISTANCES", 100)
    assert torch.equal(run.outputs(x), expected)


# ------------------------------------------------------------------------------------------------------------ export


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("form", ["exported", "torchscript", "onnx"])
@pytest.mark.parametrize("name", RUNS)
def test_exported_programs_give_the_engines_predictions(runs: Path, tmp_path: Path, name: str, form: str) -> None:
    """A program of any format gives the run's predictions, for any number of rows; ONNX from the columns of a table."""
    if form == "onnx":
        for package in ("onnx", "onnxscript"):
            pytest.importorskip(package, reason=f"--format onnx needs {package}")
    shown = waffle("export", runs / name, "--out", tmp_path / "out", "--format", form, "--trust")
    assert (shown.code, shown.err) == (0, "")
    _, program, card = map(Path, shown.out.splitlines())
    x, expected = x_of(runs / name).to(open_run(runs / name, trust=True).dtype), recorded(runs / name)
    tables = read_run(runs / name).config.settings.target
    columns = alice_test_columns(runs / name) if form == "onnx" and tables else None
    for count in (len(x), 1, 7):
        some = {key: values[:count] for key, values in columns.items()} if columns else None
        output = output_of(program, x[:count], some).reshape(expected[:count].shape)
        torch.testing.assert_close(output, expected[:count], rtol=1e-5, atol=1e-5)
    limits = json.loads(card.read_text())["limits"]
    assert any("training samples of" in limit for limit in limits) != name.startswith("apfl")


def test_the_card_counts_the_samples(runs: Path, tmp_path: Path) -> None:
    """The card says how many training samples the files contain, and what the outputs are."""
    for name, word in (("digits", "logarithm of a probability"), ("apfl", "score per class")):
        assert waffle("export", runs / name, "--out", tmp_path / name, "--format", "none").code == 0
        assert word in json.loads((tmp_path / name / "card.json").read_text())["output"]
    samples = len(load_file(runs / "digits" / "model.safetensors")["mixture.labels"])
    limits = " ".join(json.loads((tmp_path / "digits" / "card.json").read_text())["limits"])
    assert f"features and labels of {samples} training samples of agent 0" in limits


# -------------------------------------------------------------------------------------------------------- estimators


@pytest.mark.parametrize("method", ["waffle", "knn-per", "apfl"])
def test_a_classifier_predicts_as_the_engine_measures(method: str) -> None:
    """The estimator's accuracy is that of its last round, also with a validation set, and it survives pickling."""
    options = {"waffle": {"prediction": "mixture"}, "apfl": {"mixing": "outputs"}}.get(method, {})
    federation = make_federation(alice=1)
    parts = [rows.tensor_split(2) for rows in federation.test]
    federation = replace(
        federation, test=tuple(first for first, _ in parts), validation=tuple(second for _, second in parts)
    )
    fitted = PersonalizedClassifier(method, options=options, rounds=4, batch_size=8, device="cpu").fit(federation)
    own = federation.test[1]
    x, labels = federation.x[own].numpy(), federation.labels(1, own).numpy()
    names = np.array(federation.class_names)[labels]
    assert fitted.score(x, names.astype(fitted.classes_.dtype)) == fitted.history_[-1]["accuracy"]
    probabilities = fitted.predict_proba(x)
    loss = -np.log(probabilities[np.arange(len(x)), labels]).mean()
    assert loss == pytest.approx(fitted.history_[-1]["loss"], rel=1e-5)
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(x), probabilities)
    memory = memory_in(fitted.model_)
    assert (memory is None) == (method == "apfl")
    if memory is not None:
        assert len(memory.labels) == len(federation.train[1])
        assert isinstance(fitted.model_, MixedPredictions if method == "waffle" else WithNeighbours)


@pytest.mark.parametrize("method", ["waffle", "knn-per"])
def test_a_regressor_predicts_as_the_engine_measures(method: str) -> None:
    rng = np.random.default_rng(0)
    agents = {}
    for i in range(3):
        x = rng.standard_normal((40, 3))
        agents[f"agent {i}"] = (x, 1e4 + 300 * x[:, 0] + 30 * i)
    options = {"prediction": "mixture"} if method == "waffle" else {}
    fitted = PersonalizedRegressor(method, alice=1, options=options, rounds=5, batch_size=8, device="cpu").fit(agents)
    x, y = agents["agent 1"]
    rmse = np.sqrt(np.square(fitted.predict(x) - y).mean())
    assert rmse == pytest.approx(fitted.history_[-1]["training_rmse"], rel=1e-5)


# ----------------------------------------------------------------------------------------------------- damaged files


def changed(run: Path, to: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Path:
    """Return a copy of a run whose model file was changed and sealed again."""
    shutil.copytree(run, to)
    path = to / "model.safetensors"
    path.write_bytes(pack(change(load_file(path)), {"round": "3"}))
    seal(to)
    return to


def put(name: str, tensor: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: tensor(tensors[name])}


WRONG: dict[str, tuple[str, Callable[[dict[str, Tensor]], Mapping[str, Tensor]], str]] = {
    "narrow features": ("digits", put("mixture.features", lambda t: t[:, 1:]), "is ('F32', (40, 63))"),
    "few features": ("digits", put("mixture.features", lambda t: t[1:]), "expected ('F32', (40, 64))"),
    "wide features": ("digits", put("mixture.features", lambda t: t.double()), "expected ('F32', (40, 64))"),
    "few labels": ("digits", put("mixture.labels", lambda t: t[1:]), "expected ('F32', (39, 64))"),
    "no sample": ("digits", put("mixture.labels", lambda t: t[:0]), "expected one label for each training sample"),
    "one label": ("digits", put("mixture.labels", lambda t: t[0]), "expected one label for each training sample"),
    "many axes": ("digits", put("mixture.labels", lambda t: t[:, None]), "expected one label for each"),
    "real labels": ("digits", put("mixture.labels", lambda t: t.double()), "expected ('I64', (40,))"),
    "unknown class": ("digits", put("mixture.labels", lambda t: t + 9), "no class, expected 0 to 9"),
    "negative class": ("digits", put("mixture.labels", lambda t: t - 9), "no class, expected 0 to 9"),
    "three weights": ("digits", put("mixture.weights", lambda t: t[:3]), "'mixture.weights' is ('F64', (3,))"),
    "a large sum": ("digits", put("mixture.weights", lambda t: t + 1), "expected weights of sum 1"),
    "a negative weight": (
        "digits", put("mixture.weights", lambda t: torch.tensor([2.0, -1, 0, 0]).double()), "none below 0",
    ),
    "no number": ("digits", put("mixture.weights", lambda t: t * torch.nan), "expected weights of sum 1"),
    "infinite labels": ("cost", put("mixture.labels", lambda t: t * torch.inf), "not finite"),
    "a model less": (
        "digits", lambda t: {n: v for n, v in t.items() if not n.startswith("alone")}, "'alone.1.bias' is missing",
    ),
    "a tensor more": ("digits", lambda t: {**t, "mixture.more": torch.zeros(1)}, "no such tensor"),
    "no weights": ("digits", lambda t: {n: v for n, v in t.items() if n != "mixture.weights"}, "is missing"),
    "knn-per, narrow": ("knn", put("neighbours.features", lambda t: t[:, :5]), "expected ('F32', (40, 64))"),
    "knn-per, class": ("knn", put("neighbours.labels", lambda t: t + 10), "no class"),
    "apfl, shares": ("apfl", put("share", lambda t: torch.zeros(3)), "'share' is ('F32', (3,))"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_does_not_fit_is_refused(runs: Path, tmp_path: Path, what: str) -> None:
    """A file whose names, shapes, types or values do not fit is one line, although its seal is intact."""
    name, change, word = WRONG[what]
    assert word in error_of(open_run, changed(runs / name, tmp_path / "run", change))


def test_a_huge_claim_takes_no_memory(runs: Path, tmp_path: Path) -> None:
    """A header that claims more samples than the file can have is refused before anything is read."""
    shutil.copytree(runs / "digits", tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["mixture.labels"]["shape"] = [1 << 40]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    seal(tmp_path / "run")
    assert "its header is damaged" in error_of(open_run, tmp_path / "run")
    path.write_bytes(b"short")
    seal(tmp_path / "run")
    assert "not a safetensors file" in error_of(open_run, tmp_path / "run")
    path.unlink()
    seal(tmp_path / "run")
    assert "No such file" in error_of(open_run, tmp_path / "run")


@pytest.mark.parametrize("name", ["digits", "cost", "knn"])
@pytest.mark.parametrize("command", [("predict", "x.npy"), ("export",)])
def test_a_run_of_an_earlier_version_says_what_to_do(
    runs: Path, tmp_path: Path, name: str, command: tuple[str, ...]
) -> None:
    """A file without the training samples is one line: run again, or predict at Alice's site."""
    run = changed(
        runs / name, tmp_path / "run", lambda t: {n: v for n, v in t.items() if n.partition(".")[0] not in MEMORIES}
    )
    said = refusal(waffle(command[0], run, *command[1:]))
    assert "must be run again" in said
    assert "only the folder at Alice's site" in said


def test_distances_in_onnx() -> None:
    """Only Euclidean distances have the decomposition of the exporter, which agrees with torch's."""
    a, b = torch.randn(5, 7), torch.randn(6, 7)
    torch.testing.assert_close(_distances(a, b), torch.cdist(a, b))
    assert _distances(a, b, 1.0) is NotImplemented
