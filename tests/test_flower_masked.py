"""Private rounds at real sites: the simulator's bits, with faults and lies; the server receives uniform bytes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("flwr")

from flower_harness import Grid, bits, federation, run_job, run_simulation, small_config, without_waiting
from waffle_fl.config import RunConfig, check_run
from waffle_fl.deploy import privacy_budget, server_app
from waffle_fl.deploy.introductions import PEERS
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.overview import lines_of, overview
from waffle_fl.deploy.preflight import check_deployable, findings
from waffle_fl.deploy.server_app import JobRunner
from waffle_fl.deploy.settings_files import change, read_server
from waffle_fl.deploy.signing import OPERATOR_KEY, load_operator_key, sign
from waffle_fl.deploy.site import Site
from waffle_fl.engines import masked_parts, masked_round
from waffle_fl.engines.flower import masked_server_run
from waffle_fl.engines.flower.masked_messages import FirstRequest
from waffle_fl.engines.flower.messages import Message, packed, unpacked
from waffle_fl.engines.flower.server_run import initial_run_state
from waffle_fl.engines.flower.site_trainer import SiteTrainer
from waffle_fl.errors import WaffleError
from waffle_fl.privacy.messages import DealerWord, MaskedSums
from waffle_fl.privacy.phases import REPLIES, REQUESTS, OpenReply, Revealed, SketchReply, SumReply, SumRequest
from waffle_fl.privacy.wire import read, written
from waffle_fl.randomness import noise

SITES = ("a", "b", "c", "d", "e")
Intercept = Callable[[str, Message, Message], Message | None]


def config(
    rounds: int = 2, method: str = "waffle-paper", options: dict[str, Any] | None = None, **settings: Any
) -> RunConfig:
    """Return the config of a masked run of five sites."""
    given = {
        **dataclasses.asdict(small_config(rounds).settings),
        "agents": 5,
        "privacy": "masked",
        "guard": "off",
        **settings,
    }
    return check_run(method, given, options or {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "federation", SITES, deadline=5.0, grace=5.0, retries=1)


def simulated(run: RunConfig, tmp_path: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
    return bits(run_simulation(run, tmp_path / "reference"))


def phase_of(request: Message) -> str:
    return str(request.fields.get("tasks", [{}])[0].get("phase", ""))


def reply_of(request: Message, reply: Message) -> Any:
    """Return what the server reads of a reply in a phase of a private round."""
    (payload,) = reply.payloads.values()
    return read(payload, REPLIES[REQUESTS[phase_of(request)]])


def ledger_of(folder: Path, site: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sites" / site / "ledger.jsonl").read_text().splitlines()]


RUNS: dict[str, RunConfig] = {
    "guard": config(3, guard="standard"),
    "alone at the end": config(5, options={"omega": "constant(1)", "psi": "step(0.4)"}),
    "directions with a dealer": config(
        2, options={"compared": "directions"}, masked_distances="dealer", sketch_size=16
    ),
    "weight erosion": config(2, "weight-erosion"),
    "scaffold": config(2, "scaffold"),
    "fedavg, a cohort": config(2, "fedavg", participation=0.8),
    "a floor": config(3, options={"omega": "constant(1)", "psi": "constant(0.6)"}, min_contributors=4.5),
    "local": config(2, "local"),
}


@pytest.mark.parametrize("name", RUNS)
def test_deployments_have_the_simulator_s_bits(name: str, folder: Path, tmp_path: Path) -> None:
    """Models and records of masked runs are those of the simulator, to the last bit."""
    run_job(folder, RUNS[name], tmp_path / "run")
    model, rounds, result = bits(tmp_path / "run")
    reference = simulated(RUNS[name], tmp_path)
    assert rounds == reference[1]
    assert model == reference[0]
    assert result["metrics"] == reference[2]["metrics"]
    if name == "alone at the end":
        assert [line["contributors"] == 1 for line in rounds] == [False, False, False, True, True]


def test_another_alice_gets_no_sum_of_the_same_updates(folder: Path, tmp_path: Path) -> None:
    """The first updates of two runs for two Alices are equal: the second run trains on other batches.

    Its sums have other weights, and as many sums as agents would give every update.
    """
    for alice in ("0", "1", "1"):
        out = tmp_path / f"run-{alice}-{len(list(tmp_path.iterdir()))}"
        grid = Grid(folder)
        run_job(folder, config(1, alice=alice), out, grid)
        attempts = [r.fields["tasks"][0]["attempt"] for n, r in grid.requests if n == "b" and phase_of(r) == "open"]
        assert attempts == ([0] if alice == "0" else [0, 1])


def test_the_status_has_the_effective_contributors(folder: Path, tmp_path: Path) -> None:
    """`waffle deploy status` shows the effective number of contributors of a masked job's last round."""
    run_job(folder, config(1), tmp_path / "run")
    line = f"  effective contributors for a: {bits(tmp_path / 'run')[1][0]['contributors']:.2f}"
    assert line in [*lines_of(overview(folder))]


