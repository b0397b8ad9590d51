"""Thousands of damaged user files: tables, arrays and images are read or refused in one line."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from test_fuzz import Tally, mutated
from waffle_fl import Federation
from waffle_fl.inference.predicting import read_arrays
from waffle_fl.user_data.images import read_image

COUNT = 2_000
CELLS = (
    "",
    "?",
    "0",
    "1",
    "1.0",
    "1e0",
    "-0",
    "1,5",
    "1e39",
    "1e200",
    "1e400",
    "-3e38",
    "inf",
    "nan",
    "1_0",
    "0x1",
    "a",
)


def feed(path: Path, sound: bytes, seed: int, parse: Callable[[], object]) -> None:
    """Parse the valid file and many damaged ones."""
    path.write_bytes(sound)
    parse()
    tally, rng = Tally(), random.Random(seed)
    for _ in range(COUNT):
        content = mutated(rng, sound, sound)
        path.write_bytes(content)
        tally.feed(content, parse)
    assert not tally.offences, tally.report()
    assert tally.read + tally.refused == COUNT
    assert tally.refused > 100
    assert tally.read > 10


def finite(folder: Path, **options: str) -> None:
    found = Federation.from_folder(folder, **options)
    assert found.x.isfinite().all()
    assert found.y.isfinite().all()


@pytest.mark.parametrize("name", ["n.csv", "n.TSV"])
def test_damaged_tables(tmp_path: Path, name: str) -> None:
    """Two thousand damaged tables give finite numbers or one line."""
    rows = "".join(f"{i * 1.5},{'abc'[i % 3]},{i % 2}\n" for i in range(12))
    text = "a,b,y\n" + rows
    sound = (text.replace(",", "\t") if name.endswith("TSV") else text).encode()
    feed(tmp_path / name, sound, 1, lambda: finite(tmp_path, target="y"))


def test_odd_cells(tmp_path: Path) -> None:
    """Two thousand tables of unusual cells give finite numbers or one line, with any column as the target."""
    rng, tally = random.Random(2), Tally()
    for _ in range(COUNT):
        few = rng.sample(CELLS, rng.randrange(1, 6))
        text = "a;y\n" + "".join(f"{rng.choice(few)};{rng.choice(few)}\n" for _ in range(rng.randrange(1, 12)))
        (tmp_path / "n.csv").write_text(text)
        task = rng.choice(("auto", "classification", "regression"))
        scope = rng.choice(("federated", "local"))
        tally.feed(
            text.encode(), lambda task=task, scope=scope: finite(tmp_path, target="y", task=task, preprocessing=scope)
        )
    assert not tally.offences, tally.report()
    assert min(tally.read, tally.refused) > 100


def test_damaged_parquet(tmp_path: Path) -> None:
    """Two thousand damaged Parquet files give finite numbers or one line."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    stream = io.BytesIO()
    columns = {
        "a": [i * 1.5 for i in range(12)],
        "b": ["abc"[i % 3] for i in range(12)],
        "y": [i % 2 for i in range(12)],
    }
    parquet.write_table(arrow.table(columns), stream)
    feed(tmp_path / "n.parquet", stream.getvalue(), 3, lambda: finite(tmp_path, target="y"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_arrays(tmp_path: Path, save: Callable[..., None]) -> None:
    """Two thousand damaged .npz files give finite numbers or one line."""
    stream = io.BytesIO()
    save(stream, x=np.arange(24.0).reshape(12, 2), y=np.arange(12) % 2)
    feed(tmp_path / "n.npz", stream.getvalue(), 4, lambda: finite(tmp_path))


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_damaged_arrays_to_predict(tmp_path: Path, name: str) -> None:
    """Two thousand damaged array files for prediction are read or refused in one line."""
    stream, x = io.BytesIO(), np.arange(24.0).reshape(12, 2)
    np.savez(stream, x=x, y=np.arange(12) % 2) if name.endswith("z") else np.save(stream, x)
    feed(tmp_path / name, stream.getvalue(), 6, lambda: read_arrays(tmp_path / name))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_damaged_images(tmp_path: Path, kind: str) -> None:
    """Two thousand damaged images give pixels or one line."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    image.fromarray(pixels).save(stream, format=kind)
    feed(tmp_path / f"1.{kind.lower()}", stream.getvalue(), 5, lambda: read_image(tmp_path / f"1.{kind.lower()}"))
