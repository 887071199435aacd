"""AWQ checkpoints (Lin et al., 2023), as AutoAWQ writes them in its version "gemm", with 4 bits.

A matrix of O outputs and I inputs is `qweight` int32 [I, O / 8], `qzeros` int32 [groups, O / 8] and `scales` [groups,
O]. A word has the codes of eight outputs, of which the lowest four bits are the first's and the next four the third's.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.errors import UnsupportedModel
from kvern.formats.choice import all_but, paths_matching
from kvern.formats.groups import (
    Form,
    GroupedFormat,
    GroupedMethod,
    check_group,
    pack_pairs,
    unpack_pairs,
    words_to_bytes,
)
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import INPUTS, OUTPUTS, Axis, Part, TensorLayout

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of the codes of eight outputs in a word, in units of four bits from the lowest."""


class AwqMethod(GroupedMethod):
    """A matrix of an AWQ checkpoint."""

    def layouts(self) -> Mapping[str, TensorLayout]:
        groups, words = self.groups, Axis("outputs", 8)
        return {
            "qweight": TensorLayout(torch.int32, (INPUTS, words)),
            "qzeros": TensorLayout(torch.int32, (groups, words)),
            "scales": TensorLayout(self.form.scale, (groups, OUTPUTS)),
        }

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        tensor = tensor.to(self.shape.device)
        if kind == "scales":
            self.put("scale", tensor.t(), part, first_row, along=1)
        elif kind == "qzeros":
            self.put("zero", _unpack(tensor).t(), part, first_row, along=1)
        else:
            self._put_inputs(_unpack(tensor).t(), part, first_row)

    def _put_inputs(self, codes: Tensor, part: Part, first: int) -> None:
        """Codes [outputs of the part, N] of inputs from `first` on, which may begin and end within a byte."""
        half = first % 2
        pairs = pack_pairs(F.pad(codes, (half, (half + codes.shape[1]) % 2)))
        if half:
            before = self.codes[part.first : part.first + len(part.outputs), (first - part.inputs.start) // 2]
            pairs[part.outputs.start : part.outputs.stop, 0] |= before & 15
        self.put("codes", pairs, part, first // 2, along=1)


def _unpack(words: Tensor) -> Tensor:
    """int32 [R, outputs / 8] -> uint8 [R, outputs]."""
    places = torch.tensor(PLACES, device=words.device)
    return unpack_pairs(words_to_bytes(words)).view(len(words), -1, 8)[..., places].flatten(1)


def awq(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """The quantized layers of an AWQ model: all linear ones except the head and those listed."""
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    if bits != 4:
        raise UnsupportedModel(f"AWQ weights of {bits!r:.40} bits are not supported: those of 4 are")
    for key in ("version", "format", "checkpoint_format"):
        version = quantization.get(key) or "gemm"
        if str(version).lower() != "gemm":
            raise UnsupportedModel(
                f"AWQ weights of the {key} {version!r:.40} are not supported: 'gemm' is; quantize the model for it"
            )
    if quantization.get("zero_point", True) is not True:
        raise UnsupportedModel("AWQ weights without zero points are not supported: those with zero_point: true are")
    group = quantization.get("group_size", quantization.get("q_group_size", 128))
    group = check_group("the AWQ configuration", group)
    make = partial(AwqMethod, form=Form("int4", group, zero=True))
    plain = paths_matching(quantization.get("modules_to_not_convert"), "modules_to_not_convert")
    return all_but([plain], GroupedFormat("AWQ", make, group, per_word_of_outputs=8), unquantized)
