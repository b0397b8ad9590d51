"""Modules that hold one row of a large model: shared compilation, and copying gradients into rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from waffle_fl.models import row_module
from waffle_fl.models.row_module import Layout, RowModule, copy_each

if TYPE_CHECKING:
    from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Count compilations, with a backend that needs no compiler."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds, which other tests need not wait for

    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    row_module._compiled_pass.cache_clear()
    yield counter
    row_module._compiled_pass.cache_clear()


def filled(template: nn.Module, seed: int) -> tuple[RowModule, Tensor]:
    params, stats = (Layout(dict(named)) for named in (template.named_parameters(), _floating_buffers(template)))
    module, numbers = RowModule(template, params, stats), torch.Generator().manual_seed(seed)
    row = torch.randn(params.size, generator=numbers)
    module.fill(row, torch.ones(stats.size))
    return module, row


def _floating_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, part) for name, part in module.named_buffers() if part.is_floating_point())


def test_row_modules_share_one_compilation(compilations: CompileCounterWithBackend) -> None:
    """The second row module reuses the first one's compilation with its own parameters and statistics."""
    template = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    x = torch.rand(row_module.COMPILED_BATCH, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    for seed in (1, 2):
        results = []
        for compiled in (False, True):
            module, _ = filled(template, seed)
            module._traits[x.shape] = row_module._Traits(takes_last=False, drops=False, rewritten=False)
            output, gradient = module(x, torch.tensor(0), compiled), torch.empty_like(module.params)
            module.differentiate(output.square().sum(dim=1), torch.ones(len(x)), gradient)
            results.append((output.detach(), gradient, module.current_stats().clone()))
        for plain, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain)
    assert compilations.frame_count == 1


def test_parts_of_any_memory_layout_are_copied() -> None:
    """Gradients in channels-last layout are copied correctly into a contiguous row, mixed with contiguous ones."""
    numbers = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=numbers) for shape in ((4, 3, 3, 3), (4,), (2, 4, 1, 1), (5, 6))]
    parts[0] = parts[0].to(memory_format=torch.channels_last)
    layout = Layout({str(i): part for i, part in enumerate(parts)})
    row = torch.empty(layout.size)
    copy_each(list(layout.unflatten(row).values()), parts)
    assert torch.equal(row, torch.cat([part.reshape(-1) for part in parts]))
