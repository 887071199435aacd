"""Products with quantized weights on a GPU: every code beside float64, and layers in a decode's CUDA graph."""

import pytest
import torch

from kvern.kernel_list import Inputs
from kvern.kernel_list.quantized import FORMS, KERNELS, kinds_of_forms
from kvern.kernels.arrange import arrange
from kvern.kernels.codes import INTERLEAVED, readable
from kvern.kernels.linear import Around, MatmulShape, MatvecShape
from kvern.kernels.packed_product import packed_product, packed_row
from tests.kernels.models import LARGE_MODELS, spec_of
from tests.kernels.packed_weights import KINDS, make_packed, to_device
from tests.kernels.test_quantized_layers import layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = torch.device("cuda")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def poison() -> None:
    """What the next outputs are made in is no number."""
    torch.full((1 << 26,), float("nan"), device=DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products(kind: str, dtype: torch.dtype) -> None:
    made = make_packed(kind, 2064, 4096)
    packed, plain = readable(to_device(made.packed, DEVICE)), made.plain.to(DEVICE)
    x = torch.randn(200, 4096, device=DEVICE).to(dtype)
    expected = x.double() @ plain.T
    residual = torch.randn(1, 2064, device=DEVICE).to(dtype)
    whole = expected[:1] + residual.double()
    poison()
    for cut in (MatvecShape(8, 2048, 4), MatvecShape(8, 1024, 4, unroll=2)):
        assert relative_error(packed_row(x[:1], packed, None, cut), expected[:1]) < 0.01
    assert relative_error(packed_row(x[:1], packed, None, cut, Around(residual=residual.clone())), whole) < 0.01
    arranged = arrange(x, packed.order, "planes") if packed.code in INTERLEAVED else x
    arrived = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    cuts = (
        (8, MatmulShape(8, 64, 128, 4, 4, splits=2)),
        (32, MatmulShape(32, 64, 128, 4, 4)),
        (64, MatmulShape(64, 128, 128, 8, 3, splits=2)),
        (200, MatmulShape(128, 128, 64, 8, 3)),
        (200, MatmulShape(256, 128, 64, 8, 3)),
    )
    for rows, shape in cuts:
        for _ in range(3):
            found = packed_product(arranged[:rows], packed, None, shape, arrived)
            assert relative_error(found, expected[:rows]) < 0.01, shape
        assert not arrived.any()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_list(kernel: object) -> None:
    spec = spec_of("llama", LARGE_MODELS)
    forms = tuple(
        name for name in FORMS if name in ("fp8", "fp8_blocks", "int8", "int4", "int4_zero", "mxfp4", "nvfp4")
    )
    inputs = Inputs(DEVICE, torch.bfloat16, packed=kinds_of_forms(spec, torch.bfloat16, forms))
    for arguments in kernel.launched(spec, inputs):  # type: ignore[attr-defined]
        call = kernel.make(spec, inputs, *arguments)  # type: ignore[attr-defined]
        expected = call.reference()
        assert relative_error(call.launch(), expected) < 0.02, arguments


@pytest.mark.parametrize("kind", ["int4", "e4m3 row", "mxfp4"])
def test_layers_in_a_graph(kind: str) -> None:
    """Every way to multiply is captured, and waits for nothing; what it computes again is the same."""
    made = make_packed(kind, 256, 512)
    linear = layer(made, DEVICE)
    for rows in (1, 5, 40, 300):
        x = torch.randn(rows, 512, device=DEVICE)
        expected = linear(x).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = linear(x)
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        x.neg_()
        graph.replay()
        torch.testing.assert_close(out, -expected, rtol=1e-4, atol=1e-4)
