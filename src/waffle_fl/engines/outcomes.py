"""Turn the measurements of a round into its Outcome, in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from waffle_fl.engines.aggregation import participants_of, screened_of
from waffle_fl.engines.run_spec import Measured, Outcome, RunSpec, State
from waffle_fl.errors import Diverged
from waffle_fl.guard import NOT_ASKED


def outcome_of(
    index: int, spec: RunSpec, measured: dict[str, Any], after: State, before: State, r: int, attempt: int
) -> Outcome:
    """Return the outcome of a round; if Alice's update is not finite it has an error and keeps the state `before`."""
    names, alice = spec.federation.names, spec.federation.alice
    received, codes, refused = measured.pop("received"), measured.pop("codes"), measured.pop("refused", [])
    for key in ("loss", "validation_loss", "rmse", "validation_rmse"):
        if key in measured and not math.isfinite(measured[key]):
            measured[key] = None
    participants = participants_of(codes, names)
    if participants:
        measured["participants"] = participants
    screened = screened_of(codes, names, spec.federation.samples.tolist())
    if screened:
        measured["screened"] = screened
    if refused:
        measured["refused"] = [[names[agent], reason] for agent, reason in refused]
    if spec.attackers and "weights" in measured:
        measured["attackers_weight"] = sum(measured["weights"][agent] for agent in spec.attackers)
    line = cast(Measured, {"round": r, **measured})
    if (received[alice] or codes[alice] == NOT_ASKED) and measured["loss"] is not None:
        return Outcome(index, r, line, after, attempt)
    return Outcome(index, r, line, before, attempt, diverged(r, names[alice], attempt + 1))


def diverged(r: int, alice: str, attempts: int) -> Diverged:
    """Return the error of a run whose Alice sent no finite update."""
    return Diverged(
        f"round {r}: the training of Alice ({alice}) diverged (no finite update in {attempts} "
        f"attempt{'s' * (attempts > 1)}): "
        "lower lr, or set clip; earlier rounds are kept"
    )


def to_numbers(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert all tensors of all runs to plain numbers, in one transfer from the device."""
    tensors = [value for entry in measured for value in entry.values() if isinstance(value, Tensor)]
    numbers = iter(torch.cat([t.double().flatten() for t in tensors]).tolist())

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return [next(numbers) for _ in range(value.numel())] if value.ndim else next(numbers)

    return [{key: plain(value) for key, value in entry.items()} for entry in measured]
