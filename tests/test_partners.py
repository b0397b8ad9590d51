"""Which partners help: Shapley values, cross-validated coalitions, and the recommendation for a planted federation."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from cli_support import waffle
from conftest import make_federation, refusal
from waffle_fl.cli.method_options import read_options
from waffle_fl.cli.partners import RECORD, read_study, without_old_flags
from waffle_fl.config import Settings
from waffle_fl.decision import shapley
from waffle_fl.decision.bootstrap import Interval, Metric, contrasts, figures, gain, share_above_zero
from waffle_fl.decision.budget import PARTNERS, WorkBudget
from waffle_fl.decision.coalitions import FOLDS, CrossValidation, Plan, able_agents, cross_validate, folds_of, rows_of
from waffle_fl.decision.measurement import TUNED, Extent, joint_method, joint_options, measurement_for
from waffle_fl.decision.partners import (
    PartnerStudy,
    best_plan,
    group_of,
    leads,
    study_partners,
)
from waffle_fl.decision.recommendation import measured_by
from waffle_fl.decision.shapley import Coalition, coalitions_of
from waffle_fl.experiment import Runtime, federation_of
from waffle_fl.federation import Federation

FEATURES = 10
AGENTS = {"alice": (50, 1), "ally-one": (150, 1), "ally-two": (150, 1), "feind": (150, -1)}  # rows, sign of the effect
TEST_ROWS = 400
FAST = ["--seeds", "1", "--rounds", "20", "--model", "linear", "--lr", "0.3", "--workers", "1", "--quiet"]


def write_planted(folder: Path, seed: int = 6) -> Path:
    """Tables of four hospitals with one logistic concept; at Feind the outcome is the opposite."""
    rng = np.random.default_rng(seed)
    effect = 1.5 * rng.normal(size=FEATURES)
    for name, (rows, sign) in AGENTS.items():
        (folder / name).mkdir(parents=True)
        for part, n in (("train", rows), ("test", TEST_ROWS)):
            x = rng.normal(size=(n, FEATURES)).round(3)
            ill = rng.random(n) < 1 / (1 + np.exp(-sign * x @ effect))
            with (folder / name / f"{part}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow([*(f"lab{i}" for i in range(FEATURES)), "outcome"])
                writer.writerows([*row, "ill" if one else "well"] for row, one in zip(x, ill, strict=True))
    return folder


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the planted federation."""
    return write_planted(tmp_path_factory.mktemp("planted") / "hospitals")


def settings_for(folder: Path, **changes: object) -> Settings:
    given = {"data": str(folder), "target": "outcome", "alice": "all", "rounds": 20, "model": "linear", "lr": 0.3}
    return Settings(**{**given, **changes})  # type: ignore[arg-type]


def whole(settings: Settings) -> Federation:
    return federation_of(replace(settings, alice="alice"))


# --- Shapley values


def by_permutations(alice: int, agents: list[int], values: Mapping[Coalition, float]) -> dict[int, float]:
    """Shapley values from the definition: the mean marginal contribution over all orders of the partners."""
    partners = [agent for agent in agents if agent != alice]
    found: dict[int, list[float]] = {partner: [] for partner in partners}
    for order in permutations(partners):
        joined = Coalition([alice])
        for partner in order:
            found[partner].append(values[joined | {partner}] - values[joined])
            joined |= {partner}
    return {partner: fmean(marginals) for partner, marginals in found.items()}


@pytest.mark.parametrize("agents", [2, 3, 5])
def test_exact_values_equal_the_mean_over_all_orders(agents: int) -> None:
    """The exact Shapley values equal brute force over permutations, and sum to v(everyone) - v(alone)."""
    rng = np.random.default_rng(agents)
    everyone = list(range(agents))
    for alice in everyone:
        values = {c: float(rng.random()) for c in coalitions_of(alice, everyone)}
        found = {p: shapley.evaluate(one, values) for p, one in shapley.exact(alice, everyone).items()}
        assert found == pytest.approx(by_permutations(alice, everyone, values))
        assert sum(found.values()) == pytest.approx(values[Coalition(everyone)] - values[Coalition([alice])])


