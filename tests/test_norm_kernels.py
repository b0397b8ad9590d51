"""Fused normalisation for models with BatchNorm on a GPU, run by Triton's interpreter without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from waffle_fl.models import DLA, fused_row_module
from waffle_fl.models.norm_fusion import FusedNorm, first_convolutions, with_fused_norms

CHECK = """
import torch
import torch.nn.functional as F
from torch import nn
from waffle_fl.models import FlatModel, norm_kernels
from waffle_fl.models.batch import Batch
from waffle_fl.models.dla import Tree, conv_bn_relu
from waffle_fl.models.fused_row_module import FusedRowModule

norm_kernels.PROGRAMS = 6  # several parts per sum
torch.manual_seed(0)


def images(*shape):
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


for channels, added, rectified in [(16, True, True), (48, False, True), (100, True, True), (16, False, False)]:
    x = (3 * images(4, channels, 6, 5) + 7).requires_grad_()  # a mean well above the deviation
    shortcut = images(4, channels, 6, 5).requires_grad_() if added else None
    ours, plain = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
    with torch.no_grad():
        ours.weight.uniform_(0.5, 2), ours.bias.normal_()
    plain.load_state_dict(ours.state_dict())
    expected = plain(x) if shortcut is None else plain(x) + shortcut
    expected = F.relu(expected) if rectified else expected
    first, second = images(4, channels + 16, 6, 5)[:, 8:-8], images(4, channels, 6, 5)  # a slice of wider images
    leaves = [leaf for leaf in (x, shortcut) if leaf is not None]
    truth = torch.autograd.grad(expected, [*leaves, *plain.parameters()], first + second)
    statistics = (ours.running_mean, ours.running_var, ours.momentum, ours.eps)
    found = norm_kernels.NormRelu.apply(x, shortcut, ours.weight, ours.bias, *statistics, rectified, 2)
    for output in found:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(found, [*leaves, *ours.parameters()], (first, second)), truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.running_mean, plain.running_mean)
    torch.testing.assert_close(ours.running_var, plain.running_var)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(conv_bn_relu(3, 8), Tree(8, 16, depth=2, stride=2))
        self.classify = nn.Linear(16, 10)

    def forward(self, x):
        return self.classify(F.avg_pool2d(self.features(x), 4).flatten(1))


x, y, weight, key = torch.randn(6, 3, 8, 8), torch.randint(0, 10, (6,)), torch.full((6,), 1 / 6), torch.tensor(1)
half = FlatModel(Network, precision="bf16")
net, passes = half.init(1), half.passes
row = FusedRowModule(passes.template, passes.params, passes.stats, "bf16")
row.fill(net.params, net.stats)
back = torch.empty_like(net.params)
row._packing.unpack(row._packing.views(), back)
assert (back - net.params).abs().max() <= 2**-8 * net.params.abs().max()  # rounded to bfloat16
for name, size in passes.params.shapes.items():
    assert row._packing.views()[name].dtype == (torch.bfloat16 if len(size) > 1 else torch.float32)

gradient = torch.empty_like(net.params)
with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
    output = row(x, key).float()
row.differentiate(F.cross_entropy(output, y, reduction="none"), weight, gradient)
exact = FlatModel(Network).passes.plain(net.params, net.stats, Batch(x, y, weight, key))
rounded = passes.plain(net.params, net.stats, Batch(x, y, weight, key))
ours, plain = ((found - exact.params).norm() / exact.params.norm() for found in (gradient, rounded.params))
assert ours < 1.5 * plain, (ours, plain)
torch.testing.assert_close(row.current_stats(), exact.stats, rtol=0.01, atol=0.01)

full = FusedRowModule(passes.template, passes.params, passes.stats, "float32")
full.fill(net.params, net.stats)
with torch.enable_grad():
    full.differentiate(F.cross_entropy(full(x, key), y, reduction="none"), weight, gradient)
torch.testing.assert_close(gradient, exact.params, rtol=1e-3, atol=1e-5)
torch.testing.assert_close(full.current_stats(), exact.stats)
print("agreed")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_fused_normalisation_agrees_with_the_library() -> None:
    """The kernels agree with BatchNorm2d, addition and ReLU; a whole row is as exact as plain bfloat16."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "agreed\n"), done.stderr


def plain_norm(self: FusedNorm, x: Tensor, shortcut: Tensor | None) -> tuple[Tensor, ...]:
    y = self.norm(x) if shortcut is None else self.norm(x) + shortcut
    return (F.relu(y) if self.rectified else y,) * self.uses


class Branching(nn.Module):
    """Normalised images that are used before the ReLU, added to a number, and added to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        before = self.norms[0](x)
        x = self.relu(before) + before
        x = torch.relu(self.norms[1](x) + 1)
        x = (self.norms[2](x) + x).relu()
        x = torch.add(self.norms[3](x), x, alpha=2)
        twice = self.norms[4](x)
        return F.relu(twice + twice)


@pytest.mark.parametrize("build", [Branching, DLA])
def test_rewriting_keeps_the_function(build: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewritten graph computes what the module computes, shares its tensors, and has no layer of its own left."""
    monkeypatch.setattr(FusedNorm, "forward", plain_norm)
    module = build().train()
    traced = with_fused_norms(module)
    assert traced is not None
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(traced(x), module(x))
    called = {type(traced.get_submodule(str(node.target))) for node in traced.graph.nodes if node.op == "call_module"}
    assert nn.BatchNorm2d not in called
    assert {id(p) for p in traced.parameters()} == {id(p) for p in module.parameters()}
    assert first_convolutions(traced) == {f"{'conv' if build is Branching else 'features.0.0'}.weight": 8}


def test_modules_that_cannot_be_rewritten() -> None:
    """A module without BatchNorm, one that depends on values, and one on a CPU train as before."""

    class Deciding(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    norm = nn.BatchNorm2d(3)
    assert with_fused_norms(nn.Sequential(nn.Conv2d(3, 3, 1))) is None
    assert with_fused_norms(Deciding(norm)) is None
    assert with_fused_norms(nn.Sequential(nn.BatchNorm2d(3, affine=False))) is None
    assert not fused_row_module.applies(nn.Sequential(norm), "bf16")
