"""Images that were encoded before the encoder's weights changed are encoded again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from tests.support.internals import check_integrity, engine_of
from tests.support.new_weights import change_weights, perturbed
from tests.support.vision_models import make_vision_model, picture

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 512, "max_batch_requests": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
TALK = [
    {
        "role": "user",
        "content": [{"type": "image", "image": picture(100, 130)}, {"type": "text", "text": "what is in this picture"}],
    }
]


def told(llm: LLM) -> list[dict[int, float]]:
    """The answer's tokens, with what the model says of each."""
    (output,) = llm.chat([TALK], PARAMS)
    return [{token: entry.logprob for token, entry in table.items()} for table in output.outputs[0].logprobs or ()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", [True, False])
def test_images_are_encoded_with_the_new_weights(tmp_path: Path, keep: bool) -> None:
    old, new = make_vision_model("qwen3_vl", tmp_path / "old"), tmp_path / "new"
    changed = perturbed(old, "visual", spread=0.5)
    assert changed
    shutil.copytree(old, new)
    save_file(load_file(old / "model.safetensors") | changed, new / "model.safetensors")
    save_file(changed, tmp_path / "tower.safetensors")
    with LLM(str(new), **OPTIONS) as llm:
        expected = told(llm)
    with LLM(str(old), **OPTIONS) as llm:
        assert told(llm) != expected
        before = engine_of(llm).statistics().encoded_images
        told(llm)
        assert engine_of(llm).statistics().encoded_images == before == 1, "it was there"
        change_weights(llm, "1", tmp_path / "tower.safetensors", keep=keep)
        assert told(llm) == expected
        assert engine_of(llm).statistics().encoded_images == 2
        check_integrity(llm)
