"""From runs to a decision: distances before training, verdicts, recommendations, and the page in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli_support import waffle
from conftest import make_federation, refusal
from waffle_fl.config import RunConfig, Settings
from waffle_fl.decision.bootstrap import Hint, Interval
from waffle_fl.decision.charts import Axis, axis_of, partners_chart, ticks_of
from waffle_fl.decision.distances import Distances, distances
from waffle_fl.decision.markup import together
from waffle_fl.decision.page import write_page
from waffle_fl.decision.partners import Advice, study_partners
from waffle_fl.decision.recommendation import recommend, recommendations, share_text
from waffle_fl.decision.study import ALONE, Decision, Standing, View, decide, group_runs, headline, phases, runs_for
from waffle_fl.decision.verdict_text import (
    caution,
    difference,
    federation_summary,
    partners,
    signed,
    update_sources,
    verdict,
)
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, execute, federation_of
from waffle_fl.federation import Federation
from waffle_fl.results import read_runs

SMALL = Settings(data="digits", split="C", agents=3, rounds=6, alice="all", model="linear", samples_per_agent=60)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Decision:
    """A small real decision: three agents, three methods, two seeds, partners measured for the second agent."""
    out = tmp_path_factory.mktemp("study")
    runs = runs_for(SMALL, ("fedavg", "weight-erosion", "waffle"), (1, 2), out, Runtime(workers=1))
    federation = federation_of(replace(SMALL, alice="0"))
    found = study_partners("shapley", federation, SMALL, "waffle", [1], (1,), {}, Runtime(workers=1))
    groups = group_runs(found, SMALL, (1, 2), federation.names, out, {})
    execute([*runs, *(run for run in groups if run not in runs)], Runtime(workers=1))
    unlike = distances(federation, make_linear(federation))
    return decide(read_runs([out]), unlike, partners=found)


def make_linear(federation: Federation) -> Any:
    from waffle_fl.experiment import model_of

    return model_of(SMALL, federation, Runtime(), torch.device("cpu"))


def view(found: Interval, tests: int = 200, **more: Any) -> View:
    trained = more.get("seeds", 2)
    alone = Standing("local", {"accuracy": Interval(0.74, 0.7, 0.78)}, {}, (0.74,) * trained)
    score = 0.74 + found.value
    joined = Standing("waffle", {"accuracy": Interval(score, 0.7, 0.9)}, {"accuracy": found}, (score,) * trained)
    standings, classes = {"local": alone, "waffle": joined}, more.get("classes", (100, 100))
    advice = Advice(more["partners"], {}, "fedavg", ("x",), True, 0.7, 0.8) if "partners" in more else None
    return View("VA", 100, tests, classes, standings, {}, advice=advice, recommended=more.get("recommended"))


# --- leaving agents out


def test_without_keeps_the_other_agents() -> None:
    """A federation without one agent keeps the data, order and random numbers of the others."""
    federation = make_federation(alice=2)
    remaining = federation.without("agent 1")
    assert remaining.names == ("agent 0", "agent 2", "agent 3")
    assert (remaining.ids, remaining.alice) == ((0, 2, 3), 1)
    assert all(torch.equal(remaining.train[i], federation.train[j]) for i, j in enumerate((0, 2, 3)))
    assert remaining.digest() != federation.digest()
    assert remaining.without("agent 0", "agent 3").names == ("agent 2",)


def test_alice_cannot_be_left_out() -> None:
    """Leaving out Alice or an unknown agent is refused by name."""
    federation = make_federation()
    assert "agent 0 is Alice" in refusal(federation.without, "0")
    assert "there is no agent 'x'" in refusal(federation.without, "x")


def test_leave_out_is_part_of_the_config() -> None:
    """leave_out changes the federation and the folder name, and is kept in the config file."""
    settings = replace(SMALL, alice="0", leave_out=("2",))
    config = RunConfig(method="waffle", settings=settings)
    assert federation_of(settings).names == ("agent 0", "agent 1")
    assert config.label == "digits-C-waffle-1-without-2"
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == replace(
        config, options=RunConfig.from_json(config.to_json()).options
    )


# --- verdicts


def test_verdicts_state_the_interval() -> None:
    """A verdict states gain, loss or neither, both values, the difference and its interval."""
    gains = verdict(view(Interval(0.07, 0.02, 0.12)), "waffle", "accuracy")
    assert gains == (
        "VA gains by joining: WAFFLE classifies 81.0 % of its 200 test samples correctly, training alone 74.0 %. "
        "Difference: +7.0 points (95 % interval +2.0 to +12.0)."
    )
    assert verdict(view(Interval(-0.07, -0.12, -0.02)), "waffle", "accuracy").startswith("VA loses by joining: ")
    level = verdict(view(Interval(0.01, -0.03, 0.05)), "waffle", "accuracy")
    assert level.startswith("No clear difference for VA: ")
    assert level.endswith("+1.0 points (95 % interval −3.0 to +5.0).")


def test_numbers_that_round_to_zero_have_no_sign() -> None:
    """-0.0 points is printed as 0.0."""
    assert [signed(v, "accuracy") for v in (-0.0001, 0.0, 0.0512, -0.02)] == ["0.0", "0.0", "+5.1", "−2.0"]


def test_differences_of_errors_are_lower_or_higher() -> None:
    """A difference of errors is stated as lower or higher, not by a sign."""
    assert difference(Interval(0.3, 0.1, 0.5), "rmse") == "error lower by 0.3 (95 % interval +0.1 to +0.5)"
    assert difference(Interval(-0.3, -0.5, 0.1), "rmse") == "error higher by 0.3 (95 % interval −0.1 to +0.5)"


def test_a_small_test_set_gives_a_caution(study: Decision) -> None:
    """Fewer than 100 test samples, and a single seed, give a caution."""
    text = caution(view(Interval(0.07, 0.02, 0.12), tests=40, seeds=1), study)
    assert any("only 40 test samples: one sample more or less is 2.5 points" in line for line in text)
    assert any("trained once, so the interval does not cover the randomness of training" in line for line in text)
    assert caution(view(Interval(0.07, 0.02, 0.12)), study) == []


def test_a_model_no_better_than_the_majority_gives_a_caution(study: Decision) -> None:
    """A caution is given when no method beats the most frequent class."""
    lopsided = view(Interval(0.01, -0.03, 0.05), classes=(160, 40))
    assert any(
        "always predicting the most frequent class, which is correct for 80.0 %" in s for s in caution(lopsided, study)
    )


def test_absent_classes_give_a_caution(study: Decision) -> None:
    """Test data that lack classes, or contain only one, give a caution."""
    found = Interval(0.07, 0.02, 0.12)
    assert caution(view(found, classes=(0, 200)), study) == [
        "Its test data contain only one class: how well the models recognise the others is not known."
    ]
    assert caution(view(found, classes=(0, 3, 97, 100)), study) == [
        "Its test data lack 1 of 4 classes.",
        "Its rarest class has 3 test samples.",
    ]


def test_few_samples_have_no_verdict() -> None:
    """With too few samples the text says so and states the interval."""
    text = verdict(view(Hint(0.07, 0.02, 0.12)), "waffle", "accuracy")
    assert text.startswith("Too few test samples to say whether VA gains by joining: ")
    assert text.endswith("+7.0 points (95 % interval +2.0 to +12.0).")


def test_partners_that_help_and_hurt(study: Decision) -> None:
    """Partners with a clear effect are named; without any, the text says so."""
    found = {"x": Interval(0.1, 0.05, 0.15), "y": Interval(-0.1, -0.15, -0.05), "z": Interval(0.0, -0.1, 0.1)}
    assert partners(view(Interval(0, 0, 0), partners=found), study).startswith("x clearly helps VA; y clearly hurts it")
    unclear = {"z": found["z"]}
    assert "No single partner makes a clear difference" in partners(view(Interval(0, 0, 0), partners=unclear), study)


def test_partners_with_equal_shares_are_named_together(study: Decision) -> None:
    """No partner is singled out as the least one if another one's share has the same percent."""

    def says(*shares: float) -> str:
        names = ("VA", "Lyon", "Bern", "Rome")[: len(shares)]
        one = replace(view(Interval(0, 0, 0)), update_weights={"waffle": [list(shares)]})
        return update_sources(one, replace(study, names=names)).split("its own. ")[1]

    assert says(0.56, 0.142, 0.16, 0.138) == (
        "Among its partners, Bern contributed the most (16 %), Lyon and Rome the least (14 %)."
    )
    assert says(0.4, 0.2, 0.2, 0.2) == "Lyon, Bern and Rome contributed 20 % each."
    assert says(0.4, 0.6) == "Lyon contributed 60 %."


