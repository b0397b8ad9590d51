"""State of a federation's sites and jobs, from the server's files and, if it runs, from the server itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from waffle_fl.deploy.control_client import ControlClient
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.keys import fingerprint, wire_form
from waffle_fl.deploy.settings_files import read_server
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import round_settings
from waffle_fl.privacy.contributors import effective
from waffle_fl.records import read_json, read_rounds

SCORES = ("accuracy", "rmse", "loss")


def overview(folder: Path) -> dict[str, Any]:
    """{"server": running or stopped, "sites": [...], "jobs": [...]}, newest job first."""
    settings = read_server(folder)
    try:
        nodes = {node.public_key: node.status for node in ControlClient(folder, settings).nodes()}
        running = True
    except WaffleError:
        nodes, running = {}, False
    paths = sorted((folder / "jobs").glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    jobs = []
    for path in paths:
        with contextlib.suppress(WaffleError, KeyError):
            jobs.append(_job(Job.open(folder, path.stem)))
    sites = [_site(folder, name, name in settings.revoked, nodes, running) for name in settings.sites]
    return {"server": "running" if running else "stopped", "sites": sites, "jobs": jobs}


def _site(folder: Path, name: str, revoked: bool, nodes: Mapping[bytes, str], running: bool) -> dict[str, str]:
    public = folder / "keys" / f"{name}.pub"
    key = fingerprint(public.read_bytes()) if public.is_file() else ""
    if revoked:
        return {"name": name, "state": "revoked", "key": key}
    if not key:
        return {"name": name, "state": "no key yet", "key": ""}
    if not running:
        return {"name": name, "state": "unknown", "key": key}
    found = nodes.get(wire_form(public), "not admitted")
    return {"name": name, "state": "connected" if found == "online" else "not connected", "key": key}


def _job(job: Job) -> dict[str, Any]:
    state, active = job.state, job.is_running
    status = state.get("status", "submitted")
    return {
        "name": job.name,
        "method": job.config.method,
        "masked": round_settings(job.config.settings).masks,
        "alice": job.config.settings.alice,
        "out": str(job.out),
        "status": status if active or status != "running" else "interrupted",
        "round": state.get("round", 0),
        "rounds": job.config.settings.rounds,
        "waiting": state.get("waiting", []) if active else [],
        "weights": state.get("weights", {}),
        "screened": state.get("screened", {}),
        "error": state.get("error", ""),
    }


def histories(jobs: list[dict[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Measurements per job, Alice and round: the scores, and each site's weight."""
    return {job["name"]: _history(Path(job["out"])) for job in jobs}


def _history(out: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for folder in [out] if (out / "config.json").exists() else sorted(p.parent for p in out.glob("*/config.json")):
        about = read_json(folder / "provenance.json") or {}
        agents, alice = about.get("agents", []), about.get("alice", 0)
        sites = about.get("engine", {}).get("sites", agents)  # names, even if the agents are numbered
        rounds = read_rounds(folder / "rounds.jsonl") if (folder / "rounds.jsonl").exists() else []
        site_of = dict(zip(agents, sites, strict=False))
        found[sites[alice] if sites else folder.name] = [_measured(line, sites, alice, site_of) for line in rounds]
    return found


def _measured(line: Mapping[str, Any], sites: list[str], alice: int, site_of: Mapping[str, str]) -> dict[str, Any]:
    scores = {key: line[key] for key in SCORES if key in line}
    given = line.get("weights") or []
    names = sites if len(given) == len(sites) else sites[alice : alice + 1]  # Local trains Alice alone
    screened = {site_of.get(name, name): reason for name, reason in line.get("screened", {}).items()}
    return {"round": line["round"], **scores, "weights": dict(zip(names, given, strict=False)), "screened": screened}


def lines_of(found: Mapping[str, Any]) -> Iterator[str]:
    """The overview as lines for a terminal."""
    yield f"server: {found['server']}"
    width = max(len(site["name"]) for site in found["sites"])
    for site in found["sites"]:
        yield f"  {site['name']:<{width}}  {site['state']:<13}  {site['key']}".rstrip()
    for job in found["jobs"]:
        yield f"job {job['name']}: {job['status']}, round {job['round']} of {job['rounds']}, Alice {job['alice']}"
        if job["waiting"]:
            yield f"  waiting for {', '.join(job['waiting'])}"
        for alice, weights in job["weights"].items():
            shown = ", ".join(f"{name} {weight:.2f}" for name, weight in weights.items())
            yield f"  weights for {alice}: {shown}"
            if job["masked"]:
                yield f"  effective contributors for {alice}: {effective([*weights.values()]):.2f}"
        for name, reason in job["screened"].items():
            yield f"  {name} screened: {reason}"
        if job["error"] and job["status"] != "running":
            yield f"  {job['error']}"
    if not found["jobs"]:
        yield "no jobs yet"
