"""Device, data folder and limits of runs, and the listener interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from waffle_fl.config import RunConfig
from waffle_fl.errors import Interrupted as Interrupted
from waffle_fl.errors import WaffleError

STACK = 64  # maximum number of runs trained together
CHECKPOINT_SECONDS = 10.0


@dataclass(frozen=True)
class Runtime:
    """Device, data folder, and how to train."""

    device: str = "auto"
    """auto, cpu or cuda."""
    data_dir: str = ""
    """Folder of the data sets. Default: $WAFFLE_DATA, or else the user's cache folder."""
    allow_unverified: bool = False
    """Accept data files whose checksum is not the official one. Noted in the record."""
    workers: int = 0
    """Number of worker processes. 0 means one per core. Does not change results."""
    stack: int = STACK
    """Maximum number of runs trained together."""
    engine: Literal["fast", "loop"] = "fast"
    """fast, or loop: one agent after another, written like the paper's algorithm, for reading and debugging."""
    rows: Literal["auto", "stacked", "single"] = "auto"
    """Train all agents as one stack, or one by one. auto stacks small models; on a CPU only without convolutions."""
    force: bool = False
    """Continue a run even if its config, data or code has changed. Noted in the record."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Minimum number of seconds between checkpoints. 0 saves after every round."""
    on: Literal["local", "ray"] = "local"
    """Train here, or as tasks of a Ray cluster: a running one, or one that is started on this machine."""
    address: str = ""
    """With --on ray: address of the cluster. Default: $RAY_ADDRESS, or else a cluster that runs on this machine."""
    minutes: float = 0.0
    """Save all runs and stop after this many minutes. 0 means no limit."""


class Listener:
    """Receives the events of a training. The base class ignores them."""

    def planned(self, runs: Sequence[tuple[RunConfig, Path]], finished: int) -> None: ...
    def resumed(self, config: RunConfig, start: int) -> None: ...
    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None: ...
    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None: ...
    def warned(self, message: str) -> None: ...

    def stopped(self) -> bool:
        """Whether training is to stop after this round, with all runs saved."""
        return False


def device_of(name: str) -> torch.device:
    """Return the torch device of this name; `auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WaffleError(f"expected a device such as auto, cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WaffleError("device cuda was requested, but none is available: use --device auto or cpu")
    if device.type not in ("cpu", "cuda"):
        raise WaffleError(f"expected the device auto, cpu or cuda, got {name!r}")
    return device
