"""The reproduction: the paper's numbers, committed records, claims and generated pages."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import privacy_accuracy_page
from paper import claims, drift, momentum, page, studies, tournament_page
from paper import command as paper_command
from paper import run_missing as running
from paper.cell_tables import summary_table
from paper.cells import AS_PRINTED, study_cells
from paper.cells import cells as cells_of
from paper.convergence import compare, p_value, rounds_needed
from paper.markdown import Records
from paper.printed_table import METHODS, P_D, SLOPE, SPLITS, TABLE
from paper.run_missing import compute, is_in, run_missing
from paper.studies import find_root, read_study
from scipy.stats import t as student

from conftest import refusal
from waffle_fl.algorithms import SGD, Net, Round
from waffle_fl.algorithms.scaffold import Scaffold
from waffle_fl.claims.record_files import problems, read_part, record_of
from waffle_fl.cli import commands, menu
from waffle_fl.config import RunConfig, Settings, load_experiments
from waffle_fl.experiment import Interrupted, Listener, Runtime
from waffle_fl.manifest import seal
from waffle_fl.partition import concept_shift
from waffle_fl.report.charts import to_svg
from waffle_fl.results import PROTOCOLS, FinishedRun, Score, condense, read_condensed, scores

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "results" / "mnist-6000.jsonl"
TINY = """
methods = ["fedavg", "waffle-paper"]
splits = ["B", "A*"]
seeds = [1, 2]
rounds = 3
samples_per_agent = 20
validation = 0.2

[variants.plain]

[variants.clipped]
waffle-paper = { clip = 1.0 }
methods = ["waffle-paper"]
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone whose only study is a tiny one."""
    for folder in ("experiments", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "experiments" / "tiny.toml").write_text(TINY)
    (tmp_path / "experiments" / "mnist.toml").write_text(TINY)
    (tmp_path / "paper").symlink_to(ROOT / "paper")
    monkeypatch.setattr(studies, "STUDIES", {"tiny": ("tiny",)})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def runs() -> list[FinishedRun]:
    return read_condensed(RECORD)


# ---------------------------------------------------------------------------------------------------- the paper itself


def test_the_papers_table() -> None:
    """The paper's table has sixty cells, in percent."""
    assert {data: len(cells) for data, cells in TABLE.items()} == {"mnist": 30, "cifar10": 30}
    assert TABLE["mnist"]["C", "waffle-paper"] == (99.0, 0.08)
    assert TABLE["mnist"]["A*", "fedavg"] == (13.37, 3.21)
    assert TABLE["cifar10"]["B*", "scaffold"] == (47.6, None)
    assert TABLE["cifar10"]["C", "local"].mean == 83.2


@pytest.mark.parametrize(
    ("file", "data"), [("mnist", "mnist"), ("mnist-6000", "mnist"), ("cifar10-printed", "cifar10")]
)
def test_weight_erosion_has_the_papers_p_d(file: str, data: str) -> None:
    """The experiment files hold the paper's p_d for each distribution."""
    (experiment,) = load_experiments(ROOT / "experiments" / f"{file}.toml")
    assert experiment.options["weight-erosion"]["p_d"] == P_D[data]


def test_experiment_files_hold_the_papers_settings() -> None:
    """Step size, batch size, rounds, momentum, weight decay and WAFFLE's slope are the paper's."""
    for name, expected in {
        "mnist": (100, 32, 0.1, 0.0, 0.0),
        "mnist-6000": (100, 32, 0.1, 0.0, 0.0),
        "mnist-splits": (100, 32, 0.1, 0.0, 0.0),
        "mnist-alices": (100, 32, 0.1, 0.0, 0.0),
        "cifar10": (100, 128, 0.01, 0.9, 5e-4),
    }.items():
        experiments = load_experiments(ROOT / "experiments" / f"{name}.toml")
        assert set(METHODS) <= {method for experiment in experiments for method in experiment.methods}
        for experiment in experiments:
            s = experiment.settings
            assert (s.rounds, s.batch_size, s.lr, s.momentum, s.weight_decay) == expected
            assert experiment.splits == SPLITS
            assert s.remainder == "keep"
            departs = experiment.name == "cifar10/directions"  # the only departure, as the results page states
            assert (
                experiment.options.get("waffle-paper", {}).get("compared", "updates")
                == ("updates", "directions")[departs]
            )
    assert Scaffold().clip == 2.0
    assert commands.ALGORITHMS["waffle-paper"]().omega == f"sigmoid({SLOPE})"  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("study", ["mnist", "cifar10"])
