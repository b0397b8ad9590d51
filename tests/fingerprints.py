"""Losses of a few tiny runs, stored in fingerprints.json. They change only together with RESULTS_VERSION.

python tests/fingerprints.py      rewrites the file, after RESULTS_VERSION was raised
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.attacks import tamper_of
from waffle_fl.config import RunConfig, check_run
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment import Runtime, device_of, federation_of, model_of
from waffle_fl.experiment.factories import simulation_options
from waffle_fl.versions import RESULTS_VERSION

KEPT = Path(__file__).with_name("fingerprints.json")
TINY = {"data": "digits", "agents": 3, "samples_per_agent": 40, "rounds": 3, "batch_size": 16, "precision": "float64"}
VARIANTS: dict[str, dict[str, Any]] = {
    "kept momentum": {"momentum": 0.9, "momentum_between_rounds": "keep", "weight_decay": 0.01},
    "Adam": {"optimiser": "adam", "momentum_between_rounds": "keep", "lr": 0.01, "weight_decay": 0.1},
    "group normalisation": {"model": "cnn-gn"},
    "pooled before normalisation": {"model": "cnn-pooled-gn"},
    "convolutions": {"model": "cnn", "epochs": 2},
    "augmented": {"model": "cnn", "augment": True},
    "guarded": {"guard": "standard", "attack": "sign-flip"},
    "shifted labels": {"split": "A*", "permutation_seed": 3},
    "noisy images": {"shift": "noise(0.5)"},
    "Dirichlet": {"shift": "dirichlet(0.5)"},
    "validation": {"validation": 0.2, "seed": 7},
    "small last batch": {"remainder": "keep"},
    "dropped samples": {"remainder": "drop"},
    "partial participation": {"participation": 0.5, "agents": 5},
    "seven steps": {"steps_per_round": 7},
}


def configs() -> dict[str, RunConfig]:
    """Return the runs by name: every method with its defaults, and WAFFLE in several settings."""
    methods = {method: check_run(method, TINY, {}) for method in ALGORITHMS}
    return methods | {name: check_run("waffle-paper", {**TINY, **more}, {}) for name, more in VARIANTS.items()}


def losses(config: RunConfig) -> list[float]:
    """Return the loss of Alice's model on her test data after each round."""
    s = config.settings
    federation = federation_of(s, "", False)
    model = model_of(s, federation, Runtime(), device_of("cpu"))
    tamper = tamper_of(federation, s.attack, s.attackers, s.seed) if s.attack != "none" else None
    spec = RunSpec(config.algorithm(), federation, s.seed, tamper=tamper)
    stream = simulate([spec], model, **simulation_options(s, Runtime(workers=1)))
    return [outcomes[0].measured["loss"] for outcomes in stream]


def main() -> None:
    found = {name: losses(config) for name, config in configs().items()}
    KEPT.write_text(json.dumps({"results_version": RESULTS_VERSION, "losses": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
