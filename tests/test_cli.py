"""Inputs that the command line refuses, and the messages it prints."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli_support import SMALL, refusal, strict, toml, waffle
from waffle_fl import experiment
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.config import RunConfig, check_run, load_experiments
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation

pytestmark = pytest.mark.usefixtures("here")


# --- C1: misspelt names


@pytest.mark.parametrize(
    ("arguments", "wrong", "right"),
    [
        (["run", "wafle"], "wafle", "waffle"),
        (["run", "Scafold"], "Scafold", "scaffold"),
        (["rum", "waffle-paper"], "rum", "run"),
        (["data", "digitz"], "digitz", "digits"),
        (["data", "fashionmnist"], "fashionmnist", "fashion-mnist"),
        (["run", "local", "--data", "sintetic"], "sintetic", "synthetic"),
        (["run", "local", "--model", "lenet"], "lenet", "lenet5"),
        (["run", "waffle-paper", "--omega", "sigmod(3)"], "sigmod", "sigmoid"),
        (["run", "waffle-paper", "--ronds", "3"], "--ronds", "--rounds"),
        (["run", "waffle-paper", "--batch_sise=3"], "--batch_sise", "--batch-size"),
        (["run", "waffle-paper", "--omga", "x"], "--omga", "--omega"),
        (["bench", "grid.toml", "--dry-rum"], "--dry-rum", "--dry-run"),
        (["report", "runs", "--titel", "x"], "--titel", "--title"),
        (["data", "digits", "--splt", "C"], "--splt", "--split"),
        (["resume", "run", "--forse"], "--forse", "--force"),
        (["demo", "--quite"], "--quite", "--quiet"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest_one(
    here: Path, arguments: list[str], wrong: str, right: str
) -> None:
    """A misspelt command, method, flag, data set, model or schedule is refused with the nearest known name."""
    line = refusal(waffle(*arguments))
    assert wrong in line
    assert f"did you mean {right}?" in line
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "wrong", "right", "number"),
    [
        ('methods = ["waffle-paper"]\n\nlerning_rate = 0.1\n', "lerning_rate", "lr", 3),
        ('methods = ["waffle-paper"]\n\nlerning-rate = 0.1\n', "lerning-rate", "lr", 3),
        ('methods = ["waffle-paper"]\nbatch_sise = 16\n', "batch_sise", "batch_size", 2),
        ('methods = ["waffle-paper"]\nbatch-size = 16\n', "batch-size", "batch_size", 2),
        ('# momentun\nmethods = ["waffle-paper"]\n  momentun = 0.9\n', "momentun", "momentum", 3),
        ('method = ["waffle-paper"]\nmethods = ["waffle-paper"]\n', "method", "methods", 1),
        ('methods = ["waffle-paper"]\n[wafle]\nclip = 1\n', "wafle", "waffle", 2),
        ('methods = ["waffle-paper"]\n[waffle-paper]\n\nomeg = "sigmoid(3)"\n', "omeg", "omega", 4),
    ],
    ids=lambda value: "" if "\n" in str(value) else str(value),
)
def test_a_misspelt_key_is_named_with_its_file_and_line(
    here: Path, text: str, wrong: str, right: str, number: int
) -> None:
    """A misspelt key in an experiment file is refused with the file, the line and the nearest known key."""
    line = refusal(waffle("bench", toml(here, text)))
    assert "grid.toml: " in line
    assert f"unknown key {wrong!r} (line {number}), did you mean {right}?" in line


def test_a_misspelt_method_in_a_file_is_named(here: Path) -> None:
    """An unknown method is refused before any run starts."""
    line = refusal(waffle("bench", toml(here, 'methods = ["local", "wafle"]\n')))
    assert "unknown method 'wafle', did you mean waffle?" in line


def test_the_line_number_is_that_of_the_wrong_table(here: Path) -> None:
    """When two methods have an option of the same name, the message has the line of the wrong one."""
    text = 'methods = ["waffle-paper", "scaffold"]\n[waffle-paper]\nclip = 2.0\n[scaffold]\nclip = -1.0\n'
    assert "clip (line 5): expected at least 0, got -1.0" in refusal(waffle("bench", toml(here, text)))


# --- C2: values out of range


def test_all_problems_of_a_file_are_reported_at_once(here: Path) -> None:
    """One message lists every wrong type, range and value of an experiment file, each with its line."""
    text = """methods = ["waffle-paper"]
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

[waffle-paper]
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