def test_committed_records_match_their_configs(study: str) -> None:
    """The committed records have no problem other than missing runs."""
    assert [line for line in problems(read_study(ROOT, study)) if "not complete" not in line] == []


def with_first_changed(runs: list[FinishedRun], **changes: Any) -> list[FinishedRun]:
    return [replace(runs[0], **changes), *runs[1:]]


def test_problems_of_a_record_are_reported(runs: list[FinishedRun], tmp_path: Path) -> None:
    """Unplanned, missing and duplicate runs, other data, and results that do not match their rounds are reported."""
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    (tmp_path / "results").mkdir()
    first = runs[0]
    other = replace(first.config, settings=replace(first.config.settings, lr=0.2))
    binding = {**first.provenance["binding"], "data": "other"}
    better = {**first.result, "best": {"round": 1, "accuracy": 1.0}}
    worse = {**first.result, "best": {"round": 0, "accuracy": 0.5}}
    cases = {
        "belong to no config": with_first_changed(runs, config=other),
        "not complete": runs[1:],
        "occurs twice": [*runs, first],
        "saw different data": with_first_changed(runs, provenance={**first.provenance, "binding": binding}),
        "does not match its rounds": with_first_changed(runs, result=better),
        "not match its rounds": with_first_changed(runs, result=worse),
        "match its rounds": with_first_changed(runs, rounds=[{**first.rounds[-1], "accuracy": 0.1}]),
    }
    for expected, content in cases.items():
        record_of(tmp_path, "mnist-6000").write_text("".join(f"{line}\n" for line in condense(content)))
        found = problems({"mnist-6000": read_part(tmp_path, "mnist-6000")})
        assert any(expected in line for line in found), (expected, found)


def test_additional_seeds_are_accepted(runs: list[FinishedRun], tmp_path: Path) -> None:
    """A record may hold a sixth seed."""
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    (tmp_path / "results").mkdir()
    sixth = replace(runs[0].config, settings=replace(runs[0].config.settings, seed=6))
    lines = condense([*runs, replace(runs[0], config=sixth)])
    record_of(tmp_path, "mnist-6000").write_text("".join(f"{line}\n" for line in lines))
    part = read_part(tmp_path, "mnist-6000")
    assert len(part.all_runs) == len(runs) + 1
    assert not part.unplanned


# ------------------------------------------------------------------------------------------------------------- running


def test_missing_runs_are_run_and_recorded(clone: Path) -> None:
    """Missing runs are run and recorded; a second call changes nothing."""
    run_missing(clone, "tiny", clone / "runs", Runtime(), Listener(), "tiny/plain/B")
    part = read_part(clone, "tiny")
    assert {name: len(found) for name, found in part.runs.items()} == {"tiny/plain": 4, "tiny/clipped": 0}
    run_missing(clone, "tiny", clone / "runs", Runtime(), Listener())
    part = read_part(clone, "tiny")
    assert {name: len(found) for name, found in part.runs.items()} == {"tiny/plain": 8, "tiny/clipped": 4}
    assert problems({"tiny": part}) == []
    assert all("selected" in run.result for run in part.all_runs)
    before = record_of(clone, "tiny").read_bytes()
    run_missing(clone, "tiny", clone / "elsewhere", Runtime(), Listener())
    assert record_of(clone, "tiny").read_bytes() == before
    assert not (clone / "elsewhere").exists()


