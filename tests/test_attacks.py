"""Attacks: hand-computed examples, comparison with byzfl, runs, and the guard."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import BATCH, make_federation, make_model, outcomes_of, refusal
from waffle_fl.algorithms import SGD
from waffle_fl.algorithms.scaffold import Scaffold, Up
from waffle_fl.algorithms.waffle_paper import WafflePaper
from waffle_fl.attacks import ATTACKS, attackers_of, parse, poisoned, tamper_of
from waffle_fl.attacks.poison import stamped
from waffle_fl.attacks.updates import Scene
from waffle_fl.config import check_run
from waffle_fl.engines.arithmetic import one_thread
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment import Runtime, execute
from waffle_fl.guard import COPIED, OK, OPPOSED, PULLING, REASONS, screen
from waffle_fl.records import read_json, read_rounds

ATTACK_NAMES = list(ATTACKS)
SMALL = {"rounds": 4, "samples_per_agent": 20, "agents": 4}


def scene(seed: int = 0, agents: int = 6, length: int = 40, malicious: int = 2) -> Scene:
    dy = torch.from_numpy(np.random.default_rng(seed).standard_normal((agents, length)))
    honest = torch.arange(agents) < agents - malicious
    return Scene(dy, honest, torch.tensor(0), torch.arange(agents) + 7)


def sent(text: str, s: Scene) -> torch.Tensor:
    attack_update = parse(text).lie
    assert attack_update is not None
    return attack_update(s)[~s.honest]


def test_by_hand() -> None:
    """A sign flip negates, a free rider sends zeros, replacement multiplies by ten, a mimic sends Alice's update."""
    s = scene()
    bad = s.dy[~s.honest]
    assert torch.equal(sent("sign-flip", s), -bad)
    assert torch.equal(sent("replacement", s), 10 * bad)
    assert not sent("free-rider", s).any()
    assert torch.equal(sent("mimic", s), s.dy[[0, 0]])


def test_noise_has_its_length() -> None:
    """Noise has the requested length, in median honest updates, and differs between agents and rounds."""
    s = scene()
    noise = sent("far(100)", s)
    median = s.dy[s.honest].norm(dim=1).median()
    torch.testing.assert_close(noise.norm(dim=1), (100 * median).expand(2))
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise, sent("far(100)", s._replace(keys=s.keys + 1)))


def test_projected_poison_is_near_alice() -> None:
    """Projected poison is as near to Alice's update as her nearest honest peer, and less aligned with it."""
    s = scene()
    poison = sent("projected", s)
    peers = (s.dy[1:4] - s.dy[0]).norm(dim=1)
    torch.testing.assert_close((poison - s.dy[0]).norm(dim=1), peers.min().expand(2))
    assert (poison @ s.dy[0] < s.dy[0] @ s.dy[0]).all()


