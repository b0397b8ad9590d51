"""Tables and the report page from run folders and committed records, also in a real browser."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browser import launched
from conftest import refusal
from waffle_fl.claims.file_claims import accuracies
from waffle_fl.config import Experiment, RunConfig, Settings
from waffle_fl.delta_encoding import after, since
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, execute, plan
from waffle_fl.report import every_alice, write_report
from waffle_fl.report.tables import to_csv, to_latex, to_markdown
from waffle_fl.results import FinishedRun, condense, read_runs, scores


def finished(method: str, split: str, seed: int, best: float, status: str = "finished") -> FinishedRun:
    config = RunConfig(method=method, settings=Settings(split=split, seed=seed))
    rounds = [{"round": r, "accuracy": best - 0.1 + 0.05 * r, "loss": 1.0, "weights": [0.5, 0.5]} for r in (1, 2)]
    result = {
        "status": status,
        "rounds": 2,
        "best": {"round": 2, "accuracy": best},
        "last": {"round": 2, "accuracy": best},
    }
    return FinishedRun(Path(f"{method}-{split}-{seed}"), config, {"agents": ["a", "b"], "alice": 0}, result, rounds)


RUNS = [
    finished("fedavg", "A", 1, 0.90),
    finished("fedavg", "A", 2, 0.94),
    finished("waffle-paper", "A", 1, 0.92),
    finished("waffle-paper", "A", 2, 0.92),
    finished("waffle-paper", "B*", 1, 0.5, status="diverged"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real grid."""
    out = tmp_path_factory.mktemp("grid")
    settings = Settings(rounds=4, batch_size=16, test="all", validation=0.2, agents=4)
    experiment = Experiment(
        methods=("local", "weight-erosion", "waffle-paper"), splits=("C", "A*"), seeds=(1, 2), settings=settings
    )
    execute(plan(experiment, out), Runtime())
    return out


def test_means_and_deviations_by_hand() -> None:
    """90 and 94 percent have the mean 92 and the sample standard deviation sqrt(8) = 2.83."""
    cell = scores(RUNS, "best")["A", "fedavg"]
    assert cell.mean == pytest.approx(0.92)
    assert cell.std == pytest.approx(0.0282843, abs=1e-6)
    assert scores(RUNS, "best")["B*", "waffle-paper"].std is None


def test_the_best_of_a_row_is_bold() -> None:
    """Methods that share the highest printed mean are both bold; a diverged run is marked."""
    text = to_markdown(RUNS)
    assert "| A | **92.00 ± 2.83** | **92.00 ± 0.00** |" in text
    assert "| B* |  | **50.00 (diverged)** |" in text


def test_csv_is_unrounded() -> None:
    """The CSV holds one line per cell and protocol, with all digits."""
    rows = list(csv.DictReader(io.StringIO(to_csv(RUNS))))
    assert len(rows) == 6
    row = next(r for r in rows if r["protocol"] == "best" and r["method"] == "fedavg")
    assert float(row["std"]) == pytest.approx(0.02828427)
    assert row["seeds"] == "2"


def test_the_latex_table() -> None:
    """The LaTeX table has one row per split, one column per method, and the best in bold."""
    text = to_latex(RUNS)
    assert r"\begin{tabular}{lrr}" in text
    assert r"A & $\mathbf{92.00 \pm 2.83}$ & $\mathbf{92.00 \pm 0.00}$ \\" in text
    assert r"B$^*$ & -- & $\mathbf{50.00}$$^\dagger$ \\" in text


def test_a_condensed_record_gives_the_same_tables(runs: Path, tmp_path: Path) -> None:
    """A condensed record gives the tables of its run folders, and the weights of the first seed."""
    plain = read_runs([runs])
    record = tmp_path / "record.jsonl"
    record.write_text("\n".join(condense(plain)) + "\n")
    again = read_runs([record])
    assert to_csv(again) == to_csv(plain)
    assert {(r.config.method, r.config.settings.seed) for r in again if "weights" in r.rounds[0]} == {
        ("weight-erosion", 1),
        ("waffle-paper", 1),
    }
    assert "selected" in again[0].result


@pytest.mark.parametrize("content", ["", "{}\n", "rubbish\n", '{"run": 1}\n', "[]\n"])
def test_a_bad_record_is_refused(content: str, tmp_path: Path) -> None:
    """An invalid record is refused in one line."""
    path = tmp_path / "record.jsonl"
    path.write_text(content)
    with pytest.raises(WaffleError, match=r"^[^\n]+$"):
        read_runs([path])


