"""The command line: output on stdout and stderr, help texts, and the commands bench, report and data."""

import contextlib
import json
import os
import pty
import re
import time
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

import fork_server
from cli_support import SMALL, Shown, process, refusal, strict, toml, waffle
from waffle_fl import __version__, cli, experiment
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.cli.menu import COMMANDS
from waffle_fl.cli.progress import Output
from waffle_fl.config import RunConfig, Settings, check_run, load_experiment, option_types
from waffle_fl.experiment import Runtime, plan
from waffle_fl.records import read_rounds

pytestmark = pytest.mark.usefixtures("here")


# --- stdout and stderr


def test_progress_goes_to_stderr_and_results_to_stdout(here: Path) -> None:
    """Progress and notes go to stderr; the table and the folder go to stdout."""
    shown = waffle("run", "waffle-paper", *SMALL, "--out", "run")
    assert shown.code == 0
    assert "1 run: WAFFLE" in shown.err
    assert "3/3" in shown.err
    assert "note: " in shown.err
    assert "run folder: run" in shown.out
    assert "last round" in shown.out
    assert "note: " not in shown.out
    assert "3/3" not in shown.out


def test_quiet_prints_nothing_on_stderr(here: Path) -> None:
    """With --quiet stderr is empty and stdout is unchanged."""
    loud = waffle("run", "waffle-paper", *SMALL, "--out", "run")
    quiet = waffle("run", "waffle-paper", *SMALL, "--out", "run", "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.out == loud.out
    assert waffle("data", "digits", "--quiet").err == ""


def test_json_is_one_document_and_nothing_else(here: Path) -> None:
    """With --json stdout is one JSON document with the folder, the config and the result."""
    shown = waffle("run", "waffle-paper", *SMALL, "--out", "run", "--json")
    content = strict(shown.out)
    assert content["run"] == "run"
    assert content["config"] == json.loads((here / "run" / "config.json").read_text())
    result = json.loads((here / "run" / "result.json").read_text())
    assert {key: content[key] for key in result} == result
    assert strict(waffle("resume", "run", "--json").out) == content


def test_json_of_a_diverged_run_is_one_document(here: Path) -> None:
    """A diverged run prints its result as JSON on stdout and one line on stderr, and exits with 2."""
    shown = waffle("run", "local", *SMALL, "--lr", "1e38", "--out", "run", "--json", "--quiet")
    assert shown.code == 2
    assert strict(shown.out)["status"] == "diverged"
    assert shown.err.startswith("waffle: round ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("parent", ["[old]", "[bold red]", "[1]"])
def test_brackets_in_a_path_are_printed(parent: str) -> None:
    """Square brackets in a path are printed, not parsed as markup."""
    shown = waffle("run", "local", *SMALL, "--out", f"{parent}/run", "--quiet")
    assert f"run folder: {parent}/run\n" in shown.out


def test_a_long_path_is_printed_on_one_line() -> None:
    """A path longer than a terminal line is not wrapped."""
    path = f"{'long-' * 12}/{'path-' * 12}/run"
    assert f"run folder: {path}\n" in waffle("run", "local", *SMALL, "--out", path, "--quiet").out


ESCAPE = "\x1b"
COLOURS = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-9]|4[0-9]|9[0-7]|10[0-7])(?:;[0-9]+)*m")


def on_a_terminal(*arguments: str) -> str:
    """The output of a command on a colour terminal with NO_COLOR set."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
    child = fork_server.request(
        fork_server.shared().address, ["waffle", *arguments], (theirs, theirs, theirs), environment
    )
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # reading fails after the command has closed the terminal
        while block := os.read(ours, 65536):
            text += block
    assert child.wait() == 0
    os.close(ours)
    return text.decode()


@pytest.mark.parametrize(
    "arguments", [("run", "local", *SMALL, "--out", "run"), ("run", "local", "--help")], ids=["run", "help"]
)
def test_no_color_is_respected_on_a_terminal(arguments: tuple[str, ...]) -> None:
    """With NO_COLOR a terminal receives no colour codes."""
    text = on_a_terminal(*arguments)
    assert len(text) > 200
    assert COLOURS.findall(text) == []


def test_there_are_no_escape_codes_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR and no terminal, neither stdout nor stderr contains an escape code."""
    monkeypatch.setenv("NO_COLOR", "1")
    shown = waffle("run", "waffle-paper", *SMALL, "--out", "run")
    assert shown.code == 0
    assert ESCAPE not in shown.out + shown.err
    assert "run folder: run\n" in shown.out
    assert "note: " in shown.err


