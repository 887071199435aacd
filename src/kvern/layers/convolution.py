"""A causal convolution of each channel by itself over the last few tokens of a request."""

import torch
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.loadable import Loadable, copy_rows
from kvern.layers.states import StepStates, advance_states


class Convolution(Loadable):
    """`x [T, channels]` -> float32 of the same shape, over `kernel` tokens; the checkpoint calls the weights `name`.

    Its state [states, kernel - 1, channels] are the inputs of a request's last tokens. Its taps are [kernel, channels],
    in float32, and hold the factors `scales` [channels] that the inputs have to be multiplied by, if any.
    """

    def __init__(
        self, kernel: int, channels: int, name: str, build: Build, *, bias: bool = False, scales: Tensor | None = None
    ) -> None:
        super().__init__(build.path)
        self.name, self._scales = name, scales
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
        kernel, channels = self.taps.shape
        weight: dict[str, tuple[int, ...]] = {f"{self.name}.weight": (channels, 1, kernel)}
        return weight if self.bias is None else weight | {f"{self.name}.bias": (channels,)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        if self.bias is not None and part == f"{self.name}.bias":
            copy_rows(self.bias, tensor, first_row)
        else:
            taps = self.taps.narrow(1, first_row, len(tensor))
            taps.copy_(tensor[:, 0].T)
            if self._scales is not None:
                taps.mul_(self._scales[first_row : first_row + len(tensor)])
