"""Scalings of rotary position embeddings for contexts that are longer than those in training.

Two of them, `Dynamic` and `LongRope`, were defined by the length of the running sequence. kvern decides once, by the
longest sequence of the engine (`max_model_len`): a cached key must not depend on how long its sequence will become, nor
on other sequences in its batch."""

import math
from dataclasses import dataclass

from kvern.spec.rope_scaling import plain_frequencies


@dataclass(frozen=True)
class Proportional:
    """Only the fastest `fraction` of the planes rotates; the others carry no position."""

    fraction: float
    factor: float = 1.0

    def frequencies(self, theta: float, dim: int, max_model_len: int) -> tuple[list[float], float]:
        turning = int(self.fraction * dim // 2)
        kept = [frequency / self.factor for frequency in plain_frequencies(theta, dim)[:turning]]
        return kept + [0.0] * (dim // 2 - turning), 1.0


@dataclass(frozen=True)
class Dynamic:
    """A base that grows with `max_model_len` beyond the model's `trained_len` (NTK-aware)."""

    factor: float
    trained_len: int

    def frequencies(self, theta: float, dim: int, max_model_len: int) -> tuple[list[float], float]:
        length = max(max_model_len, self.trained_len)
        stretch = self.factor * length / self.trained_len - (self.factor - 1)
        return plain_frequencies(theta * stretch ** (dim / (dim - 2)), dim), 1.0


@dataclass(frozen=True)
class Yarn:
    """Fast planes are kept, slow planes interpolated, with a linear ramp between (https://arxiv.org/abs/2309.00071)."""

    factor: float
    trained_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def _plane(self, rotations: float, theta: float, dim: int) -> float:
        """Returns the index of the plane that makes `rotations` turns within the trained length."""
        return dim * math.log(self.trained_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    def frequencies(self, theta: float, dim: int, max_model_len: int) -> tuple[list[float], float]:
        low, high = self._plane(self.beta_fast, theta, dim), self._plane(self.beta_slow, theta, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        result = []
        for index, frequency in enumerate(plain_frequencies(theta, dim)):
            interpolated = min(max((index - low) / (high - low), 0.0), 1.0)
            result.append(frequency * (1 - interpolated) + frequency / self.factor * interpolated)
        return result, self.attention_factor


@dataclass(frozen=True)
class Llama3:
    """Wavelengths past the trained length are divided by `factor`, the middle ones blended (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    trained_len: int

    def frequencies(self, theta: float, dim: int, max_model_len: int) -> tuple[list[float], float]:
        return [self._scale(frequency) for frequency in plain_frequencies(theta, dim)], 1.0

    def _scale(self, frequency: float) -> float:
        turns = self.trained_len * frequency / (2 * math.pi)
        kept = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = min(max(kept, 0.0), 1.0)
        return frequency * kept + frequency / self.factor * (1 - kept)


@dataclass(frozen=True)
class LongRope:
    """A searched divisor for each plane, one set for short and one for long contexts
    (https://arxiv.org/abs/2402.13753)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    trained_len: int
    attention_factor: float

    def frequencies(self, theta: float, dim: int, max_model_len: int) -> tuple[list[float], float]:
        factors = self.long_factors if max_model_len > self.trained_len else self.short_factors
        plain = plain_frequencies(theta, dim)
        return [frequency / factor for frequency, factor in zip(plain, factors, strict=True)], self.attention_factor