def test_the_summary_names_the_worst_agent_and_the_spread(study: Decision) -> None:
    """The summary counts gains and losses and names the worst agent and the spread between agents."""
    views = (
        replace(view(Interval(0.1, 0.05, 0.15)), name="A"),
        replace(view(Interval(-0.1, -0.15, -0.05)), name="B"),
        replace(view(Interval(0.0, -0.1, 0.1)), name="C"),
    )
    text = " ".join(federation_summary(replace(study, views=views), "waffle"))
    assert "1 agent gains clearly, 1 agent loses clearly, and for 1 there is no clear difference" in text
    assert "Clearly worse by joining: B." in text
    assert "The least favourable change is that of B: −10.0 points" in text
    assert "between agents is 8.16 points, and 0 points when each trains alone" in text


def test_the_headline_method() -> None:
    """The headline is WAFFLE, else the first personalised method, else FedAvg; Local alone is refused."""
    assert headline(("local", "ditto", "waffle")) == "waffle"
    assert headline(("local", "fedavg", "ditto")) == "ditto"
    assert headline(("local", "fedavg")) == "fedavg"
    assert "besides local" in refusal(headline, ("local",))


# --- the study


def test_a_study_of_real_runs(study: Decision) -> None:
    """Every agent has every method, weights sum to 1 per round, and the partners of agent 1 are measured."""
    assert [v.name for v in study.views] == ["agent 0", "agent 1", "agent 2"]
    assert study.methods == ("local", "fedavg", "weight-erosion", "waffle")
    assert (study.method, study.metric, study.seeds) == ("waffle", "accuracy", 2)
    for v in study.views:
        assert set(v.standings) == set(study.methods)
        assert all(s.scores["accuracy"].value == pytest.approx(np.mean(s.seeds)) for s in v.standings.values())
        assert all(sum(line) == pytest.approx(1) for rounds in v.update_weights.values() for line in rounds)
        assert len(v.update_weights["waffle"]) == SMALL.rounds
    assert [v.advice is None for v in study.views] == [True, False, True]
    advice = study.views[1].advice
    assert advice is not None
    assert list(advice.contributions) == ["agent 0", "agent 2"]
    assert study.views[1].recommended is not None


