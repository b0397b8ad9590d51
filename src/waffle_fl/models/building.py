"""Build modules of known size from what a user passes (a module or a factory), and check them against the data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from waffle_fl.errors import WaffleError, suggest

Precision: TypeAlias = Literal["float32", "float64", "tf32", "bf16"]
Factory: TypeAlias = Callable[[], nn.Module]
EXPECTED_MODEL = "a torch.nn.Module, or a function without arguments that returns one"


def factory_of(model: Any) -> Factory:
    """Return a function without arguments that builds the module; if a module was given, it returns copies."""
    if isinstance(model, nn.Module):
        start = copied(model)
        return lambda: copied(start)
    if not callable(model):
        raise WaffleError(f"expected {EXPECTED_MODEL}, got {_described(model)}")
    _check_signature(model)
    return model  # type: ignore[no-any-return]


def _check_signature(factory: Callable[..., Any]) -> None:
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C: it has no signature
        return
    try:
        signature.bind()
    except TypeError:
        raise WaffleError(
            f"expected a function without arguments, got {name}, which needs {_needed(signature.parameters)}: "
            f"write lambda: {name}(...)"
        ) from None


def _needed(parameters: Mapping[str, inspect.Parameter]) -> str:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(n for n, p in parameters.items() if p.default is p.empty and p.kind not in kinds)


def built(factory: Factory, seed: int) -> nn.Module:
    """Build a module whose random weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # torch.manual_seed would keep a stack trace per call for each missing accelerator
            torch.default_generator.manual_seed(seed)
        module = factory()
    if not isinstance(module, nn.Module):
        raise WaffleError(f"expected a function that returns a torch.nn.Module, got {_described(module)} from it")
    return module


def copied(module: nn.Module) -> nn.Module:
    """Return a copy that shares nothing with the module."""
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise WaffleError(
            f"expected a model that copy.deepcopy can copy, got {type(module).__name__} ({one_line(error)}): keep no "
            "computed tensors in it; for weight norm use torch.nn.utils.parametrizations.weight_norm"
        ) from None


def unsized(module: nn.Module) -> list[str]:
    """Return the names of lazy layers, whose size is unknown until they have seen a sample."""
    kinds = (UninitializedParameter, UninitializedBuffer)
    parts = ((name, (*part._parameters.values(), *part._buffers.values())) for name, part in module.named_modules())
    return [name for name, tensors in parts if any(isinstance(tensor, kinds) for tensor in tensors)]


def sized(factory: Factory, x: Tensor) -> Factory:
    """Return a factory whose modules have run on these samples once, so that lazy layers have a size."""

    def build() -> nn.Module:
        module = factory()
        if isinstance(module, nn.Module) and unsized(module):
            known = (p for p in module.parameters() if not isinstance(p, UninitializedParameter))
            like = next(known, torch.empty(0))
            with torch.no_grad():
                training = module.training
                call_module(module.eval(), x.to(like.device, like.dtype))
                module.train(training)
        return module

    return build


def ready(factory: Factory, shape: Sequence[int]) -> Factory:
    """Return a factory for use outside FlatModel: its modules have known sizes and take float samples of this shape."""
    blank = torch.zeros(2, *shape)

    def build() -> nn.Module:
        module = sized(factory, blank)()
        embeds = isinstance(module, nn.Module) and any(isinstance(m, nn.Embedding) for m in module.modules())
        if embeds and _takes_integers(module, blank):
            module.register_forward_pre_hook(to_integers)
        return module

    return build


