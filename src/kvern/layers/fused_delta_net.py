"""Gated delta nets out of kernels: three launches between the projections for single tokens, a few more for runs."""

from torch import Tensor

from kvern.kernels.convolution import Drafts, Runs, Taps, convolve_drafts, convolve_runs, convolve_tokens
from kvern.kernels.delta_net import Gates, Heads, advance_runs, advance_tokens, gated_norm
from kvern.kernels.delta_net_drafts import read_drafts
from kvern.layers.attention import NO_ADAPTERS, StepAdapters, rows_of
from kvern.layers.delta_net import DeltaNet
from kvern.layers.device_states import DeviceStates
from kvern.layers.rope import Rotation
from kvern.spec.mixers import DeltaNetSpec


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
        (convolved, matrices), taps, heads = memory.layers[self.index], Taps(self.conv1d.taps), heads_of(self.spec)
        learned = self.decays.rate, self.decays.step

        def of_tokens(states: Tensor, mixed: Tensor, beta: Tensor, step: Tensor) -> Tensor:
            inputs = convolve_tokens(mixed, taps, convolved, states)
            return advance_tokens(inputs, Gates(beta, step, *learned), matrices, states, heads)

        def of_drafts(drafts: Drafts, mixed: Tensor, beta: Tensor, step: Tensor) -> Tensor:
            noted, written, read = memory.noted[self.index]
            assert written is not None and read is not None
            inputs = convolve_drafts(mixed, taps, convolved, drafts, noted)
            read_drafts(inputs, Gates(beta, step, *learned), matrices, drafts, heads, written, read)
            return read

        def of_runs(runs: Runs, mixed: Tensor, beta: Tensor, step: Tensor) -> Tensor:
            inputs = convolve_runs(mixed, taps, convolved, runs)
            return advance_runs(inputs, Gates(beta, step, *learned), matrices, runs, heads)

        read = memory.advance((mixed, beta, step), of_tokens, of_drafts, of_runs)
        assert self.norm.weight is not None
        normal = gated_norm(rows_of(read, wanted), rows_of(gate, wanted), self.norm.weight, self.spec.epsilon)
        out: Tensor = self.out_proj(normal, adapters.wanted)
        return out
