"""What a site sends over Flower is checked before it touches the model: rows W1-W13, and F9, of the fault list."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.proto.message_pb2 import ObjectTree
from flwr.superlink.grid import http_grid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flower_harness import OWN_MODEL, Deployment, Grid, bits, conduct, federation, simulated, with_model
from flower_liar import TWICE, UNREADABLE, Recorder, fleet, replayed, search_path
from flower_lies import BOAST, BOMB, LIES, NO_ANSWER, REASONS, REPLAY, told
from waffle_fl.config import RunConfig, check_run
from waffle_fl.deploy.keys import wire_form
from waffle_fl.deploy.local_cluster import deployed
from waffle_fl.deploy.settings_files import change
from waffle_fl.engines.flower import transport
from waffle_fl.engines.flower.messages import SCORES, Message
from waffle_fl.engines.flower.server_run import RunPlan, ServerRun, initial_run_state
from waffle_fl.errors import WaffleError
from waffle_fl.models import FlatModel, builder
from waffle_fl.records import read_rounds, summary
from waffle_fl.update_encoding import LONGEST_REASON, seal

SITES = ("a", "b", "c")
A, B, C = range(3)
SETTINGS = {"data": "digits", "agents": 3, "samples_per_agent": 40, "batch_size": 16, "precision": "float64"}
REFUSED = (*LIES, REPLAY, NO_ANSWER)


def config(rounds: int, method: str = "scaffold", **settings: Any) -> RunConfig:
    given = {**SETTINGS, "rounds": rounds, "guard": "standard", "model": "mlp"}
    return check_run(method, {**given, **settings}, {})


def scheduled(folder: Path, **lies: dict[int, str]) -> None:
    """Tell each site how it is to lie, by round."""
    for site in SITES:
        (folder / "sites" / site / "lies.json").write_text(json.dumps(lies.get(site, {})))


def lying(folder: Path, grid: type[Grid] = Grid) -> Grid:
    return grid(folder, lambda name, request, reply: told(folder / "sites" / name, request, reply))


def one_each(lies: Sequence[str], start: int = 2) -> dict[int, str]:
    return dict(enumerate(lies, start))


def why(line: dict[str, Any], agent: str) -> str:
    """All that a record says about why an agent was not heard."""
    reasons = [reason for name, reason in line.get("refused", []) if name == agent]
    return "; ".join([*reasons, line.get("screened", {}).get(agent, "")])


def notes(folder: Path) -> str:
    (journal,) = (folder / "jobs").glob("*.log")
    return journal.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "federation", SITES)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rounds of a run in which b sends something else each round, its sites in this process."""
    runtime = tmp_path_factory.mktemp("lies")
    folder = federation(runtime / "federation", SITES)
    scheduled(folder, b=one_each(REFUSED))
    conduct(folder, config(len(REFUSED) + 2), runtime / "run", lying(folder))
    return bits(runtime / "run")[1]


@pytest.mark.parametrize("lie", REFUSED)
def test_w1_to_w10_cost_the_liar_its_round(lie: str, record: list[dict[str, Any]]) -> None:
    """W1-W8, W10: what is not an update of this round has weight 0, the record says why, and Alice is heard."""
    line = record[1 + REFUSED.index(lie)]
    assert line["weights"][B] == 0
    assert line["weights"][A] > 0
    assert REASONS[lie] in why(line, "agent 1")
    assert len(json.dumps(line)) < 4000
    assert all(line["norms"][i] < 1e6 for i in range(3))


def test_w1_from_alice(folder: Path, tmp_path: Path) -> None:
    """W1: what Alice sends is not finite: the round is asked for again, with other batches, and the run goes on."""
    scheduled(folder, a={2: "W1 NaN"})
    grid = lying(folder)
    conduct(folder, config(3), tmp_path / "run", grid)
    asked = [request.fields["tasks"][0] for name, request in grid.requests if "tasks" in request.fields and name == "a"]
    assert [(task["round"], task["attempt"]) for task in asked] == [(1, 0), (2, 0), (2, 1), (3, 0), (0, 0)]
    assert bits(tmp_path / "run")[2]["status"] == "finished"


