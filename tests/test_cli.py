"""The command line: what it prints where, what it refuses and how, and the grid that `bench` runs."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from waffle_fl import __version__, cli, experiment
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.cli.menu import COMMANDS
from waffle_fl.cli.watch import Output
from waffle_fl.config import RunConfig, Settings, check_run, load_experiment, load_experiments, option_types
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Place, plan
from waffle_fl.federation import Federation
from waffle_fl.records import read_rounds

SMALL = ("--data", "synthetic", "--model", "linear", "--samples-per-agent", "20", "--rounds", "3")


@dataclass(frozen=True)
class Shown:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Standard error as one line of words, however it was wrapped."""
        return " ".join(self.err.split())


def waffle(*arguments: str | Path) -> Shown:
    """Run the command in this process; an error that is not the user's passes through and fails the test."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["waffle", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    return Shown(code, out.getvalue(), err.getvalue())


def process(*arguments: str | Path) -> Shown:
    """Run the command in a process of its own."""
    line = [sys.executable, "-m", "waffle_fl", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    return Shown(done.returncode, done.stdout, done.stderr)


def refusal(shown: Shown) -> str:
    """The one line with which a command refused its work."""
    assert shown.code == 2
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if line.strip()]
    assert len(lines) == 1, shown.err
    assert lines[0].startswith("waffle: ")
    assert "Traceback" not in shown.err
    return lines[0]


def strict(text: str) -> Any:
    """The one JSON document that a text is; NaN and infinity are not JSON."""
    assert text.endswith("\n")
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a working folder of its own, and no setting from outside."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "WAFFLE_DATA"):
        monkeypatch.delenv(name, raising=False)
    return folder


def toml(folder: Path, text: str, name: str = "grid.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


# --- C1: names that are nearly right


@pytest.mark.parametrize(
    ("arguments", "wrong", "right"),
    [
        (["run", "wafle"], "wafle", "waffle"),
        (["run", "Scafold"], "Scafold", "scaffold"),
        (["rum", "waffle"], "rum", "run"),
        (["data", "digitz"], "digitz", "digits"),
        (["data", "fashionmnist"], "fashionmnist", "fashion-mnist"),
        (["run", "local", "--data", "sintetic"], "sintetic", "synthetic"),
        (["run", "local", "--model", "lenet"], "lenet", "lenet5"),
        (["run", "waffle", "--omega", "sigmod(3)"], "sigmod", "sigmoid"),
        (["run", "waffle", "--ronds", "3"], "--ronds", "--rounds"),
        (["run", "waffle", "--batch_sise=3"], "--batch_sise", "--batch-size"),
        (["run", "waffle", "--omga", "x"], "--omga", "--omega"),
        (["bench", "grid.toml", "--plam"], "--plam", "--plan"),
        (["report", "runs", "--titel", "x"], "--titel", "--title"),
        (["data", "digits", "--splt", "C"], "--splt", "--split"),
        (["resume", "run", "--forse"], "--forse", "--force"),
        (["demo", "--quite"], "--quite", "--quiet"),
    ],
)
def test_a_misspelt_name_is_one_line_with_the_nearest_right_one(
    here: Path, arguments: list[str], wrong: str, right: str
) -> None:
    """A misspelt command, method, flag, data set, model or schedule is refused with the name that was meant."""
    line = refusal(waffle(*arguments))
    assert wrong in line
    assert f"did you mean {right}?" in line
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "wrong", "right", "number"),
    [
        ('methods = ["waffle"]\n\nlerning_rate = 0.1\n', "lerning_rate", "lr", 3),
        ('methods = ["waffle"]\n\nlerning-rate = 0.1\n', "lerning-rate", "lr", 3),
        ('methods = ["waffle"]\nbatch_sise = 16\n', "batch_sise", "batch_size", 2),
        ('methods = ["waffle"]\nbatch-size = 16\n', "batch-size", "batch_size", 2),
        ('# momentun\nmethods = ["waffle"]\n  momentun = 0.9\n', "momentun", "momentum", 3),
        ('method = ["waffle"]\nmethods = ["waffle"]\n', "method", "methods", 1),
        ('methods = ["waffle"]\n[wafle]\nclip = 1\n', "wafle", "waffle", 2),
        ('methods = ["waffle"]\n[waffle]\n\nomeg = "sigmoid(3)"\n', "omeg", "omega", 4),
    ],
    ids=lambda value: "" if "\n" in str(value) else str(value),
)
def test_a_misspelt_key_is_named_with_its_file_and_line(
    here: Path, text: str, wrong: str, right: str, number: int
) -> None:
    """A misspelt key of an experiment file is refused with the file, the line, and the key that was meant."""
    line = refusal(waffle("bench", toml(here, text)))
    assert "grid.toml: " in line
    assert f"unknown key {wrong!r} (line {number}), did you mean {right}?" in line


def test_a_misspelt_method_in_a_file_is_named(here: Path) -> None:
    """A method that does not exist is refused before any run begins."""
    line = refusal(waffle("bench", toml(here, 'methods = ["local", "wafle"]\n')))
    assert "unknown method 'wafle', did you mean waffle?" in line


def test_the_line_of_a_key_is_that_of_its_own_table(here: Path) -> None:
    """Where two methods have an option of the same name, the message has the line of the one that is wrong."""
    text = 'methods = ["waffle", "scaffold"]\n[waffle]\nclip = 2.0\n[scaffold]\nclip = -1.0\n'
    assert "clip (line 5): expected at least 0, got -1.0" in refusal(waffle("bench", toml(here, text)))


# --- C2: values that cannot be


def test_all_problems_of_a_file_are_told_at_once(here: Path) -> None:
    """Every wrong type, range and value of an experiment file is in one message, each with its line."""
    text = """methods = ["waffle"]