def test_sampled_values_approach_the_exact_ones() -> None:
    """Sampled values are within four standard errors of the exact ones, and the error falls with more orders."""
    rng = np.random.default_rng(0)
    everyone = list(range(6))
    values = {c: float(rng.random()) for c in coalitions_of(2, everyone)}
    exact = {p: shapley.evaluate(one, values) for p, one in shapley.exact(2, everyone).items()}
    errors = []
    for pairs in (8, 200):
        found, per_pair = shapley.sampled(2, everyone, pairs)
        spread = shapley.sampling_errors(per_pair, values)
        assert all(abs(shapley.evaluate(found[p], values) - exact[p]) < 4 * spread[p] for p in exact)
        errors.append(fmean(spread.values()))
    assert errors[1] < errors[0] / 3


def test_reversed_orders_reduce_the_error() -> None:
    """An order and its reverse give the exact value of a game whose marginals are linear in the position."""
    everyone = [0, 1, 2, 3, 4]
    values = {c: float(len(c) ** 2) for c in coalitions_of(0, everyone)}
    found, per_pair = shapley.sampled(0, everyone, 1)
    exact = shapley.exact(0, everyone)
    for partner in found:
        assert shapley.evaluate(found[partner], values) == pytest.approx(shapley.evaluate(exact[partner], values))
    assert set(shapley.sampling_errors(per_pair, values).values()) == {float("inf")}


def test_leaving_one_out_uses_one_coalition_per_partner() -> None:
    """The effect of a partner is v(everyone) - v(everyone without it)."""
    values = {Coalition([0, 1, 2]): 0.9, Coalition([0, 1]): 0.7, Coalition([0, 2]): 0.95}
    found = {p: shapley.evaluate(one, values) for p, one in shapley.leave_one_out(0, [0, 1, 2]).items()}
    assert found == pytest.approx({1: -0.05, 2: 0.2})


def test_one_order_serves_several_agents() -> None:
    """For one order, a coalition of the first agents is shared by every agent among them."""
    order = [3, 1, 0, 2]
    used = [{c for one in shapley.marginal(alice, order).values() for c in one} for alice in (3, 1)]
    assert {Coalition([3, 1]), Coalition([3, 1, 0]), Coalition([3, 1, 0, 2])} <= used[0] & used[1]


# --- statistics


def test_contrasts_of_two_equal_the_gain() -> None:
    """A contrast of two methods equals their paired gain for an accuracy; the standard error widens the interval."""
    rng = np.random.default_rng(1)
    target = rng.integers(0, 2, 80)
    ours, theirs = ({seed: rng.normal(size=(80, 2)) + target[:, None] * [0, k] for seed in (1, 2)} for k in (2, 1))
    expected = gain("accuracy", ours, theirs, target)
    (found,) = contrasts("accuracy", [ours, theirs], [[1, -1]], target)
    assert found == pytest.approx(expected)
    (wider,) = contrasts("accuracy", [ours, theirs], [[1, -1]], target, errors=[0.2])
    assert wider.standard_error > found.standard_error
    (narrow,) = contrasts("accuracy", [ours, theirs], [[1, -1]], target, training=False)
    assert narrow.standard_error < found.standard_error
    (area,) = contrasts("auc", [ours, theirs], [[1, -1]], target)
    assert area == pytest.approx(gain("auc", ours, theirs, target))


def test_the_share_that_gains_has_an_interval() -> None:
    """The share counts gains above 0, and only unclear gains widen its interval."""
    clear = [Interval(0.1, 0.08, 0.12), Interval(0.2, 0.18, 0.22), Interval(-0.1, -0.12, -0.08)]
    assert share_above_zero(clear) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    unclear = share_above_zero([*clear, Interval(0.01, -0.2, 0.22)])
    assert (unclear.value, unclear.low, unclear.high) == (0.75, 0.5, 0.75)


def test_a_group_consists_of_helpful_partners() -> None:
    """Partners with a contribution above 0 form the group; without any, the least harmful partner does."""
    found = {1: Interval(0.1, -0.1, 0.3), 2: Interval(-0.01, -0.1, 0.1), 3: Interval(0.02, 0.01, 0.03)}
    assert group_of(0, found) == {0, 1, 3}
    assert group_of(0, {2: found[2], 4: Interval(-0.5, -0.6, -0.4)}) == {0, 2}


