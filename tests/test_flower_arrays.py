"""Sites with arrays: the survey of their moments gives the simulator's bits, and lies of either end are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flower_harness import Grid, bits, federation, run_job, run_simulation
from test_flower_hostile import Server, SurveyedSite, surveyed_site
from waffle_fl.config import RunConfig, check_run
from waffle_fl.deploy import membership, survey
from waffle_fl.deploy.dry_run import dry_run
from waffle_fl.deploy.policy import Refused
from waffle_fl.deploy.settings_files import change
from waffle_fl.deploy.site_arrays import FEWEST
from waffle_fl.engines.flower.messages import Message
from waffle_fl.errors import WaffleError
from waffle_fl.inference.trained_run import open_run

SITES = ("north", "south", "west")
Shape = tuple[int, ...]


def write_arrays(path: Path, seed: int, rows: int = 40, shape: Shape = (4,), regression: bool = False) -> None:
    """Write arrays whose features differ in size, with a class or a number to predict."""
    rng = np.random.default_rng(seed)
    size = np.geomspace(1, 1e4, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    x = (rng.standard_normal((rows, *shape)) + seed) * size
    y = 300 + 20 * rng.standard_normal(rows) if regression else np.arange(rows) % 3
    np.savez(path, x=x, y=y)


def folder_of(path: Path, **options: Any) -> Path:
    path.mkdir()
    for seed, name in enumerate(SITES):
        write_arrays(path / f"{name}.npz", seed, 40 + 7 * seed, **options)
    return path


def config(**settings: Any) -> RunConfig:
    given = {"data": "arrays", "alice": "south", "batch_size": 8, "rounds": 3, "precision": "float64"}
    return check_run("waffle-paper", {**given, "guard": "standard", "model": "mlp", **settings}, {})


@pytest.mark.parametrize("settings", [{}, {"preprocessing": "local"}, {"preprocessing": "none"}, {"validation": 0.2}])
@pytest.mark.parametrize("data", [{}, {"shape": (3, 5)}, {"regression": True}])
def test_arrays_end_in_the_simulator_s_bits(settings: dict[str, Any], data: dict[str, Any], tmp_path: Path) -> None:
    """Sites that each hold arrays agree on their scaling from moments and train to the simulator's bits."""
    arrays = folder_of(tmp_path / "arrays", **data)
    lr = {"lr": 1e-7} if settings.get("preprocessing") == "none" else {}
    folder = federation(tmp_path / "fed", SITES, str(arrays))
    run_job(folder, config(**settings, **lr), tmp_path / "run")
    model, rounds, result = bits(tmp_path / "run")
    reference = run_simulation(config(data=str(arrays), **settings, **lr), tmp_path / "reference")
    assert (model, rounds) == bits(reference)[:2]
    assert result["metrics"] == bits(reference)[2]["metrics"]
    (at_site,) = (folder / "sites" / "south" / "models").iterdir()
    kept = [(run / "scaling.json") for run in (tmp_path / "run", at_site, reference)]
    if settings.get("preprocessing") == "none":
        assert not any(path.exists() for path in kept)
        return
    assert json.loads(kept[1].read_text()) == json.loads(kept[2].read_text())
    if settings.get("preprocessing") == "local":
        assert not kept[0].exists()
    else:
        assert kept[0].read_bytes() == kept[2].read_bytes()
    assert open_run(at_site).scaling == open_run(reference).scaling


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize("scope", ["federated", "local", "none"])
def test_only_the_needed_moments_leave(scope: str, regression: bool, tmp_path: Path) -> None:
    """With local preprocessing only the target's moments leave, with none nothing; a dry run shows it."""
    folder = federation(tmp_path / "fed", SITES, str(folder_of(tmp_path / "arrays", regression=regression)))
    grid = Grid(folder)
    run_job(folder, config(preprocessing=scope, lr=1e-7, rounds=1), tmp_path / "run", grid)
    asked = {request.fields["stage"] for _, request in grid.requests if "stage" in request.fields}
    needed = scope == "federated" or (scope == "local" and regression)
    assert asked == {"hello", *(["moments"] if needed else [])}
    said = [json.loads(line)["said"] for line in (folder / "sites" / "north" / "ledger.jsonl").read_text().splitlines()]
    assert any("features" in reply for reply in said) == (scope == "federated")
    assert any("target" in reply for reply in said) == (regression and scope != "none")
    lines = list(dry_run(folder / "sites" / "north", config(preprocessing=scope, lr=1e-7)))
    assert any(line.startswith("survey, moments") for line in lines) == needed


# ------------------------------------------------------------------------------------------------------- a lying site


