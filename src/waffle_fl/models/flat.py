"""FlatModel: any `torch.nn.Module` as rows of flat parameters.

Running statistics (the float buffers of BatchNorm) and frozen parameters are kept in separate rows. They are never part
of an update, so they do not affect distances. Integer buffers are constants and are neither sent nor averaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from waffle_fl.errors import WaffleError
from waffle_fl.models import sample_gradients
from waffle_fl.models.batch import Batch, Loss, Net, cross_entropy, output_is_loss, squared_error
from waffle_fl.models.building import (
    Precision,
    built,
    call_module,
    check_losses,
    check_output,
    check_precision,
    copied,
    device_named,
    factory_of,
    sized,
    to_copies,
    to_integers,
    unsized,
)
from waffle_fl.models.features import output_and_features
from waffle_fl.models.joined import Joined, joined_loss, with_pull
from waffle_fl.models.layers import Layers
from waffle_fl.models.passes import Passes
from waffle_fl.models.seeding import seeded
from waffle_fl.models.stacking_trial import observe_forward, stacking_mode, warn_once
from waffle_fl.models.traced import TracedGradients
from waffle_fl.randomness import derive

STACKED_PARAMETERS = 1_000_000
REPLAYED_ROWS = 4  # unstacked rows up to which gradients are traced: a trace has the operations of every row
STATS_POLICY = "running statistics: averaged with the weights of the updates, outside every distance; counters constant"


class FlatModel:
    """init / grad / predict on flat parameters, for one architecture.

    `model` is a module, or a function without arguments that builds one. The weights of a module are the initial model
    for every seed; the module is copied and not changed. A function is called with torch seeded, so that its random
    weights depend on the seed.

    Any module works. `prepared`, or the first gradient, tests on two samples whether its rows can be stacked. A module
    whose rows cannot be stacked trains row by row, with one warning in the log. Random draws in the forward pass are
    seeded by the key of each row and step.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        loss: Loss = cross_entropy,
        precision: Precision = "float32",
        device: str | torch.device = "cpu",
        stacked: bool | None = None,
    ) -> None:
        check_precision(precision)
        self._build, self._loss, self.precision, self.device = factory_of(model), loss, precision, device_named(device)
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        self._stacked_option = stacked
        self._own = threading.local()
        self._known = False  # whether the forward pass has been observed
        self._uses_folded: bool | None = None  # whether the folded pass is exact for this module; None: not tested
        self._never_stack = False  # whether the test found that rows cannot be stacked
        self._joined: dict[bool, FlatModel] = {}  # the model with features, for classes and for numbers
        module = built(self._build, 0)
        self._unsized = unsized(module)
        if not self._unsized:
            self._set_layout(module)

    def _set_layout(self, module: nn.Module) -> None:
        passes = self.passes = Passes(copied(module).to(self.device, self.dtype), self._loss, self.precision)
        self.layers = Layers.of(passes.template, passes.params, passes.stats)
        self._check()
        self.stacked = self._stacks_well() if self._stacked_option is None else self._stacked_option
        if self.stacked and (self.stats_size or self.normalises):
            raise WaffleError(
                "stacked: expected false or unset for a model with batch statistics, which trains row by row, got true"
            )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise for a missing attribute: a model with lazy layers has no size before it has seen a sample."""
            if name.startswith("__") or not self.__dict__.get("_unsized"):
                raise AttributeError(f"FlatModel has no attribute {name!r}")
            raise WaffleError(
                f"expected a model of known size, got lazy layers ({', '.join(self._unsized)}): call "
                "model.prepared(x, y) with two samples first, or give these layers their sizes"
            )

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return self.passes.params.size

    @property
    def stats_size(self) -> int:
        """Number of running statistics and frozen parameters."""
        return self.passes.stats.size

    @property
    def normalises(self) -> bool:
        """Whether it has BatchNorm layers."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.passes.template.modules())

    def _check(self) -> None:
        if not self.size:
            raise WaffleError("expected a model with parameters to train, got one without any")
        for name, module in self.passes.template.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
                raise WaffleError(f"{name}: BatchNorm needs a momentum here; its cumulative average is not supported")

    def _stacks_well(self) -> bool:
        """Whether to stack rows by default.

        Not with batch statistics (padding would distort them), not for large models (one row fills the device), and not
        for convolutions on a CPU (faster row by row).
        """
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in self.passes.template.modules())
        small = self.size <= STACKED_PARAMETERS
        plain = not self.stats_size and not self.normalises
        return plain and small and not (convolves and self.device.type == "cpu")

    def prepared(self, x: Tensor, y: Tensor, outputs: int | None = None) -> Self:
        """Find out, from two samples and their targets, how this module trains; return the model itself.

        Lazy layers receive their size, a module that does not fit the data raises a one-line error, and `stacked` and
        `capturable` become final: call this before reading them. `outputs` is the number of outputs per sample that the
        model must have. Further calls have no effect.
        """
        x, y = x.to(self.device, self.dtype), y.to(self.device)
        self._observe(x)
        self._try_stacking(x, y, outputs)
        self.stacked = self.stacked and not self._never_stack
        return self

    @property
    def capturable(self) -> bool:
        """Whether its steps can be captured as a CUDA graph: not if it draws random numbers or depends on values."""
        return not self.passes.seeded

    def _observe(self, x: Tensor) -> None:
        """Observe the module's forward pass on two samples."""
        if self._known or not len(x):
            return
        x = x[[0, -1]]
        if self._unsized:
            self._build = sized(self._build, x)
            self._set_layout(built(self._build, 0))
        template = self.passes.template
        with torch.no_grad(), seeded(0, self.device):
            output, integers = call_module(copied(template).eval(), x.clone())
        check_output(output, len(x))
        if integers:
            self.passes.add_input_hook(to_integers)
        found = observe_forward(template, x)
        if found.overwrites:
            self.passes.add_input_hook(to_copies)
        self.passes.seeded = found.draws or found.reads
        if self.passes.seeded and self.stacked:
            draws, reads = "its forward pass draws random numbers", "its forward pass depends on tensor values"
            self._train_singly(draws if found.draws else reads)
        self._known = True

    def _try_stacking(self, x: Tensor, y: Tensor, outputs: int | None = None) -> None:
        """Compare the gradients of stacked rows with those of single rows, in float64 on the CPU."""
        if self._uses_folded is not None:
            return
        x, y = x[[0, -1]], y[[0, -1]]
        with torch.no_grad(), seeded(0, self.device):
            check_losses(self._loss, self.module()(x), y, outputs)
        if self.stacked and not self._never_stack:
            exact = FlatModel(self._build, loss=self._loss, precision="float64", stacked=True)
            x, y = (part.double() if part.is_floating_point() else part for part in (x.cpu(), y.cpu()))
            exact._observe(x)
            way, reason = stacking_mode(exact.passes, torch.stack([exact.init(seed).params for seed in range(3)]), x, y)
            self._uses_folded = way == "folded"
            if way is None:
                self._train_singly(reason)
        else:
            self._uses_folded = False

    def _train_singly(self, reason: str) -> None:
        self._never_stack = True
        warn_once(type(self.passes.template).__name__, reason)

    def _prepare_from(self, batch: Batch) -> None:
        """Do the work of `prepared` with the first row of a batch, if it was not called."""
        if self._uses_folded is None:
            self._observe(batch.x[0])
            self._try_stacking(batch.x[0], batch.y[0])

    def init(self, seed: int) -> Net:
        """Return a random model that depends only on the seed; if a module was given, its weights."""
        module = built(self._build, derive(seed, "init"))
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        params, stats = self.passes.params.flatten(tensors), self.passes.stats.flatten(tensors)
        return Net(params.to(self.device, self.dtype), stats.to(self.device, self.dtype))

    def grad(self, params: Tensor, stats: Tensor, batch: Batch, pull: Tensor | None = None) -> Net:
        """Return the gradient of each row's mean loss over its mini-batch, and its statistics afterwards.

        With several models per row, `params` holds one block of rows after another, and the batch is repeated. `pull`
        (N, B, features) adds <pull, features> to the loss of each sample; features are the input of the last linear
        layer.
        """
        if pull is not None:
            return self._with_features(batch).grad(params, stats, with_pull(batch, pull))
        models = len(params) // len(batch.x)
        if models > 1:
            batch = Batch(*(part.repeat(models, *[1] * (part.ndim - 1)) for part in batch))
        self._prepare_from(batch)
        stacks = self.stacked and not self._never_stack
        if self.device.type == "cuda" or self.passes.seeded or not (stacks or len(params) <= REPLAYED_ROWS):
            return self._grad(params, stats, *batch)
        if not hasattr(self._own, "replays"):
            self._own.replays = TracedGradients(self._grad)
        return Net(*self._own.replays(params, stats, *batch))

    def _grad(self, params: Tensor, stats: Tensor, *parts: Tensor) -> Net:
        batch, passes = Batch(*parts), self.passes
        if not self.stacked:
            return passes.single(params, stats, batch)
        if self._never_stack:
            return Net(passes.single_without_padding(params, stats, batch), stats)
        return Net(passes.folded(params, batch) if self._uses_folded else passes.vmapped(params, batch), stats)

    def plain_grad(self, params: Tensor, stats: Tensor, batch: Batch, pull: Tensor | None = None) -> Net:
        """Like `grad`, without stacking, tracing or rewriting: autograd on the module, one row after another."""
        if pull is not None:
            return self._with_features(batch).plain_grad(params, stats, with_pull(batch, pull))
        batches = [Batch(*(part[i % len(batch.x)] for part in batch)) for i in range(len(params))]
        rows = [self.passes.plain(*row) for row in zip(params, stats, batches, strict=True)]
        return Net(*(torch.stack(parts) for parts in zip(*rows, strict=True)))

    def clipped_sums(self, params: Tensor, stats: Tensor, batch: Batch, clip: float, plain: bool = False) -> Tensor:
        """Return, per row, the sum of its samples' gradients, each clipped to a norm of at most `clip`.

        With several models per row, `params` holds one block of rows after another, as in `grad`.
        """
        models = len(params) // len(batch.x)
        if models > 1:
            batch = Batch(*(part.repeat(models, *[1] * (part.ndim - 1)) for part in batch))
        self._prepare_from(batch)
        if plain or not self.stacked or self._never_stack:
            sums = sample_gradients.plain_sums if plain else sample_gradients.sums_of_rows
            return sums(self.passes, params, stats, batch, clip)
        gradient = self.passes.folded if self._uses_folded else self.passes.vmapped
        return sample_gradients.sums_of_stack(gradient, params, batch, clip)

    @torch.no_grad()
    def training_features(self, params: Tensor, stats: Tensor, batch: Batch, plain: bool = False) -> Tensor:
        """Return (N, B, features): the features of each row's mini-batch in the forward pass of `grad`.

        `plain` computes them one row after another, as `plain_grad` does.
        """
        joined, last = self._with_features(batch), self.layers.last_linear
        assert last is not None
        if plain or not joined.stacked:
            output = joined.passes.plain_outputs(params, stats, batch)
        else:
            joined._prepare_from(with_pull(batch, params.new_zeros(*batch.weight.shape, last.features)))
            stacks = joined.passes.folded_training if joined._uses_folded else joined.passes.vmapped_training
            output = joined.passes.plain_outputs(params, stats, batch) if joined._never_stack else stacks(params, batch)
        return output[:, :, -last.features :]

    def _with_features(self, batch: Batch) -> FlatModel:
        """Return this model with its features joined to its outputs."""
        if self.layers.last_linear is None:
            raise WaffleError("expected a model with a linear layer, whose input are the features")
        classes = not batch.y.is_floating_point()
        if classes not in self._joined:
            self._joined[classes] = FlatModel(
                lambda: Joined(built(self._build, 0)),
                loss=joined_loss(self._loss, classes),
                precision=self.precision,
                device=self.device,
                stacked=self.stacked and not self._never_stack,
            )
        return self._joined[classes]

    @property
    def parallel_rows(self) -> int:
        """Number of rows of an unstacked model that train in parallel in this process."""
        return self.passes.parallel_rows

    @torch.no_grad()
    def predict(self, params: Tensor, stats: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of one model in evaluation mode."""
        self._observe(x)
        return self.passes.output(params, stats, x)

    def features(self, params: Tensor, stats: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of one model and the inputs of its last linear layer (the samples, if it has none)."""
        self._observe(x)
        return output_and_features(self.passes.evaluated_module(x), partial(self.predict, params, stats), x)

    @torch.no_grad()
    def predict_rows(self, params: Tensor, x: Tensor) -> Tensor:
        """Return the outputs (N, B, ...) of many models without running statistics, each on its own samples."""
        if self._uses_folded:
            return self.passes.folded_outputs(params, x)
        return torch.stack([self.predict(p, p[:0], samples) for p, samples in zip(params, x, strict=True)])

    @torch.no_grad()
    def batch_losses(self, params: Tensor, stats: Tensor, batch: Batch) -> Tensor:
        """Return (N, B): each row's losses on the samples of its batch, in evaluation mode; 0 on padding."""
        losses = self._batch_scores(params, stats, batch)[1]
        return torch.where(batch.weight > 0, losses, 0.0)

    @torch.no_grad()
    def batch_errors(self, params: Tensor, stats: Tensor, batch: Batch) -> Tensor:
        """Return (N, B): 1 for wrong predictions, in evaluation mode; the loss limited to 1 if there are no classes."""
        output, losses = self._batch_scores(params, stats, batch)
        classes = output.ndim == 3 and not batch.y.is_floating_point()
        errors = (output.argmax(dim=2) != batch.y).to(losses.dtype) if classes else losses.clamp(max=1)
        return torch.where(batch.weight > 0, errors, 0.0)

    def _batch_scores(self, params: Tensor, stats: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the outputs and losses of each row on the samples of its batch."""
        self._prepare_from(batch)
        if self._uses_folded:
            pair = params.expand(2, -1) if len(params) == 1 else params  # a stack of one would sum in another order
            output = self.predict_rows(pair, batch.x.expand(len(pair), *batch.x.shape[1:]))[: len(params)]
        else:
            output = torch.stack([self.predict(*row) for row in zip(params, stats, batch.x, strict=True)])
        return output, self._loss(output.flatten(0, 1), batch.y.flatten()).view(batch.weight.shape)

    def module(self) -> nn.Module:
        """Return this thread's copy of the network, in evaluation mode; its parameter values are meaningless."""
        return self.passes.module(training=False)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample."""
        return self._loss(output, target)

    def state_dict(self, net: Net) -> dict[str, Tensor]:
        """Return one model's named tensors, for saving or for `module.load_state_dict(..., strict=False)`."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.passes.tensors(net).items()}

    def fingerprint(self) -> str:
        """Return a hash of the names and shapes of all tensors; models with equal hashes can exchange updates."""
        layout = repr((self.dtype, self.passes.params.shapes, self.passes.stats.shapes))
        return f"{derive(0, layout):016x}"


__all__ = [
    "STATS_POLICY",
    "Batch",
    "FlatModel",
    "Loss",
    "Net",
    "Precision",
    "cross_entropy",
    "output_is_loss",
    "squared_error",
]
