"""Arrays and images are standardised with statistics of training samples, and a run's model includes them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

from cli_support import refusal as shown_refusal
from cli_support import strict, waffle
from conftest import refusal
from test_inference import output_of
from waffle_fl import Federation, PersonalizedClassifier, PersonalizedRegressor
from waffle_fl.decision.references import fit_reference
from waffle_fl.inference.exporting import export
from waffle_fl.inference.trained_run import StandardisedInput, open_run
from waffle_fl.results import read_run
from waffle_fl.user_data import ArrayScaling, array_scaling
from waffle_fl.user_data.array_scaling import FeatureMoments, feature_moments
from waffle_fl.user_data.preprocessing import CLIP, joined_moments, moments

Shape = tuple[int, ...]
NAMES = ("north", "south", "west")


def samples(seed: int, rows: int = 60, shape: Shape = (4,), scale: float = 1e4) -> tuple[np.ndarray, np.ndarray]:
    """Return samples whose channels have means and deviations of very different size, and a class of each."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, *shape))
    y = (values.reshape(rows, shape[0], -1).mean(axis=2)[:, 0] > 0).astype(np.int64)
    size = np.geomspace(1, scale, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return (values + seed + 3) * size, y


def folder_of(path: Path, shape: Shape = (4,), regression: bool = False, **options: Any) -> Path:
    """Write one .npz file per agent."""
    path.mkdir()
    for seed, name in enumerate(NAMES):
        x, y = samples(seed, shape=shape, **options)
        np.savez(path / f"{name}.npz", x=x, y=500 + 40 * x.reshape(len(x), -1)[:, 0] if regression else y)
    return path


def given(path: Path, **options: Any) -> Federation:
    """Return the federation of a folder with its arrays as given."""
    return Federation.from_folder(path, preprocessing="none", **options)


RUN = ("run", "waffle-paper", "--alice", "south", "--rounds", "20", "--batch-size", "8", "--no-baselines", "--quiet")


def trained(data: Path, out: Path, *arguments: str) -> Path:
    shown = waffle(*RUN, "--data", data, "--training", "given", "--device", "cpu", "--out", out, *arguments)
    assert shown.code == 0, shown.err
    return out


# ------------------------------------------------------------------------------------------------------------ fitting


@pytest.mark.parametrize(("shape", "bound"), [((4,), CLIP), ((3, 16), None)])
def test_features_are_clipped_and_channels_are_not(shape: Shape, bound: float | None, tmp_path: Path) -> None:
    """A far value counts as one of three deviations; in a series it stays; the module in front of a model agrees."""
    (tmp_path / "data").mkdir()
    for seed, name in enumerate(NAMES):
        x, y = samples(seed, shape=shape)
        x[0] *= 1000
        np.savez(tmp_path / "data" / f"{name}.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    found = Federation.from_folder(tmp_path / "data", duplicates="keep")
    assert found.scaling is not None
    assert found.scaling.clip == bound
    assert (float(found.x.abs().max()) == CLIP) == (bound == CLIP)
    raw = given(tmp_path / "data", duplicates="keep").x
    torch.testing.assert_close(StandardisedInput(found.scaling, torch.float32)(raw), found.x, rtol=1e-5, atol=1e-5)


def test_an_earlier_scaling_does_not_clip() -> None:
    """A scaling.json without a bound, as runs of earlier versions have, leaves far values."""
    content = ArrayScaling((0.0,), (1.0,), 5).to_json()
    del content["clip"]
    assert ArrayScaling.from_json(content).transform(np.array([[40.0]]), "north").item() == 40


@pytest.mark.parametrize("shape", [(4,), (3, 10), (2, 5, 6)])
def test_the_training_samples_of_all_agents_are_standardised(shape: Shape, tmp_path: Path) -> None:
    """Mean and deviation are those of the pooled training samples, per feature or per channel."""
    data = folder_of(tmp_path / "data", shape)
    raw, found = given(data), Federation.from_folder(data)
    pooled = np.concatenate([np.load(data / f"{name}.npz")["x"] for name in NAMES])[torch.cat(raw.train).numpy()]
    axes = (0, *range(2, pooled.ndim))
    assert found.scaling is not None
    np.testing.assert_allclose(found.scaling.mean, pooled.mean(axis=axes), rtol=1e-12)
    np.testing.assert_allclose(found.scaling.deviation, pooled.std(axis=axes), rtol=1e-12)
    assert (found.scaling.rows, found.scaling.scope) == (len(pooled), "federated")
    sides = (-1, *[1] * (pooled.ndim - 2))
    scaled = (pooled - pooled.mean(axis=axes).reshape(sides)) / pooled.std(axis=axes).reshape(sides)
    expected = np.clip(scaled, -CLIP, CLIP) if len(shape) == 1 else scaled
    np.testing.assert_allclose(found.x[torch.cat(found.train)].numpy(), expected, atol=1e-6)
    assert [rows.tolist() for rows in found.train] == [rows.tolist() for rows in raw.train]


def test_held_out_samples_do_not_enter(tmp_path: Path) -> None:
    """Other test samples change no mean and no deviation."""
    (x, y), (test, labels) = samples(0), samples(1, 10)
    found = []
    for k, held_out in enumerate((test, test + 1e6)):
        (tmp_path / str(k)).mkdir()
        np.savez(tmp_path / str(k) / "a.npz", x_train=x, y_train=y, x_test=held_out, y_test=labels)
        found.append(Federation.from_folder(tmp_path / str(k), validation=0.2).scaling)
    assert found[0] == found[1]


def test_joint_moments_are_those_of_tables() -> None:
    """The moments of features are joined in the agents' order by the formula of a table's columns."""
    parts = [samples(seed, 7 + seed)[0] for seed in range(4)]
    joined = feature_moments(parts[0], np.arange(0))
    for part in parts:
        joined = joined.joined(feature_moments(part, np.arange(len(part))))
    for i in range(4):
        column = joined_moments(moments(part[:, i]) for part in parts)
        assert joined.n == column.n
        assert joined.mean[i] == pytest.approx(column.mean, rel=1e-14)
        assert joined.deviation[i] == pytest.approx(column.deviation, rel=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int16])
def test_a_constant_feature_becomes_0(dtype: Any, tmp_path: Path) -> None:
    """A feature that is constant in all training samples is 0 everywhere, also if a test sample differs."""
    for k, name in enumerate(NAMES[:2]):
        x, y = samples(k, 200, scale=1)
        x[:, 1] = 0.1 if np.dtype(dtype).kind == "f" else 7
        x_test = x[:9] + 1
        arrays = {"x_train": (10 * x).astype(dtype), "x_test": (10 * x_test).astype(dtype)}
        np.savez(tmp_path / f"{name}.npz", y_train=y, y_test=y[:9], **arrays)
    found = Federation.from_folder(tmp_path)
    assert found.scaling is not None
    assert found.scaling.deviation[1] == 0
    assert found.x[:, 1].abs().max() == 0
    assert found.x.isfinite().all()


def test_blocks_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics and inputs do not depend on the number of samples that are converted at once."""
    x, _ = samples(1, 50, (3, 4))
    whole = feature_moments(x, np.arange(50))
    scaling = ArrayScaling(tuple(whole.mean.tolist()), tuple(whole.deviation.tolist()), 50)
    made = scaling.transform(x, "a")
    monkeypatch.setattr(array_scaling, "BLOCK", 25)
    parts = feature_moments(x, np.arange(50))
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=1e-13)
    np.testing.assert_allclose(parts.squares, whole.squares, rtol=1e-13)
    assert (scaling.transform(x, "a") == made).all()
    assert made.dtype == np.float32


def test_thousands_of_features_are_fast() -> None:
    """The moments of many features are computed at once."""
    x = np.random.default_rng(0).standard_normal((20, 50_000)).astype(np.float32)
    found = feature_moments(x, np.arange(20))
    assert isinstance(found, FeatureMoments)
    np.testing.assert_allclose(found.deviation, x.std(axis=0, dtype=np.float64), rtol=1e-10)


# ----------------------------------------------------------------------------------------------- scopes and interfaces


def test_local_statistics_are_each_agent_s_own(tmp_path: Path) -> None:
    """With local preprocessing each agent has its own mean; the scale of a numeric target is common."""
    data = folder_of(tmp_path / "data", regression=True)
    raw, found = given(data), Federation.from_folder(data, preprocessing="local", alice="west")
    for k, scaling in enumerate(found.scalings):
        own = np.load(data / f"{NAMES[k]}.npz")["x"]
        rows = raw.train[k].numpy() - sum(len(np.load(data / f"{n}.npz")["x"]) for n in NAMES[:k])
        np.testing.assert_allclose(scaling.mean, own[rows].mean(axis=0), rtol=1e-12)
        assert (scaling.rows, scaling.scope) == (len(rows), "local")
        expected = (own[rows] - own[rows].mean(axis=0)) / own[rows].std(axis=0)
        np.testing.assert_allclose(found.x[found.train[k]].numpy(), np.clip(expected, -CLIP, CLIP), atol=1e-6)
    assert len({(scaling.target_mean, scaling.target_deviation) for scaling in found.scalings}) == 1
    assert found.scaling == found.scalings[2]
    assert found.only(1).scalings == (found.scalings[1],)
    assert found.without("south").scalings == (found.scalings[0], found.scalings[2])
    shown = waffle(
        "run", "fedavg", "--data", data, "--preprocessing", "local", "--rounds", "1", "--out", tmp_path / "r"
    )
    assert shown.code == 0, shown.err
    assert json.loads((tmp_path / "r" / "distances.json").read_text())["feature"] is None


def test_arrays_in_python_are_used_as_given(tmp_path: Path) -> None:
    """from_arrays and from_datasets change no number unless they are asked to; then they do what a folder does."""
    data = folder_of(tmp_path / "data")
    agents = {name: tuple(np.load(data / f"{name}.npz")[key] for key in "xy") for name in NAMES}
    plain = Federation.from_arrays(agents)
    assert plain.scalings == ()
    assert plain.x.equal(torch.from_numpy(np.concatenate([x for x, _ in agents.values()])).float())
    assert plain.x.equal(given(data).x)
    asked = Federation.from_arrays(agents, preprocessing="federated")
    folder = Federation.from_folder(data)
    assert (asked.digest(), asked.scalings) == (folder.digest(), folder.scalings)
    pairs = {name: TensorDataset(*map(torch.from_numpy, pair)) for name, pair in agents.items()}
    assert Federation.from_datasets(pairs).x.equal(plain.x)
    assert Federation.from_datasets(pairs, preprocessing="local").scaling is not None


def test_tables_refuse_none(tmp_path: Path) -> None:
    """`preprocessing = "none"` is for arrays and images: for tables it is one line."""
    data = tmp_path / "tables"
    data.mkdir()
    for k, name in enumerate(NAMES):
        (data / f"{name}.csv").write_text("a,y\n" + "\n".join(f"{i + k},{'uv'[i % 2]}" for i in range(12)))
    line = "preprocessing: expected federated or local for tables, got none"
    assert line in refusal(Federation.from_folder, data, target="y", preprocessing="none")
    arguments = ["--data", data, "--target", "y", "--preprocessing", "none", "--out", tmp_path / "run"]
    assert line in shown_refusal(waffle("run", "local", *arguments))
    report = waffle("data", data, "--target", "y", "--preprocessing", "none")
    assert report.code == 2
    assert line in " ".join(report.out.split())


def test_an_agent_without_training_samples(tmp_path: Path) -> None:
    """An agent that only tests takes no part in the statistics and is scaled by them."""
    (x, y), (test, labels) = samples(0), samples(1, 10)
    np.savez(tmp_path / "a.npz", x_train=test[:0], y_train=labels[:0], x_test=test, y_test=labels)
    np.savez(tmp_path / "b.npz", x=x, y=y)
    found = Federation.from_folder(tmp_path, alice="b")
    assert found.scaling is not None
    assert found.scaling.rows == len(found.train[1])
    expected = (test - np.array(found.scaling.mean)) / np.array(found.scaling.deviation)
    np.testing.assert_allclose(found.x[found.test[0]].numpy(), np.clip(expected, -CLIP, CLIP), rtol=1e-6)
    local = Federation.from_folder(tmp_path, alice="b", preprocessing="local")
    assert local.x[local.test[0]].abs().max() == 0


def test_a_value_far_from_the_training_samples_is_refused(tmp_path: Path) -> None:
    """A test value whose standardised number is beyond float32 is an error that names agent and sample."""
    x, y = samples(0)
    test = x[:3].copy()
    test[2, 1] = 1e38
    np.savez(tmp_path / "a.npz", x_train=x * 1e-30, y_train=y, x_test=test, y_test=y[:3])
    assert "a: a value of the sample at index 62 is too far from" in refusal(Federation.from_folder, tmp_path)


def test_images_are_standardised_per_channel(tmp_path: Path) -> None:
    """Images of folders get a mean of 0 and a deviation of 1 per channel; none leaves them between -1 and 1."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name in NAMES[:2]:
        for k, kind in enumerate(("cat", "dog")):
            folder = tmp_path / "data" / name / kind
            folder.mkdir(parents=True)
            for i in range(6):
                pixels = rng.integers(40 * k, 60 + 100 * k, (5, 5, 3)).astype(np.uint8)
                image.fromarray(pixels).save(folder / f"{i}.png")
    found = Federation.from_folder(tmp_path / "data")
    rows = found.x[torch.cat(found.train)]
    torch.testing.assert_close(rows.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std(dim=(0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)
    assert given(tmp_path / "data").x.abs().max() <= 1


def test_a_scaling_survives_json(tmp_path: Path) -> None:
    """A scaling read from its JSON is the same; other fields, types or impossible values are refused in one line."""
    found = Federation.from_folder(folder_of(tmp_path / "data", regression=True)).scaling
    assert found is not None
    content = json.loads(json.dumps(found.to_json()))
    assert ArrayScaling.from_json(content) == found
    for changes in (
        *({"mean": found.mean[1:]}, {"mean": "1234"}, {"mean": [float("nan")] * 4}, {"mean": [10**400] * 4}),
        *({"deviation": [-1.0] * 4}, {"deviation": [float("inf")] * 4}, {"target_deviation": 0.0}, {"mean": None}),
        *({"rows": 1.5}, {"rows": -1}, {"scope": "none"}, {"target_mean": "0"}, {"more": 1}, {"scope": []}),
        *({"clip": 0}, {"clip": "3"}, {"clip": float("nan")}),
    ):
        assert "expected a scaling as saved in a run folder" in refusal(ArrayScaling.from_json, {**content, **changes})
    assert "fields differ" in refusal(ArrayScaling.from_json, {"mean": []})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "inputs are standardised per channel with the mean and deviation of all agents' training samples"),
        (["--preprocessing", "local"], "with the mean and deviation of each agent's own training samples"),
        (["--preprocessing", "none"], "inputs are used as given"),
    ],
)
def test_data_says_how_arrays_are_scaled(options: list[str], words: str, tmp_path: Path) -> None:
    """`waffle data` on a folder of arrays states the scaling, and has its numbers in JSON."""
    data = folder_of(tmp_path / "data", (2, 5))
    assert words in " ".join(waffle("data", data, *options).out.split())
    facts = strict(waffle("data", data, "--json", *options).out)
    assert facts["preprocessing"] == (options[1] if options else "federated")
    assert len(facts["scaling"]) == (0 if "none" in options else 3)


