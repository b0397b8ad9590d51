"""Seed the random draws inside a forward pass, and leave the process's own generators unchanged."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_LOCK = threading.RLock()  # generators are global to the process, and models are evaluated in several threads


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python, and restore their states afterwards."""
    cuda = [device] if device.type == "cuda" else []
    with _LOCK, torch.random.fork_rng(devices=cuda):
        pythons, numpys = random.getstate(), np.random.get_state()
        torch.default_generator.manual_seed(seed)
        for gpu in cuda:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the process's generators; any draw changes them."""
    states = [torch.random.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    numpys: Any = np.random.get_state()
    return (*(state.numpy().tobytes() for state in states), random.getstate(), bytes(numpys[1]), *numpys[2:])
