"""The live page and the metrics of a deployment show the numbers of the run folders, and no text becomes markup."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from conftest import refusal
from flower_harness import federation, run_job, small_config
from waffle_fl.deploy import live_page, membership, settings_files
from waffle_fl.deploy.control_client import ControlClient, Node
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.keys import wire_form
from waffle_fl.records import read_json, write_json

SITES = ("north", "south", "west")
EVIL = "\"><img src=x onerror='window.pwned = 1'><script>window.pwned = 1</script>"
ODD = EVIL + '\u202e\ud800\n{job="x"} 1\\'  # also breaks a line, a label or an encoding


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a federation with two finished jobs: one Alice with three rounds, and every site as Alice with two."""
    root = tmp_path_factory.mktemp("watched")
    folder = federation(root / "fed", SITES)
    for name in SITES:
        settings_files.change(folder / "sites" / name / "site.toml", max_exposed=1.0)
    for name, rounds, alice in (("first", 3, "0"), ("every", 2, "all")):
        run_job(folder, small_config(rounds, alice=alice), root / name).update_state(status="finished", waiting=[])
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """Return a copy that the test may change."""
    shutil.copytree(trained, tmp_path / "copy")
    for age, name in enumerate(("every", "first")):
        path = tmp_path / "copy" / "fed" / "jobs" / f"{name}.json"
        write_json(path, {**(read_json(path) or {}), "out": str(tmp_path / "copy" / name)})
        os.utime(path, (time.time() - age, time.time() - age))
    return tmp_path / "copy"


