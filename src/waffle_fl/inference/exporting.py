"""Export a finished run's model: its tensors, a model card, and a program that runs without waffle-fl."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from waffle_fl.atomic_files import write_atomically
from waffle_fl.errors import WaffleError, writable
from waffle_fl.inference.model_card import card
from waffle_fl.inference.onnx_columns import with_columns
from waffle_fl.inference.trained_run import Trained
from waffle_fl.records import read_json, write_json

Format: TypeAlias = Literal["exported", "torchscript", "onnx", "none"]
EXAMPLES = 4  # number of samples used for tracing; the program accepts any number


def export(trained: Trained, out: Path, form: Format = "exported") -> list[Path]:
    """Write the model, its program and finally its card, each atomically; return the files."""
    contents = {"model.safetensors": (trained.run.folder / "model.safetensors").read_bytes()}
    if form != "none":
        name, make = PROGRAMS[form]
        contents[name] = _program_bytes(trained, name, make)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    digests = {**_earlier_files(out, digests["model.safetensors"]), **digests}
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(out / name, content)
        write_json(out / "card.json", card(trained, digests))
    return [*(out / name for name in contents), out / "card.json"]


def _earlier_files(out: Path, model: str) -> dict[str, str]:
    """Return the files of earlier exports of the same model in the folder, as listed in its card."""
    files = (read_json(out / "card.json") or {}).get("files", {})
    return {name: digest for name, digest in files.items() if files.get("model.safetensors") == model}


def _program_bytes(trained: Trained, name: str, make: Callable[[Trained, Tensor, Path], None]) -> bytes:
    x = _examples(trained)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        try:
            make(trained, x, Path(folder) / name)
        except WaffleError:
            raise
        except Exception as error:  # torch's exporters raise many types for unsupported models
            reason = " ".join(str(error).split())[:200]
            raise WaffleError(
                f"this model cannot be written as {name} ({type(error).__name__}: {reason}): choose another --format"
            ) from None
        return (Path(folder) / name).read_bytes()


def _examples(trained: Trained) -> Tensor:
    """Return random samples with the mean and deviation of the training data."""
    x = torch.randn(EXAMPLES, *trained.shape, dtype=trained.dtype, generator=torch.Generator().manual_seed(0))
    if trained.scaling is None or not trained.scaling.mean:
        return x
    sides = (-1, *[1] * (x.ndim - 2))
    mean, deviation = (torch.tensor(v).double().view(sides) for v in (trained.scaling.mean, trained.scaling.deviation))
    return (mean + deviation * x).to(trained.dtype)


def _exported(trained: Trained, x: Tensor, path: Path) -> None:
    torch.export.save(_program(trained, x), path)
    _compare(trained, torch.export.load(path).module(), x)


def _torchscript(trained: Trained, x: Tensor, path: Path) -> None:
    torch.jit.save(torch.jit.trace(trained.module, (x,)), str(path))  # type: ignore[no-untyped-call]
    _compare(trained, torch.jit.load(str(path)), x)  # type: ignore[no-untyped-call]


def _onnx(trained: Trained, x: Tensor, path: Path) -> None:
    missing = [package for package in ("onnx", "onnxscript") if importlib.util.find_spec(package) is None]
    if missing:
        raise WaffleError(f'--format onnx needs {" and ".join(missing)}: pip install "waffle-fl[onnx]"')
    table: Any = {torch.ops.aten.cdist.default: _distances}  # ONNX has no such operation
    program: Any = torch.onnx.export(
        _program(trained, x).run_decompositions(table),
        input_names=["x"],
        output_names=["output"],
        dynamo=True,
        verbose=False,
    )
    program.save(path, external_data=False)
    if trained.preprocessing:
        onnx: Any = importlib.import_module("onnx")
        onnx.save(with_columns(onnx.load(path), trained.preprocessing), path)


def _distances(a: Tensor, b: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """Return the Euclidean distances of all rows by a product in float64, which takes no memory for each feature."""
    if p != 2:
        return NotImplemented
    dtype, a, b = b.dtype, a.double(), b.double()
    squares = (a**2).sum(dim=-1, keepdim=True) + (b**2).sum(dim=-1)[..., None, :]
    return (squares - 2 * (a @ b.mT)).clamp(min=0).sqrt().to(dtype)


def _program(trained: Trained, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(trained.module, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},), strict=False)


def _compare(trained: Trained, program: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Raise WaffleError if the program's outputs differ from the model's, also for another number of rows."""
    for rows in (x, x[:1]):
        if not torch.allclose(program(rows), trained.module(rows), rtol=1e-5, atol=1e-6):
            raise WaffleError("the outputs of the exported program differ from the model's: choose another --format")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' deprecation warnings and hints about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


PROGRAMS: dict[Format, tuple[str, Callable[[Trained, Tensor, Path], None]]] = {
    "exported": ("model.pt2", _exported),
    "torchscript": ("model.torchscript.pt", _torchscript),
    "onnx": ("model.onnx", _onnx),
}
