"""Evaluation of Alice's model on her held-out samples gives the same numbers with any number of threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from conftest import BATCH, CLASSES, FEATURES, make_federation, make_model
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.engines import evaluation
from waffle_fl.engines.evaluation import CACHED_ROWS, Evaluator
from waffle_fl.engines.outcomes import to_numbers
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel, Net


def large(held_out: int = 3 * CACHED_ROWS + 77) -> Federation:
    """Return a federation whose Alice has `held_out` test samples and half as many validation samples."""
    federation = make_federation((3 * held_out, 9, 9))
    own = federation.train[0]
    test, validation = own[:held_out], own[held_out : held_out + held_out // 2]
    others = federation.test[1:]
    return replace(
        federation,
        train=(own[2 * held_out :], *federation.train[1:]),
        test=(test, *others),
        validation=(validation, *(rows[:0] for rows in others)),
    )


def normalising() -> FlatModel:
    return FlatModel(
        lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)),
        precision="float32",
    )


@pytest.mark.parametrize("method", ["fedavg", "knn-per"])
@pytest.mark.parametrize("make", [lambda: make_model(torch.float32, stacked=False), normalising])
def test_threads_change_no_bit(method: str, make: Any) -> None:
    """Scores on test and validation data are the same from one thread and from three."""
    model, federation = make(), large()
    net, algorithm = model.init(3), ALGORITHMS[method]()
    net = Net(net.params + 0.3, net.stats)
    scores = []
    for cores in (1, 3):
        evaluator = Evaluator(model, cores)
        for _ in range(2):  # threads restart after close()
            scores += to_numbers(evaluator.evaluate([algorithm], [federation], [net], 1.0))
            evaluator.close()
    assert all(found == scores[0] for found in scores)
    assert set(scores[0]) == {"accuracy", "loss", "validation_accuracy", "validation_loss"}


def test_evaluation_threads_use_one_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads evaluate with one core each, and none is left after the run."""
    seen: dict[int, int] = {}
    counted = evaluation._count

    def watched(*arguments: Any) -> Any:
        seen[threading.get_ident()] = torch.get_num_threads()
        return counted(*arguments)

    monkeypatch.setattr(evaluation, "_count", watched)
    before = threading.active_count()
    spec = RunSpec(ALGORITHMS["fedavg"](), large(), 0)
    model = make_model(torch.float32, stacked=False)
    for _ in simulate([spec], model, rounds=3, batch_size=64 * BATCH, workers=2):
        pass
    assert len(seen) == 2
    assert set(seen.values()) == {1}
    assert threading.active_count() == before


def test_few_samples_need_no_threads() -> None:
    """A single part is evaluated in the calling thread."""
    evaluator = Evaluator(make_model(torch.float32, stacked=False), cores=4)
    evaluator.evaluate([ALGORITHMS["fedavg"]()], [make_federation()], [make_model(torch.float32).init(1)], 1.0)
    assert evaluator._pool is None


def test_threads_divide_several_runs_of_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """From NUMBERS_BY_RUN numbers on, each thread scores whole runs; the scores are those of one thread."""
    monkeypatch.setattr(evaluation, "NUMBERS_BY_RUN", 1)
    model, federation = make_model(torch.float32, stacked=False), large(CACHED_ROWS // 2)
    nets = [Net(net.params + 0.3, net.stats) for net in map(model.init, range(4))]
    scores = []
    for cores in (1, 3):
        evaluator = Evaluator(model, cores)
        scores.append(to_numbers(evaluator.evaluate([ALGORITHMS["knn-per"]()] * 4, [federation] * 4, nets, 1.0)))
        assert (evaluator._pool is not None) == (cores == 3)
        evaluator.close()
    assert scores[0] == scores[1]
    assert len({found["loss"] for found in scores[0]}) == 4


@pytest.mark.parametrize(("flattens", "strided"), [(False, True), (True, False)])
def test_images_are_evaluated_in_channels_last_layout(flattens: bool, strided: bool) -> None:
    """A network receives images in the faster layout unless it cannot read them; its outputs are the same."""
    seen: list[bool] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36 if not flattens else 3 * 64, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return self.last(x.view(len(x), -1) if flattens else self.conv(x).flatten(1))  # type: ignore[no-any-return]

    model, x = FlatModel(Net), torch.rand(7, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    net = model.init(0)
    found = model.predict(*net, x)
    assert seen[-1] == strided
    module = model.module()
    module.load_state_dict(model.state_dict(net))
    with torch.no_grad():
        torch.testing.assert_close(found, module(x))