def test_alice_all_plans_one_run_per_agent(clone: Path) -> None:
    """A study with alice = "all" plans, runs and records one run per agent."""
    text = 'methods = ["fedavg"]\nsplits = ["B"]\nalice = "all"\nagents = 3\nrounds = 1\nsamples_per_agent = 20\n'
    (clone / "experiments" / "tiny.toml").write_text(text)
    cells = ["tiny/B/fedavg/1", "tiny/B for 1/fedavg/1", "tiny/B for 2/fedavg/1"]
    assert list(read_part(clone, "tiny").planned()) == cells
    run_missing(clone, "tiny", clone / "runs", Runtime(), Listener())
    part = read_part(clone, "tiny")
    assert [run.config.settings.alice for run in part.all_runs] == ["0", "1", "2"]
    assert not part.missing()
    assert problems({"tiny": part}) == []


def test_finished_runs_are_recorded_while_others_train(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run is recorded before the others finish, and the listener receives every event."""
    monkeypatch.setattr(running, "FLUSH_SECONDS", 0.0)
    seen: list[int] = []

    class CountingListener(Listener):
        def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
            seen.append(len(read_part(clone, "tiny").all_runs))

    run_missing(clone, "tiny", clone / "runs", Runtime(stack=1), CountingListener())
    assert len(seen) == 12
    assert seen[:3] == [0, 1, 2]


def test_finished_runs_are_flushed_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that end together are flushed at most once per minute, also while the next run trains."""
    now, flush_times = [0.0], list[float]()
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])
    listener = running._SavingListener(Listener(), lambda: flush_times.append(now[0]))
    config = RunConfig(method="fedavg", settings=Settings())
    for now[0] in (100.0, 100.1):
        listener.ended(config, {})
    for now[0] in (130.0, 161.0, 300.0):
        listener.advanced(config, {})
    assert flush_times == [100.0, 161.0]


def test_runs_of_another_results_version_are_not_recorded(clone: Path) -> None:
    """A finished run of another results version is reported and not recorded."""
    run_missing(clone, "tiny", clone / "runs", Runtime(), Listener())
    record_of(clone, "tiny").unlink()
    about = next((clone / "runs").rglob("provenance.json"))
    content = json.loads(about.read_text())
    about.write_text(json.dumps({**content, "binding": {**content["binding"], "results_version": 0}}))
    seal(about.parent)
    received: list[str] = []

    class RecordingListener(Listener):
        def warned(self, message: str) -> None:
            received.append(message)

    run_missing(clone, "tiny", clone / "runs", Runtime(), RecordingListener())
    assert len(read_part(clone, "tiny").missing()) == 1
    assert any("used other software" in message for message in received)


def test_a_study_stops_at_its_time_limit_and_resumes(clone: Path) -> None:
    """A study stops at its time limit; the same call resumes it and gives the rounds of an uninterrupted study."""
    with pytest.raises(Interrupted):
        run_missing(clone, "tiny", clone / "runs", Runtime(minutes=1e-9), Listener())
    run_missing(clone, "tiny", clone / "runs", Runtime(), Listener())
    resumed = {run.config.label: run.rounds for run in read_part(clone, "tiny").all_runs}
    record_of(clone, "tiny").unlink()
    run_missing(clone, "tiny", clone / "anew", Runtime(), Listener())
    assert resumed
    assert resumed == {run.config.label: run.rounds for run in read_part(clone, "tiny").all_runs}


def test_seeds_can_be_overridden(clone: Path) -> None:
    """Other seeds than the file's are run and recorded on request."""
    run_missing(clone, "tiny", clone / "runs", Runtime(), Listener(), "tiny/clipped", seeds=(7,))
    assert {run.config.settings.seed for run in read_part(clone, "tiny").all_runs} == {7}


def test_methods_can_be_selected(clone: Path) -> None:
    """Only the named methods are run; runs of the other methods stay missing."""
    methods = {config.method for config in read_part(clone, "tiny").planned().values()}
    run_missing(clone, "tiny", clone / "runs", Runtime(), Listener(), methods=("waffle-paper",))
    part = read_part(clone, "tiny")
    assert {run.config.method for run in part.all_runs} == {"waffle-paper"}
    assert {config.method for config in part.missing().values()} == methods - {"waffle-paper"} != set()
    text = refusal(run_missing, clone, "tiny", clone / "runs", Runtime(), Listener(), methods=("wafle",))
    assert "no method 'wafle' in tiny, did you mean waffle-paper?" in text


