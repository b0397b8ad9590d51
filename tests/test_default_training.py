"""Training on the user's own data: what is chosen on validation data, and the references beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import references
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cli_support import waffle
from conftest import refusal
from test_budget import write_images
from waffle_fl.config import RunConfig, Settings
from waffle_fl.decision import budget, verdict_text
from waffle_fl.decision.bootstrap import Interval
from waffle_fl.decision.measurement import TUNED, shortened_options
from waffle_fl.decision.references import Reference, fit_reference, fit_references
from waffle_fl.decision.study import ComparedReference, Standing, View
from waffle_fl.experiment import Listener, Runtime, all_alices_of, execute
from waffle_fl.federation import Federation
from waffle_fl.models import builder, cnn_1d_gn, cnn_gn, cnn_pooled_gn
from waffle_fl.records import read_rounds
from waffle_fl.tensorfile import read_named, read_shapes
from waffle_fl.tuning import default_training
from waffle_fl.tuning.default_training import (
    ChosenTraining,
    choose_training,
    given_settings,
    grid_for,
    has_rare_classes,
    joint_training,
    rounds_for,
)
from waffle_fl.tuning.trial_scores import ValidationScore, best_candidate, best_first, common_round, own_rounds
from waffle_fl.tuning.trials import validation_samples
from waffle_fl.user_data.array_checks import model_inputs


def write_tables(folder: Path, rows: int = 60) -> Path:
    """Two hospitals whose outcome depends on the first of three columns."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        x = rng.normal(size=(rows, 3))
        lines = [f"{a:.4f},{b:.4f},{c:.4f},{'ill' if a > 0 else 'well'}" for a, b, c in x]
        (folder / f"{name}.csv").write_text("\n".join(["age,dose,size,outcome", *lines]) + "\n")
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables") / "hospitals")


