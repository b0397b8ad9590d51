"""Options of the optimiser: the same words for every method, in every engine, and off by default."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import BATCH, make_federation, make_model, refusal
from waffle_fl import SGD, Adam, FedAvg, RunSpec, Waffle, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.cli.flags import settings_class
from waffle_fl.config import RunConfig, check_run, load_experiment
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.experiment.active_run import tensors_of
from waffle_fl.experiment.planning import plan

every = pytest.mark.parametrize("method", list(ALGORITHMS))


@dataclass(frozen=True)
class Unclipped:
    """One global model: FedAvg, as a method from outside that does not know of clipping."""

    sgd: SGD = field(default_factory=SGD)
    init, broadcast, begin, finish = FedAvg.init, FedAvg.broadcast, FedAvg.begin, FedAvg.finish
    personal = FedAvg.personal

    def step(self, local: Any, grad: Any) -> Any:
        g, stats = grad(local.y, local.stats)
        y, velocity = self.sgd.step(local.y, local.velocity, g)
        return type(local)(y, stats, velocity)

    def aggregate(self, server: Any, up: Any, now: Any) -> Any:
        return FedAvg().aggregate(server, up, now)


def rounds_of(algorithm: Any, rounds: int = 3, **options: Any) -> list[Outcome]:
    spec = RunSpec(algorithm, make_federation(alice=2), 5)
    return [one for (one,) in simulate([spec], make_model(), rounds=rounds, batch_size=BATCH, workers=1, **options)]


def same_bits(one: Outcome, other: Outcome) -> bool:
    a, b = tensors_of(one.state), tensors_of(other.state)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------------------- clipping


@every
def test_the_optimiser_clips_as_the_method_does(method: str) -> None:
    """SGD(clip=0.3) gives the bits of the method's own clip = 0.3, whatever the method's default is."""
    kind: Any = ALGORITHMS[method]
    by_optimiser, by_method = rounds_of(kind(SGD(0.1, clip=0.3)), 2), rounds_of(kind(SGD(0.1), clip=0.3), 2)
    assert same_bits(by_optimiser[-1], by_method[-1])


def test_adam_clips_too() -> None:
    one, other = rounds_of(FedAvg(Adam(0.01, clip=0.3))), rounds_of(FedAvg(Adam(0.01), clip=0.3))
    assert same_bits(one[-1], other[-1])


def test_a_setting_clips_every_method_and_a_method_s_own_value_comes_first(tmp_path: Path) -> None:
    """At the top of an experiment file `clip` is that of all methods, and a method's table has the last word."""
    path = tmp_path / "experiment.toml"
    path.write_text('methods = ["fedavg", "waffle", "ditto"]\nclip = 3\n[ditto]\nclip = 0.5\n')
    configs = {config.method: config for config, _ in plan(load_experiment(path), tmp_path)}
    clips = {method: config.algorithm().clip for method, config in configs.items()}  # type: ignore[attr-defined]
    assert clips == {"fedavg": 3.0, "waffle": 3.0, "ditto": 0.5}
    for config in configs.values():
        assert RunConfig.from_json(config.to_json()).algorithm() == config.algorithm()


def test_without_the_setting_each_method_clips_as_before() -> None:
    """The default leaves a method's own clip in place, also in configs that lack the setting."""
    content = check_run("waffle", {}, {}).to_json()
    assert content["settings"].pop("clip") == "method"
    assert RunConfig.from_json(content).algorithm() == Waffle()
    assert "clip: expected at least 0, or 'method', got -1" in refusal(check_run, "waffle", {"clip": -1}, {})


def test_a_method_without_a_clip_of_its_own_is_clipped_by_the_optimiser() -> None:
    config = check_run("test_optimiser_options:Unclipped", {"clip": 0.3, "lr": 0.2}, {})
    assert config.algorithm().sgd == SGD(0.2, clip=0.3)
    assert same_bits(rounds_of(config.algorithm())[-1], rounds_of(FedAvg(SGD(0.2), clip=0.3))[-1])


def test_one_flag_per_word() -> None:
    """`waffle run waffle` has the method's flag --clip, `waffle decide` that of the settings."""
    assert not hasattr(settings_class(method="waffle")(), "clip")
    assert settings_class()().clip == "method"  # type: ignore[attr-defined]