def test_recorded_runs_are_rerun_on_request(clone: Path) -> None:
    """A recorded run is run again on request and replaces the earlier run."""
    cell = ("tiny/clipped/B/waffle-paper", (1,))
    run_missing(clone, "tiny", clone / "runs", Runtime(), Listener(), *cell)
    first = record_of(clone, "tiny").read_text()
    run_missing(clone, "tiny", clone / "anew", Runtime(), Listener(), *cell, anew=True)
    assert (clone / "anew" / "tiny" / "clipped" / "digits-B-waffle-paper-1").is_dir()
    assert record_of(clone, "tiny").read_text() == first


def test_an_unknown_cell_is_refused(clone: Path) -> None:
    """An unknown cell is refused in one line, before any work."""
    text = refusal(run_missing, clone, "tiny", clone / "runs", Runtime(), Listener(), "tiny/B/waffle")
    assert "no cell 'tiny/B/waffle'" in text
    assert is_in("mnist/A*/waffle/1", "mnist/A*")
    assert not is_in("mnist/A*/waffle/1", "mnist/A")


def test_python_m_paper_needs_a_clone() -> None:
    """python -m paper is refused in one line outside of a clone."""
    command = [sys.executable, "-m", "paper", "mnist"]
    done = subprocess.run(
        command, cwd=os.sep, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "waffle: `waffle reproduce` works in a clone of the repository: no experiments/ and results/ here"
    ]


# -------------------------------------------------------------------------------------------------------------- claims


def cells(**means: float) -> dict[tuple[str, str], Score]:
    """Accuracies of every cell: 90, except those given as method or method_split (x stands for the star)."""
    found = {(split, method): 0.9 for split in SPLITS for method in (*METHODS, "ditto")}
    for name, value in means.items():
        method, _, split = name.partition("_")
        for where in SPLITS if not split else (split.replace("x", "*"),):
            found[where, {"we": "weight-erosion", "waffle": "waffle-paper"}.get(method, method)] = value / 100
    return {key: Score(value, 0.001, 5, 0) for key, value in found.items()}


def test_above_by_hand() -> None:
    """Equal is not above; the numbers count the cases and show the closest one, or those that fail."""
    better = cells(waffle=95, local_B=91)
    verdict = claims.above("x", better, ("B", "C"), ("waffle-paper",), ("local", "fedavg"))
    assert verdict.holds
    assert verdict.numbers.startswith(
        "4 of 4, 4 significantly; B: WAFFLE 95.00, Local 91.00, difference +4.00 ± 0.06, p = "
    )
    assert not claims.above("x", cells(), ("B",), ("waffle-paper",), ("local",)).holds
    assert claims.above("x", cells(waffle=95), ("A*",), ("waffle-paper",), ("local",), by=5).holds
    assert not claims.above("x", cells(waffle=95), ("A*",), ("waffle-paper",), ("local",), by=5.5).holds
    lacking = {key: score for key, score in better.items() if key != ("C", "local")}
    assert claims.above("x", lacking, ("C",), ("waffle-paper",), ("local",)).numbers == "no record of Local on C"


def test_a_claim_is_undecided_within_the_noise_of_seeds() -> None:
    """A difference that Welch's test cannot tell from 0 leaves the claim undecided; one that it can fails it."""
    slightly = claims.above("x", cells(local=90.05), ("B",), ("waffle-paper",), ("local",))
    clearly = claims.above("x", cells(local=91), ("B",), ("waffle-paper",), ("local",))
    assert (slightly.word, clearly.word) == ("undecided", "does not hold")
    one_seed = {key: replace(score, seeds=1, std=None) for key, score in cells(local=90.05).items()}
    assert claims.above("x", one_seed, ("B",), ("waffle-paper",), ("local",)).word == "does not hold"


def test_near_the_best_by_hand() -> None:
    """One deviation of the best method is allowed, and there are no exceptions."""
    assert claims.near_the_best(cells(waffle=94.95, apfl=95.0)).holds
    verdict = claims.near_the_best(cells(waffle=95, waffle_A=90, apfl_A=90.2))
    assert not verdict.holds
    assert verdict.numbers.startswith("4 of 5; A -0.20")


