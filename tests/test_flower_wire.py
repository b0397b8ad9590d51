"""The server checks every reply before it changes the model: rows W1-W13 and F9 of the fault list."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable import inflatable_utils
from flwr.superlink.grid import http_grid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flower_harness import (
    OWN_MODEL,
    Deployment,
    Grid,
    bits,
    federation,
    run_job,
    run_simulation,
    without_waiting,
    write_model,
)
from flower_liar import TWICE, UNREADABLE, Recorder, fleet_client, replay, search_path
from flower_lies import BOMB, FALSE_CLAIMS, LIES, NO_ANSWER, REASONS, REPLAY, apply_lie
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


def schedule_lies(folder: Path, **lies: dict[int, str]) -> None:
    """Write each site's schedule of lies by round."""
    for site in SITES:
        (folder / "sites" / site / "lies.json").write_text(json.dumps(lies.get(site, {})))


def lying_grid(folder: Path, grid: type[Grid] = Grid) -> Grid:
    return grid(folder, lambda name, request, reply: apply_lie(folder / "sites" / name, request, reply))


def one_lie_per_round(lies: Sequence[str], start: int = 2) -> dict[int, str]:
    return dict(enumerate(lies, start))


def rejection_reasons(line: dict[str, Any], agent: str) -> str:
    """Return all reasons in a record for rejecting an agent's update."""
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
    """Return the rounds of a run in which b sends another false reply per round, with the sites in this process."""
    runtime = tmp_path_factory.mktemp("lies")
    folder = federation(runtime / "federation", SITES)
    schedule_lies(folder, b=one_lie_per_round(REFUSED))
    run_job(folder, config(len(REFUSED) + 2), runtime / "run", lying_grid(folder))
    return bits(runtime / "run")[1]


@pytest.mark.parametrize("lie", REFUSED)
def test_w1_to_w10_invalid_updates_get_weight_0(lie: str, record: list[dict[str, Any]]) -> None:
    """W1-W8, W10: an invalid update has weight 0, the record gives the reason, and Alice's update is used."""
    line = record[1 + REFUSED.index(lie)]
    assert line["weights"][B] == 0
    assert line["weights"][A] > 0
    assert REASONS[lie] in rejection_reasons(line, "agent 1")
    assert len(json.dumps(line)) < 4000
    assert all(line["norms"][i] < 1e6 for i in range(3))


def test_w1_from_alice(folder: Path, tmp_path: Path) -> None:
    """W1: if Alice's update is not finite, the round is repeated with other batches and the run continues."""
    schedule_lies(folder, a={2: "W1 NaN"})
    grid = lying_grid(folder)
    run_job(folder, config(3), tmp_path / "run", grid)
    tasks = [request.fields["tasks"][0] for name, request in grid.requests if "tasks" in request.fields and name == "a"]
    assert [(task["round"], task["attempt"]) for task in tasks] == [(1, 0), (2, 0), (2, 1), (3, 0), (0, 0)]
    assert bits(tmp_path / "run")[2]["status"] == "finished"


def test_w1_from_alice_three_times(folder: Path, tmp_path: Path) -> None:
    """W1: after three attempts without a finite update of Alice the run ends as diverged and keeps its last round."""

    def send_nan(name: str, request: Message, reply: Message) -> Message:
        if name != "a" or request.fields.get("tasks", [{}])[0].get("round") != 2:
            return reply
        return Message(reply.fields, {label: LIES["W1 NaN"][0](payload) for label, payload in reply.payloads.items()})

    run_job(folder, config(3), tmp_path / "run", Grid(folder, send_nan))
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "diverged"


@pytest.mark.parametrize("method", ["fedavg", "waffle-paper"])
def test_w7_guard_off(method: str, folder: Path, tmp_path: Path) -> None:
    """W7: with the guard off, zero and opposed updates are weighted as in the paper."""
    schedule_lies(folder, b={2: "W7 zeros", 3: "W7 opposed"})
    run_job(folder, config(3, method, guard="off"), tmp_path / "run", lying_grid(folder))
    rounds = bits(tmp_path / "run")[1]
    assert not any("screened" in line for line in rounds)
    assert rounds[1]["weights"][B] > 0
    assert rounds[1]["norms"][B] == 0


