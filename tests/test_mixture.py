"""The mixture of predictions of WAFFLE: its training, its weights, its predictions, and what refuses it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.mixture_page import page
from benchmarks.one_waffle import PAGE, RECORD, Rule, rules, tables, with_pseudo_test

import test_contract
from conftest import BATCH, fitted, make_federation, make_model, outcomes_of, refusal, shared_model
from reference.collaboration import nearest
from reference.mixture import em, projected_descent, softmax
from test_newcomers import joined
from test_optimiser_options import (
    AGENTS,
    ALICE,
    check_engines_and_twin,
    check_resumes_and_site,
    reference,
    rounds_of,
    same_bits,
)
from waffle_fl import SGD, Adam, FedAvg, Federation, Local, RunSpec, Waffle
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.algorithms.mixture import (
    ITERATIONS,
    PARTS,
    PRIOR,
    class_weights,
    mixed,
    part_predictions,
    value_weights,
    weights_of,
)
from waffle_fl.cli import _run as waffle
from waffle_fl.config import check_run
from waffle_fl.engines.evaluation import predictor_of
from waffle_fl.engines.mixed_outputs import models_in
from waffle_fl.engines.run_spec import own_net
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment.factories import advice, federation_of
from waffle_fl.models import FlatModel, mlp, squared_error
from waffle_fl.tensorfile import read_named
from waffle_fl.tournament.record import read_lines

CLIP = 5.0  # of WAFFLE
Mixture = partial(Waffle, prediction="mixture")
prior = torch.tensor(PRIOR, dtype=torch.float64)


def with_validation(federation: Federation) -> Federation:
    """Return the federation with the second half of each agent's test samples as validation samples."""
    parts = [rows.tensor_split(2) for rows in federation.test]
    return replace(federation, test=tuple(a for a, _ in parts), validation=tuple(b for _, b in parts))


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_the_models_are_those_of_three_methods(decay: float) -> None:
    """In both engines a row holds the models that the references of WAFFLE, FedAvg and Local have."""
    parts = [
        reference("waffle", 3, lr_decay=decay),
        reference("fedavg", 3, clip=CLIP, lr_decay=decay),
        reference("local", 3, clip=CLIP, lr_decay=decay),
    ]
    expected = [torch.cat(models) for models in zip(*parts, strict=True)]
    check_engines_and_twin("waffle", SGD(0.2, lr_decay=decay), expected, prediction="mixture")


def test_the_parts_have_the_bits_of_separate_runs() -> None:
    """The mixture changes nothing in the training of WAFFLE, and its other parts are FedAvg and Local."""
    whole = rounds_of(Mixture(SGD(0.1)))[-1].state
    kin, average, alone = (
        rounds_of(one)[-1].state for one in (Waffle(SGD(0.1)), FedAvg(SGD(0.1), CLIP), Local(SGD(0.1), CLIP))
    )
    assert all(torch.equal(getattr(whole.server, name), field) for name, field in kin.server._asdict().items())
    assert torch.equal(whole.server.average, average.server.x)
    assert torch.equal(whole.agents.alone, alone.agents.y)


def test_the_option_off_adds_nothing() -> None:
    plain = Waffle(SGD(0.1), prediction="model")
    assert type(fitted(plain)) is Waffle
    assert same_bits(rounds_of(replace(plain, prediction="auto"))[-1], rounds_of(plain)[-1])


@pytest.mark.parametrize("sgd", [SGD(0.1), SGD(0.1, 0.5, momentum_between_rounds="keep", lr_decay=0.8), Adam(0.01)])
def test_other_agents_train_no_model_alone(sgd: Any) -> None:
    """If only Alice's model is requested, the others skip theirs, and her models have the bits of the whole run."""
    spec = RunSpec(Mixture(sgd), with_validation(make_federation(alice=ALICE)), 3)
    few = replace(spec, requested=frozenset([ALICE]))
    whole, helped = (outcomes_of(one, shared_model(), rounds=3)[-1] for one in (spec, few))
    assert torch.equal(*(own_net(spec, one.state, shared_model()).params for one in (whole, helped)))
    assert helped.measured["loss"] == whole.measured["loss"]
    others = [i for i in range(AGENTS) if i != ALICE]
    assert torch.equal(helped.state.agents.alone[others], shared_model().init(3).params.expand(len(others), -1))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_states_survive_and_sites_give_the_same_bits(momentum: float) -> None:
    check_resumes_and_site(Mixture(SGD(0.1, momentum, momentum_between_rounds="keep", lr_decay=0.8)))