rounds = 0
epochs = 0
batch_size = 0
lr = nan
momentum = "much"
agents = 2.5
seed = -1
guard = "on"
shared_permutation = 1
validation = 1.0
weight_decay = inf
typo = 1

[waffle]
clip = -1
eta_g = 0
omega = "sigmoid(-2)"
psi = 3
"""
    line = refusal(waffle("bench", toml(here, text)))
    expected = [
        "rounds (line 2): expected at least 1, got 0",
        "epochs (line 3): expected at least 1, got 0",
        "batch_size (line 4): expected at least 1, got 0",
        "lr (line 5): expected a finite number, got nan",
        "momentum (line 6): expected a finite number, got 'much'",
        "agents (line 7): expected an integer, got 2.5",
        "seed (line 8): expected at least 0, got -1",
        "guard (line 9): expected 'off' or 'standard', got 'on'",
        "shared_permutation (line 10): expected true or false, got 1",
        "validation (line 11): expected a fraction from 0 to below 1, got 1.0",
        "weight_decay (line 12): expected a finite number, got inf",
        "unknown key 'typo' (line 13)",
        "clip (line 16): expected at least 0, got -1",
        "eta_g (line 17): expected a number above 0, got 0",
        "a sigmoid needs a slope >= 0, got -2.0",
        "psi (line 19): expected text, got 3",
    ]
    assert [part for part in expected if part not in line] == []


def test_all_problems_of_flags_are_told_at_once(here: Path) -> None:
    """Flags with impossible values are refused together, before anything is written."""
    flags = ["--lr", "-0.1", "--rounds", "0", "--batch-size", "0", "--epochs", "0", "--momentum", "nan", "--clip", "-1"]
    line = refusal(waffle("run", "waffle", *flags))
    for name in ("lr", "rounds", "batch_size", "epochs", "momentum", "clip"):
        assert f"{name}: expected" in line
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--rounds", "ten"], "--rounds"),
        (["--rounds", "1.5"], "--rounds"),
        (["--lr", "fast"], "--lr"),
        (["--rounds"], "--rounds"),
        (["--guard", "on"], "--guard"),
        (["--direction", "up"], "--direction"),
        (["spare"], "spare"),
        (["--lr", "inf"], "lr"),
        (["--agents", "0"], "agents"),
        (["--samples-per-agent", "-1"], "samples_per_agent"),
        (["--split", "Q"], "'Q'"),
        (["--omega", "sigmoid(a)"], "sigmoid(a)"),
        (["--omega", "sigmoid(1"], "sigmoid(1"),
        (["--omega", "sigmoid(1, 2, 3)"], "sigmoid(1, 2, 3)"),
        (["--workers", "-1"], "workers"),
        (["--stack", "0"], "stack"),
        (["--minutes", "-1"], "minutes"),
        (["--stack", "-1"], "stack"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_with_an_impossible_value_is_named(flags: list[str], what: str) -> None:
    """A value of the wrong type or range is refused in one line that names the flag or the value."""
    assert what in refusal(waffle("run", "waffle", *SMALL, "--out", "run", *flags))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "methods"),
        ("methods = []", "methods"),
        ('methods = "waffle"', "methods"),
        ("methods = [1]", "methods"),
        ('methods = ["waffle"]\nseeds = [1.5]', "seeds"),
        ('methods = ["waffle"]\nseeds = [-1]', "seeds"),
        ('methods = ["waffle"]\nsplits = []', "splits"),
        ('methods = ["waffle"]\nsplits = ["Z"]', "'Z'"),
        ('methods = ["waffle"]\nshares = [["a"]]', "shares"),
        ('methods = ["waffle"]\nshares = [[0.5, 0.5]]', "share matrix"),
        ('methods = ["waffle"]\nsizes = [1, 0]', "numbers above 0"),
        ('methods = ["waffle"]\nsizes = 2', "a list of numbers"),
        ('methods = ["waffle"]\nvariants = 1', "[variants.NAME]"),
        ('methods = ["waffle"]\n[variants]\na = 1', "[variants.NAME]"),
        ('methods = ["waffle"]\n[variants."../up"]', "a run name"),
        ('methods = ["waffle"]\n[variants.a]\nrounds = 0', "rounds (line 3): expected at least 1"),
        ('methods = ["waffle"]\n[variants.a]\nditto = {lam = 1.0}', "not among the experiment's methods"),
        ('methods = ["waffle"]\n[waffle]\nomega = {B = "sigmoid(1)"}', "no split 'B'"),
        ('methods = ["waffle"]\n[waffle]\nclip = {C = -1.0}', "clip"),
        ('methods = ["waffle"]\nsplits = ["A", "C"]\n[waffle]\nclip = {C = 1.0}', "no value for split A"),
        ('methods = ["waffle"]\n[ditto]\nlam = 1.0', "not among the experiment's methods"),
        ("methods = [", "not valid TOML"),
        ("\x00", "not valid TOML"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused(here: Path, text: str, what: str) -> None:
    """A file without methods, with impossible lists, or that is no TOML is refused in one line."""
    line = refusal(waffle("bench", toml(here, text)))
    assert what in line


@pytest.mark.parametrize("name", ["missing.toml", ".", "binary.toml"])
def test_a_file_that_cannot_be_read_is_named(here: Path, name: str) -> None:
    """A missing file, a folder and a binary file are refused by name."""
    (here / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert name in refusal(waffle("bench", name))


def test_variants_are_experiments_of_their_own(here: Path) -> None:
    """A variant changes what stands above it, a table option by option, and has a folder of its own."""
    text = """methods = ["waffle"]
