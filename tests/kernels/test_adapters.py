"""What adapters add to the rows that use them, beside float64."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from kvern.kernels.adapted_product import adapted_product
from kvern.kernels.adapters import add_adapters
from kvern.kernels.linear import MatmulShape
from kvern.layers.build import Build
from kvern.layers.fused_adapters import FusedAdaptedLinear
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearMethods
from kvern.layers.tuned_linear import TunedLinear
from tests.support.kernels.references import relative_error
from tests.support.pairwise import pairwise


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def launch(rows: int, inputs: int, sizes: tuple[int, ...], most: int = 64, deterministic: bool = False) -> None:
    outputs = sum(sizes)
    add_adapters(
        bf16(rows, outputs),
        bf16(rows, inputs),
        torch.zeros(rows, dtype=torch.int64),
        bf16(8, len(sizes), most, inputs),
        bf16(8, most, outputs),
        torch.ones(8, dtype=torch.int32),
        tuple(accumulate(sizes)),
        deterministic,
    )


def launch_product(rows: int, inputs: int, sizes: tuple[int, ...], shape: MatmulShape) -> None:
    outputs = sum(sizes)
    adapted_product(
        bf16(rows, inputs),
        bf16(outputs, inputs),
        None,
        torch.zeros(rows, dtype=torch.int64),
        bf16(8, len(sizes), 64, inputs),
        bf16(8, 64, outputs),
        torch.ones(8, dtype=torch.int32),
        tuple(accumulate(sizes)),
        shape,
        torch.zeros(1024, dtype=torch.int32),
    )


LAUNCHES: list[Callable[[], object]] = [
    lambda: launch(64, 4096, (4096, 1024, 1024)),
    lambda: launch(64, 4096, (14336, 14336)),
    lambda: launch(64, 14336, (4096,), most=128),
    lambda: launch(64, 896, (1,), most=16),
    lambda: launch(1024, 4096, (14336, 14336), deterministic=True),
    lambda: launch_product(64, 4096, (14336, 14336), MatmulShape(64, 128, 64, 4, 5)),
    lambda: launch_product(64, 14336, (4096,), MatmulShape(64, 128, 128, 8, 4, splits=2)),
]

PLACES = 4


def reference(
    out: torch.Tensor,
    x: torch.Tensor,
    adapters: list[int],
    down: torch.Tensor,
    up: torch.Tensor,
    ranks: list[int],
    ends: tuple[int, ...],
) -> torch.Tensor:
    result = out.double()
    for row, adapter_index in enumerate(adapters):
        begin = 0
        for part, end in enumerate(ends):
            if adapter_index >= 0:
                low = down[adapter_index, part, : ranks[adapter_index]].double() @ x[row].double()
                result[row, begin:end] += low @ up[adapter_index, : ranks[adapter_index], begin:end].double()
            begin = end
    return result


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("adapters", "sizes", "deterministic"),
    pairwise(
        [[2], [0, -1, 3, 3, 1, -1, 2], [1] * 70 + [-1] * 20 + [0] * 9],
        [[40], [150, 130], [136, 24, 8], [70, 130, 24, 8], [1]],
        [False, True],
    ),
)
def test_rows_get_what_their_adapter_adds(
    device: torch.device, adapters: list[int], sizes: list[int], deterministic: bool
) -> None:
    generator = torch.Generator().manual_seed(len(adapters))
    inputs, most, ranks = 1100, 48, [8, 40, 17, 0]
    outputs, ends = sum(sizes), tuple(accumulate(sizes))
    x = torch.randn(len(adapters), inputs + 8, generator=generator).to(device)[:, :inputs]
    out = torch.randn(len(adapters), outputs, generator=generator).to(device)
    down = torch.randn(PLACES, len(sizes), most, inputs, generator=generator).to(device) / inputs**0.5
    up = torch.randn(PLACES, most, outputs, generator=generator).to(device)
    expected = reference(out, x, adapters, down, up, ranks, ends)
    untouched = [row for row, adapter_index in enumerate(adapters) if adapter_index in (-1, 3)]
    before = out[untouched].clone()
    rows = torch.tensor(adapters, device=device)
    add_adapters(out, x, rows, down, up, torch.tensor(ranks, dtype=torch.int32, device=device), ends, deterministic)
    assert relative_error(out, expected) < 1e-5
    assert torch.equal(out[untouched], before)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("adapters", "sizes", "splits"),
    pairwise(
        [[2], [0, -1, 3, 3, 1, -1, 2], [1] * 17 + [-1] * 6 + [0] * 9],
        [[40], [160, 130], [128, 32, 32], [64, 32, 32, 32]],
        [1, 2],
    ),
)
def test_a_product_with_what_adapters_add(
    device: torch.device, adapters: list[int], sizes: list[int], splits: int
) -> None:
    generator = torch.Generator().manual_seed(len(adapters))
    inputs, most, ranks = 1100, 48, torch.tensor([8, 40, 17, 0], dtype=torch.int32, device=device)
    outputs, ends = sum(sizes), tuple(accumulate(sizes))
    x = torch.randn(len(adapters), inputs + 8, generator=generator).to(device)[:, :inputs]
    weight = torch.randn(outputs, inputs, generator=generator).to(device) / inputs**0.5
    bias = torch.randn(outputs, generator=generator).to(device) if splits == 2 else None
    down = torch.randn(PLACES, len(sizes), most, inputs, generator=generator).to(device) / inputs**0.5
    up = torch.randn(PLACES, most, outputs, generator=generator).to(device)
    base = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    expected = reference(base, x, adapters, down, up, ranks.tolist(), ends)
    arrived = torch.zeros(64, dtype=torch.int32, device=device)
    shape, rows = MatmulShape(16, 32, 64, 4, 2, splits), torch.tensor(adapters, device=device)
    out = adapted_product(x, weight, bias, rows, down, up, ranks, ends, shape, arrived)
    assert relative_error(out, expected) < 1e-5
    assert not arrived.any()


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    dtype = torch.float16
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 1024, generator=generator).to(device, dtype)
    down = torch.randn(2, 1, 16, 1024, generator=generator).to(device, dtype) / 32
    up = torch.randn(2, 16, 48, generator=generator).to(device, dtype)
    ranks = torch.tensor([16, 4], dtype=torch.int32, device=device)
    rows = torch.tensor([1, 0, -1, 0] * 20, device=device)
    out = torch.zeros(80, 48, dtype=dtype, device=device)
    add_adapters(out, x, rows, down, up, ranks, (48,), deterministic=True)
    alone = torch.zeros(1, 48, dtype=dtype, device=device)
    add_adapters(alone, x[1:2], rows[1:2], down, up, ranks, (48,), deterministic=True)
    assert torch.equal(alone[0], out[1])
    expected = (down[0, 0].double() @ x[1].double()) @ up[0].double()
    assert relative_error(alone[0], expected) < 2e-2


@pytest.mark.parametrize("outputs", [{"q": 128, "k": 64}, {"q": 128, "k": 40, "v": 24}], ids=["joined", "apart"])
def test_a_layer_with_adapters(device: torch.device, outputs: dict[str, int]) -> None:
    """Of few rows and of many, of parts that fit the tiles and of others; one adapter does not change all parts."""
    generator = torch.Generator().manual_seed(2)
    build = Build(torch.float16, device, 16, linear=LinearMethods(TunedLinear(device, "auto")))
    layer = FusedAdaptedLinear(Linear(256, outputs, build, bias=True), places=3, rank=24, deterministic=False)
    layer.base.fill_random(torch.Generator(device).manual_seed(2))
    matrices = {
        (index, part): (torch.randn(rank, 256, generator=generator) / 16, torch.randn(size, rank, generator=generator))
        for index, rank in ((0, 24), (2, 8))
        for part, size in outputs.items()
        if (index, part) != (2, "k")
    }
    for index in (0, 2):
        parts = {part: pair for (other, part), pair in matrices.items() if other == index}
        layer.load(index, {part: (down.half(), up.half()) for part, (down, up) in parts.items()})
    for rows in (1, 20, 70):
        x = torch.randn(rows, 256, generator=generator).half().to(device)
        using = torch.arange(rows, device=device) % 4 - 1
        expected = layer.base(x).double()
        ends = dict(zip(outputs, accumulate(outputs.values()), strict=True))
        for (index, part), (down, up) in matrices.items():
            own = using == index
            low = x[own].double() @ down.half().to(device, torch.float64).T
            columns = slice(ends[part] - outputs[part], ends[part])
            expected[own, columns] += low @ up.half().to(device, torch.float64).T
        assert relative_error(layer(x, using), expected) < 2e-3
