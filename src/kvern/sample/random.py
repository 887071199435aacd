"""Counter-based random numbers: each depends on a seed, a position and a token, and on nothing else in the batch."""

import torch


def _wrapped(value: int, bits: int) -> int:
    """The signed integer with the bits of an unsigned one."""
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


_GOLDEN = _wrapped(0x9E3779B97F4A7C15, 64)
_MIX_1 = _wrapped(0xBF58476D1CE4E5B9, 64)
_MIX_2 = _wrapped(0x94D049BB133111EB, 64)
_GOLDEN_32 = _wrapped(0x9E3779B1, 32)
_MIX_1_32 = _wrapped(0x7FEB352D, 32)
_MIX_2_32 = _wrapped(0x846CA68B, 32)
_LARGEST_BELOW_ONE = 1 - 2.0**-24


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: PyTorch's own keeps the sign."""
    width = 8 * value.element_size()
    return (value >> bits).bitwise_and_((1 << (width - bits)) - 1)


def mixed(value: torch.Tensor) -> torch.Tensor:
    """A bijection of 64-bit integers: the finalizer of SplitMix64."""
    value = (value ^ _shift_right(value, 30)) * _MIX_1
    value = (value ^ _shift_right(value, 27)) * _MIX_2
    return value ^ _shift_right(value, 31)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1), float32 [N, C], exact to 24 bits however small they are.

    seeds, positions   [N] int64
    tokens             [N, C] or [1, C] integers below 2**31

    Seed and position make a key of 64 bits with the SplitMix64 generator (Steele, Lea, Flood 2014); token and key are
    then hashed with the multipliers of Wellons's lowbias32.
    """
    key = mixed(mixed(seeds + _GOLDEN) + positions * _GOLDEN)[:, None]
    value = tokens.to(torch.int32) * _GOLDEN_32 ^ key.to(torch.int32)
    value ^= _shift_right(value, 16)
    value *= _MIX_1_32
    value ^= _shift_right(value, 15)
    value ^= (key >> 32).to(torch.int32)
    value *= _MIX_2_32
    value ^= _shift_right(value, 16)
    return value.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
