"""What a site reports about its arrays, and its check of the common scaling that the server computes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waffle_fl.deploy.policy import Refused
from waffle_fl.errors import WaffleError
from waffle_fl.user_data import AgentData, ArrayScaling
from waffle_fl.user_data.array_scaling import FeatureMoments, clip_of, feature_moments
from waffle_fl.user_data.arrays import target_moments
from waffle_fl.user_data.preprocessing import Moments, ScopeOption

FEWEST = 5  # minimum rows for a summary or a score
ROUNDING = 1e-6  # relative tolerance when checking the common mean and deviation


def impossible(here: Moments | FeatureMoments, mean: Any, deviation: Any, rows: int) -> NDArray[np.bool_]:
    """Return whether, or for which features, the total variance is too small to include this site's contribution.

    With n of N rows here, of mean m and variance s^2: deviation^2 >= n/N (s^2 + (m - mean)^2). The server reports N;
    the site's `max_rows` bounds it.
    """
    mean, deviation = np.asarray(mean, np.float64), np.asarray(deviation, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        share = (here.squares / here.n + (here.mean - mean) ** 2) * here.n / rows
        scale = np.maximum(np.maximum(np.abs(here.mean), here.deviation), deviation)
        most = deviation**2 + ROUNDING * scale**2
        return np.asarray(~(share <= most) | ~np.isfinite(most))


def scaling_of(known: Mapping[str, Any], preprocessing: ScopeOption) -> ArrayScaling | None:
    """Return the server's scaling of arrays, of the run's scope; None if the run uses them as given."""
    try:
        common = ArrayScaling.from_json(known["scaling"]) if known["scaling"] is not None else None
    except (WaffleError, KeyError, TypeError):
        raise Refused("the server's scaling cannot be read") from None
    if preprocessing != (common.scope if common else "none"):
        raise Refused("the server's scaling does not match this run's preprocessing")
    return common


def check_clip(clip: float | None, expected: float | None) -> None:
    """Refuse another bound of standardised inputs: a small one would remove what distinguishes the samples."""
    if clip != expected:
        raise Refused(f"the server clips standardised inputs at {clip}, this site at {expected}")


def check_scaling(common: ArrayScaling, here: AgentData, regression: bool, most: int) -> None:
    """Refuse a common scaling that cannot follow from summaries that include this site's."""
    check_clip(common.clip, clip_of(here.x.ndim - 1))
    features = feature_moments(here.x, here.train)
    if len(common.mean) != (len(features.mean) if common.scope == "federated" else 0):
        raise Refused(f"the server's scaling has {len(common.mean)} means, this site's samples {len(features.mean)}")
    if not regression and (common.target_mean, common.target_deviation) != (0, 1):
        raise Refused("the server's scaling has a scale of the target, which is a class here")
    if not features.n or not (common.mean or regression):
        return
    if not features.n <= common.rows <= most:
        raise Refused(
            f"the server's scaling covers {common.rows} samples; this site has {features.n} and allows {most} in total "
            "(max_rows)"
        )
    wrong = impossible(features, common.mean, common.deviation, common.rows) if common.mean else np.zeros(0, bool)
    if wrong.any():
        raise Refused(
            f"the server's mean and deviation of feature {int(wrong.argmax())} cannot be those of samples that include "
            "this site's"
        )
    if regression and impossible(target_moments(here), common.target_mean, common.target_deviation, common.rows).any():
        raise Refused(
            "the server's mean and deviation of the target cannot be those of samples that include this site's"
        )


def array_summary(here: AgentData, regression: bool, preprocessing: ScopeOption) -> dict[str, Any]:
    """Moments of the training samples; with local preprocessing only those of a regression's target leave."""
    if 0 < len(here.train) < FEWEST:
        raise Refused(f"this site has fewer than {FEWEST} training samples, too few to summarise")
    summary: dict[str, Any] = {}
    if preprocessing == "federated":
        found = feature_moments(here.x, here.train)
        summary["features"] = [found.mean.tolist(), found.squares.tolist()]
    if regression and preprocessing != "none":
        summary["target"] = list(target_moments(here)[1:])
    return summary