def test_a_group_must_not_be_clearly_worse_than_alone() -> None:
    """A tie is no lead, but does not stop a group from being recommended."""
    target = np.arange(60) % 2
    right, wrong = ({1: np.eye(2)[values].astype(float)} for values in (target, 1 - target))
    assert leads("accuracy", right, wrong, target, 0.5)
    assert not leads("accuracy", right, right, target, 0.5)
    assert leads("accuracy", right, right, target, -0.5)
    assert not leads("accuracy", wrong, right, target, -0.5)


def held_out(metric: Metric, scores: dict[tuple[int, ...], float]) -> CrossValidation:
    """Return predictions of 100 rows of agent 0 by which each coalition has the given score: accuracy or RMSE."""
    target = np.zeros(100) if metric == "rmse" else np.zeros(100, dtype=np.int64)
    outputs = {}
    for members, score in scores.items():
        rmse = {1: np.full(100, score)}
        right = {1: np.where(np.arange(100)[:, None] < score * 100, [1.0, 0.0], [0.0, 1.0])}
        outputs[Plan("fedavg", Coalition(members)), 0] = rmse if metric == "rmse" else right
    return CrossValidation({0: target}, outputs)


@pytest.mark.parametrize(
    ("metric", "scores", "best"),
    [
        ("accuracy", {(0,): 0.8, (0, 1): 0.9, (0, 1, 2): 0.85}, (0, 1)),
        ("accuracy", {(0,): 0.8, (0, 1): 0.9, (0, 1, 2): 0.9}, (0, 1, 2)),
        ("accuracy", {(0,): 0.9, (0, 1): 0.8, (0, 1, 2): 0.7}, (0,)),
        ("rmse", {(0,): 2.0, (0, 1): 1.0, (0, 1, 2): 3.0}, (0, 1)),
    ],
)
def test_the_best_coalition(metric: Metric, scores: dict[tuple[int, ...], float], best: tuple[int, ...]) -> None:
    """The best score counts, which is the least RMSE; of equal ones, the largest coalition."""
    plans = [Plan("fedavg", Coalition(members)) for members in scores]
    assert best_plan(held_out(metric, scores), 0, metric, plans).members == set(best)


def test_without_helpful_partners_an_agent_stays_alone(planted: Path) -> None:
    """The partner with flipped labels gains nothing from anybody, by either measurement."""
    settings = settings_for(planted, rounds=20)
    federation = whole(settings)
    for measurement in ("shapley", "leave-one-out"):
        found = study_partners(measurement, federation, settings, "fedavg", [3], (1,), {}, Runtime(workers=1))
        advice = found.advice["feind"]
        assert all(value.value < 0 for value in advice.contributions.values()), measurement
        assert not advice.join, measurement


# --- cross-validation


def test_every_row_is_held_out_once(planted: Path) -> None:
    """Folds partition an agent's rows, have equal sizes and class shares, and contain no test row."""
    federation = whole(settings_for(planted))
    folds = folds_of(federation, 0, 1)
    assert np.bincount(folds, minlength=FOLDS).tolist() == [13, 13, 12, 12]
    labels = federation.labels(0, rows_of(federation, 0)).numpy()
    positives = [int(labels[folds == k].sum()) for k in range(FOLDS)]
    assert max(positives) - min(positives) <= 1
    assert not set(rows_of(federation, 0).tolist()) & set(federation.test[0].tolist())
    assert not np.array_equal(folds, folds_of(federation, 0, 2))


def test_validation_rows_take_part() -> None:
    """Validation rows are cross-validated with the training rows; agents with fewer rows than folds are left out."""
    federation = make_federation(sizes=(20, 3, 12))
    held = tuple(rows[:1] for rows in federation.train)
    assert len(rows_of(replace(federation, validation=held), 0)) == 21
    assert able_agents(federation) == [0, 2]


def test_a_coalition_of_one_trains_alone(planted: Path) -> None:
    """Cross-validating {Alice} gives the scores of Local up to rounding, and does not depend on other coalitions."""
    settings = settings_for(planted, rounds=3)
    federation = whole(settings)
    alone, pair = Coalition([0]), Coalition([0, 1])
    runtime = Runtime(workers=1)
    both = cross_validate([Plan("fedavg", alone), Plan("fedavg", pair)], federation, settings, (1,), {}, runtime)
    local = cross_validate([Plan("local", alone, 0)], federation, settings, (1,), {}, runtime)
    expected = local.outputs[Plan("local", alone, 0), 0][1]
    assert both.outputs[Plan("fedavg", alone), 0][1] == pytest.approx(expected, abs=1e-5)
    one = cross_validate([Plan("fedavg", pair)], federation, settings, (1,), {}, runtime)
    assert np.array_equal(both.outputs[Plan("fedavg", pair), 1][1], one.outputs[Plan("fedavg", pair), 1][1])
    assert both.trainings == 2 * FOLDS


