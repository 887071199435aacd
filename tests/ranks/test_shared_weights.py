"""Quantized weights that ranks share: the numbers are those of one process, and no group of them is cut."""

import re
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.errors import ConfigError
from kvern.formats.compressed_tensors import packed_format
from kvern.formats.method import QuantizedMethod
from kvern.layers.linear_method import INPUTS, OUTPUTS, Axis, Part, TensorLayout, taken
from kvern.models.loader import LoadOptions, load_model
from kvern.ranks.ranks import Ranks
from tests.support.configs import GPT_OSS
from tests.support.families import make_checkpoint
from tests.support.four_bit_checkpoints import AWQ, CASES, FORMATS, GPTQ, INTEGERS, make, of_tests, packed
from tests.support.gguf_files import MIXES, folder_of, write_gguf
from tests.support.model_outputs import PROMPT, logits, methods_by_path
from tests.support.packers import Pack, awq, gptq, nf4, nvfp4, store
from tests.support.packers import mxfp4_experts as pack_published
from tests.support.rank_threads import logits_of_ranks
from tests.support.scaled_checkpoints import CHECKPOINTS, quantize, reference

SHARED = {
    "fp8, static": {},
    "compressed-tensors, dynamic": {},
    "torchao, int8 weights": {},
    "fp8 by blocks": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 2},
    "fp8 of experts": {},
    "compressed-tensors, weights alone": {"hidden_size": 64, "intermediate_size": 96},
    "compressed-tensors, blocks": {"head_dim": 24, "intermediate_size": 96, "moe_intermediate_size": 96},
}
"""Checkpoints of `CHECKPOINTS` that a fast run has, with sizes whose shares blocks divide."""


def check_scaled(name: str, folder: Path, size: int = 2, **changes: Any) -> None:
    """Ranks compute what they do with the same numbers as plain weights; each rounds its own inputs."""
    family, packing, config = CHECKPOINTS[name]
    made = quantize(make_checkpoint(family, folder / "model", **changes), folder, packing, config)
    found = logits_of_ranks(made.quantized, size)
    expected = logits_of_ranks(made.rounded, size, unquantized=reference(packing))
    assert (found[0] - expected[0]).abs().max() < 1e-4
    assert all(torch.equal(found[0], other) for other in found)
    if packing.round is None or "static" in name or packing.block[1]:  # codes are those of one process, but for a few
        assert (found[0] - logits(load_model(made.quantized), PROMPT)).abs().median() < 1e-5


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SHARED)
def test_codes_of_a_byte_are_shared(name: str, tmp_path: Path) -> None:
    check_scaled(name, tmp_path, **SHARED[name])


REFUSED = {
    "fp8 by blocks": r"q_proj is stored as fp8 by 16 x 32, W8A8: 16 of its 48 outputs",
    "fp8 by blocks at which no part begins": r"q_proj is stored as fp8 by 128 x 128, W8A8: 128 of its 80 outputs",
    "fp8 by blocks, of latents": r"q_b_proj is stored as fp8 by 16 x 32, W8A8: 16 of its 80 outputs",
    "fp8 by blocks at which no expert begins": r"q_proj is stored as fp8 by 16 x 16, W8A8: 16 of its 48 outputs",
    "fp8 by blocks, of experts called w1, w2, w3": r"down_proj is stored as fp8 by 4 x 16, W8A8: 16 of its 24 inputs",
    "compressed-tensors, blocks": r"q_proj is stored as fp8 by 24 x 16, W8A8: 24 of its 64 outputs",
    "compressed-tensors, weights alone": r"o_proj is stored as int8 by 1 x 16: 16 of its 48 inputs",
    "torchao, int8 groups": r"o_proj is stored as int8 by 1 x 16: 16 of its 48 inputs",
    "llama-3": r"o_proj is stored as int4 in groups of 16 in any order: 64 of its 64 inputs",
    "mixtral-5": r"o_proj is stored as int4 in groups of 16 in any order: 64 of its 64 inputs",
    "phi3-4": r"o_proj is stored as int4 in groups of 16 in any order: 64 of its 64 inputs",
    "llama_bias-15": r"o_proj is stored as nf4 in groups of 64: 64 of its 64 inputs",
    "phi3-16": r"o_proj is stored as nf4 in groups of 64: 64 of its 64 inputs",
}
"""Checkpoints of the sizes of tests whose blocks or groups two ranks would cut, and what is said of the first."""


