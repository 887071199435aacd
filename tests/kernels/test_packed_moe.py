"""Experts of every code, beside float64 products with the numbers that they stand for."""

from collections.abc import Callable

import pytest
import torch

from kvern.kernels import moe_packed
from kvern.kernels.moe_packed import packed_experts
from kvern.kernels.moe_scaled import coded_experts
from kvern.kernels.quantize_rows import quantize_rows
from kvern.kernels.packed import Packed
from tests.kernels.packed_weights import KINDS, make_packed, to_device
from tests.kernels.test_moe import experts_reference
from tests.kernels.test_norm import relative_error


def launch(kind: str, tokens: int, *, add: bool = False, deterministic: bool = False) -> object:
    """Qwen3-30B-A3B's, on memory that is never read."""
    experts, top_k, hidden, width = 8, 8, 2048, 768
    gate_up, down = (
        make_packed(kind, 256, inputs).packed._replace(codes=_tall(kind, rows, inputs))
        for rows, inputs in ((experts * 2 * width, hidden), (experts * hidden, width))
    )
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    return packed_experts(
        x,
        gate_up,
        down,
        torch.zeros(tokens, top_k),
        torch.zeros(tokens, top_k, dtype=torch.int32),
        "silu",
        experts=experts,
        add=x if add else None,
        deterministic=deterministic,
    )


def _tall(kind: str, rows: int, inputs: int) -> torch.Tensor:
    codes = make_packed(kind, 1, inputs).packed.codes
    return torch.empty(rows, *codes.shape[1:], dtype=codes.dtype)


LAUNCHES: list[Callable[[], object]] = [
    lambda kind=kind, tokens=tokens: launch(kind, tokens) for kind in KINDS for tokens in (1, 16, 32, 64, 4096)
] + [lambda: launch("e4m3 blocks", 4, deterministic=True, add=True)]

EXPERTS, HIDDEN, WIDTH = 3, 256, 128


def matrices(kind: str, device: torch.device) -> tuple[Packed, Packed, torch.Tensor, torch.Tensor]:
    """Gate and up, down, and the numbers that they stand for."""
    gate_up = make_packed(kind, EXPERTS * 2 * WIDTH, HIDDEN, seed=1)
    down = make_packed(kind, EXPERTS * HIDDEN, WIDTH, seed=2)
    plain = (
        gate_up.plain.view(EXPERTS, 2 * WIDTH, HIDDEN).to(device),
        down.plain.view(EXPERTS, HIDDEN, WIDTH).to(device),
    )
    return to_device(gate_up.packed, device), to_device(down.packed, device), *plain


@pytest.mark.parametrize(
    ("kind", "path"),
    [*((kind, path) for kind in KINDS for path in ("direct", "grouped")), ("e4m3 blocks", "deterministic")],
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
    out = packed_experts(
        x, gate_up, down, scores, chosen, "silu", experts=EXPERTS, deterministic=path == "deterministic"
    )
    assert out.dtype == x.dtype
    assert relative_error(out, experts_reference(x, *plain, scores, chosen, "silu")) < 1e-3


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
    out = coded_experts(
        x, gate_up, down, scores, chosen, "silu", experts=EXPERTS, rounded=(rounded, rounded), add=add
    )

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
