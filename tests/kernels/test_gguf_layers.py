"""GGUF's matrices among kernels: blocks are taken apart, nothing grows, and every type compiles."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.formats.gguf.header import BY_NAME, QUANTIZED
from kvern.formats.gguf.method import GgufFormat, GgufMethod, put_together, taken_apart
from kvern.kernels.linear import MatmulShape, MatvecShape
from kvern.kernels.packed import Packed
from kvern.kernels.packed_product import packed_product, packed_row
from kvern.layers.build import Build
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearMethods


@pytest.mark.parametrize("name", ["iq4_xs", "mxfp4"])
def test_rows_take_nothing_from_the_host_again(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear_format = LinearMethods(GgufFormat(BY_NAME[name]))
    method = Linear(256, {"o_proj": 2}, Build(torch.float32, device, 1, linear=linear_format)).method
    method.fill_random(torch.Generator(device).manual_seed(0))
    ids = torch.tensor([1, 0], device=device)
    first = method.embed(ids)
    monkeypatch.setattr(torch, "tensor", None)  # a CUDA graph could not either
    assert torch.equal(method.embed(ids), first)


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q5_0", "mxfp4"])
def test_a_layer_multiplies_by_its_blocks_taken_apart(name: str, device: torch.device) -> None:
    def make(*kernels: str) -> Linear:
        linear_format = LinearMethods(GgufFormat(BY_NAME[name]))
        made = Linear(512, {"o_proj": 48}, Build(torch.float32, device, 1, frozenset(kernels), linear=linear_format))
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


@pytest.mark.parametrize("name", [block.name for block in QUANTIZED.values()])
def test_blocks_taken_apart_are_put_together_again(name: str) -> None:
    blocks = torch.randint(0, 256, (3, 2, BY_NAME[name].size), dtype=torch.uint8)
    codes, scales = taken_apart(name, blocks)
    assert codes.is_contiguous() and codes.nbytes + scales.nbytes == blocks.nbytes
    assert torch.equal(put_together(name, codes, scales), blocks)


def _launch(name: str, rows: int) -> None:
    block, outputs, inputs = BY_NAME[name], 4096, 4096
    codes, scales = taken_apart(name, torch.zeros(1, inputs // block.numbers, block.size, dtype=torch.uint8))
    codes, scales = (part.new_empty(outputs, *part.shape[1:]) for part in (codes, scales))
    x, weight = torch.empty(rows, inputs, dtype=torch.bfloat16), Packed(name, codes, scales)
    if rows == 1:
        packed_row(x, weight, None, MatvecShape(8, 2048, 4))
    else:
        packed_product(x, weight, None, MatmulShape(8, 64, 128, 4, 4))


LAUNCHES: list[Callable[[], object]] = [
    *(partial(_launch, block.name, 1) for block in QUANTIZED.values()),
    *(partial(_launch, name, 8) for name in ("q4_k", "q6_k")),
]