def test_evading_poison_passes_the_guard() -> None:
    """Poison that knows the guard is accepted, twice as long as Alice's update, and opposed to the honest mean."""
    s = scene(agents=10, length=4000, malicious=3)
    s = s._replace(dy=s.dy + 0.8 * torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    dy = s.dy.clone()
    dy[~s.honest] = sent("evading(2)", s)
    assert codes_of(dy) == [OK] * 10
    torch.testing.assert_close(dy[7:].norm(dim=1), (2 * dy[0].norm()).expand(3), rtol=1e-3, atol=0)
    assert (dy[7:] @ dy[:7].mean(dim=0) < 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_byzfl(byzfl: Any, seed: int) -> None:
    """ALIE, inner product manipulation, sign flips and mimicry equal byzfl's in float64."""
    s = scene(seed)
    honest = s.dy[s.honest].numpy()
    for text, theirs in (
        ("alie(1.5)", byzfl.ALittleIsEnough(1.5)(honest)),
        ("ipm(0.5)", byzfl.InnerProductManipulation(0.5)(honest)),
        ("mimic", byzfl.Mimic(0)(honest)),
        ("sign-flip", np.stack([byzfl.SignFlipping()(row[None]) for row in s.dy[~s.honest].numpy()])),
    ):
        np.testing.assert_allclose(sent(text, s).numpy(), np.broadcast_to(theirs, (2, 40)), rtol=1e-12, atol=1e-12)


def test_attackers_are_the_last_agents() -> None:
    """The last agents are malicious, and Alice never is."""
    assert attackers_of(make_federation(alice=0), 2) == (2, 3)
    assert attackers_of(make_federation(alice=3), 2) == (1, 2)
    assert "between 1 and 3" in refusal(attackers_of, make_federation(), 4)


def test_flipped_labels() -> None:
    """The attackers relabel class k as C - 1 - k; all other labels stay unchanged."""
    honest, bad = make_federation(), poisoned(make_federation(), "label-flip", 1)
    assert torch.equal(bad.labels(3, bad.train[3]), 2 - honest.labels(3, honest.train[3]))
    assert all(torch.equal(bad.labels(i, bad.train[i]), honest.labels(i, honest.train[i])) for i in range(3))


def test_backdoor() -> None:
    """Half of an attacker's samples are stamped and labelled as the target; the probe has Alice's other classes."""
    honest, bad = make_federation(), poisoned(make_federation(), "backdoor(1, 0.5)", 1)
    half = round(0.5 * len(honest.train[3]))
    assert torch.equal(bad.samples, honest.samples)
    assert (bad.labels(3, bad.train[3][:half]) == 1).all()
    assert torch.equal(bad.x[bad.train[3][:half]], stamped(honest.x[honest.train[3][:half]], honest.x))
    assert torch.equal(bad.train[3][half:], honest.train[3][half:])
    assert bad.backdoor is not None
    assert (bad.labels(0, bad.backdoor) == 1).all()
    tests = honest.test[0]
    assert len(bad.backdoor) == int((honest.labels(0, tests) != 1).sum())
    assert torch.equal(bad.test[0], tests)


def test_label_attacks_follow_a_drift() -> None:
    """When labels drift, attackers mirror the new labels too, and stamped samples keep the target label."""
    honest = make_federation()
    turn = torch.full((len(honest.x),), 0.5, dtype=torch.float64)
    honest = replace(honest, later=honest.relabel.roll(1, dims=1), turn=turn)
    mirrored, bad = poisoned(honest, "label-flip", 1), poisoned(honest, "backdoor(1, 0.5)", 1)
    for moment in (0.2, 0.8):
        own = honest.train[3]
        assert torch.equal(mirrored.labels(3, own, moment), 2 - honest.labels(3, own, moment))
        assert bad.backdoor is not None
        assert (bad.labels(0, bad.backdoor, moment) == 1).all()
        assert (bad.labels(3, bad.train[3][: round(0.5 * len(own))], moment) == 1).all()
    assert len(outcomes_of(RunSpec(Scaffold(), bad, 3), make_model(), rounds=2)) == 2


def test_stamp_is_a_patch() -> None:
    """In an image of 28 x 28 the last 3 x 3 pixels of each channel take the largest value of all."""
    x = torch.zeros(2, 1, 28, 28)
    found = stamped(x, torch.tensor([0.0, 5.0]))
    assert (found[..., -3:, -3:] == 5).all()
    assert found.sum() == 2 * 9 * 5
    assert not x.any()


@pytest.mark.parametrize("attack", ATTACK_NAMES)
def test_every_attack_runs_and_resumes(attack: str, tmp_path: Path) -> None:
    """Each attack runs by its name, the record names the attackers and their weight, and runs repeat bit for bit."""
    config = check_run("waffle-paper", {**SMALL, "attack": attack, "attackers": 2}, {})
    folders = [tmp_path / name for name in ("first", "second")]
    execute([(config, folder) for folder in folders], Runtime(workers=1, stack=1))
    rounds = [read_rounds(folder / "rounds.jsonl") for folder in folders]
    timeless = [[{k: v for k, v in line.items() if k != "seconds"} for line in lines] for lines in rounds]
    assert timeless[0] == timeless[1]
    assert all(0 <= line["attackers_weight"] <= 1 for line in rounds[0])
    assert all(("backdoor" in line) == (attack == "backdoor") for line in rounds[0])
    assert (read_json(folders[0] / "provenance.json") or {})["attackers"] == ["agent 2", "agent 3"]


def test_noise_depends_on_the_round_only() -> None:
    """The attack of round 3 does not depend on earlier rounds, so a resumed run sees the same attack."""
    tamper: Any = tamper_of(make_federation(), "gaussian", 1, seed=5)
    again: Any = tamper_of(make_federation(), "gaussian", 1, seed=5)
    up = Up(torch.ones(4, 30), torch.zeros(4, 0))
    tamper(up, 2)
    assert torch.equal(tamper(up, 3).dy, again(up, 3).dy)
    assert not torch.equal(tamper(up, 3).dy, tamper(up, 2).dy)
    assert torch.equal(tamper(up, 3).dy[:3], up.dy[:3])


def test_local_is_not_attacked(tmp_path: Path) -> None:
    """Local has the same results with and without an attack."""
    runs = [check_run("local", {**SMALL, **more}, {}) for more in ({}, {"attack": "sign-flip", "attackers": 2})]
    results = execute([(run, tmp_path / str(i)) for i, run in enumerate(runs)], Runtime(workers=1))
    assert results[0]["last"] == results[1]["last"]


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ("sign-flop", "did you mean sign-flip"),
        ("alie(x)", "expected numbers"),
        ("backdoor(0, 2)", "share in (0, 1]"),
        ("backdoor(inf)", "finite"),
        ("gaussian(nan)", "finite"),
    ],
)
def test_invalid_attacks_are_rejected(attack: str, expected: str) -> None:
    """An unknown or invalid attack is rejected with one line before any work."""
    assert expected in refusal(check_run, "waffle-paper", {"attack": attack}, {})


