"""Checkpoints trained for embeddings as they are published: without an output layer, their names one level shorter."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM
from kvern.engine.embedding import check_embeds
from kvern.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from kvern.models.loader import load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.spec.facts import ModelFacts
from tests.support.tiny_model import CONFIG, make_tiny_model

TEXTS = ["the quick brown fox", "a lazy dog jumps over it", "fox"]
END = 1
POOLING = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def make_embedder(folder: Path, *, tied: bool = False) -> Path:
    """A Qwen3 without output layer, whose tokenizer ends texts with a token."""
    from transformers import AutoConfig, AutoModel

    make_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    fields = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type", "torch_dtype")}
    described = AutoConfig.for_model(
        "qwen3", **fields | {"head_dim": 16, "tie_word_embeddings": tied, "initializer_range": 0.2}
    )
    torch.manual_seed(0)
    AutoModel.from_config(described, dtype=torch.float32).save_pretrained(folder)
    change_config(folder, architectures=["Qwen3ForCausalLM"])
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", "$A $B </s>", [("</s>", END)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (folder / "modules.json").write_text(json.dumps(MODULES))
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder") / "model")


def expected(folder: Path, token_ids: list[int]) -> list[float]:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        state = model(torch.tensor([token_ids])).last_hidden_state[0, -1]
    vector: list[float] = torch.nn.functional.normalize(state, dim=0).tolist()
    return vector


@pytest.mark.parametrize("tied", [False, True])
def test_vectors_are_those_of_the_published_checkpoint(tied: bool, tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "model", tied=tied)
    names = load_file(folder / "model.safetensors")
    assert "embed_tokens.weight" in names and not any("lm_head" in name or "model." in name for name in names)
    with LLM(str(folder), threads=1, max_batch_tokens=16) as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        assert all(prompt[-1] == END != prompt[-2] for prompt in prompts)
        for vectors in (llm.embed(TEXTS), llm.embed(prompts)):
            for prompt, vector in zip(prompts, vectors, strict=True):
                assert vector == pytest.approx(expected(folder, prompt), abs=1e-4)
        [short] = llm.embed(TEXTS[0], dimensions=8)
        assert torch.tensor(short).norm() == pytest.approx(1)
        if tied:
            assert llm.generate("fox")[0].outputs[0].token_ids
        else:
            with pytest.raises(InvalidRequest, match="no output layer"):
                llm.generate("fox")
            with pytest.raises(InvalidRequest, match="no output layer"):
                llm.score([("the", " fox")])


def test_without_the_pooling_a_missing_head_is_a_fault(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "model")
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"1 missing: lm_head.weight \[288, 64\]"):
        load_model(folder)


def test_a_head_that_is_there_is_used(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.randn(288, 64)}, folder / "model.safetensors")
    with LLM(str(folder), threads=1) as llm:
        assert llm.spec.generates and not llm.spec.tie_word_embeddings
        assert llm.generate("fox")[0].outputs[0].token_ids


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match="1 there twice: "):
        load_model(folder)


@pytest.mark.parametrize(
    ("pooling", "modules", "reason"),
    [
        ({"pooling_mode": "lasttoken", "include_prompt": True}, MODULES, None),
        ({"pooling_mode": ["lasttoken"]}, None, None),
        ({"pooling_mode": "mean"}, MODULES, "pools by 'mean'"),
        ({"pooling_mode": ["mean", "lasttoken"]}, MODULES, "pools by 'mean, lasttoken'"),
        (POOLING | {"pooling_mode_mean_tokens": True}, MODULES, "mean_tokens"),
        ({}, MODULES, "pools by 'nothing'"),
        (POOLING, [*MODULES, {"type": "sentence_transformers.models.Dense"}], r"'sentence_transformers.models.Dense'"),
        (POOLING, {"type": "Transformer"}, "modules.json cannot be read"),
    ],
)
def test_only_last_tokens_are_pooled(folder: Path, tmp_path: Path, pooling: Any, modules: Any, reason: str) -> None:
    facts = ModelFacts.of(spec_from_config(CONFIG))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    if reason is None:
        check_embeds(facts, tmp_path, "m")
    else:
        with pytest.raises(InvalidRequest, match=reason):
            check_embeds(facts, tmp_path, "m")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_causal": False}, "is_causal is false"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ],
)
def test_attention_in_both_directions_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        spec_from_config(CONFIG | {"architectures": None} | fields)
