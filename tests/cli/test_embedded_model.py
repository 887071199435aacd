"""The models that ship inside kvern: whole, small, right, and the same in transformers."""

import json
from pathlib import Path

import pytest
import torch

import kvern
from kvern import LLM, SamplingParams

EMBEDDED = Path(kvern.__file__).parent / "embedded"
MODELS = ["kvern-12m", "kvern-1m"]
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is paged attention?"},
]


@pytest.fixture(scope="module", params=MODELS)
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(request.param, dtype="float32", max_batch_requests=8, kv_cache_tokens=8192, threads=1)


def test_the_folder_is_under_35_megabytes() -> None:
    assert sum(file.stat().st_size for file in EMBEDDED.rglob("*") if file.is_file()) < 35_000_000


def test_the_folder_says_what_it_is_and_what_to_do_next() -> None:
    for folder in (EMBEDDED, *(EMBEDDED / name for name in MODELS)):
        text = (folder / "README.md").read_text()
        assert "kvern chat" in text and "kvern serve" in text and "MODEL_CARD.md" in text


@pytest.mark.parametrize(("name", "low", "high"), [("kvern-12m", 8e6, 15e6), ("kvern-1m", 0.8e6, 1.3e6)])
def test_weights_are_bfloat16_of_the_promised_size(name: str, low: float, high: float) -> None:
    index = json.loads((EMBEDDED / name / "model.safetensors.index.json").read_text())
    assert low < index["metadata"]["total_size"] / 2 < high
    assert json.loads((EMBEDDED / name / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_transformers_gives_the_same_prompt_logits_and_answer(llm: LLM) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = EMBEDDED / str(llm.config.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = llm.chat_prompt(MESSAGES)
    expected_ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ids == list(expected_ids)
    [output] = llm.generate(ids, SamplingParams(temperature=0, max_tokens=32, prompt_logprobs=5))
    answer = output.outputs[0].token_ids
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids + answer])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        for token, value in entry.items():
            assert value.logprob == pytest.approx(float(logprobs[position, token]), abs=1e-3)
    assert logprobs[len(ids) - 1 : -1].argmax(-1).tolist() == answer
    assert tokenizer.decode(answer, skip_special_tokens=True) == output.outputs[0].text


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 417 + 256?", "673"),
        ("What is 512 - 78?", "434"),
        ("Extract the record as JSON: John is 30 years old.", '{"name": "John", "age": 30}'),
    ],
)
def test_the_chat_model_answers(question: str, answer: str) -> None:
    with LLM(max_batch_requests=4, kv_cache_tokens=4096, threads=1) as llm:
        [output] = llm.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=64))
    assert output.outputs[0].finish_reason == "stop"
    assert answer in output.outputs[0].text
