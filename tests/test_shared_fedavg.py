"""FedAvg that shares the training of APFL or Ditto has the same record as FedAvg trained alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import BATCH, CLASSES, FEATURES, make_federation, shared_model
from records_support import bits
from test_shared_training import same_outcome
from waffle_fl import APFL, SGD, Ditto, FedAvg, Federation, FlatModel, RunSpec, simulate
from waffle_fl.algorithms import ALGORITHMS, Algorithm
from waffle_fl.config import RunConfig, check_run
from waffle_fl.engines import simulate as engine
from waffle_fl.engines.run_spec import Outcome, State, initial_state
from waffle_fl.engines.shared_training import carriers, groups_of
from waffle_fl.engines.stacked import StackedBackend
from waffle_fl.errors import Diverged, WaffleError
from waffle_fl.experiment import Interrupted, Runtime, execute
from waffle_fl.experiment.factories import federation_of, model_of

STEP = SGD(0.1, momentum=0.5)
LEADERS = [APFL(STEP), Ditto(STEP)]
both = pytest.mark.parametrize("leader", LEADERS, ids=["apfl", "ditto"])


def spec(algorithm: Algorithm, federation: Federation, seed: int = 1) -> RunSpec:
    """Return a run specification that requests only Alice's model, as an experiment does."""
    return RunSpec(algorithm, federation, seed, requested=frozenset([federation.alice]))


def rounds(specs: Sequence[RunSpec], model: FlatModel | None = None, **options: Any) -> list[list[Outcome]]:
    return list(simulate(specs, model or shared_model(), **{"rounds": 4, "batch_size": BATCH, **options}))


def same_as_alone(
    specs: Sequence[RunSpec], together: list[list[Outcome]], model: FlatModel | None = None, **options: Any
) -> bool:
    """Each run has the rounds, errors, numbers and bits that it has alone."""
    for i, one in enumerate(specs):
        mine = [outcome for done in together for outcome in done if outcome.index == i]
        alone = [outcome for (outcome,) in rounds([one], model, **options)]
        if [str(o.error) for o in mine] != [str(o.error) for o in alone]:
            return False
        if not all(same_outcome(a, b) for a, b in zip(mine, alone, strict=True)):
            return False
    return True


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[RunSpec]]:
    """Record the runs that each backend trains."""
    trained_specs: list[list[RunSpec]] = []
    build = StackedBackend.__init__

    def record_specs(backend: StackedBackend, specs: Sequence[RunSpec], *args: Any) -> None:
        trained_specs.append(list(specs))
        build(backend, specs, *args)

    monkeypatch.setattr(StackedBackend, "__init__", record_specs)
    return trained_specs


def methods(trained_specs: list[list[RunSpec]]) -> list[list[str]]:
    return [[type(one.algorithm).__name__ for one in specs] for specs in trained_specs]


@pytest.mark.parametrize("validation", [0.0, 0.25])
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("network", ["mlp", "cnn"])
@both
def test_shared_fedavg_has_the_same_record(
    leader: Algorithm, network: str, precision: str, validation: float, trained: list[list[RunSpec]]
) -> None:
    settings = config("fedavg", model=network, precision=precision, validation=validation).settings
    federation = federation_of(settings)
    model = model_of(settings, federation, Runtime(), torch.device("cpu"))
    specs = [spec(FedAvg(STEP), federation), spec(leader, federation)]
    together = rounds(specs, model, rounds=2)
    assert methods(trained) == [[type(leader).__name__]]
    assert same_as_alone(specs, together, model, rounds=2)
    expected = {"round", "accuracy", "loss", "weights", "norms", "seconds"}
    more = {"validation_accuracy", "validation_loss"} if validation else set()
    assert all(set(outcome.measured) == expected | more for done in together for outcome in done)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sizes", [(23,), (23, 10, 32, 14)])
@both
def test_batch_statistics_and_one_agent(leader: Algorithm, sizes: tuple[int, ...], workers: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))

    federation = make_federation(sizes)
    for model in (FlatModel(build, precision="float32"), shared_model()):
        specs = [spec(leader, federation), spec(FedAvg(STEP), federation)]
        assert groups_of(specs) == [[0, 1]]
        assert same_as_alone(specs, rounds(specs, model, workers=workers), model)


@both
def test_other_training_or_averaging_is_not_shared(leader: Algorithm) -> None:
    federation = make_federation()
    first, plain = spec(leader, federation), spec(FedAvg(STEP), federation)
    others = [
        *(spec(FedAvg(STEP, **{key: value}), federation) for key, value in OTHER_OPTIONS.items()),
        spec(FedAvg(SGD(0.1)), federation),
        spec(ALGORITHMS["fedprox"](sgd=STEP), federation),  # type: ignore[call-arg]
        replace(plain, seed=2),
        replace(plain, federation=make_federation()),
        replace(plain, tamper=lambda up, r: up),
        replace(plain, transport=lambda agent, r, reply: [reply]),
        replace(plain, attackers=(1,)),
        replace(plain, state=initial_state(plain, shared_model())),
    ]
    assert carriers([first, *others, plain]) == {len(others) + 1: 0}
    with pytest.raises(WaffleError, match="alike"):
        simulate([first, others[0]], shared_model(), rounds=2)
    with pytest.raises(WaffleError, match="alike"):
        simulate([first, plain], shared_model(), rounds=2, guard="standard")


