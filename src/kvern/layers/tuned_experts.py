"""The ways in which experts are multiplied on a GPU, for each number of tokens: timed, and chosen."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from kvern.kernels.moe import TILES

HOPPER = "hopper"
"""The way by the kernels for Hopper GPUs; others are numbers, of a kernel's tiles."""
MOST_TOKENS = (8, 32, 128, 256, 512, 8192)
"""The most tokens of each timed way; the last one is for more tokens too."""


class Ways:
    """A way for each number of tokens, the first until they are timed.

    `multiply(x, weights, topk_ids, add, hopper=..., tiles=...)` is what they are ways of; of blocks of 16-bit numbers
    or codes there are several tiles. `hopper`: the kernels for Hopper know such experts.
    """

    def __init__(self, multiply: Callable[..., Tensor], hopper: bool, several: bool) -> None:
        self._multiply = multiply
        tiles = range(len(TILES[16]) if several else 1)
        self._known: tuple[Hashable, ...] = (HOPPER, *tiles) if hopper else tuple(tiles)
        self._chosen = [self._known[0]] * len(MOST_TOKENS)

    def __call__(self, x: Tensor, *given: Any) -> Tensor:
        """Multiply in the way that was chosen for so many tokens."""
        return self._by(self._chosen[min(bisect_left(MOST_TOKENS, x.shape[0]), len(MOST_TOKENS) - 1)], x, *given)

    def candidates(self) -> Mapping[int, Mapping[Hashable, Callable[..., Tensor]]]:
        """The ways that are to be timed, see `Experts.candidates`."""
        return {most: {way: partial(self._by, way) for way in self._known} for most in MOST_TOKENS}

    def choose(self, tokens: int, way: Hashable) -> None:
        """Use a way for up to so many tokens, see `Experts.choose`."""
        self._chosen[MOST_TOKENS.index(tokens)] = way

    def _by(self, way: Hashable, x: Tensor, *given: Any) -> Tensor:
        return self._multiply(x, *given, hopper=way == HOPPER, tiles=0 if way == HOPPER else way)