lr = 0.2
[waffle]
clip = 1.0
[variants.fast]
lr = 0.5
waffle = {control = "paper"}
[variants.other]
methods = ["local"]
"""
    path = toml(here, text.replace("[waffle]\nclip = 1.0\n", ""))
    shown = waffle("bench", path, "--plan", "--out", "out")
    assert shown.out.splitlines() == ["out/fast/digits-C-waffle-1", "out/other/digits-C-local-1"]
    fast = load_experiments(Path(toml(here, text.replace('[variants.other]\nmethods = ["local"]\n', ""))))[0]
    assert fast.settings.lr == 0.5
    assert fast.options["waffle"] == {"clip": 1.0, "control": "paper"}


def test_one_split_and_one_seed_are_not_passed_over(here: Path) -> None:
    """A file that says `split` and `seed` gets that split and that seed, or is told to say `splits` and `seeds`."""
    shown = waffle("bench", toml(here, 'methods = ["local"]\nsplit = "B"\nseed = 7\n'), "--plan", "--out", "out")
    assert shown.out == "out/digits-B-local-7\n" or (shown.code == 2 and "splits" in shown.err and "seeds" in shown.err)


# --- C3: who is Alice?


@pytest.mark.parametrize("alice", ["10", "99999", "-1", "bob", "agent 10", "1.5", "", "²", "٣x"])
def test_an_alice_who_is_not_there_is_refused_with_those_who_are(here: Path, alice: str) -> None:
    """A number out of range or an unknown name is refused with the valid range or the valid names."""
    line = refusal(waffle("run", "waffle", *SMALL, f"--alice={alice}"))
    assert "between 0 and 9" in line or "agent 0, agent 1" in line
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("alice", ["3", "agent 3"])
def test_alice_is_a_number_or_a_name(here: Path, alice: str) -> None:
    """Alice may be given by her number or by her name, and is recorded."""
    assert waffle("run", "local", *SMALL, "--alice", alice, "--out", "run", "--quiet").code == 0
    assert json.loads((here / "run" / "provenance.json").read_text())["alice"] == 3


# --- C4 to C8: small federations, short runs, odd schedules


def finite_rounds(folder: Path, count: int) -> list[dict[str, Any]]:
    """The rounds of a run, all of them there and all numbers finite."""
    text = (folder / "rounds.jsonl").read_text()
    rounds = [strict(line + "\n") for line in text.splitlines()]
    assert len(rounds) == count
    for line in rounds:
        assert line["loss"] is not None
        assert sum(line["weights"]) == pytest.approx(1)
        assert min(line["weights"]) >= 0
    return rounds


def test_a_single_agent_is_local_training(here: Path) -> None:
    """WAFFLE with one agent runs, gives her all weight, and says that it is Local."""
    shown = waffle("run", "waffle", *SMALL, "--agents", "1", "--out", "run")
    assert shown.code == 0
    assert "a single agent: this is Local" in shown.words
    assert all(line["weights"] == [1.0] for line in finite_rounds(here / "run", 3))


def test_two_agents_weigh_the_same_until_the_end(here: Path) -> None:
    """WAFFLE with two agents runs with equal weights and says that the paper's formula is 0/0."""
    shown = waffle("run", "waffle", *SMALL, "--agents", "2", "--out", "run")
    assert shown.code == 0
    assert "two agents: the paper's weights are 0/0" in shown.words
    rounds = finite_rounds(here / "run", 3)
    assert [line["weights"] for line in rounds[:2]] == [pytest.approx([0.5, 0.5])] * 2


@pytest.mark.parametrize("method", ALGORITHMS)
@pytest.mark.parametrize("agents", ["1", "2"])
def test_every_method_runs_with_one_and_with_two_agents(here: Path, method: str, agents: str) -> None:
    """The smallest federations train with every method, and all numbers stay finite."""
    assert waffle("run", method, *SMALL, "--agents", agents, "--out", "run", "--quiet").code == 0
    finite_rounds(here / "run", 3)


def test_few_rounds_are_noted(here: Path) -> None:
    """Fewer than 20 rounds of WAFFLE are noted; 20 rounds and other methods are not."""
    note = "fewer than 20 rounds"
    assert note in waffle("run", "waffle", *SMALL, "--out", "a").words
    assert note not in waffle("run", "waffle", *SMALL, "--rounds", "20", "--out", "b").words
    assert note not in waffle("run", "scaffold", *SMALL, "--out", "c").words
    assert any(note in line for line in json.loads((here / "a" / "provenance.json").read_text())["notes"])


@pytest.mark.parametrize("schedule", ["sigmoid(1e9)", "sigmoid(1e300)", "sigmoid(0)", "step(0)", "constant(0)"])
@pytest.mark.parametrize("denominator", ["max", "range"])
def test_an_extreme_schedule_runs_with_finite_numbers(here: Path, schedule: str, denominator: str) -> None:
    """A huge slope and a slope of 0 give finite weights in every round."""
    flags = ["--omega", schedule, "--psi", schedule, "--denominator", denominator, "--out", "run", "--quiet"]
    assert waffle("run", "waffle", *SMALL, *flags).code == 0
    finite_rounds(here / "run", 3)


@pytest.mark.parametrize("flag", ["--omega", "--psi"])
@pytest.mark.parametrize("schedule", ["sigmoid(-1)", "sigmoid(-1e-300)"])
def test_a_negative_slope_is_refused(here: Path, flag: str, schedule: str) -> None:
    """A sigmoid that would end in global training is refused before anything is written."""
    assert "slope >= 0" in refusal(waffle("run", "waffle", flag, schedule))
    assert list(here.iterdir()) == []