def test_distance_from_the_paper() -> None:
    """On MNIST a cell may be below the paper by the paper's own spread, on CIFAR-10 2 points away either way."""
    printed = {f"waffle_{split.replace('*', 'x')}": TABLE["mnist"][split, "waffle-paper"].mean for split in SPLITS}
    assert claims.within_the_paper(cells(**printed)).holds
    spread = TABLE["mnist"]["C", "waffle-paper"].std or 0.0
    low = printed | {"waffle_C": printed["waffle_C"] - spread - 0.01}
    assert not claims.within_the_paper(cells(**low)).holds
    cifar = {f"waffle_{split.replace('*', 'x')}": TABLE["cifar10"][split, "waffle-paper"].mean for split in SPLITS}
    assert claims.close_to_paper(cells(**cifar), "cifar10", 2).holds
    assert not claims.close_to_paper(cells(**cifar | {"waffle_B": 95.2}), "cifar10", 2).holds


def test_agreement_is_a_test_with_both_spreads() -> None:
    """A cell agrees with the paper if Welch's test finds no difference: here all but one."""
    printed = {key: (cell.mean / 100, (cell.std or 0.0) / 100) for key, cell in TABLE["mnist"].items()}
    scores = {key: Score(mean, std, 5, 0) for key, (mean, std) in printed.items()}
    assert claims.agreement(scores, "mnist").holds
    scores["A", "local"] = replace(scores["A", "local"], mean=0.9)
    assert claims.agreement(scores, "mnist").numbers == "29 of 30 cells agree"


def test_a_single_draw_of_the_paper_is_tested_as_a_further_draw_of_ours() -> None:
    """On A* and on CIFAR-10 the paper has one draw: Student's test with our spread, and none with one of ours."""
    ours = {("A*", "waffle-paper"): Score(0.9, 0.02, 3, 0), ("A", "waffle-paper"): Score(0.9, None, 1, 0)}
    gap = 0.9 - TABLE["cifar10"]["A*", "waffle-paper"].mean / 100
    assert gap == pytest.approx(0)
    assert claims.agreement_test(ours, "cifar10", "A*", "waffle-paper") == pytest.approx(1)
    by_hand = 2 * (1 - student(2).cdf((0.9799 - 0.9) / (0.02 * (1 + 1 / 3) ** 0.5)))
    assert claims.agreement_test(ours, "mnist", "A*", "waffle-paper") == pytest.approx(by_hand)
    assert np.isnan(claims.agreement_test(ours, "cifar10", "A", "waffle-paper"))


@pytest.mark.parametrize("study", ["mnist", "cifar10"])
def test_no_claim_holds_without_records(study: str, records: Records) -> None:
    """Without runs no claim holds."""
    empty = {name: replace(part, runs={key: [] for key in part.runs}) for name, part in records.parts.items()}
    assert not any(verdict.holds for verdict in claims.verdicts(study, empty))


def test_a_cell_is_a_mean_over_units(records: Records) -> None:
    """A* of WAFFLE on MNIST is the mean over ten permutations of means over seeds; Local has ten seeds instead."""
    found = study_cells("mnist", records.parts)
    runs = [run for run in records.runs("mnist-permutations") if (run.row, run.config.method) == ("A*", "waffle-paper")]
    by_draw = [
        np.mean([r.result["best"]["accuracy"] for r in runs if r.config.settings.permutation_seed == draw])
        for draw in range(10)
    ]
    assert found["A*", "waffle-paper"].mean == pytest.approx(np.mean(by_draw))
    assert found["A*", "waffle-paper"].std == pytest.approx(np.std(by_draw, ddof=1))
    assert (found["A*", "waffle-paper"].seeds, found["A*", "local"].seeds, found["B", "ditto"].seeds) == (10, 10, 10)
    local = [run for run in records.runs("mnist") if run.config.method == "local"]
    assert found["A*", "local"] == cells_of(local)["A*", "local"]


