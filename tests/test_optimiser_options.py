"""Options of the optimiser: the same words for every method, in every engine, and off by default."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import BATCH, fitted, make_federation, refusal, shared_model
from reference import run as run_reference
from test_twin import SEED, batches_of, module_of
from waffle_fl import (
    APFL,
    SGD,
    Adam,
    Ditto,
    FedAvg,
    FedRep,
    KNNPer,
    Local,
    RunSpec,
    Waffle,
    WafflePaper,
    WeightErosion,
    simulate,
)
from waffle_fl.algorithms import ALGORITHMS, Round, for_model
from waffle_fl.algorithms.scaffold import Up
from waffle_fl.cli.flags import settings_class
from waffle_fl.config import RunConfig, check_run, load_experiment, load_experiments, option_types
from waffle_fl.engines.aggregation import aggregate_together, registered
from waffle_fl.engines.flower.site_trainer import SiteTrainer
from waffle_fl.engines.run_spec import Outcome, RoundSettings, initial_state, own_net
from waffle_fl.engines.tree import rows_of
from waffle_fl.experiment import Runtime, execute, federation_of
from waffle_fl.experiment.active_run import state_of, tensors_of
from waffle_fl.experiment.planning import plan
from waffle_fl.inference.trained_run import open_run
from waffle_fl.models import FlatModel, mlp
from waffle_fl.records import read_rounds
from waffle_fl.tensorfile import pack, unpack

ALICE, AGENTS = 2, 4
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
    spec = RunSpec(algorithm, make_federation(alice=ALICE), SEED)
    return [one for (one,) in simulate([spec], shared_model(), rounds=rounds, batch_size=BATCH, workers=1, **options)]


def personal_models(algorithm: Any, outcomes: list[Outcome]) -> list[torch.Tensor]:
    """Return Alice's model after each round."""
    return [fitted(algorithm).personal(*one.state, AGENTS).params[ALICE] for one in outcomes]


def check_engines_and_twin(method: str, sgd: SGD, expected: list[torch.Tensor], **options: Any) -> None:
    """Check that the fast engine and the loop give the models of the reference to 1e-12."""
    algorithm = ALGORITHMS[method](sgd=sgd, **options)  # type: ignore[call-arg]
    for engine in ("fast", "loop"):
        found = personal_models(algorithm, rounds_of(algorithm, len(expected), engine=engine))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def reference(method: str, rounds: int, lr: float = 0.2, **settings: Any) -> list[torch.Tensor]:
    """Return the models of the slow second implementation."""
    extra = {"batch_size": BATCH} if method == "weight-erosion" else {}
    batches = batches_of(ALICE)[:rounds]
    return run_reference(method, module_of(shared_model()), batches, alice=ALICE, lr=lr, **settings, **extra).models


def check_resumes_and_site(algorithm: Any) -> None:
    """Check that a saved and loaded state leads to the bits of the whole run, in the simulator and at a site."""
    federation, model, method = make_federation(alice=ALICE), shared_model(), fitted(algorithm)
    spec, settings = RunSpec(algorithm, federation, SEED), {"rounds": 2, "batch_size": BATCH, "workers": 1}
    whole = [one for (one,) in simulate([spec], model, **settings)]  # type: ignore[arg-type]
    saved = tensors_of(whole[0].state)
    state = state_of(unpack(pack(saved, {}), saved)[1], initial_state(spec, model))
    (resumed,) = simulate([replace(spec, state=state)], model, start=1, **settings)  # type: ignore[arg-type]
    assert same_bits(resumed[0], whole[1])
    site = SiteTrainer(algorithm, federation.only(ALICE), model, SEED, RoundSettings(1, BATCH))
    row = slice(ALICE, ALICE + 1)
    sent = [rows_of(method.broadcast(one.state.server, AGENTS), row) for one in whole]
    after, _ = site.train(sent[0], rows_of(whole[0].state.agents, row), 2, 0)
    assert all(torch.equal(a, b) for a, b in zip(after, rows_of(whole[1].state.agents, row), strict=True))
    own = site.own_model(sent[1], after).params
    assert torch.equal(own, method.personal(*whole[1].state, AGENTS).params[ALICE])


def same_bits(one: Outcome, other: Outcome) -> bool:
    a, b = tensors_of(one.state), tensors_of(other.state)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------------------- clipping


