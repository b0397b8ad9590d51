"""Workers: the same bits as without them, and nobody left behind, however a run ends."""

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

from conftest import BATCH, make_federation, make_model
from waffle_fl import SGD, FedAvg, Federation, FlatModel, RunSpec, Waffle, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.engines import row_training, workers
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.models import Quadratic, output_is_loss

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has seen a GPU does not fork")


@pytest.fixture
def hired(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Workers from the second round on, whatever they gain; the list fills with their process numbers."""
    for name in ("ROUND", "START", "WARM_UP"):
        monkeypatch.setattr(workers, name, 0.0)
    processes: list[int] = []
    hire = workers.Workers._start

    def noted(self: workers.Workers, share: int) -> None:
        hire(self, share)
        processes.append(list(self._sockets)[-1])

    monkeypatch.setattr(workers.Workers, "_start", noted)
    return processes


def gone(process: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return True


def cells_of(method: str, count: int = 3) -> list[RunSpec]:
    sizes = ((23, 9, 32, 14, 8), (40, 3, 11), (5, 6, 7, 20))
    algorithm = ALGORITHMS[method](sgd=SGD(0.1, 0.5))
    return [RunSpec(algorithm, make_federation(sizes[k], alice=k, seed=k), k) for k in range(count)]


def numbers(outcomes: list[list[Outcome]]) -> list[Any]:
    """All that a run said, its times apart; tensors as lists, so that every bit is compared."""
    return [
        (o.index, {k: v for k, v in o.measured.items() if k != "seconds"}, [t.tolist() for s in o.state for t in s])
        for round_ in outcomes
        for o in round_
    ]


def run(specs: list[RunSpec], model: FlatModel, cores: int, rounds: int = 5) -> list[Any]:
    return numbers(list(simulate(specs, model, rounds=rounds, batch_size=BATCH, workers=cores)))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_workers_change_no_bit(method: str, stacked: bool, hired: list[int]) -> None:
    """Whole cells or single rows done by workers: the bits of one process, in every round and every state."""
    model = make_model(torch.float32, stacked=stacked)
    for specs, cores in ((cells_of(method), 2), (cells_of(method), 3), (cells_of(method, 1), 3)):
        alone = run(specs, model, 1)
        assert not hired
        assert run(specs, model, cores) == alone
        assert len(hired) == cores - 1
        hired.clear()


def test_chunks_of_workers_change_no_bit(hired: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter how many rows of a worker's share go at once."""
    specs, model = cells_of("waffle", 1), make_model(torch.float32)
    alone = run(specs, model, 1)
    monkeypatch.setattr(row_training, "CHUNK_BYTES", {"cpu": 2 * 16 * 57 * 4})
    assert run(specs, model, 2) == alone
    assert hired


def test_short_runs_hire_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a few milliseconds are not worth a process."""
    monkeypatch.setattr(workers.Workers, "_start", lambda self, share: pytest.fail("hired"))
    run(cells_of("fedavg"), make_model(), 2)


@pytest.mark.parametrize("cores", [2, 4])
def test_an_early_end_leaves_nobody_behind(cores: int, hired: list[int]) -> None:
    """Workers end with the last round, with a generator that is closed, and with one that is dropped."""
    specs, model = cells_of("fedavg"), make_model()
    for rounds, end in ((5, list), (9, lambda stream: stream.close()), (9, lambda stream: None)):
        stream = simulate(specs, model, rounds=rounds, batch_size=BATCH, workers=cores)
        for _ in range(3):
            next(stream)
        assert len(hired) == cores - 1
        assert not any(gone(process) for process in hired)
        end(stream)
        del stream
        assert all(gone(process) for process in hired)
        hired.clear()


@pytest.mark.parametrize("cores", [2, 4])
def test_a_killed_worker_is_an_error(cores: int, hired: list[int]) -> None:
    """A worker that was killed ends the run with one clear line, and the others with it."""
    stream = simulate(cells_of("fedavg"), make_model(), rounds=9, batch_size=BATCH, workers=cores)
    for _ in range(3):
        next(stream)
    os.kill(hired[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with status -9: is there enough memory"):
        next(stream)
    assert all(gone(process) for process in hired)


def test_signals_are_the_parent_s_to_heed(hired: list[int]) -> None:
    """A worker that is interrupted or told to stop goes on: the parent ends it, or does not."""
    stream = simulate(cells_of("fedavg"), make_model(), rounds=4, batch_size=BATCH, workers=2)
    next(stream), next(stream)
    os.kill(hired[0], signal.SIGINT)
    os.kill(hired[0], signal.SIGTERM)
    assert len(list(stream)) == 2


def test_what_a_worker_says_of_its_error_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker's own traceback goes to stderr before the run ends."""

    def work(share: int, r: int, attempt: int) -> None:
        if share:
            raise ArithmeticError(f"round {r} attempt {attempt}")

    team = workers.Workers(work, 2)
    with pytest.raises(RuntimeError, match="ended with status 1"):
        team(7, 1)
    assert "ArithmeticError: round 7 attempt 1" in capfd.readouterr().err


def test_workers_end_with_a_parent_that_is_killed() -> None:
    """SIGKILL leaves the parent no time to end its workers; they end all the same."""
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
    while not all(gone(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_holds_no_file_of_its_parent(tmp_path: Path) -> None:
    """Of its parent's files a worker keeps the standard ones and its line: a lock ends with the parent that took it."""
    with (tmp_path / "lock").open("w"):
        team = workers.Workers(lambda share, r, attempt: None, 3)
        team(1, 0)
        held = [len(list(Path(f"/proc/{process}/fd").iterdir())) for process in team._sockets]
        team.close()
    assert held == [4, 4]


def overshooting(starts: tuple[float, ...]) -> tuple[list[RunSpec], FlatModel]:
    """Steps that are too long: who starts in the optimum stays there, others leave it nine times as far a step."""
    pool = make_federation((4, 4))
    specs = [
        RunSpec(FedAvg(SGD(10.0)), Federation(**{**pool.__dict__, "x": torch.full_like(pool.x, start)}), 1)
        for start in starts
    ]
    return specs, FlatModel(lambda: Quadratic(torch.ones(5)), loss=output_is_loss)


@pytest.mark.parametrize("tampered", [False, True])
def test_a_cell_drops_out_of_its_workers(tampered: bool, hired: list[int]) -> None:
    """A diverged cell tries again without workers and is gone; the others go on with new ones, their bits the same."""
    specs, model = overshooting((0.0, 1e-3, 0.0))
    if tampered:  # then rows are shared out, not cells
        specs[0] = RunSpec(specs[0].algorithm, specs[0].federation, 1, tamper=lambda up, r: up)
    alone, together = (list(simulate(specs, model, rounds=14, batch_size=BATCH, workers=cores)) for cores in (1, 2))
    assert numbers(together) == numbers(alone)
    (dropped,) = [k for k, outcomes in enumerate(together) if any(o.error for o in outcomes)]
    assert 3 < dropped < 12
    assert [o.index for o in together[-1]] == [0, 2]
    assert len(hired) == 2
    assert all(gone(process) for process in hired)


def test_tampering_may_keep_what_it_saw(hired: list[int]) -> None:
    """An attacker that replays an old update replays that one, not what workers have written over it since."""
    seen: dict[int, list[Any]] = {1: [], 2: []}
    states = []
    for cores, kept in seen.items():

        def replay(up: Any, r: int, kept: list[Any] = kept) -> Any:
            kept.append(up)
            return kept[max(0, r - 3)]

        spec = RunSpec(Waffle(SGD(0.1)), make_federation(), 1, tamper=replay)
        states.append(run([spec], make_model(torch.float32), cores, rounds=7))
    assert states[0] == states[1]
    assert hired


def test_a_run_that_is_never_begun_hires_nobody(hired: list[int]) -> None:
    """To make the stream costs nothing yet."""
    stream: Iterator[list[Outcome]] = simulate(cells_of("fedavg"), make_model(), rounds=3, workers=2)
    del stream
    assert not hired