# ----------------------------------------------------------------------------------------------- training and inference


def test_features_of_any_scale_train(tmp_path: Path) -> None:
    """Features of sizes from 1 to 10,000 train to a good model, and raw ones do not."""
    data = folder_of(tmp_path / "data")
    run = read_run(trained(data, tmp_path / "run"))
    assert run.result["metrics"]["accuracy"] >= 0.8
    raw_settings = ("--preprocessing", "none", "--training", "given", "--out", tmp_path / "raw")
    shown = waffle(*RUN, "--data", data, *raw_settings)
    raw = json.loads((tmp_path / "raw" / "result.json").read_text())
    assert shown.code != 0 or raw["status"] == "diverged" or raw["metrics"]["accuracy"] < 0.8
    assert not (tmp_path / "raw" / "scaling.json").exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on features, on signals in float64, on bytes with channels last, with local scaling, and on a number."""
    folder = tmp_path_factory.mktemp("runs")
    folder_of(folder / "features-data")
    folder_of(folder / "local-data")
    folder_of(folder / "signals-data", (3, 16))
    folder_of(folder / "number-data", regression=True, scale=10)
    (folder / "bytes-data").mkdir()
    for seed, name in enumerate(NAMES):
        rng = np.random.default_rng(seed)
        y = np.arange(40) % 2
        x = rng.integers(0, 100, (40, 8, 8, 3)) + 100 * y[:, None, None, None]
        np.savez(folder / "bytes-data" / f"{name}.npz", x=x.astype(np.uint8), y=y)
    more = {"local": ["--preprocessing", "local"], "signals": ["--precision", "float64"]}
    for kind in KINDS:
        trained(folder / f"{kind}-data", folder / kind, "--rounds", "3", *more.get(kind, []))
    return folder


KINDS = ("features", "local", "signals", "number", "bytes")


def raw_test_samples(runs: Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return Alice's test samples and targets as they are in her file."""
    federation = given(runs / f"{kind}-data", alice="south")
    rows = federation.test[1].numpy() - len(np.load(runs / f"{kind}-data" / "north.npz")["x"])
    content = np.load(runs / f"{kind}-data" / "south.npz")
    return content["x"][rows], content["y"][rows]