# --- help


def flags_of(kind: type) -> list[str]:
    return ["--" + field.name.replace("_", "-") for field in fields(kind)]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_the_help_of_a_method_lists_its_flags(method: str) -> None:
    """`waffle run METHOD --help` exits with 0 and lists every setting except the share matrix, and every option.

    A method whose server does not average has no weighting.
    """
    shown = waffle("run", method, "--help")
    options = ["--" + name.replace("_", "-") for name in option_types(method)]
    assert (shown.code, shown.err) == (0, "")
    absent = {"--shares"} | ({"--weighting"} - set(options))
    settings = [flag for flag in flags_of(Settings) if flag not in absent]
    expected = [*settings, *options, *flags_of(Runtime), *flags_of(Output), "--out", "--no-baselines"]
    assert [flag for flag in expected if not re.search(rf"{flag}\b", shown.out)] == []


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "decide",
            ["--methods", "--seeds", "--partners", "--options", "--metric", "--out", "--alice", *flags_of(Runtime)],
        ),
        ("bench", ["--out", "--dry-run", *flags_of(Runtime), *flags_of(Output)]),
        ("report", ["--out", "--title", *flags_of(Output)]),
        ("data", ["--split", "--agents", "--direction", "--out", "--data-dir", "--allow-unverified"]),
        ("demo", ["--out", *flags_of(Runtime), *flags_of(Output)]),
        ("resume", [*flags_of(Runtime), *flags_of(Output)]),
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
    """A command without its argument is refused in one line that says what is missing."""
    assert "missing" in refusal(waffle(command))


def test_no_traceback_in_a_real_process(here: Path) -> None:
    """Run as a separate process, the command refuses in one line with exit code 2."""
    path = toml(here, 'methods = ["waffle-paper"]\nlr = nan\nrounds = 0\n[waffle-paper]\nomega = "nowhere:f"\n')
    line = refusal(process("bench", path))
    assert "lr (line 2)" in line
    assert "rounds (line 3)" in line
    assert "nowhere" in line


# --- resume


