"""GPTQ checkpoints (Frantar et al., 2022), as AutoGPTQ and GPTQModel write them, with 4 or 8 bits.

A matrix of O outputs and I inputs is `qweight` int32 [I / n, O], `qzeros` int32 [groups, O / n], `scales` [groups, O]
and `g_idx` int32 [I], with n codes of unsigned integers in a word, the lowest first. `checkpoint_format` "gptq" stores
zeros less one, "gptq_v2" as they are. With `desc_act` groups are of inputs that stand anywhere, as `g_idx` says. Early
versions stored a `bias` of zeros where layers have none.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvern.errors import UnsupportedModel
from kvern.formats.choice import EMBEDDINGS, HEAD, ROUTERS, checked, paths_matching
from kvern.formats.groups import (
    Form,
    GroupedFormat,
    GroupedMethod,
    check_group,
    signed,
    unpack_pairs,
    words_to_bytes,
)
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import INPUTS, OUTPUTS, Axis, LinearShape, Part, TensorLayout

FORMATS = {"gptq": 1, "gptq_v2": 0}
"""The number added to stored zeros."""

BITS = {4: "int4", 8: "int8"}


class GptqMethod(GroupedMethod):
    """A matrix of a GPTQ checkpoint."""

    def __init__(self, shape: LinearShape, form: Form, add: int) -> None:
        super().__init__(shape, form)
        self._add = add

    def layouts(self) -> Mapping[str, TensorLayout]:
        codes = 4 if self.form.code == "int8" else 8
        return {
            "qweight": TensorLayout(torch.int32, (Axis("inputs", codes), OUTPUTS)),
            "qzeros": TensorLayout(torch.int32, (self.groups, Axis("outputs", codes))),
            "scales": TensorLayout(self.form.scale, (self.groups, OUTPUTS)),
            "g_idx": TensorLayout(torch.int32, (INPUTS,), needed=self.form.ordered),
            "bias": TensorLayout(self.shape.dtype, (OUTPUTS,), needed=False),
        }

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        tensor = tensor.to(self.shape.device)
        wide = self.form.code == "int8"
        if kind == "qweight":
            codes = words_to_bytes(tensor.t())
            self.put("codes", signed(codes) if wide else codes, part, first_row * 4, along=1)
        elif kind == "qzeros":
            stored = words_to_bytes(tensor)
            zero = signed(stored + self._add) if wide else (unpack_pairs(stored) + self._add) & 15
            self.put("zero", zero.t(), part, first_row, along=1)
        elif kind == "scales":
            self.put("scale", tensor.t(), part, first_row, along=1)
        elif kind == "g_idx":
            self.put_group_index(tensor, part, first_row)
        elif bool(tensor.any()):
            raise ValueError("it is not zero, and the layers of this architecture have no bias")


def gptq(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """The quantized layers of a GPTQ model: all linear ones within its blocks, or those listed."""
    quantized = _format(quantization)
    plain = (ROUTERS, EMBEDDINGS, *([] if quantization.get("lm_head", False) else [HEAD]))
    rules = [(pattern, unquantized) for pattern in plain]
    for pattern, changes in (quantization.get("dynamic") or {}).items():
        own = unquantized if pattern.startswith("-:") else _format({**quantization, **changes})
        rules.append((re.compile(f"^(?:{checked(pattern.removeprefix('-:').removeprefix('+:'))})"), own))
    if only := list(_flat(quantization.get("modules_in_block_to_quantize") or ())):
        rules.append((paths_matching(only, "modules_in_block_to_quantize"), quantized))
        return LinearMethods(unquantized, tuple(rules))
    return LinearMethods(quantized, tuple(rules))


def _format(quantization: Mapping[str, Any]) -> LinearFormat:
    """The format of one layer. Raises UnsupportedModel."""
    bits = quantization.get("bits")
    kind = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    if bits not in BITS:
        raise UnsupportedModel(f"GPTQ weights of {bits!r:.40} bits are not supported: those of 4 and 8 are")
    if kind not in FORMATS:
        raise UnsupportedModel(
            f"GPTQ weights of the checkpoint_format {kind!r:.40} are not supported: {' and '.join(FORMATS)} are; "
            "convert it with GPTQModel"
        )
    if quantization.get("pack_dtype", "int32") not in ("int32", None):
        raise UnsupportedModel(f"GPTQ codes packed into {quantization['pack_dtype']!r:.40} are not supported: int32 is")
    group = check_group("the GPTQ configuration", quantization.get("group_size", 128))
    form = Form(BITS[bits], group, zero=True, ordered=bool(quantization.get("desc_act")) and group != -1)
    make = partial(GptqMethod, form=form, add=FORMATS[kind])
    per_word = 32 // bits
    name = f"GPTQ of {bits} bits"
    return GroupedFormat(name, make, group, per_word=per_word, per_word_of_outputs=per_word, joins=not form.ordered)


def _flat(names: Iterable[Any]) -> Iterable[str]:
    for item in names:
        yield from [item] if isinstance(item, str) else _flat(item)
