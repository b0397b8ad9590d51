"""The card of an exported model states how to compute its inputs from the published samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from waffle_fl.config import RunConfig, Settings
from waffle_fl.data import NAMES, load, normalisation_of
from waffle_fl.data.idx import read_idx
from waffle_fl.data.sources import SOURCES
from waffle_fl.experiment import Runtime, execute
from waffle_fl.inference.exporting import export
from waffle_fl.inference.trained_run import open_run


def card_of(data: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """The card of a short run."""
    config = RunConfig(method="local", settings=Settings(data=data, rounds=1, **settings))
    execute([(config, folder / "run")], Runtime(device="cpu"))
    export(open_run(folder / "run"), folder / "out", "none")
    content: dict[str, Any] = json.loads((folder / "out" / "card.json").read_text())
    return content


def prepared(card: dict[str, Any], images: Any) -> Any:
    """Published images, (rows, channels, height, width), prepared with the formula of the card."""
    how = card["input"]["preprocessing"]
    mean, std = (np.asarray(how[name]).reshape(1, -1, 1, 1) for name in ("mean", "std"))
    return ((images / how["divisor"] - mean) / std).astype(np.float32)


def test_the_card_of_digits_gives_the_inputs(tmp_path: Path) -> None:
    """The formula of the card computes the inputs from scikit-learn's images."""
    card = card_of("digits", tmp_path)
    images = load_digits().images[:, None]
    test = np.arange(len(images)) % 4 == 3
    torch.testing.assert_close(torch.from_numpy(prepared(card, images[test])), torch.from_numpy(load("digits").x_test))


@pytest.mark.data
def test_the_card_of_mnist_gives_the_inputs(tmp_path: Path, published: Path) -> None:
    """The formula of MNIST's card computes the inputs from the published pixels."""
    card = card_of("mnist", tmp_path, samples_per_agent=20)
    assert card["input"]["preprocessing"]["mean"] == [0.1307]
    raw = read_idx(published / "mnist" / SOURCES["mnist"].files[2].name, (10000, 28, 28))[:100, None]
    expected = torch.from_numpy(load("mnist").x_test[:100])
    torch.testing.assert_close(torch.from_numpy(prepared(card, raw)), expected)


def test_the_card_of_synthetic_data_has_no_preprocessing(tmp_path: Path) -> None:
    """Synthetic samples are not normalised, and the card has no preprocessing."""
    assert card_of("synthetic", tmp_path)["input"]["preprocessing"] is None


@pytest.mark.parametrize("name", NAMES)
def test_every_image_data_set_has_a_normalisation(name: str) -> None:
    """The normalisation of a published image data set has one number per channel."""
    found = normalisation_of(name)
    if name == "synthetic":
        assert found is None
    else:
        assert found is not None
        assert len(found.mean) == len(found.std) == (3 if name == "cifar10" else 1)