def test_all_problems_of_flags_are_reported_at_once(here: Path) -> None:
    """All flags with invalid values are refused in one message, before anything is written."""
    flags = ["--lr", "-0.1", "--rounds", "0", "--batch-size", "0", "--epochs", "0", "--momentum", "nan", "--clip", "-1"]
    line = refusal(waffle("run", "waffle-paper", *flags))
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
def test_a_flag_with_an_invalid_value_is_named(flags: list[str], what: str) -> None:
    """A value of the wrong type or range is refused in one line that names the flag or the value."""
    assert what in refusal(waffle("run", "waffle-paper", *SMALL, "--out", "run", *flags))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "methods"),
        ("methods = []", "methods"),
        ('methods = "waffle-paper"', "methods"),
        ("methods = [1]", "methods"),
        ('methods = ["waffle-paper"]\nseeds = [1.5]', "seeds"),
        ('methods = ["waffle-paper"]\nseeds = [-1]', "seeds"),
        ('methods = ["waffle-paper"]\nsplits = []', "splits"),
        ('methods = ["waffle-paper"]\nsplits = ["Z"]', "'Z'"),
        ('methods = ["waffle-paper"]\nshares = [["a"]]', "shares"),
        ('methods = ["waffle-paper"]\nshares = [[0.5, 0.5]]', "share matrix"),
        ('methods = ["waffle-paper"]\nsizes = [1, 0]', "numbers above 0"),
        ('methods = ["waffle-paper"]\nsizes = 2', "a list of numbers"),
        ('methods = ["waffle-paper"]\nvariants = 1', "[variants.NAME]"),
        ('methods = ["waffle-paper"]\n[variants]\na = 1', "[variants.NAME]"),
        ('methods = ["waffle-paper"]\n[variants."../up"]', "a run name"),
        ('methods = ["waffle-paper"]\n[variants.a]\nrounds = 0', "rounds (line 3): expected at least 1"),
        ('methods = ["waffle-paper"]\n[variants.a]\nditto = {lam = 1.0}', "not among the experiment's methods"),
        ('methods = ["waffle-paper"]\n[waffle-paper]\nomega = {B = "sigmoid(1)"}', "no split 'B'"),
        ('methods = ["waffle-paper"]\n[waffle-paper]\nclip = {C = -1.0}', "clip"),
        ('methods = ["waffle-paper"]\nsplits = ["A", "C"]\n[waffle-paper]\nclip = {C = 1.0}', "no value for split A"),
        ('methods = ["waffle-paper"]\n[ditto]\nlam = 1.0', "not among the experiment's methods"),
        ("methods = [", "not valid TOML"),
        ("\x00", "not valid TOML"),
    ],
)
def test_an_invalid_experiment_file_is_refused(here: Path, text: str, what: str) -> None:
    """A file without methods, with invalid lists, or that is not TOML is refused in one line."""
    line = refusal(waffle("bench", toml(here, text)))
    assert what in line


