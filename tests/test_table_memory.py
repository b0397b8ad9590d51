"""The memory that reading takes: at most ten times a table's size, and no more than allowed for compressed files."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli_support import waffle
from conftest import refusal
from data_support import MEGABYTE, memory_below
from waffle_fl import Federation
from waffle_fl.inference.predicting import read_arrays
from waffle_fl.user_data import expansion
from waffle_fl.user_data.images import read_image
from waffle_fl.user_data.tables import read_table

OBJECTS = MEGABYTE // 2  # for what is held in Python objects at the same time, whatever the size of the file


def write(path: Path, rows: int, row: Callable[[int], str]) -> Path:
    path.write_text("a,b,y\n" + "".join(f"{row(i)},{i % 2}\n" for i in range(rows)))
    return path


SHAPES: dict[str, tuple[int, Callable[[int], str]]] = {
    "one long cell": (2_000, lambda i: f"{i},{'x' * 80_000 if i == 9 else 'u'}"),
    "numbers": (8_000, lambda i: f"{i * 0.37:.4f},{i * 1.7:.3f}"),
    "digits": (12_000, lambda i: f"{i % 10},{i % 7}"),
    "different texts": (6_000, lambda i: f"p{i},q{i % 5}"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table_takes_at_most_ten_times_its_size(tmp_path: Path, shape: str) -> None:
    """Reading a table allocates at most ten times the size of its file, whatever the lengths of its cells."""
    path = write(tmp_path / "n.csv", *SHAPES[shape])
    with memory_below(10 * path.stat().st_size + OBJECTS):
        assert len(read_table(path)) == SHAPES[shape][0]


def test_a_federation_with_one_long_cell_takes_little_memory(tmp_path: Path) -> None:
    """A file of 85 kB with one long cell, which took 400 MB, is read, split and preprocessed in less than 3 MB."""
    write(tmp_path / "n.csv", 800, lambda i: f"{i * 7 % 101},{'x' * 80_000 if i == 9 else 'u'}")
    with memory_below(3 * MEGABYTE):
        assert Federation.from_folder(tmp_path, target="y").agents == 1


# ---------------------------------------------------------------------------------------------- compressed files


def npz_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, shape in (("x", (40_000, 1_000)), ("y", (40_000,))):
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
            with archive.open(f"{name}.npy", "w") as stream:
                stream.write(header.getvalue())
                for _ in range(shape[0] // 1_000):
                    stream.write(bytes(1_000 * int(np.prod(shape[1:]))))


def png_bomb(path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    image.new("L", (8_000, 5_000)).save(path)


def parquet_bomb(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    text = arrow.DictionaryArray.from_arrays(arrow.array(np.zeros(5_000, np.int32)), ["x" * 20_000])
    parquet.write_table(arrow.table({"a": text, "y": arrow.array(np.arange(5_000) % 2)}), path)


def excel_bomb(path: Path) -> None:
    pytest.importorskip("openpyxl", reason="openpyxl is not installed")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/worksheets/sheet1.xml", bytes(40_000_000))


BOMBS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "x.npz": (npz_bomb, lambda path: Federation.from_folder(path.parent)),
    "new.npz": (npz_bomb, read_arrays),
    "x.png": (png_bomb, read_image),
    "x.parquet": (parquet_bomb, read_table),
    "x.xlsx": (excel_bomb, read_table),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_its_memory_is_taken(tmp_path: Path, name: str) -> None:
    """A small file that would take more than 32 MB and ten times its size is refused in one line, with the setting."""
    make, read = BOMBS[name]
    path = tmp_path / name
    make(path)
    assert path.stat().st_size < MEGABYTE
    allowed = 2 * expansion.FREE if name == "x.parquet" else 8 * MEGABYTE  # Parquet's texts are counted as they come
    with memory_below(allowed):
        text = refusal(read, path)
    assert f"{path} would take " in text
    assert "times its size on disk: expected at most 10 times, or 32 MB; if this is right, set --max-expansion " in text


def test_the_limit_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stated max_expansion the file is read, in a folder and in Pillow's own limits."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    monkeypatch.setattr(expansion, "FREE", 1_000)
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 100)
    for name, shade in (("cat", 0), ("dog", 255)):
        (tmp_path / "ann" / name).mkdir(parents=True)
        for i in range(3):
            image.new("L", (64, 60), abs(shade - i)).save(tmp_path / "ann" / name / f"{i}.png")
    text = refusal(Federation.from_folder, tmp_path)
    needed = float(text.rsplit(" ", 1)[1])
    assert Federation.from_folder(tmp_path, max_expansion=needed).shape == (1, 60, 64)


LIMITED = """
import resource, sys
from waffle_fl import cli
with open("/proc/self/statm") as stream:
    used = int(stream.read().split()[0]) * resource.getpagesize()
import waffle_fl.cli.data
with open("/proc/self/statm") as stream:
    used = int(stream.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, resource.RLIM_INFINITY))
sys.exit(cli._run(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on address space needs Linux")
def test_the_command_keeps_to_a_memory_limit(tmp_path: Path) -> None:
    """`waffle data` reads a table with a long cell in each column within 200 MB; it took 10 GB."""
    long = "x" * 120_000
    write(tmp_path / "n.csv", 10_000, lambda i: f"{long},u" if i == 3 else f"u,{long}" if i == 5 else "u,v")
    line = [sys.executable, "-c", LIMITED, "data", str(tmp_path), "--target", "y"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 agent, 10,000 rows" in done.stdout


def test_the_message_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    """`waffle data` on a bomb prints one line and exits with 2."""
    npz_bomb(tmp_path / "x.npz")
    shown = waffle("data", tmp_path)
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert "set --max-expansion" in shown.err
