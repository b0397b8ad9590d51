"""The server checks every update before using it: rows W1-W13 of the fault list."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from safetensors.torch import save

from conftest import make_federation, make_model, outcomes_of
from waffle_fl.algorithms import SGD
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.scaffold import Up
from waffle_fl.algorithms.waffle_paper import WafflePaper
from waffle_fl.algorithms.weight_erosion import WeightErosion
from waffle_fl.engines.run_spec import Outcome, RunSpec
from waffle_fl.guard import CLIPPED, NOT_FINITE, OK, OPPOSED, TOO_LONG, TOO_SHORT, screen
from waffle_fl.tensorfile import pack
from waffle_fl.update_encoding import Header, UpdateCollector, seal

ALICE, BAD = 0, 2
ALICE_ROW = torch.tensor(ALICE)
SIZE = 57
ENVELOPE = Header("run", 4, "model")


def inbox() -> UpdateCollector:
    template = {"dy": torch.zeros(SIZE), "stats": torch.zeros(0)}
    return UpdateCollector(template, ENVELOPE, steps=[3, 2, 4, 2])


def honest(**changes: Any) -> dict[str, torch.Tensor]:
    return {"dy": torch.linspace(0, 1, SIZE), "stats": torch.zeros(0)} | changes


def sealed(tensors: dict[str, torch.Tensor], **changes: str) -> bytes:
    return pack(tensors, ENVELOPE.metadata(steps=4) | changes)


def run(tamper: Any = None, transport: Any = None, algorithm: Any = None, **options: Any) -> list[Outcome]:
    spec = RunSpec(algorithm or WafflePaper(SGD(0.1)), make_federation(), 3, tamper=tamper, transport=transport)
    return outcomes_of(spec, make_model(torch.float32), rounds=5, **options)


def replaced(row: int, value: float) -> Any:
    def tamper(up: Any, r: int) -> Any:
        return up._replace(dy=up.dy.index_fill(0, torch.tensor([row]), value))

    return tamper


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_w1_not_finite(value: float) -> None:
    """W1: an update with NaN or infinity has weight 0, its reason is recorded, and the model stays finite."""
    for outcome in run(replaced(BAD, value)):
        assert outcome.measured["weights"][BAD] == 0
        assert outcome.measured["screened"] == {"agent 2": "not finite"}
        assert torch.isfinite(outcome.state.server.x).all()


def test_w1_only_this_round() -> None:
    """W1: the agent returns with its old control variate as soon as its update is finite again."""

    def tamper(up: Any, r: int) -> Any:
        return replaced(BAD, torch.nan)(up, r) if r == 2 else up

    outcomes = run(tamper)
    assert [o.measured["weights"][BAD] > 0 for o in outcomes[:3]] == [True, False, True]
    assert torch.equal(outcomes[1].state.server.c_i[BAD], outcomes[0].state.server.c_i[BAD])
    assert torch.equal(outcomes[1].state.agents.c_i[BAD], outcomes[0].state.agents.c_i[BAD])


def test_w1_from_alice() -> None:
    """W1: when Alice's update is not finite, the round is tried three times, then the run stops without applying it."""
    tries = []

    def tamper(up: Any, r: int) -> Any:
        tries.append(r)
        return replaced(ALICE, torch.nan)(up, r) if r == 3 else up

    outcomes = run(tamper)
    assert tries == [1, 2, 3, 3, 3]
    assert "agent 0" in str(outcomes[-1].error)
    assert "round 3" in str(outcomes[-1].error)
    assert torch.equal(outcomes[-1].state.server.x, outcomes[1].state.server.x)


def test_w1_from_alice_once() -> None:
    """W1: when the second attempt succeeds the run continues, with new batches for that attempt."""
    tries: list[int] = []

    def tamper(up: Any, r: int) -> Any:
        tries.append(r)
        return replaced(ALICE, torch.nan)(up, r) if tries.count(3) == 1 and r == 3 else up

    outcomes = run(tamper)
    assert tries == [1, 2, 3, 3, 4, 5]
    assert all(outcome.error is None for outcome in outcomes)


def test_w2_overflow() -> None:
    """W2: a finite update of 1e20 in every entry is rejected as in W1."""
    outcome = run(replaced(BAD, 1e20))[-1]
    assert outcome.measured["screened"] == {"agent 2": "too long"}
    assert outcome.measured["weights"][BAD] == 0


@pytest.mark.parametrize(
    "tensors",
    [
        {"dz": torch.zeros(SIZE), "stats": torch.zeros(0)},
        {"stats": torch.zeros(0)},
        honest(extra=torch.zeros(3)),
        {},
    ],
)
def test_w3_names(tensors: dict[str, torch.Tensor]) -> None:
    """W3: a wrong, missing or extra tensor rejects the reply."""
    box = inbox()
    assert not box.deliver(BAD, sealed(tensors))
    assert not box.updates(Up)[1].any()


