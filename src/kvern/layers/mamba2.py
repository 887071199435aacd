"""Mamba-2: what stands in the place of attention in layers that keep a state space for each request."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.build_options import Section
from kvern.layers.convolution import Convolution
from kvern.layers.decays import Decays
from kvern.layers.gated_norm import Vector, make_gate
from kvern.layers.linear import column, row
from kvern.layers.module import Module
from kvern.layers.state_space import advance, advance_run
from kvern.layers.states import StepStates, advance_states
from kvern.layers.step_context import StepContext, rows_of
from kvern.spec.mixers import Mamba2Spec


class Mamba2(Module):
    """`hidden [T, hidden] -> [T, hidden]`. `index`: the layer's place among those that have states."""

    def __init__(self, index: int, hidden_size: int, spec: Mamba2Spec, build: Build) -> None:
        super().__init__()
        self.index, self.spec = index, spec
        parts = [Section(spec.inner), *convolved(spec), Section(spec.heads)]
        self.in_proj = column(build, hidden_size, {"in_proj": parts}, bias=spec.bias)
        self.conv1d = make_convolution(spec, build)
        self.decays = Decays(spec.heads, build)
        self.skip = Vector(spec.heads, "D", build)
        self.norm = make_gate(spec, build)
        self.out_proj = row(build, spec.inner, "out_proj", hidden_size, bias=spec.bias)
        self._kernels = None
        if "states" in build.kernels:
            from kvern.layers.fused_mamba2 import Mamba2Kernels

            self._kernels = Mamba2Kernels(index, spec)

    def forward(self, hidden: Tensor, step: StepContext) -> Tensor:
        spec, wanted = self.spec, step.wanted
        projected = self.in_proj(hidden, step.adapters.rows)
        gate, mixed, length = torch.split(projected, [spec.inner, spec.channels, spec.heads], 1)
        if self._kernels is not None:
            learned = self.decays.rate, self.decays.step, self.skip.weight
            read = self._kernels.advance(step.states, (mixed, length), self.conv1d, learned)
            normal = self._kernels.norm(rows_of(read, wanted), rows_of(gate, wanted), self.norm)
        else:
            read, x = self._advanced(step.states, mixed, length)
            read = torch.addcmul(rows_of(read, wanted), rows_of(x, wanted), self.skip.weight[:, None])
            normal = self.norm(read.flatten(1), rows_of(gate, wanted).float() * spec.scales.gate).to(hidden.dtype)
        out: Tensor = self.out_proj(normal, step.adapters.wanted)
        return out if spec.scales.out == 1.0 else out.mul_(spec.scales.out)

    def _advanced(self, states: StepStates, mixed: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """The results of the tokens' queries, and the values of the tokens, `[T, heads, head_dim]` float32 each.

        States are changed in place.
        """
        spec, (last, state) = self.spec, states.layers[self.index]
        shared = spec.groups * spec.state_dim
        x, key, query = torch.split(F.silu(self.conv1d(mixed, states, last)), [spec.inner, shared, shared], 1)
        x = x.reshape(-1, spec.heads, spec.head_dim)
        steps, decay = self.decays(length.float() * spec.scales.step)
        shape = (-1, spec.groups, spec.state_dim)
        inputs = query.reshape(shape), key.reshape(shape), x * steps[..., None], decay
        return advance_states(states, state, inputs, advance, advance_run), x


def convolved(spec: Mamba2Spec) -> list[Section]:
    """Values, keys and queries."""
    shared = Section(spec.groups * spec.state_dim, spec.copies)
    return [Section(spec.inner), shared, shared]


def make_convolution(spec: Mamba2Spec, build: Build) -> Convolution:
    """The convolution of values, keys and queries, with their scales."""
    sections, scales = convolved(spec), (spec.scales.value, spec.scales.key, spec.scales.query)
    each = [torch.full((part.size,), scale, device=build.device) for part, scale in zip(sections, scales, strict=True)]
    return Convolution(spec.kernel, sections, "conv1d", build, bias=spec.conv_bias, scales=torch.cat(each))