@pytest.mark.parametrize("name", ["missing.toml", ".", "binary.toml"])
def test_a_file_that_cannot_be_read_is_named(here: Path, name: str) -> None:
    """A missing file, a folder and a binary file are refused by name."""
    (here / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert name in refusal(waffle("bench", name))


def test_variants_are_separate_experiments(here: Path) -> None:
    """A variant overrides the settings above it, merges its tables option by option, and has its own folder."""
    text = """methods = ["waffle-paper"]
lr = 0.2
[waffle-paper]
clip = 1.0
[variants.fast]
lr = 0.5
waffle-paper = {control = "paper"}
[variants.other]
methods = ["local"]
"""
    path = toml(here, text.replace("[waffle-paper]\nclip = 1.0\n", ""))
    shown = waffle("bench", path, "--dry-run", "--out", "out")
    assert shown.out.splitlines() == ["out/fast/digits-C-waffle-paper-1", "out/other/digits-C-local-1"]
    fast = load_experiments(Path(toml(here, text.replace('[variants.other]\nmethods = ["local"]\n', ""))))[0]
    assert fast.settings.lr == 0.5
    assert fast.options["waffle-paper"] == {"clip": 1.0, "control": "paper"}


def test_one_split_and_one_seed_are_not_ignored(here: Path) -> None:
    """A file with `split` and `seed` gets that split and seed, or a message that names `splits` and `seeds`."""
    shown = waffle("bench", toml(here, 'methods = ["local"]\nsplit = "B"\nseed = 7\n'), "--dry-run", "--out", "out")
    assert shown.out == "out/digits-B-local-7\n" or (shown.code == 2 and "splits" in shown.err and "seeds" in shown.err)


# --- C3: Alice


@pytest.mark.parametrize("alice", ["10", "99999", "-1", "bob", "agent 10", "1.5", "", "²", "٣x"])
def test_an_unknown_alice_is_refused(here: Path, alice: str) -> None:
    """A number out of range or an unknown name is refused with the valid range or names."""
    line = refusal(waffle("run", "waffle-paper", *SMALL, f"--alice={alice}"))
    assert "between 0 and 9" in line or "agent 0, agent 1" in line
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("alice", ["3", "agent 3"])
def test_alice_is_a_number_or_a_name(here: Path, alice: str) -> None:
    """Alice can be given by number or by name, and the run records her number."""
    assert waffle("run", "local", *SMALL, "--alice", alice, "--out", "run", "--quiet").code == 0
    assert json.loads((here / "run" / "provenance.json").read_text())["alice"] == 3


# --- C4 to C8: small federations, short runs, extreme schedules


def finite_rounds(folder: Path, count: int) -> list[dict[str, Any]]:
    """The rounds of a run, after checking that all are present and all numbers finite."""
    text = (folder / "rounds.jsonl").read_text()
    rounds = [strict(line + "\n") for line in text.splitlines()]
    assert len(rounds) == count
    for line in rounds:
        assert line["loss"] is not None
        assert sum(line["weights"]) == pytest.approx(1)
        assert min(line["weights"]) >= 0
    return rounds


def test_a_single_agent_is_local_training(here: Path) -> None:
    """WAFFLE with one agent gives her all the weight and notes that it equals Local."""
    shown = waffle("run", "waffle-paper", *SMALL, "--agents", "1", "--out", "run")
    assert shown.code == 0
    assert "a single agent: this is Local" in shown.words
    assert all(line["weights"] == [1.0] for line in finite_rounds(here / "run", 3))


def test_two_agents_have_equal_weights(here: Path) -> None:
    """WAFFLE with two agents uses equal weights and notes that the paper's formula is 0/0."""
    shown = waffle("run", "waffle-paper", *SMALL, "--agents", "2", "--out", "run")
    assert shown.code == 0
    assert "two agents: the paper's weights are 0/0" in shown.words
    rounds = finite_rounds(here / "run", 3)
    assert [line["weights"] for line in rounds[:2]] == [pytest.approx([0.5, 0.5])] * 2


@pytest.mark.parametrize("method", ALGORITHMS)
@pytest.mark.parametrize("agents", ["1", "2"])
def test_every_method_runs_with_one_and_with_two_agents(here: Path, method: str, agents: str) -> None:
    """Every method trains with one and with two agents, with finite numbers."""
    assert waffle("run", method, *SMALL, "--agents", agents, "--out", "run", "--quiet").code == 0
    finite_rounds(here / "run", 3)


def test_few_rounds_are_noted(here: Path) -> None:
    """Fewer than 20 rounds of WAFFLE print a note; 20 rounds and other methods do not."""
    note = "fewer than 20 rounds"
    assert note in waffle("run", "waffle-paper", *SMALL, "--out", "a").words
    assert note not in waffle("run", "waffle-paper", *SMALL, "--rounds", "20", "--out", "b").words
    assert note not in waffle("run", "scaffold", *SMALL, "--out", "c").words
    assert any(note in line for line in json.loads((here / "a" / "provenance.json").read_text())["notes"])


@pytest.mark.parametrize("schedule", ["sigmoid(1e9)", "sigmoid(1e300)", "sigmoid(0)", "step(0)", "constant(0)"])
@pytest.mark.parametrize("denominator", ["max", "range"])
def test_an_extreme_schedule_runs_with_finite_numbers(here: Path, schedule: str, denominator: str) -> None:
    """A huge slope and a slope of 0 give finite weights in every round."""
    flags = ["--omega", schedule, "--psi", schedule, "--denominator", denominator, "--out", "run", "--quiet"]
    assert waffle("run", "waffle-paper", *SMALL, *flags).code == 0
    finite_rounds(here / "run", 3)


@pytest.mark.parametrize("flag", ["--omega", "--psi"])
@pytest.mark.parametrize("schedule", ["sigmoid(-1)", "sigmoid(-1e-300)"])
def test_a_negative_slope_is_refused(here: Path, flag: str, schedule: str) -> None:
    """A sigmoid that would end in global training is refused before anything is written."""
    assert "slope >= 0" in refusal(waffle("run", "waffle-paper", flag, schedule))
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
    """A module with user-defined schedules."""
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
    """A user-defined schedule that returns no number in [0, 1] is refused with the round and the value."""
    shown = waffle("run", "waffle-paper", *SMALL, f"--{name}", f"{schedules}:{function}", "--out", "run", "--quiet")
    assert f"{name}({r}) of 3 rounds is {value}" in refusal(shown)


@pytest.mark.parametrize(
    ("schedule", "value"), [("constant(-0.5)", "-0.5"), ("linear(2, 0)", "1.33"), ("exponential(-1e6)", "")]
)
def test_a_built_in_schedule_that_leaves_its_range_is_refused(schedule: str, value: str) -> None:
    """A built-in schedule whose parameters take it out of [0, 1] is refused in the same way."""
    line = refusal(waffle("run", "waffle-paper", *SMALL, "--omega", schedule, "--out", "run", "--quiet"))
    assert "omega" in line
    assert value in line


def test_a_user_defined_schedule_is_used(here: Path, schedules: str) -> None:
    """A user-defined schedule sets the value of every round and is recorded by its name."""
    flags = ["--omega", f"{schedules}:half", "--out", "run", "--quiet"]
    assert waffle("run", "waffle-paper", *SMALL, *flags).code == 0
    assert [line["omega"] for line in finite_rounds(here / "run", 3)] == [0.5] * 3
    assert json.loads((here / "run" / "config.json").read_text())["options"]["omega"] == f"{schedules}:half"


@pytest.mark.parametrize(
    "schedule", ["no_such_module:f", "math:no_such_function", "math:pi", ":f", "math:", ":", ".relative:f", "..:f"]
)
def test_a_schedule_that_cannot_be_imported_is_named(schedule: str) -> None:
    """A module:function that does not exist, or is not a function, is refused by name."""
    assert schedule in refusal(waffle("run", "waffle-paper", "--omega", schedule))


# --- C9: devices


def test_a_missing_device_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing GPU is refused with the alternative; auto selects the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refusal(waffle("run", "local", *SMALL, "--device", "cuda"))
    assert "--device auto" in line
    assert list(here.iterdir()) == []
    assert waffle("run", "local", *SMALL, "--device", "auto", "--out", "run", "--quiet").code == 0
    assert json.loads((here / "run" / "provenance.json").read_text())["binding"]["device"] == "cpu"


@pytest.mark.parametrize("device", ["tpu", "gpu", "meta", "", "cuda:x", "cpu cuda"])
def test_an_unknown_device_is_refused(device: str) -> None:
    """An unknown device is refused with the known kinds."""
    assert "auto, cpu or cuda" in refusal(waffle("run", "local", *SMALL, f"--device={device}"))


def test_running_out_of_gpu_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of GPU memory gives an error that says how to use less."""

    def out_of_memory(*_: Any, **__: Any) -> Iterator[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(experiment.execution, "simulate", out_of_memory)
    assert "--stack" in refusal(waffle("run", "local", *SMALL, "--out", "run", "--quiet"))


# --- C10: newer schema versions


def test_a_newer_experiment_file_is_refused_with_both_versions(here: Path) -> None:
    """An experiment file of schema 2 is refused when the program reads schema 1."""
    line = refusal(waffle("bench", toml(here, 'schema = 2\nmethods = ["waffle-paper"]\nnew_key = 1\n')))
    assert "schema 1" in line
    assert "got schema 2" in line


@pytest.mark.parametrize("command", ["resume", "report"])
@pytest.mark.parametrize("schema", [2, None, "1"])
def test_a_newer_run_folder_is_refused_with_both_versions(here: Path, command: str, schema: Any) -> None:
    """A run folder of another schema can be neither resumed nor reported on."""
    assert waffle("run", "local", *SMALL, "--out", "run", "--quiet").code == 0
    path = here / "run" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": schema}))
    line = refusal(waffle(command, "run"))
    assert "schema 1" in line
    assert repr(schema) in line


# --- C11: names of runs

BAD_NAMES = ["..", "sub/..", "a;b", "$(x)", "`x`", "-x", "a b", "a|b", "a\nb", "é", ".hidden", "a'b", "x" * 129, "~"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_unsafe_run_name_is_refused(here: Path, name: str) -> None:
    """Names with path separators, shell characters or a leading dash are refused, and no folder is created."""
    assert "run name" in refusal(waffle("run", "local", *SMALL, f"--out={name}"))
    assert list(here.iterdir()) == []
    assert [path.name for path in here.parent.iterdir()] == ["here"]


def test_a_dash_after_out_is_a_missing_value(here: Path) -> None:
    """`--out -x` is read as a flag, so the value of --out is missing."""
    assert "--out needs a value" in refusal(waffle("run", "local", *SMALL, "--out", "-x"))


def test_an_experiment_file_with_an_unsafe_name_needs_out(here: Path) -> None:
    """An experiment file whose name contains shell characters needs --out."""
    path = toml(here, 'methods = ["local"]\n', "a;b.toml")
    assert "run name" in refusal(waffle("bench", path, "--dry-run"))
    assert waffle("bench", path, "--dry-run", "--out", "fine").out == "fine/digits-C-local-1\n"


@pytest.mark.parametrize(
    "line", ['data = "../../x"', 'splits = ["../../x"]', 'splits = ["A/../../x"]', 'splits = ["/x"]']
)
def test_no_setting_leads_out_of_the_folder(here: Path, line: str) -> None:
    """Path separators in the names of an experiment file are refused, and no folder is created."""
    path = toml(here, f'methods = ["local"]\n{line}\n')
    refusal(waffle("bench", path, "--out", "out", "--quiet"))
    assert {p.name for p in here.rglob("*")} <= {"grid.toml", "out"}
    assert [p.name for p in here.parent.iterdir()] == ["here"]


# --- C12: duplicates


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('methods = ["local", "waffle-paper", "local"]', "methods"),
        ('methods = ["local"]\nseeds = [1, 2, 1]', "seeds"),
        ('methods = ["local"]\nsplits = ["A", "A"]', "splits"),
    ],
)
def test_duplicates_in_a_list_are_refused(here: Path, line: str, what: str) -> None:
    """Duplicate methods, seeds and splits are refused."""
    refused = refusal(waffle("bench", toml(here, line)))
    assert f"{what}: " in refused
    assert "expected no duplicates" in refused


def test_a_key_given_twice_is_refused(here: Path) -> None:
    """TOML does not allow duplicate keys, and the message has the line."""
    line = refusal(waffle("bench", toml(here, 'methods = ["local"]\nlr = 0.1\nlr = 0.2\n')))
    assert "not valid TOML" in line
    assert "line 3" in line


def test_two_agents_of_one_name_are_refused() -> None:
    """A federation from arrays refuses two agents with the same name."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6, 3))
    y = np.arange(6) % 2
    agents: Sequence[Any] = [("ward", (x[0], y, x[1], y)), ("clinic", (x[2], y, x[3], y)), ("ward", (x[3], y, x[0], y))]
    with pytest.raises(WaffleError, match="two agents are called 'ward'"):
        Federation.from_arrays(agents)


# --- one WAFFLE, and the paper's


def test_waffle_as_printed(here: Path) -> None:
    """`waffle run waffle --as-printed` trains the paper's algorithm without its repairs; a flag given wins."""
    for name, flags, clip in (("a", (), 0.0), ("b", ("--clip", "1"), 1.0)):
        shown = waffle("run", "waffle", "--as-printed", *SMALL, *flags, "--out", name, "--quiet")
        assert shown.code == 0, shown.err
        config = json.loads((here / name / "config.json").read_text())
        assert config["method"] == "waffle-paper"
        found = {key: config["options"][key] for key in ("control", "denominator", "clip")}
        assert found == {"control": "paper", "denominator": "range", "clip": clip}


def test_options_of_the_paper_belong_to_waffle_paper(here: Path) -> None:
    """A flag of the paper's algorithm, or the name that the method had before, ends in a line with the present name."""
    assert "--omega belongs to the paper's algorithm: waffle run waffle-paper" in refusal(
        waffle("run", "waffle", "--omega", "linear")
    )
    assert "unknown method 'waffle-kin': it is now 'waffle'" in refusal(waffle("run", "waffle-kin"))


def test_configs_from_before_the_methods_were_renamed() -> None:
    """A config with the paper's options is of waffle-paper, one of waffle-kin is of WAFFLE with one model."""
    paper = check_run("waffle-paper", {}, {}).to_json()
    assert RunConfig.from_json({**paper, "method": "waffle"}) == RunConfig.from_json(paper)
    kin = check_run("waffle", {"validation": 0.2}, {"prediction": "model"}).to_json()
    earlier = {key: value for key, value in kin["options"].items() if key not in ("prediction", "part_weights")}
    read = RunConfig.from_json({**kin, "method": "waffle-kin", "options": earlier})
    assert read.algorithm() == RunConfig.from_json(kin).algorithm()
