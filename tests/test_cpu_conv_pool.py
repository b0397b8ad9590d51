"""Convolution, ReLU and pooling as one product: results agree with torch, and deferred work is always done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from waffle_fl.models import Batch, FlatModel, LeNet5
from waffle_fl.models import cpu_conv_pool as windows_module
from waffle_fl.models.cpu_conv_pool import DeferredConv, Rewriting

Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "BATCH", 1)


def both(forward: Forward, x: Tensor, weight: Tensor, bias: Tensor | None, products: int) -> tuple[list[Tensor], ...]:
    """Return result and gradients, rewritten and by torch, and check that `products` convolutions were rewritten."""
    results = []
    for rewriting in (Rewriting(), None):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
        if rewriting is None:
            y = forward(*leaves, *[None] * (bias is None))
        else:
            with rewriting:
                y = forward(*leaves, *[None] * (bias is None))
            assert rewriting.products == products
        along = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).remainder(7) - 3
        results.append([y.detach() + 0, *torch.autograd.grad((y * along).sum(), leaves)])
    return results[0], results[1]


def agree(ours: list[Tensor], library: list[Tensor]) -> None:
    for mine, its in zip(ours, library, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9, equal_nan=True)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    window = draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (2, 1), (1, 3), (4, 2)]))
    kernel = tuple(1 + size * draw(st.integers(0, 2)) for size in window)
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    least = [max(1, k + size - 1 - 2 * p) for k, size, p in zip(kernel, window, padding, strict=True)]
    sides = [side + draw(st.integers(0, 7)) for side in least]
    batch, channels, out = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return {
        "image": (batch, channels, *sides),
        "kernel": (out, channels, *kernel),
        "padding": padding,
        "window": window,
        "rectified": draw(st.booleans()),
        "biased": draw(st.booleans()),
        "integers": draw(st.booleans()),
        "layout": draw(st.sampled_from(["contiguous", "channels last", "batch last"])),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=150)
@given(cases())
def test_product_equals_torch(case: dict[str, Any]) -> None:
    """Agrees also for tied values, which small integers often have: the first place of a window gets the gradient."""
    seeded = torch.Generator().manual_seed(case["seed"])

    def numbers(*shape: int) -> Tensor:
        if case["integers"]:
            return torch.randint(-1, 2, shape, generator=seeded).double()
        return torch.randn(shape, generator=seeded, dtype=torch.float64)

    x, weight = numbers(*case["image"]), numbers(*case["kernel"])
    if case["layout"] != "contiguous":
        order = (0, 2, 3, 1) if case["layout"] == "channels last" else (1, 2, 3, 0)
        back = [order.index(i) for i in range(4)]
        x = x.permute(order).contiguous().permute(back)

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.conv2d(x, weight, bias, padding=case["padding"])
        return F.max_pool2d(torch.relu(y) if case["rectified"] else y, case["window"])

    agree(*both(forward, x, weight, numbers(case["kernel"][0]) if case["biased"] else None, products=1))


NOT_REWRITTEN: dict[str, Forward] = {
    "no pooling": lambda x, w, b: torch.relu(F.conv2d(x, w, b)),
    "nothing after it": lambda x, w, b: F.conv2d(x, w, b),
    "another activation": lambda x, w, b: F.max_pool2d(torch.tanh(F.conv2d(x, w, b)), 2),
    "a stride": lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b, stride=2), 2),
    "a dilation": lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b, dilation=2), 2),
    "padding by name": lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b, padding="same"), 2),
    "groups": lambda x, w, b: F.max_pool2d(
        F.conv2d(torch.cat([x, x], 1), torch.cat([w, w]), torch.cat([b, b]), groups=2), 2
    ),
    "windows that overlap": lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 3, stride=2),
    "padded pooling": lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2, padding=1),
    "a window that is not full": lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2, ceil_mode=True),
    "indices returned": lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2, return_indices=True)[0],
    "an even kernel": lambda x, w, b: F.max_pool2d(F.conv2d(x, w[..., :2, :2], b), 2),
    "read in a list": lambda x, w, b: torch.cat([F.conv2d(x, w, b), F.conv2d(x, w, b)]),
    "read by a convolution": lambda x, w, b: F.conv2d(F.conv2d(x, w, b), w.transpose(0, 1)),
    "read by its shape": lambda x, w, b: (y := F.conv2d(x, w, b)) * y.shape[2] * y.size(3),
    "changed in place": lambda x, w, b: F.conv2d(x, w, b).mul_(2).add_(1),
}


@pytest.mark.parametrize("name", NOT_REWRITTEN)
def test_other_operations_are_not_rewritten(name: str) -> None:
    """Only a convolution followed by ReLU and pooling with full windows is rewritten."""
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((3, 2, 11, 12), (4, 2, 3, 3), (4,)))
    agree(*both(NOT_REWRITTEN[name], x, w, b, products=0))


def skipping(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = F.conv2d(x, w, b)
    z = torch.relu(y)
    y = y * 2
    return F.max_pool2d(z, 2).sum() + y.sum() + z.mean()


def watched(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = F.conv2d(x, w, b)
    with torch.no_grad():
        scale = y.abs().mean()
    return F.max_pool2d(F.relu(y, inplace=True), 2) * scale


REWRITTEN: dict[str, tuple[Forward, int]] = {
    "in place": (lambda x, w, b: F.max_pool2d(F.relu(F.conv2d(x, w, b), inplace=True), 2), 1),
    "a method in place": (lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b).relu_(), 2), 1),
    "ReLU after pooling": (lambda x, w, b: torch.relu(F.max_pool2d(F.conv2d(x, w, b), (2, 2))), 1),
    "read twice": (skipping, 1),
    "read without gradient": (watched, 0),
    "the same weights twice": (
        lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2) + F.max_pool2d(F.conv2d(-x, w, b), 2),
        2,
    ),
    "viewed": (lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2).view(-1).view(5, -1), 1),
    "two of them": (lambda x, w, b: F.max_pool2d(F.conv2d(F.max_pool2d(F.conv2d(x, w, b), 2), w.mT, None, 1, 1), 2), 2),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_equivalent_forms(name: str) -> None:
    """An in-place ReLU, a result with several readers and a view give torch's numbers."""
    forward, products = REWRITTEN[name]
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((5, 2, 18, 18), (2, 2, 3, 3), (2,)))
    agree(*both(forward, x, w, b, products))


