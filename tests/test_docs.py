"""The examples of the documentation run, and its numbers match the committed records."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import waffle_fl
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.cli.decide import DecisionFlags
from waffle_fl.cli.flags import _flags, options_class
from waffle_fl.cli.menu import COMMANDS
from waffle_fl.cli.progress import ProgressFlags
from waffle_fl.cli.tune import Budget
from waffle_fl.config import Settings, load_experiments
from waffle_fl.experiment import Runtime
from waffle_fl.report import every_alice
from waffle_fl.report.tables import by_method, to_markdown
from waffle_fl.results import read_runs
from waffle_fl.tournament.checking import read_records
from waffle_fl.tournament.plan import is_tournament, load_tournament
from waffle_fl.tournament.standings import LOWEST

ROOT = Path(__file__).parent.parent
SOURCE = Path(waffle_fl.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
POPULATION = re.compile(
    r"<!-- population: (?P<record>\S+) (?P<measure>\w+) -->\n(?P<table>.*?)<!-- end of population -->", re.DOTALL
)
METHODS = re.compile(
    r"<!-- methods: (?P<record>\S+) (?P<protocol>\w+) -->\n(?P<table>.*?)<!-- end of methods -->", re.DOTALL
)
TABLE = re.compile(r"<!-- table: (?P<record>\S+) -->\n(?P<table>.*?)<!-- end of table -->", re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/user-data.md"])
def test_examples_train(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Python example of the page runs on tables of two hospitals and prints twenty rounds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hospitals").mkdir()
    for name, n in (("north", 40), ("south", 12)):
        rows = [f"{30 + 7 * i % 50},{'abc'[i % 3]},{'died' if i % 3 else 'lived'}" for i in range(n)]
        (tmp_path / "hospitals" / f"{name}.csv").write_text("\n".join(["age,ward,outcome", *rows]))
    exec(blocks(ROOT / page, "python")[0], {})
    assert len(capsys.readouterr().out.splitlines()) == 20


def test_the_example_of_the_estimator_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The snippet of docs/predict-export.md runs unchanged and prints predictions and weights."""
    (snippet,) = blocks(ROOT / "docs" / "predict-export.md", "python")
    exec(snippet, {})
    predictions, weights = capsys.readouterr().out.splitlines()
    assert "(3, 2)" in predictions
    assert all(name in weights for name in ("north", "south", "west"))


def marked_tables(pattern: re.Pattern[str]) -> list[Any]:
    """Every marked table of the docs, as test parameters."""
    found = ((page, match) for page in PAGES for match in pattern.finditer(page.read_text()))
    return [pytest.param(match, id=f"{page.name}-{match['record']}") for page, match in found]


def command_lines() -> list[Any]:
    """Every `waffle` command line of the docs, as test parameters."""
    lines = ((page, line) for page in PAGES for block in blocks(page, "(?:sh)?") for line in block.splitlines())
    return [pytest.param(line, id=f"{page.name}-{line}") for page, line in lines if line.startswith("waffle ")]


@pytest.mark.parametrize("line", command_lines())
def test_commands_in_the_docs_exist(line: str) -> None:
    """Every `waffle` command line in the docs uses an existing command and existing flags."""
    words = shlex.split(line, comments=True)
    assert words[1] in COMMANDS
    flags = {word for word in words if word.startswith("--")}
    if words[1] == "run":
        known = {*_flags(Settings), *_flags(options_class(words[2])), *_flags(Runtime), *_flags(ProgressFlags)}
        assert flags <= known | {"--out", "--no-baselines", "--as-printed"}
    if words[1] == "tune":
        known = {*_flags(Settings), *_flags(options_class(words[2])), *_flags(Budget), *_flags(Runtime)}
        assert flags <= known | set(_flags(ProgressFlags))
    if words[1] == "decide":
        assert flags <= {*_flags(Settings), *_flags(DecisionFlags), *_flags(Runtime), *_flags(ProgressFlags)}


