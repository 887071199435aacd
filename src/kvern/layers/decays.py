"""The decay of a state's heads: learned rates, times steps whose length each token chooses."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.linear_method import fill_random
from kvern.layers.loadable import Loadable, copy_shares

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