def test_a_study_without_its_baseline_is_refused(study: Decision) -> None:
    """A decision without runs of Local is refused."""
    runs = read_runs([study.examples[ALONE].folder.parent])
    with pytest.raises(WaffleError, match="expected runs of local"):
        decide([run for run in runs if run.config.method != "local"])
    odd = replace(runs[0], config=replace(runs[0].config, settings=replace(runs[0].config.settings, lr=0.5)))
    with pytest.raises(WaffleError, match="differ in lr"):
        decide([*runs[1:], odd])


def test_another_metric_can_decide(study: Decision) -> None:
    """Balanced accuracy can be selected; a metric that the data do not define is refused."""
    runs = read_runs([study.examples[ALONE].folder.parent])
    other = decide(runs, metric="balanced_accuracy")
    assert other.metric == "balanced_accuracy"
    assert "its balanced accuracy is" in verdict(other.views[0], "waffle", other.metric)
    with pytest.raises(WaffleError, match="agent 0 is not assessed: auc is not defined on its test data"):
        decide(runs, metric="auc")


def test_an_agent_without_a_baseline_is_not_assessed(study: Decision, tmp_path: Path) -> None:
    """An agent whose Local run diverged is not assessed, and the page states the reason."""
    runs = read_runs([study.examples[ALONE].folder.parent])
    lost = [
        replace(run, result={**run.result, "status": "diverged"})
        if run.config.method == "local" and run.config.settings.alice == "1"
        else run
        for run in runs
    ]
    rest = decide(lost)
    assert [v.name for v in rest.views] == ["agent 0", "agent 2"]
    assert rest.not_assessed == (
        "agent 1 is not assessed: no run of local finished, so there is nothing to compare with.",
    )
    assert rest.not_assessed[0] in write_page(rest, tmp_path / "page.html").read_text()


