"""A task of the cluster: train some runs with `execute` and report what happens.

A worker that sees the driver's marker file trains in the run folders themselves. Any other worker trains in folders of
its own, and sends the driver what changes in them.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from waffle_fl.config import RunConfig
from waffle_fl.errors import Interrupted, WaffleError
from waffle_fl.experiment import Listener, Runtime, execute
from waffle_fl.ray_cluster.event_queue import Event
from waffle_fl.ray_cluster.folder_copies import Stamps, fill_folder, has_news, read_folder
from waffle_fl.records import locked
from waffle_fl.versions import RESULTS_VERSION

REPORT_SECONDS = 0.5  # between messages of a task: each costs a millisecond
LOCK_SECONDS = 120.0  # how long the lock of a lost worker may outlive it, as on a network file system


class StackTask(NamedTuple):
    """What a worker needs to train some runs."""

    call: int  # of the driver
    number: int
    runs: Sequence[tuple[int, Mapping[str, Any], str]]  # number, config and folder
    runtime: Runtime
    until: int | None
    directory: str  # of the driver's process
    marker: tuple[str, str]  # a file that workers on the same disk see, and its content
    files: Mapping[int, Mapping[str, bytes]] | None  # of the folders by run, for workers without that disk; None: ask
    is_repeated: bool  # whether a worker was lost while it trained these runs
    results_version: int = RESULTS_VERSION


class Ended(NamedTuple):
    """How a task ended."""

    status: Literal["trained", "stopped", "failed", "needs files"]
    message: str = ""


def train_runs(task: StackTask, queue: Any) -> Ended:
    """Train the runs of a task to their end and report all events to the queue."""
    if task.results_version != RESULTS_VERSION:
        versions = f"{RESULTS_VERSION} on a worker and {task.results_version} at the driver"
        return Ended("failed", f"expected one results version of waffle-fl on all nodes, got {versions}")
    with closing(Reporter(queue, task.call)) as reporter:
        return _train(task, reporter)


def _train(task: StackTask, reporter: Reporter) -> Ended:
    reporter.report("started", task.number, now=True)
    if reporter.stopped():
        return Ended("stopped")
    if Path(task.directory).is_dir():
        os.chdir(task.directory)  # where relative paths and the user's own modules are
    shares_disk = _sees(*task.marker)
    if not shares_disk and any(config["settings"]["states"] == "disk" for _, config, _ in task.runs):
        return Ended("failed", "states: expected memory on workers that do not see the run folders, got disk")
    if not shares_disk and task.files is None:
        return Ended("needs files")
    try:
        with _folders(task, shares_disk) as folders:
            runs = [(RunConfig.from_json(config), folders[number]) for number, config, _ in task.runs]
            reporter.follow([(n, *run) for (n, *_), run in zip(task.runs, runs, strict=True)], not shares_disk)
            try:
                execute(runs, _runtime_here(task.runtime), reporter, task.until)
            finally:
                reporter.finish()
    except Interrupted:
        return Ended("stopped")
    except WaffleError as error:
        return Ended("failed", str(error))
    return Ended("trained")


class Reporter(Listener):
    """Reports the events of a task, and learns from each reply whether the task is to stop.

    A thread of its own sends them. Ray lends the cores of a task whose main thread waits for a reply to another task,
    and does not take them back: all tasks of a node would train at once.
    """

    def __init__(self, queue: Any, call: int) -> None:
        self._queue, self._call = queue, call
        self._events: list[Event] = []
        self._sender = ThreadPoolExecutor(1)
        self._replies: deque[Future[bool]] = deque()
        self._stopped = False
        self._reported = 0.0
        self._numbers: dict[int, int] = {}  # id of a config -> number of the run
        self._copied: dict[int, tuple[Path, Stamps]] = {}  # folders whose files are sent

    def follow(self, runs: Sequence[tuple[int, RunConfig, Path]], sends_files: bool) -> None:
        """Name the runs whose events follow. Their files are sent if the driver does not see the folders."""
        self._runs = runs  # keeps the configs, whose ids are used
        self._numbers = {id(config): number for number, config, _ in runs}
        if sends_files:
            self._copied = {number: (folder, {}) for number, _, folder in runs}

    def resumed(self, config: RunConfig, start: int) -> None:
        self.report("resumed", self._numbers[id(config)], start)

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        self.report("advanced", self._numbers[id(config)], dict(measured))

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        number = self._numbers[id(config)]
        self._send_files(number)
        self.report("ended", number, dict(result))

    def warned(self, message: str) -> None:
        self.report("warned", -1, message)

    def stopped(self) -> bool:
        return self._stopped

    def report(self, kind: str, number: int, *more: Any, now: bool = False) -> None:
        """Add an event; events are sent together after a while, or now."""
        self._events.append((kind, number, *more))
        if now or time.monotonic() - self._reported > REPORT_SECONDS:
            for copied, (folder, sent) in self._copied.items():
                if has_news(folder, sent):
                    self._send_files(copied)
            self._send(wait=now)

    def finish(self) -> None:
        """Send everything that is left, and wait until it has arrived."""
        for number in self._copied:
            self._send_files(number)
        self._send(wait=True)

    def _send_files(self, number: int) -> None:
        if number in self._copied:
            self._events.append(("files", number, *read_folder(*self._copied[number])))
            self._send(wait=True)  # one folder at a time: both sides hold a copy of it

    def close(self) -> None:
        """End the thread after what it still has to send."""
        self._sender.shutdown()

    def _send(self, wait: bool = False) -> None:
        self._replies.append(self._sender.submit(self._put, self._events))
        self._events, self._reported = [], time.monotonic()
        while self._replies and (wait or self._replies[0].done()):
            self._stopped = self._replies.popleft().result() or self._stopped

    def _put(self, events: list[Event]) -> bool:
        """Send events and return whether the task is to stop."""
        ray = importlib.import_module("ray")
        return bool(ray.get(self._queue.put.remote(self._call, events)))


def _runtime_here(runtime: Runtime) -> Runtime:
    """Return the driver's runtime, with the data folder of this node if it has none at the driver's path."""
    return runtime if Path(runtime.data_dir).is_dir() else replace(runtime, data_dir="")


def _sees(path: str, content: str) -> bool:
    """Return whether the driver's marker file is here."""
    try:
        return Path(path).read_text() == content
    except OSError:
        return False


@contextmanager
def _folders(task: StackTask, shares_disk: bool) -> Iterator[dict[int, Path]]:
    """Yield the folders in which the runs train here, by number."""
    if shares_disk:
        folders = {number: Path(folder) for number, _, folder in task.runs}
        if task.is_repeated:
            for folder in folders.values():
                _wait_for_lock(folder)
        yield folders
        return
    here = Path(tempfile.mkdtemp(prefix="waffle-fl-"))
    try:
        folders = {number: here / str(number) / Path(folder).name for number, _, folder in task.runs}
        for number, files in (task.files or {}).items():
            if files:
                fill_folder(folders[number], files, task.runtime.force)
        yield folders
    finally:
        shutil.rmtree(here, ignore_errors=True)


def _wait_for_lock(folder: Path) -> None:
    """Wait until the lost worker's lock of a folder is released."""
    end = time.monotonic() + LOCK_SECONDS
    while folder.is_dir():
        try:
            with locked(folder):
                return
        except WaffleError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