SCHEDULES = """
def nan_in_round_2(r, R): return float("nan") if r == 2 else 0.5
def too_large(r, R): return 1.5
def negative(r, R): return -0.25
def infinite(r, R): return float("inf")
def a_word(r, R): return "half"
def nothing(r, R): return None
def half(r, R): return 0.5
not_a_function = 0.5
"""


@pytest.fixture
def schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's own schedules."""
    name = "schedules_of_a_user"
    toml(tmp_path, SCHEDULES, f"{name}.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("function", "r", "value"),
    [
        ("nan_in_round_2", 2, "nan"),
        ("too_large", 1, "1.5"),
        ("negative", 1, "-0.25"),
        ("infinite", 1, "inf"),
        ("a_word", 1, "half"),
        ("nothing", 1, "None"),
    ],
)
@pytest.mark.parametrize("name", ["omega", "psi"])
def test_a_schedule_that_leaves_its_range_is_refused_with_round_and_value(
    schedules: str, name: str, function: str, r: int, value: str
) -> None:
    """A user's schedule that returns no number in [0, 1] is refused with the round and what it returned."""
    shown = waffle("run", "waffle", *SMALL, f"--{name}", f"{schedules}:{function}", "--out", "run", "--quiet")
    assert f"{name}({r}) of 3 rounds is {value}" in refusal(shown)


@pytest.mark.parametrize(
    ("schedule", "value"), [("constant(-0.5)", "-0.5"), ("linear(2, 0)", "1.33"), ("exponential(-1e6)", "")]
)
def test_a_built_in_schedule_that_leaves_its_range_is_refused(schedule: str, value: str) -> None:
    """A schedule of ours with parameters that take it out of [0, 1] is refused as a user's own would be."""
    line = refusal(waffle("run", "waffle", *SMALL, "--omega", schedule, "--out", "run", "--quiet"))
    assert "omega" in line
    assert value in line


def test_a_schedule_of_the_user_is_used(here: Path, schedules: str) -> None:
    """A function of the user's own decides every round, and is recorded by its name."""
    flags = ["--omega", f"{schedules}:half", "--out", "run", "--quiet"]
    assert waffle("run", "waffle", *SMALL, *flags).code == 0
    assert [line["omega"] for line in finite_rounds(here / "run", 3)] == [0.5] * 3
    assert json.loads((here / "run" / "config.json").read_text())["options"]["omega"] == f"{schedules}:half"


@pytest.mark.parametrize(
    "schedule", ["no_such_module:f", "math:no_such_function", "math:pi", ":f", "math:", ":", ".relative:f", "..:f"]
)
def test_a_schedule_that_cannot_be_imported_is_named(schedule: str) -> None:
    """A module:function that does not exist, or is no function, is refused by its name."""
    assert schedule in refusal(waffle("run", "waffle", "--omega", schedule))


# --- C9: devices


def test_a_device_that_is_not_there_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for a GPU on a machine without one is refused with the way out; auto takes the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refusal(waffle("run", "local", *SMALL, "--device", "cuda"))
    assert "--device auto" in line
    assert list(here.iterdir()) == []
    assert waffle("run", "local", *SMALL, "--device", "auto", "--out", "run", "--quiet").code == 0
    assert json.loads((here / "run" / "provenance.json").read_text())["binding"]["device"] == "cpu"


@pytest.mark.parametrize("device", ["tpu", "gpu", "meta", "", "cuda:x", "cpu cuda"])
def test_a_word_that_is_no_device_is_refused(device: str) -> None:
    """A device of another kind is refused with the kinds there are."""
    assert "auto, cpu or cuda" in refusal(waffle("run", "local", *SMALL, f"--device={device}"))