def test_both_rows_of_waffle_on_cifar(records: Records) -> None:
    """WAFFLE has two rows on CIFAR-10: directions, and the printed distances."""
    found = study_cells("cifar10", records.parts)
    by_variant = {name.rpartition("/")[2]: runs for name, runs in records.parts["cifar10"].runs.items()}
    assert found["C", "waffle-paper"] == cells_of(by_variant["directions"])["C", "waffle-paper"]
    assert found["C", AS_PRINTED] == cells_of(by_variant["printed"])["C", "waffle-paper"]


# --------------------------------------------------------------------------------------------------------- convergence


@pytest.mark.parametrize("differences", [[1, 2, 3], [-4, 1, 0, 2, 2], [5, 5, 5, 5, 5], [0, 0], [3, -1, 7, -2]])
def test_the_sign_flip_test_counts_every_sign(differences: list[int]) -> None:
    """The p-value is the share of all sign patterns whose sum is as far from 0."""
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    assert p_value(differences) == sum(total >= abs(sum(differences)) for total in sums) / len(sums)


def test_five_seeds_cannot_be_significant() -> None:
    """The smallest p-value of five pairs is 2/32."""
    assert p_value([9, 9, 9, 9, 9]) == 0.0625


def test_rounds_to_a_common_target_by_hand(runs: list[FinishedRun]) -> None:
    """The target is the higher of both ends; a run that never reaches it counts as one round more than it has."""
    settings = replace(runs[0].config.settings, rounds=12)

    def run(method: str, *accuracies: float) -> FinishedRun:
        rounds = [{"round": r + 1, "accuracy": value} for r, value in enumerate(accuracies)]
        return replace(runs[0], rounds=rounds, config=RunConfig(method=method, settings=settings))

    fast, slow = run("waffle-paper", 0.2, 0.85, *[0.9] * 10), run("apfl", 0.3, 0.4, 0.5, *[0.8] * 9)
    assert (rounds_needed(fast, 0.9), rounds_needed(slow, 0.8), rounds_needed(slow, 0.81)) == (3, 4, None)
    split, overall = compare([fast, slow], "waffle-paper", "apfl")
    assert (split.splits, split.target, split.ours, split.theirs) == ("A", pytest.approx(0.9), 3, 13)
    assert (split.our_reached, split.their_reached, split.pairs) == (1, 0, 1)
    assert (overall.splits, overall.target, overall.ours - overall.theirs, overall.p_value) == ("all", None, -10, 1.0)
    assert compare([fast], "waffle-paper", "apfl") == []


# ---------------------------------------------------------------------------------------------------- computed records


def test_drift_matches_theory() -> None:
    """SCAFFOLD ends in the common optimum, WAFFLE near Alice's optimum, FedAvg away from the common optimum."""
    ends = {name: drift.trajectory(algorithm)[0][-1] for name, algorithm in drift.algorithms().items()}
    goal = drift.common_optimum()
    torch.testing.assert_close(ends["scaffold"], goal, atol=1e-4, rtol=0)
    assert (ends["fedavg"] - goal).norm() > 0.1
    assert (ends["waffle-paper"] - drift.OPTIMA[0]).norm() < 0.1


def test_momentum_loop_matches_scaffold() -> None:
    """For the outside form, the loop of the momentum table gives the models of Scaffold."""
    algorithm = Scaffold(SGD(momentum.LR, momentum.MOMENTUM), clip=0.0)
    server, agents = algorithm.init(Net(drift.START, drift.START[:0]), 3)
    everyone, steps = torch.ones(3, dtype=torch.bool), torch.full((3,), momentum.STEPS)
    for r, expected in enumerate(momentum.models(*momentum.FORMS["outside, divided by K (ours)"]), start=1):
        down = algorithm.broadcast(server, 3)
        local = algorithm.begin(down, agents)
        for _ in range(momentum.STEPS):
            local = algorithm.step(local, drift.gradient)
        agents, up = algorithm.finish(down, agents, local)
        server, _ = algorithm.aggregate(server, up, Round(r, 20, torch.tensor(0), everyone, everyone, steps, steps, 1))
        torch.testing.assert_close(server.x, expected)


