"""The peer's side: the work it reads, and the benchmark that requests rounds over stdin and stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.plain import load
from waffle_fl.models import MODELS


class Work:
    """The work that the benchmark saved: the initial network, and each agent's samples per round."""

    def __init__(self, folder: Path) -> None:
        work: dict[str, Any] = torch.load(folder / "work.pt")
        self.lr: float = work["lr"]
        self.batch_size: int = work["batch_size"]
        self.rounds: list[list[tuple[Tensor, Tensor]]] = work["rounds"]
        self.agents = len(self.rounds[0])
        self.module: nn.Module = MODELS[work["network"]](self.rounds[0][0][0].shape[1:], 10)
        load(self.module, work["start"])


@lru_cache(maxsize=1)
def work_of(folder: Path) -> Work:
    """Return the work in this folder, read once per process."""
    torch.set_num_threads(1)
    return Work(folder)


class Benchmark:
    """The connection to the benchmark. Output of libraries goes to stderr, so that stdout has only replies."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder, self._began = folder, 0.0
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._answer(version=version)

    def wait(self) -> None:
        """Wait until a round is requested, then start the clock."""
        if not sys.stdin.readline():
            raise EOFError("the benchmark has ended")
        self._began = time.perf_counter()

    def done(self, parameters: Tensor) -> None:
        """Stop the clock and save the model as one vector."""
        seconds = time.perf_counter() - self._began
        np.save(self.folder / "model.npy", parameters.numpy())
        self._answer(seconds=seconds)

    def _answer(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
