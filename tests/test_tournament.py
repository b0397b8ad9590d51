"""A tournament: tuned methods on many tasks, with every agent as Alice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.cli_support import waffle

from conftest import refusal
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, execute
from waffle_fl.models import FlatModel, LeNet5
from waffle_fl.records import read_rounds
from waffle_fl.tournament import tasks
from waffle_fl.tournament.checking import problems, read_claims, read_records, verdicts
from waffle_fl.tournament.cost import cost_of
from waffle_fl.tournament.plan import TuningTrial, load_tournament
from waffle_fl.tournament.record import append_lines, chosen_trial, column_name, read_lines, record_file, table
from waffle_fl.tournament.running import jobs_of, run
from waffle_fl.tournament.standings import Scores, alices_of, compare, critical_difference, lowest, scores_of, standings
from waffle_fl.tournament.tasks import train

ROOT = Path(__file__).parent.parent
TEXT = """
schema = 1
kind = "tournament"
methods = ["local", "fedavg", "waffle-paper"]
seeds = [1, 2]
partitions = [1]
tuning = { partitions = [101], seeds = [1], alices = 2 }
rounds = 2
agents = 3
validation = 0.2
samples_per_agent = 40

[shared]
clip = 5.0

[grid]
local = { weight_decay = [0.0] }
fedavg = { weight_decay = [0.0] }
waffle-paper = { compared = ["updates"] }

[data.digits]
lr = [0.02, 0.2]
columns = [{ split = "A" }, { split = "A", shift = "drift(sudden, 0.5, k=4)" }]

[[claims]]
claim = "WAFFLE is above Local"
method = "waffle-paper"
above = "local"
"""
CPU = Runtime(device="cpu", workers=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tournament file and its complete records."""
    folder = tmp_path_factory.mktemp("tournament")
    (folder / "experiments").mkdir()
    file = folder / "experiments" / "tiny.toml"
    file.write_text(TEXT)
    run(file, folder / "results", CPU, jobs_of(load_tournament(file)), report=lambda line: None)
    return folder


def test_the_projects_tournament_gives_every_method_the_same_budget() -> None:
    """All methods of the package take part with nine trials each, but MR-MTL, which is younger."""
    found = load_tournament(ROOT / "experiments" / "tournament.toml")
    assert {*found.methods, "mr-mtl"} == {*ALGORITHMS, "waffle-model"}
    budgets = {len(found.trials(method, tasks)) for method in found.methods for tasks in found.data.values()}
    assert budgets == {9}
    assert not set(found.partitions) & set(found.tuning_partitions)


def test_a_record_has_every_trial_and_every_part_of_the_table(finished: Path) -> None:
    """The record is complete, and a second run adds nothing."""
    tournament = load_tournament(finished / "experiments" / "tiny.toml")
    records = read_records(tournament, finished / "results")
    assert problems(tournament, records) == []
    assert len(records["digits"]) == 3 * (2 + 2)
    run(
        finished / "experiments" / "tiny.toml",
        finished / "results",
        CPU,
        jobs_of(tournament),
        report=lambda line: None,
    )
    assert read_records(tournament, finished / "results") == records


def test_the_parts_of_one_job_train_in_parallel(finished: Path, tmp_path: Path) -> None:
    """Two processes share the trials and the columns of one job, and write the lines that one process writes."""
    file, reported = finished / "experiments" / "tiny.toml", list[str]()
    tournament = load_tournament(file)
    jobs = jobs_of(tournament, methods=["local"])
    assert run(file, tmp_path, CPU, jobs, processes=2, report=reported.append) == 0
    assert [line.partition(" lines")[0] for line in reported] == ["digits local: 4"]

    def lines_of(folder: Path) -> list[str]:
        lines = read_records(tournament, folder)["digits"]
        return sorted(json.dumps(line) for line in lines if line["method"] == "local")

    assert lines_of(tmp_path) == lines_of(finished / "results")


def test_no_job_starts_after_the_time_is_over(finished: Path, tmp_path: Path) -> None:
    """Jobs that wait when the minutes are over are not started; a job that runs finishes a line."""
    file, reported = finished / "experiments" / "tiny.toml", list[str]()
    jobs = jobs_of(load_tournament(file))
    assert run(file, tmp_path, replace(CPU, minutes=1e-9), jobs, report=reported.append) == 0
    assert [line.rpartition(": ")[2] for line in reported] == ["not started"] * 3
    assert not list(tmp_path.iterdir())