@pytest.fixture(scope="module")
def settings(tables: Path) -> Settings:
    return Settings(data=str(tables), target="outcome", alice="all")


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two candidates and few rounds: enough to see which one is chosen."""
    monkeypatch.setattr(default_training, "TABLES", ({"model": "linear", "lr": 1e-6}, {"model": "linear", "lr": 0.05}))
    monkeypatch.setattr(default_training, "STEPS", 10)
    monkeypatch.setattr(default_training, "FEWEST_ROUNDS", 3)
    monkeypatch.setattr(default_training, "MOST_ROUNDS", 6)


@pytest.mark.usefixtures("small_grid")
def test_the_better_candidate_is_chosen_on_validation_data(settings: Settings, tmp_path: Path) -> None:
    """Of a step size that learns nothing and one that learns, the second is chosen for both methods."""
    methods = ["local", "fedavg"]
    training = choose_training(settings, methods, {}, (), tmp_path, Runtime(), Listener())
    for method in methods:
        assert training.chosen[method]["lr"] == 0.05
        assert training.scores[method][1][1].accuracy > training.scores[method][0][1].accuracy
        run = training.applied(RunConfig(method=method, settings=settings)).settings
        assert (run.optimiser, run.final_model, run.validation, run.lr) == ("adam", "selected", 0.0, 0.05)
        assert 1 <= run.final_round <= run.rounds
    other = training.applied(RunConfig(method="waffle", settings=settings)).settings
    assert other.lr == 0.05  # a method that was not tried trains as FedAvg does
    assert 3 <= training.rounds <= 6
    assert "lr 0.05" in training.text()


@pytest.mark.usefixtures("small_grid")
def test_the_weights_of_a_mixture_come_from_the_trial(settings: Settings, tmp_path: Path) -> None:
    """The final run has no validation rows; each Alice keeps the weights of her mixture in the chosen trial."""
    training = choose_training(settings, ["local", "waffle"], {}, (), tmp_path / "t", Runtime(), Listener())
    assert list(training.part_weights) == ["waffle"]
    found = training.part_weights["waffle"]
    assert sorted(found) == ["north", "south"]
    assert found["north"] != found["south"]
    config = training.applied(RunConfig(method="waffle", settings=replace(settings, alice="south")))
    execute([(config, tmp_path / "run")], Runtime(), Listener())
    file = tmp_path / "run" / "model.safetensors"
    stored = read_named(file, tuple(read_shapes(file)))["mixture.weights"]
    assert stored.tolist() == list(found["south"])
    assert RunConfig.from_json(config.to_json()).algorithm() == config.algorithm()


@pytest.mark.parametrize(
    ("found", "samples", "best"),
    [
        ([(0.90, 0.5), (0.91, 0.9)], 100, 0),  # within the standard error of 2.9 points: the loss decides
        ([(0.90, 0.5), (0.91, 0.9)], 10_000, 1),
        ([(0.0, 3.0), (0.0, 2.0)], 100, 1),  # regression
        ([(-1.0, 1e9), (0.4, 1.0)], 20, 1),  # the first diverged
    ],
)
def test_the_loss_decides_between_equal_accuracies(found: list[tuple[float, float]], samples: int, best: int) -> None:
    assert best_candidate([ValidationScore(*pair) for pair in found], samples) == best


def test_candidates_are_ordered_by_repeated_choice() -> None:
    """The second is the best of the others: with the least loss among those that are close in accuracy."""
    found = [ValidationScore(*pair) for pair in ((0.5, 1.0), (0.9, 0.8), (0.91, 0.9), (0.6, 0.1))]
    assert best_first(found, 100) == [1, 2, 3, 0]


@pytest.mark.usefixtures("small_grid")
def test_rare_classes_select_the_round_by_its_loss(tmp_path: Path) -> None:
    """If one class is rare, the common round is the one with the least mean validation loss, and its model is saved."""
    rng = np.random.default_rng(0)
    (tmp_path / "rare").mkdir()
    for name in ("a", "b"):
        y = (np.arange(120) % 10 == 0).astype(np.int64)
        np.savez(tmp_path / "rare" / f"{name}.npz", x=rng.standard_normal((120, 3)) + y[:, None], y=y)
    s = Settings(data=str(tmp_path / "rare"), rounds=5, alice="all")
    assert has_rare_classes(all_alices_of(s, Runtime()))
    training = choose_training(s, ["local"], {}, ("rounds",), tmp_path / "t", Runtime(), Listener())
    run = training.applied(RunConfig(method="local", settings=replace(s, alice="a")))
    assert (run.settings.selected_by, run.settings.validation) == ("loss", 0.0)
    trials = (tmp_path / "t" / "candidate-1").glob("*/rounds.jsonl")
    losses = np.array([[line["validation_loss"] for line in read_rounds(path)] for path in trials])
    assert run.settings.final_round == losses.mean(axis=0).argmin() + 1
    (result,) = execute([(run, tmp_path / "run")], Runtime(), Listener())
    assert result["selected"]["round"] == run.settings.final_round
    lines = read_rounds(tmp_path / "run" / "rounds.jsonl")
    assert result["selected"]["accuracy"] == lines[run.settings.final_round - 1]["accuracy"]


@pytest.mark.parametrize("final_round", [1, 2])
def test_the_model_of_a_given_round_is_saved(settings: Settings, tmp_path: Path, final_round: int) -> None:
    """The predictions are those of a run that ends with that round."""
    chosen = {
        "given": replace(settings, rounds=3, final_model="selected", final_round=final_round),
        "short": replace(settings, rounds=final_round),
    }
    runs = [(RunConfig(method="fedavg", settings=s), tmp_path / name) for name, s in chosen.items()]
    execute(runs, Runtime(), Listener())
    given, short = (
        read_named(folder / "predictions.safetensors", ("output", "target"))["output"] for _, folder in runs
    )
    assert torch.equal(given, short)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"final_model": "selected", "final_round": 4}, "final_round: expected at most the number of rounds, 3, got 4"),
        ({"final_round": 2}, "final_round: expected 0 unless final_model is selected, got 2"),
    ],
)
def test_an_impossible_final_round_is_refused(
    settings: Settings, tmp_path: Path, more: dict[str, Any], expected: str
) -> None:
    config = RunConfig(method="local", settings=replace(settings, rounds=3, **more))
    assert expected in refusal(execute, [(config, tmp_path / "run")], Runtime(), Listener())


@pytest.mark.parametrize("best_round", [common_round, own_rounds])
def test_a_candidate_that_diverges_is_the_worst(settings: Settings, tmp_path: Path, best_round: Any) -> None:
    """A candidate is the worst if one of its runs ends before the last round, however good the others are."""
    config = RunConfig(method="local", settings=replace(settings, rounds=3))
    for name, rounds in (("whole", 3), ("short", 1)):
        (tmp_path / name).mkdir()
        lines = [{"round": r + 1, "validation_accuracy": 1.0, "validation_loss": 0.1 * r} for r in range(rounds)]
        (tmp_path / name / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, short = (config, tmp_path / "whole"), (config, tmp_path / "short")
    assert best_round([whole], 3).round == 1
    assert best_round([whole, short], 3).score.accuracy == -1
    assert best_candidate([best_round([whole, short], 3).score, ValidationScore(0.5, 2.0)], 10) == 1


def write_series(folder: Path) -> Path:
    """Two agents with 40 short series of two classes each."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        y = np.arange(40) % 2
        np.savez(folder / f"{name}.npz", x=rng.standard_normal((40, 2, 8)) + y[:, None, None], y=y)
    return folder