def test_the_page_is_self_contained(runs: Path, tmp_path: Path) -> None:
    """The page loads no external resource, and its folder has the tables and each chart as PNG and PDF."""
    page = write_report(read_runs([runs]), tmp_path, "A title & more")
    text = page.read_text()
    assert "A title &amp; more" in text
    assert 'src="http' not in text
    assert 'href="http' not in text
    for name in ("accuracy", "weights", "labels", "omega"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_the_page_renders_in_a_browser(runs: Path, tmp_path: Path) -> None:
    """In a real browser without a network every chart renders, without console messages."""
    page = write_report(read_runs([runs]), tmp_path / "report", "Page", images=False)
    with launched() as browser:
        tab, complaints = browser.new_context(offline=True).new_page(), list[str]()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(page.as_uri())
        tab.wait_for_selector('body[data-charts="4"]', timeout=60_000)
        assert tab.locator("svg.marks").count() == 4
    assert complaints == []


@pytest.mark.parametrize("name", ["table.csv", "accuracy.png", "index.html"])
def test_a_file_that_cannot_be_written_is_named(name: str, runs: Path, tmp_path: Path) -> None:
    """A file that cannot be written is refused in one line with its path."""
    (tmp_path / name).mkdir()
    assert f"cannot write {tmp_path / name}: " in refusal(write_report, read_runs([runs]), tmp_path, "title")


def test_unlike_runs_are_not_averaged(tmp_path: Path) -> None:
    """Runs with other settings have a separate row that states the difference."""
    other = RunConfig(method="waffle-paper", settings=Settings(split="A", seed=3, lr=0.5))
    odd = FinishedRun(Path("odd"), other, {}, RUNS[0].result, RUNS[0].rounds)
    write_report([*RUNS, odd], tmp_path, "odd", images=False)
    text = (tmp_path / "table.md").read_text()
    assert "| A | **92.00 ± 2.83** | **92.00 ± 0.00** |" in text
    assert "| A, lr 0.5 |  | **90.00** |" in text
    assert "Settings that a row does not state are at their default: lr 0.1." in (tmp_path / "index.html").read_text()


def test_a_seed_that_never_finished_a_round_counts_as_diverged() -> None:
    """A run that diverged in its first round counts as a seed and marks its cell."""
    lost = replace(finished("fedavg", "A", 3, 0.0, "diverged"), result={"status": "diverged", "rounds": 0}, rounds=[])
    cell = scores([*RUNS, lost], "best")["A", "fedavg"]
    assert (cell.seeds, cell.diverged) == (3, 1)
    assert cell.mean == pytest.approx(0.92)
    assert scores([lost], "best")["A", "fedavg"].text() == "diverged"
    assert "diverged" in to_markdown([lost, RUNS[2]])


TABLES = st.fixed_dictionaries(
    {
        name: st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers(0, 2), max_size=4)
        for name in ("one", "two")
    }
)


@given(before=TABLES, now=TABLES)
def test_changes_between_tables_restore_the_table(before: Any, now: Any) -> None:
    """Applying the changes to the previous tables gives the current ones; equal tables have no changes."""
    changes = since(before, now)
    assert after(before, json.loads(json.dumps(changes))) == now
    assert since(now, now) == {}


def test_a_record_without_rounds_has_the_scores(tmp_path: Path) -> None:
    """A record without rounds gives the same tables."""
    record = tmp_path / "record.jsonl"
    record.write_text("\n".join(condense(RUNS, "none")) + "\n")
    assert all(not run.rounds for run in read_runs([record]))
    assert to_markdown(read_runs([record])) == to_markdown(RUNS)


def test_a_record_of_late_rounds(tmp_path: Path) -> None:
    """It keeps rounds 0.94 R and R and the score of the last one; a diverged run keeps its result and no round."""
    rounds = [{"round": r, "accuracy": r / 200, "loss": 1.0} for r in range(1, RUNS[0].config.settings.rounds + 1)]
    plain, weighing = (replace(run, rounds=rounds, result={**run.result, "rounds": 100}) for run in (RUNS[0], RUNS[2]))
    diverged = replace(RUNS[1], rounds=rounds[:50], result={**RUNS[1].result, "status": "diverged"})
    record = tmp_path / "record.jsonl"
    record.write_text("\n".join(condense([plain, weighing, diverged], "late")) + "\n")
    late, every, none = read_runs([record])
    assert [line["round"] for line in late.rounds] == [94, 100]
    assert [line["round"] for line in every.rounds] == [94, 100]
    assert none.rounds == []
    assert late.result == {"status": "finished", "rounds": 100, "last": {"round": 100, "accuracy": 0.5}}
    assert none.result == diverged.result
    assert accuracies([late, every, none], 0.94) == [0.47, 0.47, 0.0]
    assert accuracies([late, every, none], 1.0) == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("details", ["accuracy", "late", "none"])
def test_a_page_from_a_sparse_record(details: Any, tmp_path: Path) -> None:
    """A record without details gives a page with the available charts."""
    record = tmp_path / "record.jsonl"
    record.write_text("\n".join(condense(RUNS, details)) + "\n")
    assert write_report(read_runs([record]), tmp_path / "report", "sparse").exists()


def test_a_federation_in_one_table() -> None:
    """The table has the mean and worst agent over seeds, and the share of agents better than Local."""

    def run(method: str, alice: str, seed: int, auc: float | None) -> FinishedRun:
        found = finished(method, "C", seed, 0.9)
        settings = replace(found.config.settings, data="folder", alice=alice, seed=seed)
        metrics = {} if auc is None else {"metrics": {"auc": auc}}
        return replace(found, config=replace(found.config, settings=settings), result={**found.result, **metrics})

    scores = {
        ("local", 1): (0.5, 0.7),
        ("local", 2): (0.6, 0.7),
        ("waffle-paper", 1): (0.8, 0.6),
        ("waffle-paper", 2): (0.8, 0.8),
    }
    runs = [
        run(m, alice, seed, auc) for (m, seed), found in scores.items() for alice, auc in zip("xy", found, strict=True)
    ]
    runs += [run("local", "z", 1, None)]  # a single class has no AUC
    *_, local, waffle = every_alice.to_markdown(runs, "auc").splitlines()
    assert local == "| Local | 62.50 ± 3.54 | 55.00 ± 7.07 | – |"
    assert waffle == "| WAFFLE (paper) | **75.00 ± 7.07** | **70.00 ± 14.14** | 75% |"
    with pytest.raises(WaffleError, match="choose from"):
        every_alice.to_markdown(runs, "beauty")
