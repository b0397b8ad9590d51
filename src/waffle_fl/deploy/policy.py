"""A site's rules on what may leave it. They come from the site's own file and are enforced at the site."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from waffle_fl.batches import batch_sizes
from waffle_fl.config import RunConfig
from waffle_fl.errors import WaffleError

STATISTICS = "stats"  # running statistics of layer inputs, not a training step, so `max_norm` does not apply


class Refused(WaffleError):
    """A refused request. The message may be sent to the server."""


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
    epsilon: float = 0.0
    delta: float = 1e-5
    min_contributors: float = 1.0

    def admit(self, config: Any, size: int) -> None:
        """Refuse runs that the rules exclude. Called before the config is parsed, because parsing may import code."""
        method = config.get("method") if isinstance(config, dict) else None
        if method not in self.methods:
            raise Refused(f"this site takes part in {', '.join(self.methods)}, not in {str(method)[:40]}")
        for text in _importable(config):
            if text not in self.imports:
                raise Refused(
                    f"this site does not import {text[:80]!r}: to allow it, list it under imports in its site.toml"
                )
        self._check_mb(size, "a message")

    def check_surveys(self, different: int) -> None:
        """Refuse to summarise the data for more ways of reading and splitting it than `surveys` allows."""
        if different > self.surveys:
            raise Refused(
                f"this site summarises its data for {self.surveys} way(s) of reading and splitting it, and this is one "
                "more: use the target, split and columns of its first run, or ask the site to raise surveys"
            )

    def check_rounds(self, different: int) -> None:
        """Refuse more updates, or more models to score, than `rounds` allows in total."""
        if different > self.rounds:
            raise Refused(f"this site answers at most {self.rounds} rounds in total, and this is one more")

    def check_work(self, config: RunConfig, samples: int, model_bytes: int) -> None:
        """Refuse a round with too few or too many steps or rows, or too much memory, before allocating anything.

        A method's integer hyperparameters multiply steps or memory: inner steps, clusters, models sent.
        """
        s = config.settings
        if self.epsilon and s.privacy not in ("dp", "masked+dp"):
            raise Refused("this site has a privacy budget: it takes part in runs with privacy = dp only, or masked+dp")
        if self.min_contributors > 1 and s.privacy not in ("masked", "masked+dp"):
            raise Refused(
                f"this site sends sums of at least {self.min_contributors:g} contributors only (min_contributors): set "
                "privacy to masked"
            )
        steps = s.steps(samples)
        options = config.to_json()["options"].values()
        repeats = math.prod(max(1, number) for number in options if type(number) is int)
        if max(s.batch_size, steps * repeats) > self.max_steps:
            raise Refused(
                f"a round needs more steps, or a batch more rows, than this site's max_steps {self.max_steps}"
            )
        self._check_mb(model_bytes * repeats, "this model")
        if samples > 0 and min(batch_sizes(samples, s.batch_size, s.remainder)) < self.min_batch:
            raise Refused(f"this site requires at least {self.min_batch} rows per mini-batch: raise batch_size")
        if 0 < steps < self.min_steps:
            raise Refused(
                f"a round has {steps} step(s) here, and an update from fewer than {self.min_steps} reveals too much "
                "about its rows: lower batch_size, or raise epochs"
            )

    def check_exposed(self, shares: Sequence[float], usual: Callable[[], Sequence[float]]) -> None:
        """Refuse a model that singles out many more rows than a random model: its update would reveal them."""
        if max(shares) <= self.max_exposed:
            return
        for share, random in zip(shares, usual(), strict=True):
            if share > self.max_exposed + 2 * random:
                raise Refused(
                    f"this model singles out {share:.0%} of the training rows, and its update would reveal them: this "
                    f"site allows {self.max_exposed:.0%} plus twice the share of a random model"
                )

    def _check_mb(self, size: int, what: str) -> None:
        if size > self.max_mb << 20:
            raise Refused(f"{what} needs more than the {self.max_mb} MB that this site allows")

    def let_update_out(self, up: Any) -> Any:
        """Return the update if its norm is allowed. A non-finite update is replaced by NaN, which reveals only that."""
        if not all(bool(value.isfinite().all()) for value in up):
            return type(up)(
                *(torch.full_like(v, torch.nan) if v.is_floating_point() else v.new_zeros(v.shape) for v in up)
            )
        for name, value in up._asdict().items():
            if name != STATISTICS and float(value.double().norm()) > self.max_norm:
                raise Refused(f"the update's norm is too large to leave this site, which allows {self.max_norm:.3g}")
        return up

    def let_out(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics that may leave; values that are not finite become None."""
        return {
            name: value if isinstance(value, float) and math.isfinite(value) else None
            for name, value in measured.items()
            if name in self.metrics
        }


def _importable(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a config that name code (`module:name`): its method, its model, and its method's options."""
    settings, options = config.get("settings"), config.get("options")
    texts = [config.get("method"), *([settings.get("model")] if isinstance(settings, dict) else [])]
    texts += options.values() if isinstance(options, dict) else []
    yield from (text for text in texts if isinstance(text, str) and ":" in text)