def test_masks_and_noise(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the simulator's noise, masked and noised runs have its bits; each site is charged once per round."""
    pytest.importorskip("dp_accounting")
    monkeypatch.setattr(privacy_budget, "SecretDraws", lambda secret, question: noise)
    more: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-3, "noise_multipliers": (1.0,)}
    run = config(2, privacy="masked+dp", **more)
    run_job(folder, run, tmp_path / "run")
    assert bits(tmp_path / "run")[:2] == simulated(run, tmp_path)[:2]
    assert len([line for line in ledger_of(folder, "b") if "released" in line]) == 2


def test_the_server_receives_uniform_bytes(folder: Path, tmp_path: Path) -> None:
    """All that depends on updates in the replies of a whole run is uniform; the ledger names phases, no tensors."""
    received: dict[str, bytes] = {}

    def listen(name: str, request: Message, reply: Message) -> Message:
        if phase := phase_of(request):
            one, content = reply_of(request, reply), received.get(phase, b"")
            if isinstance(one, OpenReply):
                assert (one.length, one.pull, one.code) == (0.0, 0.0, 0)
                content += b"".join(o.salt + o.sealed_seeds + b"".join(o.shares.values()) for o in one.openings)
            elif isinstance(one, SketchReply):
                content += b"".join(s.content for some in one.sketches.values() for s in some)
            elif isinstance(one, SumReply):
                content += b"".join(s.words.tobytes() for s in one.sums)
            else:
                assert isinstance(one, Revealed)
            received[phase] = content
        return reply

    run_job(folder, config(2), tmp_path / "run", Grid(folder, listen))
    assert received.keys() == {"open", "compare", "sum", "reveal"}
    for phase in ("open", "compare", "sum"):
        data = np.frombuffer(received[phase], dtype=np.uint8)
        assert len(data) > 256 * 20
        assert 1e-6 < stats.chisquare(np.bincount(data, minlength=256)).pvalue < 1 - 1e-6
    sent = [line["update"] for line in ledger_of(folder, "b") if "update" in line]
    assert [update["masked"]["phase"] for update in sent] == ["open", "compare", "sum", "reveal"] * 2
    assert not any("tensors" in update for update in sent)