def test_recommendations_name_the_group(study: Decision) -> None:
    """A recommendation names the partners or those left out, whichever are fewer, and the gain on test data."""
    names = ("VA", "x", "y", "z")
    decision = replace(study, names=names)
    gained = Interval(0.07, 0.02, 0.12)
    found: dict[str, Interval] = {"x": gained}

    def advised(partners: tuple[str, ...], recommended: Interval | None = gained, **changes: Any) -> str:
        one = view(gained, partners=found, recommended=recommended)
        assert one.advice is not None
        advice = replace(one.advice, partners=partners, **changes)
        given = recommend(replace(one, advice=advice), decision)
        assert given is not None
        return f"{given.action}. {given.reason}"

    expected = "Expected gain with FedAvg: +7.0 points (95 % interval +2.0 to +12.0)."
    assert advised(("x", "y")) == f"join, without z. {expected}"
    assert advised(("x",)) == f"join with x. {expected}"
    assert advised(("x", "y", "z")) == f"join with all partners. {expected}"
    assert advised(("x", "y", "z"), method="waffle").startswith("join with all partners and WAFFLE. ")
    assert advised(("x",), Interval(0.01, -0.1, 0.1)).endswith("The difference is not clear.")
    assert "Expected change with FedAvg: −1.0 points" in advised(("x",), Interval(-0.01, -0.1, 0.1))
    assert advised(("x",), Interval(-0.01, -0.1, 0.1)).endswith("show no gain and do not rule one out.")
    assert "contradict the choice" in advised(("x",), Interval(-0.1, -0.2, -0.05))
    assert advised(("y",), join=False).startswith(
        "stay alone. Expected change in the best group found, FedAvg with y: "
    )
    assert advised(("y",), None).endswith("No run of FedAvg with this group finished.")


def test_agents_without_a_study_have_no_recommendation(study: Decision) -> None:
    """Only agents whose partners were measured have a recommendation."""
    (line,) = recommendations(study)
    assert line.startswith("agent 1: ")


def test_a_tiny_site_does_not_dominate_the_summary(study: Decision) -> None:
    """An agent with fewer than 20 test samples is not named as the least favourable one."""
    views = (
        replace(view(Interval(0.1, 0.05, 0.15)), name="A"),
        replace(view(Interval(-0.02, -0.05, 0.01)), name="B"),
        replace(view(Interval(-0.5, -0.9, 0.1), tests=5), name="C"),
    )
    text = " ".join(federation_summary(replace(study, views=views), "waffle"))
    assert "The least favourable change is that of B" in text
    assert text.endswith("Not compared here, with fewer than 20 test samples: C.")
    assert share_text(replace(study, views=views), "waffle").startswith("1 of 3 agents score better with WAFFLE")


def test_one_wide_interval_does_not_stretch_the_axis() -> None:
    """The axis covers the other intervals, and the wide one is cut and marked by an arrow."""
    found = {f"a{i}": Interval(0.01 * i, 0.01 * i - 0.05, 0.01 * i + 0.05) for i in range(4)}
    wide = {**found, "tiny": Interval(-0.4, -0.9, 0.1)}
    axis = axis_of(list(wide.values()), 0.0)
    assert axis.low > -0.1
    assert axis_of(list(found.values()), 0.0) == axis
    shown = partners_chart(view(Interval(0, 0, 0), partners=wide), "accuracy")
    assert shown.count("cut-low") == 1
    assert "An arrow marks an interval that continues beyond the axis" in shown
    assert "−40.0 points (95 % interval −90.0 to +10.0)" in shown
    assert "cut-" not in partners_chart(view(Interval(0, 0, 0), partners=found), "accuracy")