def _takes_integers(module: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        try:
            return call_module(copied(module).eval(), x)[1]
        except WaffleError:  # reported later, when the model is applied to the data
            return False


def call_module(module: nn.Module, x: Tensor) -> tuple[Any, bool]:
    """Return the module's output, and whether its input had to be integers (as nn.Embedding needs)."""
    try:
        return module(x), False
    except Exception as error:
        if torch.equal(x, x.round()):
            try:
                return module(x.long()), True
            except Exception:
                pass
        raise WaffleError(
            f"the model cannot take samples of shape {tuple(x.shape[1:])}: {_why(module, x, error)}"
        ) from (error)


def to_integers(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook that converts float samples to integers."""
    return given[0].long(), *given[1:]


def to_copies(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook that copies the input, for a module that overwrites it."""
    return given[0].clone(), *given[1:]


def _why(module: nn.Module, x: Tensor, error: Exception) -> str:
    """Return which layer's size does not fit, if it can be found; otherwise torch's message."""
    found: list[str] = []

    def compare(name: str, layer: nn.Module, given: tuple[Any, ...]) -> None:
        if not given:
            return
        if isinstance(layer, nn.Linear):
            expected, got, what = layer.in_features, given[0].shape[-1], "features"
        elif isinstance(layer, nn.modules.conv._ConvNd):
            expected, got, what = layer.in_channels, given[0].shape[-len(layer.kernel_size) - 1], "channels"
        else:
            return
        if expected != got:
            description = f"its layer {name} ({type(layer).__name__})" if name else f"this {type(layer).__name__}"
            found.append(f"{description} expects {expected} {what}, got {got}: build the model for this data")

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda layer, given: compare(name, layer, given)

    hooks = [layer.register_forward_pre_hook(hook(name)) for name, layer in module.named_modules()]
    try:
        module(x)
    except Exception as again:
        return found[-1] if found else f"{type(again).__name__}: {one_line(again)}"
    finally:
        for each in hooks:
            each.remove()
    return one_line(error)


def check_output(output: Any, samples: int) -> Tensor:
    """Return the output if it is one tensor with an entry per sample."""
    if not isinstance(output, Tensor):
        raise WaffleError(
            f"expected a model that returns one tensor of shape (batch, outputs), got {_described(output)}: return the "
            "scores alone from its forward"
        )
    if not output.ndim or len(output) != samples:
        raise WaffleError(
            f"expected a model that returns one tensor of shape (batch, outputs), got {tuple(output.shape)} for "
            f"{samples} samples: keep the batch as the first dimension"
        )
    return output


def check_losses(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, y: Tensor, outputs: int | None) -> None:
    """Raise unless the output has the requested number of outputs and the loss returns one number per sample."""
    shape = tuple(output.shape[1:])
    if outputs is not None and shape != (outputs,) and not (outputs == 1 and shape == ()):
        raise WaffleError(
            f"expected a model that returns {outputs} outputs per sample, as a tensor of shape (batch, {outputs}), got "
            f"(batch{''.join(f', {size}' for size in shape)}): change its last layer"
        )
    try:
        losses = loss(output, y)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise WaffleError(
            f"the loss cannot compare outputs of shape {tuple(output.shape)} with targets of shape {tuple(y.shape)}: "
            f"{one_line(error)} (the model must return a tensor of shape (batch, outputs))"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != (len(y),):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else _described(losses)
        raise WaffleError(
            f'expected a loss that returns one number per sample (reduction="none"), got {got} for {len(y)} samples'
        )


def check_precision(precision: str) -> None:
    """Raise unless this precision is known."""
    known = get_args(Precision)
    if precision not in known:
        raise WaffleError(f"unknown precision {precision!r}{suggest(str(precision), known)}")


def device_named(device: str | torch.device) -> torch.device:
    """Return the device if this machine has it."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise WaffleError(f"expected a device such as cpu, cuda or cuda:0, got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise WaffleError(f"expected the device cpu or cuda, got {str(device)!r}")
    count = torch.cuda.device_count() if found.type == "cuda" and torch.cuda.is_available() else 0
    if found.type == "cuda" and not count:
        raise WaffleError("device cuda was requested, but this machine has no CUDA device: use cpu")
    if found.type == "cuda" and (found.index or 0) >= count:
        raise WaffleError(f"expected a device from cuda:0 to cuda:{count - 1}, got {found}: this machine has no other")
    return found


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}" if value is not None else "None"
