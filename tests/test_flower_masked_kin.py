"""WAFFLE in private rounds at real sites: the simulator's bits, also with a first sum, dropouts and restarts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("flwr")

from flower_harness import Grid, bits, federation, run_job, run_simulation, small_config, without_waiting
from waffle_fl.config import RunConfig, check_run
from waffle_fl.deploy import site
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.server_app import JobRunner
from waffle_fl.deploy.settings_files import change
from waffle_fl.engines.flower.messages import Message
from waffle_fl.engines.row_training import RowTraining
from waffle_fl.privacy.phases import REPLIES, REQUESTS, AloneReply, OpenReply, SketchReply, SumReply
from waffle_fl.privacy.wire import read, written

SITES = ("a", "b", "c", "d", "e")


def config(rounds: int = 3, options: dict[str, Any] | None = None, **settings: Any) -> RunConfig:
    """Return the config of a masked run of five sites, of which the others oppose Alice."""
    base = small_config(rounds).settings
    given: dict[str, Any] = {"data": "digits", "samples_per_agent": 40, "batch_size": 16, "precision": "float64"}
    given |= {"model": base.model, "rounds": rounds, "agents": 5, "privacy": "masked", "guard": "off", "split": "B*"}
    return check_run("waffle", {**given, **settings}, {"head_layers": 0, **(options or {})})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = federation(tmp_path / "federation", SITES, deadline=5.0, grace=5.0, retries=1)
    change(folder / "sites" / "a" / "site.toml", model_may_leave=True)
    return folder


def phase_of(request: Message) -> str:
    return str(request.fields.get("tasks", [{}])[0].get("phase", ""))


def phases(grid: Grid, name: str = "b") -> list[str]:
    """Return the phases of a site's requests."""
    return [phase_of(request) for site_name, request in grid.requests if site_name == name and phase_of(request)]


RUNS = {
    "opposed": config(),
    "with a guard": config(guard="standard"),
    "own heads": config(4, {"head_layers": 1, "yielding": 2.0}),
    "a floor": config(4, {"yielding": 3.0}, min_contributors=3.5),
    "sketches": config(2, sketch_size=64),
}


@pytest.mark.parametrize("name", RUNS)
def test_deployments_have_the_simulator_s_bits(name: str, folder: Path, tmp_path: Path) -> None:
    """Models and records are those of the simulator, to the last bit, and first sums were read."""
    grid = Grid(folder)
    run_job(folder, RUNS[name], tmp_path / "run", grid)
    model, rounds, result = bits(tmp_path / "run")
    reference = bits(run_simulation(RUNS[name], tmp_path / "reference"))
    assert rounds == reference[1]
    assert model == reference[0]
    assert result["metrics"] == reference[2]["metrics"]
    if name != "with a guard":  # which rejects the updates that oppose Alice's
        assert {"first", "unmask"} <= set(phases(grid))


