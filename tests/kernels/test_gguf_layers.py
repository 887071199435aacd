"""GGUF's matrices among kernels: blocks are taken apart, nothing grows, and every type compiles."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.kernels.linear import MatmulShape, MatvecShape
from kvern.kernels.packed import Packed
from kvern.kernels.packed_product import packed_product, packed_row
from kvern.layers.build import Build
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearMethods
from kvern.layers.quantized.gguf import GgufFormat, GgufMethod
from kvern.layers.quantized.gguf_blocks import PARTS
from kvern.layers.quantized.gguf_types import BY_NAME, QUANTIZED


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q5_0", "mxfp4"])
def test_a_layer_multiplies_by_its_blocks_taken_apart(name: str, device: torch.device) -> None:
    def make(*kernels: str) -> Linear:
        linear_format = LinearMethods(GgufFormat(BY_NAME[name]))
        made = Linear(512, {"o_proj": 48}, Build(torch.float32, device, 1, frozenset(kernels), linear_format))
        made.method.fill_random(torch.Generator(device).manual_seed(0))
        made.method.finish()
        return made

    plain, packed = make(), make("quantized")
    assert isinstance(plain.method, GgufMethod) and isinstance(packed.method, GgufMethod)
    assert packed.method.packed().scale is not None and not hasattr(packed.method, "weight")
    sizes = [sum(item.nbytes for item in layer.parameters()) for layer in (plain, packed)]
    assert sizes[0] == sizes[1]
    assert torch.equal(plain.method.dequantize(), packed.method.dequantize())
    ids = torch.tensor([7, 0, 7], device=device)
    assert torch.equal(plain.method.embed(ids), packed.method.embed(ids))
    for rows in (1, 5, 70):
        x = torch.randn(rows, 512, device=device)
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-3, atol=1e-4)


def _launch(name: str, rows: int) -> None:
    block, outputs, inputs = BY_NAME[name], 4096, 4096
    codes, scales = (
        torch.empty(outputs, inputs // block.numbers, len(part), dtype=torch.uint8) for part in PARTS[name]
    )
    x, weight = torch.empty(rows, inputs, dtype=torch.bfloat16), Packed(name, codes, scales)
    if rows == 1:
        packed_row(x, weight, None, MatvecShape(8, 2048, 4))
    else:
        packed_product(x, weight, None, MatmulShape(8, 64, 128, 4, 4))


LAUNCHES: list[Callable[[], object]] = [
    *(partial(_launch, block.name, 1) for block in QUANTIZED.values()),
    *(partial(_launch, name, 8) for name in ("q4_k", "q6_k")),
]
