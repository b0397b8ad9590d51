"""`waffle tune` with the real Optuna, on small budgets."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cli_support import Shown, waffle
from conftest import refusal
from test_process import start
from waffle_fl.algorithms import ALGORITHMS, training_key
from waffle_fl.config import RunConfig, Settings, check_run, load_experiment, option_types
from waffle_fl.experiment import Runtime, execute, plan
from waffle_fl.records import read_rounds
from waffle_fl.tuning.report import command
from waffle_fl.tuning.search import SearchListener, SearchSpec, search
from waffle_fl.tuning.space import draw_config, space_of, training_names

ROUNDS = 8
SMALL = (
    *("--agents", "4", "--samples-per-agent", "40", "--batch-size", "16", "--rounds", str(ROUNDS), "--model", "linear"),
    *("--workers", "1", "--quiet"),
)


def tune(out: Path, *flags: str, method: str = "waffle-paper") -> Shown:
    return waffle("tune", method, *SMALL, "--out", out, *flags)


def recorded(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def full_search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted search of eight trials in two batches."""
    out = tmp_path_factory.mktemp("tune") / "full"
    shown = tune(out, "--trials", "8", "--parallel-trials", "4")
    assert (shown.code, shown.err) == (0, "")
    return out


# --- the search space


class FixedSampler:
    """A sampler that uses a list of fractions."""

    def __init__(self, fractions: list[float]) -> None:
        self._next = iter(fractions)

    def choose(self, name: str, choices: list[Any]) -> Any:
        return choices[min(int(next(self._next) * len(choices)), len(choices) - 1)]

    def number(self, name: str, low: float, high: float, log: bool) -> float:
        return low + next(self._next) * (high - low)


@pytest.mark.parametrize("method", list(ALGORITHMS))
@given(fractions=st.lists(st.floats(0, 1), min_size=12, max_size=12))
@settings(max_examples=25)
def test_every_sample_is_a_valid_config(method: str, fractions: list[float]) -> None:
    """Every sample of a method's default space is a valid config."""
    config = draw_config(space_of(method), RunConfig(method=method, settings=Settings()), FixedSampler(fractions))
    assert check_run(method, {}, config.options).options == config.options
    config.algorithm()


def test_a_schedule_is_sampled_with_its_parameters() -> None:
    """sigmoid(slope, shift) becomes text with both numbers, the shift in rounds, and psi equals omega."""
    config = draw_config(
        space_of("waffle-paper"), RunConfig(method="waffle-paper", settings=Settings()), FixedSampler([0, 0, 1, 0, 0])
    )
    assert config.options["omega"] == config.options["psi"] == "sigmoid(1, 30)"


def test_server_side_options_share_one_training() -> None:
    """In WAFFLE's space only clip and lr change the training; samples with equal values share a stack."""
    assert training_names(space_of("waffle-paper"), "waffle-paper") == {"clip", "lr"}
    base = RunConfig(method="waffle-paper", settings=Settings())
    a, b = (
        draw_config(space_of("waffle-paper", only=("omega", "psi")), base, FixedSampler([first, 0.5, 0.5])).algorithm()
        for first in (0, 1)
    )
    assert a != b
    assert training_key(a) == training_key(b)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[ditto]\nlam = [1.0]", "expected a table [waffle-paper]"),
        ("[waffle-paper]\nslop = [1.0]", "unknown 'slop'"),
        ("[waffle-paper]\nclip = []", "clip has no choices"),
        ("[waffle-paper]\nlr = { low = 2, high = 1 }", "low < high"),
        ("[waffle-paper]\nlr = { low = 0, high = 1, log = true }", "above 0"),
        ("[waffle-paper]\nlr = { low = 0.1, high = 1, lok = true }", "unknown key 'lok'"),
        ('[waffle-paper]\nomega = ["sigmoid(slope)"]', "slope is used in a string but has no range"),
        ("[waffle-paper]\nclip = 1.0", "nothing is left to search"),
        ("[waffle", "not valid TOML"),
    ],
)
def test_a_wrong_space_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    """A mistake in a search space file is refused in one line."""
    file = tmp_path / "space.toml"
    file.write_text(text)
    assert expected in refusal(space_of, "waffle-paper", str(file))


