"""Gated short convolutions out of kernels: one launch between the projections for single tokens, two for runs."""

from torch import Tensor

from kvern.kernels.convolution import Drafts, Runs, Taps, convolve_drafts, convolve_runs, convolve_tokens
from kvern.layers.attention import NO_ADAPTERS, StepAdapters, rows_of
from kvern.layers.device_states import DeviceStates
from kvern.layers.rope import Rotation
from kvern.layers.short_conv import ShortConv


class FusedShortConv(ShortConv):
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
        (last,), taps = memory.layers[self.index], Taps(self.conv.taps, self.conv.bias)

        def of_tokens(states: Tensor, projected: Tensor) -> Tensor:
            return convolve_tokens(projected, taps, last, states, gated=True)

        def of_drafts(drafts: Drafts, projected: Tensor) -> Tensor:
            return convolve_drafts(projected, taps, last, drafts, memory.noted[self.index].inputs, gated=True)

        def of_runs(runs: Runs, projected: Tensor) -> Tensor:
            return convolve_runs(projected, taps, last, runs, gated=True)

        gated = memory.advance([self.in_proj(hidden, adapters.rows)], of_tokens, of_drafts, of_runs)
        out: Tensor = self.out_proj(rows_of(gated, wanted), adapters.wanted)
        return out