def test_ticks_are_round_numbers_within_the_axis() -> None:
    """An axis has two to eight ticks at multiples of 1, 2 or 5 times a power of ten."""
    assert ticks_of(Axis(-22, 32)) == [-20, -10, 0, 10, 20, 30]
    for width in (0.003, 0.7, 4.0, 33.0, 1e5):
        assert 2 <= len(ticks_of(Axis(-width / 3, width))) <= 8


def test_phases_cover_every_round_once() -> None:
    """A slider has at most 20 stops, and every round belongs to one."""
    for rounds in (1, 6, 20, 21, 100, 1000):
        parts = phases(rounds)
        assert [r for part in parts for r in part] == list(range(rounds))
        assert len(parts) <= 20


# --- the command


def test_decide_writes_the_page_and_reuses_runs(tmp_path: Path) -> None:
    """decide trains, compares and prints; a second call trains nothing; --json has the same text."""
    flags = ["--agents", "3", "--rounds", "2", "--model", "linear", "--samples-per-agent", "30", "--workers", "1"]
    line = ["decide", "digits", *flags, "--methods", "waffle", "--seeds", "1", "--out", tmp_path / "d"]
    first = waffle(*line, "--alice", "1", "--leave-one-out", "1")
    assert "note: --leave-one-out is now --partners leave-one-out" in first.err
    assert first.code == 0, first.err
    assert "agent 1" in first.out
    assert (tmp_path / "d" / "decision.html").exists()
    again = waffle(*line, "--alice", "1", "--partners", "leave-one-out", "--json")
    assert "3 already done" in again.words
    printed = json.loads(again.out)
    assert set(printed["gains"]) == {"agent 1"}
    low, high = printed["gains"]["agent 1"]["waffle"]["accuracy"][1:]
    assert low <= high
    assert all(line in " ".join(first.out.split()) for line in printed["says"])
    assert set(printed["recommendations"]) == {"agent 1"}


def test_decide_refuses_in_one_line(tmp_path: Path) -> None:
    """Duplicate seeds, unknown methods and unknown measurements are refused."""
    line = ["decide", "digits", "--out", str(tmp_path / "d")]
    assert "no duplicates" in waffle(*line, "--seeds", "1", "1").err
    assert "did you mean waffle?" in waffle(*line, "--methods", "wafle").err
    assert "expected auto or shapley or leave-one-out or none" in waffle(*line, "--partners", "all").err
    assert not (tmp_path / "d").exists()


def test_report_rewrites_the_page(study: Decision, tmp_path: Path) -> None:
    """`waffle report` on the folder of a decision writes its page, also for several Alices."""
    shown = waffle("report", study.examples[ALONE].folder.parent, "--out", tmp_path / "r")
    assert shown.code == 0, shown.err
    assert together(verdict(study.views[0], "waffle", "accuracy")) in (tmp_path / "r" / "decision.html").read_text()


# --- the page


def test_the_page_is_self_contained(study: Decision, tmp_path: Path) -> None:
    """The page loads no external resource and describes its charts in text."""
    text = write_page(study, tmp_path / "page.html").read_text()
    assert 'src="http' not in text
    assert 'href="http' not in text
    for v in study.views:
        assert together(verdict(v, "waffle", "accuracy")) in text
    assert "Who gains by joining?" in text
    alone = write_page(replace(study, views=study.views[:1]), tmp_path / "one.html").read_text()
    assert "Should agent 0 join?" in alone
    assert "<select" not in alone