@pytest.mark.usefixtures("small_grid")
def test_expensive_candidates_are_compared_after_half_of_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All candidates train for half of the rounds, and only the best one to the end; its final round may be later."""
    monkeypatch.setattr(budget, "TRIALS", 1)
    monkeypatch.setattr(default_training, "SERIES", ({"lr": 1e-6}, {"lr": 0.01}))
    s = Settings(data=str(write_series(tmp_path / "series")), alice="all", rounds=4)
    methods = ["local", "fedavg", "waffle"]
    training = choose_training(s, methods, {}, ("rounds",), tmp_path / "t", Runtime(), Listener())
    assert list(training.scores) == ["local", "fedavg"]
    assert training.reduced == (budget.TRIED.format("Local and FedAvg", "FedAvg"),)
    for method in ("local", "fedavg"):
        assert training.chosen[method]["lr"] == 0.01
        logs = {
            k: [len(read_rounds(path)) for path in (tmp_path / "t" / f"candidate-{k}").glob(f"*{method}*/rounds.jsonl")]
            for k in (0, 1)
        }
        assert logs == {0: [2, 2], 1: [4, 4]}
        assert 1 <= training.chosen[method]["final_round"] <= 4


@pytest.mark.usefixtures("small_grid")
def test_expensive_augmentation_is_chosen_per_method_and_rounds_end_with_the_last_used_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates that differ in augmentation are compared for each method, the better two after all rounds.

    The rounds are doubled at once. They end with the later of the two selected rounds,
    after the fewest allowed.
    """
    monkeypatch.setattr(budget, "TRIALS", 1)
    data = write_images(tmp_path / "images")
    s, folder = Settings(data=str(data), alice="all"), tmp_path / "t"
    methods, options = ["local", TUNED], {TUNED: {"tuning": 2}}
    training = choose_training(s, methods, options, (), folder, Runtime(workers=1), Listener())
    assert (list(training.scores), training.reduced) == (methods, ())
    assert all(len(scores) == 3 for scores in training.scores.values())
    lengths = {
        method: sorted(len(read_rounds(path)) for path in folder.glob(f"*/*{method}*/rounds.jsonl"))
        for method in methods
    }
    ended = [3, 3, 6, 6, 6, 6]  # two of three candidates end; two agents
    assert lengths == {"local": ended, TUNED: ended}
    last = max(training.chosen[m]["final_round"] for m in methods)
    assert training.rounds == max(3, last)
    assert training.options == shortened_options(options, 6 - training.rounds)


