"""The GPU benchmark runs without data, and refuses in one line without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import gpu

from waffle_fl.data import load


@pytest.fixture(autouse=True)
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFFLE_DATA", str(tmp_path))


def test_noise_replaces_mnist() -> None:
    """Without the published files, files of noise with their shapes are read as MNIST and marked unverified."""
    with gpu.runtime_for("cpu") as runtime:
        noise = load("mnist", runtime.data_dir, runtime.allow_unverified)
    assert (noise.x_train.shape, noise.x_test.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert not noise.verified
    assert set(noise.y_test.tolist()) == set(range(10))


def test_the_table_runs_on_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has one cell per method and split, and states that its data is noise."""
    monkeypatch.setattr(gpu, "METHODS", ("local", "fedavg"))
    small = replace(gpu.MNIST, rounds=1, samples_per_agent=8, agents=2, model="linear", precision="float32")
    result = gpu.table(settings=small, seeds=(1,), device="cpu")
    assert result["data"] == "noise"
    assert len(result["best_accuracy"]) == 2 * len(gpu.SPLITS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_benchmark_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without CUDA the command exits with 2 and one line."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "table"])
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "benchmarks.gpu needs a CUDA device, and this machine shows none: see benchmarks.cpu"
    ]