def test_the_contract_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What test_contract.py checks for every method holds with the mixture too."""
    monkeypatch.setitem(ALGORITHMS, "mixture", Mixture)  # type: ignore[arg-type]
    test_contract.test_pure("mixture")
    test_contract.test_rows_only("mixture")
    test_contract.test_same_seed_same_bits("mixture")
    test_contract.test_state_survives_save_and_load("mixture")
    test_contract.test_batched_aggregation_agrees("mixture")
    test_contract.test_a_nan_never_reaches_the_model("mixture")
    for row in (0, 2):
        test_contract.test_row_local("mixture", row)
    for stacked in (True, False):
        test_contract.test_stacked_runs_change_no_bit("mixture", stacked)
        test_contract.test_an_agent_without_samples_is_left_out("mixture", stacked)


def test_a_broken_average_does_not_end_the_run() -> None:
    """An update of the average model that is too long is ignored, and Alice's own is 0 when it is not finite."""

    def too_long(up: Any, r: int) -> Any:
        return up._replace(average_dy=torch.full_like(up.average_dy, 1e9))

    spec = RunSpec(Mixture(SGD(0.1)), with_validation(make_federation(alice=ALICE)), 3, tamper=too_long)
    last = outcomes_of(spec, shared_model(), rounds=3)[-1]
    assert last.error is None
    assert torch.equal(last.state.server.average, shared_model().init(3).params)
    method = fitted(Mixture(SGD(0.1)))
    server, agents = method.init(shared_model().init(3), AGENTS)
    down = method.broadcast(server, AGENTS)
    local = method.begin(down, agents)
    _, up = method.finish(down, agents, local._replace(average=torch.full_like(local.average, torch.inf)))
    assert not up.average_dy.any()


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("seed", range(5))
def test_em_agrees_with_the_reference(seed: int) -> None:
    """Weights of classes agree with plain loops, also for several sets of samples at once."""
    rng = np.random.default_rng(seed)
    p = torch.from_numpy(rng.uniform(0.01, 1, (3, 4, 9)))
    found = class_weights(p, prior)
    for own, likelihoods in zip(found, p, strict=True):
        expected = torch.tensor(em(likelihoods.tolist(), list(PRIOR), ITERATIONS), dtype=torch.float64)
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_agrees_with_the_reference(seed: int) -> None:
    """Weights of numbers are the minimum that projected gradient descent finds."""
    rng = np.random.default_rng(seed)
    targets = rng.standard_normal(12)
    values = targets + rng.standard_normal((4, 12)) * np.array([[0.3], [0.4], [2.0], [0.5]])
    expected = projected_descent(values.tolist(), targets.tolist(), list(PRIOR), 20_000)
    found = value_weights(torch.from_numpy(values), torch.from_numpy(targets), prior)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    assert found.sum().item() == pytest.approx(1)
    assert (found >= 0).all()


def test_weights_without_validation_samples() -> None:
    """Without validation samples the shared model predicts alone, with the scores of WAFFLE."""
    nothing = torch.zeros(len(PRIOR), 0, 3, dtype=torch.float64)
    assert weights_of(nothing, torch.zeros(0, dtype=torch.int64)).tolist() == [1, 0, 0, 0]
    spec = RunSpec(Mixture(SGD(0.1)), make_federation(alice=ALICE), 3)
    plain = replace(spec, algorithm=Waffle(SGD(0.1)))
    ours, theirs = (outcomes_of(one, shared_model(), rounds=2)[-1].measured for one in (spec, plain))
    assert ours["accuracy"] == theirs["accuracy"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)


def test_given_weights_need_no_validation_samples() -> None:
    """With weights from a trial the mixture predicts with them; other weights than four of sum 1 are refused."""
    given = (0.0, 0.0, 1.0, 0.0)
    federation = make_federation(alice=ALICE)
    mixture, alone = (
        outcomes_of(RunSpec(method, federation, 3), shared_model(), rounds=2)[-1].measured
        for method in (Waffle(SGD(0.1), part_weights=given), Local(SGD(0.1), CLIP))
    )
    assert mixture["accuracy"] == alone["accuracy"]
    assert mixture["loss"] == pytest.approx(alone["loss"], rel=1e-12)
    for wrong in ((1.0,), (0.5, 0.5, 0.5, 0.5)):
        assert "part_weights: expected 4 numbers of sum 1" in refusal(Waffle, part_weights=wrong)