@every
def test_the_optimiser_clips_as_the_method_does(method: str) -> None:
    """SGD(clip=0.3) gives the bits of the method's own clip = 0.3, whatever the method's default is."""
    kind: Any = ALGORITHMS[method]
    by_optimiser, by_method = rounds_of(kind(SGD(0.1, clip=0.3)), 1), rounds_of(kind(SGD(0.1), clip=0.3), 1)
    assert same_bits(by_optimiser[-1], by_method[-1])


def test_adam_clips_too() -> None:
    one, other = rounds_of(FedAvg(Adam(0.01, clip=0.3))), rounds_of(FedAvg(Adam(0.01), clip=0.3))
    assert same_bits(one[-1], other[-1])


def test_a_setting_clips_every_method_and_a_method_s_own_value_comes_first(tmp_path: Path) -> None:
    """At the top of an experiment file `clip` is that of all methods, and a method's table has the last word."""
    path = tmp_path / "experiment.toml"
    path.write_text('methods = ["fedavg", "waffle-paper", "ditto"]\nclip = 3\n[ditto]\nclip = 0.5\n')
    configs = {config.method: config for config, _ in plan(load_experiment(path), tmp_path)}
    clips = {method: config.algorithm().clip for method, config in configs.items()}  # type: ignore[attr-defined]
    assert clips == {"fedavg": 3.0, "waffle-paper": 3.0, "ditto": 0.5}
    for config in configs.values():
        assert RunConfig.from_json(config.to_json()).algorithm() == config.algorithm()


def test_without_the_setting_each_method_clips_as_before() -> None:
    """The default leaves a method's own clip in place, also in configs that lack the setting."""
    content = check_run("waffle-paper", {}, {}).to_json()
    assert content["settings"].pop("clip") == "method"
    assert RunConfig.from_json(content).algorithm() == WafflePaper()
    assert "clip: expected at least 0, or 'method', got -1" in refusal(check_run, "waffle-paper", {"clip": -1}, {})


def test_a_method_without_a_clip_of_its_own_is_clipped_by_the_optimiser() -> None:
    config = check_run("test_optimiser_options:Unclipped", {"clip": 0.3, "lr": 0.2}, {})
    assert config.algorithm().sgd == SGD(0.2, clip=0.3)
    assert same_bits(rounds_of(config.algorithm())[-1], rounds_of(FedAvg(SGD(0.2), clip=0.3))[-1])


def test_one_flag_per_word() -> None:
    """`waffle run waffle` has the method's flag --clip, `waffle decide` that of the settings."""
    assert not hasattr(settings_class(method="waffle-paper")(), "clip")
    assert settings_class()().clip == "method"  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------- decay of the learning rate, averaging


@every
def test_decay_and_averaging_agree_with_the_reference(method: str) -> None:
    """In every engine lr is that of the round, also where a method divides by it, and models are means over rounds."""
    own = method == "waffle"  # it averages by itself
    models = reference(method, 3 if method in ("scaffold", "waffle-paper") else 2, lr_decay=0.7)
    expected = models if own else averages(models, 0.6)
    check_engines_and_twin(method, SGD(0.2, lr_decay=0.7, averaging=0.0 if own else 0.6), expected)


def averages(models: list[torch.Tensor], share: float) -> list[torch.Tensor]:
    """Return the running means: after r rounds the latest model weighs 1 / (share r), at most 1."""
    means = [models[0]]
    for r, model in enumerate(models[1:], start=2):
        weight = 1 / (share * r) if share * r > 1 else 1.0
        means.append(weight * model + (1 - weight) * means[-1])
    return means


@pytest.mark.parametrize("options", [{"adaptive": "round"}, {"adaptive": "step", "mix": 0.3}])
def test_apfl_adapts_its_share_with_the_lr_of_the_round(options: dict[str, Any]) -> None:
    check_engines_and_twin("apfl", SGD(0.2, lr_decay=0.5), reference("apfl", 3, lr_decay=0.5, **options), **options)


@every
def test_states_survive_and_sites_give_the_same_bits(method: str) -> None:
    """The lr of the round is part of the server's state and of what it sends; velocity and mean stay at the agent."""
    averaging = 0.0 if method == "waffle" else 0.7
    sgd = SGD(0.1, 0.5, momentum_between_rounds="keep", lr_decay=0.8, averaging=averaging)
    check_resumes_and_site(ALGORITHMS[method](sgd=sgd))


