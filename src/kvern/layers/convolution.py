"""A causal convolution of each channel by itself over the last few tokens of a request."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.build_options import Section
from kvern.layers.loadable import Loadable, copy_shares
from kvern.layers.states import StepStates, advance_states


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