@pytest.mark.parametrize("shape", [(1,), (), (1, SIZE), (SIZE, 1), (SIZE + 1,), (0,)])
def test_w4_shapes(shape: tuple[int, ...]) -> None:
    """W4: only the exact shape is accepted, no shape that would broadcast."""
    box = inbox()
    assert not box.deliver(BAD, sealed(honest(dy=torch.zeros(shape))))
    assert "dy" in box.log[0][1]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float16, torch.complex64, torch.bool, torch.int64])
def test_w5_types(dtype: torch.dtype) -> None:
    """W5: only the exact type is accepted."""
    box = inbox()
    tensors = honest(dy=torch.zeros(SIZE, dtype=dtype))
    payload = save(tensors, ENVELOPE.metadata(4) | {"digest": "0" * 32})
    assert not box.deliver(BAD, payload)


def test_w5_declared_type_differs_from_the_payload() -> None:
    """W5: a header that declares other sizes than the payload holds is rejected."""
    box, good = inbox(), sealed(honest())
    assert not box.deliver(BAD, good.replace(b'"F32"', b'"F64"', 1))
    assert not box.deliver(BAD, good[:-4])
    assert not box.deliver(BAD, good + b"\0")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (10).to_bytes(8, "little") + b"{" * 10,
        b"\x93NUMPY" + b"\0" * 100,
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        (80).to_bytes(8, "little")
        + b'{"dy":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}  ',
    ],
)
def test_w6_bombs(payload: bytes) -> None:
    """W6: a header bomb, a pickle, an npy file and random bytes are rejected before anything is allocated."""
    assert not inbox().deliver(BAD, payload)


def test_w6_too_large() -> None:
    """W6: a payload longer than any update is not parsed."""
    box = inbox()
    assert not box.deliver(BAD, b"\0" * (box.max_bytes + 1))
    assert "more than any update" in box.log[0][1]


def guarded(dy: list[list[float]]) -> list[int]:
    rows = torch.tensor(dy)
    up = Up(rows, torch.zeros(len(rows), 0))
    return screen(up, ALICE_ROW, torch.ones(len(rows), dtype=torch.bool), "standard")[2].tolist()


def test_w7_guard_by_hand() -> None:
    """W7: zeros are too short, an opposed update is rejected, one ten times Alice's is clipped to twice her norm.

    Alice has norm 1, the median norm is 1, so below 0.25 is too short; at a right angle counts as opposed.
    """
    dy = [[1.0, 0.0], [0.0, 0.0], [0.2, 0.0], [-1.0, 0.1], [0.0, 1.0], [10.0, 0.0], [1.0, 0.5], [0.3, 0.0], [1.0, 0.1]]
    assert guarded(dy) == [OK, TOO_SHORT, TOO_SHORT, OPPOSED, OPPOSED, CLIPPED, OK, OK, OK]
    rows = torch.tensor(dy)
    up, _, _ = screen(Up(rows, torch.zeros(9, 0)), ALICE_ROW, torch.ones(9, dtype=torch.bool), "standard")
    assert up.dy[5].tolist() == [2.0, 0.0]
    assert up.dy[6].tolist() == [1.0, 0.5]


def test_w7_guard_off_is_the_paper() -> None:
    """W7: with the guard off, zeros and far updates are weighted as in the paper."""
    rows = torch.tensor([[1.0], [0.0], [-5.0], [100.0]])
    up, received, codes = screen(Up(rows, torch.zeros(4, 0)), ALICE_ROW, torch.ones(4, dtype=torch.bool), "off")
    assert torch.equal(up.dy, rows)
    assert received.all()
    assert codes.tolist() == [OK] * 4


def test_w7_in_a_run() -> None:
    """W7: a free rider that sends zeros gains weight without the guard and none with it."""
    free = run(replaced(BAD, 0.0))[2]
    held = run(replaced(BAD, 0.0), guard="standard")[2]
    assert free.measured["weights"][BAD] > 0
    assert held.measured["weights"][BAD] == 0
    assert held.measured["screened"]["agent 2"] == "too short"


def test_guard_reports_nan_first() -> None:
    """A NaN is reported as not finite and does not affect the other checks."""
    assert guarded([[1.0, 0.0], [torch.nan, 0.0], [1e9, 0.0], [1.0, 0.2]]) == [OK, NOT_FINITE, TOO_LONG, OK]


@pytest.mark.parametrize("changes", [{"round": "3"}, {"run": "another"}, {"model": "other"}, {"steps": "400"}])
def test_w8_w10_stale_or_false_replies(changes: dict[str, str]) -> None:
    """W8, W10: a reply of an older round, another run, another model or with other step counts is rejected."""
    box = inbox()
    assert not box.deliver(BAD, sealed(honest(), **changes))
    assert next(iter(changes)) in box.log[0][1]


