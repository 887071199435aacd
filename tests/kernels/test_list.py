"""Every kernel of the list, in every form that these models launch, beside PyTorch in float64."""

import dataclasses
from functools import partial

import pytest
import torch

from kvern.models.registry import spec_from_config
from kvern.spec.model import LayerSpec
from tests.kernels.models import LARGE_MODELS, TINY_ENCODERS, TINY_MODELS, spec_of
from tests.support.kernel_list import KERNELS, Inputs, Kernel, kernels_of, ranks
from tests.support.kernel_list.entry import Call, Joined
from tests.support.kernel_list.quantized import FORMS, kinds_of_forms

PACKED = ("fp8_blocks", "int4_zero")
"""Of the forms of quantized weights; all are in test_packed_product.py, and of experts in test_packed_moe.py."""

OF_HEADS = [kernel for kernel in KERNELS if kernel.group in ("attention", "rotary")]
BY_NIGHT = ("gpt_oss", "gemma4_text", "glm4_moe_lite", "lfm2", "nemotron_h", "falcon_h1")
"""Models whose kernels are others' in one more form, or tested by themselves."""
SLOW = ("adapters", "product of few rows", "decode attention")
"""Kernels of which other models than the first, whose sizes alone are others, are for the night."""


def is_of_the_night(kernel: Kernel, model: str) -> bool:
    """Of the model that rotates a part of each head alone, what rotates is tried by day."""
    if model == "glm4":
        return "rotat" not in kernel.name
    return model in BY_NIGHT or (kernel.name in SLOW and model != "llama")


LAUNCHED = [
    pytest.param(
        kernel,
        model,
        id=f"{kernel.name}-{model}",
        marks=[pytest.mark.nightly] if is_of_the_night(kernel, model) else [],
    )
    for kernel in KERNELS
    for model in TINY_MODELS
]


@pytest.mark.sample(70)
@pytest.mark.parametrize(("kernel", "model"), LAUNCHED)
def test_what_a_kernel_returns(kernel: Kernel, model: str, device: torch.device) -> None:
    spec = spec_of(model)
    packed = kinds_of_forms(spec, torch.float32, PACKED if model == "llama" else ())
    inputs = Inputs(device, torch.float32, block_size=4, adapter_rank=16, packed=packed)
    if device.type == "cpu":  # interpreted programs take milliseconds each
        inputs.processors = 8
    close = 5e-4 if kernel.group == "quantized" else 1e-4  # half bytes carry a bias of 2048 in float32 sums
    for arguments in kernel.launched(spec, inputs):
        compare(kernel.make(spec, inputs, *arguments), close)


@pytest.mark.parametrize(
    ("model", "codes", "size", "count"),
    [("llama", (), 2, 2), ("gemma2", (), 4, 4), ("llama", ("fp8", "fp8_blocks", "int8"), 3, 10)],
)
def test_sums_of_ranks(model: str, codes: tuple[str, ...], size: int, count: int, device: torch.device) -> None:
    """Alone, with a norm, and with one that becomes codes; of more than two ranks in parts, too."""
    spec = dataclasses.replace(spec_of(model), hidden_size=128)
    inputs = Inputs(device, torch.float32, packed=kinds_of_forms(spec, torch.float32, codes), ranks=(1, size))
    kernel, *_ = ranks.KERNELS
    forms = list(kernel.launched(spec, inputs))
    for form in forms:
        compare(kernel.make(spec, inputs, *form), 1e-4)
    assert len(forms) == count


def test_rows_between_ranks(device: torch.device) -> None:
    spec = dataclasses.replace(spec_of("qwen3_moe"), hidden_size=128)
    inputs = Inputs(device, torch.float32, dp_attention=(1, 3))
    _, kernel, _ = ranks.KERNELS
    [form] = kernel.launched(spec, inputs)
    compare(kernel.make(spec, inputs, *form), 1e-4)


def test_shared_norms(device: torch.device) -> None:
    spec = dataclasses.replace(spec_of("llama"), hidden_size=128)
    inputs = Inputs(device, torch.float32, ranks=(1, 3))
    [*_, kernel] = ranks.KERNELS
    [form] = kernel.launched(spec, inputs)
    compare(kernel.make(spec, inputs, *form), 1e-4)


