"""Counter-based random numbers: each depends on a seed and a position and on nothing else in the batch."""

import torch


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _as_int64(0x9E3779B97F4A7C15)
_MIX_1 = _as_int64(0xBF58476D1CE4E5B9)
_MIX_2 = _as_int64(0x94D049BB133111EB)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64: PyTorch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift_right(value, 30)) * _MIX_1
    value = (value ^ _shift_right(value, 27)) * _MIX_2
    return value ^ _shift_right(value, 31)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, one for each (seed, position) pair of int64.

    The SplitMix64 generator (Steele, Lea, Flood 2014), started at a mix of the seed and stepped by the position.
    """
    state = _mix(seeds + _GOLDEN) + positions * _GOLDEN
    return _shift_right(_mix(state), 11).double() * 2.0**-53