def test_one_training_serves_every_member_with_its_own_model(planted: Path) -> None:
    """In a coalition that trains with FedAvg+FT each member's rows are predicted by the model that it has tuned."""
    settings = settings_for(planted, rounds=3)
    federation, members = whole(settings), Coalition([1, 3])
    plans = [Plan("fedavg-ft", members), *(Plan("fedavg-ft", members, alice) for alice in (1, 3))]
    held = cross_validate(plans, federation, settings, (1,), {}, Runtime(workers=1))
    for alice in (1, 3):
        expected = held.outputs[Plan("fedavg-ft", members, alice), alice][1]
        assert np.array_equal(held.outputs[plans[0], alice][1], expected)
    shared = cross_validate([Plan("fedavg", members)], federation, settings, (1,), {}, Runtime(workers=1))
    assert not np.allclose(held.outputs[plans[0], 3][1], shared.outputs[Plan("fedavg", members), 3][1], atol=1e-3)


def test_coalitions_of_images_are_tuned(planted: Path) -> None:
    """Tables are measured with FedAvg, images and series with FedAvg+FT; the study says which."""
    settings = settings_for(planted, rounds=2)
    tables = whole(settings)
    series = replace(tables, x=tables.x[:, None, :])
    assert (joint_method(tables), joint_method(series)) == ("fedavg", "fedavg-ft")
    found = study_partners("leave-one-out", series, settings, "waffle", [0], (1,), {}, Runtime(workers=1), folds=1)
    assert found.shared == "fedavg-ft"
    assert "FedAvg+FT models" in measured_by(found)
    assert PartnerStudy.from_json(found.to_json()) == found
    assert PartnerStudy.from_json({k: v for k, v in found.to_json().items() if k != "shared"}).shared == "fedavg"


def test_agents_tune_in_the_last_rounds() -> None:
    """Agents of images only tune in the last five rounds, in at most a quarter of few rounds, or as the user says."""
    assert joint_options("fedavg", 160, {"ditto": {"lam": 1.0}}) == {"ditto": {"lam": 1.0}}
    assert [joint_options(TUNED, rounds, {})[TUNED]["tuning"] for rounds in (160, 20, 8, 1)] == [5, 5, 2, 1]
    assert joint_options(TUNED, 160, {TUNED: {"tuning": 3}}) == {TUNED: {"tuning": 3}}


def test_test_rows_are_not_read(planted: Path) -> None:
    """The held-out predictions do not change when every test row and label is replaced."""
    settings = settings_for(planted, rounds=2)
    federation = whole(settings)
    plans = [Plan("fedavg", Coalition([0, 3]))]
    spoilt = replace(federation, x=federation.x.clone(), y=federation.y.clone())
    rows = torch.cat(federation.test)
    spoilt.x[rows], spoilt.y[rows] = 1e6, 1 - spoilt.y[rows]
    first, second = (cross_validate(plans, f, settings, (1,), {}, Runtime(workers=1)) for f in (federation, spoilt))
    assert all(np.array_equal(first.outputs[key][1], second.outputs[key][1]) for key in first.outputs)


# --- the planted federation


