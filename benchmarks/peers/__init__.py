"""Public peers: each runs FedAvg in a separate process and environment, one round per request.

Their environment is `.venv-peers`, which `make bench` creates; without it the benchmark skips them. A peer reads the
network, its initial parameters and the mini-batches of every round from a file, so that it does the same work as ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.plain import PlainLoop
from waffle_fl.federation import Federation

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
PEERS = {"Flower simulation": ((), "flower"), "pfl-research": (TWO_PROCESSES, "pfl_research")}
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


class Peer:
    """The process of a peer, as a context manager: started and warm inside, ended with all its children after."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.start_up_seconds, self.version = 0.0, ""

    def __enter__(self) -> Peer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and run the first round as a warm-up; both count as start-up."""
        began = time.perf_counter()
        launcher, module = PEERS[self.name]
        self._log = (self.folder / "log").open("w+")
        self._process = subprocess.Popen(
            [PYTHON, *launcher, "-m", "benchmarks.peers", module, self.folder],
            cwd=ROOT,
            env={
                **os.environ,
                **QUIET,
                "FLWR_HOME": str(self.folder),
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        try:
            self.version = self._answer()["version"]
            self.round()
        except BaseException:
            self.stop()
            raise
        self.start_up_seconds = time.perf_counter() - began

    def round(self) -> float:
        """Run one more round of FedAvg and return its seconds, measured by the peer."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # _answer reports the missing reply
            self._process.stdin.write("round\n")
            self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def model(self) -> NDArray[np.float32]:
        """Return the parameters after the latest round as one vector."""
        vector: NDArray[np.float32] = np.load(self.folder / "model.npy")
        return vector

    def stop(self) -> None:
        """Close stdin, then terminate, then kill the process group."""
        assert self._process.stdin
        for end in (self._process.stdin.close, self._process.terminate):
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                end()
                self._process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, str]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended unexpectedly:\n{self._log.read()[-3000:]}")
        answer: dict[str, str] = json.loads(line)
        return answer


def installed() -> bool:
    """Return whether the environment of the peers exists."""
    return PYTHON.exists()


def peers(network: str, plain: PlainLoop, rounds: int) -> Iterator[Peer]:
    """Yield each peer after its first round of the work of this plain loop; nothing if they are not installed.

    One at a time, because their processes keep the cores busy while they wait.
    """
    work = {
        "network": network,
        "start": plain.x,
        "lr": plain.lr,
        "batch_size": plain.batches.batch_size,
        "rounds": [_joined(plain.prepared(r)) for r in range(1, rounds + 1)],
    }
    return _started(work)


def cohort_peers(network: str, federation: Federation, start: Tensor, cohort: int, rounds: int) -> Iterator[Peer]:
    """Yield each peer after its first round of FedAvg in which it samples a cohort of the federation's agents."""
    work = {
        "network": network,
        "start": start,
        "lr": 0.05,
        "batch_size": 32,
        "cohort": cohort,
        "count": rounds,
        "pool": (federation.x, federation.y),
        "train": torch.stack(federation.train),
    }
    return _started(work)


def _started(work: dict[str, Any]) -> Iterator[Peer]:
    if not installed():
        return
    with tempfile.TemporaryDirectory() as runtime:
        folder = Path(runtime)
        torch.save(work, folder / "work.pt")
        for name in PEERS:
            with Peer(name, _own(folder, name)) as peer:
                yield peer


def _joined(prepared: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each agent's samples of a round in order; batches are slices of them."""
    return [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])) for batches in prepared]


def _own(folder: Path, name: str) -> Path:
    own = folder / name
    own.mkdir()
    (own / "work.pt").symlink_to(folder / "work.pt")
    return own
