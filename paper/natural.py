"""Merge the training and test samples of each agent, so that the seed of a partition decides what is held out.

    python -m paper.natural PREPARED/landmine DATA/landmine-whole

Reads one .npz per agent with x_train y_train x_test y_test and writes one with x y.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.arrays import read_npz


def merge(source: Path, target: Path) -> int:
    """Write the merged files of a folder and return their number."""
    files = sorted(source.glob("*.npz"))
    if not files:
        raise WaffleError(f"expected one .npz per agent in {source}, got none")
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        arrays = read_npz(file)
        np.savez_compressed(target / file.name, x=np.concatenate(arrays[::2]), y=np.concatenate(arrays[1::2]))
    return len(files)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m paper.natural", description=__doc__)
    parser.add_argument("source", type=Path, help="folder with one .npz per agent")
    parser.add_argument("target", type=Path, help="folder to write")
    given = parser.parse_args()
    try:
        print(f"{merge(given.source, given.target)} files")
    except WaffleError as error:
        print(f"waffle: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
