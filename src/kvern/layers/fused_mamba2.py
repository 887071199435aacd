"""The kernels of Mamba-2: three launches between the projections for single tokens, one more for runs."""

from collections.abc import Sequence

from torch import Tensor

from kvern.kernels.convolution import Drafts, Runs, Taps, convolve_drafts, convolve_runs, convolve_tokens
from kvern.kernels.mamba2 import StateSizes, Steps, advance_runs, advance_tokens, gated_norm, read_drafts
from kvern.layers.convolution import Convolution
from kvern.layers.device_states import DeviceStates
from kvern.layers.gated_norm import GatedNorm
from kvern.layers.module import Module
from kvern.spec.mixers import Mamba2Spec


def sizes_of(spec: Mamba2Spec) -> StateSizes:
    """A layer's sizes, as kernels read them."""
    return StateSizes(spec.heads, spec.head_dim, spec.groups, spec.state_dim)


class Mamba2Kernels:
    """The operations of one layer, whose place among those with states is `index`."""

    def __init__(self, index: int, spec: Mamba2Spec) -> None:
        self._index = index
        self._spec = spec
        self._sizes = sizes_of(spec)

    def advance(
        self,
        states: DeviceStates,
        inputs: Sequence[Tensor],
        convolution: Convolution,
        learned: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """The results of the tokens' queries; states are changed in place.

        inputs   `[T, ...]`: what is convolved, and lengths of decays' steps
        learned  `[heads]` float32 each: rates of decay, what is added to the lengths, and factors of skipped values
        """
        last, state = states.layers[self._index]
        sizes = self._sizes
        scale = self._spec.scales.step
        taps = Taps(convolution.taps, convolution.bias)

        def of_tokens(places: Tensor, mixed: Tensor, length: Tensor) -> Tensor:
            steps = Steps(length, *learned, scale)
            return advance_tokens(convolve_tokens(mixed, taps, last, places), steps, state, places, sizes)

        def of_drafts(drafts: Drafts, mixed: Tensor, length: Tensor) -> Tensor:
            noted, written, read = states.noted[self._index]
            assert written is not None and read is not None
            steps, found = Steps(length, *learned, scale), convolve_drafts(mixed, taps, last, drafts, noted)
            read_drafts(found, steps, state, drafts, sizes, written, read)
            return read.flatten(1)

        def of_runs(runs: Runs, mixed: Tensor, length: Tensor) -> Tensor:
            steps = Steps(length, *learned, scale)
            return advance_runs(convolve_runs(mixed, taps, last, runs), steps, state, runs, sizes)

        return states.advance(inputs, of_tokens, of_drafts, of_runs)

    def norm(self, read: Tensor, gate: Tensor, norm: Module) -> Tensor:
        """The normalised and gated results: by a kernel, except where a group's heads are on several ranks."""
        spec = self._spec
        if isinstance(norm, GatedNorm) and spec.copies > 1:
            normal: Tensor = norm(read, gate.float() * spec.scales.gate)
            return normal.to(gate.dtype)
        weight = norm.weight if isinstance(norm, GatedNorm) else None
        return gated_norm(
            read, gate, weight, spec.epsilon, groups=spec.groups, gating=spec.gating, scale=spec.scales.gate
        )