@contextmanager
def served(folder: Path) -> Iterator[live_page.Server]:
    with live_page.listening(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(
    server: live_page.Server, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def parsed(text: str) -> dict[tuple[str, ...], float]:
    """Return the samples by metric name and label values."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type == "gauge"
        for sample in family.samples:
            key = (sample.name, *(sample.labels[k] for k in ("job", "alice", "site") if k in sample.labels))
            assert key not in found
            found[key] = sample.value
    return found


def metrics(server: live_page.Server) -> dict[tuple[str, ...], float]:
    response, text = get(server, "/metrics")
    assert response.status == 200
    return parsed(text)


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def append(run: Path, line: dict[str, Any]) -> None:
    with (run / "rounds.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def connect(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Simulate a running server with these sites connected and the others registered."""
    nodes = [
        Node(i, name, wire_form(folder / "keys" / f"{name}.pub"), "online" if name in names else "offline")
        for i, name in enumerate(SITES)
        if (folder / "keys" / f"{name}.pub").exists()
    ]
    monkeypatch.setattr(ControlClient, "nodes", lambda self: nodes)


def test_the_state_matches_the_run_folders(trained: Path) -> None:
    """/state.json lists the newest job first with every round of every Alice, and no path and no secret."""
    with served(trained / "fed") as server:
        response, text = get(server, "/state.json")
    assert response.headers["Content-Type"] == "application/json"
    state = json.loads(text)
    assert state["server"] == "stopped"
    assert state["federation"] == "fed"
    assert [(site["name"], site["state"]) for site in state["sites"]] == [(name, "unknown") for name in SITES]
    every, first = state["jobs"]
    assert (first["name"], first["method"], first["status"], first["round"], first["rounds"]) == (
        *("first", "WAFFLE (paper)", "finished"),
        *(3, 3),
    )
    (run,) = first["runs"]
    rounds = logged(trained / "first")
    assert run["rounds"] == [1, 2, 3]
    assert run["scores"] == [line["accuracy"] for line in rounds]
    assert run["losses"] == [line["loss"] for line in rounds]
    assert [list(weights) for weights in zip(*run["weights"], strict=True)] == [line["weights"] for line in rounds]
    assert every["alice"] == "all"
    assert [len(run["rounds"]) for run in every["runs"]] == [2, 2, 2]
    assert len({run["alice"] for run in every["runs"]}) == 3
    secrets = [path for path in (trained / "fed" / "keys").iterdir() if path.suffix in (".secret", ".key")]
    assert secrets
    for hidden in (str(trained), *(path.read_bytes().hex() for path in secrets)):
        assert hidden not in text


def test_the_metrics_are_the_last_lines_of_the_logs(trained: Path) -> None:
    """/metrics equals the last lines of rounds.jsonl for one Alice and for several, in both formats."""
    with served(trained / "fed") as server:
        response, text = get(server, "/metrics")
        openmetrics, other = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        state = json.loads(get(server, "/state.json")[1])
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    assert openmetrics.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert other.endswith("# EOF\n")
    found = parsed(text)
    assert found["waffle_server_running",] == 0
    assert [found["waffle_site_connected", name] for name in SITES] == [0, 0, 0]
    for job, rounds in (("first", 3), ("every", 2)):
        assert found["waffle_job_running", job] == 0
        assert found["waffle_job_round", job] == found["waffle_job_rounds", job] == rounds
    runs = {job["name"]: job["runs"] for job in state["jobs"]}
    runs_of_jobs = {"first": [trained / "first"], "every": sorted((trained / "every").iterdir())}
    for job, run_folders in runs_of_jobs.items():
        assert len(runs[job]) == len(run_folders)
        for run, folder in zip(runs[job], run_folders, strict=True):
            last = logged(folder)[-1]
            assert found["waffle_job_accuracy", job, run["alice"]] == last["accuracy"]
            assert found["waffle_job_loss", job, run["alice"]] == last["loss"]
            weights = [found["waffle_site_weight", job, run["alice"], site] for site in run["sites"]]
            assert weights == last["weights"]
            assert not last.get("screened", {}).keys() - {
                s for s in run["sites"] if found["waffle_site_screened", job, s]
            }
    assert not [key for key in found if key[0] == "waffle_job_rmse"]


def test_a_running_job_and_every_state_of_a_site(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose lock is held is running and listed first; a site is identified by its key."""
    folder = root / "fed"
    membership.add_site(folder, "late")
    membership.revoke(folder, "west")
    connect(monkeypatch, folder, "north")
    job = Job.open(folder, "first")
    line = {**logged(root / "first")[-1], "round": 4, "screened": {"agent 1": "too long"}}
    del line["accuracy"]
    append(root / "first", {**line, "rmse": 0.25, "loss": None})
    with job.exclusive() as alone, served(folder) as server:
        assert alone
        job.update_state(status="running", round=4, waiting=["south"])
        state, found = json.loads(get(server, "/state.json")[1]), metrics(server)
    assert state["server"] == "running"
    states = {site["name"]: site["state"] for site in state["sites"]}
    assert states == {"north": "connected", "south": "not connected", "west": "revoked", "late": "no key yet"}
    assert [found["waffle_site_connected", name] for name in (*SITES, "late")] == [1, 0, 0, 0]
    shown = state["jobs"][0]
    assert (shown["name"], shown["status"], shown["waiting"]) == ("first", "running", ["south"])
    (run,) = shown["runs"]
    assert run["screened"] == [{"site": "south", "reason": "too long", "round": 4, "times": 1}]
    assert found["waffle_job_running", "first"] == 1
    assert [found["waffle_site_screened", "first", site] for site in run["sites"]] == [
        float(site == "south") for site in run["sites"]
    ]
    assert found["waffle_job_rmse", "first", run["alice"]] == 0.25
    assert ("waffle_job_loss", "first", run["alice"]) not in found


def test_a_long_history_is_thinned_out() -> None:
    """At most POINTS evenly spaced rounds are sent, including the last; screenings are counted over all rounds."""
    lines = [{"round": r, "accuracy": r / 1001, "weights": {"a": 1.0}, "screened": {"a": "x"}} for r in range(1, 1002)]
    run = live_page._run("a", lines)
    assert 150 < len(run["rounds"]) <= live_page.POINTS
    assert run["rounds"][-1] == 1001
    assert len({after - before for before, after in zip(run["rounds"], run["rounds"][1:], strict=False)}) == 1
    assert len(run["scores"]) == len(run["weights"][0]) == len(run["rounds"])
    assert run["screened"] == [{"site": "a", "reason": "x", "round": 1001, "times": 1001}]
    numbers = [None, True, "1", float("nan"), float("inf"), 0, 0.5]
    assert [live_page._number(value) for value in numbers] == [None, None, None, None, None, 0, 0.5]


@pytest.mark.parametrize("path", ["/", "/state.json", "/metrics", "/nothing"])
def test_every_response_has_the_security_headers(trained: Path, path: str) -> None:
    with served(trained / "fed") as server:
        response, text = get(server, path)
    assert response.status == (404 if path == "/nothing" else 200)
    policy = response.headers["Content-Security-Policy"].split("; ")
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in " ".join(policy)
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["Cache-Control"] == "no-store"
    assert "Python" not in response.headers["Server"]
    assert str(trained) not in text


def test_host_names_methods_and_paths_are_checked(trained: Path) -> None:
    """Requests under another host name (DNS rebinding) and methods other than GET are rejected."""
    with served(trained / "fed") as server:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            assert get(server, "/", Host=host)[0].status == 200
        for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1:{port + 1}", "localhost", f"[::1]:{port}", ""):
            for path in ("/", "/state.json", "/metrics"):
                response, text = get(server, path, Host=host)
                assert response.status == 403
                assert text == f"open http://127.0.0.1:{port}; a tunnel must use the same port at both ends\n"
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "<script>"):
            response, text = get(server, "/state.json", method)
            assert (response.status, response.headers["Allow"]) == (405, "GET")
            assert text == "only GET is answered here\n"
        assert get(server, "/", "HEAD")[0].status == 405
        for path in ("/../server.toml", "/keys/control.secret", "/state.json/", f"http://127.0.0.1:{port}/"):
            assert get(server, path)[0].status == 404


def test_errors_at_start(trained: Path, tmp_path: Path) -> None:
    folder, output = trained / "fed", list[str]()
    with live_page.listening(folder, 0) as server:
        text = refusal(live_page.serve, folder, server.server_port, output.append)
    assert text == f"port {server.server_port} on 127.0.0.1 is in use: choose another one with --port"
    assert refusal(live_page.serve, folder, 70000, output.append) == "--port: expected 0 to 65535, got 70000"
    assert "server.toml" in refusal(live_page.serve, tmp_path, 0, output.append)
    assert not output


def test_without_prometheus_client_the_page_still_works(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"] or [
        "prometheus_client"
    ]:
        monkeypatch.setitem(sys.modules, name, None)
    with served(trained / "fed") as server:
        response, text = get(server, "/metrics")
        assert response.status == 501
        assert text == f"{live_page.NO_PROMETHEUS}\n"
        assert [get(server, path)[0].status for path in ("/", "/state.json")] == [200, 200]


def test_a_slow_read_delays_requests_by_a_bounded_time(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a read the page loads, and /state.json returns the last state and its age."""
    monkeypatch.setattr(live_page, "PATIENCE", 0.1)
    monkeypatch.setattr(live_page, "FRESH", 0.0)
    unblock, reads = threading.Event(), []

    def slow() -> dict[str, Any]:
        reads.append(1)
        assert unblock.wait(30)
        return {**live_page.NOTHING, "time": time.time() - 5, "server": "running"}

    with served(trained / "fed") as server:
        server.snapshots = live_page.Snapshots(slow)
        state = json.loads(get(server, "/state.json")[1])
        assert state["problem"] == "the folder is still being read"
        assert state["age"] is None
        assert get(server, "/metrics")[0].status == 503
        assert get(server, "/")[0].status == 200
        assert len(reads) == 1
        unblock.set()
        monkeypatch.setattr(live_page, "PATIENCE", 30)
        state = json.loads(get(server, "/state.json")[1])
        assert (state["server"], state["problem"]) == ("running", "")
        unblock.clear()
        monkeypatch.setattr(live_page, "PATIENCE", 0.1)
        again = json.loads(get(server, "/state.json")[1])
        assert again["server"] == "running"
        assert again["age"] >= 5
        unblock.set()


def test_many_requests_share_a_read() -> None:
    """Requests that arrive during a read share its result."""
    reads: list[int] = []
    arrived = threading.Semaphore(0)

    def read() -> dict[str, Any]:
        reads.append(1)
        for _ in range(20):
            assert arrived.acquire(timeout=30)
        return {**live_page.NOTHING, "time": time.time()}

    snapshots = live_page.Snapshots(read)

    def request_state() -> None:
        arrived.release()
        snapshots.latest()

    threads = [threading.Thread(target=request_state) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshots.latest()
    assert len(reads) == 1


def test_read_errors_are_reported_and_recovered_from(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "FRESH", 0.0)
    folder = root / "fed"
    settings = (folder / "server.toml").read_text()
    with served(folder) as server:
        assert metrics(server)["waffle_job_round", "first"] == 3
        (folder / "server.toml").write_text("no toml")
        state = json.loads(get(server, "/state.json")[1])
        assert state["problem"].startswith("fed/server.toml is not valid TOML: ")
        assert len(state["jobs"]) == 2  # the last state that could be read
        response, text = get(server, "/metrics")
        assert (response.status, text) == (503, state["problem"] + "\n")
        monkeypatch.setattr(live_page, "overview", lambda folder: 1 / 0)
        problem = json.loads(get(server, "/state.json")[1])["problem"]
        assert problem == "the folder cannot be read: ZeroDivisionError: division by zero"
        monkeypatch.undo()
        monkeypatch.setattr(live_page, "FRESH", 0.0)
        (folder / "server.toml").write_text(settings)
        assert json.loads(get(server, "/state.json")[1])["problem"] == ""
        (root / "first" / "provenance.json").write_text("[]")
        append(root / "first", {"round": 4})
        every, first = json.loads(get(server, "/state.json")[1])["jobs"]
        assert (len(every["runs"]), first["runs"]) == (3, [])  # the other job is still shown


def poison(root: Path) -> None:
    """Put markup, control characters and a lone surrogate into a run folder and into the job's state."""
    about = read_json(root / "first" / "provenance.json") or {}
    names = [ODD, "</script>" + EVIL, "south"]
    engine = {**about["engine"], "sites": names}
    write_json(root / "first" / "provenance.json", {**about, "agents": names, "engine": engine})
    last = logged(root / "first")[-1]
    append(root / "first", {**last, "round": 4, "screened": {"</script>" + EVIL: ODD}})
    Job.open(root / "fed", "first").update_state(status="failed", error=f"{root / 'first'}: {ODD}", round=4)


def test_hostile_text_is_cleaned(root: Path) -> None:
    """Texts reach the page as single printable lines, and the metrics stay well-formed."""
    poison(root)
    with served(root / "fed") as server:
        state, found = json.loads(get(server, "/state.json")[1]), metrics(server)
    job = next(job for job in state["jobs"] if job["name"] == "first")
    shown = EVIL + '\ufffd\ufffd {job="x"} 1\\'
    assert job["error"] == f"first: {shown}"
    (run,) = job["runs"]
    assert run["alice"] == run["sites"][0] == shown
    assert run["screened"] == [{"site": "</script>" + EVIL, "reason": shown, "round": 4, "times": 1}]
    assert found["waffle_job_accuracy", "first", shown] == logged(root / "first")[-1]["accuracy"]
    assert found["waffle_site_screened", "first", "</script>" + EVIL] == 1
    assert len(live_page._text("x" * 10_000)) == live_page.TEXT


def test_the_page_holds_no_data_and_needs_no_other_file() -> None:
    page = live_page.page().content.decode()
    script, style = page.split('<script type="module">')[1], page.split("<style>")[1].split("</style>")[0]
    assert script.count("</script>") == 1
    assert page.count("<script") == page.count("<style") == 1
    assert "@style@" not in page
    assert "@script@" not in page
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://", "https://"):
        assert forbidden not in script.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in style


@contextmanager
def browsing(chromium: Any, server: live_page.Server, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """Open the page in headless Chromium and yield it with console messages, errors, dialogs and outside requests."""
    address = f"http://127.0.0.1:{server.server_port}/"
    with chromium.new_context(**options) as context:
        tab, problems = context.new_page(), list[str]()
        tab.set_default_timeout(60_000)
        tab.add_init_script(
            "document.addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective))"
        )
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("dialog", lambda dialog: problems.append(dialog.message))
        tab.on(
            "request",
            lambda request: None if request.url.startswith((address, "data:")) else problems.append(request.url),
        )
        tab.clock.install()
        tab.goto(address)
        tab.wait_for_selector("body[data-ready]")
        yield tab, problems


def poll(tab: Any) -> None:
    """Let the time until the page's next poll pass twice: the first reply is on the page when it asks again."""
    for _ in range(2):
        with tab.expect_response("**/state.json"):
            tab.clock.fast_forward(2000)


def test_the_page_in_a_browser(chromium: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows progress, both charts and all sites; a new round appears without a reload."""
    monkeypatch.setattr(live_page, "FRESH", 0.0)
    folder = root / "fed"
    connect(monkeypatch, folder, "north", "south")
    job = Job.open(folder, "first")
    with job.exclusive(), served(folder) as server, browsing(chromium, server) as (tab, problems):
        job.update_state(status="running", round=3, waiting=["west"])
        poll(tab)
        card = tab.locator(".job").first
        card.get_by_text("Waiting for west.").wait_for()
        assert card.locator("h2").inner_text() == "first"
        assert card.locator("summary .state").inner_text() == "running"
        assert tab.locator("#banner").is_hidden()
        assert tab.locator("#summary").inner_text().startswith("Server running · 2 of 3 sites connected")
        rows = tab.locator("#sites tbody tr")
        assert rows.locator(".name").all_inner_texts() == list(SITES)
        assert rows.locator(".state").all_inner_texts() == ["connected", "connected", "not connected"]
        dots = rows.locator(".state").evaluate_all(
            "(all) => all.map((e) => getComputedStyle(e, '::before').backgroundColor)"
        )
        assert dots[0] == dots[1] != dots[2]
        scores, weights = card.locator('[data-chart="scores"]'), card.locator('[data-chart="weights"]')
        assert scores.locator("circle").count() == 3
        lines = logged(root / "first")
        assert scores.locator("text.strong").text_content() == f"{100 * lines[-1]['accuracy']:.1f}\u00a0%"
        bars = weights.locator("path.bars")
        assert bars.count() == 3
        assert [path.get_attribute("d").count("M") for path in bars.all()] == [3, 3, 3]
        for chart in (scores, weights):
            assert chart.get_attribute("role") == "img"
            assert chart.locator("title").text_content().endswith("per round")
            assert chart.locator("desc").text_content()
        before = scores.element_handle()
        card.locator(".numbers > summary").click()
        card.locator(".numbers tbody tr").nth(2).wait_for()
        assert card.locator(".numbers tbody tr").count() == 3
        append(root / "first", {**lines[-1], "round": 4, "accuracy": 0.875, "screened": {"agent 1": "too long"}})
        job.update_state(status="running", round=4, waiting=[])
        poll(tab)
        tab.wait_for_selector('[data-chart="scores"][data-points="4"]')
        assert before.evaluate("(svg) => svg.isConnected")
        assert scores.locator("circle").count() == 4
        assert scores.locator("text.strong").text_content() == "87.5\u00a0%"
        assert [path.get_attribute("d").count("M") for path in bars.all()] == [4, 4, 4]
        assert card.locator("progress").get_attribute("aria-label") == "first: round 4 of 3"
        assert card.get_by_text("All replies have arrived.").is_visible()
        assert "too long, in round 4, the last one; 1 of 4 rounds" in card.locator(".screened").inner_text()
        card.locator(".numbers tbody tr").nth(3).wait_for()
        assert card.locator(".numbers tbody tr").count() == 4  # still open
        box = scores.bounding_box()
        tab.mouse.move(box["x"] + 60, box["y"] + 80)
        expected = f"Round 1: {100 * lines[0]['accuracy']:.1f}\u00a0%"
        tab.wait_for_function(
            "(text) => document.querySelector('.readout').textContent.startsWith(text)", arg=expected, timeout=5000
        )
        assert tab.title() == "4/3 first – waffle"
        assert not problems


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_on_a_phone_and_with_several_alices(chromium: Any, trained: Path, scheme: str) -> None:
    """At 400 pixels nothing scrolls sideways, each Alice has a tab, and a stopped server is reported."""
    options = {"viewport": {"width": 400, "height": 800}, "color_scheme": scheme}
    with served(trained / "fed") as server, browsing(chromium, server, **options) as (tab, problems):
        assert tab.evaluate("document.documentElement.scrollWidth") == 400
        assert "The server does not answer" in tab.locator("#banner").inner_text()
        card = tab.locator(".job").first
        tabs = card.get_by_role("tab")
        assert tabs.count() == 3
        for k, run in enumerate(sorted((trained / "every").iterdir())):
            assert tabs.nth(k).locator(".value").inner_text() == f"{100 * logged(run)[-1]['accuracy']:.1f}\u00a0%"
        heading = card.locator("figure h3").first
        first = heading.inner_text()
        tabs.nth(1).click()
        second = heading.inner_text()
        tab.keyboard.press("ArrowRight")
        third = heading.inner_text()
        assert len({first, second, third}) == 3
        assert tabs.nth(2).get_attribute("aria-selected") == "true"
        poll(tab)
        assert heading.inner_text() == third  # an update keeps the choice
        tab.locator(".job > summary").nth(1).click()
        tab.locator(".job").nth(1).locator('[data-chart="scores"] circle').first.wait_for()
        assert tab.evaluate("document.documentElement.scrollWidth") == 400
        tab.set_viewport_size({"width": 1200, "height": 800})
        tab.wait_for_timeout(200)
        assert tab.evaluate("document.documentElement.scrollWidth") == 1200
        ink, page = tab.evaluate("['color', 'backgroundColor'].map((key) => getComputedStyle(document.body)[key])")
        assert (luminance(ink) < luminance(page)) == (scheme == "light")
        assert not problems


def luminance(color: str) -> int:
    return sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))


def test_no_text_runs_in_the_browser(chromium: Any, root: Path) -> None:
    """Names, reasons and errors that contain markup are shown as text."""
    poison(root)
    shutil.rmtree(root / "every")
    with served(root / "fed") as server, browsing(chromium, server) as (tab, problems):
        tab.locator(".job > summary").filter(has_text="first").click()
        card = tab.locator(".job").filter(has_text="first").first
        card.locator('[data-chart="weights"]').hover()
        card.locator(".numbers > summary").click()
        assert EVIL in card.locator(".error").inner_text()
        assert EVIL in card.locator(".screened").inner_text()
        assert tab.evaluate("window.pwned") is None
        assert tab.evaluate("document.querySelectorAll('img, iframe, main script').length") == 0
        assert not problems


def test_no_jobs_yet_and_a_watch_that_has_ended(chromium: Any, tmp_path: Path) -> None:
    """An empty federation shows the command to start with; the page reports when its server has ended."""
    folder = federation(tmp_path / "fed", SITES)
    with live_page.listening(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            with browsing(chromium, server) as (tab, problems):
                assert "waffle deploy run" in tab.locator("#no-jobs").inner_text()
                assert tab.locator(".job").count() == 0
                assert not problems
                server.shutdown()
                server.server_close()
                tab.clock.fast_forward(2000)
                tab.get_by_text("waffle deploy watch does not answer").wait_for()
        finally:
            server.shutdown()
            thread.join()


def test_the_command_ends_quietly_with_ctrl_c(trained: Path) -> None:
    command = [sys.executable, "-m", "waffle_fl", "deploy", "watch", str(trained / "fed"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            output = process.stdout.readline()
            port = output.partition("http://127.0.0.1:")[2].partition(",")[0]
            address = f"http://127.0.0.1:{port}"
            assert output == f"the page is at {address}, metrics at {address}/metrics; Ctrl-C ends it\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "", "")