def test_every_agent_is_alice(finished: Path) -> None:
    """A line of the table has one score per seed and agent."""
    tournament = load_tournament(finished / "experiments" / "tiny.toml")
    line = table(read_records(tournament, finished / "results")["digits"])["fedavg", "A", 1]
    assert alices_of(line) == ["agent 0", "agent 1", "agent 2"]
    assert [len(seed) for seed in line["selected"]] == [3, 3]


def test_scores_are_those_of_a_plain_run(finished: Path, tmp_path: Path) -> None:
    """Selected, last and best round of a task agree with a run in its own folder."""
    tournament = load_tournament(finished / "experiments" / "tiny.toml")
    column = tournament.data["digits"].columns[0]
    for method in ("local", "fedavg", "waffle-paper"):
        config = tournament.config(method, column, TuningTrial(0.2, *_only(tournament.grid[method])), 1, 2)
        ((_, names, scores),) = train([config], CPU, "accuracy")
        alone = replace(config, settings=replace(config.settings, alice="1"))
        (result,) = execute([(alone, tmp_path / method)], CPU)
        own = scores[names.index("agent 1")]
        assert own.selected == pytest.approx(100 * result["selected"]["accuracy"], abs=1e-9)
        assert own.last == pytest.approx(100 * result["last"]["accuracy"], abs=1e-9)
        assert own.best == pytest.approx(100 * result["best"]["accuracy"], abs=1e-9)
        assert own.round == result["selected"]["round"]
        assert len(read_rounds(tmp_path / method / "rounds.jsonl")) == 2


def test_a_column_with_some_agents_per_round_trains_each_alice_as_a_plain_run(finished: Path, tmp_path: Path) -> None:
    """With `alice_takes_part = "always"` every Alice has a training of her own, also of methods that ignore her."""
    file = tmp_path / "some.toml"
    file.write_text(
        TEXT.replace("agents = 3", 'agents = 4\nalice_takes_part = "always"').replace(
            '[{ split = "A" },', '[{ split = "A", participation = 0.5 },'
        )
    )
    tournament = load_tournament(file)
    column = tournament.data["digits"].columns[0]
    assert column_name(column) == "A, 50 % per round"
    config = tournament.config("fedavg", column, TuningTrial(0.2, "weight_decay", 0.0), 1, 2)
    ((_, names, scores),) = train([config], CPU, "accuracy")
    for i in (1, 3):
        (result,) = execute(
            [(replace(config, settings=replace(config.settings, alice=str(i))), tmp_path / str(i))], CPU
        )
        own = scores[names.index(f"agent {i}")]
        assert own.selected == pytest.approx(100 * result["selected"]["accuracy"], abs=1e-9)


def test_a_file_with_a_base(tmp_path: Path) -> None:
    """A file takes what it lacks from its base, except claims."""
    (tmp_path / "first.toml").write_text(TEXT)
    second = (
        'schema = 1\nkind = "tournament"\nbase = "{base}"\nrounds = 3\n[data.synthetic]\nlr = [0.1]\ncolumns = [{}]\n'
    )
    file = tmp_path / "second.toml"
    file.write_text(second.replace("{base}", "first.toml"))
    found = load_tournament(file)
    assert (found.name, list(found.data), found.seeds) == ("second", ["synthetic"], (1, 2))
    assert (found.data["synthetic"].columns[0].rounds, found.data["synthetic"].columns[0].agents) == (3, 3)
    assert read_claims(file, found.methods) == []
    file.write_text(second.replace("{base}", "second.toml"))
    assert "expected a tournament file without a base" in refusal(load_tournament, file)


@pytest.mark.parametrize(("name", "lacks"), [("tournament-images", set()), ("tournament-participation", {"waffle"})])
def test_the_files_of_the_project_have_one_protocol(name: str, lacks: set[str]) -> None:
    """All tournaments have the grid and the tuning of the first one, and its methods except those they lack."""
    one, other = (load_tournament(ROOT / "experiments" / f"{file}.toml") for file in ("tournament", name))
    assert [method for method in one.methods if method not in lacks] == list(other.methods)
    assert {method: one.grid[method] for method in other.methods} == other.grid
    assert (one.tuning_partitions, one.seeds) == (other.tuning_partitions, other.seeds)


def test_a_folder_per_partition(tmp_path: Path) -> None:
    """`{partition}` in the name of a folder becomes the seed of the partition."""
    file = tmp_path / "folders.toml"
    file.write_text(
        TEXT.replace("[data.digits]", '[data.people]\ndata = "people-{partition}"').replace("agents = 3", "")
    )
    tournament = load_tournament(file)
    config = tournament.config("local", tournament.data["people"].columns[0], TuningTrial(0.1, "lr", 0.1), 7, 1)
    assert config.settings.data == "people-7"


