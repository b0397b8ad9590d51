"""How agents' data differ beyond the paper's splits, each shift a few pure functions of arrays and a seed.

labels      who has how many samples, of which labels, in training and in test data
covariates  what a sample looks like            concepts  what a label means, and from when on
groups      which agents are shifted            reading   `rotate(45) + swap(4, groups=2)` in words
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
