"""Frequencies of rotary position embeddings, and their plain scaling; `rope_stretching` has those for longer contexts.

A scaling turns `(theta, dim, max_model_len)` into the inverse frequencies of the `dim / 2` rotated planes, in radians
per token, and one factor by which cosines and sines are multiplied. Nothing here imports torch.
"""

from dataclasses import dataclass
from typing import Protocol


class RopeScaling(Protocol):
    def frequencies(self, theta: float, dim: int, max_model_len: int) -> tuple[list[float], float]:
        """Returns `dim / 2` inverse frequencies, and the factor of cosines and sines."""


def plain_frequencies(theta: float, dim: int) -> list[float]:
    """Returns `dim / 2` inverse frequencies without a scaling."""
    return [theta ** (-index / dim) for index in range(0, dim, 2)]


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor`; 1 is the unscaled embedding (https://arxiv.org/abs/2306.15595)."""

    factor: float = 1.0

    def frequencies(self, theta: float, dim: int, max_model_len: int) -> tuple[list[float], float]:
        return [frequency / self.factor for frequency in plain_frequencies(theta, dim)], 1.0
