"""The kernels of gated short convolutions: one launch between the projections for single tokens, two for runs."""

from torch import Tensor

from kvern.kernels.convolution import Drafts, Runs, Taps, convolve_drafts, convolve_runs, convolve_tokens
from kvern.layers.convolution import Convolution
from kvern.layers.device_states import DeviceStates


def convolve_gated(index: int, states: DeviceStates, projected: Tensor, convolution: Convolution) -> Tensor:
    """`projected [T, 3 * channels]`, gates before and after and what is convolved -> `[T, channels]`.

    `index` is the layer's place among those with states, which are changed in place.
    """
    (last,), taps = states.layers[index], Taps(convolution.taps, convolution.bias)

    def of_tokens(places: Tensor, projected: Tensor) -> Tensor:
        return convolve_tokens(projected, taps, last, places, gated=True)

    def of_drafts(drafts: Drafts, projected: Tensor) -> Tensor:
        return convolve_drafts(projected, taps, last, drafts, states.noted[index].inputs, gated=True)

    def of_runs(runs: Runs, projected: Tensor) -> Tensor:
        return convolve_runs(projected, taps, last, runs, gated=True)

    return states.advance([projected], of_tokens, of_drafts, of_runs)