def test_computed_records_are_reproducible(clone: Path) -> None:
    """The committed records of drift, momentum and quadratics are what the command writes."""
    compute(clone)
    for name in ("drift", "momentum", "quadratics"):
        assert record_of(clone, name).read_text() == record_of(ROOT, name).read_text()


# --------------------------------------------------------------------------------------------------------------- pages


@pytest.fixture(scope="module")
def records() -> Records:
    return page.read_records(ROOT)


@cache
def stale_pages_of_this_clone() -> tuple[str, ...]:
    return tuple(page.stale_pages(ROOT))


@pytest.mark.docs
@pytest.mark.slow_first
def test_pages_and_figures_match_their_records() -> None:
    """Every generated page and figure is what the committed records give, and each algorithm's page has its results."""
    assert stale_pages_of_this_clone() == ()
    for path in (ROOT / "docs" / "algorithms").glob("*.md"):
        assert f"<!-- results: {path.stem} -->" in path.read_text()


@pytest.mark.parametrize("selection", ["local/A", "waffle-paper/C", "weight-erosion/C", "apfl"])
def test_a_page_from_few_runs(selection: str, runs: list[FinishedRun], records: Records) -> None:
    """Page and figures can be made from any part of the records, and the page lists what is missing."""
    method, _, row = selection.partition("/")
    few = [run for run in runs if run.config.method == method and run.row in (row or run.row)]
    part = replace(records.parts["mnist-6000"], runs={"mnist-6000": few})
    some = replace(records, parts={**records.parts, "mnist": replace(part, name="mnist"), "mnist-6000": part})
    assert f"{175 - len(few)} of 175 runs" in page.results_page(some)
    assert page.convergence_page(some)
    unchanged = {"drift", "quadratics", "accuracy-cifar10", "sizes"}  # not drawn from the records of MNIST
    assert all(to_svg(chart()) for name, _, chart in page.pictures(some) if name not in unchanged)


def test_the_readme_shows_both_data_sets(records: Records) -> None:
    """The README's table has ten rows: five splits of MNIST and of CIFAR-10, our accuracy and the paper's."""
    lines = summary_table(records).splitlines()
    assert len(lines) == 12
    assert all(line in (ROOT / "README.md").read_text() for line in lines)
    assert lines[4].startswith("| MNIST C | ")
    assert "(99.00)" in lines[4]
    assert "–" not in "".join(lines)


def test_records_are_small() -> None:
    """No record of the paper's studies exceeds 1 MiB."""
    names = [name for parts in studies.STUDIES.values() for name in parts]
    assert all(record_of(ROOT, name).stat().st_size < 1 << 20 for name in names)


def test_the_text_on_cifar_matches_the_records(records: Records) -> None:
    """The numbers in the text on CIFAR-10 match the records: rounds of exclusion, weights and margins."""
    tried = {name.rpartition("/")[2]: runs for name, runs in records.parts["cifar10-departures"].runs.items()}
    tried["directions"] = [run for run in records.runs("cifar10-reset") if run.config.method == "waffle-paper"]

    def dropped(variant: str) -> list[int]:
        """The first round in which each agent other than Alice has no weight, on C."""
        (run,) = (run for run in tried[variant] if run.row == "C")
        return [next(line["round"] for line in run.rounds if not line["weights"][i]) for i in range(1, 10)]

    first = {variant: dropped(variant) for variant in tried}
    for variant in ("updates", "gradients"):
        assert all(first[variant][0] < other for other in first[variant][1:])  # agent 1, one of the two nearest
    assert first["updates"][0] < first["gradients"][0]
    assert min(first["directions"]) == 94
    assert (max(first["updates"]), max(first["directions"])) == (75, 97)

    shared = (concept_shift(10, 10, 0, 1, False) == np.arange(10)).sum(axis=1)[1:]
    for variant, correlation in (("directions", 0.99), ("updates", 0.90)):
        (run,) = (run for run in tried[variant] if run.row == "A*")
        weights = np.mean([line["weights"][1:] for line in run.rounds[:94]], axis=0)
        assert np.corrcoef(weights, shared)[0, 1] == pytest.approx(correlation, abs=0.005)

    ours, printed = ({p: scores(tried[v], p) for p in PROTOCOLS} for v in ("directions", "updates"))
    gains = {
        p: {s: ours[p][s, "waffle-paper"].mean - printed[p][s, "waffle-paper"].mean for s in SPLITS} for p in PROTOCOLS
    }
    assert all(gain > 0 for p in ("best", "selected") for gain in gains[p].values())
    assert [split for split in SPLITS if gains["last"][split] > 0] == ["B*"]
    for protocol, samples in (("best", 1), ("selected", 11)):
        theirs = scores(records.runs("cifar10-reset"), protocol)["C", "fedavg"].mean
        assert 1000 * (ours[protocol]["C", "waffle-paper"].mean - theirs) == pytest.approx(samples, abs=0.01)


