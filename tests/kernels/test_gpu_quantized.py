"""Products with quantized weights on a GPU: every code beside float64, and layers in a decode's CUDA graph."""

import pytest
import torch

from kvern.formats.gpu.candidates import ONE_ROW, candidates_of, fitted
from kvern.kernels.arrange import arrange
from kvern.kernels.codes import INTERLEAVED, readable
from kvern.kernels.linear import Around, MatmulShape, MatvecShape
from kvern.kernels.packed_product import packed_product, packed_row
from kvern.kernels.resident_row import ResidentShape, keeps_row, resident_row
from tests.kernels.models import LARGE_MODELS, spec_of
from tests.kernels.packed_weights import KINDS, made_layer, make_packed, to_device
from tests.support.kernel_list import Inputs, Kernel, codes, packed_hopper, quantized
from tests.support.kernel_list.quantized import FORMS, kinds_of_forms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = torch.device("cuda")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def poison() -> None:
    """What the next outputs are made in is no number."""
    torch.full((1 << 26,), float("nan"), device=DEVICE)


CELLS = [
    pytest.param(
        kind, dtype, marks=() if dtype == torch.bfloat16 or kind in ("e4m3 row", "int4") else pytest.mark.nightly
    )
    for kind in KINDS
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("kind", "dtype"), CELLS)
def test_products(kind: str, dtype: torch.dtype) -> None:
    """Whatever the tuner may choose of; products of several steps show whether one overwrites what another reads."""
    made = make_packed(kind, 2064, 4096)
    packed, plain = readable(to_device(made.packed, DEVICE)), made.plain.to(DEVICE)
    x = torch.randn(300, 4096, device=DEVICE).to(dtype)
    expected = x.double() @ plain.T
    residual = torch.randn(1, 2064, device=DEVICE).to(dtype)
    whole = expected[:1] + residual.double()
    poison()
    around = Around(residual=residual.clone())
    assert relative_error(packed_row(x[:1], packed, None, ONE_ROW, around), whole) < 0.01
    arranged = arrange(x, packed.order, "planes") if packed.code in INTERLEAVED else x
    arrived = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    timed = {fitted(shape, packed.code): most for most, shapes in candidates_of(dtype).items() for shape in shapes}
    for shape, most in timed.items():
        rows = min(most, len(x))
        for _ in range(3):
            if isinstance(shape, MatvecShape):
                found = packed_row(x[:1], packed, None, shape)
            elif isinstance(shape, MatmulShape):
                found = packed_product(arranged[:rows], packed, None, shape, arrived)
            else:
                break
            assert relative_error(found, expected[: len(found)]) < 0.01, shape
        assert not arrived.any(), shape


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.startswith(("e4m3", "int4", "mxfp4", "nvfp4", "gguf q4_k"))]
)
@pytest.mark.parametrize(("inputs", "shapes"), [(4096, ((4, 4, 4),)), (14336, ((4, 8, 1),)), (1280, ((2, 4, 4),))])
def test_rows_that_stay(
    monkeypatch: pytest.MonkeyPatch, kind: str, inputs: int, shapes: tuple[tuple[int, int, int], ...]
) -> None:
    """Inputs that fill the last step and not, in many steps of each program, beside float64."""
    monkeypatch.setattr("kvern.kernels.resident_row.processors", lambda _: 8)
    made = make_packed(kind, 1044, inputs)
    packed, plain = readable(to_device(made.packed, DEVICE)), made.plain.to(DEVICE)
    if not keeps_row(packed.code, packed.group, inputs, DEVICE):
        pytest.skip("the card does not know the code's numbers")
    x = torch.randn(1, inputs, device=DEVICE).bfloat16()
    expected = x.double() @ plain.T
    for shape in map(ResidentShape._make, shapes):
        poison()
        assert relative_error(resident_row(x, packed, None, shape), expected) < 4e-3, shape
    if inputs == 14336:
        residual = torch.randn(1, 1044, device=DEVICE)
        found = resident_row(x, packed, None, shape, Around(residual=residual.clone()))
        assert relative_error(found, expected + residual) < 1e-3
    elif inputs == 4096:
        gain = torch.rand(inputs, device=DEVICE) + 0.5
        normal = x.double() / (x.double().square().mean() + 1e-6).sqrt() * gain.double()
        gate, up = (normal @ plain.T).chunk(2, -1)
        found = resident_row(x.float(), packed, None, ResidentShape(2, 4, 4), Around(gain, 1e-6, "silu"))
        assert relative_error(found, torch.nn.functional.silu(gate) * up) < 4e-3


DAILY = ("fp8", "fp8_blocks", "int8", "int4_zero", "nvfp4")
FORM_CELLS = [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in FORMS]


@pytest.mark.parametrize("form", FORM_CELLS)
@pytest.mark.parametrize(
    "kernel", [*quantized.KERNELS, *codes.KERNELS, *packed_hopper.KERNELS], ids=lambda kernel: kernel.name
)
def test_the_list(kernel: Kernel, form: str) -> None:
    """What else a model launches, beside the products above."""
    spec = spec_of("llama", LARGE_MODELS)
    kinds = [kind for kind in kinds_of_forms(spec, torch.bfloat16, (form,)) if kind.inputs == spec.hidden_size]
    inputs = Inputs(DEVICE, torch.bfloat16, packed=kinds)
    for arguments in kernel.launched(spec, inputs):
        call = kernel.make(spec, inputs, *arguments)
        expected = call.reference()
        assert relative_error(call.launch(), expected) < 0.02, arguments


@pytest.mark.parametrize("kind", ["int4", "e4m3 row", "mxfp4"])
def test_layers_in_a_graph(kind: str) -> None:
    """Every way to multiply is captured, and waits for nothing; what it computes again is the same."""
    made = make_packed(kind, 256, 512)
    linear = made_layer(made, DEVICE)
    for rows in (1, 5, 40, 300):
        x = torch.randn(rows, 512, device=DEVICE)
        expected = linear(x).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):  # see `time_calls`
            out = linear(x)
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        x.neg_()
        graph.replay()
        torch.testing.assert_close(out, -expected, rtol=1e-4, atol=1e-4)