def refused(name: str) -> AbstractContextManager[object]:
    """Nothing but the refusal of a checkpoint that is not shared."""
    if name not in REFUSED:
        return nullcontext()
    return pytest.raises(ConfigError, match=rf"^tensor_parallel_size is 2, and model\.layers\.0\..*{REFUSED[name]}")


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_all_codes_of_a_byte_are_shared_but_those_that_are_refused(name: str, tmp_path: Path) -> None:
    with refused(name):
        check_scaled(name, tmp_path)


FORMATS["pack-quantized"] = lambda: packed_format(INTEGERS | {"symmetric": False}, None, "pack-quantized")
FORMATS["pack-quantized in 64"] = lambda: packed_format(
    INTEGERS | {"symmetric": False, "group_size": 64}, None, "pack-quantized"
)
FOUR_BITS: dict[str, tuple[str, Pack, dict[str, Any]]] = {
    "gptq": ("llama", gptq, GPTQ),
    "gptq of whole rows": ("llama_bias", partial(gptq, group=-1), GPTQ | {"group_size": -1}),
    "gptq, cut within groups": ("llama", partial(gptq, group=64), GPTQ | {"group_size": 64}),
    "awq of fused tensors": ("phi3", awq, AWQ),
    "awq, cut within groups": ("llama", partial(awq, group=64), AWQ | {"group_size": 64}),
    "pack-quantized": ("qwen3", packed, of_tests("pack-quantized")),
    "pack-quantized, cut within groups": ("qwen3", partial(packed, group=64), of_tests("pack-quantized in 64")),
    "nvfp4": ("qwen3", nvfp4, of_tests("nvfp4")),
    "nf4 of fused tensors": ("phi3", partial(nf4, nested=True), of_tests("nested nf4")),
    "gptq of experts": ("mixtral", gptq, GPTQ),
    "awq of experts, cut within groups": ("mixtral", partial(awq, group=64), AWQ | {"group_size": 64}),
    "pack-quantized experts": ("qwen3_moe", packed, of_tests("pack-quantized")),
    "nvfp4 of experts": ("mixtral", nvfp4, of_tests("nvfp4")),
    "nf4 of experts": ("mixtral", partial(nf4, nested=True), of_tests("nested nf4")),
}
SIZES = {
    "nf4 of fused tensors": {"hidden_size": 128, "num_key_value_heads": 2},
    "awq of experts, cut within groups": {"intermediate_size": 192},
    "pack-quantized experts": {"moe_intermediate_size": 64},
    "nf4 of experts": {"hidden_size": 128, "head_dim": 32},
}


def check_four_bits(family: str, pack: Pack, config: dict[str, Any], folder: Path, **sizes: Any) -> None:
    made = make(family, folder, pack, config, **sizes)
    found, expected = logits_of_ranks(made.quantized, 2), logits(load_model(made.quantized), PROMPT)
    assert (found[0] - expected).abs().max() < 1e-4
    assert torch.equal(found[0], found[1])


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FOUR_BITS)
def test_codes_of_four_bits_are_shared(name: str, tmp_path: Path) -> None:
    check_four_bits(*FOUR_BITS[name], tmp_path, **SIZES.get(name, {}))