@pytest.mark.parametrize("match", marked_tables(TABLE))
def test_tables_in_the_docs_match_the_records(match: re.Match[str]) -> None:
    """A marked table equals that of its committed record."""
    assert match["table"].strip() == to_markdown(read_runs([ROOT / match["record"]])).strip()


@pytest.mark.parametrize("match", marked_tables(POPULATION))
def test_population_tables_match_the_records(match: re.Match[str]) -> None:
    """A table of a whole federation equals that of its committed record."""
    runs = read_runs([ROOT / match["record"]])
    assert match["table"].strip() == every_alice.to_markdown(runs, match["measure"]).strip()


@pytest.mark.parametrize("match", marked_tables(METHODS))
def test_method_tables_match_the_records(match: re.Match[str]) -> None:
    """A table with one row per method equals that of its committed record."""
    found = by_method(read_runs([ROOT / match["record"]]), match["protocol"])  # type: ignore[arg-type]
    assert match["table"].strip() == found.strip()


def test_the_demo_has_its_table() -> None:
    """docs/examples/digits.md shows eight methods on five splits."""
    match = next(TABLE.finditer((ROOT / "docs" / "examples" / "digits.md").read_text()))
    assert all(f"| {split} |" in match["table"] for split in ("A", "B", "C", "A*", "B*"))
    assert "| Local | FedAvg | SCAFFOLD | WE | WAFFLE | WAFFLE (paper) | APFL | Ditto |" in match["table"]


@pytest.mark.parametrize("mark", [f"A1.{n}" for n in range(1, 11)] + [f"A2.{n}" for n in range(1, 17)])
def test_every_line_of_the_paper_is_mapped(mark: str) -> None:
    """docs/paper.md has a row for each line of both algorithms."""
    assert re.search(rf"^\| {re.escape(mark)} \|", (ROOT / "docs" / "paper.md").read_text(), re.MULTILINE)


def test_names_in_the_paper_map_exist() -> None:
    """Functions, files and tests that docs/paper.md names exist."""
    text = (ROOT / "docs" / "paper.md").read_text()
    code = "\n".join(p.read_text() for p in SOURCE.rglob("*.py"))
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").glob("*.py"))
    for name in re.findall(
        r"`(?:scaffold|waffle|schedules|contract|WafflePaper|AgentTraining|FlatModel|SGD)\.(\w+)`", text
    ):
        if name != "py":
            assert f"def {name}(" in code, name
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert (ROOT / "tests" / name).exists(), name


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_every_method_has_a_page(method: str) -> None:
    """docs/algorithms has a page per method, which names its file and its command."""
    page = (ROOT / "docs" / "algorithms" / f"{method}.md").read_text()
    assert f"src/waffle_fl/algorithms/{method.replace('-', '_')}.py" in page
    assert f"waffle run {method}" in page


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda p: p.name)
def test_experiment_files_are_valid(file: Path) -> None:
    """Every experiment file can be read, as a tournament or as grids of runs."""
    if is_tournament(file):
        assert load_tournament(file).methods
    else:
        assert all(experiment.methods for experiment in load_experiments(file))


def test_the_lower_bound_changes_what_the_page_says() -> None:
    """The number of scores below the lower bound of points, and of APPLE's, are those of the records."""
    tournament = load_tournament(ROOT / "experiments" / "tournament.toml")
    lines = [line for some in read_records(tournament, ROOT / "results").values() for line in some]
    low = [
        line["method"]
        for line in lines
        if line["stage"] == "table"
        for seed in line["selected"]
        for points in seed
        if points is not None and points < LOWEST
    ]
    text = " ".join((ROOT / "docs" / "beyond.md").read_text().split())
    assert f"it changes {len(low)} selected scores of single runs, {low.count('apple')} of them APPLE's" in text


