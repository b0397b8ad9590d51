"""Shifts: additional heterogeneity beyond the paper's splits, as pure functions of arrays and a seed.

labels      sample counts and label distributions, of training and test data
covariates  features of a sample                concepts  meaning of the labels, and when it changes
groups      which agents are shifted            reading   parses `rotate(45) + swap(4, groups=2)`
"""

from waffle_fl.shifts.concepts import Drift, Swap
from waffle_fl.shifts.covariates import Blur, Colour, Contrast, Covariate, Noise, Rotate, Scale
from waffle_fl.shifts.labels import Dirichlet, Prior, Quantity, Sizes
from waffle_fl.shifts.reading import KINDS, Shift, read_shifts, shifted_groups

__all__ = [
    "KINDS",
    "Blur",
    "Colour",
    "Contrast",
    "Covariate",
    "Dirichlet",
    "Drift",
    "Noise",
    "Prior",
    "Quantity",
    "Rotate",
    "Scale",
    "Shift",
    "Sizes",
    "Swap",
    "read_shifts",
    "shifted_groups",
]