@pytest.mark.parametrize(
    "reply",
    [
        {"features": [[0.0] * 3, [1.0] * 3]},
        {"features": [[0.0] * 4, [1.0] * 3]},
        {"features": [[0.0] * 5_000, [1.0] * 5_000]},
        {"features": [[0.0] * 4]},
        {"features": 3},
        {"features": [3, 3]},
        {"features": None},
        {"features": [[0.0, float("nan"), 0.0, 0.0], [1.0] * 4]},
        {"features": [[0.0] * 4, [1.0, float("inf"), 1.0, 1.0]]},
        {"features": [[0.0] * 4, [1.0, -1.0, 1.0, 1.0]]},
        {"features": [[1e300] * 4, [1.0] * 4]},
        {"features": [[10**400] * 4, [1.0] * 4]},
        {"features": [["0"] * 4, [1.0] * 4]},
        {"features": ["0000", [1.0] * 4]},
        {"features": {"0": [0.0] * 4, "1": [1.0] * 4}},
        {"target": [float("nan"), 1.0]},
        {"target": [1.0, -1.0]},
        {"target": [1.0]},
        {"target": [1.0, 1.0, 1.0]},
        {"target": "ab"},
        {"target": None},
        {"samples": -1},
        {"shape": [4.5]},
        {"shape": []},
    ],
)
def test_invalid_moments_are_rejected(reply: dict[str, Any], tmp_path: Path) -> None:
    """A site that sends impossible moments of its arrays is named before the first round."""
    folder = federation(tmp_path / "fed", SITES, str(folder_of(tmp_path / "arrays", regression=True)))

    def lie(name: str, request: Message, honest: Message) -> Message:
        replaced = {key: value for key, value in reply.items() if key in honest.fields}
        return Message({**honest.fields, **replaced}) if name == "south" else honest

    with pytest.raises(WaffleError, match=r"^south sent a survey reply that cannot be read: [^\n]+$"):
        run_job(folder, config(), tmp_path / "run", Grid(folder, lie))


def test_missing_moments_are_rejected(tmp_path: Path) -> None:
    """A reply without the moments is one line with the site's name."""
    folder = federation(tmp_path / "fed", SITES, str(folder_of(tmp_path / "arrays")))

    def lie(name: str, request: Message, honest: Message) -> Message:
        return Message({k: v for k, v in honest.fields.items() if k != "features"}) if name == "west" else honest

    with pytest.raises(WaffleError, match=r"^west sent a survey reply that cannot be read: 'features'"):
        run_job(folder, config(), tmp_path / "run", Grid(folder, lie))


def test_too_many_features_to_send_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays with more means than a message holds end the run with the settings that work."""
    monkeypatch.setattr(survey, "MOST_FEATURES", 3)
    folder = federation(tmp_path / "fed", SITES, str(folder_of(tmp_path / "arrays")))
    with pytest.raises(WaffleError, match=r"at most 3 features or channels, got 4: .*--preprocessing none"):
        run_job(folder, config(), tmp_path / "run")


# ----------------------------------------------------------------------------------------------------- a lying server


@pytest.fixture
def site(tmp_path: Path) -> Path:
    membership.init(tmp_path / "fed", ["north"], "127.0.0.1", 9443, "127.0.0.1")
    folder = tmp_path / "fed" / "sites" / "north"
    (folder / "data").mkdir()
    change(folder / "site.toml", data="data/north.npz")
    return folder


def own_config(**settings: Any) -> RunConfig:
    given = {"data": "arrays", "alice": "north", "batch_size": 8, "rounds": 2, "model": "linear"}
    return check_run("fedavg", {**given, **settings}, {})


def first_of(site: Path, regression: bool = False, **settings: Any) -> SurveyedSite:
    write_arrays(site / "data" / "north.npz", 1, regression=regression)
    return surveyed_site(site, own_config(**settings))


def answer_to(first: SurveyedSite, scaling: Any) -> str:
    """Return the site's error, or nothing, for a first round with this scaling."""
    known = {**first.facts.known, "scaling": scaling}
    reply = first.server.send_tasks(first.facts, first.server_run, (first.task, first.payload), known=known)
    error = str(reply.fields["courses"]["course"].get("error", ""))
    assert bool(reply.payloads) == (not error)
    return error