@pytest.mark.parametrize("kind", KINDS)
def test_raw_samples_give_the_predictions_of_the_run(runs: Path, kind: str, tmp_path: Path) -> None:
    """`waffle predict` takes the arrays of the files and gives the run's own predictions and metrics."""
    x, y = raw_test_samples(runs, kind)
    recorded = load_file(runs / kind / "predictions.safetensors")
    np.savez(tmp_path / "new.npz", x=x, y=y)
    printed = strict(waffle("predict", runs / kind, tmp_path / "new.npz", "--json").out)
    metrics = read_run(runs / kind).result["metrics"]
    assert printed["metrics"] == pytest.approx(metrics, rel=1e-6)
    if kind == "number":
        values = [p["prediction"] for p in printed["predictions"]]
        assert values == pytest.approx(recorded["output"].view(-1).tolist(), rel=1e-9)
        np.testing.assert_allclose(recorded["target"].numpy(), y, rtol=1e-5)
        return
    found = torch.tensor([list(p["probabilities"].values()) for p in printed["predictions"]])
    torch.testing.assert_close(found.double(), recorded["output"].double().softmax(dim=1), rtol=0, atol=1e-6)
    assert recorded["target"].tolist() == y.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_s_inputs_are_exactly_those_of_the_run(runs: Path, kind: str) -> None:
    """The scaling in front of the module gives the numbers on which the run was evaluated, bit for bit."""
    run = open_run(runs / kind)
    assert run.scaling is not None
    options = {"preprocessing": "local"} if kind == "local" else {}
    federation = Federation.from_folder(runs / f"{kind}-data", alice="south", **options)
    assert run.scaling == federation.scaling
    x, _ = raw_test_samples(runs, kind)
    x = x.transpose(0, 3, 1, 2) / np.float32(127.5) - 1 if kind == "bytes" else x
    first = next(m for m in run.module.modules() if type(m).__name__ == "StandardisedInput")
    assert first(torch.from_numpy(x.copy())).float().equal(federation.x[federation.test[1]])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("form", ["exported", "torchscript", "onnx"])