def test_the_size_of_a_stack_counts_activations() -> None:
    """The memory of a row has the outputs of all layers: of LeNet-5's layers with parameters 6 x 28 x 28 and so on."""
    model = FlatModel(LeNet5)
    outputs = 6 * 28 * 28 + 16 * 10 * 10 + 120 + 84 + 10
    assert tasks._outputs(model, torch.zeros(1, 1, 28, 28)) == outputs


def _only(choice: tuple[str, tuple[object, ...]]) -> tuple[str, object]:
    return choice[0], choice[1][0]


def test_tuning_chooses_by_validation_scores_only(finished: Path) -> None:
    """The chosen trial has the best validation score, and a diverged run comes last."""
    tournament = load_tournament(finished / "experiments" / "tiny.toml")
    tasks = tournament.data["digits"]
    lines = [
        {"stage": "tuning", "method": "local", "lr": lr, "name": "weight_decay", "value": 0.0, **rest}
        for lr, rest in (
            (0.02, {"validation": [50.0, 60.0], "diverged": 0}),
            (0.2, {"validation": [99.0, 99.0], "diverged": 1}),
        )
    ]
    assert chosen_trial(tournament, tasks, "local", lines) == TuningTrial(0.02, "weight_decay", 0.0)
    assert chosen_trial(tournament, tasks, "local", lines[:1]) is None


def test_a_table_made_with_another_trial_is_a_problem(finished: Path, tmp_path: Path) -> None:
    """The check notices a line of the table whose lr is not the chosen one, and a missing line."""
    tournament = load_tournament(finished / "experiments" / "tiny.toml")
    lines = read_records(tournament, finished / "results")["digits"]
    path = record_file(tmp_path, tournament, "digits")
    at = next(k for k, line in enumerate(lines) if line["stage"] == "table")
    append_lines(path, [*lines[:at], {**lines[at], "lr": 0.7}, *lines[at + 1 :]])
    (problem,) = problems(tournament, {"digits": read_lines(path)})
    assert "another trial" in problem
    (problem,) = problems(tournament, {"digits": [line for k, line in enumerate(lines) if k != at]})
    assert "lacks 1 of 2 parts" in problem