def test_a_page_that_cannot_be_written_leaves_the_old_one(study: Decision, tmp_path: Path) -> None:
    """A failed write is refused in one line and leaves the old page and no partial file."""
    page = tmp_path / "page.html"
    page.mkdir()
    assert f"cannot write {page}: " in refusal(write_page, study, page)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_names_are_escaped(study: Decision, tmp_path: Path) -> None:
    """A name with markup is escaped in the text and in the data of the charts."""
    evil = '</script><script>alert("x")</script>&'
    names = (evil, *study.names[1:])
    unlike = study.distances._replace(names=list(names)) if isinstance(study.distances, Distances) else None
    odd = replace(study, names=names, views=(replace(study.views[0], name=evil), *study.views[1:]), distances=unlike)
    text = write_page(odd, tmp_path / "page.html").read_text()
    assert evil not in text
    assert "<script>alert" not in text


@contextmanager
def browsing(chromium: Any, page: Path) -> Iterator[tuple[Any, list[str]]]:
    """The page in headless Chromium without a network, with its console messages, errors and requests."""
    with chromium.new_context(viewport={"width": 1000, "height": 1100}, offline=True) as context:
        tab, messages = context.new_page(), []
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("request", lambda request: messages.append(request.url) if request.url != page.as_uri() else None)
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready]", timeout=60_000)
        yield tab, messages


def test_the_page_in_a_browser(chromium: Any, study: Decision, tmp_path: Path) -> None:
    """Charts render with alternative texts, controls and printing work, and the console is empty."""
    page = write_page(study, tmp_path / "page.html")
    with browsing(chromium, page) as (tab, messages):
        charts = tab.locator(".chart[role=img]:visible")
        assert charts.count() == 4  # best group, gains, methods, sources
        labels = [chart.get_attribute("aria-label") for chart in charts.all()]
        assert labels[1].startswith("Gain with WAFFLE over training alone: agent")
        assert tab.locator(".verdict:visible").inner_text().count("agent 0") >= 1
        tab.select_option("#agent", label="agent 1")
        assert charts.count() == 5
        text = tab.locator(".verdict:visible").inner_text().replace("\xa0", " ")
        assert verdict(study.views[1], "waffle", "accuracy") in text
        tab.select_option("#method", label="FedAvg")
        assert "With FedAvg" in tab.locator('[data-of="method"]:visible').inner_text()
        cells = tab.locator("#matrix-weight-erosion td")
        before = cells.all_inner_texts()
        tab.locator("#range-weight-erosion").focus()
        tab.keyboard.press("End")
        assert tab.locator("#range-weight-erosion + output").inner_text() == "round 6"
        last = [100 * share for v in study.views for share in v.update_weights["weight-erosion"][-1]]
        assert [float(text) for text in cells.all_inner_texts()] == pytest.approx(last, abs=0.6)
        assert cells.all_inner_texts() != before
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert tab.pdf().startswith(b"%PDF")
        assert messages == []


MARKS_INSIDE = """[...document.querySelectorAll('.line .dot')].filter(d => d.offsetParent).every(d => {
    const a = d.getBoundingClientRect(), b = d.parentElement.getBoundingClientRect();
    return a.left >= b.left - 8 && a.right <= b.right + 8 && a.top >= b.top && a.bottom <= b.bottom; })"""


def test_the_page_fits_every_screen(chromium: Any, study: Decision, tmp_path: Path) -> None:
    """At 400 and 1,200 pixels, light and dark, nothing is wider than the window and marks are inside their tracks."""
    page = write_page(study, tmp_path / "page.html")
    for width, theme in product((400, 1200), ("light", "dark")):
        with chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme) as context:
            tab = context.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-ready]")
            assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (width, theme)
            assert tab.evaluate(MARKS_INSIDE), (width, theme)
            dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
            assert dark == (theme == "dark"), (width, theme)


def test_names_with_markup_in_a_browser(chromium: Any, study: Decision, tmp_path: Path) -> None:
    """Names with markup are not executed in a browser."""
    evil = '"><img src=x onerror=alert(1)></script>'
    odd = replace(study, names=(evil, *study.names[1:]), views=(replace(study.views[0], name=evil),), distances=None)
    with browsing(chromium, write_page(odd, tmp_path / "page.html")) as (tab, messages):
        assert tab.locator("h1").inner_text() == f"Should {evil} join?"
        assert tab.locator("img").count() == 0
        assert messages == []


