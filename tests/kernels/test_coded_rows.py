"""Norms and activations that make the codes of the next product: an engine answers as if each were rounded alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.formats.gpu.candidates import CodesShape, codes_candidates
from kvern.formats.gpu.products import PackedProducts
from kvern.formats.method import QuantizedMethod
from kvern.formats.scaled import Block, Rounding, Scaled
from kvern.kernels import activation, norm
from kvern.kernels.activation import coded_gated_activation, gated_activation
from kvern.kernels.norm import add_rms_norm, coded_rms_norm, rms_norm
from kvern.kernels.quantize_rows import RowCodes
from kvern.layers.build import Build
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearMethods
from kvern.layers.ops import ops_of
from tests.support.families import make_checkpoint
from tests.support.kernels.device_engines import OPTIONS
from tests.support.kernels.references import CODINGS, codings
from tests.support.outputs import chosen_logprobs, token_ids
from tests.support.peft_adapters import make_adapter

pytestmark = pytest.mark.usefixtures("few_products")

PROMPTS = [[5, 9, 17, 33, 2, 81], [5, 9]]
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
KERNELS = {"coded_rms_norm": norm, "coded_gated_activation": activation}
"""The modules of the kernels that make codes."""


def always_codes(self: PackedProducts, rows: int) -> CodesShape:
    """A way to multiply, for any number of rows."""
    return CodesShape(16, 64, 64, 4, 2)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The launches of each kernel that makes codes, by name."""
    counts = dict.fromkeys(KERNELS, 0)

    def count(name: str) -> Callable[..., RowCodes]:
        launch = getattr(KERNELS[name], name)

        def counting(*arguments: Any) -> RowCodes:
            counts[name] += 1
            made: RowCodes = launch(*arguments)
            return made

        return counting

    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, count(name))
    ops_of.cache_clear()  # it has the kernels themselves
    yield counts
    ops_of.cache_clear()


def options(**others: Any) -> dict[str, Any]:
    made = {"quantization": "int8", "head_quantization": "none"}  # as on a GPU
    return OPTIONS | made | {"dtype": "bfloat16" if torch.cuda.is_available() else "float32"} | others


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.nightly)])
def test_engines_answer_alike(
    family: str,
    tmp_path: Path,
    on_device: Callable[..., LLM],
    counts: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_checkpoint(family, tmp_path, num_hidden_layers=2)
    monkeypatch.setattr(PackedProducts, "_way", always_codes)
    found = on_device(tmp_path, **options()).generate(PROMPTS, PARAMS)
    made = dict(counts)
    assert all(made.values()) or (family != "llama" and made["coded_rms_norm"] > 0)
    monkeypatch.setattr(QuantizedMethod, "coding", lambda *_: None)
    expected = on_device(tmp_path, **options()).generate(PROMPTS, PARAMS)
    assert token_ids(found) == token_ids(expected) and list(chosen_logprobs(found)) == list(chosen_logprobs(expected))
    assert counts == made


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_engines_answer_alike_on_a_gpu(
    tmp_path: Path, on_device: Callable[..., LLM], counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    test_engines_answer_alike("llama", tmp_path, on_device, counts, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="sums depend on how a GPU cuts rows")
@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("width", [768, 4096, 14336])
def test_kernels_of_large_rows_make_the_same_codes(name: str, width: int) -> None:
    device = torch.device("cuda")
    coding, weight = codings(device)[name], torch.randn(width, device=device, dtype=torch.bfloat16)
    for rows in (1, 32, 700):
        x, update = torch.randn(2, rows, width, device=device).bfloat16()
        both = 2 * torch.randn(rows, 2 * width, device=device, dtype=torch.bfloat16)
        alone, residual, again = coding(rms_norm(x, weight, 1e-6)), x.clone(), x.clone()
        pairs = [
            (coded_rms_norm(x, None, weight, 1e-6, coding), alone),
            (
                coded_rms_norm(residual, update, weight, 1e-6, coding),
                coding(add_rms_norm(again, update, weight, 1e-6)),
            ),
            (coded_gated_activation(both, "silu", coding), coding(gated_activation(both, "silu"))),
        ]
        assert torch.equal(residual, again)
        for found, expected in pairs:
            assert torch.equal(found.codes.view(torch.int8), expected.codes.view(torch.int8))
            assert torch.equal(found.scales, expected.scales)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_get_numbers(
    tmp_path: Path, on_device: Callable[..., LLM], counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path / "model", num_hidden_layers=2)
    path = make_adapter(tmp_path / "model", tmp_path / "adapter", 1, r=3)
    monkeypatch.setattr(PackedProducts, "_way", always_codes)
    places = {"max_adapters": 1, "max_adapter_rank": 16, "adapters": {"one": str(path)}}
    llm = on_device(tmp_path / "model", **options(**places))
    counts.update(dict.fromkeys(counts, 0))
    llm.generate(PROMPTS, PARAMS, adapter="one")
    assert not any(counts.values())
    llm.generate(PROMPTS, PARAMS)
    assert all(counts.values())


@pytest.mark.parametrize("activations", [Rounding("int8"), Rounding("int8", 128)])
def test_a_layer_takes_codes_where_its_way_multiplies_them(device: torch.device, activations: Rounding) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    form = Scaled("int8", Block(1, activations.group), activations)
    build = Build(dtype, device, 1, frozenset({"quantized"}), linear=LinearMethods(form))
    linear = Linear(256, {"o_proj": 128}, build, bias=True)
    linear.fill_random(torch.Generator(device).manual_seed(0))
    linear.finish()
    x = torch.randn(70, 256, device=device, dtype=dtype)
    for way in linear.method.candidates()[1024]:
        linear.method.choose(1024, way)
        coding = linear.method.coding(1024)
        assert (coding is not None) == (isinstance(way, str) or (isinstance(way, tuple) and way[-1] == "codes"))
    assert linear.method.coding(8) is None
    linear.method.choose(1024, tuple(codes_candidates(1024)[0]))
    if coding := linear.method.coding(len(x)):  # others on a GPU, where more numbers of rows are apart
        assert torch.equal(linear(coding(x)), linear(x))
    plain = Linear(256, {"o_proj": 128}, Build(dtype, device, 1))
    assert plain.method.coding(300) is None
    with pytest.raises(NotImplementedError, match="plain rows"):
        plain(RowCodes(x, x))
