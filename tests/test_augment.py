"""Augmentation: random crops and reflections."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import outcomes_of, refusal
from waffle_fl import SGD, FedAvg, FlatModel, RunSpec, build, load, split
from waffle_fl.augment import darkest, largest_shift, shift_and_flip
from waffle_fl.config import RunConfig, Settings
from waffle_fl.experiment import Runtime, execute
from waffle_fl.models import mlp


def all_views(image: Tensor, border: Tensor) -> list[Tensor]:
    """Return every crop of the padded image and its reflection."""
    _, height, width = image.shape
    down, across = largest_shift(height), largest_shift(width)
    sides = [across, across, down, down]
    padded = torch.stack([F.pad(c, sides, value=float(v)) for c, v in zip(image, border, strict=True)])
    places = product(range(2 * down + 1), range(2 * across + 1))
    crops = [padded[:, i : i + height, j : j + width] for i, j in places]
    return crops + [crop.flip(2) for crop in crops]


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(3, 17), st.integers(3, 17), st.integers(0, 2**40))
def test_every_image_is_a_crop_or_a_reflected_crop(channels: int, height: int, width: int, key: int) -> None:
    x = torch.randn(2, 3, channels, height, width)
    border = darkest(x.flatten(0, 1))
    seen = shift_and_flip(x, torch.tensor([key, key + 1]), border)
    for image, found in zip(x.flatten(0, 1), seen.flatten(0, 1), strict=True):
        assert any(torch.equal(found, view) for view in all_views(image, border))


def test_all_shifts_and_both_sides_occur() -> None:
    image = torch.arange(1.0, 257.0).view(1, 16, 16)
    many, key, border = image.expand(1, 4000, 1, 16, 16), torch.tensor([7]), torch.zeros(1)
    assert len(torch.unique(shift_and_flip(many, key, border)[0], dim=0)) == 2 * 5**2
    assert len(torch.unique(shift_and_flip(many, key, border, flips=False)[0], dim=0)) == 5**2


def test_largest_shift_is_an_eighth_of_the_image() -> None:
    assert [largest_shift(size) for size in (3, 8, 28, 32, 64)] == [1, 1, 3, 4, 8]


def test_draws_depend_on_the_key_alone() -> None:
    x, keys = torch.randn(3, 4, 1, 6, 6), torch.tensor([5, 6, 7])
    together = shift_and_flip(x, keys, torch.zeros(1))
    alone = shift_and_flip(x[1:2], keys[1:2], torch.zeros(1))
    assert torch.equal(together[1:2], alone)
    assert not torch.equal(together, shift_and_flip(x, keys + 100, torch.zeros(1)))


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
