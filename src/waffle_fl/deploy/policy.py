"""What a site lets out. It is read from the site's own file and enforced there, whatever the server asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from waffle_fl.config import RunConfig
from waffle_fl.errors import WaffleError


class Refused(WaffleError):
    """Why a site does not answer, in words that may leave it."""


@dataclass(frozen=True)
class Policy:
    """A site's rules, one a field of site.toml."""

    methods: tuple[str, ...]
    rounds: int
    max_norm: float
    metrics: tuple[str, ...]
    models: tuple[str, ...] = ()
    model_may_leave: bool = False

    def admit(self, config: RunConfig, rounds: int) -> None:
        """Refuse a run that this site does not take part in; `rounds` is what it would have answered in all."""
        if config.method not in self.methods:
            raise Refused(f"this site takes part in {', '.join(self.methods)}, not in {config.method}")
        model = config.settings.model
        if ":" in model and model not in self.models:
            raise Refused(f"this site does not import the model {model!r}: its site.toml would have to name it")
        if rounds > self.rounds:
            raise Refused(f"this site answers {self.rounds} rounds in all, and this would be one more")

    def check_norm(self, update: Tensor) -> None:
        """Refuse to send an update that is longer than the site allows; one that is not finite tells nothing."""
        norm = float(update.double().norm())
        if math.isfinite(norm) and norm > self.max_norm:
            raise Refused(f"an update of norm {norm:.3g} stays here: this site allows {self.max_norm:.3g}")

    def let_out(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics that may leave; what is not a finite number is told as none."""
        return {
            name: value if isinstance(value, float) and math.isfinite(value) else None
            for name, value in measured.items()
            if name in self.metrics
        }
