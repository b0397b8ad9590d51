"""Which runs can have private rounds. The protocol itself is in `masked.py`, which needs `cryptography`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.algorithms.hooks import AggregatesSums
from waffle_fl.engines.participation import cohort_size
from waffle_fl.engines.run_spec import RoundSettings, RunSpec
from waffle_fl.errors import WaffleError

if TYPE_CHECKING:
    from waffle_fl.engines.masked import MaskedRounds

FEWEST = 4  # agents in a private round: the threshold of shares is then below their number


def masked_rounds_of(spec: RunSpec, settings: RoundSettings) -> MaskedRounds | None:
    """Return the private rounds of a run, or None if its server may see the updates or there are none."""
    if not masks_updates(spec.algorithm, settings):
        return None
    from waffle_fl.engines.masked import MaskedRounds

    return MaskedRounds(spec, settings)


def check_privacy(spec: RunSpec, settings: RoundSettings) -> None:
    """Raise a WaffleError if a run that should be private cannot be."""
    if problem := masking_problem(spec.algorithm, int((spec.federation.samples > 0).sum()), settings):
        raise WaffleError(problem)
    if masks_updates(spec.algorithm, settings) and spec.transport:
        raise WaffleError(f"privacy = {settings.privacy}: expected no transport of updates as bytes")


def masking_problem(algorithm: Any, able: int, settings: RoundSettings) -> str:
    """Return why a run of so many agents with samples cannot be masked, or an empty string."""
    if not masks_updates(algorithm, settings):
        return ""
    problem, size = _needs_updates(algorithm), cohort_size(able, settings.participation)
    if not problem and size < FEWEST:
        problem = f"expected at least {FEWEST} agents with samples in a round, got {size}"
    if not problem and settings.min_contributors > size:
        problem = f"min_contributors: expected at most {size}, the agents of a round, got {settings.min_contributors:g}"
    if not problem and settings.masked_distances == "dealer" and getattr(algorithm, "compares_directions", False):
        problem = f"masked_distances: expected sketch with {_name(algorithm)}, which compares each layer, got dealer"
    if not problem and not importlib.util.find_spec("cryptography"):
        problem = "needs the package cryptography: pip install 'waffle-fl[private]'"
    return f"privacy = {settings.privacy}: {problem}" if problem else ""


def _needs_updates(algorithm: Any) -> str:
    """Return why the server of this method needs single updates, or an empty string."""
    name = _name(algorithm)
    if not isinstance(algorithm, AggregatesSums):
        able = ", ".join(known for known, kind in ALGORITHMS.items() if issubclass(kind, AggregatesSums))
        return f"{name} does not aggregate from distances and weighted sums alone; these methods do: {able}"
    if option := algorithm.needs_updates():
        return f"the server of {name} needs each update by itself with {option}"
    return ""


def _name(algorithm: Any) -> str:
    return type(getattr(algorithm, "unwrapped", algorithm)).__name__


def masks_updates(algorithm: Any, settings: RoundSettings) -> bool:
    """Whether the updates of a run are masked."""
    return settings.masks and not sends_nothing(algorithm)


def sends_nothing(algorithm: Any) -> bool:
    """Whether the method's agents train alone, so that there is nothing to mask."""
    return getattr(algorithm, "sends_nothing", False)