@pytest.fixture(scope="module")
def decided(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The folder and the printed JSON of `waffle decide` on the planted federation."""
    out = tmp_path_factory.mktemp("decided") / "d"
    shown = waffle("decide", planted, "--target", "outcome", *FAST, "--methods", "waffle", "--out", out, "--json")
    assert shown.code == 0, shown.err
    return out, json.loads(shown.out)


def pooled_score(folder: Path, names: tuple[str, ...]) -> float:
    """Accuracy on Alice's test rows of scikit-learn's logistic regression on the pooled training tables."""

    def table(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
        cells = np.genfromtxt(folder / name / f"{part}.csv", delimiter=",", skip_header=1, dtype=str)
        return cells[:, :-1].astype(float), cells[:, -1] == "ill"

    x, y = (np.concatenate(parts) for parts in zip(*(table(name, "train") for name in names), strict=True))
    new, truth = table("alice", "test")
    return float((LogisticRegression(C=10.0).fit(x, y).predict(new) == truth).mean())


def test_the_harmful_partner_is_found(
    decided: tuple[Path, dict[str, dict[str, dict[str, str]]]], planted: Path
) -> None:
    """Alice should join without Feind, Feind should stay alone, and scikit-learn finds the same group for Alice."""
    found = decided[1]["recommendations"]
    assert (found["alice"]["action"], found["feind"]["action"]) == ("join, without feind", "stay alone")
    assert found["alice"]["sign"] == 1
    assert "Expected gain with FedAvg: +" in found["alice"]["reason"]
    partners = ("ally-one", "ally-two", "feind")
    groups = [("alice", *some) for k in range(4) for some in combinations(partners, k)]
    assert max(groups, key=lambda group: pooled_score(planted, group)) == ("alice", "ally-one", "ally-two")


def test_the_printed_values_are_exact_shapley_values(decided: tuple[Path, object], planted: Path) -> None:
    """The contributions in the record equal brute force over all orders on the same held-out predictions."""
    study = read_study(decided[0])
    assert study is not None
    assert (study.measurement, study.seeds) == ("shapley", 1)
    settings = settings_for(planted)
    federation = whole(settings)
    plans = [Plan("fedavg", c) for c in coalitions_of(0, range(4))]
    held = cross_validate(plans, federation, settings, (1,), {}, Runtime(workers=1))
    values = {
        plan.members: fmean(figures("accuracy", held.outputs[plan, 0], held.target[0]).values()) for plan in plans
    }
    expected = by_permutations(0, [0, 1, 2, 3], values)
    found = {name: interval.value for name, interval in study.advice["alice"].contributions.items()}
    assert found == pytest.approx({federation.names[i]: value for i, value in expected.items()})
    assert found["feind"] < 0 < min(found["ally-one"], found["ally-two"])
    assert study.advice["alice"].alone == pytest.approx(values[Coalition([0])])


def test_the_expected_gain_is_that_of_the_group_s_runs(decided: tuple[Path, dict[str, object]]) -> None:
    """The recommended group is an ordinary run without Feind, and a second call trains nothing."""
    out, printed = decided
    runs = {path.name for path in out.iterdir() if path.is_dir()}
    assert "hospitals-fedavg-1-alice-without-feind" in runs
    record = (out / RECORD).read_text()
    data = json.loads((out / "hospitals-waffle-1-alice" / "config.json").read_text())["settings"]["data"]
    again = waffle("decide", data, "--target", "outcome", *FAST, "--methods", "waffle", "--out", out, "--json")
    assert json.loads(again.out) == printed
    assert (out / RECORD).read_text() == record


def test_report_keeps_the_recommendation(decided: tuple[Path, dict[str, list[str]]], tmp_path: Path) -> None:
    """`waffle report` on the folder prints the same recommendations and writes them into the page."""
    shown = waffle("report", decided[0], "--out", tmp_path / "r")
    assert shown.code == 0, shown.err
    line = next(line for line in decided[1]["says"] if line.startswith("alice: join, without feind."))
    assert line in " ".join(shown.out.split())
    assert "Join, without feind" in (tmp_path / "r" / "decision.html").read_text()


# --- which measurement


def test_auto_depends_on_agents_and_cost(planted: Path) -> None:
    """auto: exact values for small tables, leave-one-out for many agents or rows, none for very many rows."""
    settings = settings_for(planted)
    federation = whole(settings)
    assert measurement_for("auto", federation, settings, range(4)) == Extent("shapley")
    long = replace(settings, rounds=20_000)
    assert measurement_for("auto", federation, long, [0])[0] == "leave-one-out"
    assert measurement_for("auto", federation, replace(settings, rounds=10**6), [0])[0] is None
    many = make_federation(sizes=(10,) * 9)
    assert measurement_for("auto", many, settings, [0]) == Extent(
        "leave-one-out", reason="Partners are measured by leaving out each in turn: 9 agents; see --partners."
    )
    assert measurement_for("shapley", many, settings, [0])[0] == "sampled"
    assert measurement_for("none", federation, settings, [0]) == Extent(None)
    attacked = replace(settings, attack="sign-flip")
    assert measurement_for("auto", federation, attacked, [0])[0] is None
    assert "not available with an attack" in refusal(measurement_for, "shapley", federation, attacked, [0])


def test_auto_measures_images_within_the_budget(planted: Path) -> None:
    """All folds, first with all seeds; half or a quarter of the rows; or nothing, as the counted work allows."""
    settings = replace(settings_for(planted), rounds=10)
    federation = whole(settings)
    images = replace(federation, x=federation.x[:, None, None, :])
    rows = sum(3 * len(rows_of(images, i)) // FOLDS for i in range(4))  # that all agents train on in a fold
    one_seed = 10 * FOLDS * 8 * rows  # rounds, folds; each agent is in 8 of the 15 coalitions
    quarter = 10 * (1 + 3 + 1) * rows  # alone, without each of the others, and with all of them

    def found(passes: float, factor: float = 1.0, agents: Federation = images) -> Extent:
        """Return the measurement that a budget of so many passes allows."""
        allowed = WorkBudget(PARTNERS / passes, factor)
        return measurement_for("auto", agents, settings, range(agents.agents), TUNED, 3, allowed)

    assert found(3 * one_seed) == Extent("shapley")
    assert found(3 * one_seed - 1)[:3] == ("shapley", FOLDS, True)
    assert "Partners are measured with one seed: ask" in found(one_seed).reason
    assert found(one_seed - 1)[:3] == ("leave-one-out", 2, True)
    assert "half of the training rows by leaving out each in turn, and each best" in found(one_seed - 1).reason
    assert found(2 * quarter)[:2] == ("leave-one-out", 2)
    assert found(2 * quarter - 1)[:2] == ("leave-one-out", 1)
    assert found(quarter - 1)[:2] == (None, FOLDS)
    assert found(quarter - 1, factor=0) == Extent("shapley")
    assert found(2 * quarter, agents=images.without("3"))[:2] == ("shapley", 2)  # the coalitions of leave-one-out


def test_one_fold_finds_the_harmful_partner(planted: Path) -> None:
    """One held-out quarter with one seed gives the same group; every coalition trains once."""
    settings = settings_for(planted, rounds=20)
    federation = whole(settings)
    arguments = ("shapley", federation, settings, "waffle", [0], (1, 2), {}, Runtime(workers=1))
    found = study_partners(*arguments, folds=1)  # type: ignore[arg-type]
    advice = found.advice["alice"]
    assert (advice.partners, advice.method, advice.join) == (("ally-one", "ally-two"), "fedavg", True)
    assert (found.trainings, found.seeds) == (8, 1)
    plan = Plan("fedavg", Coalition([0, 1]))
    held = cross_validate([plan], federation, settings, (1, 2), {}, Runtime(workers=1), folds=1)
    rows = len(rows_of(federation, 0))
    assert len(held.target[0]) == len(held.outputs[plan, 0][1]) == -(-rows // 4)
    assert list(held.outputs[plan, 0]) == [1]


@pytest.mark.parametrize("measurement", ["leave-one-out", "sampled"])
def test_other_measurements_find_the_harmful_partner(planted: Path, measurement: str) -> None:
    """Leave-one-out and sampled Shapley values give the same group for Alice; only the sampled ones have an error."""
    settings = settings_for(planted, rounds=20)
    federation = whole(settings)
    found = study_partners(
        measurement,  # type: ignore[arg-type]
        federation,
        settings,
        "fedavg",
        [0],
        (1,),
        {},
        Runtime(workers=1),
    )
    advice = found.advice["alice"]
    assert (advice.partners, advice.join) == (("ally-one", "ally-two"), True)
    assert bool(advice.sampling_errors) == (measurement == "sampled")
    assert PartnerStudy.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    """A record that is not a study is refused with the advice to delete it."""
    (tmp_path / RECORD).write_text('{"advice": {"a": {}}}')
    assert "not a record of partners" in refusal(read_study, tmp_path)
    assert read_study(tmp_path / "none") is None


# --- flags


def test_the_old_flag_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """--leave-one-out with its agents becomes --partners leave-one-out, with a note."""
    given = ["heart", "--leave-one-out", "va", "cleveland", "--seeds", "1"]
    assert without_old_flags(given) == ["heart", "--seeds", "1", "--partners", "leave-one-out"]
    assert capsys.readouterr().err == "note: --leave-one-out is now --partners leave-one-out\n"
    assert without_old_flags(["heart", "--seeds", "1"]) == ["heart", "--seeds", "1"]


def test_options_of_several_methods(tmp_path: Path) -> None:
    """Options are METHOD.NAME=VALUE or a TOML file; unknown methods and other texts are refused."""
    methods = ("local", "fedavg", "waffle", "ditto")
    assert read_options(["waffle.clip=1", "ditto.lam=0.5", "fedavg.weighting=samples"], methods) == {
        "waffle": {"clip": 1},
        "ditto": {"lam": 0.5},
        "fedavg": {"weighting": "samples"},
    }
    file = tmp_path / "options.toml"
    file.write_text("[ditto]\nlam = 0.25\n")
    assert read_options([str(file)], methods) == {"ditto": {"lam": 0.25}}
    assert "fedprox is not among the methods" in refusal(read_options, ["fedprox.mu=1"], methods)
    assert "expected METHOD.NAME=VALUE" in refusal(read_options, ["mu=1"], methods)


def test_decide_takes_options(planted: Path, tmp_path: Path) -> None:
    """An option reaches the config of its method's runs only; a wrong one is refused before training."""
    line = [
        "decide",
        planted,
        "--target",
        "outcome",
        "--rounds",
        "1",
        "--lr",
        "0.1",
        "--model",
        "linear",
        "--seeds",
        "1",
        "--quiet",
    ]
    line += ["--workers", "1", "--alice", "alice", "--methods", "fedavg", "ditto", "--partners", "none"]
    shown = waffle(*line, "--options", "ditto.lam=0.5", "--out", tmp_path / "d")
    assert shown.code == 0, shown.err
    configs = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "d").glob("*/config.json")}
    assert configs["hospitals-ditto-1-alice"]["options"]["lam"] == 0.5
    assert "lam" not in configs["hospitals-fedavg-1-alice"]["options"]
    assert "Recommendation" not in (tmp_path / "d" / "decision.html").read_text()
    refused = waffle(*line, "--options", "ditto.lam=much", "--out", tmp_path / "e")
    assert refused.code == 2
    assert "lam" in refused.err
    assert not (tmp_path / "e").exists()