def test_w9_two_replies() -> None:
    """W9: the first valid reply counts and the second is logged; an invalid reply does not count."""
    box = inbox()
    assert not box.deliver(BAD, b"rubbish")
    assert box.deliver(BAD, sealed(honest()))
    assert not box.deliver(BAD, sealed(honest(dy=torch.ones(SIZE))))
    up, present = box.updates(Up)
    assert torch.equal(up.dy[BAD], torch.linspace(0, 1, SIZE))
    assert present.tolist() == [False, False, True, False]
    assert "second reply" in box.log[-1][1]


def test_w10_claims_are_not_read() -> None:
    """W10: a reply's claims about its agent or sample count are ignored: the transport names the sender."""
    box = inbox()
    assert box.deliver(BAD, sealed(honest(), **{"agent": "0", "num-examples": "1000000"}))
    assert box.updates(Up)[1].tolist() == [False, False, True, False]


def test_w11_dc_is_ignored() -> None:
    """W11: an agent that sends dc is accepted, and its dc is dropped."""
    box = inbox()
    assert box.deliver(BAD, sealed(honest(dc=torch.full((SIZE,), 9.0))))
    assert box.updates(Up)[0]._fields == ("dy", "stats")


@pytest.mark.parametrize("algorithm", [WafflePaper(SGD(0.1)), WeightErosion(SGD(0.1)), FedAvg(SGD(0.1))])
def test_w12_all_others_are_rejected(algorithm: Any) -> None:
    """W12: with all other updates rejected the round is Alice's local step."""

    def tamper(up: Any, r: int) -> Any:
        return up._replace(dy=up.dy.index_fill(0, torch.tensor([1, 2, 3]), torch.nan))

    for outcome in run(tamper, algorithm=algorithm):
        assert outcome.measured["weights"] == [1, 0, 0, 0]


def test_w13_weights_always_sum_to_one() -> None:
    """W13: whatever happens to the other agents, the weights are finite, non-negative and sum to 1."""
    g = torch.Generator().manual_seed(0)

    def tamper(up: Any, r: int) -> Any:
        wild = torch.where(torch.rand(up.dy.shape, generator=g) < 0.01, torch.nan, up.dy)
        scale = 10 ** (20 * torch.rand(len(up.dy), 1, generator=g) - 10)
        tampered = wild * scale
        tampered[ALICE] = up.dy[ALICE]
        return up._replace(dy=tampered)

    for method in (WafflePaper(SGD(0.1)), WeightErosion(SGD(0.1), p_d=5.0), FedAvg(SGD(0.1))):
        for outcome in run(tamper, algorithm=method):
            weights = torch.tensor(outcome.measured["weights"])
            assert (weights >= 0).all()
            assert float(weights.sum()) == pytest.approx(1)


def test_encoding_changes_no_bit() -> None:
    """A simulation that sends updates as bytes ends with the same bits as one that does not."""
    plain, posted = run(), run(transport=lambda agent, r, reply: [reply])
    assert all(torch.equal(a, b) for a, b in zip(plain[-1].state.server, posted[-1].state.server, strict=True))


def test_faults_in_transit() -> None:
    """In the simulator an agent with a lost, doubled, replayed or damaged reply has weight 0, which is recorded."""
    old: dict[int, bytes] = {}

    def transport(agent: int, r: int, reply: bytes) -> Iterable[bytes]:
        first = old.setdefault(agent, reply)
        if agent == BAD:
            return {1: [reply], 2: [], 3: [first], 4: [reply[:-1]], 5: [reply, reply]}[r]
        return [reply]

    outcomes = run(transport=transport)
    weights = [o.measured["weights"][BAD] > 0 for o in outcomes[:4]]
    assert weights == [True, False, False, False]
    reasons = [[reason for _, reason in o.measured.get("refused", [])] for o in outcomes]
    assert [len(r) for r in reasons] == [0, 0, 1, 1, 1]
    assert "round" in reasons[2][0]
    assert "second reply" in reasons[4][0]


def test_a_check_is_quick() -> None:
    """Checking an update of LeNet-5 takes less than a millisecond of one core (median of 20)."""
    update = {"dy": torch.randn(61706), "stats": torch.zeros(0)}
    box = UpdateCollector(update, ENVELOPE, steps=[2])
    payload = seal(Up(update["dy"][None], update["stats"][None]), 0, ENVELOPE, 2)
    times = []
    for _ in range(20):
        box.rows.clear()
        began = time.process_time()
        assert box.deliver(0, payload)
        times.append(time.process_time() - began)
    assert sorted(times)[10] < 1e-3