OTHER_OPTIONS: dict[str, Any] = {"weighting": "samples", "aggregation": "median", "clip": 1.0}


def test_first_possible_leader_is_used() -> None:
    federation = make_federation()
    specs = [spec(algorithm, federation) for algorithm in (FedAvg(STEP), *LEADERS)]
    assert groups_of(specs) == [[1, 0], [2]]


@both
def test_only_the_leader_s_models_are_requested(leader: Algorithm, trained: list[list[RunSpec]]) -> None:
    federation = make_federation()
    specs = [spec(FedAvg(STEP), replace(federation, alice=i)) for i in range(4)]
    specs += [spec(leader, replace(federation, alice=i)) for i in (2, 0)]
    assert groups_of(specs) == [[4, 5, 0, 1, 2, 3]]
    together = rounds(specs)
    assert [[one.requested for one in trained_specs] for trained_specs in trained] == [[{0, 2}]]
    for i, one in enumerate(specs):
        for done, (alone,) in zip(together, rounds([one]), strict=True):
            assert {**done[i].measured, "seconds": 0} == {**alone.measured, "seconds": 0}
            assert all(map(torch.equal, done[i].state.server, alone.state.server))
            assert type(done[i].state.agents) is type(alone.state.agents)


@both
def test_resumed_runs_with_equal_servers_share_training(leader: Algorithm, trained: list[list[RunSpec]]) -> None:
    federation = make_federation()
    specs = [spec(FedAvg(STEP), federation), spec(leader, federation)]
    uninterrupted = rounds(specs)
    states = [State(*(type(part)(*map(torch.clone, part)) for part in outcome.state)) for outcome in uninterrupted[1]]
    resumed = [replace(one, state=state) for one, state in zip(specs, states, strict=True)]
    continued = rounds(resumed, start=2)
    assert methods(trained) == 2 * [[type(leader).__name__]]
    pairs = zip(chain.from_iterable(continued), chain.from_iterable(uninterrupted[2:]), strict=True)
    assert all(same_outcome(found, expected) for found, expected in pairs)
    elsewhere = replace(resumed[0], state=uninterrupted[0][0].state)
    assert carriers([elsewhere, resumed[1]]) == carriers([specs[0], resumed[1]]) == {}


def test_fedavg_continues_when_its_leader_diverges(trained: list[list[RunSpec]]) -> None:
    """When Ditto's personal model diverges, FedAvg continues from its last round."""
    federation = make_federation()
    specs = [spec(FedAvg(STEP), federation), spec(Ditto(STEP, lam=1e30), federation)]
    together = rounds(specs)
    assert [bool(outcome.error) for done in together[:1] for outcome in done] == [False, False]
    assert any(outcome.error for done in together for outcome in done if outcome.index == 1)
    assert methods(trained) == [["Ditto"], ["FedAvg"]]
    assert same_as_alone(specs, together)