@pytest.mark.parametrize("kind", ["features", "bytes", "number"])
def test_exported_programs_include_the_scaling(runs: Path, kind: str, form: Any, tmp_path: Path) -> None:
    """Every exported program takes raw numbers and returns the model's outputs, in the unit of the target."""
    run = open_run(runs / kind)
    x = torch.from_numpy(raw_test_samples(runs, kind)[0]).float()
    x = x.permute(0, 3, 1, 2) / 127.5 - 1 if kind == "bytes" else x
    if form == "onnx":
        for package in ("onnx", "onnxscript"):
            pytest.importorskip(package, reason=f"--format onnx needs {package}")
    _, program, _ = export(run, tmp_path, form)
    output = output_of(program, x.contiguous())
    torch.testing.assert_close(output, run.outputs(x), rtol=1e-5, atol=1e-5)
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["input"]["preprocessing"]["mean"] == list(run.scaling.mean if run.scaling else ())
    assert "in the exported programs" in card["input"]["preprocessing"]["included"]
    assert ("standardised" in card["output"]) == (kind == "number")


def test_a_regression_is_reported_in_the_unit_of_the_target(runs: Path) -> None:
    """Targets are standardised for training; the record, the predictions and the reference are in their unit."""
    federation = Federation.from_folder(runs / "number-data", alice="south", validation=0.2)
    mean, deviation = federation.target_scale(1)
    assert (mean, deviation) != (0, 1)
    assert federation.unit == deviation
    trained_targets = federation.y[torch.cat(federation.train)].double()
    assert abs(float(trained_targets.mean())) < 1e-6
    assert float(trained_targets.std(correction=0)) == pytest.approx(1, rel=1e-6)
    run = read_run(runs / "number")
    recorded = load_file(runs / "number" / "predictions.safetensors")
    errors = recorded["output"].view(-1) - recorded["target"]
    rmse = float(errors.square().mean().sqrt())
    assert run.result["last"]["rmse"] == pytest.approx(rmse, rel=1e-5)
    assert rmse < 0.8 * float(recorded["target"].std())
    reference = fit_reference(federation, 1)
    assert reference is not None
    truth = mean + deviation * federation.y[federation.test[1]].double().numpy()
    np.testing.assert_allclose(reference.target, truth)
    assert np.abs(reference.output[:, 0] - truth).max() < 1


