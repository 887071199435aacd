"""Prompts with images beside a draft head of the model's own, and with adapters or codes of its language model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, RequestOutput, SamplingParams
from tests.support.four_bit_checkpoints import AWQ
from tests.support.head_drafting import drafting
from tests.support.packers import awq, store
from tests.support.peft_adapters import make_adapter, merge
from tests.support.vision_models import expected_logprobs, make_vision_model, picture

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 256, "max_batch_requests": 2}
IMAGES = [picture(100, 60), picture(40, 90)]
TALK = [{"role": "user", "content": [*({"type": "image", "image": each} for each in IMAGES), "what is in this"]}]
TEXT_ALONE = r"(?!.*visual).*\.(q_proj|v_proj|down_proj)"


def with_draft_layer(folder: Path) -> Path:
    """A checkpoint of GLM-4.5V with a layer for multi-token prediction, which is a copy of the last one."""
    tensors = load_file(folder / "model.safetensors")
    layer, own = "model.language_model.layers.2.", "model.language_model.layers.1."
    tensors |= {name.replace(own, layer): tensor.clone() for name, tensor in tensors.items() if name.startswith(own)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}{name}.weight"] = torch.ones(64)
    tensors[f"{layer}eh_proj.weight"] = torch.randn(64, 128) / 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_models_own_layer_drafts_behind_images(tmp_path: Path) -> None:
    folder = make_vision_model("glm4v_moe", tmp_path / "model")
    with LLM(str(folder), **OPTIONS) as llm:
        [expected] = llm.chat(TALK, PARAMS)
    with LLM(str(with_draft_layer(folder)), draft_model="mtp", **OPTIONS) as llm, drafting(llm, 2) as found:
        [output] = llm.chat(TALK, PARAMS)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids and len(found) > 3


@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("qwen2_vl", "glm4v"))]
)
def test_adapters_change_the_language_model(kind: str, tmp_path: Path) -> None:
    folder = make_vision_model(kind, tmp_path / "model")
    adapter = make_adapter(folder, tmp_path / "adapter", 1, target_modules=TEXT_ALONE)
    merged = merge(folder, adapter, tmp_path / "merged")
    with LLM(str(folder), adapters={"one": str(adapter)}, **OPTIONS) as llm:
        for name, model in (("one", merged), (None, folder)):
            [output] = llm.chat(TALK, PARAMS, adapter=name)
            check(kind, model, output)


def check(kind: str, folder: Path, output: RequestOutput) -> None:
    """The answer's log-probabilities are those of transformers with the model in a folder."""
    answer, begin = output.outputs[0], len(output.prompt_token_ids)
    expected = expected_logprobs(kind, folder, [*output.prompt_token_ids, *answer.token_ids], IMAGES)
    for place, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs or [], strict=True)):
        assert entry[token].logprob == pytest.approx(float(expected[begin + place - 1, token]), abs=1e-4)


@pytest.mark.parametrize("kind", ["mistral3", pytest.param("qwen3_vl", marks=pytest.mark.nightly)])
def test_a_quantized_language_model_has_a_plain_encoder(kind: str, tmp_path: Path) -> None:
    folder = make_vision_model(kind, tmp_path / "model")
    made = store(folder, tmp_path, awq, r"^model\.layers\.\d+\.(self_attn|mlp)\..*_proj$", AWQ)
    with LLM(str(made.quantized), **OPTIONS) as llm:
        [output] = llm.chat(TALK, PARAMS.replace(max_tokens=4))
    check(kind, made.rounded, output)
