"""The algorithms: one file per method, each a few pure functions over explicit state.

`contract.py` defines these functions. `registry.py` registers every class in this package that has an `about`.
"""

from __future__ import annotations

from waffle_fl.algorithms.contract import (
    SGD,
    About,
    Adam,
    Algorithm,
    Grad,
    Net,
    Round,
    check_agents,
    hyperparameters,
    training_key,
)
from waffle_fl.algorithms.preparation import for_model
from waffle_fl.algorithms.registry import ALGORITHMS, TITLES, about_of, algorithm_of, search_space, title_of

__all__ = [
    "ALGORITHMS",
    "SGD",
    "TITLES",
    "About",
    "Adam",
    "Algorithm",
    "Grad",
    "Net",
    "Round",
    "about_of",
    "algorithm_of",
    "check_agents",
    "for_model",
    "hyperparameters",
    "search_space",
    "title_of",
    "training_key",
]