def test_what_the_ablation_says_is_what_it_measured() -> None:
    """The numbers in the prose of kin-ablation.md are those of its generated claims and table."""
    text, _, generated = (ROOT / "docs" / "kin-ablation.md").read_text().partition("<!-- record")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in generated.splitlines() if "|" in line]
    row: dict[str, list[str]] = {}
    for first, *rest in cells:
        row.setdefault(first, rest)
    claim = {name: float(rest[1].split()[0]) for name, rest in row.items() if "(n = " in rest[1]}
    assert f"({row['averaging over rounds brings WAFFLE something'][1].split(' (')[0]} points)" in text
    last = float(row["kin-latest"][1]) - float(row["waffle-model"][1])
    assert f"In the last\n  round it brings {last:.2f} points" in text
    parts = sorted(
        claim[f"{name} something"] for name in ("sharing the head by kinship brings", "clipping brings WAFFLE")
    )
    assert f"bring {parts[0]:.0f} to {parts[1]:.0f} points" in text
    rival = "WAFFLE is above {} with the same averaging and clipping"
    assert f"is significant** ({claim[rival.format('FedPer')]:.1f} points)" in text
    assert [row[rival.format(name)][0] for name in ("FedPer", "kNN-Per", "FedAvg+FT")] == [
        "holds",
        "undecided",
        "undecided",
    ]
    assert f"is {float(row['kNN-Per'][2]):.0f} points behind on Parkinson" in " ".join(text.split())


def test_links_exist() -> None:
    """Relative links in the docs point to files that exist."""
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_no_file_contains_local_paths() -> None:
    """No file of the project contains an absolute path of the machine it was made on."""
    private = re.compile(r"/(?:work|root|home/\w+)/")
    for path in [*SOURCE.rglob("*.py"), *PAGES, *(ROOT / "tests").glob("*.py"), *(ROOT / "results").glob("*.jsonl")]:
        if path != Path(__file__):
            assert not private.search(path.read_text()), path


def test_the_page_on_speed_matches_its_records() -> None:
    """docs/speed.md is what benchmarks/page.py writes from the committed records."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.page import page

    assert (ROOT / "docs" / "speed.md").read_text() == page()


@pytest.mark.parametrize("module", sorted(p for p in SOURCE.rglob("*.py") if "What it gains" in p.read_text()), ids=str)
def test_gains_in_docstrings_are_measured(module: Path) -> None:
    """A gain stated in the docstring of a module is in the record of the ablation."""
    record = [json.loads(line) for line in (ROOT / "results" / "ablation.jsonl").read_text().splitlines()]
    known = {(line["workload"], round(gain, 1)) for line in record for gain in line["gains"].values()}
    text = re.search(r"What it gains  (.*?)\n(?:\"\"\"|\n)", module.read_text(), re.DOTALL)
    assert text
    claimed_gains = re.findall(r"([\d.]+) x on (?:the |a )?([\w -]+(?:, APFL|, 10,000 test images)?)", text[1])
    assert claimed_gains
    for gain, workload in claimed_gains:
        found = [value for name, value in known if name.removeprefix("a ") == workload.strip()]
        assert any(abs(value - float(gain)) <= 0.05 + 0.01 * value for value in found), (gain, workload, found)


def test_the_page_on_speed_needs_no_peers() -> None:
    """Without records of other libraries the section on them is empty."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.cpu import _apart
    from benchmarks.page import peers

    assert peers({"lenet5": _apart([], 1.0), "digits": _apart([], 1.0)}) == ""


def test_the_table_of_exposed_rows_matches_its_record() -> None:
    """The table in docs/threat-model.md equals results/exposure.jsonl."""
    record = [json.loads(line) for line in (ROOT / "results" / "exposure.jsonl").read_text().splitlines()]
    rows = [
        f"| {line['weights']} | {line['rows']} | {100 * line['share']:.1f} % | {100 * line['random']:.1f} % | "
        f"{line.get('recovered', '')} |"
        for line in record
    ]
    assert "\n".join(rows) in (ROOT / "docs" / "threat-model.md").read_text()
