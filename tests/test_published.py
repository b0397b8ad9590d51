"""Published tables: their preparation, networks, numbers and claims."""

from __future__ import annotations

import gzip
import os
import struct
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from paper import flamby, office, pfllib
from paper.networks import fedbn_digits, pfllib_cnn, small_alexnet
from paper.published_numbers import FLAMBY, TEST_ROWS
from paper.published_tables import _curves, _identical
from torch import nn

from waffle_fl.claims.file_claims import Claim, check_claims, read_claims
from waffle_fl.claims.record_files import problems, read_part
from waffle_fl.config import RunConfig, Settings, load_experiments
from waffle_fl.experiment import Runtime, execute, plan
from waffle_fl.models import FlatModel
from waffle_fl.results import read_runs

ROOT = Path(__file__).parent.parent
FILES = ("flamby-heart", "pfllib", "fedbn-digits", "fedbn-office")
HEART = Path(os.environ.get("WAFFLE_DATA", ""), "heart-disease", "processed.va.data")


@pytest.mark.skipif(not HEART.is_file(), reason="needs WAFFLE_DATA/heart-disease")
def test_fed_heart_disease_has_flambys_splits(tmp_path: Path) -> None:
    """The sizes are FLamby's, training rows are standardised per hospital, and pooled rows are all training rows."""
    flamby.prepare(HEART.parent, tmp_path)
    sizes, pooled = [], []
    for name in flamby.CENTRES:
        own = np.load(tmp_path / "flamby-heart" / f"{name}.npz")
        sizes.append((len(own["y_train"]), len(own["y_test"])))
        pooled.append(own["x_train"])
        assert own["x_train"].shape[1] == 13
        assert own["x_train"].mean(axis=0) == pytest.approx(0, abs=1e-6)
        spread = own["x_train"].std(axis=0, ddof=1)
        assert spread[spread > 0] == pytest.approx(1, abs=1e-5)
        together = np.load(tmp_path / "flamby-heart-pooled" / f"{name}.npz")
        assert together["x_train"].std(axis=0, ddof=1) == pytest.approx(1, abs=1e-5)
        assert np.array_equal(together["x_test"], own["x_test"])
    assert sizes == [(199, 104), (172, 89), (30, 16), (85, 45)]
    same = np.load(tmp_path / "flamby-heart-pooled-same" / "va.npz")
    assert np.array_equal(same["x_train"], np.concatenate(pooled))


def test_incomplete_rows_and_categories(tmp_path: Path) -> None:
    """Rows with a missing value are dropped unless it is in columns 10 to 12; the first category has no column."""
    lines = [
        "50,1,2,130,200,0,1,150,0,1.5,?,?,?,3",
        "60,0,?,130,200,0,1,150,0,1.5,1,0,3,0",
        "40,0,1,1,2,0,0,3,0,0,?,0,3,0",
    ]
    (tmp_path / "x.data").write_text("\n".join(lines) + "\n")
    rows = flamby.read(tmp_path / "x.data")
    assert rows[:, -1].tolist() == [1, 0]
    (made,) = flamby.features([rows])
    assert made.tolist() == [[50, 1, 130, 200, 0, 150, 0, 1.5, 1, 1], [40, 0, 1, 2, 0, 3, 0, 0, 0, 0]]


def test_the_logistic_model_starts_from_flambys_weights() -> None:
    """With FLamby's seeds the weights are those of nn.Linear after torch.manual_seed; the loss is the binary one."""
    model = FlatModel(lambda: flamby.logistic((13,), 2))
    for seed in flamby.SEEDS:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            linear = nn.Linear(13, 1).requires_grad_(False)
        params = model.init(seed).params
        assert torch.equal(params, torch.cat([linear.weight.flatten(), linear.bias]))
        x, y = torch.randn(6, 13), torch.tensor([0, 1, 1, 0, 1, 0])
        binary = nn.functional.binary_cross_entropy(torch.sigmoid(linear(x)).flatten(), y.float())
        logits = model.predict(params, model.init(seed).stats, x)
        assert float(nn.functional.cross_entropy(logits, y)) == pytest.approx(float(binary), rel=1e-5)
    assert not torch.equal(model.init(7).params, model.init(8).params)


def test_networks_have_the_published_sizes() -> None:
    count = {build: sum(p.numel() for p in build(shape, 10).parameters()) for build, shape in NETWORKS.items()}
    assert count[pfllib_cnn] == 582_026
    assert count[fedbn_digits] == 14_219_210
    for build, shape in NETWORKS.items():
        assert build(shape, 10)(torch.zeros(2, *shape)).shape == (2, 10)


NETWORKS = {pfllib_cnn: (1, 28, 28), fedbn_digits: (3, 28, 28), small_alexnet: (3, 64, 64)}


def _idx(file: Path, values: NDArray[np.uint8]) -> None:
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    file.write_bytes(gzip.compress(head + values.tobytes()))


