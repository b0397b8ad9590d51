"""User data folders on the command line: runs, records, reports, and refusals that write nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import refusal
from waffle_fl import cli
from waffle_fl.config import RunConfig, Settings, check_name, check_run
from waffle_fl.experiment import Runtime, execute, federation_of
from waffle_fl.results import best_of, read_runs, scores
from waffle_fl.tensorfile import read_tensors
from waffle_fl.user_data import Preprocessing


def rows(seed: int, n: int, price: bool) -> str:
    rng = np.random.default_rng(seed)
    lines = ["age,ward,ill" if not price else "age,ward,price"]
    for i in range(n):
        age = rng.normal(50, 10) + 8 * (i % 2)
        lines.append(f"{age:.3f},{'ab'[i % 2]},{f'{100 * age:.2f}' if price else 'ny'[i % 2]}")
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two federations: one to classify, one to regress."""
    monkeypatch.chdir(tmp_path)
    for folder, price in (("clinics", False), ("flats", True)):
        Path(folder).mkdir()
        for seed, (name, n) in enumerate({"north": 30, "south": 14, "tiny": 3}.items()):
            Path(folder, f"{name}.csv").write_text(rows(seed, n, price))
    return tmp_path


def waffle(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli._run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_on_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """The run is named after the folder and Alice, and holds her preprocessing and the names of the agents."""
    flags = ("--data", "clinics", "--target", "ill", "--alice", "south", "--rounds", "4", "--quiet")
    code, out, _ = waffle(capsys, "run", "waffle-paper", *flags)
    assert code == 0
    assert "clinics for south" in out
    run = Path("runs/clinics-waffle-paper-1-south")
    prepared = Preprocessing.from_json(json.loads((run / "preprocessing.json").read_text()))
    assert prepared.features == ("age", "ward=a", "ward=b")
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["agents"] == ["north", "south", "tiny"]
    assert (provenance["task"], provenance["classes"], provenance["sample"]) == ("classification", ["n", "y"], [3])
    code, out, _ = waffle(capsys, "report", "runs", "--quiet")
    assert code == 0
    assert "south" in out


@pytest.mark.parametrize("method", ["waffle-paper", "local", "apfl"])
def test_a_regression_is_recorded_by_its_error(capsys: pytest.CaptureFixture[str], method: str) -> None:
    """Rounds, result, metrics and predictions are in the target's unit, and the report shows errors."""
    arguments = ("--data", "flats", "--target", "price", "--rounds", "4", "--validation", "0.2", "--alice", "north")
    code, out, err = waffle(capsys, "run", method, *arguments)
    assert code == 0, err
    assert "root mean squared error" in out
    run = Path(f"runs/flats-{method}-1-north")
    result = json.loads((run / "result.json").read_text())
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert result["best"]["rmse"] == min(line["rmse"] for line in lines)
    chosen = min(lines, key=lambda line: line["validation_rmse"])
    assert result["selected"] == {"round": chosen["round"], "rmse": chosen["rmse"]}
    assert result["metrics"]["rmse"] == pytest.approx(result["last"]["rmse"], rel=1e-5)
    template = {"output": torch.empty(8, 1).double(), "target": torch.empty(8).double()}
    _, tensors = read_tensors(run / "predictions.safetensors", template)
    assert tensors["target"].min() > 1000
    assert waffle(capsys, "report", "runs", "--quiet")[0] == 0
    assert "Root mean squared error" in Path("runs/report/table.md").read_text()


def test_the_smaller_error_is_the_better() -> None:
    """In a table of errors the smallest mean is the best."""
    runs = []
    for method in ("local", "fedavg"):
        config = check_run(method, {"data": "flats", "target": "price", "rounds": 3, "alice": "north"}, {})
        runs.append((config, Path("runs") / config.label))
    results = execute(runs, Runtime(workers=1))
    cells = scores(read_runs([folder for _, folder in runs]), "best")
    smallest = min(zip(("local", "fedavg"), results, strict=True), key=lambda found: found[1]["best"]["rmse"])
    assert best_of(cells, "north") == {smallest[0]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--target", "sick"), "no column 'sick'"),
        (("--target", "il"), "did you mean ill?"),
        ((), "which column is to be predicted?"),
        (("--target", "ill", "--alice", "ann"), "the agents are north, south, tiny"),
        (("--target", "ill", "--agents", "5"), "agents divides a data set among agents"),
        (("--target", "ill", "--split", "A"), "split divides"),
        (("--target", "ill", "--test-share", "1"), "a fraction above 0 and below 1"),
        (("--target", "ill", "--task", "regression"), "'ill' holds numbers, but line 2 has 'n'"),
        (("--target", "ill", "--model", "lenet5"), "takes samples with 3 axes"),
        (("--target", "ill", "--model", "test_user_data_cli:wrong_output_size"), "returns 2 outputs per sample"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_write_nothing(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    """A mistake gives exit code 2, one line on stderr and no run folder."""
    code, out, err = waffle(capsys, "run", "fedavg", "--data", "clinics", *arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, out, len(lines)) == (2, "", 1), err
    assert expected in lines[0]
    assert not Path("runs").exists()


def wrong_output_size(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return torch.nn.Linear(shape[0], 7)


def test_a_changed_file_is_read_again() -> None:
    """A changed file changes the federation; agents of one folder share its tensors."""
    settings = Settings(data="clinics", target="ill", alice="north")
    before = federation_of(settings)
    assert federation_of(Settings(data="clinics", target="ill", alice="south")).x is before.x
    Path("clinics/north.csv").write_text(rows(7, 20, False))
    assert federation_of(settings).digest() != before.digest()


def test_hidden_files_are_ignored() -> None:
    """A dangling hidden link, as editors leave it, is ignored."""
    Path("clinics/.#north.csv").symlink_to("user@host.1")
    assert federation_of(Settings(data="clinics", target="ill", alice="north")).agents == 3


def test_an_agent_called_all_is_refused() -> None:
    """`all` means every agent, so a file of that name is refused for every Alice."""
    Path("clinics/all.csv").write_text(rows(9, 12, False))
    for alice in ("all", "north", "0"):
        text = refusal(federation_of, Settings(data="clinics", target="ill", alice=alice))
        assert text == "clinics has an agent called 'all', which means every agent: give it another name"


def test_a_run_with_leave_out_finishes(capsys: pytest.CaptureFixture[str]) -> None:
    """`--leave-out` on a data folder trains the remaining agents and writes the page, also when resumed."""
    arguments = ("--data", "clinics", "--target", "ill", "--rounds", "2", "--leave-out", "south", "--quiet")
    code, out, err = waffle(capsys, "run", "waffle-paper", *arguments)
    run = Path("runs/clinics-waffle-paper-1-without-south")
    assert (code, err) == (0, "")
    assert str(run) in out
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    assert (run / "decision.html").exists()
    assert waffle(capsys, "resume", str(run), "--quiet")[0] == 0


def test_non_ascii_names_have_separate_folders(capsys: pytest.CaptureFixture[str]) -> None:
    """Agents with non-ASCII names have separate folders; ASCII names stay readable."""
    Path("医院").mkdir()
    for seed, name in enumerate(("北京", "上海", "north")):
        Path("医院", f"{name}.csv").write_text(rows(seed, 20, False))
    arguments = ("--data", "医院", "--target", "ill", "--rounds", "1", "--quiet")
    code, _, err = waffle(capsys, "run", "waffle-paper", *arguments, "--alice", "all")
    assert (code, err) == (0, "")
    (found,) = (path for path in Path("runs").iterdir() if not path.name.startswith("."))
    alices = [json.loads(path.read_text())["settings"]["alice"] for path in found.glob("*/config.json")]
    assert sorted(alices) == ["north", "上海", "北京"]
    labels = {alice: Settings(data="clinics", alice=alice) for alice in ("north wing", "北京", "上海")}
    north, *others = (RunConfig(method="waffle-paper", settings=settings).label for settings in labels.values())
    assert north == "clinics-waffle-paper-1-north-wing"
    assert len({check_name(label) for label in others}) == 2


def test_a_missing_data_folder_is_refused() -> None:
    """An unknown data set is refused with the known names and the hint that it may be a path."""
    assert "(or the path of a data folder)" in refusal(federation_of, Settings(data="clinic"))
    assert "there is no folder" in refusal(federation_of, Settings(data="./clinic"))
