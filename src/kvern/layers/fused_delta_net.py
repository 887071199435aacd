"""The kernels of gated delta nets: three launches between the projections for single tokens, a few more for runs."""

from collections.abc import Sequence

from torch import Tensor

from kvern.kernels.convolution import Drafts, Runs, Taps, convolve_drafts, convolve_runs, convolve_tokens
from kvern.kernels.delta_net import Gates, Heads, advance_runs, advance_tokens, gated_norm
from kvern.kernels.delta_net_drafts import read_drafts
from kvern.layers.device_states import DeviceStates
from kvern.spec.mixers import DeltaNetSpec


def heads_of(spec: DeltaNetSpec) -> Heads:
    """A layer's heads, as kernels read them."""
    return Heads(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)


class DeltaNetKernels:
    """The operations of one layer, whose place among those with states is `index`."""

    def __init__(self, index: int, spec: DeltaNetSpec) -> None:
        self._index = index
        self._epsilon = spec.epsilon
        self._heads = heads_of(spec)

    def advance(
        self, states: DeviceStates, inputs: Sequence[Tensor], taps: Tensor, learned: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The results of the tokens' queries; states are changed in place.

        inputs   `[T, ...]`: what is convolved, betas, and lengths of decays' steps
        learned  `[value_heads]` float32 each: rates of decay, and what is added to the lengths
        """
        convolved, matrices = states.layers[self._index]
        heads = self._heads
        each = Taps(taps)

        def of_tokens(places: Tensor, mixed: Tensor, beta: Tensor, length: Tensor) -> Tensor:
            found = convolve_tokens(mixed, each, convolved, places)
            return advance_tokens(found, Gates(beta, length, *learned), matrices, places, heads)

        def of_drafts(drafts: Drafts, mixed: Tensor, beta: Tensor, length: Tensor) -> Tensor:
            noted, written, read = states.noted[self._index]
            assert written is not None and read is not None
            found = convolve_drafts(mixed, each, convolved, drafts, noted)
            read_drafts(found, Gates(beta, length, *learned), matrices, drafts, heads, written, read)
            return read

        def of_runs(runs: Runs, mixed: Tensor, beta: Tensor, length: Tensor) -> Tensor:
            found = convolve_runs(mixed, each, convolved, runs)
            return advance_runs(found, Gates(beta, length, *learned), matrices, runs, heads)

        return states.advance(inputs, of_tokens, of_drafts, of_runs)

    def norm(self, read: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
        """The normalised and gated results, `[S, value_heads * value_dim]`."""
        assert weight is not None
        return gated_norm(read, gate, weight, self._epsilon)