def test_the_same_update_twice_gives_unrelated_messages(folder: Path, tmp_path: Path) -> None:
    """A site that is asked for the same round in two sessions sends other bytes; in one session the same ones."""
    grid = Grid(folder)
    run_job(folder, config(1), tmp_path / "run", grid)
    before = [(request, phase_of(request)) for name, request in grid.requests if name == "b" and phase_of(request)]
    site = Site(folder / "sites" / "b")

    def answer(request: Message, session: int, first: bool = False) -> Message:
        tasks = [{**request.fields["tasks"][0], "session": session}]
        with site.ledger.alone():
            return site.respond(Message({**request.fields, "tasks": tasks}, request.payloads), "again")

    session = before[0][0].fields["tasks"][0]["session"]
    for request, phase in before:
        assert list(answer(request, session).payloads.values()), phase  # the same request has the same reply
    again = {phase: answer(request, session).payloads for request, phase in before}
    assert again == {phase: answer(request, session).payloads for request, phase in before}
    other = {phase: answer(request, session + 1) for request, phase in before[:1]}
    assert other["open"].payloads != again["open"]
    error = answer(before[0][0], session).fields["courses"].popitem()[1]["error"]
    assert "a session of masks that was never used" in error
    error = answer(before[2][0], session).fields["courses"].popitem()[1]["error"]
    assert "takes no part in this session" in error
    error = answer(before[2][0], session + 1).fields["courses"].popitem()[1]["error"]
    assert "first" in error  # a sum before the shares


