"""Gated short convolutions: what stands in the place of attention in most layers of LFM2."""

import torch
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.build_options import Section
from kvern.layers.convolution import Convolution
from kvern.layers.linear import column, row
from kvern.layers.module import Module
from kvern.layers.step_context import StepContext, rows_of
from kvern.spec.mixers import ShortConvSpec


class ShortConv(Module):
    """`hidden [T, hidden] -> [T, hidden]`. `index`: the layer's place among those that have states."""

    def __init__(self, index: int, hidden_size: int, spec: ShortConvSpec, build: Build) -> None:
        super().__init__()
        self.index = index
        channels = [Section(spec.channels)]
        self.in_proj = column(build, hidden_size, {"in_proj": 3 * channels}, bias=spec.bias)
        self.conv = Convolution(spec.kernel, channels, "conv", build, bias=spec.bias)
        self.out_proj = row(build, spec.channels, "out_proj", hidden_size, bias=spec.bias)
        self._kernels = None
        if "states" in build.kernels:
            from kvern.layers.recurrent_kernels import StateKernels

            self._kernels = StateKernels(index)

    def forward(self, hidden: Tensor, step: StepContext) -> Tensor:
        projected = self.in_proj(hidden, step.adapters.rows)
        if self._kernels is not None:
            gated = rows_of(self._kernels.advance(step.states, (projected,), self.conv), step.wanted)
        else:
            before, after, x = torch.chunk(projected, 3, 1)
            convolved = self.conv(before * x, step.states, step.states.layers[self.index][0])
            gated = rows_of(after, step.wanted) * rows_of(convolved, step.wanted).to(hidden.dtype)
        out: Tensor = self.out_proj(gated, step.adapters.wanted)
        return out
