"""Where and how runs are made, who listens to them, and how they are asked to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from waffle_fl.config import RunConfig
from waffle_fl.errors import Interrupted as Interrupted
from waffle_fl.errors import WaffleError

STACK = 64  # runs that train together at most
CHECKPOINT_SECONDS = 10.0


@dataclass(frozen=True)
class Runtime:
    """Where and how to run."""

    device: str = "auto"
    """auto, cpu or cuda."""
    data_dir: str = ""
    """Folder of the data sets (else $WAFFLE_DATA, else the user's cache folder)."""
    allow_unverified: bool = False
    """Use data files whose checksum is not the official one; the record says so."""
    workers: int = 0
    """Processes that train rows side by side; 0 takes one a core. It changes no result."""
    stack: int = STACK
    """Runs that train together at most."""
    engine: Literal["fast", "loop"] = "fast"
    """fast, or loop: every round as the paper prints it, one agent after another, to read and to debug."""
    rows: Literal["auto", "stacked", "single"] = "auto"
    """Train agents as one stack or row by row; auto stacks small models, on a CPU only those that do not convolve."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile models that train row by row; auto does so on a GPU in runs long enough to win the time back."""
    force: bool = False
    """Go on with a run whose config, data or code has changed; the record says so."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Seconds between checkpoints at least; 0 saves after every round."""
    minutes: float = 0.0
    """Stop after so many minutes, every run saved, as if by Ctrl-C; 0 never does."""


class Listener:
    """What a front end may want to hear of; the default hears nothing."""

    def planned(self, runs: Sequence[tuple[RunConfig, Path]], finished: int) -> None: ...
    def resumed(self, config: RunConfig, start: int) -> None: ...
    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None: ...
    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None: ...
    def warned(self, message: str) -> None: ...


def device_of(name: str) -> torch.device:
    """`auto` takes the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WaffleError(f"expected a device such as auto, cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WaffleError("device cuda was asked for, but this machine shows none: use --device auto or cpu")
    if device.type not in ("cpu", "cuda"):
        raise WaffleError(f"expected the device auto, cpu or cuda, got {name!r}")
    return device