def test_label_attacks_need_classes() -> None:
    """Attacks on labels reject regression targets."""
    federation = replace(make_federation(), task="regression")
    assert "expected a classification task" in refusal(poisoned, federation, "label-flip", 1)


# -------------------------------------------------------------------------------------------------------------- guard


def screened(attack: str, algorithm: Any, guard: str = "standard") -> list[dict[str, Any]]:
    federation = make_federation((40,) * 6)
    bad = poisoned(federation, attack, 2)
    spec = RunSpec(algorithm, bad, 3, tamper=tamper_of(bad, attack, 2, 3), attackers=attackers_of(bad, 2))
    return [outcome.measured for outcome in outcomes_of(spec, make_model(), rounds=8, guard=guard)]


@pytest.mark.parametrize("attack", ["sign-flip(3)", "ipm", "free-rider", "mimic"])
@pytest.mark.parametrize("method", [Scaffold, WafflePaper])
def test_the_guard_finds_crude_attacks(attack: str, method: Any) -> None:
    """Sign flips, inner products, free riders and mimics have almost no weight under the guard."""
    rounds = screened(attack, method(SGD(0.1)))
    assert sum(line["attackers_weight"] for line in rounds) / len(rounds) < 0.1


def codes_of(dy: torch.Tensor, new_control_variates: torch.Tensor | None = None) -> list[int]:
    up = Up(dy, torch.zeros(len(dy), 0))
    all_agents = torch.ones(len(dy), dtype=torch.bool)
    return screen(up, torch.tensor(0), all_agents, "standard", new_control_variates)[2].tolist()


def test_copies_and_chance_agreement_are_rejected() -> None:
    """An exact copy of Alice's update is rejected, and so is an update whose agreement with hers is chance."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(10_000, generator=generator)
    dy = common + torch.randn(6, 10_000, generator=generator)
    dy[4] = dy[0]
    dy[5] = torch.randn(10_000, generator=generator)
    assert codes_of(dy) == [OK, OK, OK, OK, COPIED, OPPOSED]


def test_equal_updates_count_once() -> None:
    """Of three agents that send the same update only the first is accepted; honest updates differ."""
    dy = torch.ones(6, 400) + torch.randn(6, 400, generator=torch.Generator().manual_seed(0))
    dy[4] = dy[5] = dy[3]
    assert codes_of(dy) == [OK, OK, OK, OK, COPIED, COPIED]


def test_long_control_variates_are_rejected() -> None:
    """An ordinary update is rejected if its control variate is twice as long as the median."""
    dy = torch.ones(5, 400) + 0.5 * torch.randn(5, 400, generator=torch.Generator().manual_seed(0))
    new_control_variates = torch.ones(5, 400)
    new_control_variates[3] *= 2
    assert codes_of(dy, new_control_variates) == [OK, OK, OK, PULLING, OK]
    assert REASONS[PULLING] == "too strong a pull"


def test_corrected_updates_are_not_clipped_below_the_median() -> None:
    """Updates are clipped to twice the length of Alice's; with control variates the limit is at least the median."""
    dy = torch.ones(5, 400) + 0.5 * torch.randn(5, 400, generator=torch.Generator().manual_seed(0))
    dy[0] /= 4
    up, all_agents = Up(dy, torch.zeros(5, 0)), torch.ones(5, dtype=torch.bool)
    norms = dy.norm(dim=1)
    for new_control_variates, limit in ((None, 2 * norms[0]), (torch.ones(5, 400), norms.median())):
        cut = screen(up, torch.tensor(0), all_agents, "standard", new_control_variates)[0].dy.norm(dim=1)
        torch.testing.assert_close(cut[1:], norms[1:].clamp(max=limit))


def test_rejected_agents_leave_no_control_variate() -> None:
    """Under the guard SCAFFOLD's c is the mean of the control variates of the accepted agents."""
    federation = make_federation()

    def flip(up: Any, r: int) -> Any:
        return up._replace(dy=torch.where(torch.arange(4)[:, None] == 3, -up.dy, up.dy)) if r > 2 else up

    *_, last = simulate([RunSpec(Scaffold(SGD(0.1)), federation, 3, tamper=flip)], make_model(), rounds=4,
                        batch_size=BATCH, guard="standard")  # fmt: skip
    server, screened = last[0].state.server, last[0].measured["screened"]
    received = [i for i, name in enumerate(federation.names) if screened.get(name, "clipped") == "clipped"]
    assert "agent 3" in screened
    torch.testing.assert_close(server.c, server.c_i[received].mean(dim=0))


def test_the_guard_is_cheap() -> None:
    """Checking an update of LeNet-5 with its control variate takes less than a millisecond on one core."""
    dy = torch.randn(10, 61_706)
    up, all_agents = Up(dy, torch.zeros(10, 0)), torch.ones(10, dtype=torch.bool)
    seconds = []
    with one_thread():
        for _ in range(50):
            began = time.process_time()
            screen(up, torch.tensor(0), all_agents, "standard", dy)
            seconds.append(time.process_time() - began)
    assert min(seconds) / len(dy) < 1e-3
