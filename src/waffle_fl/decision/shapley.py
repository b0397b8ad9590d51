"""What each partner contributes to one agent, as sums over coalitions of a coefficient times the coalition's value.

A coalition is a set of agents that contains Alice. Its value v(S) is the score of its model on Alice's held-out rows.
Every contribution is linear in these values, so a function here returns coefficients, and `bootstrap.contrasts` turns
them into a value with an interval. Pure Python, no training.

exact            the Shapley value of every partner, from all 2^(n-1) coalitions
leave_one_out    v(everyone) - v(everyone without the partner)
sampled          the Shapley value over random orders of the partners, each order followed by its reverse
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from math import comb, sqrt
from statistics import stdev
from typing import TypeAlias

from waffle_fl.randomness import generator

Coalition: TypeAlias = frozenset[int]
Coefficients: TypeAlias = dict[Coalition, float]
Contributions: TypeAlias = dict[int, Coefficients]  # partner -> coefficients of its contribution


def coalitions_of(alice: int, agents: Iterable[int]) -> list[Coalition]:
    """Return every coalition of these agents that contains Alice, the smallest first."""
    partners = [agent for agent in agents if agent != alice]
    sizes = range(len(partners) + 1)
    return [Coalition((alice, *some)) for some in chain.from_iterable(combinations(partners, k) for k in sizes)]


def exact(alice: int, agents: Sequence[int]) -> Contributions:
    """Return the coefficients of each partner's Shapley value.

    With m partners, the marginal contribution to a coalition of Alice and k others has the weight
    k! (m - 1 - k)! / m! = 1 / (m C(m - 1, k)).
    """
    partners = [agent for agent in agents if agent != alice]
    found: Contributions = {partner: {} for partner in partners}
    for partner in partners:
        for coalition in coalitions_of(alice, (agent for agent in agents if agent != partner)):
            weight = 1 / (len(partners) * comb(len(partners) - 1, len(coalition) - 1))
            found[partner][coalition | {partner}] = weight
            found[partner][coalition] = -weight
    return found


def leave_one_out(alice: int, agents: Sequence[int]) -> Contributions:
    """Return the coefficients of each partner's contribution to the coalition of all agents."""
    everyone = Coalition(agents)
    return {agent: {everyone: 1.0, everyone - {agent}: -1.0} for agent in agents if agent != alice}


def orders(agents: Sequence[int], pairs: int, seed: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return random orders of the agents, each paired with its reverse (antithetic sampling)."""
    random = generator(seed, "partner orders")
    drawn = [tuple(int(agent) for agent in random.permutation(list(agents))) for _ in range(pairs)]
    return [(order, order[::-1]) for order in drawn]


def marginal(alice: int, order: Sequence[int]) -> Contributions:
    """Return what each partner adds when the partners join Alice in this order; Alice's own position is ignored.

    With one order for all Alices, a coalition of the first agents of the order serves every Alice among them.
    """
    found, coalition = {}, Coalition([alice])
    for partner in (agent for agent in order if agent != alice):
        found[partner] = {coalition | {partner}: 1.0, coalition: -1.0}
        coalition |= {partner}
    return found


def mean_of(several: Sequence[Contributions]) -> Contributions:
    """Return the mean of the coefficients, partner by partner."""
    found: Contributions = {partner: {} for partner in several[0]}
    for one in several:
        for partner, coefficients in one.items():
            for coalition, coefficient in coefficients.items():
                found[partner][coalition] = found[partner].get(coalition, 0.0) + coefficient / len(several)
    return found


def sampled(alice: int, agents: Sequence[int], pairs: int, seed: int = 0) -> tuple[Contributions, list[Contributions]]:
    """Return the sampled Shapley values of each partner, and the same per pair of orders for the standard error."""
    per_pair = [mean_of([marginal(alice, order) for order in pair]) for pair in orders(agents, pairs, seed)]
    return mean_of(per_pair), per_pair


def evaluate(coefficients: Coefficients, values: Mapping[Coalition, float]) -> float:
    """Return the contribution, given each coalition's value."""
    return sum(coefficient * values[coalition] for coalition, coefficient in coefficients.items())


def sampling_errors(per_pair: Sequence[Contributions], values: Mapping[Coalition, float]) -> dict[int, float]:
    """Return the standard error of each partner's sampled value, from its spread over the pairs of orders."""
    if len(per_pair) < 2:
        return dict.fromkeys(per_pair[0], float("inf"))
    found = {partner: [evaluate(one[partner], values) for one in per_pair] for partner in per_pair[0]}
    return {partner: stdev(singles) / sqrt(len(singles)) for partner, singles in found.items()}
