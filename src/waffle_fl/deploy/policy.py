"""What a site lets out. It is read from the site's own file and enforced there, whatever the server asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from waffle_fl.batches import batch_sizes
from waffle_fl.config import RunConfig
from waffle_fl.errors import WaffleError

STATISTICS = "stats"  # of the layers' inputs: no step of training, so that its length means nothing


class Refused(WaffleError):
    """Why a site does not answer, in words that may leave it."""


@dataclass(frozen=True)
class Policy:
    """A site's rules, each a key of site.toml."""

    methods: tuple[str, ...]
    imports: tuple[str, ...]
    targets: tuple[str, ...]
    categorical: tuple[str, ...]
    min_count: int
    max_rows: int
    surveys: int
    rounds: int
    min_batch: int
    min_steps: int
    max_exposed: float
    max_norm: float
    max_steps: int
    max_mb: int
    metrics: tuple[str, ...]
    model_may_leave: bool

    def admit(self, config: Any, size: int) -> None:
        """Refuse a run that this site does not take part in, before its config is read: reading may import code."""
        method = config.get("method") if isinstance(config, dict) else None
        if method not in self.methods:
            raise Refused(f"this site takes part in {', '.join(self.methods)}, not in {str(method)[:40]}")
        for text in _importable(config):
            if text not in self.imports:
                raise Refused(
                    f"this site does not import {text[:80]!r}: its site.toml would have to list it in imports"
                )
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
        """Refuse a round of too few steps or rows, of too many, or of too much memory, before any of it is made.

        Whole numbers among a method's hyperparameters multiply one or the other: inner steps, clusters, models sent.
        """
        s = config.settings
        steps = s.steps(samples)
        options = config.to_json()["options"].values()
        repeats = math.prod(max(1, number) for number in options if type(number) is int)
        if max(s.batch_size, steps * repeats) > self.max_steps:
            raise Refused(f"a round would take more steps, or a batch more rows, than this site's {self.max_steps}")
        self._check_mb(model_bytes * repeats, "this model")
        if samples > 0 and min(batch_sizes(samples, s.batch_size, s.remainder)) < self.min_batch:
            raise Refused(f"this site trains on {self.min_batch} or more rows per mini-batch: raise batch_size")
        if 0 < steps < self.min_steps:
            raise Refused(
                f"a round would be {steps} step(s) here, and an update of fewer than {self.min_steps} tells too much "
                "of its rows: lower batch_size, or raise epochs"
            )

    def check_exposed(self, shares: Sequence[float], usual: Callable[[], Sequence[float]]) -> None:
        """Refuse a model that singles out many more rows than a random one does: its update would reveal them."""
        if max(shares) <= self.max_exposed:
            return
        for share, random in zip(shares, usual(), strict=True):
            if share > self.max_exposed + 2 * random:
                raise Refused(
                    f"this model singles out {share:.0%} of the training rows, and its update would reveal them: this "
                    f"site allows {self.max_exposed:.0%}, and twice what a random model does"
                )

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


def _importable(config: Mapping[str, Any]) -> Iterator[str]:
    """Texts of a config that name code (`module:name`): its method, its model, and any option of its method."""
    settings, options = config.get("settings"), config.get("options")
    texts = [config.get("method"), *([settings.get("model")] if isinstance(settings, dict) else [])]
    texts += options.values() if isinstance(options, dict) else []
    yield from (text for text in texts if isinstance(text, str) and ":" in text)