@pytest.mark.parametrize("codes", [(), ("int4",)], ids=["plain", "int4"])
def test_products_of_a_row_of_ranks(codes: tuple[str, ...], device: torch.device) -> None:
    """Norms that sum over ranks stand alone, so that an activation does, too; of what all would add one adds."""
    config = {"model_type": "llama"} | TINY_MODELS["llama"] | {"hidden_size": 128, "mlp_bias": True}
    spec = spec_from_config(config)
    packed = kinds_of_forms(spec, torch.float32, codes)
    packed = tuple(kind._replace(part="gate_proj") for kind in packed if kind.part == "q_proj")
    name = "quantized, one row" if codes else "matrix-vector product"
    [kernel] = [kernel for kernel in KERNELS if kernel.name == name]
    alone, shared = (Inputs(device, torch.float32, packed=packed, ranks=ranks) for ranks in ((0, 1), (1, 2)))
    known = set(kernel.launched(spec, alone))
    forms = [form for form in kernel.launched(spec, shared) if form not in known]
    assert any(Joined(activation="silu") in form for form in forms)
    if not codes:
        assert (128, spec.layers[0].mlp.width, Joined(), False) in forms  # type: ignore[union-attr]
    for form in forms:
        compare(kernel.make(spec, shared, *form), 5e-4)


def compare(call: Call, close: float) -> None:
    """What a kernel returns with what it should."""
    expected = call.reference()
    found = call.launch()
    pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other.double(), rtol=close, atol=close)


@pytest.mark.parametrize(
    ("cache_dtype", "close"),
    [(torch.float32, 1e-4), pytest.param(torch.int8, 2e-2, marks=pytest.mark.nightly)],  # weights have 11 bits
    ids=str,
)
@pytest.mark.parametrize(
    "kernel", [kernel for kernel in OF_HEADS if "latents" not in kernel.name], ids=lambda kernel: kernel.name
)
def test_heads_of_512(
    kernel: Kernel, cache_dtype: torch.dtype, close: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tiles that are launched for them; values that are keys, and layers that store none."""
    spec = spec_from_config({"model_type": "gemma4_text"} | TINY_MODELS["gemma4_text"] | {"global_head_dim": 512})
    inputs = Inputs(device, torch.float32, block_size=4, batch_requests=4, cache_dtype=cache_dtype)
    if device.type == "cpu":  # interpreted programs take milliseconds each
        inputs.processors = 8
    forms = [
        form
        for form in kernel.launched(spec, inputs)
        if (form[0].attention if isinstance(form[0], LayerSpec) else form[0]).head_dim == 512
    ]
    for form in forms:
        compare(kernel.make(spec, inputs, *form), close)
    assert forms, "this kernel is launched for no such head"


def test_every_kernel_is_launched_by_some_model(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inputs, "hopper", True)
    packed = [kind for name in TINY_MODELS for kind in kinds_of_forms(spec_of(name), torch.bfloat16, tuple(FORMS))]
    packed += kinds_of_forms(spec_of("qwen3_moe", LARGE_MODELS), torch.bfloat16, ("fp8",))  # of widths that TMA takes
    packed += kinds_of_forms(spec_of("llama", LARGE_MODELS), torch.bfloat16, ("int4", "q4_k"))
    packed += kinds_of_forms(spec_of("gpt_oss", LARGE_MODELS), torch.bfloat16, ("e2m1",))
    made = partial(Inputs, device, torch.bfloat16, adapter_rank=16, packed=packed)
    caches = [made(), made(cache_dtype=torch.int8), made(packed=(), ranks=(1, 2)), made(dp_attention=(1, 2))]
    specs = [spec_of(name, models) for models in (TINY_MODELS, LARGE_MODELS) for name in models]
    forms = [(spec, inputs) for spec in specs for inputs in caches]
    forms += [(spec_of(name, TINY_ENCODERS), caches[-1]) for name in TINY_ENCODERS]
    idle = [
        kernel.name
        for kernel in KERNELS
        if not any(kernel in kernels_of(form[0]) and any(True for _ in kernel.launched(*form)) for form in forms)
    ]
    assert not idle


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.nightly] if name in BY_NIGHT else []) for name in TINY_MODELS]
)
def test_what_is_timed_says_what_it_moves(model: str, device: torch.device) -> None:
    spec = spec_of(model)
    inputs = Inputs(device, torch.bfloat16, "empty", packed=kinds_of_forms(spec, torch.bfloat16, tuple(FORMS)))
    for kernel in KERNELS:
        for arguments in kernel.timed(spec, inputs):
            call = kernel.make(spec, inputs, *arguments)
            assert call.sizes and call.bytes > 0
