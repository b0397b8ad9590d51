"""Runs whose agents' states are on disk: the numbers of a run in memory, and no work for absent agents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli_support import waffle
from conftest import BATCH, fitted, make_federation, outcomes_of, refusal, shared_model
from waffle_fl import APFL, SGD, Ditto, FedAvg, RunSpec, Scaffold, WafflePaper, WeightErosion, simulate
from waffle_fl.algorithms import ALGORITHMS, contract
from waffle_fl.config import check_run
from waffle_fl.engines import cohort_sums, tree, workers
from waffle_fl.engines.row_store import RowStore, initial_rows
from waffle_fl.engines.run_spec import Outcome, RoundSettings, initial_state, own_net
from waffle_fl.engines.tree import replace_rows
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, execute
from waffle_fl.experiment.active_run import state_of, tensors_of
from waffle_fl.partition import split
from waffle_fl.records import read_rounds

SIZES = (12, 9, 0, 17, 7, 5, 8, 11, 6, 10, 13, 4, 9, 8, 7, 12, 5, 6, 11, 10)
STEP = SGD(0.1, 0.9, 0.01, "keep")
QUARTER: dict[str, Any] = {"participation": 5 / 19, "rounds": 5, "epochs": 1, "workers": 1}
SIX = ("waffle-paper", "scaffold", "weight-erosion", "fedavg", "ditto", "apfl")
METHODS: dict[str, Any] = {
    "waffle-paper": WafflePaper(SGD(0.1)),
    "waffle, kept momentum": WafflePaper(STEP, control="paper"),
    "waffle, gradients": WafflePaper(STEP, compared="gradients", denominator="range"),
    "scaffold": Scaffold(SGD(0.1)),
    "scaffold, by samples": Scaffold(STEP, weighting="samples"),
    "weight erosion": WeightErosion(STEP, p_d=0.1),
    "fedavg": FedAvg(STEP, weighting="samples"),
    "fedavg, averaged": FedAvg(replace(STEP, averaging=0.5, lr_decay=0.9)),
    "ditto": Ditto(STEP),
    "apfl": APFL(SGD(0.1)),
    "apfl, outputs": APFL(STEP, mixing="outputs"),
} | {name: kind(sgd=STEP) for name, kind in ALGORITHMS.items() if hasattr(kind, "averages_cohorts")}


def pair(algorithm: Any, store: RowStore, **more: Any) -> list[list[Outcome]]:
    """Return the outcomes of a run in memory and of the same run on disk."""
    spec = RunSpec(algorithm, make_federation(SIZES, alice=3), 1)
    return [
        outcomes_of(one, shared_model(torch.float32), **{**QUARTER, **more})
        for one in (spec, replace(spec, store=store))
    ]


def rows_on_disk(outcome: Outcome, algorithm: Any, store: RowStore) -> Any:
    """Return the states of all agents of a run on disk."""
    _, initial = initial_rows(fitted(algorithm), shared_model(torch.float32).init(1), len(SIZES))
    return store.read(outcome.state.agents, range(len(SIZES)), initial)


@pytest.mark.parametrize("name", METHODS)
def test_states_on_disk_have_the_bits_of_states_in_memory(name: str, tmp_path: Path) -> None:
    """The server, the states of all agents and the scores are equal after every round; so are the cohort's weights."""
    store = RowStore(tmp_path)
    memory, disk = pair(METHODS[name], store)
    for one, other in zip(memory, disk, strict=True):
        names = one.measured["participants"]
        agents = [int(name.split()[1]) for name in names]
        expected: dict[str, Any] = {**one.measured, "of_participants": {}}
        for key, value in one.measured.items():
            if isinstance(value, list) and key != "participants":
                del expected[key]
                expected["of_participants"][key] = [value[i] for i in agents]
        assert {**expected, "seconds": 0} == {**other.measured, "seconds": 0}
        for key, field in one.state.server._asdict().items():  # the server has no copy of the agents' rows
            assert torch.equal(field, getattr(other.state.server, key)) != (key == "c_i"), key
    rows = rows_on_disk(disk[-1], METHODS[name], store)
    assert all(map(torch.equal, memory[-1].state.agents, rows))


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_method_agrees_or_says_why_not(method: str, tmp_path: Path) -> None:
    """A method whose server keeps no row per agent has the same scores on disk; any other is refused in one line."""
    algorithm: Any = ALGORITHMS[method](sgd=STEP)  # type: ignore[call-arg]
    spec = RunSpec(algorithm, make_federation(SIZES, alice=3), 1, store=RowStore(tmp_path))
    try:
        disk = outcomes_of(spec, shared_model(), **QUARTER)
    except WaffleError:
        text = refusal(simulate, [spec], shared_model(), **QUARTER)
        assert "states on disk: expected a method" in text
        assert method not in SIX
        return
    for one, other in zip(outcomes_of(replace(spec, store=None), shared_model(), **QUARTER), disk, strict=True):
        assert one.measured["loss"] == pytest.approx(other.measured["loss"], rel=1e-12)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("block", [contract.BLOCK, 3 * shared_model().size])