def test_w9_two_replies(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W9: if a restarted site answers twice, the first reply counts and the second is noted."""
    without_waiting(monkeypatch)

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

    run_job(folder, config(3), tmp_path / "run", Twice(folder))
    assert "b: a second reply in one round" in notes(folder)
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(config(3), tmp_path / "reference"))[:2]


@pytest.mark.parametrize("method", ["scaffold", "waffle-paper"])
def test_w10_w11_false_claims_change_no_bit(method: str, folder: Path, tmp_path: Path) -> None:
    """W10, W11: the server ignores claimed samples, steps, agent and `dc`, so no bit changes."""
    schedule_lies(folder, b=dict.fromkeys(range(1, 4), FALSE_CLAIMS))
    run_job(folder, config(3, method), tmp_path / "run", lying_grid(folder))
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(config(3, method), tmp_path / "reference"))[:2]


@pytest.mark.parametrize("method", ["waffle-paper", "scaffold", "fedavg", "ifca", "cfl", "fedamp", "apple"])
def test_w12_w13_only_alice_is_valid(method: str, folder: Path, tmp_path: Path) -> None:
    """W12, W13: if all other updates are rejected, Alice's weight is 1, a note is written, and the run continues."""
    schedule_lies(folder, b={2: "W1 NaN"}, c={2: "rubbish"})
    run_job(folder, config(3, method), tmp_path / "run", lying_grid(folder))
    rounds = bits(tmp_path / "run")[1]
    assert rounds[1]["weights"] == [1.0, 0.0, 0.0]
    assert sum(rounds[2]["weights"]) == pytest.approx(1)
    assert notes(folder).count("only Alice's own update was used, so this was a local step") == 1


def test_w12_all_others_offline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W12: with a quorum of 1 Alice continues alone while all others are offline."""
    without_waiting(monkeypatch)
    change(folder / "server.toml", deadline=60.0, quorum=1)

    def offline(name: str, request: Message, reply: Message) -> Message | None:
        return None if name != "a" and request.fields.get("tasks") else reply

    run_job(folder, config(2, "waffle-paper"), tmp_path / "run", Grid(folder, offline))
    assert [line["weights"] for line in bits(tmp_path / "run")[1]] == [[1.0, 0.0, 0.0]] * 2
    assert notes(folder).count("only Alice's own update was used") == 2


def test_a_reply_that_flower_cannot_read(folder: Path, tmp_path: Path) -> None:
    """A reply that Flower cannot read costs only its own site the round."""

    class Unreadable(Grid):
        def pull_messages(self, numbers: Sequence[str]) -> list[Any]:
            name, request = self.requests[int(numbers[0])]
            if name == "b" and request.fields.get("tasks", [{}])[0].get("round") == 2:
                raise KeyError("object_type")
            return super().pull_messages(numbers)

    run_job(folder, config(3), tmp_path / "run", Unreadable(folder))
    line = bits(tmp_path / "run")[1][1]
    assert line["weights"] == [0.5, 0.0, 0.5]
    assert line["refused"] == [["agent 1", "not a message that Flower can read (KeyError)"]]


def superlink_with_incomplete_reply() -> Any:
    """Return a stub SuperLink with one node that announced a reply and died."""
    node = SimpleNamespace(node_id=1, public_key=b"a", last_activated_at="")
    reply = SimpleNamespace(metadata=SimpleNamespace(message_id="2", reply_to_message_id="1"))
    pulled = SimpleNamespace(messages_list=[reply], message_object_trees=[ObjectTree(object_id="2")])
    return SimpleNamespace(
        _client=SimpleNamespace(),
        GetNodes=lambda request: SimpleNamespace(nodes=[node]),
        PushMessages=lambda request: SimpleNamespace(message_ids=["1"], objects_to_push=[], session_id=""),
        PushObject=None,  # the SuperLink requests no objects
        PullMessages=lambda request: pulled,
        PullObject=lambda request: SimpleNamespace(object_found=True, object_available=False),
    )


def test_a_reply_that_stops_half_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: a site that died while sending its reply delays the round until the deadline at most."""
    clock = without_waiting(monkeypatch)

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock.sleep(timeout or 0)
            return self.is_set()

    monkeypatch.setattr(inflatable_utils, "time", clock)
    monkeypatch.setattr(inflatable_utils, "threading", SimpleNamespace(Lock=threading.Lock, Event=Event))
    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)
    Grid(folder)  # sets the ids that Flower needs to create messages
    grid = http_grid.HttpGrid(token="token")
    grid._client, grid._run = superlink_with_incomplete_reply(), SimpleNamespace(run_id=1)  # type: ignore[assignment]
    channel = transport.Transport(grid, {b"a": "a"}, 1 << 20)
    assert list(channel.exchange({"a": lambda: Message({})}, "train", seconds=60.0, grace=900.0)) == []
    assert ("a", "Flower says: message unavailable") in channel.log
    assert clock.now < 70


