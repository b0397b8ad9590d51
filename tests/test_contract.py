"""One contract test over every registered algorithm."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from conftest import BATCH, fitted, grad_of, make_federation, outcomes_of, shared_model
from waffle_fl.algorithms import ALGORITHMS, SGD, Round
from waffle_fl.batches import Batches
from waffle_fl.engines.aggregation import aggregate, aggregate_together, registered
from waffle_fl.engines.candidate_losses import CandidateLosses
from waffle_fl.engines.run_spec import RoundSettings, RunSpec, initial_state
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment.active_run import state_of, tensors_of
from waffle_fl.guard import Guard
from waffle_fl.tensorfile import pack, unpack

every = pytest.mark.parametrize("method", list(ALGORITHMS))
AGENTS = 4


def make(method: str) -> Any:
    return fitted(ALGORITHMS[method](sgd=SGD(0.1, momentum=0.5, weight_decay=0.01)))


def copied(state: Any) -> Any:
    return type(state)(*(tensor.clone() for tensor in state))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def poisoned(state: Any, keep: int) -> Any:
    """Replace every floating-point row but one by NaN."""
    fields = []
    for tensor in state:
        tensor = tensor.clone()
        if tensor.is_floating_point():
            tensor[torch.arange(len(tensor)) != keep] = torch.nan
        fields.append(tensor)
    return type(state)(*fields)


@cache
def stage_of(method: str) -> Stage:
    """Return the stage of a method, which no test changes."""
    return Stage(method)


class Stage:
    """An algorithm in the middle of a run, with one mini-batch."""

    def __init__(self, method: str) -> None:
        self.algorithm, self.model = make(method), shared_model()
        self.federation = make_federation().to("cpu", torch.float64)
        outcome = outcomes_of(RunSpec(self.algorithm, self.federation, 3), self.model, rounds=3)[-1]
        self.server, self.agents = outcome.state
        batches = Batches([self.federation], [3], BATCH, 1, torch.float64)
        self.batch = batches.batch(batches.plan(4, 0, slice(None)), torch.zeros(1, dtype=torch.int64), BATCH)
        self.down = self.algorithm.broadcast(self.server, AGENTS)
        losses = CandidateLosses(self.algorithm, self.model, [self.federation], [3])
        self.down = losses.into(self.down, self.agents, slice(None), 4)
        self.local = self.algorithm.begin(self.down, self.agents)
        self.stepped = self.algorithm.step(self.local, self.grad())
        _, self.up = self.algorithm.finish(self.down, self.agents, self.stepped)
        ones = torch.ones(AGENTS, dtype=torch.int64)
        self.now = Round(4, 10, torch.tensor(1), ones > 0, ones > 0, ones * 8, ones, BATCH)

    def grad(self) -> Any:
        return grad_of(self.model, self.batch)


@every
def test_pure(method: str) -> None:
    """No function changes its arguments, and the same inputs give the same bits."""
    s = stage_of(method)
    calls = [
        (s.algorithm.broadcast, (s.server, AGENTS)),
        (s.algorithm.begin, (s.down, s.agents)),
        (s.algorithm.step, (s.local, s.grad())),
        (s.algorithm.finish, (s.down, s.agents, s.stepped)),
        (s.algorithm.aggregate, (s.server, s.up, s.now)),
        (s.algorithm.personal, (s.server, s.agents, AGENTS)),
    ]
    for function, arguments in calls:
        states = [a for a in arguments if hasattr(a, "_fields") and not isinstance(a, Round)]
        before = [copied(state) for state in states]
        first, second = function(*arguments), function(*arguments)
        assert all(same(a, b) for a, b in zip(states, before, strict=True))
        pairs = zip(first, second, strict=True) if function.__name__ in ("finish", "aggregate") else [(first, second)]
        for a, b in pairs:
            assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


@every
@pytest.mark.parametrize("row", [0, 2])
def test_row_local(method: str, row: int) -> None:
    """NaN in every other row changes nothing in this one, through begin, step and finish."""
    s = stage_of(method)
    down, agents = poisoned(s.down, row), poisoned(s.agents, row)
    local = s.algorithm.begin(down, agents)
    stepped = s.algorithm.step(local, s.grad())
    new_agents, up = s.algorithm.finish(down, agents, stepped)
    good_agents, good_up = s.algorithm.finish(s.down, s.agents, s.stepped)
    for mine, clean in ((new_agents, good_agents), (up, good_up)):
        for a, b in zip(mine, clean, strict=True):
            assert torch.equal(a[row], b[row])


@every
def test_rows_only(method: str) -> None:
    """Down, Agents, Local and Up hold only tensors, with one row per agent."""
    s = stage_of(method)
    for state in (s.down, s.agents, s.local, s.up):
        assert all(isinstance(tensor, torch.Tensor) and len(tensor) == AGENTS for tensor in state)


@every
def test_federation_of_one(method: str) -> None:
    """A single agent trains as Local does, with the same clipping and no regularisation of its personal model."""
    if method == "per-fedavg":
        pytest.skip("an update of it takes two mini-batches: test_per_fedavg_without_adaptation")
    if method == "fedpac":
        pytest.skip("its head and body train in turn: test_fedpac_with_own_heads_is_fedrep")
    unmixed: dict[str, dict[str, Any]] = {
        "ditto": {"lam": 0.0},
        "mr-mtl": {"lam": 0.0},
        "fedamp": {"lam": 0.0},
        "apple": {"eta_p": 0.0},
        "ifca": {"clusters": 1},
        "apfl": {"mix": 1.0, "adaptive": "off"},
        "fedprox": {"mu": 0.0},
        "pfedme": {"lam": 1.0, "eta": 1.0, "inner_steps": 1},
        "fedrep": {"head_layers": 0},
        "pfedgraph": {"lam": 0.0},
        "feddbe": {"kappa": 0.0, "memory": False},
    }
    algorithm = fitted(ALGORITHMS[method](sgd=SGD(0.1), clip=2.0, **unmixed.get(method, {})))
    torch.testing.assert_close(only_model(algorithm), local_model(), rtol=1e-12, atol=1e-12)


@cache
def local_model() -> torch.Tensor:
    return only_model(ALGORITHMS["local"](sgd=SGD(0.1), clip=2.0))


def only_model(algorithm: Any) -> torch.Tensor:
    """Return the personal model of the only agent of a federation."""
    state = outcomes_of(RunSpec(algorithm, make_federation().only(2), 3), shared_model(), rounds=4)[-1].state
    return algorithm.personal(state.server, state.agents, 1).params[0]


@every
def test_same_seed_same_bits(method: str) -> None:
    """Two runs of one seed are equal bit for bit; another seed differs."""
    specs = [RunSpec(make(method), make_federation(), seed) for seed in (3, 3, 4)]
    a, b, c = (tensors_of(outcomes_of(spec, shared_model(torch.float32), rounds=2)[-1].state) for spec in specs)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


@every
@pytest.mark.parametrize("stacked", [True, False])
def test_stacked_runs_change_no_bit(method: str, stacked: bool) -> None:
    """A federation's bits are the same alone and stacked with federations of other sizes, seeds and Alices."""
    model = shared_model(torch.float32, stacked=stacked)
    small = make_federation((12, 9, 17, 5))
    federations = [small, make_federation((20, 3), alice=1, seed=1), make_federation((5, 6, 7), seed=2), small.only(2)]
    specs = [RunSpec(make(method), f, seed) for f, seed in zip(federations, (3, 4, 3, 5), strict=True)]
    together = list(simulate(specs, model, rounds=2, batch_size=BATCH, workers=1))[-1]
    for i, spec in enumerate(specs):
        alone = outcomes_of(spec, model, rounds=2)[-1]
        a, b = tensors_of(alone.state), tensors_of(together[i].state)
        assert all(torch.equal(a[name], b[name]) for name in a)


