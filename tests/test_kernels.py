"""The GPU kernels, run by Triton's interpreter without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import torch
import torch.nn.functional as F
from waffle_fl.models import kernels
from waffle_fl.models import FlatModel, LeNet5, folded
from waffle_fl.models.flat import Batch
from waffle_fl.models.folded import StackedConvolution

torch.manual_seed(0)
ROWS, IMAGES = 2, 2
for channels, out, size, kernel, padding in [(2, 5, (9, 8), (5, 3), (0, 0)), (2, 5, (9, 8), (5, 3), (2, 1)),
                                             (1, 6, (12, 12), (5, 5), (2, 2)), (3, 40, (5, 6), (2, 2), (1, 0))]:
    x = torch.randn(ROWS * IMAGES, channels, *size).requires_grad_()
    weight = torch.randn(ROWS, out, channels, *kernel).requires_grad_()
    bias = torch.randn(ROWS, out).requires_grad_()
    each = [F.conv2d(x[i * IMAGES:(i + 1) * IMAGES], weight[i], bias[i], padding=padding) for i in range(ROWS)]
    expected = torch.cat(each)
    slope = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, (x, weight, bias), slope)
    for found in (kernels.Conv2d.apply(x, weight, bias, padding, "ieee"),
                  StackedConvolution(ROWS, "ieee", x, weight, bias, 1, padding).compute()):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for a, b in zip(torch.autograd.grad(found, (x, weight, bias), slope), truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
for size, rectified in [(2, False), (2, True), (3, False), (3, True)]:
    x = torch.randn(6, 3, 9, 8).requires_grad_()
    expected = F.max_pool2d(torch.relu(x) if rectified else x, size)
    found = kernels.MaxPool2d.apply(x, size, rectified)
    slope = torch.randn_like(expected)
    assert torch.equal(found, expected)
    a, b = (torch.autograd.grad(y, x, slope)[0] for y in (found, expected))
    assert torch.equal(a, b)
pooled = [(1, (12, 12), (5, 5), (2, 2), 2, True),
          (2, (11, 9), (3, 2), (0, 1), 3, False), (1, (9, 10), (3, 3), (0, 0), 2, True)]
for channels, size, kernel, padding, window, rectified in pooled:
    x = torch.randn(ROWS * IMAGES, channels, *size).requires_grad_()
    weight, bias = torch.randn(ROWS, 6, channels, *kernel).requires_grad_(), torch.randn(ROWS, 6).requires_grad_()
    each = [F.conv2d(x[i * IMAGES:(i + 1) * IMAGES], weight[i], bias[i], padding=padding) for i in range(ROWS)]
    full = torch.relu(torch.cat(each)) if rectified else torch.cat(each)
    expected = F.max_pool2d(full, window)
    found = StackedConvolution(ROWS, "ieee", x, weight, bias, 1, padding).pooled(window, rectified)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    slope = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight, bias), slope) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

folded.has_kernels = lambda x: x.dtype == torch.float32  # from here on the interpreter replaces the GPU


class Branches(torch.nn.Module):
    "Reads a deferred convolution in other ways than by pooling."

    def __init__(self):
        super().__init__()
        self.conv, self.last = torch.nn.Conv2d(1, 3, 3), torch.nn.Linear(9 * 36, 4)

    def forward(self, x):
        y = self.conv(x)
        z = torch.relu(y)
        assert z.shape == (len(x), 3, 6, 6) and z.device == x.device
        return self.last(torch.cat([y, z, torch.relu(F.avg_pool2d(z, 3, 1, 1))], dim=1).flatten(1))


for build, shape in ((Branches, (1, 8, 8)), (lambda: LeNet5((1, 12, 12)), (1, 12, 12))):
    model = FlatModel(build, stacked=True)
    model.passes.__class__.products = "ieee"
    batch = Batch(torch.randn(2, 3, *shape), torch.randint(0, 4, (2, 3)), torch.ones(2, 3), torch.arange(2))
    params = torch.stack([model.init(seed).params for seed in (1, 2)])
    found, expected = model.passes.folded(params, batch), model.passes.vmapped(params, batch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
print("agreed")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_agree_with_the_library() -> None:
    """Stacked convolutions, their gradients, and pools with and without ReLU agree with torch row by row."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "agreed\n"), done.stderr