def test_the_mixture_is_the_default_with_validation_samples() -> None:
    """`auto` mixes where Alice has validation samples, and not in private rounds."""
    kinds = [
        ({}, "model"),
        ({"validation": 0.2}, "mixture"),
        ({"validation": 0.2, "privacy": "masked"}, "model"),
        ({"validation": 0.2, "privacy": "dp"}, "model"),
    ]
    for settings, expected in kinds:
        assert check_run("waffle", settings, {}).algorithm().prediction == expected  # type: ignore[attr-defined]
    assert RunSpec(Waffle(), with_validation(make_federation()), 1).algorithm.prediction == "mixture"  # type: ignore[attr-defined]
    assert RunSpec(Waffle(), make_federation(), 1).algorithm.prediction == "model"  # type: ignore[attr-defined]


def test_a_note_without_validation_samples() -> None:
    notes = []
    for share in (0.0, 0.2):
        config = check_run("waffle", {"validation": share}, {"prediction": "mixture"})
        notes.append(advice(config, federation_of(config.settings)))
    assert [any("the mixture is Alice's model alone" in note for note in some) for some in notes] == [True, False]


@pytest.mark.parametrize("only", range(3))
def test_weight_one_on_a_model_is_that_model(only: int) -> None:
    """A mixture with all weight on one model predicts as this model: WAFFLE, FedAvg or Local."""
    outputs, features = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    predictions = part_predictions(outputs, features, torch.randn(7, 2).double(), torch.arange(7) % 4)
    weights = torch.eye(4, dtype=torch.float64)[only]
    torch.testing.assert_close(mixed(predictions, weights), outputs[only].log_softmax(dim=1))


def test_a_part_that_diverged_has_hardly_any_weight() -> None:
    """Parts that are not finite predict nothing; of the shared model this stays visible."""
    outputs = torch.zeros(3, 5, 2, dtype=torch.float64)
    outputs[1:] = torch.nan
    labels = torch.arange(5) % 2
    features = torch.arange(5.0)[:, None].double()
    predictions = part_predictions(outputs, features, features, labels)
    weights = weights_of(predictions, labels)
    assert mixed(predictions, weights).isfinite().all()
    assert (weights[1:3] < 0.2).all()
    outputs[0] = torch.nan
    assert mixed(part_predictions(outputs, features, features, labels), weights).isnan().all()
    values = torch.stack([torch.full((5,), 2.0), torch.full((5,), torch.nan), torch.zeros(5), torch.ones(5)]).double()
    weights = weights_of(values, torch.ones(5).double())
    assert weights[1] == 0
    assert mixed(values, weights).isfinite().all()


# --------------------------------------------------------------------------------------------------------- predictions


def test_predictions_agree_with_the_reference() -> None:
    """The probabilities of each test sample are those of plain loops, with weights from the validation samples."""
    federation, model = with_validation(make_federation(alice=ALICE)).to("cpu", torch.float64), shared_model()
    spec = RunSpec(Mixture(SGD(0.1)), federation, 3)
    net = own_net(spec, outcomes_of(spec, model, rounds=3)[-1].state, model)
    shared, average, alone = models_in(spec.algorithm, model, net)
    own = federation.train[ALICE]
    known, labels = list(model.features(*shared, federation.x[own])[1]), federation.labels(ALICE, own).tolist()

    def parts(row: int) -> list[list[float]]:
        x = federation.x[row : row + 1]
        features = model.features(*shared, x)[1][0]
        predicted = [softmax(model.predict(*one, x)[0]) for one in (shared, average, alone)]
        return [*predicted, nearest(features, known, labels, torch.zeros(len(predicted[0])), 10, 1.0, 0.1)]

    held = federation.validation[ALICE]
    truth = federation.labels(ALICE, held).tolist()
    likelihoods = [[parts(row)[k][label] for row, label in zip(held.tolist(), truth, strict=True)] for k in range(4)]
    weights = em([[max(p, 1e-30) for p in some] for some in likelihoods], list(PRIOR), ITERATIONS)
    tests = federation.test[ALICE]
    answer = predictor_of(spec.algorithm, model, net, federation)(federation.x[tests]).exp()
    for row, found in zip(tests.tolist(), answer, strict=True):
        expected = [sum(w * p for w, p in zip(weights, some, strict=True)) for some in zip(*parts(row), strict=True)]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_a_regression_mixes_values() -> None:
    """A regression trains and its error is that of the weighted values."""
    rng = np.random.default_rng(0)
    agents = []
    for i in range(4):
        x = rng.standard_normal((40, 3))
        y = x[:, 0] + 0.3 * i
        agents.append((f"agent {i}", (x[:24], y[:24], x[24:], y[24:])))
    federation = with_validation(Federation.from_arrays(agents, alice=1, task="regression"))
    model = FlatModel(lambda: mlp((3,), 1, hidden=6), loss=squared_error, precision="float64")
    spec = RunSpec(Mixture(SGD(0.05)), federation, 3)
    last = outcomes_of(spec, model, rounds=8)[-1]
    alone = outcomes_of(replace(spec, algorithm=Local(SGD(0.05), CLIP)), model, rounds=8)[-1]
    assert last.measured["validation_loss"] <= 2 * alone.measured["validation_loss"]
    assert last.measured["rmse"] == pytest.approx(federation.unit * last.measured["loss"] ** 0.5)


