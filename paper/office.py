"""Reduce Office-Caltech10 to FedBN's number of training images: python -m paper.office OFFICE OUT

OFFICE has one .npz per camera (x_train y_train x_test y_test). OUT/office-62 receives the same files with the first 62
training images of each camera, half of what FedBN's split leaves for training of the smallest one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

IMAGES = 62


def prepare(office: Path, out: Path) -> None:
    """Write one file per camera."""
    (out / "office-62").mkdir(parents=True, exist_ok=True)
    for file in sorted(office.glob("*.npz")):
        with np.load(file) as arrays:
            kept = {name: arrays[name][: IMAGES if name.endswith("train") else None] for name in arrays}
        np.savez_compressed(out / "office-62" / file.name, **kept)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m paper.office", description=__doc__)
    for name in ("office", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args(arguments)
    prepare(given.office, given.out)


if __name__ == "__main__":
    main(sys.argv[1:])
