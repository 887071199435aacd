"""Parts of layers with states: a causal convolution of each channel over a request's last tokens, and decays.

`ShortConv`, a gated convolution, stands in the place of attention in most layers of LFM2.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.build_options import Section
from kvern.layers.linear import column, row
from kvern.layers.linear_method import fill_random
from kvern.layers.loadable import Loadable, copy_shares
from kvern.layers.module import Module
from kvern.layers.states import StepStates, advance_states
from kvern.layers.step_context import StepContext, rows_of
from kvern.plugins import imported
from kvern.spec.mixers import ShortConvSpec


class Convolution(Loadable):
    """`x [T, channels]` -> float32 of the same shape, over `kernel` tokens; the checkpoint calls the weights `name`.

    Channels come in `sections`, one behind the other. Its state [states, kernel - 1, channels] are the inputs of a
    request's last tokens. Its taps are [kernel, channels], in float32, and hold the factors `scales` [channels] that
    the inputs have to be multiplied by, if any.
    """

    def __init__(
        self,
        kernel: int,
        sections: Sequence[Section],
        name: str,
        build: Build,
        *,
        bias: bool = False,
        scales: Tensor | None = None,
    ) -> None:
        super().__init__(build.path)
        self.name = name
        self._scales = scales
        self._shares = build.shares(sections)
        channels = sum(section.size for section in sections)
        self.taps = build.empty(kernel, channels, dtype=torch.float32)
        self.bias = build.empty(channels, dtype=torch.float32) if bias else None

    def forward(self, x: Tensor, step: StepStates, state: Tensor) -> Tensor:
        return advance_states(step, state, [x], self._advance, self._advance_run)

    def _advance(self, last: Tensor, x: Tensor) -> Tensor:
        """One token of each of B requests: `x [B, channels]`."""
        window = torch.cat((last, x[:, None]), 1)
        last.copy_(window[:, 1:])
        return self._sums(window.transpose(0, 1), 1)[0]

    def _advance_run(self, last: Tensor, x: Tensor) -> Tensor:
        """Several tokens of one request."""
        window = torch.cat((last, x))
        last.copy_(window[len(x) :])
        return self._sums(window, len(x))

    def _sums(self, window: Tensor, count: int) -> Tensor:
        """`window [kernel - 1 + count, ..., channels]` -> `[count, ..., channels]`."""
        total = window[:count] * self.taps[0]
        for place, tap in enumerate(self.taps[1:], 1):
            total.addcmul_(window[place : place + count], tap)
        return total if self.bias is None else total.add_(self.bias)

    def parts(self) -> dict[str, tuple[int, ...]]:
        kernel, channels = len(self.taps), sum(share.whole for share in self._shares)
        weight: dict[str, tuple[int, ...]] = {f"{self.name}.weight": (channels, 1, kernel)}
        return weight if self.bias is None else weight | {f"{self.name}.bias": (channels,)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        if self.bias is not None and part == f"{self.name}.bias":
            copy_shares(self.bias, tensor, first_row, self._shares)
        else:
            for channels in copy_shares(self.taps.T, tensor[:, 0], first_row, self._shares):
                if self._scales is not None:
                    self.taps[:, channels].mul_(self._scales[channels])


CHUNK = 64
"""Tokens that are taken together."""


class Decays(Loadable):
    """`[T, heads]` in any dtype -> the tokens' steps and decays `[T, heads]`, float32; `e^decay` of a state is kept.

    Weights are float32: rates [heads] below 0, and [heads] that are added before a step's softplus.
    """

    def __init__(self, heads: int, build: Build) -> None:
        super().__init__(build.path)
        self.rate = build.empty(heads, dtype=torch.float32)
        self.step = build.empty(heads, dtype=torch.float32)
        self._share = build.ranks.share(heads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps = F.softplus(x.float() + self.step)
        return steps, self.rate * steps

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {"A_log": (self._share.whole,), "dt_bias": (self._share.whole,)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        if part == "A_log":
            copy_shares(self.rate, tensor.float().exp().neg(), first_row, [self._share])
        else:
            copy_shares(self.step, tensor, first_row, [self._share])

    def fill_random(self, generator: torch.Generator) -> None:
        fill_random(self.step, generator)
        self.rate.fill_(-1.0)


def within_chunk(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The factors that are left of earlier tokens after `decay [heads, L]`, the logarithms of each token's factor.

    Returns float32 tensors: `[heads, L, L]`, at token i of what token j <= i added; `[heads, L, 1]`, at each token
    of the state before the chunk; `[heads, L, 1]`, after the chunk of what each token added.
    """
    since = decay.double().cumsum(1)  # of large sums float32 would leave differences few digits
    between = (since[:, :, None] - since[:, None]).float().tril_().exp_().tril_()
    return between, since.float().exp_()[..., None], (since[:, -1:] - since).float().exp_()[..., None]


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
            self._kernels = imported("kvern.layers.recurrent_kernels:StateKernels")(index)

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
