"""Every committed record of runs gives a page; runs that differ in a setting have separate rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from test_report import RUNS, finished
from waffle_fl.report import write_report
from waffle_fl.report.charts import MOST_ROWS, charts_of
from waffle_fl.results import FinishedRun, read_condensed, remarks, rows_of, scores, with_variants

RESULTS = Path(__file__).parent.parent / "results"


def holds_runs(path: Path) -> bool:
    """Return whether the record's first line holds the config of a run."""
    with path.open(encoding="utf-8") as stream:
        return "tables" in json.loads(stream.readline())


RECORDS = [path.stem for path in sorted(RESULTS.glob("*.jsonl")) if holds_runs(path)]


def test_there_are_records() -> None:
    """The records of the paper's two studies are among those that are tested."""
    assert {"mnist", "mnist-6000", "cifar10", "robustness", "har"} <= set(RECORDS)


@pytest.mark.docs
@pytest.mark.parametrize("name", RECORDS)
def test_every_record_becomes_a_page(name: str, tmp_path: Path) -> None:
    """The page has a row per split and variant, and the runs of a cell differ in their seed only."""
    runs = with_variants(read_condensed(RESULTS / f"{name}.jsonl"))
    text = write_report(runs, tmp_path, name, images=False).read_text(encoding="utf-8")
    assert all(f"<tr><th>{row}</th>" in text for row in rows_of(runs))
    cells: dict[tuple[str, str], list[FinishedRun]] = {}
    for run in runs:
        cells.setdefault((run.row, run.config.method), []).append(run)
    for group in cells.values():
        assert len({(r.config.settings.seed, r.config.settings.permutation_seed) for r in group}) == len(group)
        configs = [replace(r.config, settings=replace(r.config.settings, seed=0)).to_json() for r in group]
        assert all(config == configs[0] for config in configs)


def with_options(run: FinishedRun, **options: object) -> FinishedRun:
    return replace(run, config=replace(run.config, options=options))


def test_options_separate_rows() -> None:
    """A row states an option that is not the default; methods without the option stay in the default row."""
    low = with_options(finished("waffle-paper", "A", 1, 0.5), denominator="range")
    runs = with_variants([*RUNS, low])
    assert rows_of(runs) == ["A", "A, denominator range", "B*"]
    assert scores(runs, "best")["A", "waffle-paper"].mean == pytest.approx(0.92)
    assert scores(runs, "best")["A, denominator range", "waffle-paper"].mean == pytest.approx(0.5)
    assert remarks(runs) == [
        "Rows state the settings in which runs of one split differ. "
        "Settings that a row does not state are at their default: denominator max."
    ]


def test_a_setting_that_differs_by_split_is_a_remark() -> None:
    """A setting that differs by split only gives a remark, not more rows."""
    star = finished("waffle-paper", "B*", 1, 0.5)
    settings = replace(star.config.settings, permutation_seed=1)
    runs = with_variants([RUNS[0], replace(star, config=replace(star.config, settings=settings))])
    assert rows_of(runs) == ["A", "B*"]
    assert remarks(runs) == ["permutation_seed is 0 in A; 1 in B*."]


def test_runs_that_are_alike_need_no_remark() -> None:
    """Runs with equal settings keep their rows and give no remark."""
    assert with_variants(RUNS) == RUNS
    assert remarks(RUNS) == []


def test_charts_of_many_rows_show_the_first() -> None:
    """Charts of a table with many rows show the first ones, and the caption states it."""
    runs = [
        replace(run, config=replace(run.config, settings=replace(run.config.settings, alice=str(i))))
        for i in range(MOST_ROWS + 5)
        for run in RUNS[:1]
    ]
    caption, _ = charts_of(runs)["accuracy"]
    assert caption.endswith(f"the first {MOST_ROWS} of {MOST_ROWS + 5} rows")


def test_a_sparse_record_is_drawn_at_its_rounds() -> None:
    """A record that keeps late rounds only is drawn at those rounds."""
    late = replace(RUNS[0], rounds=[{"round": 94, "accuracy": 0.5}, {"round": 100, "accuracy": 0.6}])
    _, chart = charts_of([late])["accuracy"]
    (values,) = chart.to_dict()["datasets"].values()
    assert [value["round"] for value in values] == [94, 100]