@pytest.mark.parametrize("rectified", [True, False])
def test_nan_propagates(rectified: bool) -> None:
    """A NaN pixel affects only the windows that contain it."""
    x, w = torch.randn(2, 1, 12, 12, dtype=torch.float64), torch.randn(3, 1, 3, 3, dtype=torch.float64)
    x[0, 0, 5, 5] = torch.nan

    def forward(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = F.conv2d(x, w, b, padding=1)
        return F.max_pool2d(torch.relu(y) if rectified else y, 2)

    ours, library = both(forward, x, w, None, products=1)
    assert ours[0].isnan().any()
    agree(ours[:1], library[:1])


def test_deferred_convolution_is_computed_later() -> None:
    """A deferred convolution that is first read outside the rewriting is computed then, and still trains."""
    x, w = torch.randn(2, 1, 6, 6), torch.randn(3, 1, 3, 3, requires_grad=True)
    with Rewriting():
        y = F.conv2d(x, w)
    assert type(y) is DeferredConv
    (gradient,) = torch.autograd.grad(y.sum(), w)
    torch.testing.assert_close(gradient, torch.autograd.grad(F.conv2d(x, w).sum(), w)[0])


def test_nothing_is_deferred_without_gradients() -> None:
    """Without gradients no convolution is deferred, because its arguments could change before it is read."""
    x, w = torch.randn(2, 1, 6, 6), torch.randn(3, 1, 3, 3)
    with Rewriting():
        assert type(F.conv2d(x, w)) is Tensor
        with torch.no_grad():
            assert type(F.conv2d(x, w.requires_grad_())) is Tensor


def test_overwritten_pass_is_rejected() -> None:
    """The gradient of a pass whose memory a later pass has reused raises an error."""
    x, w = torch.randn(2, 1, 6, 6), torch.randn(3, 1, 3, 3, requires_grad=True)
    rewriting, sums = Rewriting(), []
    for _ in range(2):
        with rewriting:
            sums.append(F.max_pool2d(F.conv2d(x, w), 2).sum())
    torch.autograd.grad(sums[1], w)
    with pytest.raises(RuntimeError, match="a later pass"):
        torch.autograd.grad(sums[0], w)


class Doubling(torch.autograd.Function):
    """Reads its argument in an autograd function, which neither the mode nor the gradient sees."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return 2 * x

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def,override]
        return 2 * dy


class Untraceable(nn.Module):
    """A module whose convolution is also read by an autograd function, which breaks deferring."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return F.max_pool2d(y, 2).mean((2, 3)) + Doubling.apply(y).mean((2, 3))  # type: ignore[no-untyped-call]


def gradients(model: FlatModel, batch: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of a row, and the same gradient from the module itself."""
    seeded = torch.Generator().manual_seed(1)
    x = torch.randn(2, batch, 1, 28, 28, generator=seeded, dtype=model.dtype)
    y, weight = torch.arange(2 * batch).view(2, batch) % 5, torch.ones(2, batch, dtype=model.dtype)
    weight[:, 0] = 0
    net = model.init(3)
    rows = model.grad(net.params.repeat(2, 1), net.stats.repeat(2, 1), Batch(x, y, weight, torch.zeros(2).long()))
    module = model.passes.module(training=True)
    leaf = net.params.clone().requires_grad_()
    output = torch.func.functional_call(module, model.passes.params.unflatten(leaf), (x[1, 1:],))
    loss = F.cross_entropy(output, y[1, 1:])
    return rows.params[1], torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("build", [LeNet5, Untraceable])
def test_row_gradient_equals_module_gradient(build: Callable[[], nn.Module]) -> None:
    """A row's gradient equals the module's, whether the rewriting applies or the first gradient rules it out."""
    model = FlatModel(build, precision="float64")
    torch.testing.assert_close(*gradients(model, 8), rtol=1e-9, atol=1e-12)
    (traits,) = model.passes._row_modules()[0]._traits.values()
    assert traits.rewritten == (build is LeNet5)


def test_repeated_gradients_have_the_same_bits() -> None:
    """A gradient computed in reused memory equals one in fresh memory, whatever batch came between."""
    model = FlatModel(LeNet5)
    first = gradients(model, 8)[0]
    gradients(model, 5)
    assert torch.equal(first, gradients(model, 8)[0])
    assert torch.equal(first, gradients(FlatModel(LeNet5), 8)[0])


@pytest.mark.parametrize("uses_onednn", [False, True])
def test_both_libraries_multiply_in_float32(uses_onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With oneDNN's products and with torch's, a gradient in float32 is the module's up to rounding."""
    if uses_onednn and not windows_module.HAS_ONEDNN:
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(windows_module, "USES_ONEDNN", uses_onednn)
    torch.testing.assert_close(*gradients(FlatModel(LeNet5), 31), rtol=1e-4, atol=1e-5)