@pytest.mark.parametrize("phase", ["open", "compare", "first", "unmask", "sum", "reveal"])
def test_a_site_may_drop_out_in_any_phase(
    phase: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round goes on without the site; afterwards it takes part again, with the model that it trained last."""
    without_waiting(monkeypatch)
    lost: list[Message] = []

    def lose(name: str, request: Message, reply: Message) -> Message | None:
        if name == "c" and phase_of(request) == phase and not lost:
            lost.append(request)
            return None
        return reply

    grid = Grid(folder, lose)
    run_job(folder, config(2), tmp_path / "run", grid)
    _, rounds, result = bits(tmp_path / "run")
    absent = phase not in ("unmask", "reveal")
    assert result["status"] == "finished"
    assert rounds[0].get("screened", {}) == ({"agent 2": "absent"} if absent else {})
    assert (rounds[0]["weights"][2] == 0) == absent
    assert "screened" not in rounds[1]
    bases = [r.fields["tasks"][0]["base"] for n, r in grid.requests if n == "c" and phase_of(r) == "open"]
    assert bases == [[0, 0], [0, 0] if absent else [1, 0]]


@pytest.mark.parametrize("phase", ["first", "unmask", "sum"])
def test_a_restarted_server_ends_in_the_same_bits(phase: str, folder: Path, tmp_path: Path) -> None:
    """A server that dies after a first sum was read begins the round again, and reads the same length."""

    def die(name: str, request: Message, reply: Message) -> Message:
        if name == "d" and phase_of(request) == phase and request.fields["tasks"][0]["base"] != [0, 0]:
            raise KeyboardInterrupt
        return reply

    grid = Grid(folder, die)
    with pytest.raises(KeyboardInterrupt):
        run_job(folder, config(), tmp_path / "run", grid)
    JobRunner(folder, Job.open(folder, "run"), Grid(folder)).run_all()
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(config(), tmp_path / "reference"))[:2]


def test_for_one_update_sites_help_to_read_one_first_sum(folder: Path, tmp_path: Path) -> None:
    """With other sites present, the round is trained again with other batches before another length is read."""
    dead: list[str] = []

    def die(name: str, request: Message, reply: Message) -> Message:
        if name == "e" and phase_of(request) == "unmask" and not dead:
            dead.append(name)
            raise KeyboardInterrupt
        return reply

    grid = Grid(folder, die)
    with pytest.raises(KeyboardInterrupt):
        run_job(folder, config(1), tmp_path / "run", grid)
    grid.offline = {"e"}
    change(folder / "server.toml", deadline=0.5, grace=0.5, start_timeout=0.5)
    JobRunner(folder, Job.open(folder, "run"), grid).run_all()
    _, rounds, _ = bits(tmp_path / "run")
    assert any("already helped to read another sum" in reason for _, reason in rounds[0]["refused"])
    attempts = [r.fields["tasks"][0]["attempt"] for n, r in grid.requests if n == "b" and phase_of(r) == "open"]
    assert attempts == [0, 0, 1]
    lines = [json.loads(line) for line in (folder / "sites" / "b" / "ledger.jsonl").read_text().splitlines()]
    read_sums = [line["read"]["of"].endswith("first") for line in lines if "read" in line]
    assert read_sums == [True, True, False]


def test_the_server_receives_masked_numbers_and_lengths(folder: Path, tmp_path: Path) -> None:
    """Besides lengths of layers, all that depends on updates in the replies of a whole run is uniform."""
    received: dict[str, list[np.ndarray]] = {}
    lengths: set[int] = set()

    def listen(name: str, request: Message, reply: Message) -> Message:
        if phase := phase_of(request):
            (payload,) = reply.payloads.values()
            one = read(payload, REPLIES[REQUESTS[phase]])
            assert not isinstance(one, AloneReply)
            if isinstance(one, OpenReply):
                assert (one.length, one.pull) == (0.0, 0.0)
                lengths.add(len(one.lengths))
            elif isinstance(one, SketchReply):
                content = b"".join(sketch.content for some in one.sketches.values() for sketch in some)
                received.setdefault(phase, []).append(np.frombuffer(content, np.uint8) / 256)
            elif isinstance(one, SumReply):
                divisor = 1 << 24 if phase == "first" else 1 << 32
                received.setdefault(phase, []).extend(words.words / divisor for words in one.sums)
        return reply

    grid = Grid(folder, listen)
    run_job(folder, config(2), tmp_path / "run", grid)
    assert received.keys() == {"compare", "first", "sum"}
    assert len(lengths) == 1
    for phase, found in received.items():
        assert len(found) >= 4
        counts = np.histogram(np.concatenate(found), bins=64, range=(0, 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-6, phase


def test_a_site_that_lost_its_model_takes_no_part(folder: Path, tmp_path: Path) -> None:
    """The server of a masked run has no copy of a site's own model, so the site does not begin anew."""
    gone: list[str] = []

    def lose(name: str, request: Message, reply: Message) -> Message:
        if name == "e" and phase_of(request) == "reveal" and not gone:
            gone.append(name)
            for path in (folder / "sites" / "e" / "state").rglob("*.safetensors"):
                path.unlink()
        return reply

    run_job(folder, config(), tmp_path / "run", Grid(folder, lose))
    _, rounds, result = bits(tmp_path / "run")
    assert result["status"] == "finished"
    assert ["agent 4" in line.get("screened", {}) for line in rounds] == [False, True, True]
    assert any("lost its personal model" in reason for _, reason in rounds[1]["refused"])


def test_a_floor_of_a_site_excludes_a_method_whose_start_models_the_server_chooses(
    folder: Path, tmp_path: Path
) -> None:
    """The server could let all others start from models in which they learn nothing, and read one site's update."""
    change(folder / "sites" / "b" / "site.toml", min_contributors=2.0)
    run_job(folder, config(1), tmp_path / "run")
    _, rounds, _ = bits(tmp_path / "run")
    assert rounds[0]["weights"][1] == 0
    assert any("cannot ensure with this method" in reason for _, reason in rounds[0]["refused"])


def test_lengths_that_no_agent_would_report_are_rejected(folder: Path, tmp_path: Path) -> None:
    """A site that reports an endless layer is left out, and harms no other."""

    def lie(name: str, request: Message, reply: Message) -> Message:
        if name == "d" and phase_of(request) == "open":
            ((label, payload),) = reply.payloads.items()
            one = dataclasses.replace(read(payload, OpenReply), lengths=(1e300, 1e300))
            return dataclasses.replace(reply, payloads={label: written(one)})
        return reply

    run_job(folder, config(2), tmp_path / "run", Grid(folder, lie))
    _, rounds, _ = bits(tmp_path / "run")
    assert [line["screened"] for line in rounds] == [{"agent 3": "too long"}] * 2
    assert all(line["loss"] is not None for line in rounds)


def test_the_model_that_is_trained_is_examined(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site examines the mixture of its own model and Alice's, which is in no message, before it trains it."""
    seen: list[bytes] = []
    trained: list[bytes] = []
    exposed, begin = site.exposed_shares, RowTraining.round

    def keep(model: Any, net: Any, federation: Any) -> Any:
        seen.append(net.params.numpy().tobytes())
        return exposed(model, net, federation)

    def start(self: Any, states: Any, *arguments: Any, **options: Any) -> Any:
        if len(states) == 1:
            trained.append(self.algorithm.begin(*states[0]).y[0].numpy().tobytes())
        return begin(self, states, *arguments, **options)

    monkeypatch.setattr(site, "exposed_shares", keep)
    monkeypatch.setattr(RowTraining, "round", start)
    run_job(folder, config(3, {"head_layers": 1, "averaging": 1.0}, privacy="off"), tmp_path / "run")
    assert len(set(trained)) > 3  # the sites start from different models
    assert set(trained) <= set(seen)
