"""GGUF files: every architecture and type computes what the plain numbers do, and bad files are refused in a line."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvern.config import EngineConfig
from kvern.layers.quantized.gguf_blocks import NUMBERS
from kvern.layers.quantized.gguf_types import QUANTIZED
from kvern.models.folder import model_folder
from kvern.models.loader import load_model
from tests.families import make_checkpoint
from tests.gguf_files import write_gguf
from tests.test_model_parity import PROMPT, logits

WITHOUT_TOKENIZER = "kvern-1m"


def folder_of(file: Path, tmp_path: Path, **options: Any) -> Path:
    config = EngineConfig(str(file), cache_dir=str(tmp_path / "cache"), tokenizer=WITHOUT_TOKENIZER, **options)
    return model_folder(config)


@pytest.mark.parametrize("block", QUANTIZED.values(), ids=lambda block: block.name)
def test_blocks_stand_for_the_numbers_that_the_package_finds(block: Any) -> None:
    kind = gguf.GGMLQuantizationType[block.name.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (block.numbers, block.size)
    blocks = np.random.default_rng(0).integers(0, 256, (500, block.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, kind)
    found = NUMBERS[block.name](torch.from_numpy(blocks)).numpy()
    kept = np.isfinite(expected)
    assert found.dtype == np.float32 and kept.mean() > 0.8
    assert np.array_equal(found.view(np.int32)[kept], expected.view(np.int32)[kept])


FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        "llama llama3 llama_bias mistral mixtral qwen3 qwen2_moe gemma gemma2 gemma3 phi3 olmo olmo2 olmoe cohere cohere2 "
        "granite granitemoe stablelm stablelm_parallel gpt_neox gpt_neox_sequential nemotron exaone4 exaone4_full glm4 "
        "ernie4_5 arcee seed_oss".split(),
        {},
    ),
    # what llama.cpp does not know of them
    "qwen2": {"use_sliding_window": False},
    "qwen3_moe": {"mlp_only_layers": []},
    "phi": {"qk_layernorm": False},
    "starcoder2": {"sliding_window": None},
    "smollm3": {"no_rope_layer_interval": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path / "model", **FAMILIES[family])
    made = write_gguf(model, tmp_path)
    decoder = load_model(folder_of(made.file, tmp_path))
    assert decoder.build.dtype == torch.float32
    assert (logits(decoder, PROMPT) - logits(load_model(model), PROMPT)).abs().max() < 1e-4


MIXES: dict[str, dict[str, str]] = {
    "q4_k_m": {"attn_v|ffn_down|output": "Q6_K", "": "Q4_K"},
    "q3_k_m": {"attn_v|ffn_down": "Q5_K", "token_embd": "Q2_K", "": "Q3_K"},
    "iq4_xs": {"attn_v": "IQ4_NL", "": "IQ4_XS"},
    "older": {"exps": "Q5_1", "attn_q": "Q5_0", "attn_v": "Q5_1", "ffn_gate": "Q4_1", "ffn_up": "Q8_0", "": "Q4_0"},
    "plain": {"_exps": "F16", "attn_q|ffn_down": "F16", "attn_v": "BF16", "ffn_gate": "MXFP4", "": "F32"},
}


@pytest.mark.parametrize(
    ("family", "mix"),
    [*[("llama", mix) for mix in MIXES], *[(family, "q4_k_m") for family in ("qwen3_moe", "phi3", "gemma3", "gpt_neox")]],
)
def test_packed_blocks_compute_what_their_numbers_do(family: str, mix: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 256, "num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": []}
    if family == "gemma3":
        sizes |= {"layer_types": ["sliding_attention"]}
    model = make_checkpoint(family, tmp_path / "model", **sizes)
    kinds = MIXES[mix]
    made = write_gguf(model, tmp_path, lambda name: next(kinds[part] for part in kinds if re.search(part, name)))
    folder = folder_of(made.file, tmp_path)
    decoder, plain = load_model(folder, dtype="float32"), load_model(made.plain, dtype="float32")
    assert (logits(decoder, PROMPT) - logits(plain, PROMPT)).abs().max() < 2e-4
    assert decoder.weight_bytes < (1.01 if mix == "plain" else 0.5) * plain.weight_bytes
    assert load_model(folder, load_format="dummy").build.dtype == torch.bfloat16
