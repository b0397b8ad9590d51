"""Modules that hold one row of a large model, and copying gradients into rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from waffle_fl.models.layout import Layout
from waffle_fl.models.row_module import RowModule, copy_each


def filled(template: nn.Module, seed: int) -> tuple[RowModule, Tensor]:
    params, stats = (Layout(dict(named)) for named in (template.named_parameters(), _floating_buffers(template)))
    module, numbers = RowModule(template, params, stats), torch.Generator().manual_seed(seed)
    row = torch.randn(params.size, generator=numbers)
    module.fill(row, torch.ones(stats.size))
    return module, row


def _floating_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, part) for name, part in module.named_buffers() if part.is_floating_point())


def test_row_modules_have_their_own_tensors() -> None:
    """Each row module computes outputs, gradients and statistics of its own row."""
    template = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    x = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    rows = [filled(template, seed) for seed in (1, 2)]
    for module, row in rows:
        output, gradient = module(x, torch.tensor(0)), torch.empty_like(module.params)
        module.differentiate(output.square().sum(dim=1), torch.ones(len(x)), gradient)
        plain = copy.deepcopy(template).train()
        nn.utils.vector_to_parameters(row, plain.parameters())
        for buffer in dict(_floating_buffers(plain)).values():
            buffer.fill_(1)
        expected = plain(x)
        parts = torch.autograd.grad(expected.square().sum(), list(plain.parameters()))
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(gradient, nn.utils.parameters_to_vector(parts), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(module.current_stats(), torch.cat(list(dict(_floating_buffers(plain)).values())))


def test_parts_of_any_memory_layout_are_copied() -> None:
    """Gradients in channels-last layout are copied correctly into a contiguous row, mixed with contiguous ones."""
    numbers = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=numbers) for shape in ((4, 3, 3, 3), (4,), (2, 4, 1, 1), (5, 6))]
    parts[0] = parts[0].to(memory_format=torch.channels_last)
    layout = Layout({str(i): part for i, part in enumerate(parts)})
    row = torch.empty(layout.size)
    copy_each(list(layout.unflatten(row).values()), parts)
    assert torch.equal(row, torch.cat([part.reshape(-1) for part in parts]))
