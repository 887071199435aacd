"""The kernels of layers with states: a few launches between the projections for single tokens, drafts and runs."""

from collections.abc import Sequence

from torch import Tensor

from kvern.kernels import delta_net, mamba2
from kvern.kernels.convolution import Drafts, Runs, Taps, convolve_drafts, convolve_runs, convolve_tokens
from kvern.kernels.delta_net_drafts import read_drafts
from kvern.layers.convolution import Convolution
from kvern.layers.device_states import DeviceStates, Noted
from kvern.spec.mixers import DeltaNetSpec, Mamba2Spec


class StateKernels:
    """The gated convolution of a layer whose place among those with states is `index`.

    Subclasses let a state's matrices see what was convolved, which is not gated then.
    """

    gated = True

    def __init__(self, index: int) -> None:
        self._index = index

    def advance(
        self, states: DeviceStates, inputs: Sequence[Tensor], convolution: Convolution, learned: Sequence[Tensor] = ()
    ) -> Tensor:
        """The results of a step's tokens, `[T, ...]`; states are changed in place.

        inputs   `[T, ...]` each: what is convolved, and what else a state's matrices take of the tokens
        learned  `[heads]` float32 each: weights of these matrices' changes
        """
        last, state = states.layers[self._index][0], states.layers[self._index][-1]
        taps, gated = Taps(convolution.taps, convolution.bias), self.gated

        def of_tokens(places: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
            return self.tokens(convolve_tokens(x, taps, last, places, gated=gated), (*rest, *learned), state, places)

        def of_drafts(drafts: Drafts, x: Tensor, *rest: Tensor) -> Tensor:
            noted = states.noted[self._index]
            found = convolve_drafts(x, taps, last, drafts, noted.inputs, gated=gated)
            return self.drafts(found, (*rest, *learned), state, drafts, noted)

        def of_runs(runs: Runs, x: Tensor, *rest: Tensor) -> Tensor:
            return self.runs(convolve_runs(x, taps, last, runs, gated=gated), (*rest, *learned), state, runs)

        return states.advance(inputs, of_tokens, of_drafts, of_runs)

    def tokens(self, found: Tensor, steps: Sequence[Tensor], state: Tensor, places: Tensor) -> Tensor:
        """The results of tokens that are alone of their requests, of `found`, what was convolved."""
        return found

    def drafts(self, found: Tensor, steps: Sequence[Tensor], state: Tensor, drafts: Drafts, noted: Noted) -> Tensor:
        """The results of tokens that may be rejected; what they change is noted."""
        return found

    def runs(self, found: Tensor, steps: Sequence[Tensor], state: Tensor, runs: Runs) -> Tensor:
        """The results of several tokens of a request."""
        return found


def heads_of(spec: DeltaNetSpec) -> delta_net.Heads:
    """The heads of a gated delta net, as kernels read them."""
    return delta_net.Heads(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)


class DeltaNetKernels(StateKernels):
    """A gated delta net; its `steps` are betas, lengths of steps, rates of decay, and what is added to lengths."""

    gated = False

    def __init__(self, index: int, spec: DeltaNetSpec) -> None:
        super().__init__(index)
        self._epsilon = spec.epsilon
        self._heads = heads_of(spec)

    def tokens(self, found: Tensor, steps: Sequence[Tensor], state: Tensor, places: Tensor) -> Tensor:
        return delta_net.advance_tokens(found, delta_net.Gates(*steps), state, places, self._heads)

    def drafts(self, found: Tensor, steps: Sequence[Tensor], state: Tensor, drafts: Drafts, noted: Noted) -> Tensor:
        assert noted.written is not None and noted.read is not None
        read_drafts(found, delta_net.Gates(*steps), state, drafts, self._heads, noted.written, noted.read)
        return noted.read

    def runs(self, found: Tensor, steps: Sequence[Tensor], state: Tensor, runs: Runs) -> Tensor:
        return delta_net.advance_runs(found, delta_net.Gates(*steps), state, runs, self._heads)

    def norm(self, read: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
        """The normalised and gated results, `[S, value_heads * value_dim]`."""
        assert weight is not None
        return delta_net.gated_norm(read, gate, weight, self._epsilon)


def sizes_of(spec: Mamba2Spec) -> mamba2.StateSizes:
    """The sizes of a Mamba-2 layer, as kernels read them."""
    return mamba2.StateSizes(spec.heads, spec.head_dim, spec.groups, spec.state_dim)


class Mamba2Kernels(StateKernels):
    """Mamba-2; its `steps` are lengths of steps, rates, what is added to lengths, and factors of skipped values."""

    gated = False

    def __init__(self, index: int, spec: Mamba2Spec) -> None:
        super().__init__(index)
        self._spec = spec
        self._sizes = sizes_of(spec)

    def tokens(self, found: Tensor, steps: Sequence[Tensor], state: Tensor, places: Tensor) -> Tensor:
        return mamba2.advance_tokens(found, self._steps(steps), state, places, self._sizes)

    def drafts(self, found: Tensor, steps: Sequence[Tensor], state: Tensor, drafts: Drafts, noted: Noted) -> Tensor:
        assert noted.written is not None and noted.read is not None
        mamba2.read_drafts(found, self._steps(steps), state, drafts, self._sizes, noted.written, noted.read)
        return noted.read.flatten(1)

    def runs(self, found: Tensor, steps: Sequence[Tensor], state: Tensor, runs: Runs) -> Tensor:
        return mamba2.advance_runs(found, self._steps(steps), state, runs, self._sizes)

    def _steps(self, steps: Sequence[Tensor]) -> mamba2.Steps:
        length, rate, added, skip = steps
        return mamba2.Steps(length, rate, added, skip, self._spec.scales.step)

    def norm(self, read: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
        """The normalised and gated results; `weight`: of a norm, if there is one."""
        spec = self._spec
        return mamba2.gated_norm(
            read, gate, weight, spec.epsilon, groups=spec.groups, gating=spec.gating, scale=spec.scales.gate
        )
