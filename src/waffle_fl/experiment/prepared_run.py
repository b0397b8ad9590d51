"""Check a run and build its data, its model and its spec, without its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from waffle_fl.algorithms.contract import check_agents
from waffle_fl.attacks import NONE, attackers_of, tamper_of
from waffle_fl.config import RunConfig
from waffle_fl.engines.cohort_rounds import check_store
from waffle_fl.engines.masked_checks import check_privacy
from waffle_fl.engines.noise_checks import check_noise
from waffle_fl.engines.private_gradients import privacy_of
from waffle_fl.engines.run_spec import RunSpec, fitted
from waffle_fl.engines.simulate import check_model
from waffle_fl.errors import WaffleError
from waffle_fl.experiment.active_run import selects
from waffle_fl.experiment.factories import (
    advice,
    check_once,
    check_schedules,
    check_scored,
    federation_of,
    model_name,
    model_of,
    origin,
    round_settings,
)
from waffle_fl.experiment.runtime import Runtime
from waffle_fl.federation import Federation
from waffle_fl.models import STATS_POLICY, FlatModel
from waffle_fl.records import provenance


class PreparedRun(NamedTuple):
    """A run whose config and data are valid."""

    config: RunConfig
    folder: Path
    spec: RunSpec
    all_agents: Federation  # also those whose training the method does not use
    model: FlatModel
    start: int = 0  # rounds that a checkpoint has

    def notes(self) -> list[str]:
        """Return notes for the user before the run."""
        return advice(self.config, self.spec.federation, getattr(self.spec.algorithm, "parts", None))


def prepare(config: RunConfig, folder: Path, runtime: Runtime, device: torch.device) -> PreparedRun:
    """Check a run and return it; raise a WaffleError if its settings, its data and its method do not fit."""
    s = config.settings
    all_agents = federation_of(s, runtime.data_dir, runtime.allow_unverified)
    is_local = config.method == "local" and s.scored == "alice"  # no other agent's training is used
    federation = all_agents.only(all_agents.alice) if is_local else all_agents
    if s.augment and len(federation.shape) != 3:
        raise WaffleError(f"augment is for images; {s.data} has samples of shape {federation.shape}")
    model = model_of(s, federation, runtime, device)
    check_once(s, model, federation)
    spec = fitted(_run_spec(config, federation), model)
    check_model([spec], model, s.batch_size, s.remainder)
    if s.final_round and not selects(s):
        raise WaffleError(f"final_round: expected 0 unless final_model is selected, got {s.final_round}")
    if s.final_round > s.rounds:
        raise WaffleError(f"final_round: expected at most the number of rounds, {s.rounds}, got {s.final_round}")
    if s.test == "none" and not len(federation.validation[federation.alice]):
        raise WaffleError("test: expected share or all without validation data, got none: set validation, such as 0.2")
    if selects(s) and not s.final_round and not len(federation.validation[federation.alice]):
        raise WaffleError(
            "final_model: expected last without validation data, got selected: set validation, such as 0.2"
        )
    check_agents(spec.algorithm, federation.agents)
    check_privacy(spec, round_settings(s))
    check_noise(spec.algorithm, model, spec.federation, round_settings(s))
    if s.states == "disk":
        check_store(spec, round_settings(s), model, runtime.engine)
        if s.newcomers:
            raise WaffleError(f"newcomers: expected none with states on disk, got {', '.join(s.newcomers)}")
    check_schedules(config)
    check_scored(config)
    return PreparedRun(config, folder, spec, all_agents, model)


def provenance_of(prepared: PreparedRun, runtime: Runtime, device: str) -> dict[str, Any]:
    """Return the description of a run that its folder keeps."""
    s, all_agents, spec, model = prepared.config.settings, prepared.all_agents, prepared.spec, prepared.model
    alice = spec.federation.test[spec.federation.alice]
    return provenance(
        device,
        all_agents.digest(),
        agents=list(all_agents.names),
        alice=all_agents.alice,
        label_counts=all_agents.label_counts().tolist(),
        test_samples=sum(map(len, spec.federation.test)) if spec.everyone else len(alice),
        task=all_agents.task,
        classes=list(all_agents.class_names),
        sample=list(all_agents.shape),
        **({"shifted": dict(all_agents.shifted)} if all_agents.shifted else {}),
        **origin(s, runtime),
        statistics=STATS_POLICY if model.stats_size else "this model has no running statistics",
        model=model_name(s, all_agents.shape),
        parameters=model.size,
        engine={"rows": "stacked" if model.stacked else "single"},
        **privacy_of(all_agents.samples.tolist(), all_agents.ids, round_settings(s)),
        notes=prepared.notes(),
        **(
            {"attackers": [all_agents.names[i] for i in attackers_of(all_agents, s.attackers)]}
            if s.attack != NONE
            else {}
        ),
    )


def _run_spec(config: RunConfig, federation: Federation) -> RunSpec:
    """Return the run as the engine's spec. A single agent has no attackers."""
    s = config.settings
    if s.scored == "all":
        return RunSpec(config.algorithm(), federation, s.seed, everyone=True)
    spec = RunSpec(config.algorithm(), federation, s.seed, requested=frozenset([federation.alice]))
    if s.attack == NONE or federation.agents == 1:
        return spec
    tamper = tamper_of(federation, s.attack, s.attackers, s.seed)
    return replace(spec, tamper=tamper, attackers=attackers_of(federation, s.attackers))