def test_w1_from_alice_for_ever(folder: Path, tmp_path: Path) -> None:
    """W1: after three attempts without a finite update of Alice the run ends as diverged, its last round kept."""

    def never(name: str, request: Message, reply: Message) -> Message:
        if name != "a" or request.fields.get("tasks", [{}])[0].get("round") != 2:
            return reply
        return Message(reply.fields, {label: LIES["W1 NaN"][0](payload) for label, payload in reply.payloads.items()})

    conduct(folder, config(3), tmp_path / "run", Grid(folder, never))
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "diverged"


@pytest.mark.parametrize("method", ["fedavg", "waffle"])
def test_w7_guard_off(method: str, folder: Path, tmp_path: Path) -> None:
    """W7: with the guard off zeros and far updates are weighed as the paper weighs them."""
    scheduled(folder, b={2: "W7 zeros", 3: "W7 opposed"})
    conduct(folder, config(3, method, guard="off"), tmp_path / "run", lying(folder))
    rounds = bits(tmp_path / "run")[1]
    assert not any("screened" in line for line in rounds)
    assert rounds[1]["weights"][B] > 0
    assert rounds[1]["norms"][B] == 0


def test_w9_two_replies(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W9: a site that was asked twice, since it was restarted, answers twice: the first counts, the second is noted."""
    monkeypatch.setattr(transport, "PAUSE", 0.05)

    class Twice(Grid):
        def push_messages(self, messages: Sequence[Any]) -> list[str]:
            (number,) = super().push_messages(messages)
            name, request = self.requests[-1]
            if name == "b" and request.fields.get("tasks", [{}])[0].get("round") == 2:
                if self.nodes[B].last_activated_at:
                    self.replies |= self.held
                else:
                    self.nodes[B].last_activated_at, self.held = "again", {number: self.replies.pop(number)}
            return [number]

    conduct(folder, config(3), tmp_path / "run", Twice(folder))
    assert "b: a second reply in one round" in notes(folder)
    assert bits(tmp_path / "run")[:2] == bits(simulated(config(3), tmp_path / "twin"))[:2]


@pytest.mark.parametrize("method", ["scaffold", "waffle"])
def test_w10_w11_boasts_change_no_bit(method: str, folder: Path, tmp_path: Path) -> None:
    """W10, W11: what a reply says of samples, steps or its agent is not read, nor its `dc`: no bit changes."""
    scheduled(folder, b=dict.fromkeys(range(1, 4), BOAST))
    conduct(folder, config(3, method), tmp_path / "run", lying(folder))
    assert bits(tmp_path / "run")[:2] == bits(simulated(config(3, method), tmp_path / "twin"))[:2]


@pytest.mark.parametrize("method", ["waffle", "scaffold", "fedavg", "ifca", "cfl", "fedamp", "apple"])
def test_w12_w13_nobody_but_alice(method: str, folder: Path, tmp_path: Path) -> None:
    """W12, W13: when all others are refused Alice's weight is 1, a local step; that is noted, and the run goes on."""
    scheduled(folder, b={2: "W1 NaN"}, c={2: "rubbish"})
    conduct(folder, config(3, method), tmp_path / "run", lying(folder))
    rounds = bits(tmp_path / "run")[1]
    assert rounds[1]["weights"] == [1.0, 0.0, 0.0]
    assert sum(rounds[2]["weights"]) == pytest.approx(1)
    assert notes(folder).count("only Alice's own update was used, so this was a local step") == 1


def test_w12_everybody_gone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W12: with a quorum of 1 Alice goes on alone while all others are gone."""
    monkeypatch.setattr(transport, "PAUSE", 0.05)
    change(folder / "server.toml", deadline=0.5, quorum=1)

    def gone(name: str, request: Message, reply: Message) -> Message | None:
        return None if name != "a" and request.fields.get("tasks") else reply

    conduct(folder, config(2, "waffle"), tmp_path / "run", Grid(folder, gone))
    assert [line["weights"] for line in bits(tmp_path / "run")[1]] == [[1.0, 0.0, 0.0]] * 2
    assert notes(folder).count("only Alice's own update was used") == 2


def test_a_reply_that_flower_cannot_read(folder: Path, tmp_path: Path) -> None:
    """A reply on which Flower itself fails costs its site the round, and no other site anything."""

    class Unreadable(Grid):
        def pull_messages(self, numbers: Sequence[str]) -> list[Any]:
            name, request = self.requests[int(numbers[0])]
            if name == "b" and request.fields.get("tasks", [{}])[0].get("round") == 2:
                raise KeyError("object_type")
            return super().pull_messages(numbers)

    conduct(folder, config(3), tmp_path / "run", Unreadable(folder))
    line = bits(tmp_path / "run")[1][1]
    assert line["weights"] == [0.5, 0.0, 0.5]
    assert line["refused"] == [["agent 1", "not a message that Flower can read (KeyError)"]]


def half_replied() -> Any:
    """What Flower's grid talks to: a SuperLink with one node, that has announced a reply and died."""
    node = SimpleNamespace(node_id=1, public_key=b"a", last_activated_at="")
    reply = SimpleNamespace(metadata=SimpleNamespace(message_id="2", reply_to_message_id="1"))
    pulled = SimpleNamespace(messages_list=[reply], message_object_trees=[ObjectTree(object_id="2")])
    return SimpleNamespace(
        _client=SimpleNamespace(),
        GetNodes=lambda request: SimpleNamespace(nodes=[node]),
        PushMessages=lambda request: SimpleNamespace(message_ids=["1"], objects_to_push=[], session_id=""),
        PushObject=None,  # nothing is wanted of what is sent
        PullMessages=lambda request: pulled,
        PullObject=lambda request: SimpleNamespace(object_found=True, object_available=False),
    )


def test_a_reply_that_stops_half_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: a site that died while it sent its reply holds the round until the deadline at most."""
    monkeypatch.setattr(transport, "PAUSE", 0.05)
    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)
    Grid(folder)  # lets messages be made in this process
    grid = http_grid.HttpGrid(token="token")
    grid._client, grid._run = half_replied(), SimpleNamespace(run_id=1)  # type: ignore[assignment]
    office = transport.Transport(grid, {b"a": "a"}, 1 << 20)
    assert list(office.exchange({"a": lambda: Message({})}, "train", seconds=1.0, grace=9.0)) == []
    assert ("a", "Flower says: message unavailable") in office.log


def test_a_superlink_that_is_away_for_a_while(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F5: requests that do not reach the SuperLink are made again, and no bit changes."""
    monkeypatch.setattr(transport, "PAUSE", 0.01)
    change(folder / "server.toml", grace=0.1)

    class Flaky(Grid):
        calls = 0

        def reached(self) -> None:
            self.calls += 1
            if self.calls % 3 == 0:
                raise httpx.ConnectError("refused")

        def get_nodes(self) -> list[Any]:
            self.reached()
            return super().get_nodes()

        def push_messages(self, messages: Sequence[Any]) -> list[str]:
            self.reached()
            return super().push_messages(messages)

        def pull_messages(self, numbers: Sequence[str]) -> list[Any]:
            self.reached()
            time.sleep(0.1)  # as long as `grace`: who was online at the last look is not gone while we fetch
            return super().pull_messages(numbers)

    conduct(folder, config(3), tmp_path / "run", Flaky(folder))
    assert bits(tmp_path / "run")[:2] == bits(simulated(config(3), tmp_path / "twin"))[:2]


def test_f1_a_site_that_is_offline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: a round waits `grace` seconds for a site that is offline, not the whole deadline; the next rounds do not."""
    monkeypatch.setattr(transport, "PAUSE", 0.05)
    change(folder / "server.toml", grace=4.0, deadline=600.0)
    grid = Grid(folder)

    def leave(name: str, request: Message, reply: Message) -> Message | None:
        if name == "b" and request.fields.get("tasks", [{}])[0].get("round") == 2:
            grid.gone = {"b"}
            return None
        return reply

    grid.post = leave
    conduct(folder, config(3), tmp_path / "run", grid)
    seconds = [line["seconds"] for line in read_rounds(tmp_path / "run" / "rounds.jsonl")]
    assert 4 < max(seconds) < 60
    assert seconds[-1] < 4
    assert [line.get("screened") for line in bits(tmp_path / "run")[1]] == [None, *2 * [{"agent 1": "absent"}]]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
ANYTHING = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
SCORE = st.fixed_dictionaries({}, optional={"finite": st.just(True) | PLAIN, **dict.fromkeys(SCORES, PLAIN)})
SAID = st.fixed_dictionaries(
    {}, optional={"error": PLAIN, "lost": PLAIN, "score": SCORE | ANYTHING, "metrics": ANYTHING}
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), SAID, st.none() | st.binary()), max_size=6))
def test_a_round_survives_whatever_is_said(said: list[tuple[int, dict[str, Any], bytes | None]]) -> None:
    """Any JSON in place of what sites say of a round is heard, and what is recorded of it can be read and summed up."""
    model = FlatModel(builder("linear", "digits", (1, 8, 8), 10), precision="float64")
    algorithm = config(2).algorithm()
    plan = RunPlan("run", "course", algorithm, ("a", "b"), A, (8, 8), (1, 1), 2, 8, "standard", "0")
    server_run, lines = ServerRun(plan, model, initial_run_state(algorithm, model, 1, 2)), []
    honest = seal(server_run._up, 0, server_run.collector.envelope, 1)
    for agent in (A, B):
        server_run.receive(agent, {}, honest)
    server_run.advance(1)
    assert server_run.pending
    for agent, words, payload in said:
        server_run.receive(agent, words, payload)
        settled, _ = server_run.advance(1)
        lines += [settled.measured] if settled else []
    json.dumps([lines, summary(lines, "finished")], allow_nan=False)
    assert all(note.isprintable() and len(note) <= LONGEST_REASON for _, note in server_run.notes)


def test_w6_a_transfer_is_stopped_before_it_is_read() -> None:
    """W6: what announces more bytes than a message may have is refused by its announcement."""
    scale = transport.TransferLimit(left=100)
    scale(SimpleNamespace(headers={"content-length": "60"}))
    with pytest.raises(WaffleError, match="more bytes than any message of ours"):
        scale(SimpleNamespace(headers={"content-length": "60"}))
    with pytest.raises(WaffleError, match="more bytes than any message of ours"):
        transport.TransferLimit(piece=50)(SimpleNamespace(headers={"content-length": "60"}))


REAL = (
    *(BOAST, TWICE, "W7 zeros", "W1 NaN", "W2 1e20", "W3 missing", "W4 broadcastable", "W5 float32", "W5 a pickle"),
    *("W6 header bomb", "W6 too long", REPLAY, "W8 another model", "W10 steps", UNREADABLE),
)


HIDDEN = 8192
MODEL_BYTES = 8 * (64 * HIDDEN + HIDDEN + 10 * HIDDEN + 10)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same against Flower's own processes: b lies each round, c joins it in one, Alice once."""
    runtime = tmp_path_factory.mktemp("real")
    folder, out = federation(runtime / "federation", SITES, deadline=300), runtime / "run"
    alone, retried = len(REAL) + 2, len(REAL) + 3
    scheduled(folder, a={retried: "W1 NaN"}, b=one_each((*REAL, "W1 NaN")), c={alone: "rubbish"})
    wanted = {**SETTINGS, "rounds": retried + 1, "model": OWN_MODEL}
    for site in SITES:
        change(folder / "sites" / site / "site.toml", imports=[OWN_MODEL], max_exposed=1.0)
    flags = [word for key, value in wanted.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    deployment = Deployment(folder)
    lies = search_path(runtime / "lies")
    deployment.environment["PYTHONPATH"] = os.pathsep.join([lies, with_model(runtime / "network", HIDDEN)])
    with deployed(deployment):
        running = deployment.start_run("run", "scaffold", *flags, "--out", out)
        peaks: dict[int, int] = {}
        log = out / "rounds.jsonl"

        def ended() -> bool:
            done = log.read_bytes().count(b"\n") if log.exists() else 0
            if number := deployment.server_app():
                peaks[done] = memory(number)
            return running.poll() is not None

        deployment.wait_until(ended, 60.0 * retried)
        del deployment.processes["run"]
    return SimpleNamespace(folder=folder, rounds=bits(out)[1], peaks=peaks, code=running.returncode, alone=alone)


def memory(process: int) -> int:
    """The most bytes that a process has held at once."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


@pytest.mark.flower
@pytest.mark.parametrize("lie", REAL[2:])
def test_w1_to_w10_real(lie: str, real: SimpleNamespace) -> None:
    """W1-W8, W10, against real processes: the liar's weight is 0, the record says why, and the run finishes."""
    line = real.rounds[1 + REAL.index(lie)]
    assert line["weights"][B] == 0
    assert line["weights"][A] > 0
    assert REASONS.get(lie, "not a message that Flower can read") in why(line, "agent 1")
    assert real.code == 0


@pytest.mark.flower
def test_w6_memory_real(real: SimpleNamespace) -> None:
    """W6: a payload that is far too long costs the ServerApp less memory than two models for each agent."""
    on_record = REAL.index("W6 too long")  # rounds, while the bomb is on its way
    assert max(real.peaks.values()) - real.peaks[on_record - 1] < 2 * len(SITES) * MODEL_BYTES < BOMB


@pytest.mark.flower
def test_w9_f9_real(real: SimpleNamespace) -> None:
    """W9, F9: of two replies the first counts; its requests, replayed on another connection at once, change nothing."""
    line = real.rounds[1 + REAL.index(TWICE)]
    assert why(line, "agent 1") == ""
    assert line["weights"][B] == pytest.approx(1 / 3)
    assert json.loads((real.folder / "sites" / "b" / "replayed.json").read_text())
    assert "Failed to store Message reply" in (real.folder / "processes.log").read_text(errors="replace")


@pytest.mark.flower
def test_w10_w11_real(real: SimpleNamespace) -> None:
    """W10, W11: boasts and a `dc` change neither whether an agent is heard nor its weight."""
    line = real.rounds[1 + REAL.index(BOAST)]
    assert why(line, "agent 1") == ""
    assert line["weights"][B] == pytest.approx(1 / 3)


@pytest.mark.flower
def test_w1_w12_w13_real(real: SimpleNamespace) -> None:
    """W12, W13: with all others refused the round is Alice's; W1: her own NaN costs one more attempt."""
    assert real.rounds[real.alone - 1]["weights"] == [1.0, 0.0, 0.0]
    assert "only Alice's own update was used, so this was a local step" in notes(real.folder)
    assert real.rounds[-1]["round"] == real.alone + 2
    assert all(sum(line["weights"]) == pytest.approx(1) for line in real.rounds)


@pytest.mark.flower
def test_f9_replayed_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F9: a recorded request is refused after 305 seconds; F8: a stolen node's number, under another key, at any time.

    Within 305 seconds Flower takes it again. A heartbeat says twice what was said once.
    """
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore import date
    from flwr.supernode import node_auth_http_interceptor as signing

    a, b = folder / "sites" / "a", folder / "sites" / "b"
    deployment = Deployment(folder)
    try:
        deployment.start_server()
        numbers = {}
        for site in (a, b):
            recorder = Recorder()
            with fleet(site, recorder) as client:
                key = wire_form(folder / "keys" / f"{site.name}.pub")
                numbers[site] = client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30)).node_id
        beat = SendNodeHeartbeatRequest(node=Node(node_id=numbers[b]), heartbeat_interval=30)
        with fleet(b, recorder) as client:
            client.SendNodeHeartbeat(beat)
            fresh = recorder.requests[-1]
            monkeypatch.setattr(signing, "now", lambda: date.now() - timedelta(seconds=306))
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                client.SendNodeHeartbeat(beat)
            old = recorder.requests[-1]
        stolen = httpx.Request(
            "POST",
            fresh.url,
            headers={k: v for k, v in fresh.headers.items() if k != "content-length"},
            content=SendNodeHeartbeatRequest(node=Node(node_id=numbers[a]), heartbeat_interval=30).SerializeToString(),
        )
        assert [replayed(b, request) for request in (fresh, old, stolen)] == [200, 401, 401]
    finally:
        deployment.close()