@pytest.mark.parametrize("agents", [4, 5])
@pytest.mark.parametrize("phase", ["open", "compare", "sum", "reveal"])
def test_a_site_may_drop_out_in_any_phase(
    phase: str, agents: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four or five sites may not reply: the round goes on without it, and afterwards it takes part again."""
    without_waiting(monkeypatch)
    folder = federation(tmp_path / "federation", SITES[:agents], deadline=5.0, grace=5.0, retries=1)
    lost = []

    def lose(name: str, request: Message, reply: Message) -> Message | None:
        if name == "c" and phase_of(request) == phase and not lost:
            lost.append(request)
            return None
        return reply

    run_job(folder, config(2, agents=agents), tmp_path / "run", Grid(folder, lose))
    _, rounds, result = bits(tmp_path / "run")
    assert result["status"] == "finished"
    assert rounds[0].get("screened", {}) == ({} if phase == "reveal" else {"agent 2": "absent"})
    assert (rounds[0]["weights"][2] == 0) == (phase != "reveal")
    assert "screened" not in rounds[1]


def test_with_too_few_sites_nothing_is_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without two of five sums the round begins again, with other masks, and the job then stops with one line."""
    without_waiting(monkeypatch)

    def lose(name: str, request: Message, reply: Message) -> Message | None:
        return None if name in ("c", "d") and phase_of(request) == "sum" else reply

    grid = Grid(folder, lose)
    with pytest.raises(WaffleError, match="unreachable in round 1"):
        run_job(folder, config(), tmp_path / "run", grid)
    assert "reveal" not in {phase_of(request) for _, request in grid.requests}
    grid.intercept = lambda name, request, reply: reply
    JobRunner(folder, Job.open(folder, "run"), grid).run_all()
    assert bits(tmp_path / "run")[:2] == simulated(config(), tmp_path)[:2]


@pytest.mark.parametrize("phase", ["open", "compare", "sum", "reveal"])
def test_a_restarted_server_ends_in_the_same_bits(phase: str, folder: Path, tmp_path: Path) -> None:
    """A server that dies in any phase begins the round again, with a new session."""

    def die(name: str, request: Message, reply: Message) -> Message:
        if name == "d" and phase_of(request) == phase and request.fields["tasks"][0]["base"] != [0, 0]:
            raise KeyboardInterrupt
        return reply

    run, grid = config(3), Grid(folder, die)
    with pytest.raises(KeyboardInterrupt):
        run_job(folder, run, tmp_path / "run", grid)
    seen = sessions(grid)
    JobRunner(folder, Job.open(folder, "run"), Grid(folder)).run_all()
    assert bits(tmp_path / "run")[:2] == simulated(run, tmp_path)[:2]
    assert len(seen) == len(set(seen)) == 2


def sessions(grid: Grid) -> list[int]:
    return [r.fields["tasks"][0]["session"] for name, r in grid.requests if name == "b" and phase_of(r) == "open"]


def test_for_one_update_sites_help_to_read_one_sum(folder: Path, tmp_path: Path) -> None:
    """A server that begins a round again after it has read its sum, with other agents, gets no second sum of it."""
    dead = []

    def die(name: str, request: Message, reply: Message) -> Message:
        if name == "e" and phase_of(request) == "reveal" and not dead:
            dead.append(name)
            raise KeyboardInterrupt
        return reply

    grid = Grid(folder, die)
    with pytest.raises(KeyboardInterrupt):
        run_job(folder, config(1), tmp_path / "run", grid)
    grid.offline = {"e"}
    change(folder / "server.toml", deadline=0.5, grace=0.5, start_timeout=0.5)
    JobRunner(folder, Job.open(folder, "run"), grid).run_all()
    _, rounds, result = bits(tmp_path / "run")
    assert result["status"] == "finished"
    assert ["agent 4" in line.get("screened", {}) for line in rounds] == [True]
    refused = [reason for _, reason in rounds[0]["refused"]]
    assert any("already helped to read another sum" in reason for reason in refused)
    attempts = [r.fields["tasks"][0]["attempt"] for n, r in grid.requests if n == "b" and phase_of(r) == "open"]
    assert attempts == [0, 0, 1]  # other batches, so other updates


def test_a_site_deals_for_its_own_pairs_only(folder: Path, tmp_path: Path) -> None:
    """A site that also sends a dealer's word for another pair does not change the distance of that pair."""

    def lie(name: str, request: Message, reply: Message) -> Message:
        if name == "d" and phase_of(request) == "deal":
            one = reply_of(request, reply)
            (label,) = reply.payloads
            words = (*one.words, *(DealerWord(3, i, np.ones(1, np.uint64)) for i in (1, 4)))
            return dataclasses.replace(reply, payloads={label: written(dataclasses.replace(one, words=words))})
        return reply

    run = RUNS["directions with a dealer"]
    run_job(folder, run, tmp_path / "run", Grid(folder, lie))
    assert bits(tmp_path / "run")[0] == simulated(run, tmp_path)[0]


def test_a_site_that_lies_about_its_mask_is_noticed(folder: Path, tmp_path: Path) -> None:
    """A false sum spoils its round, which begins again; after three the job stops, and nothing was read."""

    def lie(name: str, request: Message, reply: Message) -> Message:
        if name == "d" and phase_of(request) == "sum":
            one = reply_of(request, reply)
            (label,) = reply.payloads
            words = one.sums[0].words + np.uint32(1)
            return dataclasses.replace(reply, payloads={label: written(SumReply((MaskedSums(3, words),)))})
        return reply

    grid = Grid(folder, lie)
    with pytest.raises(WaffleError, match="round 1 was rejected 3 times: the masks of round 1 do not cancel"):
        run_job(folder, config(), tmp_path / "run", grid)
    assert len(set(sessions(grid))) == 3
    assert "begins again, with other masks" in (folder / "jobs" / "run.log").read_text()


@pytest.mark.parametrize(
    ("phase", "payload"),
    [
        ("open", b"no message"),
        ("open", written(OpenReply(0, 0.0, 0.0, 1.0, (), ()))),
        ("open", written(OpenReply(77, 0.0, 0.0, 1.0, (), ()))),
        ("compare", written(SketchReply({"dy": ()}))),
        ("sum", written(SumReply((MaskedSums(3, np.zeros(7, np.uint32)),)))),
        ("sum", written(SumReply((MaskedSums(1, np.zeros(7, np.uint32)),)))),
        ("reveal", written(Revealed(3, {0: b"short"}, {}))),
    ],
)
def test_malformed_replies_are_dropouts(phase: str, payload: bytes, folder: Path, tmp_path: Path) -> None:
    """A reply that an honest site would not send is not used, and harms no other agent."""

    def lie(name: str, request: Message, reply: Message) -> Message:
        if name == "d" and phase_of(request) == phase:
            return dataclasses.replace(reply, payloads=dict.fromkeys(reply.payloads, payload))
        return reply

    run_job(folder, config(1), tmp_path / "run", Grid(folder, lie))
    _, rounds, result = bits(tmp_path / "run")
    assert result["status"] == "finished"
    assert (rounds[0]["weights"][3] == 0) == (phase != "reveal")


def test_a_server_that_lies_about_the_weights_reads_nothing(folder: Path, tmp_path: Path) -> None:
    """Sites refuse a sum with fewer effective contributors than their floor, whatever the server says to whom."""
    for name in SITES:
        change(folder / "sites" / name / "site.toml", min_contributors=2.0)
    grid = Grid(folder)
    run_job(folder, config(1), tmp_path / "run", grid)
    request = next(r for n, r in grid.requests if n == "b" and phase_of(r) == "sum")
    opened = next(r for n, r in grid.requests if n == "b" and phase_of(r) == "open")
    compare = next(r for n, r in grid.requests if n == "b" and phase_of(r) == "compare")
    ((label, payload),) = request.payloads.items()
    honest = read(payload, SumRequest)
    tables = {
        part: {i: 1 - 1e-6 if i == 1 else 1e-7 for i in table} for part, table in honest.announced.weights.items()
    }
    lie = SumRequest(dataclasses.replace(honest.announced, weights=tables), (), False)
    site, session = Site(folder / "sites" / "b"), opened.fields["tasks"][0]["session"]

    def answer(request: Message, session: int, payload: bytes) -> dict[str, Any]:
        tasks = [{**request.fields["tasks"][0], "session": session}]
        with site.ledger.alone():
            reply = site.respond(Message({**request.fields, "tasks": tasks}, {label: payload}), "lie")
        return dict(reply.fields["courses"][label])

    assert "another request of the phase sum" in answer(request, session, written(lie))["error"]
    assert not answer(opened, session + 1, opened.payloads[label])
    assert "own salt" in answer(compare, session + 1, compare.payloads[label])["error"]  # of the earlier session


def test_floors_of_sites(folder: Path, tmp_path: Path) -> None:
    """A site with a floor loses its weight below it, and takes no part in runs without masks."""
    change(folder / "sites" / "b" / "site.toml", min_contributors=5.0)
    settings: dict[str, Any] = {"options": {"omega": "constant(1)", "psi": "constant(0.9)"}}
    run_job(folder, config(3, **settings), tmp_path / "run")
    _, rounds, _ = bits(tmp_path / "run")
    free = simulated(config(3, **settings), tmp_path)[1]
    assert all(line["weights"][1] > 0 for line in free)
    assert [line["weights"][1] for line in rounds] == [0, 0, 0]
    assert all(line["contributors"] <= 4 for line in rounds)
    run_job(folder, config(1, privacy="off", seed=1), tmp_path / "clear")
    assert "sends sums of at least 5 contributors only" in str(bits(tmp_path / "clear")[1][0]["refused"])


def test_a_floor_of_alice_ends_the_run_before_she_is_alone(folder: Path, tmp_path: Path) -> None:
    """Alice's site does not send an update that no other one hides; the model of the last round is the result."""
    change(folder / "sites" / "a" / "site.toml", min_contributors=1.5)
    run = config(6, options={"omega": "constant(1)", "psi": "step(0.4)"})
    grid = Grid(folder)
    run_job(folder, run, tmp_path / "run", grid)
    _, rounds, result = bits(tmp_path / "run")
    assert result["status"] == "finished"
    assert 1 <= len(rounds) < 6
    assert all(line["contributors"] >= 1.5 for line in rounds)
    assert "accuracy" in result["metrics"]
    assert any("the run ends with the model of the last round" in str(line["said"]) for line in ledger_of(folder, "a"))


def test_once_alice_holds_all_weight_no_other_site_sends(folder: Path, tmp_path: Path) -> None:
    """Then only Alice gets requests, and only she sends an update."""
    grid = Grid(folder)
    run_job(folder, RUNS["alone at the end"], tmp_path / "run", grid)
    alone = [name for name, request in grid.requests if phase_of(request) == "alone"]
    assert set(alone) == {"a"}
    assert len(alone) == 2
    last = [name for name, request in grid.requests if request.fields.get("tasks", [{}])[0].get("base") == [4, 0]]
    assert set(last) == {"a"}


def test_keys_of_unknown_sites_are_refused(folder: Path, tmp_path: Path) -> None:
    """A key that is not signed by the site that the others know, or a site that they do not know, ends the run."""
    names = read_server(folder).sites
    peers = {name: folder / "sites" / name / PEERS for name in names}
    assert dict(findings_of(folder / "sites" / "a"))["e"]
    true = peers["a"].read_text()
    for path in peers.values():
        path.write_text("".join(line for line in true.splitlines(keepends=True) if not line.startswith("d ")))
    with pytest.raises(WaffleError, match="lacks d: ask the operator"):
        run_job(folder, config(1, seed=3), tmp_path / "lacking")
    swapped = [line.split() for line in true.splitlines()]
    swapped[2][1:], swapped[3][1:] = swapped[3][1:], swapped[2][1:]
    for path in peers.values():
        path.write_text("\n".join(" ".join(line) for line in swapped))
    with pytest.raises(WaffleError, match="is not signed by its site"):
        run_job(folder, config(1, seed=3), tmp_path / "swapped")
    peers["a"].write_text("a key\n")
    assert not next(iter(findings_of(folder / "sites" / "a").values()))


def findings_of(home: Path) -> dict[str, bool]:
    """Return the findings about other sites' keys."""
    found = [(text, good) for good, text in findings(home) if "telephone" in text or PEERS in text]
    return {text.split()[0]: good for text, good in found}


def test_a_site_without_its_state_takes_no_part(folder: Path, tmp_path: Path) -> None:
    """A site that has lost its keys and its control variate does not begin anew under another key."""

    run, gone = config(3), []

    def lose(name: str, request: Message, reply: Message) -> Message:
        if name == "e" and phase_of(request) == "reveal" and not gone:
            gone.append(name)
            shutil.rmtree(folder / "sites" / "e" / "state")
        return reply

    run_job(folder, run, tmp_path / "run", Grid(folder, lose))
    _, rounds, result = bits(tmp_path / "run")
    assert result["status"] == "finished"
    assert ["agent 4" in line.get("screened", {}) for line in rounds] == [False, True, True]


def test_what_cannot_be_masked_is_refused(folder: Path, tmp_path: Path) -> None:
    """Methods, rules and federations that cannot be masked, and requests in the clear, are refused in one line."""
    server = read_server(folder)
    for run, text in (
        (config(2, "ditto"), "does not aggregate from distances and weighted sums"),
        (config(2, options={"psi": "adaptive"}), "psi = adaptive"),
        (config(2, participation=0.4), "at least 4 agents"),
        (config(2, min_contributors=6.0), "expected at most 5"),
        (config(2, alice="all"), "needs one Alice per job"),
    ):
        with pytest.raises(WaffleError, match=text):
            check_deployable(run, server)
    grid = Grid(folder)
    run_job(folder, config(1), tmp_path / "run", grid)
    opened = next(r for n, r in grid.requests if n == "b" and phase_of(r) == "open")
    ((label, payload),) = opened.payloads.items()
    site = Site(folder / "sites" / "b")
    tasks = [{**opened.fields["tasks"][0], "phase": "", "session": 0}]
    with site.ledger.alone():
        reply = site.respond(
            Message({**opened.fields, "tasks": tasks}, {label: read(payload, FirstRequest).model}), "x"
        )
    assert "this run has masked" in reply.fields["courses"][label]["error"]
    assert not reply.payloads


def test_the_server_of_a_masked_run_has_no_way_to_read_an_update() -> None:
    """It has no collector of updates, and no module of its side imports keys, agents or the encoding of updates."""
    names = set()
    for module in (masked_round, masked_parts, masked_server_run):
        tree = ast.parse(inspect.getsource(module))
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    private = {"waffle_fl.privacy.agent", "waffle_fl.privacy.keys", "waffle_fl.privacy.masks"}
    assert not names & {*private, "waffle_fl.engines.masked_agent", "waffle_fl.update_encoding"}
    assert "collector" not in masked_server_run.MaskedServerRun.__dataclass_fields__


def test_a_server_that_tells_sites_other_things_reads_nothing(folder: Path, tmp_path: Path) -> None:
    """Masks are bound to settings and model: the update of one site is not found where those of the others are zero."""

    class Lying(Grid):
        def push_messages(self, messages: Any) -> list[str]:
            return super().push_messages([self.changed(message) for message in messages])

        def changed(self, message: Any) -> Any:
            name, request = list(self.sites)[message.metadata.dst_node_id - 1], unpacked(message.content, 1 << 30)
            if name == "b" or phase_of(request) != "open":
                return message
            config = json.loads(json.dumps(request.fields["config"]))
            config["settings"]["lr"] = 1e-9
            key = load_operator_key(folder / "keys" / OPERATOR_KEY)
            lie = sign(Message({**request.fields, "config": config}, request.payloads), key, name)
            return SimpleNamespace(metadata=message.metadata, content=packed(lie))

    with pytest.raises(WaffleError, match="round 1 was rejected 3 times"):
        run_job(folder, config(1), tmp_path / "run", Lying(folder))


def answer_of(site: Site, request: Message, **task: Any) -> dict[str, Any]:
    """Return a site's answer to a request of an earlier round with other fields in its task."""
    tasks = [{**request.fields["tasks"][0], **task}]
    with site.ledger.alone():
        reply = site.respond(Message({**request.fields, "tasks": tasks}, request.payloads), "again")
    return dict(next(iter(reply.fields["courses"].values())))


def request_of(grid: Grid, phase: str, site: str = "b") -> Message:
    return next(request for name, request in grid.requests if name == site and phase_of(request) == phase)


def test_a_mask_hides_one_update(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site whose update is another one than when it began the session, on other data say, does not reply again."""
    grid = Grid(folder)
    run_job(folder, config(1), tmp_path / "run", grid)
    opened = request_of(grid, "open")
    assert "error" not in answer_of(Site(folder / "sites" / "b"), opened)
    kept = (folder / "sites" / "b" / "state").rglob("masks.update")
    before = [path.read_bytes() for path in kept]
    train = SiteTrainer.train

    def changed(self: SiteTrainer, *arguments: Any) -> Any:
        after, up = train(self, *arguments)
        return after, up._replace(dy=up.dy * 1.01)

    monkeypatch.setattr(SiteTrainer, "train", changed)
    assert "differs from that of the session" in answer_of(Site(folder / "sites" / "b"), opened)["error"]
    assert [path.read_bytes() for path in (folder / "sites" / "b" / "state").rglob("masks.update")] == before


def test_for_one_attempt_sites_help_to_read_one_sum(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that repeats a round from a model that hardly differs gets no second sum of nearly the same updates."""
    run_job(folder, config(1), tmp_path / "run")
    shutil.rmtree(tmp_path / "run")

    def moved(*arguments: Any) -> Any:
        state = initial_run_state(*arguments)
        return dataclasses.replace(state, server=state.server._replace(x=state.server.x + 1e-9))

    monkeypatch.setattr(server_app, "initial_run_state", moved)
    JobRunner(folder, Job.open(folder, "run"), Grid(folder)).run_all()
    lines = [line["read"]["at"] for line in ledger_of(folder, "b") if "read" in line]
    assert [line.split(", ")[-1] for line in lines] == ["attempt 0", "attempt 1"]


def test_no_site_trains_from_a_state_of_the_server(folder: Path, tmp_path: Path) -> None:
    """A server that could choose the states of all agents but one would know all updates but one."""
    grid = Grid(folder)
    run_job(folder, config(1), tmp_path / "run", grid)
    opened = request_of(grid, "open")
    session = opened.fields["tasks"][0]["session"]
    error = answer_of(Site(folder / "sites" / "b"), opened, session=session + 1, restored=True)["error"]
    assert "no site trains from a state that the server sends" in error