@pytest.mark.parametrize("since", [1, 3])
@both
def test_fedavg_leaves_a_repeating_leader(leader: Algorithm, since: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the leader repeats a round with other mini-batches, FedAvg keeps its own round and trains alone."""
    outcome_of = engine.outcome_of

    def strict(i: int, own: RunSpec, *results: Any) -> Outcome:
        outcome, (r, attempt) = outcome_of(i, own, *results), results[-2:]
        diverges_once = r == since and not attempt and hasattr(own.algorithm, "helper")
        return replace(outcome, error=Diverged("once"), state=results[2]) if diverges_once else outcome

    monkeypatch.setattr(engine, "outcome_of", strict)
    federation = make_federation()
    specs = [spec(leader, federation), spec(FedAvg(STEP), federation)]
    together = rounds(specs)
    assert not torch.equal(*(outcome.state.server.x for outcome in together[-1]))
    assert same_as_alone(specs, together)


@pytest.mark.parametrize("alice", [0, 2])
@both
def test_alice_with_unusable_data_diverges(leader: Algorithm, alice: int) -> None:
    """When agent 2 has unusable data, FedAvg and its leader end in the same round as each of them alone."""
    federation = make_federation()
    federation.x[federation.train[2]] = torch.inf
    specs = [spec(leader, federation), spec(FedAvg(STEP), replace(federation, alice=alice))]
    assert same_as_alone(specs, rounds(specs))
    assert same_as_alone(specs[::-1], rounds(specs[::-1]))


# --- runs in folders


def config(method: str, seed: int = 1, **settings: Any) -> RunConfig:
    small = {"agents": 4, "samples_per_agent": 24, "model": "mlp", "rounds": 4, "momentum": 0.5}
    options = settings.pop("options", {})
    return check_run(method, {**small, "seed": seed, **settings}, options)


def grid(folder: Path, names: Sequence[str] = ("fedavg", "apfl", "ditto")) -> list[tuple[RunConfig, Path]]:
    """Return runs of two seeds, and one FedAvg run with other aggregation weights."""
    chosen = [config(method, seed, validation=0.25) for seed in (1, 2) for method in names]
    chosen.append(config("fedavg", validation=0.25, options={"weighting": "samples"}))
    return [(one, folder / f"{i}-{one.label}") for i, one in enumerate(chosen)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Execute every run of the grid alone."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, [execute([run], Runtime(workers=1))[0] for run in grid(folder)]


def same_runs(folder: Path, results: list[dict[str, Any]], alone: tuple[Path, list[dict[str, Any]]]) -> bool:
    pairs = zip(grid(folder), grid(alone[0]), strict=True)
    return results == alone[1] and all(bits(mine) == bits(own) for (_, mine), (_, own) in pairs)


@pytest.mark.parametrize("stack", [1, 2, 64])
def test_runs_equal_separate_runs(
    tmp_path: Path, alone: tuple[Path, list[dict[str, Any]]], stack: int, trained: list[list[RunSpec]]
) -> None:
    assert same_runs(tmp_path, execute(grid(tmp_path), Runtime(workers=1, stack=stack)), alone)
    assert max(map(len, trained)) == min(stack, 2)
    assert sorted(name for names in methods(trained) for name in names) == [
        *2 * ["APFL"],
        *2 * ["Ditto"],
        "FedAvg",
    ]


def paused(runs: list[tuple[RunConfig, Path]]) -> None:
    execute(runs, Runtime(workers=1), until=2)


def interrupted(runs: list[tuple[RunConfig, Path]]) -> None:
    """Stop one stack after another after its first round."""
    for _ in range(2):
        with pytest.raises(Interrupted):
            execute(runs, Runtime(workers=1, minutes=1e-9))


def at_different_rounds(runs: list[tuple[RunConfig, Path]]) -> None:
    for until, run in enumerate(runs):
        execute([run], Runtime(workers=1), until=1 + until % 2)


def some_finished(runs: list[tuple[RunConfig, Path]]) -> None:
    """Finish FedAvg of one seed, and APFL and Ditto of the other seed."""
    execute(runs, Runtime(workers=1), until=1)
    execute([runs[0], runs[4], runs[5]], Runtime(workers=1))


@pytest.mark.parametrize("halted", [paused, interrupted, at_different_rounds, some_finished])
def test_interrupted_runs_equal_separate_runs(
    tmp_path: Path, alone: tuple[Path, list[dict[str, Any]]], halted: Any
) -> None:
    halted(grid(tmp_path))
    assert same_runs(tmp_path, execute(grid(tmp_path), Runtime(workers=1)), alone)


def test_paused_runs_share_training_again(tmp_path: Path, trained: list[list[RunSpec]]) -> None:
    paused(grid(tmp_path))
    execute(grid(tmp_path), Runtime(workers=1))
    assert methods(trained) == 2 * [["APFL", "APFL"], ["Ditto", "Ditto"], ["FedAvg"]]


def test_runs_at_different_rounds_do_not_share_training(tmp_path: Path) -> None:
    """With step sizes too small to change any server, runs at different rounds still train separately."""
    runs = [(config(method, lr=1e-30), tmp_path / method) for method in ("fedavg", "apfl")]
    for until, run in enumerate(runs, 1):
        execute([run], Runtime(workers=1), until=until)
    assert [result["rounds"] for result in execute(runs, Runtime(workers=1))] == [4, 4]
    assert [[line["round"] for line in bits(folder)[1]] for _, folder in runs] == 2 * [[1, 2, 3, 4]]


def test_under_a_guard_every_run_is_trained(tmp_path: Path, trained: list[list[RunSpec]]) -> None:
    runs = [(config(method, guard="standard"), tmp_path / method) for method in ("fedavg", "apfl")]
    execute(runs, Runtime(workers=1))
    assert methods(trained) == [["FedAvg"], ["APFL"]]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a folder with two agents' tables."""
    rows = [f"{i % 7},{i % 5},{'yes' if i % 3 else 'no'}" for i in range(40)]
    (tmp_path / "own").mkdir()
    for i, name in enumerate(("east", "west")):
        (tmp_path / "own" / f"{name}.csv").write_text("\n".join(["a,b,label", *rows[20 * i : 20 * i + 20]]))
    monkeypatch.chdir(tmp_path)
    return "own"


def test_runs_on_user_data_share_training(tables: str, trained: list[list[RunSpec]]) -> None:
    for method in ("fedavg", "apfl"):
        trained.clear()
        runs = [
            (check_run(method, {"data": tables, "target": "label", "rounds": 2, "alice": name}, {}), Path(method, name))
            for name in ("east", "west")
        ]
        execute(runs, Runtime(workers=1))
        assert [len(trained_specs) for trained_specs in trained] == [1]