def test_a_constant_lr_adds_nothing() -> None:
    """lr_decay = 1 leaves the algorithm as it is, and the setting reaches both optimisers."""
    assert fitted(FedAvg(SGD(0.1, lr_decay=1))) == FedAvg(SGD(0.1))
    for name, kind in (("sgd", SGD), ("adam", Adam)):
        config = check_run("fedavg", {"lr": 0.1, "lr_decay": 0.9, "optimiser": name}, {})
        assert config.algorithm().sgd == kind(0.1, lr_decay=0.9)
    assert "lr_decay: expected a number above 0 and at most 1, got 1.5" in refusal(SGD, lr_decay=1.5)


def test_adam_decays_too() -> None:
    """With Adam a step is proportional to lr, so the second round moves half as far with lr_decay = 0.5."""
    one, other = (rounds_of(Local(Adam(0.01, lr_decay=decay)), 2) for decay in (1.0, 0.5))
    first, second = one[0].state.agents.y, one[1].state.agents.y
    assert torch.equal(first, other[0].state.agents.y)
    assert not torch.equal(second, other[1].state.agents.y)


def test_control_variates_use_the_lr_of_the_round() -> None:
    """c_i = c_i - c - dy / (K lr) with the lr of round 3, for the guard and in batched aggregation."""
    algorithm, settings, work = fitted(WafflePaper(SGD(0.1, lr_decay=0.5, averaging=0.5))), RoundSettings(10, BATCH), []
    for seed in (3, 4):
        federation = make_federation(alice=ALICE, seed=seed)
        stream = simulate([RunSpec(algorithm, federation, seed)], shared_model(), rounds=2, batch_size=BATCH, workers=1)
        server, agents = list(stream)[-1][0].state
        torch.testing.assert_close(server.c_i, agents.c_i, rtol=1e-12, atol=1e-12)
        up = Up(torch.full_like(agents.c_i, 0.1), agents.c_i[:, :0])
        known = registered(federation, settings, torch.device("cpu"))
        work.append((server, agents, agents, up, known.samples > 0, known))
    for arguments, batched in zip(work, aggregate_together(algorithm, 3, settings, work), strict=True):
        server, _, _, up, _, known = arguments
        expected = server.c_i - server.c - 0.1 / (known.steps[:, None].double() * 0.1 * 0.5**2)
        torch.testing.assert_close(batched.server.c_i, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(algorithm.new_control_variates(server, up, known.steps), expected)


@pytest.mark.parametrize("kind", [APFL, Ditto])
def test_helpers_and_shared_training_use_the_lr_of_the_round(kind: Any) -> None:
    """FedAvg as the helper of another method has the bits of FedAvg alone, and Alice those of a whole run."""
    sgd = SGD(0.1, 0.5, momentum_between_rounds="keep", lr_decay=0.8)
    federation = make_federation(alice=ALICE)
    few, fedavg = (
        RunSpec(kind(sgd), federation, SEED, requested=frozenset([ALICE])),
        RunSpec(FedAvg(sgd), federation, SEED),
    )
    stream = simulate([fedavg, few], shared_model(), rounds=3, batch_size=BATCH, workers=1)
    together = list(stream)[-1]
    assert same_bits(together[0], rounds_of(FedAvg(sgd))[-1])
    whole = rounds_of(kind(sgd))[-1]
    assert torch.equal(
        own_net(few, together[1].state, shared_model()).params, own_net(few, whole.state, shared_model()).params
    )


def test_averaging_is_a_setting_of_every_method() -> None:
    """WAFFLE takes it as its own hyperparameter; for the others it belongs to the optimiser; 0 turns it off."""
    assert check_run("fedavg", {"averaging": 0.5}, {}).algorithm() == FedAvg(SGD(averaging=0.5))
    assert check_run("waffle", {"averaging": 0.5}, {}).algorithm() == Waffle(averaging=0.5, prediction="model")
    assert check_run("waffle", {}, {}).algorithm() == Waffle(prediction="model")
    assert fitted(check_run("fedavg", {"averaging": 0}, {}).algorithm()) == FedAvg()
    assert "Waffle has a hyperparameter of this name" in refusal(fitted, Waffle(SGD(averaging=0.5)))


def test_averaging_does_not_change_training() -> None:
    """The server's state has the same bits with and without averaging; knn-per predicts with the averaged model."""
    plain, mean = (rounds_of(KNNPer(SGD(0.1, averaging=share)), 3) for share in (0.0, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(plain[-1].state.server, mean[-1].state.server, strict=True))
    expected = sum(one.state.server.x for one in plain) / 3
    own = fitted(KNNPer(SGD(0.1, averaging=1.0))).personal(*mean[-1].state, AGENTS).params
    torch.testing.assert_close(own, expected.expand(AGENTS, -1), rtol=1e-12, atol=1e-12)


def test_a_method_whose_model_an_agent_cannot_compute_is_refused_in_one_line() -> None:
    """A personal model that needs more than the agent receives and keeps cannot be averaged by the agent."""

    @dataclass(frozen=True)
    class Hidden(Unclipped):
        def personal(self, server: Any, agents: Any, count: int) -> Any:
            return server.hidden

    message = refusal(fitted(Hidden(SGD(averaging=0.5))).init, shared_model().init(0), AGENTS)
    assert message.startswith("averaging: expected a method whose personal() reads only fields that broadcast() sends")


# ------------------------------------------------------------------------------------ weighting and the authors' rules

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((method, {"weighting": "samples"}) for method in ("apfl", "ditto", "pfedme", "fedrep", "per-fedavg", "knn-per")),
    ("ifca", {"weighting": "samples", "clusters": 2}),
    ("cfl", {"weighting": "samples", "eps_mean": 9.0, "eps_max": 0.0}),
    ("cfl", {"split_first": True, "eps_mean": 9.0, "eps_max": 0.0}),
    ("scaffold", {"weighting": "samples", "clip": 0.0}),
    ("fedrep", {"tuning": 2}),
    ("fedamp", {"own": 0.4, "sigma": 2.0}),
    ("weight-erosion", {"p_d": 0.05, "p_d_rounds": 10}),
    ("apfl", {"mixing": "outputs"}),
    ("apfl", {"mixing": "outputs", "mix": 0.3, "adaptive": "off", "clip": 0.3}),
]


@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_authors_rules_agree_with_the_reference(method: str, options: dict[str, Any]) -> None:
    """Weighting by samples and the rules of the authors' code agree with the reference in both engines."""
    settings = {"momentum": 0.5, "weight_decay": 0.01}
    check_engines_and_twin(method, SGD(0.2, 0.5, 0.01), reference(method, 3, **settings, **options), **options)


def test_weighting_is_one_word_for_every_method_whose_server_averages() -> None:
    """The setting reaches each method that averages; it has no effect on the others, and their command no flag."""
    averaging = {name for name in ALGORITHMS if "weighting" in option_types(name)}
    others = {"local", "waffle-paper", "waffle", "weight-erosion", "fedamp", "fedfomo", "apple", "cobo", "pfedgraph"}
    assert averaging == set(ALGORITHMS) - others
    for name in ALGORITHMS:
        algorithm: Any = check_run(name, {"weighting": "samples"}, {}).algorithm()
        assert getattr(algorithm, "weighting", "") == ("samples" if name in averaging else "")
        assert not hasattr(settings_class(method=name)(), "weighting")


def test_a_file_that_weights_methods_that_do_not_average_is_refused(tmp_path: Path) -> None:
    """`weighting` at the top of a file names the methods that would ignore it; per method it is accepted."""
    file = tmp_path / "weighted.toml"
    file.write_text('methods = ["fedavg", "waffle-paper"]\nweighting = "samples"\n')
    assert "weighting: waffle-paper would ignore it" in refusal(load_experiments, file)
    file.write_text('methods = ["fedavg", "waffle-paper"]\nfedavg.weighting = "samples"\n')
    assert load_experiments(file)[0].options["fedavg"] == {"weighting": "samples"}


def test_weight_erosion_erodes_as_much_in_a_shorter_run() -> None:
    """With p_d_rounds = 100 a run of 50 rounds has twice the penalty."""
    scaled, plain = WeightErosion(p_d=0.01, p_d_rounds=100), WeightErosion(p_d=0.02)
    server, _ = plain.init(shared_model().init(0), AGENTS)
    up = Up(torch.randn(AGENTS, len(server.x), dtype=torch.float64), server.stats.expand(AGENTS, -1))
    ones = torch.ones(AGENTS, dtype=torch.int64)
    now = Round(1, 50, torch.tensor(ALICE), ones > 0, ones > 0, ones, ones, BATCH)
    torch.testing.assert_close(scaled.aggregate(server, up, now)[0].alpha, plain.aggregate(server, up, now)[0].alpha)


def test_apfl_is_scored_by_the_outputs_that_it_trains(tmp_path: Path) -> None:
    """With mixed outputs the scores are those of mix v(x) + (1 - mix) w(x), and those of the run folder."""
    algorithm, federation, model = APFL(SGD(0.3), mixing="outputs"), make_federation(alice=ALICE), shared_model()
    (last,) = list(simulate([RunSpec(algorithm, federation, SEED)], model, rounds=3, batch_size=BATCH, workers=1))[-1]
    agents, rows = last.state.agents, federation.test[ALICE]
    x, target = federation.x[rows].to(model.dtype), federation.labels(ALICE, rows)
    own, received = (model.predict(part[ALICE], agents.mixed_stats[ALICE], x) for part in (agents.v, agents.w))
    mixed = agents.mix[ALICE] * own + (1 - agents.mix[ALICE]) * received
    assert last.measured["accuracy"] == pytest.approx(float((mixed.argmax(dim=1) == target).double().mean()))
    assert last.measured["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(mixed, target)), rel=1e-6)
    config = check_run("apfl", {"rounds": 2, "agents": 3, "samples_per_agent": 20}, {"mixing": "outputs"})
    execute([(config, tmp_path / "run")], Runtime(workers=1))
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert {name.partition(".")[0] for name in saved} == {"personal", "received", "share"}
    data = federation_of(config.settings)
    output = open_run(tmp_path / "run").outputs(data.x[data.test[data.alice]])
    assert torch.equal(output, load_file(tmp_path / "run" / "predictions.safetensors")["output"])


def test_mixed_outputs_need_classes() -> None:
    """Outputs are mixed for classes only, and the rows of a stack do not depend on each other."""
    layers = FlatModel(lambda: mlp((5,), 1, hidden=6)).layers
    assert "mixing: expected a model" in refusal(for_model, APFL(mixing="outputs"), layers)
    check_resumes_and_site(APFL(SGD(0.1, 0.5), mixing="outputs"))
    check_resumes_and_site(FedRep(SGD(0.1, 0.5), tuning=1))


# ------------------------------------------------------------------------------------------------------- on real sites


def site_config() -> RunConfig:
    small = {"data": "digits", "agents": 3, "samples_per_agent": 40, "batch_size": 16, "rounds": 2, "model": "mlp"}
    return check_run("fedavg", {**small, "precision": "float64", "lr_decay": 0.7, "averaging": 0.6}, {})


def test_sites_give_the_bits_of_the_simulator(tmp_path: Path) -> None:
    """With decay and averaging a job ends in the simulator's bits; the averaged model comes from Alice's site."""
    pytest.importorskip("flwr", reason="the Flower engine needs flwr")
    from flower_harness import bits, federation, run_job, run_simulation

    run_job(federation(tmp_path / "federation", ("a", "b", "c")), site_config(), tmp_path / "run")
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(site_config(), tmp_path / "reference"))[:2]


def test_a_site_that_lost_its_state_starts_its_average_anew_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the Flower engine needs flwr")
    from flower_harness import Grid, federation, run_job

    folder = federation(tmp_path / "federation", ("a", "b", "c"))

    def delete_state(site: str, request: Any, reply: Any) -> Any:
        if site == "b" and any(task["round"] == 1 for task in request.fields.get("tasks", [])):
            shutil.rmtree(folder / "sites" / "b" / "state")
        return reply

    run_job(folder, site_config(), tmp_path / "run", Grid(folder, delete_state))
    lines = read_rounds(tmp_path / "run" / "rounds.jsonl")
    reasons = [reason for line in lines for name, reason in line.get("refused", []) if name == "agent 1"]
    assert len(lines) == 2
    assert reasons == ["lost its state of round 1; the server restored it; its average starts anew"]