@every
def test_state_survives_save_and_load(method: str) -> None:
    """Resuming from a saved state gives the bits of the uninterrupted run."""
    model, spec = shared_model(torch.float32), RunSpec(make(method), make_federation(), 3)
    unbroken = outcomes_of(spec, model, rounds=4)
    saved = tensors_of(unbroken[1].state)
    _, loaded = unpack(pack(saved, {}), saved)
    state = state_of(loaded, initial_state(spec, model))
    resumed = RunSpec(spec.algorithm, spec.federation, 3, state=state)
    last = outcomes_of(resumed, model, rounds=4, start=2)[-1]
    a, b = tensors_of(unbroken[-1].state), tensors_of(last.state)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert last.measured["weights"] == unbroken[-1].measured["weights"]


@every
def test_batched_aggregation_agrees(method: str) -> None:
    """Aggregating several federations in one batched computation agrees with separate aggregation up to rounding."""
    algorithm, model, replies = make(method), shared_model(), []
    for seed, alice in ((3, 0), (4, 2), (5, 1)):
        federation = make_federation(alice=alice, seed=seed)
        state = outcomes_of(RunSpec(algorithm, federation, seed), model, rounds=3)[-1].state
        down = algorithm.broadcast(state.server, AGENTS)
        batches = Batches([federation.to("cpu", torch.float64)], [seed], BATCH, 1, torch.float64)
        batch = batches.batch(batches.plan(4, 0, slice(None)), torch.zeros(1, dtype=torch.int64), BATCH)
        local = algorithm.step(algorithm.begin(down, state.agents), grad_of(model, batch))
        agents, up = algorithm.finish(down, state.agents, local)
        present = torch.tensor([True, True, True, seed != 4])
        replies.append((federation, state.server, state.agents, agents, up, present))
    guards: tuple[Guard, ...] = ("off", "standard")
    for guard in guards:
        settings = RoundSettings(10, BATCH, guard=guard)
        work = [(*reply, registered(federation, settings, torch.device("cpu"))) for federation, *reply in replies]
        separate = [aggregate(algorithm, 4, settings, *arguments) for arguments in work]
        for one, together in zip(separate, aggregate_together(algorithm, 4, settings, work), strict=True):
            assert one.measured.keys() == together.measured.keys(), guard
            for a, b in zip(flat(one), flat(together), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def flat(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [t for part in (state.values() if isinstance(state, dict) else state) for t in flat(part)]


@every
def test_a_nan_never_reaches_the_model(method: str) -> None:
    """An agent whose updates become NaN has weight 0, is named in the record, and leaves every model finite."""

    def nan_update(up: Any, r: int) -> Any:
        fields = [field.clone() for field in up]
        for field in fields:
            if r >= 2:
                field[3] = torch.nan
        return type(up)(*fields)

    spec = RunSpec(make(method), make_federation(alice=1), 3, tamper=nan_update)
    outcomes = outcomes_of(spec, shared_model(), rounds=4)
    assert all(outcome.error is None for outcome in outcomes)
    assert all(torch.isfinite(t).all() for t in tensors_of(outcomes[-1].state).values())
    if method != "local":
        assert outcomes[-1].measured["weights"][3] == 0
        assert outcomes[-1].measured["screened"] == {"agent 3": "not finite"}


@every
@pytest.mark.parametrize("stacked", [True, False])
def test_an_agent_without_samples_is_left_out(method: str, stacked: bool) -> None:
    """An agent without training samples has weight 0, and the others train as if it did not exist."""
    with_empty_agent = make_federation((23, 0, 14), alice=2)
    without = replace(
        with_empty_agent,
        names=("agent 0", "agent 2"),
        train=with_empty_agent.train[::2],
        validation=with_empty_agent.validation[::2],
        test=with_empty_agent.test[::2],
        relabel=with_empty_agent.relabel[::2],
        alice=1,
        ids=(0, 2),
    )
    algorithm, model = make(method), shared_model(stacked=stacked)
    ends = [outcomes_of(RunSpec(algorithm, f, 3), model, rounds=2)[-1] for f in (with_empty_agent, without)]
    assert ends[0].measured["weights"][1] == 0
    assert "screened" not in ends[0].measured
    nets = [algorithm.personal(*end.state, f.agents) for end, f in zip(ends, (with_empty_agent, without), strict=True)]
    torch.testing.assert_close(nets[0].params[2], nets[1].params[1], rtol=1e-12, atol=1e-12)
