"""Row modules on a GPU whose batch normalisation is fused with what follows it.

What it does   keeps the weights of a row in channels-last layout, with precision bf16 in bfloat16, filled by one kernel
               per step; joins BatchNorm2d, a shortcut and ReLU in Triton kernels (norm_kernels)
When           on a GPU, for modules with BatchNorm2d that torch.fx can trace, except in float64
What it gains  1.3 x on DLA
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from waffle_fl.models.building import Precision
from waffle_fl.models.folded import SeededDropout
from waffle_fl.models.layout import Layout
from waffle_fl.models.norm_fusion import first_convolutions, with_fused_norms
from waffle_fl.models.row_module import RowModule, channels_last


def applies(template: nn.Module, precision: Precision) -> bool:
    on_gpu = next(template.parameters()).is_cuda
    return on_gpu and precision != "float64" and with_fused_norms(template) is not None


class FusedRowModule(RowModule):
    """A row module with fused normalisation."""

    def __init__(self, template: nn.Module, params: Layout, stats: Layout, precision: Precision) -> None:
        from waffle_fl.models.packing import Packing  # triton is there only with a GPU

        super().__init__(template, params, stats)
        graph = with_fused_norms(self.module)
        assert graph is not None
        padded = first_convolutions(graph)
        self._graph, self._channels = graph, max(padded.values(), default=0)
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._packing = Packing(self.module, params, padded, self._dtype, self.params.device)
        self.params = self.params.new_empty(0)
        named = dict(self.module.named_parameters())
        for name, part in self._packing.views().items():
            named[name].data = part

    def fill(self, params: Tensor, stats: Tensor) -> None:
        self._packing.pack(params)
        self.stats.copy_(stats)

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        images = self._filled_up(x) if self._channels else channels_last(x)
        with SeededDropout(key):
            return self._graph(images)  # type: ignore[no-any-return]

    def _filled_up(self, x: Tensor) -> Tensor:
        """Return the images in the dtype of the weights and channels-last layout, with channels of zeros."""
        n, channels, height, width = x.shape
        images = x.new_zeros(n, height, width, self._channels, dtype=self._dtype)
        images[..., :channels] = x.movedim(1, -1)
        return images.movedim(-1, 1)

    def differentiate(self, losses: Tensor, weight: Tensor, gradient: Tensor) -> None:
        parts = torch.autograd.grad(losses, self._leaves, weight, allow_unused=True, materialize_grads=True)
        self._packing.unpack(dict(zip(self._layout.shapes, parts, strict=True)), gradient)