@pytest.mark.parametrize("make", ["nothing", "empty folder", "file"])
def test_only_run_folders_can_be_resumed(here: Path, make: str) -> None:
    """A folder without a config, a file and a missing path are refused by name."""
    if make == "empty folder":
        (here / "run").mkdir()
    if make == "file":
        (here / "run").write_text("")
    assert "run" in refusal(waffle("resume", "run"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "settings": {"lr": "x"}}'])
def test_a_damaged_config_is_refused(here: Path, content: str) -> None:
    """A run folder with a damaged config is refused in one line."""
    (here / "run").mkdir()
    (here / "run" / "config.json").write_text(content)
    refused = refusal(waffle("resume", "run"))
    assert len(refused) < 400


# --- bench

GRID = """
methods = ["waffle-paper", "local"]
splits = ["C", "A"]
seeds = [2, 1]
data = "synthetic"
model = "linear"
samples_per_agent = 20
rounds = 60

[waffle-paper]
clip = {C = 1.5, A = 2.5}
omega = {A = "constant(0.25)", C = "sigmoid(3.2)"}
eta_g = 0.5
"""
RUNS = [
    f"synthetic-{split}-{method}-{seed}" for method in ("waffle-paper", "local") for split in "CA" for seed in (2, 1)
]
TABLES = ["table.csv", "table.md", "table.tex"]
CHARTS = ["accuracy", "weights", "labels", "omega"]


@dataclass(frozen=True)
class Bench:
    """A grid after one run."""

    file: Path
    out: Path
    shown: Shown


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The grid above, run in this process."""
    folder = tmp_path_factory.mktemp("bench")
    file = toml(folder, GRID)
    return Bench(file, folder / "out", waffle("bench", file, "--out", folder / "out", "--json"))


def test_a_dry_run_prints_the_plan(here: Path) -> None:
    """`bench --dry-run` prints methods x splits x seeds in the order of the file and writes nothing."""
    shown = waffle("bench", toml(here, GRID), "--dry-run")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.splitlines() == [f"runs/grid/{name}" for name in RUNS]
    assert [path.name for path in here.iterdir()] == ["grid.toml"]


def test_a_grid_runs_every_cell(bench: Bench) -> None:
    """A bench makes one finished run folder per cell of the grid, and its JSON lists them in order."""
    content = strict(bench.shown.out)
    assert bench.shown.code == 0
    assert [Path(run["run"]).name for run in content["runs"]] == RUNS
    assert {run["status"] for run in content["runs"]} == {"finished"}
    assert {path.name for path in bench.out.iterdir()} == {*RUNS, "report"}
    assert all(len(read_rounds(bench.out / name / "rounds.jsonl")) == 60 for name in RUNS)


def test_integers_and_equal_floats_give_one_config(here: Path) -> None:
    """Where a float is allowed, 2 and 2.0 give the same config."""
    text = (
        'methods = ["waffle-paper"]\nsplits = ["A"]\nsizes = {0}\n[waffle-paper]\nclip = {1}\neta_g = {{ A = {1} }}\n'
    )
    files = [toml(here, text.format(*n), f"{i}.toml") for i, n in enumerate([("[2, 1]", "2"), ("[2.0, 1.0]", "2.0")])]
    with_int, with_float = (plan(load_experiment(file), here)[0][0] for file in files)
    assert json.dumps(with_int.to_json()) == json.dumps(with_float.to_json())
    assert json.dumps(check_run("waffle-paper", {}, {"clip": 2}).to_json()) == json.dumps(
        check_run("waffle-paper", {}, {"clip": 2.0}).to_json()
    )


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_config_round_trips_through_json(method: str) -> None:
    """A config read from its JSON writes the same JSON."""
    text = json.dumps(check_run(method, {}, {}).to_json())
    assert json.dumps(RunConfig.from_json(json.loads(text)).to_json()) == text


def test_options_by_split_reach_their_runs(bench: Bench) -> None:
    """An option given as a table sets one value per split."""
    for name in RUNS:
        config = json.loads((bench.out / name / "config.json").read_text())
        split = config["settings"]["split"]
        assert name == f"synthetic-{split}-{config['method']}-{config['settings']['seed']}"
        assert config["settings"]["rounds"] == 60
        if config["method"] == "waffle-paper":
            assert config["options"]["clip"] == {"C": 1.5, "A": 2.5}[split]
            assert config["options"]["omega"] == {"C": "sigmoid(3.2)", "A": "constant(0.25)"}[split]
            assert config["options"]["eta_g"] == 0.5
    rounds = read_rounds(bench.out / "synthetic-A-waffle-paper-1" / "rounds.jsonl")
    assert {line["omega"] for line in rounds} == {0.25}


def test_the_report_is_complete(bench: Bench) -> None:
    """A bench writes a page, three tables, and each chart as PNG and PDF."""
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
    """A second bench trains nothing, changes no run file, and prints the same results."""
    files = [path for name in RUNS for path in (bench.out / name).iterdir() if path.name != ".lock"]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    monkeypatch.setattr(experiment.execution, "simulate", lambda *_, **__: pytest.fail("training began"))
    shown = waffle("bench", bench.file, "--out", bench.out, "--json")
    assert shown.code == 0, shown.err
    assert "8 runs, 8 already done" in shown.err
    assert strict(shown.out) == strict(bench.shown.out)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before


def test_a_killed_bench_resumes(bench: Bench, here: Path) -> None:
    """After SIGKILL the same command finishes the bench with bitwise identical results."""
    out = here / "out"
    line = ("waffle", "bench", bench.file, "--out", out, "--quiet", "--checkpoint-seconds", "0")
    child = fork_server.shared().start(*line)
    while not any(len(read_rounds(path)) >= 3 for path in out.glob("*/rounds.jsonl")):
        assert child.poll() is None
        time.sleep(0.005)
    child.kill()
    child.communicate(timeout=60)
    assert len(list(out.glob("*/result.json"))) < len(RUNS)
    assert not (out / "report").exists()
    assert waffle("bench", bench.file, "--out", out, "--json", "--quiet").code == 0
    for name in RUNS:
        assert (out / name / "result.json").read_bytes() == (bench.out / name / "result.json").read_bytes()
        ours, theirs = (read_rounds(folder / name / "rounds.jsonl") for folder in (out, bench.out))
        assert [{**a, "seconds": 0} for a in ours] == [{**b, "seconds": 0} for b in theirs]
        assert (out / name / "model.safetensors").read_bytes() == (bench.out / name / "model.safetensors").read_bytes()


def test_agents_whose_runs_diverge_are_named(here: Path) -> None:
    """With `--alice all` all results are printed, then one line names the diverged runs; the exit code is 2."""
    command = (
        "run",
        "waffle-paper",
        *SMALL,
        "--agents",
        "3",
        "--alice",
        "all",
        "--lr",
        "1e38",
        "--out",
        "all",
        "--quiet",
    )
    shown = waffle(*command)
    assert shown.code == 2
    assert "run folders: all" in shown.out
    assert shown.err.startswith("waffle: 3 of 3 runs diverged, those for 0, 1, 2; 0: round ")
    assert shown.err.count("\n") == 1
    shown = waffle(*command, "--json")
    assert shown.code == 2
    assert [run["status"] for run in strict(shown.out)] == ["diverged"] * 3


def test_a_grid_that_diverges_still_reports(here: Path) -> None:
    """Diverged runs do not stop a bench: the report marks them, and the exit code is 0."""
    text = 'methods = ["local", "waffle-paper"]\ndata = "synthetic"\nmodel = "linear"\nrounds = 3\nlr = 1e38\n'
    shown = waffle("bench", toml(here, text), "--out", "out", "--json")
    assert shown.code == 0
    assert {run["status"] for run in strict(shown.out)["runs"]} == {"diverged"}
    assert "diverged" in shown.words
    assert "diverged" in (here / "out" / "report" / "index.html").read_text()


def test_the_demo_experiment_is_valid() -> None:
    """The experiment of `waffle demo` is valid and plans 7 methods x 5 splits x 3 seeds."""
    path = Path(cli.__file__).with_name("demo.toml")
    assert tomllib.loads(path.read_text())["schema"] == 1
    assert len(experiment.plan(load_experiment(path), Path("demo"))) == 8 * 5 * 3


# --- report


def test_a_report_on_nothing_is_refused(here: Path) -> None:
    """A report on a missing folder, an empty folder or a file is refused."""
    (here / "empty").mkdir()
    (here / "file").write_text("")
    assert "missing" in refusal(waffle("report", "missing"))
    assert "no finished run in empty" in refusal(waffle("report", "empty"))
    assert "file" in refusal(waffle("report", "file"))
    assert list((here / "empty").iterdir()) == []


def test_a_report_on_unfinished_runs_is_refused(here: Path, bench: Bench) -> None:
    """A report on an unfinished run is refused."""
    (here / "run").mkdir()
    for name in ("config.json", "provenance.json", "rounds.jsonl"):
        (here / "run" / name).write_bytes((bench.out / RUNS[0] / name).read_bytes())
    assert "let them finish" in refusal(waffle("report", "run"))


def test_a_report_is_written_to_out(here: Path, bench: Bench) -> None:
    """`waffle report RUN --out` writes the page there, and its JSON has the path."""
    shown = waffle("report", bench.out / "synthetic-C-local-1", "--out", "page", "--title", "A <b>title</b>", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert strict(shown.out)["report"] == "page/index.html"
    assert "<title>A &lt;b&gt;title&lt;/b&gt;</title>" in (here / "page" / "index.html").read_text()


@pytest.mark.parametrize("flag", ["--out", "--record"])
def test_a_report_that_cannot_be_written_is_refused(here: Path, bench: Bench, flag: str) -> None:
    """A report or record that cannot be written is refused in one line."""
    (here / "file").write_text("in the way")
    assert "file/place" in refusal(waffle("report", bench.out / RUNS[0], flag, "file/place"))


# --- data


def test_a_split_is_counted_and_drawn(here: Path) -> None:
    """`waffle data digits --split C` prints the label counts of each agent and writes a PNG."""
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
    """An unknown split, zero agents, and a picture that cannot be written are refused in one line."""
    assert what in refusal(waffle("data", "digits", *flags))
    assert list(here.iterdir()) == []


def test_alice_all_trains_one_model_per_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--alice all` trains one model per agent, each in its own folder, and prints the mean and the lowest metric."""
    monkeypatch.chdir(tmp_path)
    line = ["run", "waffle-paper", "--data", "digits", "--agents", "3", "--rounds", "2", "--alice", "all", "--quiet"]
    assert COMMANDS["run"](line[1:]) == 0
    shown = capsys.readouterr().out
    assert "balanced accuracy" in shown
    assert "lowest" in shown
    assert len(list(tmp_path.glob("runs/*/*/model.safetensors"))) == 3
    assert COMMANDS["run"]([*line[1:], "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [set(r["metrics"]) for r in results] == [{"accuracy", "balanced_accuracy", "auc", "log_loss"}] * 3