@pytest.mark.usefixtures("small_grid")
def test_joint_models_of_images_average_the_moments_in_smaller_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedAvg+FT trains so in the trials and afterwards; Local and a method that was not tried train as before."""
    monkeypatch.setattr(budget, "TRIALS", 1)
    s = Settings(data=str(write_images(tmp_path / "images")), alice="all")
    methods = ["local", TUNED, "waffle"]
    training = choose_training(s, methods, {TUNED: {"tuning": 2}}, (), tmp_path / "t", Runtime(workers=1), Listener())
    shapes = {}
    for method in methods:
        found = training.applied(RunConfig(method=method, settings=s)).settings
        shapes[method] = (found.batch_size, found.momentum_between_rounds)
    assert shapes == {"local": (32, "keep"), TUNED: (16, "average"), "waffle": (32, "keep")}
    for path in (tmp_path / "t").glob("*/*/config.json"):
        config = json.loads(path.read_text())
        tried = config["settings"]["batch_size"], config["settings"]["momentum_between_rounds"]
        assert tried == shapes[config["method"]]


@pytest.mark.parametrize(
    ("more", "options", "given", "expected"),
    [
        ({}, {}, (), {"momentum_between_rounds": "average", "batch_size": 16}),
        ({"batch_size": 12}, {}, (), {"momentum_between_rounds": "average", "batch_size": 8}),
        ({"batch_size": 5}, {}, (), {"momentum_between_rounds": "average", "batch_size": 5}),
        ({}, {}, ("batch_size",), {"momentum_between_rounds": "average"}),
        ({}, {}, ("momentum_between_rounds",), {"batch_size": 16}),
        ({"privacy": "masked"}, {}, (), {}),
        ({"attack": "sign-flip"}, {}, (), {}),
        ({"participation": 0.5}, {}, (), {}),
        ({}, {"fedavg": {"aggregation": "median"}}, (), {}),
    ],
)
def test_joint_training_follows_the_agents_and_keeps_what_is_given(
    tmp_path: Path, more: dict[str, Any], options: Any, given: tuple[str, ...], expected: dict[str, Any]
) -> None:
    """Two agents halve the batch of 32, with at least 8 images. Series and tables train as before."""
    s = Settings(data=str(write_images(tmp_path / "images")), alice="all")
    federation = all_alices_of(s, Runtime())
    assert joint_training(replace(s, **more), federation, options, given) == expected
    assert joint_training(s, replace(federation, x=federation.x.flatten(2)), {}, ()) == {}


@pytest.mark.parametrize(("cut", "tuning"), [(0, 5), (2, 3), (7, 1)])
def test_a_shorter_training_tunes_in_the_same_rounds(settings: Settings, cut: int, tuning: int) -> None:
    """Agents tune alone from the same round as in the trials, if rounds after the last one whose model is used are cut.

    Applying a choice twice changes nothing more."""
    given = {TUNED: {"tuning": 5, "weighting": "equal"}}
    training = ChosenTraining(26 - cut, {}, {}, options=shortened_options(given, cut))
    config = training.applied(RunConfig(method=TUNED, settings=settings, options=given[TUNED]))
    assert config.options == training.applied(config).options == {"tuning": tuning, "weighting": "equal"}
    assert training.applied(RunConfig(method="waffle", settings=settings)).options == {}
    assert shortened_options({}, cut) == {}


def test_ditto_is_left_out_if_training_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default methods of `decide` have no Ditto on expensive data, unless the user sets its options."""
    monkeypatch.setattr(budget, "TRIALS", 1)
    folder = write_series(tmp_path / "series")
    common = ("decide", folder, "--rounds", "1", "--seeds", "1", "--training", "given", "--out")
    shown = waffle(*common, tmp_path / "short", "--json")
    assert f"note: {budget.WITHOUT}" in shown.err
    assert not list((tmp_path / "short").glob("*ditto*"))
    shown = waffle(*common, tmp_path / "long", "--json", "--options", "ditto.lam=0.5")
    assert shown.code == 0
    assert list((tmp_path / "long").glob("*ditto*"))


def test_trials_score_validation_rows_and_no_test_rows(settings: Settings) -> None:
    """With test = none every agent's test rows are its validation rows, which are scored once; without any it ends."""
    held = replace(settings, validation=0.2)
    found, usual = (all_alices_of(replace(held, test=test), Runtime()) for test in ("none", "share"))
    assert all(rows is found.validation[i] for i, rows in enumerate(found.test))
    assert [r.tolist() for r in found.train] == [r.tolist() for r in usual.train]


def test_only_rows_of_the_trained_agents_count(settings: Settings) -> None:
    """The standard error of a single Alice's accuracy follows from her own validation rows."""
    held_out = replace(settings, validation=0.2)
    names = all_alices_of(held_out, Runtime()).names
    each = [validation_samples(replace(held_out, alice=name), Runtime()) for name in names]
    assert min(each) > 0
    assert sum(each) == validation_samples(held_out, Runtime())