# ------------------------------------------------------------------------------------------------- files and refusals


def test_run_folder(tmp_path: Path) -> None:
    """The folder has the models by name and the mixed predictions."""
    settings = ["--rounds", "2", "--samples-per-agent", "30", "--agents", "3", "--validation", "0.3", "--quiet"]
    assert waffle(["run", "waffle", "--prediction", "mixture", *settings, "--out", str(tmp_path / "run")]) == 0
    (folder,) = (path.parent for path in tmp_path.rglob("result.json"))
    stored = read_named(folder / "predictions.safetensors", ("output", "target"))
    torch.testing.assert_close(stored["output"].exp().sum(dim=1), torch.ones(len(stored["output"])))
    result = json.loads((folder / "result.json").read_text())
    right = (stored["output"].argmax(dim=1) == stored["target"]).double().mean()
    assert result["metrics"]["accuracy"] == pytest.approx(float(right))
    content = (folder / "model.safetensors").read_bytes()
    assert all(f'"{part}.'.encode() in content for part in PARTS)


@pytest.mark.parametrize(("privacy", "reason"), [("dp", "training samples in its predictions"), ("masked", "Waffle")])
def test_privacy_is_refused(privacy: str, reason: str) -> None:
    spec = RunSpec(Mixture(SGD(0.1)), make_federation(alice=ALICE), 3)
    run = partial(simulate, [spec], make_model(), rounds=2, batch_size=BATCH, privacy=privacy)
    assert reason in refusal(run)


def test_the_study_has_the_tables_of_its_record() -> None:
    text = (Path(__file__).parent.parent / PAGE).read_text()
    record = read_lines(Path(__file__).parent.parent / RECORD)
    assert f"<!-- study: one-waffle -->\n{tables(record)}\n<!-- end of study: one-waffle -->" in text


def test_the_page_compares_what_the_records_have(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent.parent
    monkeypatch.chdir(root)
    assert f"<!-- tournament: mixture -->\n{page()}\n<!-- end of tournament: mixture -->" in (root / PAGE).read_text()


def test_the_prose_on_the_mixture_has_the_numbers_of_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps and the missed goals in the text of docs/one-waffle.md and of the method's page are those of the record."""
    root = Path(__file__).parent.parent
    monkeypatch.chdir(root)
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in page().splitlines() if "|" in line]
    gap = {row[0]: row[1] for row in rows}
    study, method = (
        " ".join((root / "docs" / name).read_text().split()) for name in (PAGE.name, "algorithms/waffle.md")
    )
    assert f"smallest mean gap of all methods**, {gap['mixture']} points" in study
    assert f"Weight Erosion with {gap['WE']}." in study
    assert f"swapped labels, with {gap['largest gap of one column']}." in study
    assert f"has a mean gap of {gap['mixture']} points" in method
    assert f"with one model it has {gap['waffle-model']}." in method


def test_the_study_reads_no_test_row() -> None:
    """Pseudo-test rows are training rows of their agent, which then trains without them."""
    federation = make_federation((40, 30, 20))
    for in_runs in (False, True):
        changed = with_pseudo_test(federation, in_runs)
        for before, train, test in zip(federation.train, changed.train, changed.test, strict=True):
            assert len(test)
            assert sorted([*train.tolist(), *test.tolist()]) == sorted(before.tolist())


def test_the_rule_is_that_of_the_study() -> None:
    assert rules()["mixture"] == Rule(("waffle", "fedavg", "local", "waffle+neighbours"), PRIOR)


def test_a_newcomer_gets_all_models() -> None:
    scores = joined("waffle", prediction="mixture")
    assert all(value is not None for found in scores.values() for value in found.values())


def test_absent_agents_keep_their_models() -> None:
    spec = RunSpec(Mixture(SGD(0.1)), make_federation(alice=ALICE), 3)
    first, second = outcomes_of(spec, shared_model(), rounds=2, participation=0.5)
    absent = [i for i in range(AGENTS) if f"agent {i}" not in second.measured["participants"]]
    assert absent
    assert torch.equal(first.state.agents.alone[absent], second.state.agents.alone[absent])
