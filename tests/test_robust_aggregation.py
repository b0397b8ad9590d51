"""Robust aggregation rules: hand-computed examples, properties, and comparison with byzfl."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_federation, outcomes_of, refusal, shared_model
from waffle_fl.algorithms import SGD
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.robust_aggregation import RULES, clipped_mean, parse, weiszfeld
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.simulate import simulate

RULE_TEXTS = ("krum(2)", "multi-krum(2)", "trimmed-mean(2)", "median", "geometric-median", "centered-clipping(0.8)")
every = pytest.mark.parametrize("text", RULE_TEXTS)


def rows_of(seed: int, agents: int = 7, length: int = 5) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((agents, length)))


def broadcast_to(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(rows), dtype=torch.bool)


def applied(text: str, rows: torch.Tensor, received: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    rule = parse(text)
    assert rule is not None
    return rule(rows, broadcast_to(rows) if received is None else received)


def test_by_hand() -> None:
    """Of 1, 2, 3, 4, 100 the median is 3, the trimmed mean 3, and Krum with one attacker selects 2 or 3."""
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]])
    assert applied("median", rows)[0].tolist() == [3.0]
    assert applied("trimmed-mean(1)", rows)[0].tolist() == [3.0]
    assert applied("krum(1)", rows)[0].item() in (2.0, 3.0)
    assert applied("multi-krum(1)", rows)[0].tolist() == [2.5]
    assert applied("multi-krum(1)", rows)[1].tolist() == [0.25, 0.25, 0.25, 0.25, 0.0]


def test_every_rule_is_tested() -> None:
    """The rules tested here include every registered rule."""
    assert [text.split("(")[0] for text in RULE_TEXTS] == list(RULES)


@every
@given(seed=st.integers(0, 10_000), attackers=st.integers(1, 2))
@settings(max_examples=20)
def test_few_far_rows_have_little_influence(text: str, seed: int, attackers: int) -> None:
    """Two far rows of seven leave the aggregate near the honest rows, while they move the mean far away."""
    rows = rows_of(seed)
    reach = rows.norm(dim=1).max()
    rows[:attackers] = 1e6
    aggregate, shares = applied(text, rows)
    assert aggregate.norm() <= 5 * reach
    assert rows.mean(dim=0).norm() > 1000 * reach
    assert (shares >= 0).all()
    assert shares.sum() <= 1 + 1e-9


@every
def test_order_does_not_matter(text: str) -> None:
    """Permuting the rows leaves the aggregate unchanged and permutes the shares."""
    rows, order = rows_of(1), torch.tensor([3, 1, 6, 0, 5, 2, 4])
    (a, shares), (b, others) = applied(text, rows), applied(text, rows[order])
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(shares[order], others)


@every
@pytest.mark.parametrize("missing", [(2,), (0, 6), (0, 1, 2, 3, 4), (1, 2, 3, 4, 5, 6)])
def test_missing_rows_do_not_count(text: str, missing: tuple[int, ...]) -> None:
    """A row that was not received changes nothing and has share 0; a single received row is the aggregate."""
    rows = rows_of(2)
    received = broadcast_to(rows)
    received[list(missing)] = False
    blank = torch.where(received[:, None], rows, 0.0)
    aggregate, shares = applied(text, blank, received)
    expected, few = applied(text, rows[received])
    torch.testing.assert_close(aggregate, expected)
    torch.testing.assert_close(shares[received], few)
    assert not shares[~received].any()
    if received.sum() == 1:
        torch.testing.assert_close(aggregate, rows[received][0])


@every
def test_many_federations_at_once(text: str) -> None:
    """Under vmap a rule gives the same result as one by one."""
    stack = torch.stack([rows_of(seed) for seed in range(3)])
    received = torch.ones(3, 7, dtype=torch.bool)
    received[1, 4] = False
    stack[1, 4] = 0.0
    rule: Any = parse(text)
    together = torch.vmap(rule)(stack, received)
    for i in range(3):
        for a, b in zip(rule(stack[i], received[i]), together, strict=True):
            torch.testing.assert_close(a, b[i])


@every
def test_in_fedavg(text: str) -> None:
    """FedAvg trains with each rule, and stacks with plain FedAvg."""
    plain = RunSpec(FedAvg(SGD(0.1)), make_federation((23, 9, 64, 14, 20)), 3)
    robust = replace(plain, algorithm=FedAvg(SGD(0.1), aggregation=text))
    outcomes = list(simulate([plain, robust], shared_model(), rounds=6, batch_size=8))
    assert outcomes[-1][1].measured["accuracy"] > 0.5
    assert not torch.equal(*(outcome.state.server.x for outcome in outcomes[-1]))


def test_the_mean_is_the_default() -> None:
    """aggregation = "mean" equals FedAvg bit for bit."""
    a, b = (outcomes_of(RunSpec(FedAvg(SGD(0.1), **o), make_federation(), 3), shared_model())[-1] for o in ({}, MEAN))
    assert torch.equal(a.state.server.x, b.state.server.x)


MEAN: dict[str, Any] = {"aggregation": "mean"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("krumm(1)", "did you mean krum"), ("krum(1.5)", "whole number"), ("krum(x)", "expected numbers"),
     ("krum(-1)", "whole number"), ("krum(inf)", "finite"), ("trimmed-mean(1e400)", "finite"),
     ("centered-clipping(nan)", "finite"),
     ("centered-clipping(0)", "radius above 0"), ("median(3)", "expected numbers")],
)  # fmt: skip
def test_invalid_rules_are_rejected(text: str, expected: str) -> None:
    """An unknown or invalid rule is rejected with one line."""
    assert expected in refusal(parse, text)


ATTACK_ROWS = {
    "zeros": lambda honest: torch.zeros_like(honest[:3]),
    "far": lambda honest: 100 * honest[:3].flip(1),
    "backwards": lambda honest: -3 * honest.mean(dim=0, keepdim=True).expand(3, -1),
    "the mean": lambda honest: honest.mean(dim=0, keepdim=True).expand(3, -1),
}


@pytest.mark.parametrize("attack_row", ATTACK_ROWS)
def test_geometric_median_minimises_the_distance(attack_row: str) -> None:
    """The steps suffice to converge whatever three of ten agents send, zeros included."""
    g = torch.Generator().manual_seed(3)
    honest = 0.1 + 0.1 * torch.randn(7, 200, generator=g, dtype=torch.float64)
    rows = torch.cat([honest, ATTACK_ROWS[attack_row](honest)])
    found, shares = applied("geometric-median", rows)
    start, exact = rows.mean(dim=0), torch.tensor(1e-12)
    best = weiszfeld(rows, broadcast_to(rows), start, exact, 3000)[0]
    assert (found - best).norm() < 1e-4 * honest.norm(dim=1).median()
    if attack_row != "the mean":
        assert shares[7:].sum() < 0.5


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("f", [0, 1, 3])
def test_agrees_with_byzfl(byzfl: Any, seed: int, f: int) -> None:
    """Each rule agrees with byzfl's in float64."""
    rows = rows_of(seed, agents=8)
    theirs = {
        f"krum({f})": byzfl.Krum(f),
        f"multi-krum({f})": byzfl.MultiKrum(f),
        f"trimmed-mean({f})": byzfl.TrMean(f),
        "median": byzfl.Median(),
    }
    for text, rule in theirs.items():
        np.testing.assert_allclose(applied(text, rows)[0].numpy(), rule(rows.numpy()), rtol=1e-12, atol=1e-12)
    found = weiszfeld(rows, broadcast_to(rows), torch.zeros_like(rows[0]), torch.tensor(0.1), 5)[0]
    np.testing.assert_allclose(found.numpy(), byzfl.GeometricMedian(0.1, 5)(rows.numpy()), rtol=1e-12, atol=1e-12)
    found = clipped_mean(rows, broadcast_to(rows), torch.tensor(1.5), 4)[0]
    np.testing.assert_allclose(
        found.numpy(), byzfl.CenteredClipping(None, 4, 1.5)(rows.numpy()), rtol=1e-12, atol=1e-12
    )
