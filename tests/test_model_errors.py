"""Model errors: one line each with what was expected, what came and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, FEATURES, make_federation, refusal
from waffle_fl import SGD, FedAvg, RunSpec, simulate
from waffle_fl.models import DLA, FlatModel, cross_entropy


class Returning(nn.Module):
    """Returns a given function of its scores."""

    def __init__(self, convert: Any) -> None:
        super().__init__()
        self.leave, self.convert = nn.Linear(FEATURES, CLASSES), convert

    def forward(self, x: Tensor) -> Any:
        return self.convert(self.leave(x))


def trained(model: FlatModel) -> Any:
    return next(simulate([RunSpec(FedAvg(SGD(0.1)), make_federation(), 1)], model, rounds=1, workers=1))


def prepared(model: FlatModel) -> FlatModel:
    federation = make_federation()
    return model.prepared(federation.x[:4], federation.y[:4], federation.outputs)


def test_invalid_models() -> None:
    """Rejects what is neither module nor function, a function with arguments, and a function that returns no module."""
    assert refusal(FlatModel, 3) == (
        "expected a torch.nn.Module, or a function without arguments that returns one, got an int"
    )
    assert refusal(FlatModel, nn.Linear) == (
        "expected a function without arguments, got Linear, which needs in_features, out_features: write lambda: "
        "Linear(...)"
    )
    assert refusal(FlatModel, lambda: "net") == (
        "expected a function that returns a torch.nn.Module, got a str from it"
    )
    assert refusal(FlatModel, lambda: None).endswith("got None from it")


def test_a_model_that_cannot_be_copied() -> None:
    """The error names a stored computed tensor as the reason."""
    module = nn.Linear(2, 2)
    module.kept = module.weight * 2
    assert "expected a model that copy.deepcopy can copy, got Linear" in refusal(FlatModel, module)
    assert "copy.deepcopy" in refusal(FlatModel, lambda: module)


@pytest.mark.parametrize("use", [trained, prepared])
def test_samples_of_another_size(use: Any) -> None:
    """The error names the layer that does not fit."""
    model = FlatModel(lambda: nn.Sequential(nn.Flatten(), nn.Linear(10, CLASSES)))
    assert refusal(use, model) == (
        f"the model cannot take samples of shape ({FEATURES},): its layer 1 (Linear) expects 10 features, got "
        f"{FEATURES}: build the model for this data"
    )
    images = refusal(use, FlatModel(lambda: nn.Sequential(nn.Unflatten(1, (1, 5, 1)), nn.Conv2d(3, 2, 1))))
    assert "its layer 1 (Conv2d) expects 3 channels, got 1" in images
    alone = refusal(use, FlatModel(lambda: nn.Linear(10, CLASSES)))
    assert "this Linear expects 10 features, got 5" in alone


@pytest.mark.parametrize("use", [trained, prepared])
@pytest.mark.parametrize(
    ("convert", "expected"),
    [
        (lambda scores: (scores, scores), "one tensor of shape (batch, outputs), got a tuple: return the scores alone"),
        (lambda scores: {"scores": scores}, "one tensor of shape (batch, outputs), got a dict: return the scores"),
        (lambda scores: scores.sum(), "one tensor of shape (batch, outputs), got () for 2 samples"),
        (lambda scores: scores[:1], f"one tensor of shape (batch, outputs), got (1, {CLASSES}) for 2 samples"),
        (lambda scores: scores[:, None], "(2, 1, 3)|(batch, 1, 3)"),
        (lambda scores: scores[:, :0], "(2, 0)|(batch, 0)"),
    ],
)
def test_outputs_of_another_kind(use: Any, convert: Any, expected: str) -> None:
    """A tuple, a dictionary or another shape is rejected before training."""
    text = refusal(use, FlatModel(lambda: Returning(convert)))
    assert any(part in text for part in expected.split("|"))


def test_a_last_layer_of_another_size() -> None:
    """Too few outputs for the labels are rejected, and too many where the number of classes is known."""
    wide, narrow = (FlatModel(lambda n=n: nn.Linear(FEATURES, n)) for n in (5, 1))  # type: ignore[misc]
    assert refusal(prepared, wide) == (
        "expected a model that returns 3 outputs per sample, as a tensor of shape (batch, 3), got (batch, 5): change "
        "its last layer"
    )
    federation = make_federation()
    text = refusal(narrow.prepared, federation.x[:2], torch.tensor([0, 2]))
    assert "Target 2 is out of bounds" in text


def test_a_loss_that_is_a_mean() -> None:
    """A loss must return one number per sample, so that rows of different lengths can be weighted."""
    model = FlatModel(lambda: nn.Linear(FEATURES, CLASSES), loss=lambda o, y: cross_entropy(o, y).mean())
    assert refusal(prepared, model) == (
        'expected a loss that returns one number per sample (reduction="none"), got () for 2 samples'
    )


def test_devices_and_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An absent or unknown device and a misspelt precision are rejected."""
    build = lambda: nn.Linear(FEATURES, CLASSES)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(FlatModel, build, device="cuda") == (
        "device cuda was requested, but this machine has no CUDA device: use cpu"
    )
    assert refusal(FlatModel, build, device="gpu") == "expected a device such as cpu, cuda or cuda:0, got 'gpu'"
    assert refusal(FlatModel, build, device="meta") == "expected the device cpu or cuda, got 'meta'"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert refusal(FlatModel, build, device="cuda:2") == (
        "expected a device from cuda:0 to cuda:1, got cuda:2: this machine has no other"
    )
    assert refusal(FlatModel, build, precision="flaot32") == "unknown precision 'flaot32', did you mean float32?"


def test_batch_statistics_cannot_be_stacked() -> None:
    """A request to stack BatchNorm layers is rejected with the reason."""
    assert "trains row by row" in refusal(FlatModel, DLA, stacked=True)
