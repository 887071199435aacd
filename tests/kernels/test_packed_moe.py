"""Experts of every code, beside float64 products with the numbers that they stand for."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvern.formats.fp4 import MX, Mxfp4Blocks
from kvern.formats.groups import GroupedFormat
from kvern.formats.scaled import ROWS, Block, Code, Rounding, Scaled, ScaledMethod, quantized_rows
from kvern.kernels import moe_packed, moe_scaled
from kvern.kernels import quantize_rows as rounding_kernels
from kvern.kernels.moe_packed import packed_experts
from kvern.kernels.moe_scaled import coded_experts
from kvern.kernels.packed import Packed
from kvern.kernels.quantize_rows import quantize_rows
from kvern.layers.build import Build
from kvern.layers.fused_packed_experts import FusedPackedExperts
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.loadable import Loadable
from kvern.layers.moe import MoE, make_moe
from kvern.layers.row_experts import RowStackedExperts
from kvern.layers.unquantized import Unquantized
from kvern.spec.model import MoeSpec
from tests.kernels.packed_weights import KINDS, LARGE_BLOCKS, make_packed, to_device
from tests.support.kernels.moe_references import experts_reference, make_biases
from tests.support.kernels.references import relative_error


def launch(
    kind: str,
    tokens: int,
    *,
    experts: int = 128,
    deterministic: bool = False,
    group: int = -1,
    hopper: bool = False,
) -> object:
    """Qwen3-30B-A3B's shapes, on memory that is never read; with a `group` codes by codes."""
    top_k, hidden, width = 8, 2048, 768
    gate_up, down = (
        _tall(kind, rows, inputs) for rows, inputs in ((experts * 2 * width, hidden), (experts * hidden, width))
    )
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    weights, chosen = torch.zeros(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32)
    if group >= 0:
        rounded = partial(quantize_rows, code=kind.split()[0], group=group)
        return coded_experts(
            x, gate_up, down, weights, chosen, "silu", experts=experts, rounded=(rounded, rounded), add=x, hopper=hopper
        )
    return packed_experts(
        x, gate_up, down, weights, chosen, "silu", experts=experts, add=x, deterministic=deterministic
    )


def _tall(kind: str, rows: int, inputs: int) -> Packed:
    """So many rows, of which only the bytes are taken."""
    packed = make_packed(kind, 1, inputs).packed
    per = packed.outputs_per_scale

    def more(item: torch.Tensor | None, count: int) -> torch.Tensor | None:
        return None if item is None else torch.empty(count, *item.shape[1:], dtype=item.dtype)

    return packed._replace(
        codes=torch.empty(rows, *packed.codes.shape[1:], dtype=packed.codes.dtype),
        scale=more(packed.scale, -(-rows // per)),
        zero=more(packed.zero, -(-rows // per)),
        factor=more(packed.factor, rows),
    )


LAUNCHES: list[Callable[[], object]] = [
    *(lambda kind=kind, tokens=tokens: launch(kind, tokens) for kind in ("e4m3 blocks", "int4") for tokens in (1, 32)),
    lambda: launch("q4_0", 32),
    lambda: launch("int4 zero", 4096),
    lambda: launch("e4m3 row", 512),
    lambda: launch("e4m3 blocks", 4096, group=128),
    lambda: launch("int8 row", 4096, group=0),
    *(lambda tokens=tokens: launch("e4m3 row", tokens, group=0, hopper=True) for tokens in (32, 512, 4096)),
    *(
        lambda kind=kind, group=group: launch(kind, 32, group=group)
        for kind, group in (("e4m3 row", 0), ("int8 row", 0))
    ),
]
"""A few; all codes are compiled at night, from the list."""

BY_DAY = ("e4m3 row", "e4m3 blocks", "int8 zero", "int4 zero", "mxfp4", "gguf q4_0")
EXPERTS, HIDDEN = 3, 256


def matrices(kind: str, device: torch.device) -> tuple[Packed, Packed, torch.Tensor, torch.Tensor]:
    """Gate and up, down, and the numbers that they stand for."""
    width = 256 if kind in LARGE_BLOCKS else 128
    gate_up = make_packed(kind, EXPERTS * 2 * width, HIDDEN, seed=1)
    down = make_packed(kind, EXPERTS * HIDDEN, width, seed=2)
    plain = (
        gate_up.plain.view(EXPERTS, 2 * width, HIDDEN).to(device),
        down.plain.view(EXPERTS, HIDDEN, width).to(device),
    )
    return to_device(gate_up.packed, device), to_device(down.packed, device), *plain


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *(
            pytest.param(kind, path, marks=[] if kind in BY_DAY else [pytest.mark.nightly])
            for kind in KINDS
            for path in ("direct", "grouped")
        ),
        ("e4m3 blocks", "deterministic"),
    ],
)
def test_every_code(device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str, path: str) -> None:
    monkeypatch.setattr(moe_packed, "runs_direct", lambda *_: path == "direct")
    monkeypatch.setattr(moe_packed, "DIRECT_OUTPUTS", 128)  # few programs to interpret
    tokens, top_k = 3, 2
    gate_up, down, *plain = matrices(kind, device)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, HIDDEN + 8, generator=generator).half().to(device)[:, :HIDDEN]
    scores, chosen = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k)
    scores, chosen = scores.to(device), chosen.int().to(device)
    as_published = kind == "mxfp4"  # of gpt-oss
    activation = "clamped_swiglu" if as_published else "silu"
    biases = make_biases(EXPERTS, HIDDEN, plain[1].shape[2], device) if as_published else None
    out = packed_experts(
        x,
        gate_up,
        down,
        scores,
        chosen,
        activation,
        experts=EXPERTS,
        biases=biases,
        deterministic=path == "deterministic",
    )
    assert out.dtype == x.dtype
    assert relative_error(out, experts_reference(x, *plain, scores, chosen, activation, biases)) < 1e-3