# --- user data


def folder_of_tables(folder: Path, numbers: bool) -> Path:
    """Three hospitals whose target depends on two columns, with the opposite sign in the third."""
    rng = np.random.default_rng(0)
    for name, sign in (("north", 1), ("south", 1), ("<b>west</b>", -1)):
        x = rng.standard_normal((80, 2))
        signal = sign * x.sum(axis=1) + 0.3 * rng.standard_normal(80)
        y = [f"{v:.3f}" for v in signal] if numbers else ["ill" if v > 0 else "well" for v in signal]
        lines = [f"{a:.4f},{b:.4f},{t}" for (a, b), t in zip(x, y, strict=True)]
        folder.mkdir(exist_ok=True)
        (folder / f"{name.replace('/', '')}.csv").write_text("age,pressure,outcome\n" + "\n".join(lines) + "\n")
    return folder


def for_north(*command: str | Path, rounds: int) -> list[str | Path]:
    """A command on these tables with north as Alice."""
    return [
        *command,
        "--target",
        "outcome",
        "--alice",
        "north",
        "--rounds",
        str(rounds),
        "--workers",
        "1",
        "--lr",
        "0.1",
    ]


def test_a_run_on_user_data_states_whether_alice_gains(tmp_path: Path) -> None:
    """A run on user data also trains Local and FedAvg and writes the verdict; --no-baselines skips them."""
    data = folder_of_tables(tmp_path / "hospitals", numbers=False)
    line = for_north("run", "waffle", "--data", data, rounds=4)
    shown = waffle(*line, "--out", tmp_path / "run")
    assert shown.code == 0, shown.err
    assert "north" in shown.out
    assert "95 % interval" in shown.out
    assert "Should north join?" in (tmp_path / "run" / "decision.html").read_text()
    assert {run.config.method for run in read_runs([tmp_path / "run"])} == {"local", "fedavg", "waffle"}
    assert "3 already done" in waffle(*line, "--out", tmp_path / "run").words
    printed = json.loads(waffle(*line, "--out", tmp_path / "run", "--json").out)
    assert printed["says"][0] in shown.out
    assert waffle(*line, "--no-baselines", "--out", tmp_path / "alone").code == 0
    assert not (tmp_path / "alone" / "decision.html").exists()
    again = waffle("report", tmp_path / "run", "--out", tmp_path / "r")
    assert printed["says"][0] in again.out


def test_a_run_with_leave_out_has_a_page(tmp_path: Path) -> None:
    """When every run leaves out the same partner, the page covers the remaining agents."""
    data = folder_of_tables(tmp_path / "hospitals", numbers=False)
    line = for_north("run", "waffle", "--data", data, rounds=2)
    shown = waffle(*line, "--leave-out", "south", "--out", tmp_path / "run")
    assert shown.code == 0, shown.err
    assert ", 2 agents. An agent is a hospital" in (tmp_path / "run" / "decision.html").read_text()


def test_a_decision_on_regression(tmp_path: Path) -> None:
    """A regression is assessed by its error, where less is better; the dissimilar agent loses with FedAvg."""
    data = folder_of_tables(tmp_path / "hospitals", numbers=True)
    line = [
        "decide",
        data,
        "--target",
        "outcome",
        "--rounds",
        "8",
        "--workers",
        "1",
        "--model",
        "linear",
        "--lr",
        "0.05",
    ]
    shown = waffle(*line, "--methods", "fedavg", "waffle", "--seeds", "1", "--out", tmp_path / "d", "--json")
    assert shown.code == 0, shown.err
    gains = json.loads(shown.out)["gains"]
    assert gains["<b>west<b>"]["fedavg"]["rmse"][2] < 0
    text = (tmp_path / "d" / "decision.html").read_text()
    assert text.count("with WAFFLE and") == 3
    assert "most frequent class" not in text.partition("<script")[0]
    assert "&lt;b&gt;west&lt;b&gt;" in text
    assert "<b>" not in text.partition("<script")[0]


