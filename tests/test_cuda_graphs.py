"""The bookkeeping of CUDA graphs, tested on a CPU: a replay calls the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import BATCH, make_federation, make_model
from waffle_fl import SGD, RunSpec, WafflePaper, simulate
from waffle_fl.engines import cuda_graphs


class Eager:
    """Replacement of a captured graph whose replay runs the step."""

    def __init__(self, step: Any) -> None:
        self.replay = step


@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (80, 8, 8, 8), (23, 9, 32, 14)])
def test_replayed_steps_equal_plain_steps(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any lengths end with the same bits as without graphs, also where some rows continue alone."""
    spec = RunSpec(WafflePaper(SGD(0.1, 0.5)), make_federation(sizes), 1)
    plain = [o.state.server.x for (o,) in simulate([spec], make_model(), rounds=3, batch_size=BATCH, workers=1)]
    captured: list[int] = []

    def capture(graph: Any, size: int, together: bool) -> Eager:
        captured.append(len(graph.local[0]))
        return Eager(lambda: graph._advance(size, together))

    monkeypatch.setattr(cuda_graphs, "applies", lambda model: True)
    monkeypatch.setattr(cuda_graphs._Graph, "_captured", capture)
    found = [o.state.server.x for (o,) in simulate([spec], make_model(), rounds=3, batch_size=BATCH, workers=1)]
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))
    assert (1 in captured) == (sizes[0] == 80)  # the long row continues alone