@pytest.mark.parametrize("text", ["batch_size = { low = 2, high = 9 }", 'omega = ["sigmoyd(3)"]', "clip = [-1.0, 1.0]"])
def test_an_invalid_value_is_refused_before_training(tmp_path: Path, text: str) -> None:
    """A choice or bound that is not valid for a run is refused before training."""
    (tmp_path / "space.toml").write_text(f"[waffle-paper]\n{text}")
    shown = tune(tmp_path / "out", "--space", str(tmp_path / "space.toml"))
    assert shown.code == 2
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


# --- the search


def test_the_output_of_a_search(full_search: Path) -> None:
    """A search writes a table of trials, a chart and a record, and uses test data for at most two trials."""
    lines = recorded(full_search)
    assert [line["trial"] for line in lines] == ["default", *range(8)]
    assert {line["state"] for line in lines} <= {"finished", "pruned", "diverged"}
    assert (full_search / "trials.png").read_bytes().startswith(b"\x89PNG")
    best = max((line for line in lines if line["state"] == "finished"), key=lambda line: line["score"])
    assert {line["trial"] for line in lines if "test_accuracy" in line} == {"default", best["trial"]}


def test_the_best_trial_can_be_run_again(full_search: Path, tmp_path: Path) -> None:
    """best.toml is an experiment file whose run has the validation and test scores of the search."""
    experiment = load_experiment(full_search / "best.toml")
    (result,) = execute(plan(experiment, tmp_path), Runtime())
    best = max((line for line in recorded(full_search) if line["state"] == "finished"), key=lambda line: line["score"])
    assert result["selected"]["accuracy"] == best["test_accuracy"]
    rounds = read_rounds(next(tmp_path.glob("*/rounds.jsonl")))
    assert max(line["validation_accuracy"] for line in rounds) == best["validation_accuracy"]


def test_trials_train_in_one_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four trials that differ in omega and psi only are trained in one simulation."""
    from waffle_fl.experiment import execution

    stacks, simulate = [], execution.simulate

    def counted(cells: Any, *args: Any, **options: Any) -> Any:
        stacks.append(len(cells))
        return simulate(cells, *args, **options)

    monkeypatch.setattr(execution, "simulate", counted)
    assert tune(tmp_path / "out", "--trials", "4", "--pruning", "off").code == 0
    assert stacks == [1, 4, 4, 4]  # the default, then the trials up to each rung and to the end


def test_the_seed_determines_the_search(full_search: Path, tmp_path: Path) -> None:
    """Two searches with one seed have the same trials and results; another seed has other trials."""
    assert tune(tmp_path / "a", "--trials", "8").code == 0
    assert recorded(tmp_path / "a") == recorded(full_search)
    assert tune(tmp_path / "b", "--trials", "4", "--seed", "2").code == 0
    assert [line["values"] for line in recorded(tmp_path / "b")[1:]] != [
        line["values"] for line in recorded(full_search)[1:5]
    ]


def test_a_search_can_be_extended(full_search: Path, tmp_path: Path) -> None:
    """Extending a search from four to eight trials keeps the first four and equals one search of eight."""
    assert tune(tmp_path / "out", "--trials", "4").code == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rounds.jsonl")}
    assert tune(tmp_path / "out", "--trials", "8").code == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert recorded(tmp_path / "out") == recorded(full_search)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_search_resumes(full_search: Path, tmp_path: Path, signal_number: signal.Signals) -> None:
    """After Ctrl-C or SIGKILL the same command resumes and gives the record of the uninterrupted search."""
    line = ["tune", "waffle-paper", *SMALL, "--out", tmp_path / "out", "--trials", "8", "--checkpoint-seconds", "0"]
    process = start(*line)
    while not list((tmp_path / "out").glob("trial-000[4-7]")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    process.send_signal(signal_number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == (130 if signal_number == signal.SIGINT else -signal.SIGKILL)
    assert signal_number == signal.SIGKILL or "run the same command again" in err
    ended = {p.parent: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("trial-000[0-3]/*/rounds.jsonl")}
    assert tune(tmp_path / "out", "--trials", "8").code == 0
    assert {folder: (folder / "rounds.jsonl").stat().st_mtime_ns for folder in ended} == ended
    assert recorded(tmp_path / "out") == recorded(full_search)


def test_a_search_stops_at_its_time_limit(tmp_path: Path) -> None:
    """At the time limit the best trial so far is written, and the same command resumes."""
    assert tune(tmp_path / "out", "--trials", "1").code == 0
    flags = ("--trials", "400", "--minutes", "0.005")
    shown = tune(tmp_path / "out", *flags)
    assert shown.code == 0
    assert "the time limit is reached" in shown.out
    done = len(recorded(tmp_path / "out"))
    assert 2 <= done < 400
    tune(tmp_path / "out", *flags)
    assert len(recorded(tmp_path / "out")) >= done


@pytest.mark.parametrize("pruning", ["median", "halving"])
def test_poor_trials_are_pruned(tmp_path: Path, pruning: str) -> None:
    """Trials with tiny learning rates are pruned at a rung and keep no checkpoint."""
    (tmp_path / "space.toml").write_text("[fedavg]\nlr = [0.2, 0.000001, 0.000002, 0.000003, 0.000004]")
    flags = ("--space", str(tmp_path / "space.toml"), "--trials", "10", "--pruning", pruning)
    assert tune(tmp_path / "out", *flags, method="fedavg").code == 0
    pruned = [line for line in recorded(tmp_path / "out") if line["state"] == "pruned"]
    assert pruned
    assert all(line["rounds"] < ROUNDS and line["values"]["lr"] < 0.1 for line in pruned)
    for line in pruned:
        assert not list((tmp_path / "out" / f"trial-{line['trial']:04d}").glob("*/checkpoint-*"))


def test_repeated_samples_are_not_trained_again(tmp_path: Path) -> None:
    """Ten trials with two values, one of them the default's, train once; repeated trials reuse the result."""
    (tmp_path / "space.toml").write_text("[fedavg]\nlr = [0.1, 0.2]")
    flags = ("--space", str(tmp_path / "space.toml"), "--trials", "10", "--parallel-trials", "4", "--lr", "0.1")
    assert tune(tmp_path / "out", *flags, method="fedavg").code == 0
    entries = recorded(tmp_path / "out")
    assert len(entries) == 11
    assert len({(line["values"]["lr"], line["state"], line["validation_accuracy"]) for line in entries[1:]}) == 2
    assert len(list((tmp_path / "out").glob("trial-*/*/rounds.jsonl"))) == 1
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.jsonl")}
    assert tune(tmp_path / "out", *flags, method="fedavg").code == 0
    assert {path: path.read_bytes() for path in before} == before