@pytest.mark.parametrize(("kind", "group"), [("e4m3 row", 0), ("e4m3 blocks", 128), ("e4m3 row", 128), ("int8 row", 0)])
def test_codes_by_codes(device: torch.device, kind: str, group: int) -> None:
    tokens, top_k = 3, 2
    gate_up, down, *plain = matrices(kind, device)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, HIDDEN + 8, generator=generator).half().to(device)[:, :HIDDEN]
    scores, chosen = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k)
    scores, chosen = scores.to(device), chosen.int().to(device)
    code, made = kind.split()[0], []

    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made.append((x, quantize_rows(x, code, group)))
        return made[-1][1]

    add = torch.ones_like(x)
    out = coded_experts(x, gate_up, down, scores, chosen, "silu", experts=EXPERTS, rounded=(rounded, rounded), add=add)

    def numbers(index: int) -> torch.Tensor:
        codes, scale = made[index][1]
        return codes.double() * scale.double().repeat_interleave(codes.shape[1] // scale.shape[1], 1)

    expected, rows = torch.ones_like(x).double(), numbers(1)
    gated = made[1][0].double()
    for pair, expert in enumerate(chosen.flatten().tolist()):
        gate, up = (plain[0][expert] @ numbers(0)[pair // top_k]).chunk(2)
        assert relative_error(gated[pair], torch.nn.functional.silu(gate) * up) < 1e-3
        expected[pair // top_k] += scores.flatten()[pair].double() * (plain[1][expert] @ rows[pair])
    assert relative_error(out, expected) < 1e-3


FORMATS: dict[str, LinearFormat] = {
    "e4m3 blocks": Scaled("e4m3", Block(128, 128), Rounding("e4m3", 128)),
    "e4m3 blocks that experts share": Scaled("e4m3", Block(128, 128)),
    "int8 rows": Scaled("int8", ROWS, Rounding("int8")),
    "mxfp4": GroupedFormat("MXFP4", partial(Mxfp4Blocks, form=MX), MX.group),
}


def round_by_pytorch(
    x: torch.Tensor, code: Code, group: int, static: torch.Tensor | None, limit: float | None, columns: bool, late: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = quantized_rows(x.unflatten(-1, (-1, group or x.shape[1])), code, limit)
    return codes.flatten(1), scale[..., 0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name == "mxfp4" else []) for name in FORMATS]
)
def test_layers_of_kernels_agree_with_those_of_pytorch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One token, and some, of which a format that rounds activations has codes multiplied by codes."""
    if device.type == "cpu":  # Triton's interpreter loses a carry where it rounds to e4m3
        monkeypatch.setattr(rounding_kernels, "quantize_rows", round_by_pytorch)
    monkeypatch.setattr(moe_packed, "DIRECT_OUTPUTS", 128)
    spec = MoeSpec(3, 2, 96 if name.endswith("share") else 128, shared_width=16)
    if name == "mxfp4":  # as gpt-oss has it
        spec = MoeSpec(3, 2, 128, activation="clamped_swiglu", bias=True)
    rules = LinearMethods(Unquantized(), ((re.compile("mlp.experts"), FORMATS[name]),))
    kernels = frozenset({"moe", "quantized"})
    plain, fused = (
        make_moe(256, spec, Build(torch.float32, device, 16, used, linear=rules).at("mlp"))
        for used in (frozenset(), kernels)
    )
    assert isinstance(plain, MoE) and isinstance(fused, MoE)
    assert type(plain.experts) is RowStackedExperts and isinstance(fused.experts, FusedPackedExperts)
    for module in plain.modules():
        if isinstance(module, Loadable):
            module.fill_random(torch.Generator(device).manual_seed(5))
    fused.load_state_dict(plain.state_dict())
    for experts in (plain.experts, fused.experts):
        for method in experts.methods():
            method.scale.add_(2) if method.scale.dtype == torch.uint8 else method.scale.mul_(4)
        experts.finish()
    generator = torch.Generator().manual_seed(3)
    codes_by_codes = getattr(FORMATS[name], "activations", None) is not None
    assert bool(fused.experts.candidates()) == codes_by_codes
    for tokens, rows in ((1, 16), (4, 16), (4, 128)):
        for module in (moe_packed, moe_scaled):
            monkeypatch.setattr(module, "rows_of_block", lambda *_, rows=rows: rows)
        monkeypatch.setattr(moe_packed, "runs_direct", lambda tokens, *_: tokens == 1)
        x = torch.randn(tokens, 256, generator=generator).to(device)
        with monkeypatch.context() as patched:
            if codes_by_codes and tokens == 1:  # it is multiplied as it is
                patched.setattr(ScaledMethod, "rounded", lambda self, x: x)
            expected = plain(x)
        for way in list(fused.experts.candidates().get(8, {0: None})):
            fused.experts.choose(8, way)
            assert relative_error(fused(x), expected.double()) < (2e-2 if codes_by_codes and tokens > 1 else 1e-5)
    assert fused.experts.expert_counts.sum() == 2 * (1 + 4 + 4) * (2 if codes_by_codes else 1)


@pytest.mark.parametrize("width", [768, 1408, 2880, 14336])
def test_code_of_few_tokens_does_not_grow_with_the_width(width: int) -> None:
    """A compiler takes minutes for hundreds of copies of a step."""
    form, together = moe_packed.steps_of_down(_tall("mxfp4", 256, width), width)
    assert -(-width // form.inputs) * together <= 28