@pytest.mark.usefixtures("small_grid")
def test_given_settings_are_kept(settings: Settings, tmp_path: Path) -> None:
    """Rounds and validation share that the user gives are not changed."""
    given = replace(settings, rounds=2, validation=0.3)
    training = choose_training(given, ["local"], {}, ("rounds", "validation"), tmp_path, Runtime(), Listener())
    run = training.applied(RunConfig(method="local", settings=given)).settings
    assert (run.rounds, run.validation) == (2, 0.3)


def test_the_grid_depends_on_the_data(settings: Settings) -> None:
    """Tables try a linear model and an MLP; a given network is kept; images try learning rates only."""
    federation = all_alices_of(settings, Runtime())
    assert {c["model"] for c in grid_for(settings, federation)} == {"linear", "mlp"}
    assert {c["model"] for c in grid_for(replace(settings, model="mlp"), federation)} == {"mlp"}
    images = replace(federation, x=torch.zeros(4, 3, 8, 8))
    assert not any("model" in c for c in grid_for(settings, images))
    assert rounds_for(settings, federation) == 160  # two mini-batches per round


def test_flags_on_the_command_line_are_recognised() -> None:
    """Flags with a value after a space or an equals sign count as given."""
    assert given_settings(["folder", "--lr", "0.1", "--weight-decay=0.2", "--seeds", "1"]) == ["lr", "weight_decay"]
    assert given_settings(["folder", "--batch-size", "8"]) == ["batch_size"]


@pytest.mark.usefixtures("small_grid")
def test_decide_chooses_training_and_shows_a_reference(tables: Path, tmp_path: Path) -> None:
    """`waffle decide` on tables chooses its training, says so, and compares training alone with scikit-learn."""
    out = tmp_path / "d"
    line = ["decide", tables, "--target", "outcome", "--methods", "fedavg", "--seeds", "1", "--partners", "none"]
    shown = waffle(*line, "--workers", "1", "--out", out)
    assert shown.code == 0, shown.err
    assert "training chosen on validation data" in shown.err
    assert "on north&#x27;s data alone has" in (out / "decision.html").read_text()
    (record,) = (tmp_path / ".training").glob("*/training.json")
    assert json.loads(record.read_text())["chosen"]["local"]["lr"] == 0.05
    config = json.loads(next(out.glob("*local-1-north/config.json")).read_text())
    assert (config["settings"]["optimiser"], config["settings"]["final_model"]) == ("adam", "selected")


# ---------------------------------------------------------------------------------------------------------- references


def test_a_reference_is_scikit_learn_on_the_agents_own_rows(settings: Settings) -> None:
    """The predictions are those of the chosen estimator, fitted on training and validation rows of that agent."""
    federation = all_alices_of(replace(settings, validation=0.2), Runtime())
    found = fit_reference(federation, 0)
    assert found is not None
    rows = torch.cat([federation.train[0], federation.validation[0]])
    x, y, test = federation.x[rows].numpy(), federation.labels(0, rows).numpy(), federation.test[0]
    estimators = {
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)),
        "gradient boosting": HistGradientBoostingClassifier(random_state=0),
    }
    expected = estimators[found.name].fit(x, y).predict(federation.x[test].numpy())
    assert (found.output.argmax(axis=1) == expected).all()
    assert (found.output.argmax(axis=1) == found.target).mean() > 0.8
    again = Reference.from_json(json.loads(json.dumps(found.to_json())))
    assert (again.output.argmax(axis=1) == found.output.argmax(axis=1)).all()


def test_agents_without_validation_rows_have_no_reference(settings: Settings) -> None:
    """Without validation rows no estimator can be chosen."""
    assert fit_references(all_alices_of(settings, Runtime()), [0, 1]) == {}


