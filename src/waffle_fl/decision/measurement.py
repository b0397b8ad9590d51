"""How partners are measured: exactly, or by less where that would take too long, and the coalitions to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from waffle_fl.attacks import NONE
from waffle_fl.config import Settings
from waffle_fl.decision import shapley
from waffle_fl.decision.budget import MORE, PARTNERS, UNLIMITED, WorkBudget
from waffle_fl.decision.coalitions import FOLDS, Plan, able_agents, rows_of
from waffle_fl.decision.shapley import Coalition, Contributions
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation

Measurement: TypeAlias = Literal["shapley", "sampled", "leave-one-out"]
PartnerOption: TypeAlias = Literal["auto", "shapley", "leave-one-out", "none"]
SHARED = "fedavg"  # of tables
TUNED = "fedavg-ft"  # of images and series: the model of the average misses what is special about an agent
JOINT = (SHARED, TUNED)
TUNING = 5  # final rounds in which agents only tune, at most a quarter of all
EXACT_AGENTS = 8  # up to this many agents the Shapley value is exact
PAIRS = 8  # pairs of orders of the sampled Shapley value
STEPS = 4_000_000  # mini-batch steps of tables, above which `auto` measures less: about three minutes on two cores
FEWER_FOLDS = {2: "half", 1: "a quarter"}  # held out, with one seed, where all folds of images exceed the budget
ASK = f"ask for more with --partners shapley, or {MORE}."
ONE_SEED = f"Partners are measured with one seed: {ASK}"
FEWER = f"Partners are measured on {{}} of the training rows{{}}, and each best group trains, with one seed: {ASK}"
NOTHING = f"Partners are not measured, because training takes long: ask with --partners leave-one-out, or {MORE}."
EACH_IN_TURN = "Partners are measured by leaving out each in turn: {}; see --partners."


class Extent(NamedTuple):
    """How partners are measured, and how much."""

    measurement: Measurement | None
    folds: int = FOLDS
    one_seed: bool = False  # instead of all; the headline method is then not measured
    reason: str = ""  # why `auto` measures less than it could


def joint_method(federation: Federation) -> str:
    """Return the method that coalitions train with: FedAvg, which each agent of images or series fine-tunes."""
    return SHARED if len(federation.shape) == 1 else TUNED


def joint_options(method: str, rounds: int, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the options with the rounds in which agents only tune the shared model, unless they are given."""
    found = {name: dict(given) for name, given in options.items()}
    if method == TUNED:
        found[TUNED] = {"tuning": max(1, min(TUNING, rounds // 4)), **found.get(TUNED, {})}
    return found


def shortened_options(options: Mapping[str, Mapping[str, Any]], cut: int) -> dict[str, dict[str, Any]]:
    """Return what changes in the options if a training ends `cut` rounds earlier: so many rounds less only tune."""
    tuning = options.get(TUNED, {}).get("tuning", 0)
    return {TUNED: {"tuning": max(1, tuning - cut)}} if cut and tuning else {}


def measurement_for(
    option: PartnerOption,
    federation: Federation,
    settings: Settings,
    alices: Sequence[int],
    method: str = SHARED,
    seeds: int = 1,
    budget: WorkBudget = UNLIMITED,
) -> Extent:
    """Return how partners are measured. `method` is the headline method, which is measured too if all seeds are."""
    agents = able_agents(federation)
    chosen = [i for i in alices if i in agents]
    if option == "none" or len(agents) < 2 or not chosen:
        return Extent(None)
    if settings.attack != NONE:
        if option != "auto":
            raise WaffleError("partners: not available with an attack; use --partners none")
        return Extent(None, reason="Partners are not measured: an attack is simulated.")
    if option == "leave-one-out":
        return Extent("leave-one-out")
    small = len(agents) <= EXACT_AGENTS
    if option == "shapley":
        return Extent("shapley" if small else "sampled")
    if len(federation.shape) > 1:
        return _within(budget, federation, settings, chosen, agents, method, seeds)
    if small and _steps("shapley", federation, settings, chosen, agents) <= STEPS:
        return Extent("shapley")
    if _steps("leave-one-out", federation, settings, chosen, agents) <= STEPS:
        each = EACH_IN_TURN.format("many rows" if small else f"{len(agents)} agents")
        return Extent("leave-one-out", reason=each)
    long = "Partners are not measured: training takes long; use --partners leave-one-out or shapley."
    return Extent(None, reason=long)


def _within(
    budget: WorkBudget,
    federation: Federation,
    settings: Settings,
    alices: Sequence[int],
    agents: Sequence[int],
    method: str,
    seeds: int,
) -> Extent:
    """Return the measurement of images or signals that the budget allows."""
    rounds = settings.final_round or settings.rounds
    exact: Measurement = "shapley" if len(agents) <= EXACT_AGENTS else "leave-one-out"
    shared = joint_method(federation)
    rows = _rows_trained(plans_of(exact, shared, method, alices, agents), federation)
    in_turn = "" if exact == "shapley" else EACH_IN_TURN.format(f"{len(agents)} agents")
    if not budget.exceeds(rounds * FOLDS * seeds * rows, PARTNERS):
        return Extent(exact, reason=in_turn)
    rows = _rows_trained(plans_of(exact, shared, shared, alices, agents), federation)
    if not budget.exceeds(rounds * FOLDS * rows, PARTNERS):
        return Extent(exact, one_seed=True, reason=f"{ONE_SEED} {in_turn}".strip())
    fewer: Measurement = "shapley" if len(agents) <= 3 else "leave-one-out"  # they train the same coalitions
    rows = _rows_trained(plans_of(fewer, shared, shared, alices, agents), federation)
    for folds, share in FEWER_FOLDS.items():
        if not budget.exceeds(rounds * folds * rows, PARTNERS):
            text = FEWER.format(share, "" if fewer == "shapley" else " by leaving out each in turn")
            return Extent(fewer, folds, True, text)
    return Extent(None, reason=NOTHING)


def _rows_trained(plans: Sequence[Plan], federation: Federation) -> int:
    """Return the training rows of all plans in one fold."""
    return sum(len(rows_of(federation, i)) * (FOLDS - 1) // FOLDS for plan in plans for i in plan.members)


def contributions_of(
    measurement: Measurement, alice: int, agents: Sequence[int]
) -> tuple[Contributions, list[Contributions]]:
    """Return the coefficients of each partner's contribution, and per pair of orders if they are sampled."""
    if measurement == "sampled":
        return shapley.sampled(alice, agents, PAIRS)
    return (shapley.exact if measurement == "shapley" else shapley.leave_one_out)(alice, agents), []


def whole_plans(shared: str, method: str, alice: int, agents: Sequence[int]) -> list[Plan]:
    """Return the headline method with all agents, unless coalitions train with it."""
    return [Plan(method, Coalition(agents), alice)] if method != shared else []


def plans_of(
    measurement: Measurement, shared: str, method: str, alices: Sequence[int], agents: Sequence[int]
) -> list[Plan]:
    """Return every plan to train, without duplicates."""
    coalitions: dict[Coalition, None] = {}
    for alice in alices:
        contributions, _ = contributions_of(measurement, alice, agents)
        coalitions |= dict.fromkeys([Coalition([alice]), *(c for one in contributions.values() for c in one)])
    whole = [plan for alice in alices for plan in whole_plans(shared, method, alice, agents)]
    return [Plan(shared, coalition) for coalition in coalitions] + whole


def _steps(
    measurement: Measurement, federation: Federation, settings: Settings, alices: Sequence[int], agents: Sequence[int]
) -> int:
    """Return the mini-batch steps of a cross-validation with one seed, of all agents together."""
    steps = [settings.steps(len(rows_of(federation, i)) * (FOLDS - 1) // FOLDS) for i in range(federation.agents)]
    plans = plans_of(measurement, SHARED, SHARED, alices, agents)
    return settings.rounds * FOLDS * sum(steps[i] for plan in plans for i in plan.members)
