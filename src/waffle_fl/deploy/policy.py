"""What a site lets out. It is read from the site's own file and enforced there, whatever the server asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from waffle_fl.config import RunConfig
from waffle_fl.errors import WaffleError

STATISTICS = "stats"  # of the layers' inputs: no step of training, so that its length means nothing


class Refused(WaffleError):
    """Why a site does not answer, in words that may leave it."""


@dataclass(frozen=True)
class Policy:
    """A site's rules, one a field of site.toml."""

    methods: tuple[str, ...]
    models: tuple[str, ...]
    surveys: int
    rounds: int
    max_norm: float
    max_steps: int
    max_mb: int
    metrics: tuple[str, ...]
    model_may_leave: bool

    def admit(self, config: RunConfig, size: int) -> None:
        """Refuse a run that this site does not take part in, or a message of too many bytes."""
        if config.method not in self.methods:
            raise Refused(f"this site takes part in {', '.join(self.methods)}, not in {config.method}")
        model = config.settings.model
        if ":" in model and model not in self.models:
            raise Refused(f"this site does not import the model {model!r}: its site.toml would have to name it")
        self._check_mb(size, "a message")

    def check_surveys(self, different: int) -> None:
        """Refuse to tell of the data under one more way to read and split it."""
        if different > self.surveys:
            raise Refused(
                f"this site tells of its data as read and split in {self.surveys} way(s), and this would be one more: "
                "keep to the target, the split and the columns of its first run, or ask it to raise surveys"
            )

    def check_rounds(self, different: int) -> None:
        """Refuse one more update, or one more model to score, than the site answers in all."""
        if different > self.rounds:
            raise Refused(f"this site answers {self.rounds} rounds in all, and this would be one more")

    def check_work(self, config: RunConfig, samples: int, model_bytes: int) -> None:
        """Refuse what would take too long, or too much memory, before any of it is made.

        Whole numbers among a method's hyperparameters multiply one or the other: inner steps, clusters, models sent.
        """
        s = config.settings
        options = config.to_json()["options"].values()
        repeats = math.prod(max(1, number) for number in options if type(number) is int)
        if max(s.batch_size, s.epochs * -(-samples // s.batch_size) * repeats) > self.max_steps:
            raise Refused(f"a round would take more steps, or a batch more rows, than this site's {self.max_steps}")
        self._check_mb(model_bytes * repeats, "this model")

    def _check_mb(self, size: int, what: str) -> None:
        if size > self.max_mb << 20:
            raise Refused(f"{what} takes more than the {self.max_mb} MB that this site allows")

    def let_update_out(self, up: Any) -> Any:
        """An update that is not longer than the site allows; of one that is not finite nothing is told but that."""
        if not all(bool(value.isfinite().all()) for value in up):
            return type(up)(
                *(torch.full_like(v, torch.nan) if v.is_floating_point() else v.new_zeros(v.shape) for v in up)
            )
        for name, value in up._asdict().items():
            if name != STATISTICS and float(value.double().norm()) > self.max_norm:
                raise Refused(f"an update that is too long stays here: this site allows {self.max_norm:.3g}")
        return up

    def let_out(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics that may leave; what is not a finite number is told as none."""
        return {
            name: value if isinstance(value, float) and math.isfinite(value) else None
            for name, value in measured.items()
            if name in self.metrics
        }
