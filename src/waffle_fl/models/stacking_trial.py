"""Find out once, with two samples, what a module does in a forward pass and whether its rows can be stacked."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from waffle_fl.models.batch import Batch
from waffle_fl.models.building import one_line
from waffle_fl.models.folded import SeededDropout
from waffle_fl.models.passes import Passes
from waffle_fl.models.seeding import generator_states, seeded

Way: TypeAlias = Literal["folded", "vmapped"]

ROWS = ((0, 1, 0), (1, 0, 0), (0, 0, 1))  # indices of the two samples; the third of each row is padding
NO_RULE = "There is a performance drop because we have not yet implemented the batching rule"
NOISE = 0.01  # added to parameters, so that none is 0 and no two rows are equal
log = logging.getLogger("waffle_fl")


class ForwardTraits(NamedTuple):
    """What a forward pass does apart from computing its output."""

    draws: bool  # draws random numbers, other than by nn.Dropout
    reads: bool  # reads values, so that control flow or shapes may depend on them
    overwrites: bool  # overwrites its input


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether any operation passes a tensor's values to Python, or makes a shape depend on them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler, which takes a second or two, to skip this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_index = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
        if by_index:
            self.found |= any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        else:
            tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
            self.found |= any(tag in func.tags for tag in tags)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def observe_forward(module: nn.Module, x: Tensor) -> ForwardTraits:
    """Run a copy of the module in training and in evaluation mode, and return what it does."""
    draws = overwrites = False
    reads_mode = _Reads()
    for training in (True, False):
        given, key = x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
        observed = copy.deepcopy(module).train(training)
        with seeded(0, x.device):
            before = generator_states(x.device)
            with SeededDropout(key), reads_mode:
                observed(given)
            draws |= before != generator_states(x.device)
        overwrites |= not torch.allclose(given, x, rtol=0, atol=0, equal_nan=True)
    return ForwardTraits(draws, reads_mode.found, overwrites)


def stacking_mode(passes: Passes, params: Tensor, x: Tensor, y: Tensor) -> tuple[Way | None, str]:
    """Return the way of stacking whose gradients equal those of single rows; or None and the reason.

    `passes` compute in float64 on the CPU; `params` are three rows, x and y two samples. Stacked rows are padded, as in
    training, and single rows are not: padding must not change the gradients.
    """
    numbers = torch.Generator().manual_seed(0)
    near, off = (NOISE * torch.randn(params.shape, generator=numbers, dtype=params.dtype) for _ in range(2))
    params, rows = params * (1 + near) + off, torch.tensor(ROWS)
    weight = torch.tensor([1.0, 1.0, 0.0], dtype=params.dtype).expand(len(rows), -1)
    padded = Batch(x[rows], y[rows], weight, torch.arange(len(rows)))
    alone = Batch(x[rows[:, :2]], y[rows[:, :2]], weight[:, :2], padded.key)
    ways: dict[Way, Callable[[], Tensor]] = {
        "folded": lambda: passes.folded(params, padded),
        "vmapped": lambda: passes.vmapped(params, padded),
    }
    reason = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=NO_RULE)  # vmap then loops over the rows
        try:
            rows_alone = (Batch(*(part[i] for part in alone)) for i in range(len(params)))
            expected = torch.stack(
                [passes.plain(p, p[:0], row).params for p, row in zip(params, rows_alone, strict=True)]
            )
        except Exception as error:  # a module may do anything
            return None, f"in float64 on the CPU it raises {type(error).__name__}: {one_line(error)}"
        for way, gradient in ways.items():
            try:
                if torch.allclose(gradient(), expected, rtol=1e-8, atol=1e-10, equal_nan=True):
                    return way, ""
                reason = "stacking or padding would change its gradients"
            except UserWarning as warning:
                reason = f"vmap cannot batch {''.join(re.findall(r'aten::[a-z0-9_]+', str(warning))[:1])}"
            except Exception as error:
                reason = f"{type(error).__name__}: {one_line(error)}"
    return None, reason


@cache
def warn_once(name: str, reason: str) -> None:
    """Log a warning, once, that a model trains row by row."""
    shown = reason if len(reason) <= 160 else f"{reason[:157]}..."
    log.warning("%s trains row by row, which is slower than stacked rows: %s", name, shown)