def test_runs_on_different_data_are_not_compared(tmp_path: Path) -> None:
    """After a change of the data, finished runs are refused with the folders to delete."""
    data = folder_of_tables(tmp_path / "hospitals", numbers=False)
    line = for_north("decide", data, rounds=1)
    line += ["--seeds", "1", "--model", "linear", "--out", tmp_path / "d", "--quiet", "--methods"]
    assert waffle(*line, "fedavg").code == 0
    table = data / "south.csv"
    table.write_text(table.read_text().replace("\n", "\n9", 1))
    mixed = waffle(*line, "fedavg", "waffle")
    assert mixed.code == 2
    assert "were made on different data: delete the folder of each run made before" in mixed.err
    assert len(mixed.err.strip().splitlines()) == 1
    for method in ("local", "fedavg"):
        for folder in (tmp_path / "d").glob(f"*-{method}-*"):
            shutil.rmtree(folder)
    assert waffle(*line, "fedavg", "waffle").code == 0


def test_a_metric_is_checked_before_training(tmp_path: Path) -> None:
    """A metric that no test data define is refused before training; an agent that lacks it is not assessed."""
    data = folder_of_tables(tmp_path / "hospitals", numbers=False)
    header, *rows = (data / "south.csv").read_text().splitlines()
    (data / "south.csv").write_text("\n".join([header, *(row for row in rows if row.endswith("ill"))]) + "\n")
    line = ["decide", data, "--target", "outcome", "--rounds", "1", "--workers", "1", "--seeds", "1", "--lr", "0.1"]
    line += ["--model", "linear", "--methods", "fedavg", "--out", tmp_path / "d", "--quiet"]
    refused = waffle(*line, "--metric", "rmse")
    assert refused.code == 2
    assert "rmse is not defined on any agent's test data; available: accuracy, balanced_accuracy, auc" in refused.err
    assert "available: accuracy" in waffle(*line, "--alice", "south", "--metric", "auc").err
    assert not (tmp_path / "d").exists()
    shown = waffle(*line, "--metric", "auc")
    assert shown.code == 0, shown.err
    assert "south is not assessed: auc is not defined on its test data; available: accuracy." in " ".join(
        shown.out.split()
    )
    by_accuracy = waffle(*line)
    assert by_accuracy.code == 0, by_accuracy.err
    assert "Its test data contain only one class" in (tmp_path / "d" / "decision.html").read_text()


def test_local_preprocessing_leaves_no_features_to_compare(tmp_path: Path) -> None:
    """With local standardisation the page explains why it has no feature distances."""
    data = folder_of_tables(tmp_path / "hospitals", numbers=False)
    line = for_north("decide", data, rounds=1)
    line += [
        "--seeds",
        "1",
        "--model",
        "linear",
        "--methods",
        "fedavg",
        "--out",
        tmp_path / "d",
        "--preprocessing",
        "local",
    ]
    assert waffle(*line).code == 0
    text = (tmp_path / "d" / "decision.html").read_text()
    assert 'id="distance-gradient"' in text
    assert 'id="distance-feature"' not in text
    assert "each agent standardised its features with its own means" in text


@pytest.mark.data
def test_heart_disease_states_whether_va_gains(published: Path, tmp_path: Path) -> None:
    """On Heart Disease one command states whether VA gains, with the interval."""
    data = published / "heart-disease"
    if not data.is_dir():
        pytest.skip("no heart-disease in WAFFLE_DATA")
    shown = waffle("run", "waffle", "--data", data, "--alice", "va", "--rounds", "5", "--out", tmp_path / "va")
    assert shown.code == 0, shown.err
    text = (tmp_path / "va" / "decision.html").read_text()
    assert "Should va join?" in text
    assert "of its 50 test samples correctly" in text
    assert "interval" in text
