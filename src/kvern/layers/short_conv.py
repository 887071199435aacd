"""Gated short convolutions: what stands in the place of attention in most layers of LFM2."""

import torch
from torch import Tensor

from kvern.layers.attention import NO_ADAPTERS, StepAdapters, rows_of
from kvern.layers.build import Build, Section
from kvern.layers.convolution import Convolution
from kvern.layers.module import Module
from kvern.layers.rope import Rotation
from kvern.layers.states import StepStates
from kvern.spec.mixers import ShortConvSpec


class ShortConv(Module):
    """`hidden [T, hidden] -> [T, hidden]`. `index`: the layer's place among those that have states."""

    def __init__(self, index: int, hidden_size: int, spec: ShortConvSpec, build: Build) -> None:
        super().__init__()
        self.index = index
        channels = [Section(spec.channels)]
        self.in_proj = build.column(hidden_size, {"in_proj": 3 * channels}, bias=spec.bias)
        self.conv = Convolution(spec.kernel, channels, "conv", build, bias=spec.bias)
        self.out_proj = build.row(spec.channels, "out_proj", hidden_size, bias=spec.bias)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        memory: StepStates,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Tensor:
        """Positions mean nothing to a state: `rotation` is not used."""
        before, behind, x = torch.chunk(self.in_proj(hidden, adapters.rows), 3, 1)
        convolved = self.conv(before * x, memory, memory.layers[self.index][0])
        gated = rows_of(behind, wanted) * rows_of(convolved, wanted).to(hidden.dtype)
        out: Tensor = self.out_proj(gated, adapters.wanted)
        return out


def make_short_conv(index: int, hidden_size: int, spec: ShortConvSpec, build: Build) -> ShortConv:
    """A gated short convolution, out of kernels where there are some."""
    if "states" in build.kernels:
        from kvern.layers.fused_short_conv import FusedShortConv

        return FusedShortConv(index, hidden_size, spec, build)
    return ShortConv(index, hidden_size, spec, build)
