"""Gated delta nets out of kernels: three launches between the projections for single tokens, a few more for runs."""

import torch
from torch import Tensor

from kvern.kernels.convolution import Taps, convolve_runs, convolve_tokens
from kvern.kernels.delta_net import Gates, Heads, advance_runs, advance_tokens, gated_norm
from kvern.layers.attention import NO_ADAPTERS, StepAdapters, rows_of
from kvern.layers.delta_net import DeltaNet
from kvern.layers.device_states import DeviceStates
from kvern.layers.rope import Rotation
from kvern.mixer_spec import DeltaNetSpec


def heads_of(spec: DeltaNetSpec) -> Heads:
    """What kernels are told of a layer."""
    return Heads(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)


class FusedDeltaNet(DeltaNet):
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
        mixed, gate, beta, step = self._split(self.in_proj(hidden, adapters.rows))
        if self.spec.grouped:  # views of every other number where a key head has one value head
            beta, step = beta.contiguous(), step.contiguous()
        alone, taps, decays = len(memory.states), Taps(self.conv1d.taps), self.decays
        parts = []
        (convolved, matrices), heads = memory.layers[self.index], heads_of(self.spec)
        if alone:
            gates = Gates(beta[:alone], step[:alone], decays.rate, decays.step)
            inputs = convolve_tokens(mixed[:alone], taps, convolved, memory.states)
            parts.append(advance_tokens(inputs, gates, matrices, memory.states, heads))
        if memory.runs is not None:
            gates = Gates(beta[alone:], step[alone:], decays.rate, decays.step)
            inputs = convolve_runs(mixed[alone:], taps, convolved, memory.runs)
            parts.append(advance_runs(inputs, gates, matrices, memory.runs, heads))
        read = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert self.norm.weight is not None
        normal = gated_norm(rows_of(read, wanted), rows_of(gate, wanted), self.norm.weight, self.spec.epsilon)
        out: Tensor = self.out_proj(normal, adapters.wanted)
        return out
