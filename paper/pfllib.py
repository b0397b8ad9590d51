"""Prepare PFLlib's Fashion-MNIST board: python -m paper.pfllib PARTITION IMAGES OUT

PARTITION is an .npz with the arrays train_00 ... train_19 and test_00 ... test_19: the samples of each client, as
indices into Fashion-MNIST's training images followed by its test images. IMAGES is the folder with Fashion-MNIST's four
files. OUT/pfllib receives one .npz per client (x_train y_train x_test y_test), with pixels from -1 to 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from waffle_fl.data.idx import read_idx

CLIENTS = 20
PARTS = {"train": 60_000, "t10k": 10_000}


def prepare(partition: Path, images: Path, out: Path) -> None:
    """Write one file per client."""
    x, y = (
        np.concatenate([read_idx(images / f"{part}-{kind}-ubyte.gz", (n, *size)) for part, n in PARTS.items()])
        for kind, size in {"images-idx3": (28, 28), "labels-idx1": ()}.items()
    )
    (out / "pfllib").mkdir(parents=True, exist_ok=True)
    with np.load(partition) as rows:
        for k in range(CLIENTS):
            arrays = {}
            for part in ("train", "test"):
                chosen = rows[f"{part}_{k:02d}"]
                arrays[f"x_{part}"] = (x[chosen].astype(np.float32)[:, None] / 255 - 0.5) / 0.5
                arrays[f"y_{part}"] = y[chosen].astype(np.int64)
            np.savez(out / "pfllib" / f"client-{k:02d}.npz", **arrays)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m paper.pfllib", description=__doc__)
    for name in ("partition", "images", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args(arguments)
    prepare(given.partition, given.images, given.out)


if __name__ == "__main__":
    main(sys.argv[1:])
