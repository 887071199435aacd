"""Mamba-2 out of kernels: three launches between the projections for single tokens, one more for runs."""

import torch
from torch import Tensor

from kvern.kernels.convolution import Drafts, Runs, Taps, convolve_drafts, convolve_runs, convolve_tokens
from kvern.kernels.mamba2 import StateSizes, Steps, advance_runs, advance_tokens, gated_norm, read_drafts
from kvern.layers.attention import NO_ADAPTERS, StepAdapters, rows_of
from kvern.layers.device_states import DeviceStates
from kvern.layers.mamba2 import GatedNorm, Mamba2
from kvern.layers.rope import Rotation
from kvern.spec.mixers import Mamba2Spec


def sizes_of(spec: Mamba2Spec) -> StateSizes:
    """What kernels are told of a layer."""
    return StateSizes(spec.heads, spec.head_dim, spec.groups, spec.state_dim)


class FusedMamba2(Mamba2):
    """`hidden [T, hidden] -> [T, hidden]`."""

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        rotation: Rotation,
        memory: DeviceStates,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Tensor:
        """Positions mean nothing to a state: `rotation` is not used."""
        spec = self.spec
        gate, mixed, step = torch.split(self.in_proj(hidden, adapters.rows), [spec.inner, spec.channels, spec.heads], 1)
        (last, state), sizes, decays = memory.layers[self.index], sizes_of(spec), self.decays
        taps, learned = Taps(self.conv1d.taps, self.conv1d.bias), (decays.rate, decays.step, self.skip.weight)

        def of_tokens(states: Tensor, mixed: Tensor, step: Tensor) -> Tensor:
            steps = Steps(step, *learned, spec.scales.step)
            return advance_tokens(convolve_tokens(mixed, taps, last, states), steps, state, states, sizes)

        def of_drafts(drafts: Drafts, mixed: Tensor, step: Tensor) -> Tensor:
            noted, written, read = memory.noted[self.index]
            assert written is not None and read is not None
            steps, inputs = Steps(step, *learned, spec.scales.step), convolve_drafts(mixed, taps, last, drafts, noted)
            read_drafts(inputs, steps, state, drafts, sizes, written, read)
            return read.flatten(1)

        def of_runs(runs: Runs, mixed: Tensor, step: Tensor) -> Tensor:
            steps = Steps(step, *learned, spec.scales.step)
            return advance_runs(convolve_runs(mixed, taps, last, runs), steps, state, runs, sizes)

        read = memory.advance((mixed, step), of_tokens, of_drafts, of_runs)
        normal = self._normal(rows_of(read, wanted), rows_of(gate, wanted))
        out: Tensor = self.out_proj(normal, adapters.wanted)
        return out if spec.scales.out == 1.0 else out.mul_(spec.scales.out)

    def _normal(self, read: Tensor, gate: Tensor) -> Tensor:
        """By a kernel, but where a group's heads are on several ranks."""
        spec, norm = self.spec, self.norm
        if isinstance(norm, GatedNorm) and spec.copies > 1:
            normal: Tensor = norm(read, gate.float() * spec.scales.gate)
            return normal.to(gate.dtype)
        weight = norm.weight if isinstance(norm, GatedNorm) else None
        return gated_norm(
            read, gate, weight, spec.epsilon, groups=spec.groups, gating=spec.gating, scale=spec.scales.gate
        )