def test_experts_as_gpt_oss_publishes_them_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up in turns, with biases, in runs of an expert or two."""
    monkeypatch.setattr("kvern.models.checkpoint.RUN_BYTES", 4500)
    model = make_checkpoint("gpt_oss", tmp_path / "model", hidden_size=64, intermediate_size=64)
    made = store(model, tmp_path, pack_published, r"experts\.\w+_proj$", GPT_OSS["quantization_config"])
    found, expected = logits_of_ranks(made.quantized, 2), logits(load_model(made.rounded), PROMPT)
    assert (found[0] - expected).abs().max() < 1e-4
    assert torch.equal(found[0], found[1])


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(CASES)))
def test_all_codes_of_four_bits_are_shared_but_those_that_are_refused(number: int, tmp_path: Path) -> None:
    with refused(f"{CASES[number][0]}-{number}"):
        check_four_bits(*CASES[number], tmp_path)


@pytest.mark.parametrize(
    ("family", "mix"),
    [
        ("llama", "q4_k_m"),
        *(pytest.param("llama", mix, marks=pytest.mark.nightly) for mix in MIXES if mix not in ("q4_k_m", "gpt_oss")),
        *(pytest.param(family, "q4_k_m", marks=pytest.mark.nightly) for family in ("phi3", "gemma3", "gpt_neox")),
        ("qwen3_moe", "q4_k_m"),
        *(
            pytest.param("qwen3_moe", mix, marks=pytest.mark.nightly)
            for mix in MIXES
            if mix not in ("q4_k_m", "gpt_oss")
        ),
        pytest.param("gpt_oss", "gpt_oss", marks=pytest.mark.nightly),
    ],
)
def test_blocks_of_gguf_files_are_shared(family: str, mix: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 128}
    if family == "gpt_neox":
        sizes |= {"hidden_size": 512}
    if family in ("gemma3", "gpt_oss"):
        sizes |= {"layer_types": ["sliding_attention"]}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 512, "num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": []}
    kinds = MIXES[mix]
    model = make_checkpoint(family, tmp_path / "model", **sizes)
    made = write_gguf(model, tmp_path, lambda name: next(kinds[part] for part in kinds if re.search(part, name)))
    folder = folder_of(made.file, tmp_path)
    found, expected = (
        logits_of_ranks(folder, 2, dtype="float32"),
        logits(load_model(folder, LoadOptions(dtype="float32")), PROMPT),
    )
    assert (found[0] - expected).abs().max() < 2e-4
    assert torch.equal(found[0], found[1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama_bias", "mixtral"])
def test_plain_weights_are_quantized_share_by_share(family: str, quantization: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / "model")
    found = logits_of_ranks(folder, 2, quantization=quantization)
    plain = logits(load_model(folder), PROMPT)
    alone = logits(load_model(folder, LoadOptions(quantization=quantization)), PROMPT)
    assert (found[0] - plain).abs().mean() < 1.2 * (alone - plain).abs().mean()
    share = load_model(folder, LoadOptions(ranks=Ranks(1, 2), quantization=quantization))
    for path, method in methods_by_path(share).items():
        if isinstance(method, QuantizedMethod) and path.endswith("down_proj"):
            rows = methods_by_path(load_model(folder))[path].dequantize()[:, method.shape.inputs :]
            assert (method.dequantize() - rows).abs().max() < rows.abs().max() / (7 if quantization == "int4" else 15)


@pytest.mark.parametrize(
    ("pack", "config", "reason"),
    [
        (
            partial(gptq, group=64),
            GPTQ | {"group_size": 64},
            r"groups of 64: 32 of its 64 .* tensor_parallel_size 2, or",
        ),
        (partial(awq, group=32), AWQ | {"group_size": 32}, r"groups of 32: 32 of its 64 .* tensor_parallel_size 2, or"),
        (partial(gptq, act_order=3), GPTQ | {"desc_act": True}, "groups of 16 in any order: 64 of its 64"),
    ],
)
def test_cuts_within_a_group_are_refused(pack: Pack, config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = make("llama", tmp_path, pack, config, num_key_value_heads=4).quantized
    layer = r"^tensor_parallel_size is 4, and model\.layers\.0\.self_attn\.o_proj is stored as int4 in "
    with pytest.raises(ConfigError, match=layer + reason):
        load_model(folder, LoadOptions(ranks=Ranks(1, 4)))


def test_a_rank_takes_its_part_of_a_tensor_before_anything_is_made_of_it() -> None:
    groups, words = Axis("inputs", 16), Axis("outputs", 8)
    part = Part(40, range(24, 48), range(32, 64))
    zeros = torch.arange(8 * 12).view(8, 12)  # of 128 inputs and 96 outputs
    for first in (0, 1, 3):
        found = taken(TensorLayout(torch.int32, (groups, words)), zeros[first:], part, first)
        assert found is not None
        assert torch.equal(found[0], zeros[max(first, 2) : 4, 3:6])
        assert found[0].data_ptr() == zeros[max(first, 2) :, 3:].data_ptr(), "a view"
        assert found[1:] == (Part(40, range(24), range(32, 64)), max(first, 2))
    assert taken(TensorLayout(torch.int32, (groups, words)), zeros[4:], part, 4) is None
    assert taken(TensorLayout(torch.uint8, (OUTPUTS, INPUTS)), torch.zeros(24, 128), part, 0) is None