def test_a_diverging_trial_does_not_win(tmp_path: Path) -> None:
    """A learning rate that makes Alice's training diverge ends its trial, not the search."""
    (tmp_path / "space.toml").write_text("[fedavg]\nlr = [1e30, 1e31]")
    shown = tune(tmp_path / "out", "--space", str(tmp_path / "space.toml"), "--trials", "2", method="fedavg")
    assert shown.code == 0
    assert [line["state"] for line in recorded(tmp_path / "out")] == ["finished", "diverged", "diverged"]
    assert "no trial beat the default" in shown.out


def test_alice_all_scores_the_mean_over_agents(tmp_path: Path) -> None:
    """With --alice all a trial has one run per agent, and its score is the mean over agents."""
    flags = ("--alice", "all", "--agents", "3", "--split", "A", "--trials", "2", "--only", "p_d", "--pruning", "off")
    assert tune(tmp_path / "out", *flags, method="weight-erosion").code == 0
    line = recorded(tmp_path / "out")[1]
    logs = list((tmp_path / "out" / "trial-0000").glob("*/rounds.jsonl"))
    assert len(logs) == 3
    best = [max(entry["validation_accuracy"] for entry in read_rounds(log)) for log in logs]
    assert line["validation_accuracy"] == pytest.approx(sum(best) / 3)
    assert load_experiment(tmp_path / "out" / "best.toml").settings.alice == "all"
    shown = waffle("bench", tmp_path / "out" / "best.toml", "--out", tmp_path / "best", "--quiet")
    assert (shown.code, shown.err) == (0, "")
    assert [word for word in ("A for 1", "A for 2") if word in shown.out] == ["A for 1", "A for 2"]


# --- errors


def test_no_validation_data(tmp_path: Path) -> None:
    """Without validation data the search is refused with the flag that provides some."""
    shown = tune(tmp_path / "out", "--validation", "0")
    assert shown.code == 2
    assert "such as --validation 0.2" in shown.words
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_search_is_refused(full_search: Path) -> None:
    """A folder that holds another search is refused and left unchanged."""
    before = (full_search / "search.json").read_bytes()
    shown = tune(full_search, "--trials", "8", "--split", "A")
    assert shown.code == 2
    assert "holds another search" in shown.words
    assert (full_search / "search.json").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trials", "0"], "trials >= 1"),
        (["--parallel-trials", "0"], "parallel_trials >= 1"),
        (["--only", "lamm"], "'lamm' is not in the search space"),
        (["--pruning", "hard"], "expected median or halving or off"),
        (["--space", "nowhere.toml"], "cannot read nowhere.toml"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: list[str], expected: str) -> None:
    """A wrong flag is refused with exit code 2."""
    shown = tune(tmp_path / "out", *flags)
    assert shown.code == 2
    assert expected in shown.words


