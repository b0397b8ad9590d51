"""The numbers that the paper printed: its table of accuracies in percent, and the p_d of Weight Erosion."""

from __future__ import annotations

from typing import NamedTuple

from waffle_fl.algorithms import TITLES as ALL_TITLES


class Printed(NamedTuple):
    """A cell of the paper's table in percent; CIFAR-10 has one seed, so no standard deviation."""

    mean: float
    std: float | None = None


SPLITS = ("A", "B", "C", "A*", "B*")
METHODS = ("local", "fedavg", "scaffold", "weight-erosion", "waffle-paper", "apfl")
TITLES = {**ALL_TITLES, "waffle-paper": "WAFFLE"}  # the pages of the paper's studies know one WAFFLE
PAPER_SEEDS = 5  # of its MNIST results; CIFAR-10 has one
GLOBAL, PERSONAL = ("fedavg", "scaffold"), ("weight-erosion", "waffle-paper", "apfl", "ditto")

_MNIST = """
    96.88 0.47   98.99 0.08   99.03 0.08   99.01 0.16   98.93 0.10   97.55 0.13
    99.38 0.09   98.97 0.18   99.24 0.17   99.69 0.07   99.69 0.03   99.36 0.09
    98.54 0.10   98.56 0.10   98.77 0.10   99.00 0.08   99.00 0.08   98.45 0.08
    96.56 0.27   13.37 3.21   19.93 5.95   98.09 0.26   97.99 0.26   96.24 0.22
    99.47 0.07   45.26 4.10   57.51 4.02   99.67 0.09   99.63 0.11   99.44 0.07
"""
_CIFAR10 = """
    77.1   92.5   92.7   91.2   90.7   77.6
    88.8   88.4   85.0   93.5   93.1   89.5
    83.2   85.7   86.8   90.7   91.4   80.9
    76.3   24.8   25.9   87.7   90.0   78.0
    87.6   78.2   47.6   93.7   92.6   87.8
"""


def _table(text: str, width: int) -> dict[tuple[str, str], Printed]:
    rows = [[float(word) for word in line.split()] for line in text.split("\n") if line.strip()]
    return {
        (split, method): Printed(*row[width * k : width * (k + 1)])
        for split, row in zip(SPLITS, rows, strict=True)
        for k, method in enumerate(METHODS)
    }


TABLE = {"mnist": _table(_MNIST, 2), "cifar10": _table(_CIFAR10, 1)}
P_D = {
    "mnist": dict(zip(SPLITS, (0.006, 0.0067, 0.006, 0.0088, 0.0088), strict=True)),
    "cifar10": dict(zip(SPLITS, (1.1, 1.1, 0.9, 0.6, 0.6), strict=True)),
}
SLOPE = 3.2
