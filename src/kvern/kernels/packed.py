"""A quantized matrix as kernels read it."""

from typing import NamedTuple

from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of FP4 (OCP Microscaling Formats 1.0, 5.3.3): a sign, two bits of exponent, one of mantissa."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The quantiles of a normal distribution that codes of NF4 stand for (Dettmers et al., QLoRA)."""
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the codes of GGUF's IQ4_NL and IQ4_XS."""


class Packed(NamedTuple):
    """A quantized matrix `[outputs, inputs]` as kernels read it: rows of codes, and what they are multiplied by.

    `code` names what the bytes mean (`kernels/codes.py` makes numbers of them by that name). `codes [outputs, ...]` are
    contiguous rows of bytes, or of numbers of one byte. `scale` and `zero`, `[outputs / outputs_per_scale, inputs /
    group]`, stand beside the codes; formats whose scales lie among the codes have none. `order [inputs]` int32: column
    i of the matrix multiplies the input `order[i]`. `factor [outputs]` float32 multiplies whole rows.
    """

    code: str
    codes: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    group: int = 0
    outputs_per_scale: int = 1
    order: Tensor | None = None
    factor: Tensor | None = None

    def bytes_of_step(self, outputs: int, step: int, inputs: int) -> int:
        """Returns the bytes of the codes of so many rows in a step of the matrix's `inputs`."""
        return outputs * self.codes.stride(0) * step // inputs
