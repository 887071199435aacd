"""Kernels for CPUs of what stands between a layer's products and its attention, beside float64."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.attention.eight_bit import EightBit, codes_of
from kvern.attention.memory import CacheOptions
from kvern.attention.torch_sdpa import TorchAttention
from kvern.cpu.rows import ACTIVATIONS, NORMS, activate, add_norm
from kvern.device.input_batch import build_input_batch
from kvern.device.rows import BatchRows
from kvern.layers.attention import make_heads
from kvern.layers.build import Build
from kvern.layers.compiled_heads import CompiledHeads
from kvern.layers.head_norms import HeadNorm, RowNorm
from kvern.layers.norm import Norm
from kvern.layers.rope import RopeTable, positions_alone
from kvern.layers.step_context import StepContext
from kvern.models.loader import LoadOptions, load_model
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import NewRequest, ScheduledTokens
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, NormSpec, QueryKeyNormSpec, RopeSpec
from tests.support.cache_folder import load_kernels
from tests.support.families import make_checkpoint

WIDTHS = (1, 7, 16, 48, 389, 4099)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> None:
    load_kernels("cpu_layers", request.param)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    """Each number, but for its rounding, within 2e-6 of itself or of what is usual among them."""
    usual = expected.abs().mean()
    limit = times * 2e-6 + (0.0 if dtype == torch.float32 else 2.0**-8)
    assert ((found.double() - expected).abs() <= limit * expected.abs() + times * 2e-6 * usual).all()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_adds_to_the_residual(kind: str, dtype: torch.dtype) -> None:
    for rows, width in zip((1, 2, 9, 17, 5, 40), WIDTHS, strict=True):
        hidden, update = numbers(2, rows, width, dtype=dtype, seed=width)
        weight, bias = numbers(2, width, seed=1)
        hidden += 0.0 if kind == "rms" else 3.0
        total = (hidden + update).double()
        for given in ((weight, bias), (weight, None), (None, None)):
            residual = hidden.clone()
            centred = total if kind == "rms" else total - total.mean(-1, keepdim=True)
            expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            expected = expected if given[0] is None else expected * given[0].double()
            expected = expected if given[1] is None else expected + given[1].double()
            if kind == "rms" or width > 1:
                near(add_norm(residual, update, *given, 1e-5, NORMS[kind]), expected, dtype, times=4.0)
                assert torch.equal(residual, hidden + update)
                near(add_norm(residual, None, *given, 1e-5, NORMS[kind]), expected, dtype, times=4.0)
                assert torch.equal(residual, hidden + update)


def exact(kind: str, x: Tensor) -> Tensor:
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "relu2":
        return F.relu(x).square()
    if kind == "quick_gelu":
        return x * (1.702 * x).sigmoid()
    if kind == "gelu":
        return x * torch.special.erfc(-x / 2**0.5) / 2
    return F.silu(x) if kind == "silu" else F.relu(x)


@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind != "clamped_swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(kind: str, dtype: torch.dtype) -> None:
    for rows, width in zip((1, 2, 9, 17, 5, 3), WIDTHS, strict=True):
        x = numbers(rows, 2 * width + 1, dtype=dtype, scale=3.0, seed=width)[:, 1:]  # with gaps between rows
        gate, up = x.double().chunk(2, -1)
        near(activate(x, ACTIVATIONS[kind], True), exact(kind, gate) * up, dtype)
        near(activate(x, ACTIVATIONS[kind], False), exact(kind, x.double()), dtype)
    assert activate(x[:0], ACTIVATIONS[kind], True).shape == (0, width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_swiglu_is_clamped(dtype: torch.dtype) -> None:
    x = numbers(9, 2 * 389, dtype=dtype, scale=6.0)
    gate, up = x.double().chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    near(activate(x, ACTIVATIONS["clamped_swiglu"], True), (up + 1) * gate * (1.702 * gate).sigmoid(), dtype)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_keep_their_digits_far_out(kind: str) -> None:
    x = torch.linspace(-12, 12, 4001)[None]
    expected = exact(kind, x.double())
    if kind == "gelu_tanh":
        inner = x.double() * (2 / torch.pi) ** 0.5 * (1 + 0.044715 * x.double().square())
        expected = x.double() * torch.sigmoid(2 * inner)
    found = activate(x, ACTIVATIONS[kind], False).double()
    large = expected.abs() > 1e-30
    exponent = x.double().abs() if kind == "silu" else x.double().square().clamp(min=1.0)
    limit = 5e-7 * (1 + (0.2 * exponent if kind == "gelu_tanh" else 0.0))
    assert ((found - expected).abs() <= limit * expected.abs())[large].all()
    odd = torch.tensor([[float("inf"), float("nan"), -1e30, 1e30, 3e38, -3e38]])
    found = activate(odd, ACTIVATIONS[kind], False)[0]
    assert found[0] == float("inf") and found[1].isnan() and found[2] == 0 and found[3] == odd[0, 3]


NORM_SCOPES = {
    "none": None,
    "head": QueryKeyNormSpec(NormSpec("rms", 1e-5)),
    "each head": QueryKeyNormSpec(NormSpec("layer", 1e-5, bias=True), "each_head"),
    "after": QueryKeyNormSpec(NormSpec("rms", 1e-5), after_rope=True),
    "row": QueryKeyNormSpec(NormSpec("rms", 1e-5), "row"),
    "row, layer": QueryKeyNormSpec(NormSpec("layer", 1e-5, bias=True), "row"),
}
ROPES = {
    "halves": RopeSpec(1e4, 24),
    "pairs": RopeSpec(1e4, 24, interleaved=True),
    "some": RopeSpec(1e4, 8),
    "some pairs": RopeSpec(1e4, 10, interleaved=True),
    "none": None,
}
SIZE, TOKENS = 4, 11


class Recorded:
    """A `PagedAttend` that attends to nothing: it gives the queries back."""

    def __init__(self, cache: Tensor, scales: Tensor | None, slot_mapping: Tensor) -> None:
        self.stored, self.of_codes, self.slots = cache, scales, slot_mapping

    def slot_mapping(self, layer: int) -> Tensor:
        return self.slots

    def cache(self, layer: int) -> Tensor:
        return self.stored

    def scales(self, layer: int) -> Tensor | None:
        return self.of_codes

    def over_cache(self, layer: int, query: Tensor, wanted: Tensor | None = None) -> Tensor:
        return query if wanted is None else query[wanted]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for kind, new in enumerate((key, value)):
            self.stored[kind].flatten(0, 1)[self.slots] = new.to(self.stored.dtype)
        return query


def made(scope: str, rope: str, dtype: torch.dtype, dim: int = 24) -> tuple[CompiledHeads, RopeTable | None]:
    layer = LayerSpec(AttentionSpec(6, 2, dim, 0.2), ROPES[rope], MlpSpec(8))
    model = ModelSpec("", 10, 16, (layer,), 64, query_key_norm=NORM_SCOPES[scope])
    build = Build(dtype, torch.device("cpu"), 64, frozenset({"cpu_layers"}))
    attention = CompiledHeads(0, model, layer, build)
    for seed, parameter in enumerate(attention.parameters()):
        parameter.copy_(numbers(*parameter.shape, seed=seed))
    return attention, None if layer.rope is None else RopeTable(layer.rope, build)


def in_double(attention: CompiledHeads, qkv: Tensor, scope: str, rope: str, positions: Tensor) -> Tensor:
    """Queries and keys [T, 8, dim], normalised and rotated."""
    spec, table = NORM_SCOPES[scope], ROPES[rope]
    x = qkv.double()[:, :8]

    def normal(x: Tensor) -> Tensor:
        assert spec is not None
        norm = attention.norm_after if spec.after_rope else attention.norm_before
        parts = []
        for heads, name in ((slice(0, 6), "q_norm"), (slice(6, 8), "k_norm")):
            part = x[:, heads]
            if isinstance(norm, RowNorm):
                one = getattr(norm, name)
                weight, bias, part = one.weight, one.bias, part.flatten(1)
            else:
                assert isinstance(norm, HeadNorm)
                weight, bias = norm.weight[heads], None if norm.bias is None else norm.bias[heads]
            part = part if spec.norm.kind == "rms" else part - part.mean(-1, keepdim=True)
            part = part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
            parts.append((part if bias is None else part + bias).view(len(x), -1, x.shape[-1]))
        return torch.cat(parts, 1)

    if spec is not None and not spec.after_rope:
        x = normal(x)
    if table is not None:
        angles = positions[:, None] * torch.tensor(table.scaling.frequencies(table.theta, table.dim, 64)[0]).double()
        turn, rest = torch.polar(torch.ones_like(angles), angles)[:, None], x[..., table.dim :]
        head = x[..., : table.dim]
        planes = head.unflatten(-1, (-1, 2)) if table.interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
        planes = torch.view_as_real(torch.view_as_complex(planes.contiguous()) * turn)
        x = torch.cat(((planes if table.interleaved else planes.transpose(-1, -2)).flatten(-2), rest), -1)
    if spec is not None and spec.after_rope:
        x = normal(x)
    return x


@pytest.mark.sample(20)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("scope", NORM_SCOPES)
def test_queries_are_rotated_and_keys_and_values_stored(scope: str, rope: str) -> None:
    dtype = torch.bfloat16 if rope == "some" else torch.float32
    with torch.inference_mode():
        attention, table = made(scope, rope, dtype)
        qkv = numbers(TOKENS, 10, 24, dtype=dtype, seed=5)
        positions = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:TOKENS]
        expected = in_double(attention, qkv, scope, rope, positions)
        rotation = positions_alone(positions) if table is None else table(positions)
        places = torch.randperm(5 * SIZE, generator=torch.Generator().manual_seed(2))[:TOKENS]
        for stored in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn):
            poison = 99 if stored == torch.int8 else float("nan")
            cache = torch.full((2, 5, SIZE, 2, 24), poison).to(stored)
            scales = numbers(2, 2).abs() / 20 + 0.01 if stored.itemsize == 1 else None
            paged = Recorded(cache, scales, places)
            given = qkv.clone().flatten(1)
            wanted = torch.tensor([3, 0])
            found = attention(given, StepContext(rotation, paged, wanted=wanted))
            loose = 4.0 if dtype == torch.float32 else 12000.0  # cosines and sines are rounded too
            near(found, expected[wanted, :6].flatten(1), dtype, loose)
            new = torch.stack((expected[:, 6:], qkv[:, 8:].double()))
            seen = cache.flatten(1, 2)
            if scales is None:
                near(seen[:, places].float(), new, stored, loose if stored != torch.float16 else max(loose, 4000.0))
            else:
                for kind in range(2):
                    codes = codes_of(new[kind], scales[kind], stored).double()
                    smallest = 2.0**-6 if dtype == torch.float32 else 4.0
                    step = 1.0 if stored == torch.int8 else codes.abs().clamp(min=smallest) / 8
                    assert ((seen[kind, places].double() - codes).abs() <= step).all()
                    if dtype == torch.float32:
                        assert (seen[kind, places].double() != codes).double().mean() < 0.02
            free = torch.ones(5 * SIZE, dtype=torch.bool).index_fill_(0, places, False)
            rest = seen[:, free].float()
            assert (rest == 99).all() if stored == torch.int8 else rest.isnan().all()


def test_codes_are_those_of_pytorch() -> None:
    """All numbers near those between codes, the largest and what is none."""
    with torch.inference_mode():
        attention, _ = made("none", "none", torch.float32, dim=512)
        for stored in (torch.float8_e4m3fn, torch.int8):
            every = torch.arange(256, dtype=torch.uint8).view(stored).float().nan_to_num()
            middle = (every.sort().values[1:] + every.sort().values[:-1]) / 2
            values = torch.cat((every, middle, torch.tensor([1e9, -1e9, 1e-12, 0.0])))
            values = torch.cat((values, values.nextafter(torch.tensor(1e9)), values.nextafter(torch.tensor(-1e9))))
            qkv = torch.zeros(2, 10, 512)
            qkv[0, 8:] = F.pad(values, (0, 2048 - len(values)))[:1024].view(2, 512)
            qkv[1, 8:] = F.pad(values, (0, 2048 - len(values)))[1024:].view(2, 512)
            cache = torch.zeros(2, 1, 2, 2, 512, dtype=stored)
            places = torch.tensor([1, 0])
            expected = codes_of(qkv[:, 8:], torch.ones(2), stored)
            paged = Recorded(cache, torch.ones(2, 2), places)
            attention(qkv.flatten(1), StepContext(positions_alone(places), paged))
            assert torch.equal(cache[1, 0, places].float(), expected.float())


@pytest.mark.parametrize("keys_are_values", [False, True])
def test_values_are_normalised_and_may_be_keys_before_norm_and_rotation(keys_are_values: bool) -> None:
    norm = QueryKeyNormSpec(NormSpec("rms", 1e-5), values=True)
    layer = LayerSpec(AttentionSpec(6, 2, 24, 0.2, keys_are_values=keys_are_values), ROPES["halves"], MlpSpec(8))
    borrowing = replace(layer, mixer=replace(layer.attention, cache_of=0))
    model = ModelSpec("", 10, 16, (layer, borrowing), 64, query_key_norm=norm)
    build = Build(torch.float32, torch.device("cpu"), 64, frozenset({"cpu_layers"}))
    positions, places = torch.arange(7, 7 + TOKENS), torch.randperm(5 * SIZE)[:TOKENS]
    with torch.inference_mode():
        table = RopeTable(RopeSpec(1e4, 24), build)
        qkv = numbers(TOKENS, 8 if keys_are_values else 10, 24, seed=5)
        queries = []
        for stored in (torch.float32, torch.float16):  # the kernel stores in one, and PyTorch in the other
            attention = make_heads(0, model, layer, build)
            for seed, parameter in enumerate(attention.parameters()):
                parameter.copy_(numbers(*parameter.shape, seed=seed))
            paged = Recorded(torch.zeros(2, 5, SIZE, 2, 24, dtype=stored), None, places)
            queries.append(attention(qkv.clone().flatten(1), StepContext(table(positions), paged)))
            values = qkv[:, -2:].double()
            values = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            found = paged.stored[1].flatten(0, 1)[places]
            near(found.float(), values, stored, 4.0 if stored == torch.float32 else 4000.0)
        assert torch.equal(queries[0], queries[1])
        other = make_heads(0, model, borrowing, build)
        weight = attention.get_submodule("norm_before").get_parameter("weight")
        other.get_submodule("norm_before").get_parameter("weight").copy_(weight[:6])
        before = paged.stored.clone()
        assert torch.equal(other(qkv[:, :6].flatten(1), StepContext(table(positions), paged)), queries[0])
        assert torch.equal(paged.stored, before), "a layer without keys stores none"


def _places(blocks: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(blocks, generator=generator).tolist()


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "family", ["qwen3", "gemma2", "cohere", "olmo2", "phi", "gemma4", "gemma4_experts", "gemma4_vision", "gemma3n"]
)
def test_a_model_of_kernels_is_that_of_pytorch(family: str, tmp_path: Path) -> None:
    """With one block table for both: a prompt, then one token more, which is the only one wanted."""
    folder = make_checkpoint(family, tmp_path)
    plain = load_model(folder)
    compiled = load_model(folder, LoadOptions(kernels=frozenset({"cpu_layers"})))
    assert "Compiled" in repr(compiled) and "Compiled" not in repr(plain)
    tokens = torch.randint(3, 131, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    results = []
    for decoder in (plain, compiled):
        layers = decoder.spec.attentions
        for eight in (None, torch.int8):
            scales = [torch.full((2, layer.kv_heads), 0.05) for layer in layers]
            eight_bit = None if eight is None else EightBit(scales, torch.float32)
            attention = TorchAttention(CacheOptions(layers, 12, SIZE, eight or torch.float32, eight_bit=eight_bit))
            rows = BatchRows(2, 64, 12, torch.device("cpu"))
            params = ResolvedParams(temperature=0.0)
            asked = RequestSpec("", PromptInput(tokens), params, 1)
            rows.join([NewRequest(1, asked, params, 0, tokens, _places(12, torch.Generator().manual_seed(0)))])
            with torch.inference_mode():
                for start, count, wanted in ((0, 29, None), (29, 1, torch.tensor([0]))):
                    batch = build_input_batch(rows, [ScheduledTokens(1, start, count, 1)], SIZE)
                    hidden = decoder(batch.token_ids, batch.positions, attention.plan(batch), wanted)
                    results.append(decoder.logits(hidden))
    for one, other in zip(results[:4], results[4:], strict=True):
        assert (one - other).abs().max() < (1e-4 if one is results[0] or one is results[1] else 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    hidden, update = numbers(2, 37, 389, dtype=dtype)
    weight = numbers(389)
    attention, table = made("head", "halves", dtype)
    assert table is not None
    results = []
    for rows in (slice(0, 37), slice(19, 20)):
        positions = torch.arange(37)[rows]
        qkv = numbers(37, 240, dtype=dtype)[rows].clone()
        paged = Recorded(torch.zeros(2, 10, SIZE, 2, 24, dtype=dtype), None, positions)
        normal = add_norm(hidden[rows].clone(), update[rows], weight, None, 1e-5, NORMS["rms"])
        activated = activate(hidden[rows], ACTIVATIONS["gelu"], False)
        with torch.inference_mode():
            query = attention(qkv, StepContext(table(positions), paged))
        results.append((normal, activated, query, paged.stored[:, 19 // SIZE, 19 % SIZE][None]))
    for whole, alone in zip(*results, strict=True):
        assert torch.equal(whole[19:20] if len(whole) == 37 else whole, alone[-1:] if alone.shape[1] != 2 else alone)


def test_what_products_leave_transposed_is_added() -> None:
    hidden, update = numbers(8, 5).t(), numbers(8, 5, seed=1).t()
    build = Build(torch.float32, torch.device("cpu"), 8, frozenset({"cpu_layers"}))
    norm = Norm(NormSpec(), 8, "norm", build)
    norm.fill_random(torch.Generator())
    expected = hidden + update
    total, normal = norm.after(hidden, update)
    assert torch.equal(total, expected)
    near(normal, expected.double() / (expected.double().square().mean(-1, keepdim=True) + 1e-6).sqrt(), torch.float32)
    near(norm(expected), normal.double(), torch.float32)


@pytest.mark.parametrize(("kind", "dtype"), [("layer", torch.bfloat16), ("rms", torch.float32)])
def test_a_layer_norm_with_an_offset_keeps_the_dtype_of_the_model(
    kind: Literal["rms", "layer"], dtype: torch.dtype
) -> None:
    """On a GPU PyTorch computes it, whose layer norms take weights of the dtype of their rows alone."""
    build = Build(torch.bfloat16, torch.device("meta"), 8, frozenset())
    norm = Norm(NormSpec(kind, offset=1.0, bias=kind == "layer"), 8, "norm", build)
    assert norm.weight is not None and norm.weight.dtype == dtype
