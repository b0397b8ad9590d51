"""Augmentation: random crops and reflections."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import outcomes_of, refusal
from waffle_fl import SGD, FedAvg, FlatModel, RunSpec, build, load, split
from waffle_fl.augment import PADDING, crop_and_flip, darkest
from waffle_fl.config import RunConfig, Settings
from waffle_fl.experiment import Runtime, execute
from waffle_fl.models import mlp


def all_views(image: Tensor, border: Tensor) -> list[Tensor]:
    """Return every crop of the padded image and its reflection."""
    _, height, width = image.shape
    padded = torch.stack([F.pad(c, [PADDING] * 4, value=float(v)) for c, v in zip(image, border, strict=True)])
    shifts = range(2 * PADDING + 1)
    crops = [padded[:, i : i + height, j : j + width] for i in shifts for j in shifts]
    return crops + [crop.flip(2) for crop in crops]


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(3, 7), st.integers(3, 7), st.integers(0, 2**40))
def test_every_image_is_a_crop_or_a_reflected_crop(channels: int, height: int, width: int, key: int) -> None:
    x = torch.randn(2, 3, channels, height, width)
    border = darkest(x.flatten(0, 1))
    seen = crop_and_flip(x, torch.tensor([key, key + 1]), border)
    for image, found in zip(x.flatten(0, 1), seen.flatten(0, 1), strict=True):
        assert any(torch.equal(found, view) for view in all_views(image, border))


def test_all_shifts_and_both_sides_occur() -> None:
    image = torch.arange(1.0, 82.0).view(1, 9, 9)
    seen = crop_and_flip(image.expand(1, 8000, 1, 9, 9), torch.tensor([7]), torch.zeros(1))[0]
    assert len(torch.unique(seen, dim=0)) == 2 * (2 * PADDING + 1) ** 2


def test_draws_depend_on_the_key_alone() -> None:
    x, keys = torch.randn(3, 4, 1, 6, 6), torch.tensor([5, 6, 7])
    together = crop_and_flip(x, keys, torch.zeros(1))
    alone = crop_and_flip(x[1:2], keys[1:2], torch.zeros(1))
    assert torch.equal(together[1:2], alone)
    assert not torch.equal(together, crop_and_flip(x, keys + 100, torch.zeros(1)))


def test_augmented_training_repeats() -> None:
    """Augmented runs repeat bit for bit and differ from plain ones; data other than images are rejected."""
    digits = load("digits")
    federation = build(digits, split(digits.y_train, digits.y_test, "C", agents=3))
    model = FlatModel(lambda: mlp((1, 8, 8), 10))
    spec = RunSpec(FedAvg(SGD(0.1)), federation, 1)
    plain, first, again = (outcomes_of(spec, model, 2, augment=on)[-1].state.server.x for on in (False, True, True))
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)


def test_only_images_are_augmented(tmp_path: Path) -> None:
    config = RunConfig(method="fedavg", settings=Settings(data="synthetic", model="mlp", augment=True))
    assert "augment is for images" in refusal(execute, [(config, tmp_path / "run")], Runtime())