def test_a_regression_reference_is_in_the_unit_of_the_target() -> None:
    """On a linear target the reference predicts the numbers themselves."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)).astype(np.float32)
    y = (100 + 10 * x[:, 0]).astype(np.float32)
    federation = Federation.from_arrays({"a": (x, y)}, task="regression", validation=0.2)
    found = fit_reference(federation, 0)
    assert found is not None
    assert found.name == "ridge regression"
    assert np.abs(found.output[:, 0] - found.target).max() < 1


def test_the_page_shows_the_record_of_references() -> None:
    """The example page has one row per data set of results/references.jsonl, and says whether the goal is reached."""
    root = Path(__file__).parent.parent
    lines = [json.loads(line) for line in (root / "results" / "references.jsonl").read_text().splitlines()]
    assert references.content(lines) in (root / "docs" / "examples" / "training-alone.md").read_text()
    usps = next(line for line in lines if line["data"] == "digit-domains")["by_agent"]["usps"]
    assert usps >= 91


@pytest.mark.parametrize(("low", "opening"), [(0.01, "Training alone is weak here"), (-0.05, "For reference")])
def test_a_weak_baseline_is_said(low: float, opening: str) -> None:
    """If the reference is clearly better than training alone, the page says so and what to try."""
    alone = Standing("local", {"accuracy": Interval(0.8, 0.7, 0.9)}, {}, (0.8,))
    compared = ComparedReference("logistic regression", 0.9, Interval(0.1, low, 0.2))
    view = View("north", 40, 20, (10, 10), {"local": alone}, {}, reference=compared)
    (sentence,) = verdict_text.reference(view, "accuracy")
    assert sentence.startswith(opening)
    assert "logistic regression on north's data alone has 90.0 %, the model trained alone 80.0 %" in sentence
    assert verdict_text.reference(replace(view, reference=None), "accuracy") == []


# ------------------------------------------------------------------------------------------------- networks and arrays


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 28, 28), (3, 64, 48), (1, 1, 1)])
@pytest.mark.parametrize("network", [cnn_pooled_gn, cnn_gn])
def test_the_image_network_takes_any_size(network: Any, shape: tuple[int, ...]) -> None:
    """Images of any size give one output per class, without running statistics."""
    net = network(shape, 5)
    assert net(torch.zeros(2, *shape)).shape == (2, 5)
    assert not list(net.buffers())


def test_the_image_network_normalises_what_is_pooled() -> None:
    """The default network pools before it normalises, twice or until 2,048 features are left.

    The earlier one normalises first and ends at 4 x 4 pixels.
    """
    networks = (cnn_pooled_gn, cnn_gn)
    kinds = [[type(part).__name__ for part in network((3, 8, 8), 5)][:4] for network in networks]
    assert kinds == [["Conv2d", "MaxPool2d", "GroupNorm", "ReLU"], ["Conv2d", "GroupNorm", "MaxPool2d", "ReLU"]]
    features = [[network((3, size, size), 5)[-1].in_features for size in (8, 16, 32, 64)] for network in networks]
    assert features == [
        [32 * 2 * 2, 32 * 4 * 4, 32 * 8 * 8, 64 * 4 * 4],
        [16 * 4 * 4, 32 * 4 * 4, 64 * 4 * 4, 64 * 4 * 4],
    ]


@pytest.mark.parametrize("shape", [(9, 128), (1, 7)])
def test_the_network_for_series_takes_any_length(shape: tuple[int, ...]) -> None:
    """Series of any length give one output per class."""
    assert cnn_1d_gn(shape, 3)(torch.zeros(2, *shape)).shape == (2, 3)


def test_normalised_networks_are_the_default_of_user_data() -> None:
    """Your own images and series train networks with group normalisation."""
    for shape in ((3, 16, 16), (9, 128)):
        module = builder("auto", "my-folder", shape, 4)()
        assert any(isinstance(part, torch.nn.GroupNorm) for part in module.modules())


def test_bytes_and_channels_of_arrays() -> None:
    """Bytes become numbers from -1 to 1, grey images get a channel, and channels that come last come first."""
    photos = np.zeros((2, 8, 6, 3), np.uint8)
    photos[0, 1, 2, 0] = 255
    found = model_inputs(photos)
    assert (found.shape, found.dtype, found[0, 0, 1, 2], found[0, 1, 1, 2]) == ((2, 3, 8, 6), np.float32, 1.0, -1.0)
    assert model_inputs(np.zeros((2, 8, 6), np.uint8)).shape == (2, 1, 8, 6)
    first = np.zeros((2, 3, 8, 3), np.float32)
    assert model_inputs(first) is first  # ambiguous: taken as it is
    assert model_inputs(np.zeros((2, 9, 128), np.float32)).shape == (2, 9, 128)