CANNOT_BE_READ, IMPOSSIBLE = (
    "the server's scaling cannot be read",
    "cannot be those of samples that include this site's",
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mean": [1e6] * 4}, IMPOSSIBLE),
        ({"deviation": [1e-3] * 4}, IMPOSSIBLE),
        ({"deviation": [0.0] * 4}, IMPOSSIBLE),
        ({"mean": [0.0] * 3, "deviation": [1.0] * 3}, "has 3 means, this site's samples 4"),
        ({"mean": [], "deviation": []}, "has 0 means"),
        ({"mean": [0.0] * 4}, IMPOSSIBLE),
        ({"rows": 3}, "covers 3 samples; this site has 30"),
        ({"rows": 10**18}, "(max_rows)"),
        ({"scope": "local"}, "does not match this run's preprocessing"),
        ({"target_mean": 5.0}, "has a scale of the target"),
        ({"clip": 0.1}, "clips standardised inputs at 0.1, this site at 3.0"),
        ({"clip": None}, "clips standardised inputs at None, this site at 3.0"),
        ({"mean": [float("nan")] * 4}, CANNOT_BE_READ),
        ({"mean": [1e300] * 4, "deviation": [1e300] * 4}, CANNOT_BE_READ),
        ({"mean": 3}, CANNOT_BE_READ),
        ({"rows": 1e18}, CANNOT_BE_READ),
        ({"other": 1}, CANNOT_BE_READ),
    ],
)
def test_an_impossible_scaling_is_refused(changes: dict[str, Any], words: str, site: Path) -> None:
    """A scaling that is impossible given this site's samples is refused before training."""
    first = first_of(site)
    assert first.facts.scaling is not None
    assert words in answer_to(first, {**first.facts.scaling, **changes})
    assert answer_to(first, first.facts.scaling) == ""


@pytest.mark.parametrize("scaling", [None, 3, [], "federated"])
def test_a_scaling_cannot_be_omitted(scaling: Any, site: Path) -> None:
    """A run that standardises its arrays needs the common scaling."""
    assert "the server's scaling" in answer_to(first_of(site), scaling)


@pytest.mark.parametrize("scope", ["federated", "local"])
@pytest.mark.parametrize("changes", [{"target_mean": 1e9}, {"target_deviation": 1e-3}, {"rows": 3}])
def test_an_impossible_scale_of_the_target_is_refused(scope: str, changes: dict[str, Any], site: Path) -> None:
    """The common mean and deviation of the target must be possible too."""
    first = first_of(site, regression=True, preprocessing=scope)
    assert first.facts.scaling is not None
    assert answer_to(first, {**first.facts.scaling, **changes})
    assert answer_to(first, first.facts.scaling) == ""


def test_arrays_as_given_take_no_scaling(site: Path) -> None:
    """A run without preprocessing refuses a scaling, and local preprocessing refuses common means."""
    scaling = first_of(site).facts.scaling
    change(site / "site.toml", surveys=9)
    assert "does not match" in answer_to(first_of(site, preprocessing="none", lr=1e-7), scaling)
    local = first_of(site, preprocessing="local")
    assert scaling is not None
    assert "has 4 means" in answer_to(local, {**scaling, "scope": "local"})


def test_few_samples_are_not_summarised(site: Path) -> None:
    """Fewer than five training samples are not summarised."""
    write_arrays(site / "data" / "north.npz", 1, FEWEST)
    answer = Server(site, own_config(task="regression")).send(stage="moments", known={}).fields
    assert "fewer than 5 training samples, too few to summarise" in answer["error"]


def test_stages_of_other_data_are_refused(site: Path) -> None:
    """Arrays have no counts of cells, and tables no moments of arrays."""
    first = first_of(site)
    assert "has arrays, which have no stage 'counts'" in first.server.send(stage="counts", known={}).fields["error"]
    change(site / "site.toml", data="data/north.csv")
    (site / "data" / "north.csv").write_text("a,y\n" + "\n".join(f"{i},{'uv'[i % 2]}" for i in range(40)))
    tables = Server(site, own_config(target="y", min_category=5), "tables")
    change(site / "site.toml", surveys=9)
    assert "has a table, which has no stage 'moments'" in tables.send(stage="moments", known={}).fields["error"]
    raw = Server(site, own_config(target="y", min_category=5, preprocessing="none"), "raw")
    assert "expected federated or local for tables, got none" in raw.send(stage="hello", known={}).fields["error"]
    with pytest.raises(Refused, match="expected federated or local for tables"):
        list(dry_run(site, own_config(target="y", min_category=5, preprocessing="none")))


def test_a_second_way_of_scaling_is_another_survey(site: Path) -> None:
    """Moments of one split are shared once: another split counts against `surveys`."""
    first_of(site)
    other = Server(site, own_config(split_seed=5), "other").send(stage="moments", known={}).fields
    assert "summarises its data for 1 way(s)" in other["error"]
    assert "features" not in other
