"""Numbers that others published, for docs/published.md.

FLAMBY   owkin/FLamby, flamby/results/results_benchmark_fed_heart_disease/heart_seed42.csv ... heart_seed46.csv: correct
         predictions on each hospital's own test rows, in the order of CENTRES and of the seeds
PFLLIB   the board on pfllib.com/benchmark.html, Fashion-MNIST, practical label skew: mean and deviation of three runs
DIGITS, OFFICE   tables of FedBN (Li et al., ICLR 2021), recalled and not checked against the paper
"""

from __future__ import annotations

TEST_ROWS = {"cleveland": 104, "hungarian": 89, "switzerland": 16, "va": 45}
FLAMBY: dict[str, tuple[tuple[int, ...], ...]] = {
    "Local": ((76, 78, 76, 78, 80), (67, 66, 67, 66, 66), (13, 13, 10, 13, 9), (34, 31, 30, 29, 34)),
    "Pooled": ((83, 81, 82, 81, 80), (68, 68, 68, 68, 68), (12, 12, 12, 12, 12), (29, 29, 29, 29, 29)),
    "FedAvg": ((79, 75, 77, 76, 73), (62, 66, 67, 60, 65), (11, 12, 8, 12, 9), (28, 30, 26, 28, 32)),
    "FedProx": ((79, 75, 77, 76, 73), (62, 66, 67, 60, 65), (11, 12, 8, 12, 9), (28, 30, 26, 28, 32)),
    "SCAFFOLD": ((78, 75, 77, 75, 73), (62, 66, 67, 60, 65), (11, 12, 8, 12, 9), (28, 30, 26, 28, 32)),
    "FedAdagrad": ((79, 76, 80, 79, 81), (68, 65, 67, 66, 69), (12, 12, 12, 12, 11), (28, 30, 33, 31, 30)),
    "FedYogi": ((79, 76, 80, 79, 81), (68, 65, 67, 66, 69), (12, 12, 12, 12, 11), (28, 30, 33, 31, 30)),
}

PFLLIB = {
    "fedavg": (85.85, 0.19),
    "fedprox": (85.63, 0.57),
    "per-fedavg": (95.10, 0.10),
    "pfedme": (97.25, 0.17),
    "ditto": (97.47, 0.04),
    "apfl": (97.25, 0.08),
    "fedfomo": (97.21, 0.02),
    "fedamp": (97.20, 0.06),
    "apple": (97.06, 0.07),
    "fedala": (97.66, 0.02),
    "fedper": (97.44, 0.06),
    "fedrep": (97.56, 0.04),
    "feddbe": (97.69, 0.05),
}

DIGITS = {
    "local": {"mnist": 94.4, "mnist-m": 77.8, "usps": 95.2},
    "fedavg": {"mnist": 95.9, "mnist-m": 76.9, "usps": 95.6},
    "fedbn": {"mnist": 96.6, "mnist-m": 78.3, "usps": 97.0},
}
OFFICE = {
    "local": {"amazon": 54.9, "caltech": 40.2, "dslr": 78.7, "webcam": 86.4},
    "fedavg": {"amazon": 54.1, "caltech": 44.8, "dslr": 66.9, "webcam": 85.1},
    "fedbn": {"amazon": 63.0, "caltech": 45.3, "dslr": 83.1, "webcam": 90.5},
}
