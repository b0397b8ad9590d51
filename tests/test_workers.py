"""Workers: the same bits as without them, and no process left behind, however a run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import BATCH, make_federation, shared_model
from waffle_fl import SGD, FedAvg, Federation, FlatModel, RunSpec, WafflePaper, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.engines import row_training, workers
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.models import Quadratic, output_is_loss

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has seen a GPU does not fork")


@pytest.fixture
def worker_processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Force workers from the second round on, and return the list of their process numbers."""
    for name in ("ROUND", "START", "WARM_UP"):
        monkeypatch.setattr(workers, name, 0.0)
    processes: list[int] = []
    start = workers.Workers._start

    def start_and_record(self: workers.Workers, share: int) -> None:
        start(self, share)
        processes.append(list(self._sockets)[-1])

    monkeypatch.setattr(workers.Workers, "_start", start_and_record)
    return processes


def has_ended(process: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return True


def specs_of(method: str, count: int = 3) -> list[RunSpec]:
    sizes = ((12, 5, 17, 7), (9, 3), (5, 6, 10))
    algorithm = ALGORITHMS[method](sgd=SGD(0.1, 0.5))
    return [RunSpec(algorithm, make_federation(sizes[k], alice=k, seed=k), k) for k in range(count)]


def numbers(outcomes: list[list[Outcome]]) -> list[Any]:
    """Return all results of a run but its times, with tensors as lists, so that every bit is compared."""
    return [
        (o.index, {k: v for k, v in o.measured.items() if k != "seconds"}, [t.tolist() for s in o.state for t in s])
        for round_ in outcomes
        for o in round_
    ]


def run(specs: list[RunSpec], model: FlatModel, cores: int, rounds: int = 5) -> list[Any]:
    return numbers(list(simulate(specs, model, rounds=rounds, batch_size=BATCH, workers=cores)))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_workers_change_no_bit(method: str, stacked: bool, worker_processes: list[int]) -> None:
    """Workers that train whole runs or single rows give the bits of one process in every round and state."""
    model, rounds = shared_model(torch.float32, stacked=stacked), 3  # of which workers train the last two
    alone = run(specs := specs_of(method), model, 1, rounds)
    assert not worker_processes
    of_first = [numbers for numbers in alone if numbers[0] == 0]
    for some, cores, expected in ((specs, 2, alone), (specs[:1], 3 if stacked else 2, of_first)):
        assert run(some, model, cores, rounds) == expected
        assert len(worker_processes) == cores - 1
        worker_processes.clear()


def test_chunks_of_workers_change_no_bit(worker_processes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows that a worker trains at once changes no bit."""
    specs, model = specs_of("waffle-paper", 1), shared_model(torch.float32)
    alone = run(specs, model, 1)
    monkeypatch.setattr(row_training, "CHUNK_BYTES", {"cpu": 2 * 16 * 57 * 4})
    assert run(specs, model, 2) == alone
    assert worker_processes


def test_short_runs_start_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a few milliseconds start no worker."""
    monkeypatch.setattr(workers.Workers, "_start", lambda self, share: pytest.fail("hired"))
    run(specs_of("fedavg"), shared_model(), 2)


@pytest.mark.parametrize("cores", [2, 4])
def test_an_early_end_leaves_no_worker(cores: int, worker_processes: list[int]) -> None:
    """Workers end with the last round, with a closed generator, and with a dropped generator."""
    specs, model = specs_of("fedavg"), shared_model()
    for rounds, end in ((5, list), (9, lambda stream: stream.close()), (9, lambda stream: None)):
        stream = simulate(specs, model, rounds=rounds, batch_size=BATCH, workers=cores)
        for _ in range(3):
            next(stream)
        assert len(worker_processes) == cores - 1
        assert not any(has_ended(process) for process in worker_processes)
        end(stream)
        del stream
        assert all(has_ended(process) for process in worker_processes)
        worker_processes.clear()


@pytest.mark.parametrize("cores", [2, 4])
def test_a_killed_worker_is_an_error(cores: int, worker_processes: list[int]) -> None:
    """A killed worker ends the run with one clear line, and the other workers with it."""
    stream = simulate(specs_of("fedavg"), shared_model(), rounds=9, batch_size=BATCH, workers=cores)
    for _ in range(3):
        next(stream)
    os.kill(worker_processes[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with status -9: is there enough memory"):
        next(stream)
    assert all(has_ended(process) for process in worker_processes)


def test_workers_ignore_signals(worker_processes: list[int]) -> None:
    """A worker ignores SIGINT and SIGTERM; the parent decides when it ends."""
    stream = simulate(specs_of("fedavg"), shared_model(), rounds=4, batch_size=BATCH, workers=2)
    next(stream), next(stream)
    os.kill(worker_processes[0], signal.SIGINT)
    os.kill(worker_processes[0], signal.SIGTERM)
    assert len(list(stream)) == 2


def test_worker_traceback_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker's traceback goes to stderr before the run ends."""

    def work(share: int, r: int, attempt: int) -> None:
        if share:
            raise ArithmeticError(f"round {r} attempt {attempt}")

    team = workers.Workers(work, 2)
    with pytest.raises(RuntimeError, match="ended with status 1"):
        team(7, 1)
    assert "ArithmeticError: round 7 attempt 1" in capfd.readouterr().err


def test_workers_end_with_a_parent_that_is_killed() -> None:
    """Workers end when SIGKILL leaves their parent no time to end them."""
    code = """
import time
from waffle_fl.engines.workers import Workers
team = Workers(lambda share, r, attempt: None, 4)
team(1, 0)
print(*team._sockets, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    processes = [int(number) for number in parent.stdout.readline().split()]
    assert len(processes) == 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while not all(has_ended(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_close_their_parent_s_files(tmp_path: Path) -> None:
    """A worker closes its parent's files but the standard ones and its socket, so that locks end with the parent."""
    with (tmp_path / "lock").open("w"):
        team = workers.Workers(lambda share, r, attempt: None, 3)
        team(1, 0)
        held = [len(list(Path(f"/proc/{process}/fd").iterdir())) for process in team._sockets]
        team.close()
    assert held == [4, 4]


def overshooting(starts: tuple[float, ...]) -> tuple[list[RunSpec], FlatModel]:
    """Too large steps: a run that starts at the optimum stays there, others move nine times as far per step."""
    pool = make_federation((4, 4))
    specs = [
        RunSpec(FedAvg(SGD(10.0)), Federation(**{**pool.__dict__, "x": torch.full_like(pool.x, start)}), 1)
        for start in starts
    ]
    return specs, FlatModel(lambda: Quadratic(torch.ones(5)), loss=output_is_loss)


@pytest.mark.parametrize("tampered", [False, True])
def test_diverged_run_leaves_the_workers(tampered: bool, worker_processes: list[int]) -> None:
    """A diverged run is retried without workers and removed; the others continue with new workers and the same bits."""
    specs, model = overshooting((0.0, 1e-3, 0.0))
    if tampered:  # then rows are distributed to the workers, not runs
        specs[0] = RunSpec(specs[0].algorithm, specs[0].federation, 1, tamper=lambda up, r: up)
    alone, together = (list(simulate(specs, model, rounds=14, batch_size=BATCH, workers=cores)) for cores in (1, 2))
    assert numbers(together) == numbers(alone)
    (dropped,) = [k for k, outcomes in enumerate(together) if any(o.error for o in outcomes)]
    assert 3 < dropped < 12
    assert [o.index for o in together[-1]] == [0, 2]
    assert len(worker_processes) == 2
    assert all(has_ended(process) for process in worker_processes)


def test_replayed_updates_are_not_overwritten(worker_processes: list[int]) -> None:
    """An attacker that replays an old update sends that update, not later contents of the workers' memory."""
    seen: dict[int, list[Any]] = {1: [], 2: []}
    states = []
    for cores, kept in seen.items():

        def replay(up: Any, r: int, kept: list[Any] = kept) -> Any:
            kept.append(up)
            return kept[max(0, r - 3)]

        spec = RunSpec(WafflePaper(SGD(0.1)), make_federation(), 1, tamper=replay)
        states.append(run([spec], shared_model(torch.float32), cores, rounds=7))
    assert states[0] == states[1]
    assert worker_processes


def test_unstarted_run_has_no_worker(worker_processes: list[int]) -> None:
    """Creating the stream starts no worker."""
    stream: Iterator[list[Outcome]] = simulate(specs_of("fedavg"), shared_model(), rounds=3, workers=2)
    del stream
    assert not worker_processes
