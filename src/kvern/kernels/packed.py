"""A quantized matrix as kernels read it."""

from typing import NamedTuple

from torch import Tensor


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
        """Of the codes of so many rows, in a step of the matrix's `inputs`."""
        return outputs * self.codes.stride(0) * step // inputs
