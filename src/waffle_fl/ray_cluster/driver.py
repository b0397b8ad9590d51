"""Execute runs on a Ray cluster: stacks of runs are tasks, and their events reach one listener.

The driver prepares all runs, so a user's mistake ends in one line before anything starts. It never writes to the folder
of a run that trains, unless the workers share no disk with it. A run whose worker is lost continues elsewhere from its
checkpoint. On CPUs the results have the bits of `execute` on one machine, because they do not depend on the stack.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from waffle_fl.config import RunConfig
from waffle_fl.data_folder import data_dir
from waffle_fl.errors import WaffleError, writable
from waffle_fl.experiment import Interrupted, Listener, Runtime
from waffle_fl.experiment.execution import open_run, stop_requests
from waffle_fl.experiment.grouping import stacks_of
from waffle_fl.experiment.prepared_run import PreparedRun, prepare
from waffle_fl.manifest import CHECKPOINTS, LOG, Finding, summary
from waffle_fl.ray_cluster.connection import Cluster, check_address, connect, require_ray
from waffle_fl.ray_cluster.folder_copies import read_folder, write_changes
from waffle_fl.ray_cluster.worker import Ended, StackTask
from waffle_fl.records import locked, read_json, read_rounds

POLL_SECONDS = 0.25
LOSSES = 3  # workers that a task may lose in a row without a round in between
STOP_SECONDS = 30.0  # how long the driver waits for checkpoints after an error of its own
_calls = itertools.count(int.from_bytes(secrets.token_bytes(6), "big") << 16)


def execute_on_ray(
    runs: Sequence[tuple[RunConfig, Path]],
    runtime: Runtime,
    listener: Listener,
    until: int | None = None,
    shares_disk: bool = True,
) -> list[dict[str, Any]]:
    """Train every run to its end on a cluster and return the results in order, as `execute` does.

    With `shares_disk` false no worker uses the run folders themselves, even if it sees them.
    """
    require_ray()
    check_address(runtime.address)
    if runtime.device not in ("auto", "cpu", "cuda"):
        raise WaffleError(f"device: expected auto, cpu or cuda with --on ray, got {runtime.device!r}")
    here = replace(runtime, on="local", address="", device="cpu", minutes=0.0)
    prepared = [
        prepare(config, folder.absolute(), here, torch.device("cpu"))._replace(start=_saved_rounds(folder))
        for config, folder in runs
    ]
    results = _finished(prepared, here, listener)
    listener.planned(runs, len(results))
    waiting = [i for i, run in enumerate(prepared) if i not in results and (until is None or run.start < until)]
    if waiting:
        with _marker([folder.absolute() for _, folder in runs], shares_disk) as marker, contextlib.ExitStack() as stack:
            cluster = connect(runtime.address)
            stopped = stack.enter_context(stop_requests(runtime.minutes))
            driver = _Driver(cluster, prepared, runtime, listener, until, marker, stopped, stack)
            driver.train(waiting)
            results |= driver.results
    return [results.get(i, {"status": "paused", "rounds": until}) for i in range(len(runs))]


def _finished(prepared: Sequence[PreparedRun], runtime: Runtime, listener: Listener) -> dict[int, dict[str, Any]]:
    """Check the folders of finished runs, and return their results by number."""
    results: dict[int, dict[str, Any]] = {}
    findings: list[Finding] = []
    for i, run in enumerate(prepared):
        if (run.folder / "result.json").exists():
            known = read_json(run.folder / "provenance.json") or {}
            device = str(known.get("binding", {}).get("device", "cpu"))  # which device the cluster has is unknown yet
            with contextlib.ExitStack() as stack:
                result = open_run(stack, run, runtime, device, listener, findings)
            if isinstance(result, dict):
                results[i] = result
    for line in summary(findings):
        listener.warned(line)
    return results


def _saved_rounds(folder: Path) -> int:
    """Return the round of the newest checkpoint."""
    return max((int(path.name.split("-")[1].split(".")[0]) for path in folder.glob(CHECKPOINTS)), default=0)


@contextlib.contextmanager
def _marker(folders: Sequence[Path], shares_disk: bool) -> Iterator[tuple[str, str]]:
    """Yield path and content of a file beside the run folders that exists during the training."""
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    content = secrets.token_hex(16)
    path = common / f".ray-{content[:8]}"
    with writable(common):
        common.mkdir(parents=True, exist_ok=True)
        if shares_disk:
            path.write_text(content)
    try:
        yield str(path), content
    finally:
        path.unlink(missing_ok=True)


class _Submitted(NamedTuple):
    """A task that was submitted, the rounds that all runs had made then, and how many workers it lost in a row."""

    task: StackTask
    rounds: int
    losses: int


class _Driver:
    """One call: submits tasks, passes on their events, and submits again what a lost worker left."""

    def __init__(
        self,
        cluster: Cluster,
        prepared: Sequence[PreparedRun],
        runtime: Runtime,
        listener: Listener,
        until: int | None,
        marker: tuple[str, str],
        stopped: Callable[[], int],
        stack: contextlib.ExitStack,
    ) -> None:
        self._cluster, self._prepared, self._runtime, self._listener = cluster, prepared, runtime, listener
        self._until, self._marker, self._stopped, self._stack = until, marker, stopped, stack
        self._ray, self._call, self._numbers = cluster.ray, next(_calls), itertools.count()
        self._active: dict[Any, _Submitted] = {}  # by the reference of the task's result
        self._started: set[int] = set()
        self._locked: set[int] = set()
        self._lost: set[int] = set()  # runs that lost a worker
        self._rounds: dict[int, int] = {}  # reported to the listener, by run
        self._sends_files = False
        self._failure = ""
        self._signal = 0  # after which all tasks were asked to stop
        self.results: dict[int, dict[str, Any]] = {}

    def train(self, waiting: Sequence[int]) -> None:
        """Train these runs until all have ended, one has failed, or the user stops them."""
        needs, workers = self._needs(len(waiting))
        position = {id(self._prepared[i].spec): i for i in waiting}
        stacks = stacks_of([self._prepared[i] for i in waiting], self._runtime.stack, workers)
        for runs in stacks:
            self._submit([position[id(run.spec)] for run in runs], needs)
        try:
            while self._active:
                ready, _ = self._ray.wait(list(self._active), timeout=POLL_SECONDS)
                self._receive()
                for reference in ready:
                    self._settle(reference, needs)
                if self._stopped() and not self._is_ending:
                    self._signal = self._stopped()
                    self._stop()
        finally:
            if self._active:
                self._abandon()
        if self._failure:
            raise WaffleError(self._failure)
        if self._signal:
            raise Interrupted(self._signal)

    def _needs(self, runs: int) -> tuple[dict[str, float], int]:
        """Return the resources of a task, and how many tasks the cluster can run at once."""
        cpus, gpus = self._cluster.cpus() or [1], self._cluster.gpus()
        if self._runtime.device == "cuda" and not gpus:
            raise WaffleError("device cuda was requested, but the cluster has no GPU: use --device auto or cpu")
        if gpus and self._runtime.device != "cpu":
            return {"num_cpus": self._runtime.workers or 1, "num_gpus": 1}, gpus
        each = self._runtime.workers or max(1, min(min(cpus), sum(cpus) // runs))
        if each > max(cpus):
            raise WaffleError(f"workers: expected at most {max(cpus)}, the cores of a node, got {each}")
        return {"num_cpus": each}, sum(count // each for count in cpus)

    def _submit(self, numbers: Sequence[int], needs: dict[str, float], losses: int = 0) -> None:
        runtime = replace(
            self._runtime,
            on="local",
            address="",
            minutes=0.0,
            data_dir=str(data_dir(self._runtime.data_dir).absolute()),
            workers=int(needs["num_cpus"]),
            device="cuda" if "num_gpus" in needs else "cpu",
        )
        folders = {i: self._prepared[i].folder for i in numbers}
        task = StackTask(
            call=self._call,
            number=next(self._numbers),
            runs=[(i, self._prepared[i].config.to_json(), str(folder)) for i, folder in folders.items()],
            runtime=runtime,
            until=self._until,
            directory=str(Path.cwd()),
            marker=self._marker,
            files=self._files(folders),
            is_repeated=any(i in self._lost for i in numbers),
        )
        options = self._cluster.train.options(
            **needs, scheduling_strategy="SPREAD", name=f"waffle-fl: {len(numbers)} runs"
        )
        self._active[options.remote(task, self._cluster.queue)] = _Submitted(task, self._made(), losses)

    def _files(self, folders: Mapping[int, Path]) -> dict[int, dict[str, bytes]] | None:
        """Return the files of the folders for workers without this disk; None if it is unknown whether any has to."""
        if not any((folder / "config.json").exists() for folder in folders.values()):
            return {}
        return {i: read_folder(folder)[0] for i, folder in folders.items()} if self._sends_files else None

    def _made(self) -> int:
        return sum(self._rounds.values())

    def _receive(self) -> None:
        """Pass on the events of all tasks."""
        for kind, number, *more in self._ray.get(self._cluster.queue.take.remote(self._call)):
            if kind == "started":
                self._started.add(number)
            elif kind == "warned":
                self._listener.warned(*more)
            elif kind == "files":
                self._write(number, *more)
            else:
                self._pass_on(kind, number, *more)

    def _pass_on(self, kind: str, i: int, content: Any) -> None:
        """Pass on an event of a run, unless it repeats what was reported before its worker was lost."""
        if kind == "resumed" and i not in self._lost:
            self._rounds[i] = content
            self._listener.resumed(self._prepared[i].config, content)
        elif kind == "resumed":  # a lost worker may have saved rounds that it had not reported
            for measured in read_rounds(self._prepared[i].folder / LOG)[:content]:
                self._advance(i, measured)
        elif kind == "advanced":
            self._advance(i, content)
        elif kind == "ended" and i not in self.results:
            self.results[i] = content
            self._listener.ended(self._prepared[i].config, content)

    def _advance(self, i: int, measured: dict[str, Any]) -> None:
        if measured["round"] > self._rounds.get(i, 0):
            self._rounds[i] = measured["round"]
            self._listener.advanced(self._prepared[i].config, measured)

    def _write(self, i: int, files: dict[str, bytes], present: list[str]) -> None:
        """Write what a worker sent into the run's folder, which stays locked."""
        folder = self._prepared[i].folder
        if i not in self._locked:
            with writable(folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(locked(folder))
            self._locked.add(i)
        write_changes(folder, files, present)

    def _settle(self, reference: Any, needs: dict[str, float]) -> None:
        """React to the end of a task."""
        submitted = self._active.pop(reference)
        task = submitted.task
        left = [i for i, *_ in task.runs if i not in self.results]
        try:
            ended = Ended(*self._ray.get(reference))
        except self._ray.exceptions.TaskCancelledError:
            return
        except self._ray.exceptions.RayTaskError as error:
            self._fail(_reason(error))
            return
        except self._ray.exceptions.RayError:
            ended = Ended("stopped", "lost")
        if ended.status == "failed":
            self._fail(ended.message)
        elif ended.status == "needs files" and not self._is_ending:
            self._sends_files = True
            self._submit(left, needs)
        elif ended.status == "stopped" and left and not self._is_ending:
            losses = 1 if self._made() > submitted.rounds else submitted.losses + 1
            if losses >= LOSSES:
                self._fail(f"{losses} workers in a row were lost, the last one with {_names(self._prepared, left)}: "
                           "see Ray's logs, or use fewer runs per task (--stack)")  # fmt: skip
                return
            self._listener.warned(f"a worker was lost: {_names(self._prepared, left)} continue from their checkpoints")
            self._lost.update(left)
            self._submit(left, needs, losses)

    @property
    def _is_ending(self) -> bool:
        """Whether all tasks were asked to stop."""
        return bool(self._signal or self._failure)

    def _fail(self, message: str) -> None:
        self._failure = self._failure or message
        self._stop()

    def _stop(self) -> None:
        """Ask all tasks to stop after their round, and cancel those that wait for resources."""
        self._ray.get(self._cluster.queue.stop.remote(self._call))
        for reference, submitted in self._active.items():
            if submitted.task.number not in self._started:
                self._ray.cancel(reference)

    def _abandon(self) -> None:
        """Stop all tasks after an error of the driver; after a second Ctrl-C, without waiting for their checkpoints."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            seconds = 0.0 if self._is_ending else STOP_SECONDS
            self._stop()
            self._ray.wait(list(self._active), num_returns=len(self._active), timeout=seconds)


def _names(prepared: Sequence[PreparedRun], numbers: Sequence[int]) -> str:
    first = prepared[numbers[0]].folder.name
    return first if len(numbers) == 1 else f"{first} and {len(numbers) - 1} more"


def _reason(error: Any) -> str:
    """Return the last line of an error of a worker."""
    lines = str(error).strip().splitlines()
    if "No module named 'waffle_fl'" in str(error):
        return "a node of the cluster lacks this package: install waffle-fl[ray] in the Python that runs `ray start`"
    return f"a worker failed: {lines[-1] if lines else type(error).__name__}; see Ray's logs"