def test_a_gpu_that_is_too_small_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of GPU memory is an error that says how to need less of it."""

    def full(*_: Any, **__: Any) -> Iterator[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(experiment.execution, "simulate", full)
    assert "--stack" in refusal(waffle("run", "local", *SMALL, "--out", "run", "--quiet"))


# --- C10: files of the future


def test_a_newer_experiment_file_is_refused_with_both_versions(here: Path) -> None:
    """An experiment file of schema 2 is refused by a program that reads schema 1."""
    line = refusal(waffle("bench", toml(here, 'schema = 2\nmethods = ["waffle"]\nnew_key = 1\n')))
    assert "schema 1" in line
    assert "has 2" in line


@pytest.mark.parametrize("command", ["resume", "report"])
@pytest.mark.parametrize("schema", [2, None, "1"])
def test_a_newer_run_folder_is_refused_with_both_versions(here: Path, command: str, schema: Any) -> None:
    """A run folder of another schema is neither resumed nor reported on."""
    assert waffle("run", "local", *SMALL, "--out", "run", "--quiet").code == 0
    path = here / "run" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": schema}))
    line = refusal(waffle(command, "run"))
    assert "schema 1" in line
    assert repr(schema) in line


# --- C11: names of runs

BAD_NAMES = ["..", "sub/..", "a;b", "$(x)", "`x`", "-x", "a b", "a|b", "a\nb", "é", ".hidden", "a'b", "x" * 129, "~"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_run_name_is_a_name_and_nothing_else(here: Path, name: str) -> None:
    """Names with path steps, shell characters or a leading dash are refused, and nothing is made."""
    assert "run name" in refusal(waffle("run", "local", *SMALL, f"--out={name}"))
    assert list(here.iterdir()) == []
    assert [path.name for path in here.parent.iterdir()] == ["here"]


def test_a_dash_after_out_is_a_missing_value(here: Path) -> None:
    """`--out -x` is read as a flag after a flag that needs a value."""
    assert "--out needs a value" in refusal(waffle("run", "local", *SMALL, "--out", "-x"))


def test_an_experiment_file_gives_its_runs_a_plain_name(here: Path) -> None:
    """An experiment file whose name holds shell characters needs an --out."""
    path = toml(here, 'methods = ["local"]\n', "a;b.toml")
    assert "run name" in refusal(waffle("bench", path, "--plan"))
    assert waffle("bench", path, "--plan", "--out", "fine").out == "fine/digits-C-local-1\n"


@pytest.mark.parametrize(
    "line", ['data = "../../x"', 'splits = ["../../x"]', 'splits = ["A/../../x"]', 'splits = ["/x"]']
)
def test_no_setting_leads_out_of_the_folder(here: Path, line: str) -> None:
    """Names in an experiment file that would be steps in a path are refused, and nothing is made."""
    path = toml(here, f'methods = ["local"]\n{line}\n')
    refusal(waffle("bench", path, "--out", "out", "--quiet"))
    assert {p.name for p in here.rglob("*")} <= {"grid.toml", "out"}
    assert [p.name for p in here.parent.iterdir()] == ["here"]


# --- C12: twice the same


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('methods = ["local", "waffle", "local"]', "methods"),
        ('methods = ["local"]\nseeds = [1, 2, 1]', "seeds"),
        ('methods = ["local"]\nsplits = ["A", "A"]', "splits"),
    ],
)
def test_a_list_that_names_one_twice_is_refused(here: Path, line: str, what: str) -> None:
    """Methods, seeds and splits are named once each."""
    refused = refusal(waffle("bench", toml(here, line)))
    assert f"{what}: " in refused
    assert "names one twice" in refused


def test_a_key_given_twice_is_refused(here: Path) -> None:
    """TOML does not allow a key twice, and the message has the line."""
    line = refusal(waffle("bench", toml(here, 'methods = ["local"]\nlr = 0.1\nlr = 0.2\n')))
    assert "not valid TOML" in line
    assert "line 3" in line


def test_two_agents_of_one_name_are_refused() -> None:
    """A federation from arrays has a name for each agent."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6, 3))
    y = np.arange(6) % 2
    agents: Sequence[Any] = [("ward", (x[0], y, x[1], y)), ("clinic", (x[2], y, x[3], y)), ("ward", (x[3], y, x[0], y))]
    with pytest.raises(WaffleError, match="two agents are called 'ward'"):
        Federation.from_arrays(agents)


# --- what is printed where


def test_progress_goes_to_stderr_and_results_to_stdout(here: Path) -> None:
    """The progress and the notes are on stderr, the table and the folder on stdout."""
    shown = waffle("run", "waffle", *SMALL, "--out", "run")
    assert shown.code == 0
    assert "1 run: WAFFLE" in shown.err
    assert "3/3" in shown.err
    assert "note: " in shown.err
    assert "run folder: run" in shown.out
    assert "last round" in shown.out
    assert "note: " not in shown.out
    assert "3/3" not in shown.out


def test_quiet_prints_nothing_on_stderr(here: Path) -> None:
    """With --quiet stderr is empty, and stdout is what it is without."""
    loud = waffle("run", "waffle", *SMALL, "--out", "run")
    quiet = waffle("run", "waffle", *SMALL, "--out", "run", "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.out == loud.out
    assert waffle("data", "digits", "--quiet").err == ""


def test_json_is_one_document_and_nothing_else(here: Path) -> None:
    """With --json stdout is one JSON document: the folder, the config and the result."""
    shown = waffle("run", "waffle", *SMALL, "--out", "run", "--json")
    content = strict(shown.out)
    assert content["run"] == "run"
    assert content["config"] == json.loads((here / "run" / "config.json").read_text())
    result = json.loads((here / "run" / "result.json").read_text())
    assert {key: content[key] for key in result} == result
    assert strict(waffle("resume", "run", "--json").out) == content


def test_json_of_a_diverged_run_is_a_document_too(here: Path) -> None:
    """A run that diverges prints its result as JSON on stdout, one line on stderr, and exits with 2."""
    shown = waffle("run", "local", *SMALL, "--lr", "1e38", "--out", "run", "--json", "--quiet")
    assert shown.code == 2
    assert strict(shown.out)["status"] == "diverged"
    assert shown.err.startswith("waffle: round ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("parent", ["[old]", "[bold red]", "[1]"])
def test_a_folder_is_printed_as_it_is_called(parent: str) -> None:
    """Square brackets in a path are part of it, not markup."""
    shown = waffle("run", "local", *SMALL, "--out", f"{parent}/run", "--quiet")
    assert f"run folder: {parent}/run\n" in shown.out


def test_a_long_path_is_printed_in_one_piece() -> None:
    """A path longer than a terminal line can be copied whole."""
    path = f"{'long-' * 12}/{'path-' * 12}/run"
    assert f"run folder: {path}\n" in waffle("run", "local", *SMALL, "--out", path, "--quiet").out


ESCAPE = "\x1b"
COLOURS = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-9]|4[0-9]|9[0-7]|10[0-7])(?:;[0-9]+)*m")


