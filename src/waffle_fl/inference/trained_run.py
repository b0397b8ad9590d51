"""Load a finished run for inference: its model as a torch module, with input shape, task, preprocessing and scaling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from waffle_fl.engines.evaluation import SCORE_ROWS
from waffle_fl.errors import WaffleError
from waffle_fl.inference.model_files import module_of, read_model
from waffle_fl.manifest import Warn, verify
from waffle_fl.models import FlatModel, builder
from waffle_fl.records import read_json
from waffle_fl.results import FinishedRun, read_run
from waffle_fl.user_data import ArrayScaling, Preprocessing, Task

MODEL = "model.safetensors"
FIRST_STANDARDISED = 4  # the RESULTS_VERSION from which on arrays are standardised


@dataclass(frozen=True)
class Trained:
    """Alice's model and what is needed to use it."""

    run: FinishedRun
    module: nn.Module  # on the CPU, in evaluation mode
    dtype: torch.dtype
    shape: tuple[int, ...]  # of a sample
    task: Task
    classes: tuple[str, ...]
    preprocessing: Preprocessing | None  # for tables
    scaling: ArrayScaling | None = None  # for arrays that were standardised; part of the module

    def outputs(self, x: Tensor) -> Tensor:
        """Return one score per class, or a number in the unit of the target."""
        return outputs(self.module, x.to(torch.float64 if self.scaling else self.dtype))


def open_run(folder: Path, *, trust: bool = False, force: bool = False, warn: Warn | None = None) -> Trained:
    """Load a run folder and check every part of it.

    A user's own model (`module:name`) is imported only with `trust`. Files that differ from what the run wrote raise
    WaffleError, or only a warning with `force`. `warn` receives the warnings; the default is Python's `warnings`."""
    run = read_run(folder, trust=trust, force=force, model=True)
    if run.result.get("status") != "finished":
        raise WaffleError(f"the run in {folder} has no model: {run.result.get('message', 'it did not finish')}")
    try:
        shape = tuple(int(side) for side in run.provenance["sample"])
        task: Task = "regression" if run.provenance["task"] == "regression" else "classification"
        classes = tuple(map(str, run.provenance["classes"]))
    except (KeyError, TypeError, ValueError):
        raise WaffleError(
            f"{folder}: provenance.json lacks `sample`, `task` or `classes`: run it again with this waffle-fl"
        ) from None
    verify(folder, (MODEL,), force, warn)
    s = run.config.settings
    build = builder(_network_of(run), s.data, shape, len(classes) if task == "classification" else 1)
    fitted = read_json(folder / "preprocessing.json")
    model = FlatModel(build, precision=s.precision)
    algorithm = run.config.algorithm()
    tensors = read_model(folder / MODEL, algorithm, model, shape, len(classes) if task == "classification" else 0)
    preprocessing = Preprocessing.from_json(fitted) if fitted else None
    scaling = _read_scaling(folder, shape)
    fitted_inputs = preprocessing or scaling
    if fitted_inputs is None:
        _check_as_given(run)
    module = with_scaled_inputs(module_of(algorithm, build, model.dtype, tensors), scaling, model.dtype)
    if task == "regression" and fitted_inputs:
        module = nn.Sequential(module, TargetUnit(fitted_inputs)).eval()
    return Trained(run, module, model.dtype, shape, task, classes, preprocessing, scaling)


def _network_of(run: FinishedRun) -> str:
    """Return the name of the run's network. What `auto` selects may change between versions."""
    named = run.provenance.get("model")
    return named if isinstance(named, str) and run.config.settings.model == "auto" else run.config.settings.model


def _read_scaling(folder: Path, shape: tuple[int, ...]) -> ArrayScaling | None:
    content = read_json(folder / "scaling.json")
    scaling = ArrayScaling.from_json(content) if content else None
    if scaling and len(scaling.mean) not in (0, shape[0] if shape else 1):
        raise WaffleError(f"{folder}: scaling.json has {len(scaling.mean)} means, the model takes {shape}")
    return scaling


def _check_as_given(run: FinishedRun) -> None:
    """Raise WaffleError if the run standardised its arrays: without their scaling every prediction would be wrong."""
    s, version = run.config.settings, run.provenance.get("binding", {}).get("results_version")
    if not isinstance(version, int) or version < FIRST_STANDARDISED:
        return
    if s.is_own and not s.target and s.preprocessing != "none":
        raise WaffleError(
            f"{run.folder} has no scaling.json: the model takes standardised inputs. In a deployment with local "
            "preprocessing only Alice's site has it: predict there"
        )


def with_scaled_inputs(module: nn.Module, scaling: ArrayScaling | None, dtype: torch.dtype) -> nn.Module:
    """Return a module that standardises its inputs first, if the training data was standardised."""
    if scaling is None or not scaling.mean:
        return module
    return nn.Sequential(StandardisedInput(scaling, dtype), module).eval()


class StandardisedInput(nn.Module):
    """Standardise and clip each feature or channel as the training data was: in float64, then rounded to float32."""

    mean: Tensor
    divisor: Tensor

    def __init__(self, scaling: ArrayScaling, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.clip = dtype, scaling.clip
        self.register_buffer("mean", torch.tensor(scaling.mean, dtype=torch.float64))
        self.register_buffer("divisor", torch.tensor(scaling.divisor, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        sides = (-1, *[1] * (x.ndim - 2))
        scaled = (x.double() - self.mean.view(sides)) / self.divisor.view(sides)
        bounded = scaled if self.clip is None else scaled.clamp(-self.clip, self.clip)
        return bounded.float().to(self.dtype)


class TargetUnit(nn.Module):
    """Convert a standardised number to the unit of the target, in float64: a time in seconds has many digits."""

    def __init__(self, fitted: Preprocessing | ArrayScaling) -> None:
        super().__init__()
        self.mean, self.deviation = fitted.target_mean, fitted.target_deviation

    def forward(self, x: Tensor) -> Tensor:
        return self.mean + self.deviation * x.double()


@torch.no_grad()
def outputs(module: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a module, computed in blocks of rows."""
    return torch.cat([module(part) for part in torch.split(x, SCORE_ROWS)])