def test_large_targets_keep_their_precision(tmp_path: Path) -> None:
    """Targets far from 0, such as times in seconds, are standardised before they are rounded to float32."""
    data = tmp_path / "data"
    data.mkdir()
    for seed, name in enumerate(NAMES):
        x, _ = samples(seed)
        np.savez(data / f"{name}.npz", x=x, y=1.7e9 + 2 * x[:, 0])
    run = read_run(trained(data, tmp_path / "run"))
    recorded = load_file(tmp_path / "run" / "predictions.safetensors")
    federation = given(data, alice="south")
    y = np.load(data / "south.npz")["y"][federation.test[1].numpy() - 60]
    np.testing.assert_allclose(recorded["target"].numpy(), y, rtol=0, atol=1e-5)
    assert run.result["metrics"]["rmse"] < 2


def test_a_scaling_of_another_shape_is_refused(runs: Path, tmp_path: Path) -> None:
    """A run folder whose scaling does not fit its model is refused in one line."""
    content = json.loads((runs / "features" / "scaling.json").read_text())
    changed = {**content, "mean": content["mean"][:2], "deviation": content["deviation"][:2]}
    copy = tmp_path / "run"
    copy.mkdir()
    for path in (p for p in (runs / "features").iterdir() if p.is_file()):
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "scaling.json").write_text(json.dumps(changed))
    assert "scaling.json" in refusal(open_run, copy)
    with pytest.warns(UserWarning, match=r"scaling\.json"):
        assert "scaling.json has 2 means" in refusal(open_run, copy, force=True)