def test_the_table_of_rules_matches_its_record() -> None:
    """The means in docs/decision.md are those of results/partner-rules.jsonl."""
    root = Path(__file__).parent.parent
    record = [json.loads(line) for line in (root / "results" / "partner-rules.jsonl").read_text().splitlines()]
    text = (root / "docs" / "decision.md").read_text()
    names = {
        "| best coalition |": "best coalition",
        "half a standard error** |": "Shapley value > 0, if not worse than alone by 0.5 se",
        "always stay alone |": "alone",
        "Shapley values |": "best prefix by Shapley value",
        "and all; ties larger** |": "best of alone, left out > 0 and everyone, ties larger",
    }
    for title, name in names.items():
        means = [fmean(100 * r["regret"][name] for r in record if r["draws"] == d) for d in ("tune", "confirm")]
        assert f"{title} {means[0]:.2f} | {means[1]:.2f} |" in text


def test_the_table_of_judges_matches_its_record() -> None:
    """Every verdict of results/partner-check.jsonl is a row of docs/decision.md, the contradicted ones too."""
    root = Path(__file__).parent.parent
    record = [json.loads(line) for line in (root / "results" / "partner-check.jsonl").read_text().splitlines()]
    rows = (root / "docs" / "decision.md").read_text().splitlines()
    for r in record:
        start = f"| {r['data']} | {r['agent']} | {', '.join(r['recommended']) or 'none'} | {r['judge']} |"
        assert [row.endswith(f"| {r['verdict']} |") for row in rows if row.startswith(start)] == [True]


def test_the_table_of_joint_trainings_is_its_record() -> None:
    """Every line of results/joint-training.jsonl is a row of docs/decision.md, with its mean over agents and seeds."""
    root = Path(__file__).parent.parent
    record = [json.loads(line) for line in (root / "results" / "joint-training.jsonl").read_text().splitlines()]
    text = (root / "docs" / "decision.md").read_text()
    for r in record:
        assert r["mean"] == pytest.approx(fmean(r["by_agent"].values()), abs=0.01)
        assert f"| {r['training']} | {' | '.join(map(str, r['by_agent'].values()))} | {r['mean']} |" in text