def on_a_terminal(*arguments: str) -> str:
    """What the command prints on a terminal that knows colours, when NO_COLOR asks for none."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
    line = [sys.executable, "-m", "waffle_fl", *arguments]
    with subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as child:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the terminal is gone when the command has ended
            while block := os.read(ours, 65536):
                text += block
        assert child.wait() == 0
    os.close(ours)
    return text.decode()


@pytest.mark.parametrize(
    "arguments", [("run", "local", *SMALL, "--out", "run"), ("run", "local", "--help")], ids=["run", "help"]
)
def test_no_color_is_heeded_on_a_terminal(arguments: tuple[str, ...]) -> None:
    """With NO_COLOR no colour is set, even on a terminal."""
    text = on_a_terminal(*arguments)
    assert len(text) > 200
    assert COLOURS.findall(text) == []


def test_there_are_no_escape_codes_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR and no terminal, neither stdout nor stderr holds an escape code."""
    monkeypatch.setenv("NO_COLOR", "1")
    shown = waffle("run", "waffle", *SMALL, "--out", "run")
    assert shown.code == 0
    assert ESCAPE not in shown.out + shown.err
    assert "run folder: run\n" in shown.out
    assert "note: " in shown.err


# --- help


def flags_of(kind: type) -> list[str]:
    return ["--" + field.name.replace("_", "-") for field in fields(kind)]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_the_help_of_a_method_lists_its_flags(method: str) -> None:
    """`waffle run METHOD --help` exits with 0 and lists every setting but the share matrix, and every option."""
    shown = waffle("run", method, "--help")
    options = ["--" + name.replace("_", "-") for name in option_types(method)]
    assert (shown.code, shown.err) == (0, "")
    settings = [flag for flag in flags_of(Settings) if flag != "--shares"]
    expected = [*settings, *options, *flags_of(Place), *flags_of(Output), "--out", "--alone"]
    assert [flag for flag in expected if not re.search(rf"{flag}\b", shown.out)] == []


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("decide", ["--methods", "--seeds", "--without", "--metric", "--out", "--alice", *flags_of(Place)]),
        ("bench", ["--out", "--plan", *flags_of(Place), *flags_of(Output)]),
        ("report", ["--out", "--title", *flags_of(Output)]),
        ("data", ["--split", "--agents", "--direction", "--out", "--data-dir", "--allow-unverified"]),
        ("demo", ["--out", *flags_of(Place), *flags_of(Output)]),
        ("resume", [*flags_of(Place), *flags_of(Output)]),
    ],
)
def test_the_help_of_a_command_lists_its_flags(command: str, flags: list[str]) -> None:
    """`waffle COMMAND --help` exits with 0 and lists every flag."""
    shown = waffle(command, "--help")
    assert (shown.code, shown.err) == (0, "")
    assert [flag for flag in flags if not re.search(rf"{flag}\b", shown.out)] == []


def test_the_help_names_every_command_and_every_method() -> None:
    """`waffle --help` lists the commands and `waffle run --help` the methods; without arguments both exit with 2."""
    usage, methods = waffle("--help"), waffle("run", "--help")
    assert (usage.code, methods.code) == (0, 0)
    assert [name for name in COMMANDS if f"  {name} " not in usage.out] == []
    assert [name for name in ALGORITHMS if f"  {name} " not in methods.out] == []
    assert waffle().code == waffle("run").code == 2
    assert waffle("--version").out == f"waffle-fl {__version__}\n"


@pytest.mark.parametrize("command", ["decide", "bench", "report", "data", "resume"])
def test_a_missing_argument_is_one_line(command: str) -> None:
    """A command without what it works on says what is missing."""
    assert "missing" in refusal(waffle(command))


def test_no_traceback_in_a_real_process(here: Path) -> None:
    """As a process of its own the command refuses in one line with exit code 2."""
    path = toml(here, 'methods = ["waffle"]\nlr = nan\nrounds = 0\n[waffle]\nomega = "nowhere:f"\n')
    line = refusal(process("bench", path))
    assert "lr (line 2)" in line
    assert "rounds (line 3)" in line
    assert "nowhere" in line


# --- resume


