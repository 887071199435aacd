"""The products for Hopper beside float64. Gluon has no interpreter: they run on such a GPU alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kvern.kernels.linear import ProductShape, StreamShape
from tests.support.kernels.moe_references import experts_reference
from tests.support.kernels.references import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no GPU of compute capability 9.0",
    ),
]
ACTIVATIONS = (None, "silu", pytest.param("gelu_tanh", marks=pytest.mark.nightly))
STREAMS = (
    StreamShape(8, 64, 128, 6, 1),
    StreamShape(16, 64, 128, 6, 2),
    StreamShape(32, 128, 64, 7, 1),
    StreamShape(128, 128, 64, 6, 1),
)


def _inputs(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x whose rows lie apart, weights and a bias."""
    generator = torch.Generator("cuda").manual_seed(rows + outputs + inputs)
    x = torch.randn(rows, inputs + 24, generator=generator, device="cuda").to(dtype)[:, :inputs]
    weight = (torch.randn(outputs, inputs, generator=generator, device="cuda") / inputs**0.5).to(dtype)
    return x, weight, torch.randn(outputs, generator=generator, device="cuda").to(dtype)


def _expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    out = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if activation is None:
        return out
    gate, up = out.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize("shape", STREAMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (1000, 200), (20_000, 328), (512, 5000)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_stream_product(shape: StreamShape, outputs: int, inputs: int, activation: str | None) -> None:
    """Twice over the same counters; a row by itself is the same."""
    from kvern.kernels.stream_hopper import stream_product

    if activation is not None and (shape.outputs < 128 or shape.splits > 1 or outputs % 16):
        return
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
    dtype = torch.float16 if inputs == 328 else torch.bfloat16
    x, weight, bias = _inputs(shape.rows - 3, outputs, inputs, dtype)
    for added in (None, bias):
        out = stream_product(x, weight, added, shape, arrived, activation)
        assert relative_error(out, _expected(x, weight, added, activation)) < 5e-3
    assert torch.equal(stream_product(x[-1:], weight, bias, shape, arrived, activation)[0], out[-1])
    assert not arrived.any()


@pytest.mark.parametrize("rows", [1, 64, 130, 700])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (1000, 200), (20_000, 136), (20_000, 328)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_product(rows: int, outputs: int, inputs: int, activation: str | None) -> None:
    """Of few inputs too, where a program's first tile has fewer steps than there are stages."""
    from kvern.kernels.product_hopper import product

    if activation is not None and outputs % 16:
        return
    dtype = torch.float16 if inputs == 328 else torch.bfloat16
    x, weight, bias = _inputs(rows, outputs, inputs, dtype)
    for group, added in ((1, None), (2, bias), (8, None)):
        out = product(x, weight, added, ProductShape(group), activation)
        assert relative_error(out, _expected(x, weight, added, activation)) < 5e-3


BLOCKS = pytest.mark.parametrize(("each", "rows"), [(1, 16), (10, 32), (20, 64), (40, 128)])
"""Tokens for each expert, and the rows of blocks that they get."""


def _routing(experts: int, top_k: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts: one is everybody's, and one gets no token if it can be helped."""
    scores = torch.rand(tokens, experts, device="cuda")
    scores[:, 0] += 1.0
    if experts > top_k:
        scores[:, -1] = -1.0
    weights, chosen = scores.topk(top_k)
    return weights, chosen.int()


def _repeated(launch: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Results of launches behind one another, on memory that held no numbers, and of some in a graph."""
    found = []
    for _ in range(3):
        poison = torch.full((1 << 22,), float("nan"), device="cuda")
        del poison
        found.append(launch())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found += [launch() for _ in range(3)]
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return found


@BLOCKS
@pytest.mark.parametrize(("experts", "top_k", "hidden", "width"), [(8, 2, 64, 48), (5, 1, 208, 336), (3, 3, 512, 768)])
def test_experts(
    monkeypatch: pytest.MonkeyPatch, experts: int, top_k: int, hidden: int, width: int, each: int, rows: int
) -> None:
    from kvern.kernels import moe_direct
    from kvern.kernels.moe import fused_experts, rows_of_block

    monkeypatch.setattr(moe_direct, "SHARED_BYTES", -1)
    tokens = each * experts // top_k + 3
    assert rows_of_block(tokens * top_k, experts) == rows
    x, gate_up, _ = _inputs(tokens, experts * 2 * width, hidden, torch.bfloat16)
    _, down, _ = _inputs(1, experts * hidden, width, torch.bfloat16)
    gate_up, down = gate_up.view(experts, 2 * width, hidden), down.view(experts, hidden, width)
    weights, chosen = _routing(experts, top_k, tokens)
    expected = experts_reference(x, gate_up, down, weights, chosen, "silu")
    for out in _repeated(lambda: fused_experts(x, gate_up, down, weights, chosen, "silu", hopper=True)):
        assert relative_error(out, expected) < 1e-2


@BLOCKS
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "width", "per"), [(8, 2, 64, 48, 1), (5, 1, 208, 336, 1), (3, 3, 512, 768, 512)]
)
@pytest.mark.parametrize("late", [False, True])
def test_experts_of_codes(
    experts: int, top_k: int, hidden: int, width: int, per: int, each: int, rows: int, late: bool
) -> None:
    """Of e4m3, with scales of whole rows; where codes are made `late`, weights are fetched before they are there."""
    from kvern.kernels.moe_scaled import coded_experts, rows_of_block
    from kvern.kernels.packed import Packed
    from kvern.kernels.quantize_rows import Coding

    tokens, rounded = each * experts // top_k + 3, Coding("e4m3", late=late)
    assert rows_of_block(tokens * top_k, experts) == rows
    x, gate_up, _ = _inputs(tokens, experts * 2 * width, hidden, torch.bfloat16)
    _, down, _ = _inputs(1, experts * hidden, width, torch.bfloat16)
    weights, chosen = _routing(experts, top_k, tokens)

    def numbers(values: torch.Tensor) -> torch.Tensor:
        codes, scale = rounded(values)
        return codes.double() * scale.double()

    matrices = []
    for matrix in (gate_up, down):
        codes = (matrix * 400).to(torch.float8_e4m3fn)
        scale = torch.rand(matrix.shape[0] // per, 1, device="cuda") / 400 + 1 / 800
        packed = Packed("e4m3", codes, scale, group=matrix.shape[1], outputs_per_scale=per)
        matrices.append((packed, codes.double() * scale.double().repeat_interleave(per, 0)))
    (one, one_plain), (other, other_plain) = matrices
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
    values = numbers(x)
    for expert in range(experts):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = (values[token] @ one_plain.view(experts, 2 * width, hidden)[expert].T).chunk(2, -1)
            part = numbers((F.silu(gate) * up).bfloat16()) @ other_plain.view(experts, hidden, width)[expert].T
            expected.index_add_(0, token, part * weights[token, place].double()[:, None])
    for hopper in (True, False) if width == 768 and not late else (True,):
        launch = partial(coded_experts, x, one, other, weights, chosen, "silu", experts=experts, hopper=hopper)
        for out in _repeated(partial(launch, rounded=(rounded, rounded))):
            assert relative_error(out, expected) < 2e-2  # all codes of a row move with its largest number
