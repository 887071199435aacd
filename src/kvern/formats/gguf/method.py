"""Matrices of a GGUF file: rows of blocks, each with its scales, stored as the file has them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvern.errors import UnsupportedModel, shown
from kvern.formats.gguf.blocks import NUMBERS
from kvern.formats.gguf.cpu import blocks_of, gguf_product
from kvern.formats.gguf.parts import put_together, taken_apart
from kvern.formats.gguf.types import PLAIN, QUANTIZED, BlockType
from kvern.formats.method import Packed, QuantizedMethod
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import OUTPUTS, RANDOM_SPREAD, Axis, LinearMethod, LinearShape, Part, TensorLayout

if TYPE_CHECKING:
    from kvern.formats.cpu_products import CpuProduct


class GgufMethod(QuantizedMethod):
    """`weight [outputs, inputs / numbers, bytes]` uint8, the blocks of each row; kernels read them split."""

    weight: Tensor
    codes: Tensor
    scales: Tensor

    def __init__(self, shape: LinearShape, block: BlockType) -> None:
        if shape.inputs % block.numbers:
            raise UnsupportedModel(
                f"a matrix of {shape.inputs} inputs cannot be stored as {block.name.upper()}: it has blocks of "
                f"{block.numbers}"
            )
        self.name, self.block = block.name, block
        super().__init__(shape)

    def layouts(self) -> Mapping[str, TensorLayout]:
        axes = (OUTPUTS, Axis("inputs", self.block.numbers), Axis("others", self.block.size))
        return {"weight": TensorLayout(torch.uint8, axes)}

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        for at, _ in SCALES[self.name]:
            if not bool(tensor.view(torch.float16)[..., at // 2].isfinite().all()):
                raise ValueError("the scale of a block is not finite; the file is damaged, download it again")
        super().load(kind, tensor, part, first_row)

    def rows(self, index: Tensor | slice) -> Tensor:
        if self._cpu_product is not None:
            parts = {name: self.stored_rows(lanes, index) for name, lanes in self.named_parameters()}
            blocks = blocks_of(self.name, parts)
        elif self._products is None:
            blocks = self.weight[index]
        else:
            blocks = put_together(self.name, self.codes[index], self.scales[index])
        numbers = NUMBERS[self.name](blocks.reshape(-1, self.block.size))
        return numbers.view(len(blocks), self.shape.inputs).to(self.shape.dtype)

    def packed(self) -> Packed:
        if hasattr(self, "weight"):
            return Packed(self.name, self.weight)
        return Packed(self.name, self.codes, self.scales)

    def finish(self) -> None:
        if self._products is not None:
            codes, scales = taken_apart(self.name, self.weight)
            del self.weight
            self.codes, self.scales = (nn.Parameter(part, requires_grad=False) for part in (codes, scales))
        super().finish()
        if self._cpu_product is not None:
            del self.weight

    def cpu_product(self) -> "CpuProduct | None":
        return gguf_product(self.shape, self.name, self.weight)

    def fill_random(self, generator: torch.Generator) -> None:
        """Fills blocks with random codes, and with scales that give small numbers."""
        self.weight.random_(generator=generator)
        for at, scale in SCALES[self.block.name]:
            value = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
            self.weight[..., at : at + 2] = value.to(self.weight.device)
        if self.block.name == "mxfp4":
            self.weight[..., 0] = 120


def _scales(largest: float, *places: int) -> list[tuple[int, float]]:
    return [(at, RANDOM_SPREAD / largest) for at in places]


SCALES: dict[str, list[tuple[int, float]]] = {
    "q4_0": _scales(8, 0),
    "q4_1": _scales(16, 0, 2),
    "q5_0": _scales(16, 0),
    "q5_1": _scales(32, 0, 2),
    "q8_0": _scales(128, 0),
    "q2_k": _scales(45, 80, 82),
    "q3_k": _scales(128, 108),
    "q4_k": _scales(945, 0, 2),
    "q5_k": _scales(1953, 0, 2),
    "q6_k": _scales(4096, 208),
    "iq4_nl": _scales(127, 0),
    "iq4_xs": _scales(4064, 0),
    "mxfp4": [],
}
"""The offsets of a block's half-precision numbers, and the limit of each that keeps values in RANDOM_SPREAD."""


@dataclass(frozen=True)
class GgufFormat(LinearFormat):
    block: BlockType

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return GgufMethod(shape, self.block)


@dataclass(frozen=True)
class GgufMethods(LinearMethods):
    """The format of each path of `formats`, plain for others."""

    formats: Mapping[str, LinearFormat] = field(default_factory=dict, hash=False)

    def of(self, path: str) -> LinearFormat:
        return self.formats.get(path, self.default)


def gguf(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """Reads `types`, the stored type of each path; all experts of a layer share one."""
    formats: dict[str, LinearFormat] = {item.name: GgufFormat(item) for item in QUANTIZED.values()}
    formats |= {item.name: unquantized for item in PLAIN.values()}
    types = dict(quantization["types"])
    for name in types.values():
        if name not in formats:
            raise UnsupportedModel(f"quantization_config has the GGUF type {shown(name)}; known: {', '.join(formats)}")
    return GgufMethods(unquantized, formats={path: formats[name] for path, name in types.items()})
