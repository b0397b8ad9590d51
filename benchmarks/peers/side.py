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
    """The work that the benchmark saved: the initial network, and each agent's samples; all of them train, or a cohort."""

    def __init__(self, folder: Path) -> None:
        work: dict[str, Any] = torch.load(folder / "work.pt")
        self.lr: float = work["lr"]
        self.batch_size: int = work["batch_size"]
        self._rounds: list[list[tuple[Tensor, Tensor]]] | None = work.get("rounds")
        if self._rounds:
            self.count, self.agents = len(self._rounds), len(self._rounds[0])
            self.cohort = self.agents
        else:
            self._pool, self._train = work["pool"], work["train"]
            self.count, self.agents, self.cohort = work["count"], len(self._train), work["cohort"]
        self.module: nn.Module = MODELS[work["network"]](self.samples(0, 0)[0].shape[1:], 10)
        load(self.module, work["start"])

    def samples(self, r: int, agent: int) -> tuple[Tensor, Tensor]:
        """Return an agent's samples in the order of a round, or in one order if a cohort is sampled."""
        if self._rounds:
            return self._rounds[r][agent]
        x, y = self._pool
        return x[self._train[agent]], y[self._train[agent]]


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
