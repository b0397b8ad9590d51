"""The GPU's kernels, run by Triton's interpreter: the same code, without a GPU."""

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
from waffle_fl.models.stacked import conv2d

torch.manual_seed(0)
ROWS, IMAGES = 3, 4
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
                  conv2d(ROWS, "ieee", x, weight, bias, 1, padding)):
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
print("agreed")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_agree_with_the_library() -> None:
    """Stacked convolutions, their gradients, and pools with and without ReLU give what torch gives, row by row."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "agreed\n"), done.stderr