def test_there_is_no_other_figure(records: Records) -> None:
    """docs/figures has the figures of the records and no others, each a small SVG file."""
    files = list((ROOT / "docs" / "figures").iterdir())
    tournaments = {f"{name}-{kind}" for name in tournament_page.PAGES for kind in tournament_page.FIGURES}
    own = {"overview", privacy_accuracy_page.FIGURE.stem, *(name for name, _, _ in page.pictures(records))}
    assert {path.stem for path in files} == own | tournaments
    assert all(path.suffix == ".svg" and path.stat().st_size < 200_000 for path in files)


# --------------------------------------------------------------------------------------------------- the waffle command


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pages out of --check: the clone of these tests has none."""
    monkeypatch.setattr(paper_command, "stale_pages", lambda root: [])


@pytest.mark.usefixtures("no_pages")
def test_check_reports_what_is_missing(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check exits with 1 and prints a line for each incomplete record and each claim that does not hold."""
    shutil.copytree(ROOT / "experiments", clone / "experiments", dirs_exist_ok=True)
    studies.STUDIES["cifar10"] = ("cifar10", "cifar10-printed")
    assert menu.main(["reproduce", "cifar10", "--check"]) == 1
    out = capsys.readouterr().out
    assert "results/cifar10.jsonl: 35 cells are not complete: cifar10/directions/A/waffle" in out
    assert "DOES NOT HOLD: all 30 cells of the paper's table exist" in out


@pytest.mark.usefixtures("no_pages")
def test_check_prints_json(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With complete records and main claims that hold, --check --strict --json exits with 0 and lists the claims."""
    shutil.copytree(ROOT / "experiments", clone / "experiments", dirs_exist_ok=True)
    studies.STUDIES["mnist"] = ("mnist", "mnist-permutations")
    for name in studies.STUDIES["mnist"]:
        shutil.copy(record_of(ROOT, name), record_of(clone, name))
    assert menu.main(["reproduce", "mnist", "--check", "--strict", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["claims"]
    assert [claim["holds"] for claim in found if claim["main"]] == [True, True, True]


@pytest.mark.docs
@pytest.mark.slow_first
@pytest.mark.parametrize(
    ("study", "failing"), [("mnist", []), ("cifar10", ["WAFFLE within 2 points of the paper on every split"])]
)
def test_check_of_the_committed_records(
    study: str, failing: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The committed records are complete. --strict fails if a main claim does not hold, and the page says so."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(paper_command, "stale_pages", lambda root: list(stale_pages_of_this_clone()))
    assert menu.main(["reproduce", study, "--check"]) == 0
    capsys.readouterr()
    assert menu.main(["reproduce", study, "--check", "--strict", "--json"]) == bool(failing)
    claims = json.loads(capsys.readouterr().out)["claims"]
    assert [claim["claim"] for claim in claims if claim["main"] and not claim["holds"]] == failing
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    for claim in failing:
        assert f"| main | {claim} | **does not hold** |" in page
        assert f"{claim}: " in page.split("What is known about the claims")[1]


def test_outside_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a clone the command names the requirement; an unknown study is refused with the known ones."""
    monkeypatch.chdir(tmp_path)
    assert "needs a clone of the repository" in refusal(menu.main, ["reproduce", "mnist"])
    monkeypatch.chdir(ROOT / "docs")
    assert find_root(Path.cwd()) == ROOT
    assert "mnist" in refusal(menu.main, ["reproduce", "mnits", "--check"])