def test_requests_are_repeated_while_the_superlink_is_down(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F5: requests that do not reach the SuperLink are repeated, and no bit changes."""
    clock = without_waiting(monkeypatch)
    change(folder / "server.toml", grace=1.0)

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
            clock.sleep(1.0)  # as long as `grace`: sites must still count as online while replies are fetched
            return super().pull_messages(numbers)

    run_job(folder, config(3), tmp_path / "run", Flaky(folder))
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(config(3), tmp_path / "reference"))[:2]


def test_f1_a_site_that_is_offline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: a round waits `grace` seconds for an offline site, not until the deadline; later rounds do not wait."""
    without_waiting(monkeypatch)
    change(folder / "server.toml", grace=40.0, deadline=600.0)
    grid = Grid(folder)

    def leave(name: str, request: Message, reply: Message) -> Message | None:
        if name == "b" and request.fields.get("tasks", [{}])[0].get("round") == 2:
            grid.offline = {"b"}
            return None
        return reply

    grid.intercept = leave
    run_job(folder, config(3), tmp_path / "run", grid)
    seconds = [line["seconds"] for line in read_rounds(tmp_path / "run" / "rounds.jsonl")]
    assert 40 <= seconds[0] < 50  # until round 1 is evaluated, with the messages of round 2
    assert seconds[1:] == [0, 0]
    assert [line.get("screened") for line in bits(tmp_path / "run")[1]] == [None, *2 * [{"agent 1": "absent"}]]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
ANYTHING = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
SCORE = st.fixed_dictionaries({}, optional={"finite": st.just(True) | PLAIN, **dict.fromkeys(SCORES, PLAIN)})
REPLY = st.fixed_dictionaries(
    {}, optional={"error": PLAIN, "lost": PLAIN, "score": SCORE | ANYTHING, "metrics": ANYTHING}
)


LINEAR = FlatModel(builder("linear", "digits", (1, 8, 8), 10), precision="float64")


def new_server_run() -> ServerRun:
    """Return a run of two sites before its first round."""
    algorithm = config(2).algorithm()
    plan = RunPlan("run", "course", algorithm, ("a", "b"), A, (8, 8), (1, 1), 2, 8, "standard", "0")
    return ServerRun(plan, LINEAR, initial_run_state(algorithm, LINEAR, 1, 2))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), REPLY, st.none() | st.binary()), max_size=6))
def test_a_round_accepts_any_json_reply(replies: list[tuple[int, dict[str, Any], bytes | None]]) -> None:
    """Any JSON in place of a site's reply is accepted, and the resulting record can be read and summarised."""
    server_run, lines = new_server_run(), []
    honest = seal(server_run._up, 0, server_run.collector.header, 1)
    for agent in (A, B):
        server_run.receive(agent, {}, honest)
    server_run.advance(1)
    assert server_run.pending
    for agent, words, payload in replies:
        server_run.receive(agent, words, payload)
        settled, _ = server_run.advance(1)
        lines += [settled.measured] if settled else []
    json.dumps([lines, summary(lines, "finished")], allow_nan=False)
    assert all(note.isprintable() and len(note) <= LONGEST_REASON for _, note in server_run.notes)


def test_w6_a_transfer_is_stopped_before_it_is_read() -> None:
    """W6: a transfer whose declared length exceeds the message limit is rejected by that length."""
    limit = transport.TransferLimit(left=100)
    limit(SimpleNamespace(headers={"content-length": "60"}))
    with pytest.raises(WaffleError, match="more bytes than any message of ours"):
        limit(SimpleNamespace(headers={"content-length": "60"}))
    with pytest.raises(WaffleError, match="more bytes than any message of ours"):
        transport.TransferLimit(piece=50)(SimpleNamespace(headers={"content-length": "60"}))


REAL = (
    *(
        FALSE_CLAIMS,
        TWICE,
        "W7 zeros",
        "W1 NaN",
        "W2 1e20",
        "W3 missing",
        "W4 broadcastable",
        "W5 float32",
        "W5 a pickle",
    ),
    *("W6 header bomb", "W6 too long", REPLAY, "W8 another model", "W10 steps", UNREADABLE),
)