def test_the_rows_of_a_cohort_give_the_bits_of_all_rows(block: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and records are equal if absent agents send zeros, also if few rows of the model fit into a block."""
    monkeypatch.setattr(contract, "BLOCK", block)
    spec, model = RunSpec(METHODS[name], make_federation(SIZES, alice=3), 1), shared_model(torch.float32)
    spec = replace(spec, algorithm=fitted(spec.algorithm))
    assert cohort_sums.applies(spec, RoundSettings(5), model.device)
    cohorts = outcomes_of(spec, model, **QUARTER)
    monkeypatch.setattr(cohort_sums, "applies", lambda *_: False)
    for one, other in zip(cohorts, outcomes_of(spec, model, **QUARTER), strict=True):
        assert {**one.measured, "seconds": 0} == {**other.measured, "seconds": 0}
        states = [tensors_of(outcome.state) for outcome in (one, other)]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0].keys() | states[1].keys())


def test_a_large_state_is_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in memory of an earlier copy has the same numbers, and states that are still used keep their own."""
    before = {"x": torch.arange(12.0).view(4, 3), "n": torch.arange(4), "empty": torch.zeros(4, 0)}
    rows, new = torch.tensor([1, 3]), {"x": torch.ones(2, 3), "n": torch.tensor([7, 8]), "empty": torch.zeros(2, 0)}
    expected = replace_rows(before, rows, new)
    monkeypatch.setattr(tree, "LARGE", 1)
    found = replace_rows(before, rows, new)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert before["n"].tolist() == [0, 1, 2, 3]
    assert found["n"].tolist() == [0, 7, 2, 8]
    view = found["n"][1:]
    del found
    assert len(tree._spare) == 1  # that of x; the view needs the other
    again = replace_rows(before, rows, new)
    assert not tree._spare
    assert torch.equal(again["x"], expected["x"])
    assert view.tolist() == [7, 2, 8]
    del again
    tree.release_memory()
    assert not tree._spare


def test_workers_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a cohort can be divided among processes."""
    for name in ("ROUND", "START", "WARM_UP"):
        monkeypatch.setattr(workers, name, 0.0)
    (one, two) = (pair(METHODS["ditto"], RowStore(tmp_path / str(n)), workers=n)[1][-1] for n in (1, 2))
    assert torch.equal(one.state.server.x, two.state.server.x)
    assert torch.equal(one.state.agents.digests, two.state.agents.digests)


def test_settings_that_need_all_agents_are_refused(tmp_path: Path) -> None:
    """Full participation, the guard, private rounds, the readable engine, attacks and scores of all: one line each."""
    spec = RunSpec(FedAvg(), make_federation(SIZES), 1, store=RowStore(tmp_path))
    for options, text in [
        ({"participation": 1.0}, "participation: expected a share below 1 with states on disk, got 1.0"),
        ({"guard": "standard"}, "guard: expected off"),
        ({"engine": "loop"}, "engine: expected fast"),
    ]:
        assert text in refusal(simulate, [spec], shared_model(), **{**QUARTER, **options})
    for changed in (replace(spec, everyone=True), replace(spec, tamper=lambda up, r: up)):
        assert "with states on disk" in refusal(simulate, [changed], shared_model(), **QUARTER)
    assert "in every RunSpec" in refusal(simulate, [spec, replace(spec, store=None)], shared_model(), **QUARTER)
    adaptive = replace(spec, algorithm=WafflePaper(psi="adaptive"))
    assert "psi = adaptive" in refusal(simulate, [adaptive], shared_model(), **QUARTER)


def test_a_diverged_run_ends_with_its_last_state(tmp_path: Path) -> None:
    """The round is repeated, then the run ends; the states on disk are those before the round."""
    spec = RunSpec(WafflePaper(SGD(1e30)), make_federation(SIZES, alice=3), 1, store=RowStore(tmp_path))
    *_, last = outcomes_of(spec, shared_model(), **QUARTER)
    assert "diverged" in str(last.error)
    assert last.attempt == 2


def test_a_run_resumes_from_a_synced_state(tmp_path: Path) -> None:
    """Rows of a saved state survive later rounds, and a run that resumes from it has the bits of one that went on."""
    store = RowStore(tmp_path)
    spec = RunSpec(METHODS["ditto"], make_federation(SIZES, alice=3), 1, store=store)
    stream = simulate([spec], shared_model(), batch_size=BATCH, **{**QUARTER, "rounds": 9})
    outcomes = []
    for (outcome,) in stream:
        outcomes.append(outcome)
        if outcome.round == 3:
            store.sync(outcome.state.agents)
    saved = state_of(tensors_of(outcomes[2].state), initial_state(spec, shared_model()))
    again = replace(spec, state=saved, store=RowStore(tmp_path))
    last = outcomes_of(again, shared_model(), start=3, **{**QUARTER, "rounds": 9})[-1]
    for name, tensor in tensors_of(last.state).items():
        if name != "agents.slots":
            assert torch.equal(tensor, tensors_of(outcomes[-1].state)[name]), name
    before, after = (
        own_net(one, state, shared_model()).params for one, state in ((spec, outcomes[-1].state), (again, last.state))
    )
    assert torch.equal(before, after)


def test_rows_take_the_room_of_the_agents_that_trained(tmp_path: Path) -> None:
    """Nothing is written before an agent's first round, and replaced rows are reused."""
    store = RowStore(tmp_path)
    _, disk = pair(METHODS["scaffold"], store, rounds=12)
    size = shared_model(torch.float32).size * 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= (19 + 2 * 5) * size
    assert int((disk[0].state.agents.slots >= 0).sum()) == 5
    assert disk[0].state.agents.slots[2] == disk[-1].state.agents.slots[2] == -1  # it has no samples


@pytest.mark.parametrize(("damage", "text"), [(b"x", "changed or damaged"), (b"", "is missing")])
def test_a_damaged_row_is_never_used(damage: bytes, text: str, tmp_path: Path) -> None:
    """A row whose bytes have changed, or are missing, is reported in one line."""
    store = RowStore(tmp_path)
    _, disk = pair(METHODS["ditto"], store)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage + path.read_bytes()[1:] if damage else b"")
    assert text in refusal(rows_on_disk, disk[-1], METHODS["ditto"], RowStore(tmp_path))


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that cannot be written ends the run in one line."""
    monkeypatch.setattr("os.pwritev", lambda *_: 0)
    spec = RunSpec(Scaffold(), make_federation(SIZES), 1, store=RowStore(tmp_path))
    assert "No space left on device" in refusal(outcomes_of, spec, shared_model(), **QUARTER)


# --- runs in folders


DISK: dict[str, Any] = {
    "data": "digits",
    "agents": 40,
    "samples_per_agent": 12,
    "division": "drawn",
    "test": "all",
    "rounds": 6,
    "participation": 0.2,
    "model": "linear",
    "split": "C",
}


def folder_bits(folder: Path) -> tuple[bytes, list[Any]]:
    """Return the final model, and the scores and the cohort of each round."""
    rounds = read_rounds(folder / "rounds.jsonl")
    return (folder / "model.safetensors").read_bytes(), [(line["loss"], line["participants"]) for line in rounds]


@pytest.mark.parametrize("method", ["scaffold", "apfl", "waffle-paper"])
def test_a_run_on_disk_is_stopped_and_continued_as_one_in_memory(method: str, tmp_path: Path) -> None:
    """A run whose states are on disk ends in the bits of one in memory, and leaves no states behind."""
    runtime = Runtime(device="cpu", workers=1, checkpoint_seconds=0)
    for name in ("memory", "disk"):
        run = check_run(method, {**DISK, "states": name}, {}), tmp_path / name
        execute([run], runtime, until=3)
        assert (tmp_path / name / "states").is_dir() == (name == "disk")
        execute([run], runtime)
    assert folder_bits(tmp_path / "memory") == folder_bits(tmp_path / "disk")
    assert not (tmp_path / "disk" / "states").exists()


def test_the_command_line_keeps_states_on_disk(here: Path) -> None:
    """`waffle run --states disk` trains; without partial participation or with newcomers it says what is wrong."""
    flags = ("run", "ditto", "--agents", "3000", "--division", "drawn", "--samples-per-agent", "8", "--rounds", "2")
    assert waffle(*flags, "--participation", "0.01", "--states", "disk", "--test", "all", "--quiet").code == 0
    shown = waffle(*flags, "--states", "disk", "--quiet")
    assert shown.code == 2
    assert "participation: expected a share below 1 with states on disk" in shown.err
    shown = waffle(*flags, "--states", "disk", "--participation", "0.01", "--newcomers", "3", "--quiet")
    assert "newcomers: expected none with states on disk" in shown.err


def test_drawn_samples_follow_the_distribution() -> None:
    """Agents draw distinct samples in the shares of their labels, and do not validate on those they train on."""
    labels, few = np.arange(2000) % 10, np.arange(500) % 10
    found = split(labels, few, "C", agents=5000, samples_per_agent=20, validation=0.25, division="drawn", test="all")
    for agent in (0, 1, 4321):
        rows, held_out = found.train[agent], found.validation[agent]
        assert (len(rows), len(held_out)) == (20, 5)
        assert len({*rows.tolist(), *held_out.tolist()}) == 25
        assert np.bincount(labels[rows], minlength=10).tolist() == (20 * found.shares[agent]).round().tolist()
    assert len(np.unique(np.concatenate(found.train))) == 2000
    assert found.test[0] is found.test[10]  # one distribution, one set of test samples
    for options, text in [({}, "expected samples_per_agent"), ({"samples_per_agent": 600}, "expected at most 200")]:
        assert text in refusal(split, labels, few, "C", agents=10, division="drawn", **options)