def test_the_command_checks_the_records(finished: Path) -> None:
    """`waffle bench FILE --check` prints the standings and exits with 0 for complete records, else with 1."""
    file = finished / "experiments" / "tiny.toml"
    shown = waffle("bench", file, "--check")
    assert shown.code == 0
    assert "FedAvg" in shown.out
    other = finished / "experiments" / "other.toml"
    other.write_text(TEXT)
    shown = waffle("bench", other, "--check")
    assert shown.code == 1
    assert "no record yet" in shown.out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"local", "fedavg"', '"locl", "fedavg"', "unknown method 'locl'"),
        ("partitions = [101]", "partitions = [1]", "tuning partitions that are not in the tables"),
        (
            'waffle-paper = { compared = ["updates"] }',
            'waffle-paper = { compard = ["updates"] }',
            "expected a list of values",
        ),
        ('waffle-paper = { compared = ["updates"] }', 'waffle-paper = { compared = ["a", "b"] }', "as many values"),
        ("lr = [0.02, 0.2]", "lr = [-1.0]", "lr"),
        ("rounds = 2", "round = 2", "round"),
        ("seeds = [1, 2]", 'seeds = "1"', "seeds: expected a list of integers"),
        ("seeds = [1], alices", "seed = [1], alices", "tuning: expected partitions, seeds"),
        ("lr = [0.02, 0.2]", 'lr = [0.02, 0.2]\nwithout = ["wafle"]', "'wafle' in .grid. or without"),
        ("[grid]", "[grid]\nwafle = { clip = [1.0] }", "'wafle' in .grid. or without"),
        ('method = "waffle-paper"\nabove', 'method = "wafle"\nabove', "a claim is about 'wafle'"),
        ("clip = 5.0", "clp = 5.0", "unknown option 'clp'"),
        ("[grid]", '[variants.soft]\nmethod = "waffle-paper"\nclp = 0.0\n[grid]', "unknown option 'clp'"),
        ("[grid]", '[variants.soft]\nmethod = "wafle"\n[grid]', "unknown method 'wafle'"),
        ("[grid]", "[variants.soft]\nclip = 0.0\n[grid]", "expected a new name and method"),
        ('above = "local"', "", "either above or gap"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    """A wrong name or value is reported before anything trains."""
    assert old in TEXT
    file = tmp_path / "wrong.toml"
    file.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(WaffleError, match=message):
        read_claims(file, load_tournament(file).methods)


def test_a_failed_job_is_counted(tmp_path: Path) -> None:
    """A job whose data is missing is reported and counted, and writes no line."""
    file = tmp_path / "failing.toml"
    file.write_text(TEXT.replace("[data.digits]", '[data.digits]\ndata = "mnist"'))
    lines: list[str] = []
    jobs, nowhere = jobs_of(load_tournament(file), methods=["local"]), replace(CPU, data_dir=str(tmp_path))
    assert run(file, tmp_path / "results", nowhere, jobs, report=lines.append) == 1
    assert "failed" in lines[0]
    assert not (tmp_path / "results").exists()
    with pytest.raises(WaffleError, match="processes: expected at least 1"):
        run(file, tmp_path / "results", CPU, [], 0)


def test_a_variant_fixes_options_and_settings_of_its_method(tmp_path: Path) -> None:
    """A variant has the trials of its method, its own options, and the shared ones that it does not fix."""
    file = tmp_path / "variants.toml"
    file.write_text(
        TEXT.replace("[grid]", '[variants.free]\nmethod = "waffle-paper"\nclip = 0.0\nmomentum = 0.9\n[grid]')
    )
    found = load_tournament(file)
    assert found.methods[-1] == "free"
    tasks = found.data["digits"]
    assert found.trials("free", tasks) == found.trials("waffle-paper", tasks)
    config = found.config("free", tasks.columns[0], found.trials("free", tasks)[0], 1, 1)
    assert (config.method, config.options["clip"], config.settings.momentum) == ("waffle-paper", 0.0, 0.9)
    whole = found.config("waffle-paper", tasks.columns[0], found.trials("waffle-paper", tasks)[0], 1, 1)
    assert whole.options["clip"] == 5.0


def scores(**methods: list[float]) -> Scores:
    """Scores of one column, one task per value."""
    return Scores({("d", "A"): {m: {(1, str(k)): v for k, v in enumerate(some)} for m, some in methods.items()}})


def test_standings_by_hand() -> None:
    """Gap, worst tenth, share above Local and rank of two methods on four tasks, worked out by hand."""
    found = standings(scores(local=[50.0, 60.0, 70.0, 80.0], ditto=[52.0, 58.0, 75.0, 85.0]))
    first, second = found
    assert (first.method, first.gap, first.rank) == ("ditto", 0.0, 1.0)
    assert second.gap == pytest.approx(67.5 - 65.0)
    assert first.gains == 0.75
    assert second.worst == pytest.approx(52.0 - 50.0)
    # differences 2, -2, 5, 5: mean 2.5, deviation sqrt(33/3), standard error 1.66 < 2.5
    assert second.near == 0


def test_a_diverged_run_counts_as_the_worst_of_its_task() -> None:
    """None is replaced by the lowest score that any method has on the task."""
    lines = [
        {"stage": "table", "column": "A", "partition": 1, "alices": ["a"], "method": m, "selected": v}
        for m, v in (("local", [[40.0], [60.0]]), ("ditto", [[None], [80.0]]))
    ]
    assert scores_of({"d": lines}).columns["d", "A"]["ditto"] == {(1, "a"): 60.0}


def test_a_difference_is_tested_over_columns() -> None:
    """The mean difference is over tasks; one column gives no test."""
    found = compare(scores(local=[50.0, 60.0], ditto=[51.0, 63.0]), "ditto", "local")
    assert found.difference == 2.0
    assert found.tasks == 2
    assert found.p != found.p


def test_critical_difference_is_nemenyis() -> None:
    """Demsar (2006), Table 5: q = 2.343 for three methods at the level 0.05."""
    assert critical_difference(3, 10) == pytest.approx(2.343 * (3 * 4 / 60) ** 0.5, abs=2e-3)
    assert lowest([5.0, 1.0, 3.0]) == 1.0


def test_costs_of_methods() -> None:
    """Messages and gradients per step: FedAvg one model each way, Ditto two gradients, WAFFLE two models down."""
    assert cost_of("fedavg") == (1.0, 1.0, 1.0)
    assert cost_of("ditto") == (1.0, 1.0, 2.0)
    assert cost_of("waffle-paper") == (2.0, 1.0, 1.0)
    assert cost_of("local")[:2] == (0.0, 0.0)


def test_an_undecided_claim_says_so(finished: Path) -> None:
    """A claim about a method without a complete record is undecided."""
    file = finished / "experiments" / "tiny.toml"
    claims = read_claims(file, load_tournament(file).methods)
    (verdict,) = verdicts(claims, scores(local=[1.0, 2.0]))
    assert verdict.word == "undecided"