HIDDEN = 8192
MODEL_BYTES = 8 * (64 * HIDDEN + HIDDEN + 10 * HIDDEN + 10)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Run the same against Flower's processes: b lies in every round, c in one, Alice in one."""
    runtime = tmp_path_factory.mktemp("real")
    folder, out = federation(runtime / "federation", SITES, deadline=300), runtime / "run"
    alone, retried = len(REAL) + 2, len(REAL) + 3
    schedule_lies(folder, a={retried: "W1 NaN"}, b=one_lie_per_round((*REAL, "W1 NaN")), c={alone: "rubbish"})
    flag_values = {**SETTINGS, "rounds": retried + 1, "model": OWN_MODEL}
    for site in SITES:
        change(folder / "sites" / site / "site.toml", imports=[OWN_MODEL], max_exposed=1.0)
    flags = [word for key, value in flag_values.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    deployment = Deployment(folder)
    lies = search_path(runtime / "lies")
    deployment.environment["PYTHONPATH"] = os.pathsep.join([lies, write_model(runtime / "network", HIDDEN)])
    with deployed(deployment):
        running = deployment.start_run("run", "scaffold", *flags, "--out", out)
        peaks: dict[int, int] = {}
        log = out / "rounds.jsonl"

        def ended() -> bool:
            done = log.read_bytes().count(b"\n") if log.exists() else 0
            if number := deployment.server_app():
                peaks[done] = peak_memory(number)
            return running.poll() is not None

        deployment.wait_until(ended, 60.0 * retried)
        del deployment.processes["run"]
    return SimpleNamespace(folder=folder, rounds=bits(out)[1], peaks=peaks, code=running.returncode, alone=alone)


def peak_memory(process: int) -> int:
    """Return the peak resident memory of a process in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


@pytest.mark.flower
@pytest.mark.parametrize("lie", REAL[2:])
def test_w1_to_w10_real(lie: str, real: SimpleNamespace) -> None:
    """W1-W8, W10 with real processes: an invalid update has weight 0 and a recorded reason, and the run finishes."""
    line = real.rounds[1 + REAL.index(lie)]
    assert line["weights"][B] == 0
    assert line["weights"][A] > 0
    assert REASONS.get(lie, "not a message that Flower can read") in rejection_reasons(line, "agent 1")
    assert real.code == 0


@pytest.mark.flower
def test_w6_memory_real(real: SimpleNamespace) -> None:
    """W6: a payload far above the limit costs the ServerApp less memory than two models per agent."""
    on_record = REAL.index("W6 too long")  # recorded rounds while the payload is in transit
    assert max(real.peaks.values()) - real.peaks[on_record - 1] < 2 * len(SITES) * MODEL_BYTES < BOMB


@pytest.mark.flower
def test_w9_f9_real(real: SimpleNamespace) -> None:
    """W9, F9: of two replies the first counts, and replaying its requests on another connection changes nothing."""
    line = real.rounds[1 + REAL.index(TWICE)]
    assert rejection_reasons(line, "agent 1") == ""
    assert line["weights"][B] == pytest.approx(1 / 3)
    assert json.loads((real.folder / "sites" / "b" / "replayed.json").read_text())
    assert "Failed to store Message reply" in (real.folder / "processes.log").read_text(errors="replace")


@pytest.mark.flower
def test_w10_w11_real(real: SimpleNamespace) -> None:
    """W10, W11: false claims and a `dc` change neither the acceptance of an update nor its weight."""
    line = real.rounds[1 + REAL.index(FALSE_CLAIMS)]
    assert rejection_reasons(line, "agent 1") == ""
    assert line["weights"][B] == pytest.approx(1 / 3)


@pytest.mark.flower
def test_w1_w12_w13_real(real: SimpleNamespace) -> None:
    """W12, W13: with all others rejected only Alice's update counts; W1: her own NaN costs one more attempt."""
    assert real.rounds[real.alone - 1]["weights"] == [1.0, 0.0, 0.0]
    assert "only Alice's own update was used, so this was a local step" in notes(real.folder)
    assert real.rounds[-1]["round"] == real.alone + 2
    assert all(sum(line["weights"]) == pytest.approx(1) for line in real.rounds)


@pytest.mark.flower
def test_f9_replayed_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F9: a recorded request is rejected after 305 seconds; F8: a stolen node id under another key is always rejected.

    Within 305 seconds Flower accepts a replay; a repeated heartbeat has no further effect.
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
            with fleet_client(site, recorder) as client:
                key = wire_form(folder / "keys" / f"{site.name}.pub")
                numbers[site] = client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30)).node_id
        beat = SendNodeHeartbeatRequest(node=Node(node_id=numbers[b]), heartbeat_interval=30)
        with fleet_client(b, recorder) as client:
            client.SendNodeHeartbeat(beat)
            fresh = recorder.requests[-1]
            monkeypatch.setattr(signing, "now", lambda: date.now() - timedelta(seconds=306))
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                client.SendNodeHeartbeat(beat)
            old = recorder.requests[-1]
        forged = httpx.Request(
            "POST",
            fresh.url,
            headers={k: v for k, v in fresh.headers.items() if k != "content-length"},
            content=SendNodeHeartbeatRequest(node=Node(node_id=numbers[a]), heartbeat_interval=30).SerializeToString(),
        )
        assert [replay(b, request) for request in (fresh, old, forged)] == [200, 401, 401]
    finally:
        deployment.close()