def test_pfllibs_clients_are_rows_of_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices count the training images first, then the test images; pixels are scaled to [-1, 1]."""
    monkeypatch.setattr(pfllib, "CLIENTS", 1)
    monkeypatch.setattr(pfllib, "PARTS", {"train": 3, "t10k": 2})
    for part, first, n in (("train", 0, 3), ("t10k", 3, 2)):
        labels = np.arange(first, first + n, dtype=np.uint8)
        _idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
        _idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.tile(labels[:, None, None] * 51, (1, 28, 28)))
    np.savez(tmp_path / "rows.npz", train_00=np.array([4, 0]), test_00=np.array([3]))
    pfllib.prepare(tmp_path / "rows.npz", tmp_path, tmp_path)
    made = np.load(tmp_path / "pfllib" / "client-00.npz")
    assert (made["y_train"].tolist(), made["y_test"].tolist()) == ([4, 0], [3])
    assert made["x_train"].shape == (2, 1, 28, 28)
    assert made["x_train"][:, 0, 0, 0] == pytest.approx([0.6, -1.0])


def test_office_keeps_62_training_images(tmp_path: Path) -> None:
    (tmp_path / "office").mkdir()
    arrays = {
        "x_train": np.zeros((70, 4)),
        "y_train": np.arange(70),
        "x_test": np.zeros((80, 4)),
        "y_test": np.arange(80),
    }
    np.savez(tmp_path / "office" / "dslr.npz", **arrays)
    office.prepare(tmp_path / "office", tmp_path)
    made = np.load(tmp_path / "office-62" / "dslr.npz")
    assert [len(made[name]) for name in arrays] == [62, 62, 80, 80]


@pytest.mark.parametrize("name", FILES)
def test_files_can_be_planned_without_their_data(name: str) -> None:
    """Every option is valid, and no method that trains for Alice alone is scored on everyone."""
    configs = [
        config
        for experiment in load_experiments(ROOT / "experiments" / f"{name}.toml")
        for config, _ in plan(experiment, Path())
    ]
    for config in configs:
        algorithm = config.algorithm()
        assert (
            config.settings.scored == "alice" or config.method == "local" or not getattr(algorithm, "for_alice", False)
        )


def test_the_record_of_fed_heart_disease_holds() -> None:
    """The committed record is complete, its claims hold, and the claims have FLamby's means."""
    part = read_part(ROOT, "flamby-heart")
    claims = read_claims(ROOT / "experiments" / "flamby-heart.toml")
    assert problems({part.name: part}) == []
    assert all(verdict.holds for verdict in check_claims(claims, part))
    for claim, title in zip(claims, ("Local", "Pooled", "FedAvg", "FedProx"), strict=True):
        means = {c: 100 * mean(counts) / n for (c, n), counts in zip(TEST_ROWS.items(), FLAMBY[title], strict=True)}
        assert {number["alice"]: number["mean"] for number in claim.published} == pytest.approx(means, abs=1e-6)


def test_a_published_claim_has_two_sides() -> None:
    """A mean above or below the published one by more than `within` fails; a missing cell is named."""
    part = read_part(ROOT, "flamby-heart")
    of = {"method": "fedavg", "weighting": "samples"}
    for value, holds in ((64.0, True), (62.0, False), (66.0, False)):
        (verdict,) = check_claims([Claim("x", of, within=1.0, published=[{"alice": "va", "mean": value}])], part)
        assert verdict.holds == holds
    (verdict,) = check_claims([Claim("x", of, published=[{"alice": "paris", "mean": 1.0}])], part)
    assert not verdict.holds
    assert verdict.numbers == "no complete record of paris"


def test_identical_counts() -> None:
    ours = {
        name: [100 * c / n for c in counts]
        for (name, n), counts in zip(TEST_ROWS.items(), FLAMBY["FedAvg"], strict=True)
    }
    assert _identical(ours, "FedAvg") == 20
    ours["va"][0] += 100 / 45
    assert _identical(ours, "FedAvg") == 19


def test_curves_weigh_alices_by_test_samples(tmp_path: Path) -> None:
    """One run per Alice gives the curve of one run that scores everyone; an incomplete seed is left out."""
    base = Settings(data="digits", agents=3, samples_per_agent=40, rounds=2, batch_size=16)
    settings = [replace(base, alice=str(i)) for i in range(3)] + [replace(base, scored="all")]
    configs = [RunConfig(method="fedper", settings=s) for s in settings]
    runs = [(config, tmp_path / str(i)) for i, config in enumerate(configs)]
    execute(runs, Runtime(device="cpu", workers=1))
    found = read_runs([folder for _, folder in runs])
    (alices,), (everyone,) = _curves(found[:3]), _curves(found[3:])
    assert alices == pytest.approx(everyone)
    assert _curves(found[:2]) == []
