"""Fixtures and small federations that the tests share."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Some virtual machines announce AMX but do not allow it; torch then cannot create its bf16 kernels.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test processes share the cores: more threads would only wait

import numpy as np
import pytest
import torch
from hypothesis import settings

import fork_server
from browser import launched
from waffle_fl.algorithms import Grad, for_model
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation
from waffle_fl.models import Batch, FlatModel, mlp, traced
from waffle_fl.models.flat import Precision
from waffle_fl.randomness import generator

settings.register_profile("same-cases", deadline=None, derandomize=True)
settings.register_profile("new-cases", deadline=None)
settings.load_profile("same-cases")

# A shell lets background processes ignore Ctrl-C; the commands that tests interrupt must not inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MEMORY = Path("/dev/shm")
if "PYTEST_DEBUG_TEMPROOT" not in os.environ and MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if min(free, shutil.disk_usage(MEMORY).free) > 8 << 30:  # the tests write up to 2 GiB, and sync each checkpoint
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)

traced.TRACED_AFTER = float("inf")  # traces start after some time and change no bit: test_traced.py starts them at once

STATE = tempfile.TemporaryDirectory(prefix="waffle-state-")  # tests do not sign with the user's key
os.environ["WAFFLE_STATE_DIR"] = STATE.name

SIZES = (23, 9, 32, 14)
CLASSES, FEATURES, BATCH = 3, 5, 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests with the marker slow_first first, so that no process runs a long test alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow_first") is None)


def pytest_collection_finish() -> None:
    """Let garbage collection skip what is imported by now, and run less often: it took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_sessionfinish() -> None:
    if fork_server.shared.cache_info().currsize:
        fork_server.shared().close()


def make_federation(sizes: tuple[int, ...] = SIZES, alice: int = 0, seed: int = 0) -> Federation:
    """Agents of different sizes, each with a shifted view of three Gaussian classes."""
    rng = generator(seed, "test federation")
    centres = 1.5 * rng.standard_normal((CLASSES, FEATURES))
    agents = []
    for i, n in enumerate(sizes):
        y = rng.integers(0, CLASSES, n + 12)
        y[:CLASSES] = np.arange(CLASSES)[: len(y[:CLASSES])]
        x = (centres[y] + 0.3 * i + rng.standard_normal((n + 12, FEATURES))).astype(np.float64)
        agents.append((f"agent {i}", (x[:n], y[:n], x[n:], y[n:])))
    return Federation.from_arrays(agents, alice=alice, class_names=("a", "b", "c"))


def make_model(dtype: torch.dtype = torch.float64, stacked: bool | None = None) -> FlatModel:
    precision: Precision = "float64" if dtype == torch.float64 else "float32"
    return FlatModel(lambda: mlp((FEATURES,), CLASSES, hidden=6), precision=precision, stacked=stacked)


@cache
def shared_model(dtype: torch.dtype = torch.float64, stacked: bool | None = None) -> FlatModel:
    """Return a model of `make_model` that was created and prepared once per process."""
    return make_model(dtype, stacked)


def fitted(algorithm: Any) -> Any:
    """Return the algorithm adapted to the layers of the model that `make_model` builds."""
    return for_model(algorithm, shared_model().layers)


def grad_of(model: FlatModel, batch: Batch) -> Grad:
    """Return a `Grad` for the first of two mini-batches in every row."""
    return Grad.on(model, batch, torch.zeros(1, dtype=torch.int64), torch.full((len(batch.x),), 2))


def outcomes_of(spec: RunSpec, model: FlatModel, rounds: int = 6, workers: int = 1, **options: object):
    """Return the outcome of each round of a short run."""
    settings = {"rounds": rounds, "batch_size": BATCH, "workers": workers, **options}
    return [outcomes[0] for outcomes in simulate([spec], model, **settings)]


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the message of the `WaffleError` that the call raises, and check that it is one line."""
    with pytest.raises(WaffleError) as caught:
        call(*args, **options)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


@pytest.fixture(scope="session")
def byzfl() -> Any:
    """Return byzfl's attacks and aggregation rules; skip the test where byzfl is not installed.

    They need only numpy, scipy and torch. The stub package avoids byzfl's __init__, which imports torchvision.
    """
    spec = importlib.util.find_spec("byzfl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("byzfl is not installed: pip install --no-deps byzfl")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    modules = [importlib.import_module(f"byzfl.{name}") for name in ("aggregators", "attacks")]
    return types.SimpleNamespace(**{k: v for module in modules for k, v in vars(module).items() if k[0] != "_"})


@pytest.fixture
def federation() -> Federation:
    return make_federation()


@pytest.fixture
def model() -> FlatModel:
    return make_model()


@pytest.fixture(scope="session")
def published() -> Path:
    """Return the folder of published data sets; skip the test where WAFFLE_DATA is not set."""
    folder = os.environ.get("WAFFLE_DATA")
    if not folder:
        pytest.skip("WAFFLE_DATA names no folder of published data sets")
    return Path(folder)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Return one browser for all tests of a file; each test opens its own context."""
    with launched() as browser:
        yield browser


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty working folder, and unset the environment variables that affect the output."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "WAFFLE_DATA"):
        monkeypatch.delenv(name, raising=False)
    return folder
