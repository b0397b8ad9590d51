"""Jobs: a job is one submitted run, or one run per Alice, stored as files that survive restarts, with a log."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from waffle_fl.atomic_files import write_atomically
from waffle_fl.config import ALL_ALICES, RunConfig, check_name
from waffle_fl.deploy.settings_files import read_server
from waffle_fl.deploy.survey import Survey
from waffle_fl.errors import WaffleError, writable
from waffle_fl.experiment import handle
from waffle_fl.records import read_json, write_json


@dataclass(frozen=True)
class Job:
    """A submitted job. It keeps the same run id when it is resumed."""

    path: Path
    run: str  # id under which the sites know the job
    config: RunConfig
    out: Path
    sites: tuple[str, ...]  # the agents, in order; a site that is revoked later keeps its index
    force: bool = False

    @classmethod
    def open(cls, folder: Path, name: str) -> Job:
        """Return a job of this deployment by its name; paths are not accepted."""
        path = folder / "jobs" / f"{check_name(name)}.json"
        content = read_json(path)
        if content is None:
            raise WaffleError(f"{folder} has no job {name!r}")
        config = RunConfig.from_json(content["config"])
        sites = tuple(content.get("sites") or read_server(folder).sites)
        return cls(path, str(content["run"]), config, Path(content["out"]), sites, bool(content["force"]))

    @classmethod
    def create(cls, folder: Path, config: RunConfig, out: Path, force: bool) -> Job:
        """Return a new job, or the existing job that writes to the same folder, to resume it."""
        path = folder / "jobs" / f"{check_name(out.name)}.json"
        known = cls.open(folder, out.name) if path.exists() else None
        if known and known.out != out.resolve():
            raise WaffleError(f"another job of {folder} is called {out.name}: choose another --out")
        if known and not force and known.config.to_json() != config.to_json():
            raise WaffleError(
                f"the job {out.name} exists with other settings: choose another --out, or use --force to continue it"
            )
        resumes = known is not None and (begun(out) or known.is_running)
        members = read_server(folder).members
        if known and resumes and known.sites != members:
            raise WaffleError(
                f"the job {out.name} has the sites {', '.join(known.sites)}; the federation now has "
                f"{', '.join(members)}: choose another --out to train with these, or continue with waffle deploy resume"
            )
        run = known.run if known and resumes else secrets.token_hex(8)
        sites = known.sites if known and resumes else members
        job = cls(path, run, config, out.resolve(), sites, force)
        job.write(force)
        return job

    def write(self, force: bool) -> None:
        content = {"run": self.run, "config": self.config.to_json(), "out": str(self.out), "force": force}
        with writable(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(self.path, {**content, "sites": list(self.sites)})

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def lock(self) -> Path:
        return self.path.with_suffix(".lock")

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Lock the job; yield False if another process has it. The kernel releases the lock when the process dies."""
        with self.lock.open("a") as stream:
            yield any(_try_lock(stream, fcntl.LOCK_EX) for _ in _lock_attempts())

    @property
    def is_running(self) -> bool:
        """Whether a process holds the lock. Uses a shared lock, so that concurrent checks do not see each other."""
        with self.lock.open("a") as stream:
            return not _try_lock(stream, fcntl.LOCK_SH)

    @property
    def journal(self) -> JobLog:
        return JobLog(self.path.with_suffix(".log"))

    @property
    def survey(self) -> Survey | None:
        """The saved survey of this run; None if the run is new or its settings have changed since."""
        content = read_json(self.path.with_suffix(".survey"))
        same = content is not None and content.get("key") == self._survey_key and begun(self.out)
        return Survey.from_json(content["survey"]) if content and same else None

    def save_survey(self, survey: Survey) -> None:
        write_json(self.path.with_suffix(".survey"), {"key": self._survey_key, "survey": survey.to_json()})

    @property
    def introductions(self) -> dict[str, Any] | None:
        """The sites' signed keys for private rounds of this run, by site; None if the run is new."""
        content = read_json(self.path.with_suffix(".keys"))
        return content["keys"] if content is not None and content.get("run") == self.run else None

    def save_introductions(self, found: Mapping[str, Any]) -> None:
        write_json(self.path.with_suffix(".keys"), {"run": self.run, "keys": found})

    @property
    def _survey_key(self) -> dict[str, Any]:
        """The run and settings that the survey depends on, normalised through JSON."""
        key: dict[str, Any] = json.loads(json.dumps({"run": self.run, "settings": asdict(self.config.settings)}))
        return key

    @property
    def state(self) -> dict[str, Any]:
        """The state last written by the ServerApp; empty before the first time."""
        return read_json(self.path.with_suffix(".state")) or {}

    def update_state(self, **state: Any) -> None:
        """Update the stored state, which `waffle deploy status` and `watch` show."""
        write_json(self.path.with_suffix(".state"), {**self.state, **state, "time": time.time()})

    def request_stop(self) -> None:
        """Request that the ServerApp stop after its current step."""
        with writable(self.path):
            self._stop.touch(mode=0o600)

    @property
    def stop_requested(self) -> bool:
        return self._stop.exists()

    def clear_stop_request(self) -> None:
        """Remove an earlier stop request."""
        self._stop.unlink(missing_ok=True)

    @property
    def _stop(self) -> Path:
        return self.path.with_suffix(".stop")

    @property
    def flower_run(self) -> str:
        """Flower's id of the last submitted run, or an empty string."""
        path = self.path.with_suffix(".flower")
        return path.read_text(encoding="ascii").strip() if path.exists() else ""

    def submitted_as(self, number: str) -> None:
        write_atomically(self.path.with_suffix(".flower"), f"{number}\n".encode())

    def runs(self, names: tuple[str, ...], survey: Survey) -> list[tuple[RunConfig, Path]]:
        """The run of the named Alice, or one run per site that has training and test samples."""
        if self.config.settings.alice != ALL_ALICES:
            return [(self.config, self.out)]
        able = [i for i, site in enumerate(self.sites) if survey.samples[site] and survey.test[site]]
        configs = [
            replace(self.config, settings=replace(self.config.settings, alice=handle(i, names[i]))) for i in able
        ]
        return [(config, self.out / config.label) for config in configs]


def begun(out: Path) -> bool:
    """Whether this folder holds a run, or one run per Alice."""
    return (out / "config.json").exists() or any(out.glob("*/config.json"))


def _try_lock(stream: IO[str], how: int) -> bool:
    try:
        fcntl.flock(stream, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_attempts() -> Iterator[None]:
    """Retry for 2 seconds, longer than any `is_running` check holds its shared lock."""
    for _ in range(20):
        yield
        time.sleep(0.1)


@dataclass(frozen=True)
class JobLog:
    """Events of a job, one JSON line each, written by the ServerApp and read by the commands that watch the job."""

    path: Path

    def write(self, **what: Any) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"time": time.time(), **what}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def since(self, position: int) -> tuple[list[Mapping[str, Any]], int]:
        """Return (complete lines after a position, the position after them); lines truncated by a crash are skipped."""
        text = self._content()[position:]
        complete = text[: text.rfind(b"\n") + 1]
        lines = []
        for line in complete.splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines, position + len(complete)

    @property
    def end(self) -> int:
        return len(self._content())

    @property
    def last(self) -> int:
        """Position of the start of the last line."""
        return self._content().rfind(b"\n", 0, -1) + 1

    def _content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""
