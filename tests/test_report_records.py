"""Every committed record of runs becomes a page; runs that differ in a setting are told apart, never refused."""

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
    """Does the record's first line hold the config of a run?"""
    with path.open(encoding="utf-8") as stream:
        return "tables" in json.loads(stream.readline())


RECORDS = [path.stem for path in sorted(RESULTS.glob("*.jsonl")) if holds_runs(path)]


def test_there_are_records() -> None:
    """The records of the paper's two studies are among those that are read."""
    assert {"mnist", "mnist-6000", "cifar10", "robustness", "beyond"} <= set(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_every_record_becomes_a_page(name: str, tmp_path: Path) -> None:
    """The page has a row for every split and variant, and each cell averages runs that differ in their seed alone."""
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


def test_options_tell_rows_apart() -> None:
    """A row names an option that is not the default; a method without the option stays in the row of the default."""
    low = with_options(finished("waffle", "A", 1, 0.5), denominator="range")
    runs = with_variants([*RUNS, low])
    assert rows_of(runs) == ["A", "A, denominator range", "B*"]
    assert scores(runs, "best")["A", "waffle"].mean == pytest.approx(0.92)
    assert scores(runs, "best")["A, denominator range", "waffle"].mean == pytest.approx(0.5)
    assert remarks(runs) == [
        "Rows state the settings in which runs of one split differ. "
        "Settings that a row does not state are at their default: denominator max."
    ]


def test_a_setting_that_differs_by_split_is_a_remark() -> None:
    """Seeds of permutations that only starred splits have leave the rows as they are."""
    star = finished("waffle", "B*", 1, 0.5)
    settings = replace(star.config.settings, permutation_seed=1)
    runs = with_variants([RUNS[0], replace(star, config=replace(star.config, settings=settings))])
    assert rows_of(runs) == ["A", "B*"]
    assert remarks(runs) == ["permutation_seed is 0 in A; 1 in B*."]


def test_runs_that_are_alike_need_no_remark() -> None:
    """Rows keep their names where nothing differs."""
    assert with_variants(RUNS) == RUNS
    assert remarks(RUNS) == []


def test_charts_of_many_rows_say_what_they_show() -> None:
    """A table of many rows has charts of the first ones, and the caption says so."""
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