def test_estimators_take_raw_samples_of_a_scaled_federation(runs: Path) -> None:
    """An estimator that was fitted on a folder's federation predicts the arrays as they are in the files."""
    federation = Federation.from_folder(runs / "features-data", alice="south")
    x, y = raw_test_samples(runs, "features")
    fitted = PersonalizedClassifier(rounds=20, batch_size=8).fit(federation)
    assert fitted.score(x, y) == fitted.history_[-1]["accuracy"]
    number = Federation.from_folder(runs / "number-data", alice="south")
    x, y = raw_test_samples(runs, "number")
    regressor = PersonalizedRegressor(rounds=5, batch_size=8).fit(number)
    rmse = float(np.sqrt(np.mean((regressor.predict(x) - y) ** 2)))
    assert rmse == pytest.approx(regressor.history_[-1]["rmse"], rel=1e-4)
    assert regressor.unit_ == number.unit


def test_a_classification_has_no_scale_of_the_target(runs: Path) -> None:
    """Classes are not scaled, also in a federation without any scaling."""
    federation = Federation.from_folder(runs / "features-data")
    assert federation.target_scale(0) == (0.0, 1.0)
    assert replace(federation, scalings=()).target_scale(0) == (0.0, 1.0)


def test_a_missing_scaling_is_refused(runs: Path, tmp_path: Path) -> None:
    """Without its scaling a model would predict nonsense; a run of an earlier version used its arrays as given."""
    copy = tmp_path / "run"
    copy.mkdir()
    for path in (p for p in (runs / "features").iterdir() if p.is_file() and p.name != "scaling.json"):
        (copy / path.name).write_bytes(path.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "has no scaling.json: the model takes standardised inputs" in refusal(open_run, copy, force=True)
        about = json.loads((copy / "provenance.json").read_text())
        about["binding"]["results_version"] = 3
        (copy / "provenance.json").write_text(json.dumps(about))
        assert open_run(copy, force=True).scaling is None