def test_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Optuna one line names the extra to install."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    shown = tune(tmp_path / "out")
    assert shown.code == 2
    assert "pip install 'waffle-fl[tune]'" in shown.err
    assert not (tmp_path / "out").exists()


def test_the_best_trial_as_a_command() -> None:
    """The printed `waffle run` command has the values that are not the default, and no others."""
    config = check_run(
        "waffle-paper", {"split": "A*", "lr": 0.05, "augment": True}, {"omega": "step(0.2)", "clip": 2.0}
    )
    assert command(config) == "waffle run waffle-paper --split 'A*' --lr 0.05 --augment --omega 'step(0.2)'"


def test_the_listener_receives_every_trial(tmp_path: Path) -> None:
    """The listener receives each trial when it ends, with the best so far."""
    received = []

    class Ear(SearchListener):
        def trial_ended(self, trial: Any, result: Any) -> None:
            received.append((trial.number, result.best.score))

    config = check_run("local", {"rounds": 4, "validation": 0.3, "samples_per_agent": 30, "model": "linear"}, {})
    result = search(SearchSpec(config, {"lr": [0.01, 0.1]}, 3, 2, "off"), tmp_path / "out", Runtime(workers=1), Ear())
    assert [number for number, _ in received] == [0, 1, 2]
    assert received[-1][1] == result.best.score


def test_every_space_has_existing_options() -> None:
    """Each method's space contains options of the method or lr."""
    for method in ALGORITHMS:
        assert set(space_of(method)) & {*option_types(method), "lr"}


def test_a_method_without_a_space_searches_its_step_size() -> None:
    """A method that defines no space is tuned in lr."""
    assert set(space_of("fedper")) == {"lr"}


def test_progress_is_printed(full_search: Path) -> None:
    """Without --quiet a search prints its progress on stderr; a finished search trains nothing more."""
    flags = [flag for flag in SMALL if flag != "--quiet"]
    shown = waffle("tune", "waffle-paper", *flags, "--out", full_search, "--trials", "8", "--parallel-trials", "4")
    assert shown.code == 0
    assert "8 trials of WAFFLE (paper), 8 already done" in shown.err
    assert "default" in shown.out
    assert "8 of 8 trials" in shown.out


# --- storages


@pytest.mark.parametrize("url", ["journal:{}/search.log", "sqlite:///{}/shared.db"])
def test_a_storage_elsewhere_gives_the_same_search(url: str, full_search: Path, tmp_path: Path) -> None:
    """A search whose study is in a journal or a database continues there, and ends as one in its folder."""
    storage = url.format(tmp_path)
    for trials in ("4", "8"):
        shown = tune(tmp_path / "full", "--trials", trials, "--parallel-trials", "4", "--storage", storage)
        assert (shown.code, shown.err) == (0, "")
    assert recorded(tmp_path / "full") == recorded(full_search)
    assert not (tmp_path / "full" / "study.db").exists()
    shown = tune(tmp_path / "full", "--trials", "8", "--parallel-trials", "4")
    assert "give its --storage" in shown.err
    assert shown.code == 2


def test_wrong_storages_end_in_one_line(full_search: Path, tmp_path: Path) -> None:
    """A URL of no storage, a missing database, another file, a folder with its own study: one line, no password."""
    notes = tmp_path / "notes.txt"
    notes.write_text("not a journal\n")
    missing = f"sqlite:///{tmp_path}/none/search.db"
    for url in ("nowhere", "oracle9://me:secret@host/name", missing, f"journal:{notes}"):
        shown = tune(tmp_path / "tune", "--trials", "1", "--storage", url)
        assert shown.code == 2
        assert "storage: expected a URL" in shown.err
        assert "secret" not in shown.err
        assert len(shown.err.splitlines()) == 1
    assert notes.read_text() == "not a journal\n"
    shown = tune(full_search, "--trials", "8", "--parallel-trials", "4", "--storage", f"journal:{tmp_path}/log")
    assert "leave --storage out" in shown.err