@pytest.mark.parametrize("make", ["nothing", "empty folder", "file"])
def test_what_is_no_run_folder_is_not_resumed(here: Path, make: str) -> None:
    """A folder without a config, a file and a missing path are refused by name."""
    if make == "empty folder":
        (here / "run").mkdir()
    if make == "file":
        (here / "run").write_text("")
    assert "run" in refusal(waffle("resume", "run"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "settings": {"lr": "x"}}'])
def test_a_damaged_config_is_refused(here: Path, content: str) -> None:
    """A run folder whose config is damaged is refused in one line."""
    (here / "run").mkdir()
    (here / "run" / "config.json").write_text(content)
    refused = refusal(waffle("resume", "run"))
    assert len(refused) < 400


# --- bench

GRID = """
methods = ["waffle", "local"]
splits = ["C", "A"]
seeds = [2, 1]
data = "synthetic"
model = "linear"
samples_per_agent = 20
rounds = 60

[waffle]
clip = {C = 1.5, A = 2.5}
omega = {A = "constant(0.25)", C = "sigmoid(3.2)"}
eta_g = 0.5
"""
RUNS = [f"synthetic-{split}-{method}-{seed}" for method in ("waffle", "local") for split in "CA" for seed in (2, 1)]
TABLES = ["table.csv", "table.md", "table.tex"]
CHARTS = ["accuracy", "weights", "labels", "omega"]


@dataclass(frozen=True)
class Bench:
    """A grid that was run once."""

    file: Path
    out: Path
    shown: Shown


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The grid above, run in this process."""
    folder = tmp_path_factory.mktemp("bench")
    file = toml(folder, GRID)
    return Bench(file, folder / "out", waffle("bench", file, "--out", folder / "out", "--json"))


def test_a_plan_is_printed_in_order_and_nothing_is_run(here: Path) -> None:
    """`bench --plan` prints methods x splits x seeds in the order of the file, and makes nothing."""
    shown = waffle("bench", toml(here, GRID), "--plan")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.splitlines() == [f"runs/grid/{name}" for name in RUNS]
    assert [path.name for path in here.iterdir()] == ["grid.toml"]


def test_a_grid_runs_every_cell(bench: Bench) -> None:
    """A bench makes one finished run folder for each cell of the grid, and its JSON names them in order."""
    content = strict(bench.shown.out)
    assert bench.shown.code == 0
    assert [Path(run["run"]).name for run in content["runs"]] == RUNS
    assert {run["status"] for run in content["runs"]} == {"finished"}
    assert {path.name for path in bench.out.iterdir()} == {*RUNS, "report"}
    assert all(len(read_rounds(bench.out / name / "rounds.jsonl")) == 60 for name in RUNS)


def test_two_and_two_point_nothing_are_one_config(here: Path) -> None:
    """Where a number may have a fraction an integer is that number: both give one config, in the same words."""
    text = 'methods = ["waffle"]\nsplits = ["A"]\nsizes = {0}\n[waffle]\nclip = {1}\neta_g = {{ A = {1} }}\n'
    files = [toml(here, text.format(*n), f"{i}.toml") for i, n in enumerate([("[2, 1]", "2"), ("[2.0, 1.0]", "2.0")])]
    whole, real = (plan(load_experiment(file), here)[0][0] for file in files)
    assert json.dumps(whole.to_json()) == json.dumps(real.to_json())
    assert json.dumps(check_run("waffle", {}, {"clip": 2}).to_json()) == json.dumps(
        check_run("waffle", {}, {"clip": 2.0}).to_json()
    )


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_config_is_read_back_in_the_same_words(method: str) -> None:
    """The config of a run, read from its JSON, is written as it was."""
    text = json.dumps(check_run(method, {}, {}).to_json())
    assert json.dumps(RunConfig.from_json(json.loads(text)).to_json()) == text


def test_options_by_split_reach_their_runs(bench: Bench) -> None:
    """An option that is a table gives each split its own value."""
    for name in RUNS:
        config = json.loads((bench.out / name / "config.json").read_text())
        split = config["settings"]["split"]
        assert name == f"synthetic-{split}-{config['method']}-{config['settings']['seed']}"
        assert config["settings"]["rounds"] == 60
        if config["method"] == "waffle":
            assert config["options"]["clip"] == {"C": 1.5, "A": 2.5}[split]
            assert config["options"]["omega"] == {"C": "sigmoid(3.2)", "A": "constant(0.25)"}[split]
            assert config["options"]["eta_g"] == 0.5
    rounds = read_rounds(bench.out / "synthetic-A-waffle-1" / "rounds.jsonl")
    assert {line["omega"] for line in rounds} == {0.25}


def test_the_report_is_whole(bench: Bench) -> None:
    """A bench leaves a page, three tables, and each chart as PNG and PDF."""
    report = bench.out / "report"
    expected = ["index.html", *TABLES, *(f"{chart}.{kind}" for chart in CHARTS for kind in ("png", "pdf"))]
    assert sorted(path.name for path in report.iterdir()) == sorted(expected)
    assert all((report / f"{chart}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for chart in CHARTS)
    assert all((report / f"{chart}.pdf").read_bytes().startswith(b"%PDF-") for chart in CHARTS)
    page = (report / "index.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "WAFFLE" in page
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)\s*=\s*[\"']?https?:", page)
    lines = (report / "table.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 4  # header; best and last of two splits x two methods
    assert all(line.split(",")[5] == "2" for line in lines[1:])


def test_finished_runs_are_skipped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second bench trains nothing, touches no file of a run, and shows the same results."""
    files = [path for name in RUNS for path in (bench.out / name).iterdir() if path.name != ".lock"]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    monkeypatch.setattr(experiment.execution, "simulate", lambda *_, **__: pytest.fail("training began"))
    shown = waffle("bench", bench.file, "--out", bench.out, "--json")
    assert shown.code == 0, shown.err
    assert "8 runs, 8 already done" in shown.err
    assert strict(shown.out) == strict(bench.shown.out)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before


def test_a_killed_bench_goes_on(bench: Bench, here: Path) -> None:
    """A bench killed by SIGKILL while its runs train is finished by the same command to the unbroken bits."""
    out = here / "out"
    line = [sys.executable, "-m", "waffle_fl", "bench", str(bench.file), "--out", str(out), "--quiet"]
    child = subprocess.Popen([*line, "--checkpoint-seconds", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with child:
        while not any(len(read_rounds(path)) >= 3 for path in out.glob("*/rounds.jsonl")):
            assert child.poll() is None
            time.sleep(0.005)
        child.kill()
    assert len(list(out.glob("*/result.json"))) < len(RUNS)
    assert not (out / "report").exists()
    assert waffle("bench", bench.file, "--out", out, "--json", "--quiet").code == 0
    for name in RUNS:
        assert (out / name / "result.json").read_bytes() == (bench.out / name / "result.json").read_bytes()
        ours, theirs = (read_rounds(folder / name / "rounds.jsonl") for folder in (out, bench.out))
        assert [{**a, "seconds": 0} for a in ours] == [{**b, "seconds": 0} for b in theirs]
        assert (out / name / "model.safetensors").read_bytes() == (bench.out / name / "model.safetensors").read_bytes()


def test_agents_whose_runs_diverge_are_named(here: Path) -> None:
    """With `--alice all` all results are shown, then one line names those that diverged; the exit code is 2."""
    asked = ("run", "waffle", *SMALL, "--agents", "3", "--alice", "all", "--lr", "1e38", "--out", "all", "--quiet")
    shown = waffle(*asked)
    assert shown.code == 2
    assert "run folders: all" in shown.out
    assert shown.err.startswith("waffle: 3 of 3 runs diverged, those for 0, 1, 2; 0: round ")
    assert shown.err.count("\n") == 1
    shown = waffle(*asked, "--json")
    assert shown.code == 2
    assert [run["status"] for run in strict(shown.out)] == ["diverged"] * 3


def test_a_grid_that_diverges_still_reports(here: Path) -> None:
    """Runs that diverge do not stop a bench: its report says so, and it exits with 0."""
    text = 'methods = ["local", "waffle"]\ndata = "synthetic"\nmodel = "linear"\nrounds = 3\nlr = 1e38\n'
    shown = waffle("bench", toml(here, text), "--out", "out", "--json")
    assert shown.code == 0
    assert {run["status"] for run in strict(shown.out)["runs"]} == {"diverged"}
    assert "diverged" in shown.words
    assert "diverged" in (here / "out" / "report" / "index.html").read_text()


def test_the_example_files_are_sound() -> None:
    """The experiment of `waffle demo` passes its own checks and plans 7 methods x 5 splits x 3 seeds."""
    path = Path(cli.__file__).with_name("demo.toml")
    assert tomllib.loads(path.read_text())["schema"] == 1
    assert len(experiment.plan(load_experiment(path), Path("demo"))) == 7 * 5 * 3


# --- report


def test_a_report_on_nothing_is_refused(here: Path) -> None:
    """A missing folder, an empty one and a file are no runs."""
    (here / "empty").mkdir()
    (here / "file").write_text("")
    assert "missing" in refusal(waffle("report", "missing"))
    assert "no finished run in empty" in refusal(waffle("report", "empty"))
    assert "file" in refusal(waffle("report", "file"))
    assert list((here / "empty").iterdir()) == []


def test_a_report_on_unfinished_runs_is_refused(here: Path, bench: Bench) -> None:
    """A run that has not ended is not reported on."""
    (here / "run").mkdir()
    for name in ("config.json", "provenance.json", "rounds.jsonl"):
        (here / "run" / name).write_bytes((bench.out / RUNS[0] / name).read_bytes())
    assert "let them finish" in refusal(waffle("report", "run"))


def test_a_report_on_one_run_goes_where_it_is_asked_to(here: Path, bench: Bench) -> None:
    """`waffle report RUN --out` writes the page there, and its JSON says where."""
    shown = waffle("report", bench.out / "synthetic-C-local-1", "--out", "page", "--title", "A <b>title</b>", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert strict(shown.out)["report"] == "page/index.html"
    assert "<title>A &lt;b&gt;title&lt;/b&gt;</title>" in (here / "page" / "index.html").read_text()


@pytest.mark.parametrize("flag", ["--out", "--record"])
def test_a_report_that_cannot_be_written_is_refused(here: Path, bench: Bench, flag: str) -> None:
    """A folder or a record that cannot be made is one line, not a traceback."""
    (here / "file").write_text("in the way")
    assert "file/place" in refusal(waffle("report", bench.out / RUNS[0], flag, "file/place"))


# --- data


def test_a_split_is_counted_and_drawn(here: Path) -> None:
    """`waffle data digits --split C` prints who holds what and writes a PNG."""
    shown = waffle("data", "digits", "--split", "C", "--agents", "10", "--out", "x.png")
    assert shown.code == 0
    assert (here / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "1,348 training and 449 test samples of shape 1x8x8" in shown.out
    content = strict(waffle("data", "digits", "--split", "C", "--agents", "10", "--out", "x.png", "--json").out)
    counts = content["label_counts"]
    assert (len(counts), {len(row) for row in counts}) == (10, {10})
    for agent, row in enumerate(counts):
        assert re.search(rf"^ *{agent} +[\d· ]+ +{sum(row)} *$", shown.out, re.MULTILINE)
        assert [bool(n) for n in row] == [3 <= (label + agent) % 10 <= 7 for label in range(10)]
    assert sum(map(sum, counts)) <= content["train"] == 1348


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--split", "Q"], "'Q'"),
        (["--split", "C", "--agents", "0"], "agents"),
        (["--split", "C", "--out", "x.jpg"], "x.jpg"),
        (["--split", "C", "--out", "missing/x.png"], "missing/x.png"),
    ],
)
def test_a_split_that_cannot_be_shown_is_refused(here: Path, flags: list[str], what: str) -> None:
    """An unknown split, no agents, and a picture that cannot be written are refused in one line."""
    assert what in refusal(waffle("data", "digits", *flags))
    assert list(here.iterdir()) == []


def test_a_model_for_every_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--alice all` trains one model an agent, each in a folder of its own, and shows the mean and the worst."""
    monkeypatch.chdir(tmp_path)
    line = ["run", "waffle", "--data", "digits", "--agents", "3", "--rounds", "2", "--alice", "all", "--quiet"]
    assert COMMANDS["run"](line[1:]) == 0
    shown = capsys.readouterr().out
    assert "balanced accuracy" in shown
    assert "lowest" in shown
    assert len(list(tmp_path.glob("runs/*/*/model.safetensors"))) == 3
    assert COMMANDS["run"]([*line[1:], "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [set(r["metrics"]) for r in results] == [{"accuracy", "balanced_accuracy", "auc", "log_loss"}] * 3
