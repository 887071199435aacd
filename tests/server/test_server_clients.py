"""Programs that people already have, against the server, as they come."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from kvern import LLM, SamplingParams
from tests.support.families import reference_logits
from tests.support.served import QUESTION, Served


@pytest.fixture(scope="module")
def server(talking_server: Served) -> Served:
    return talking_server


TALE = [{"role": "user", "content": "Tell me a story about a fox."}]


def test_predicted_outputs(server: Served) -> None:
    """As OpenAI's own client sends them: the answer is the same, and the usage says what they were good for."""
    client = server.client()
    asked: Any = {"model": "kvern-12m", "messages": TALE, "temperature": 0, "max_completion_tokens": 60}
    plain = client.chat.completions.create(**asked)
    text, tokens = plain.choices[0].message.content, plain.usage.completion_tokens
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    half = len(text) // 2
    parts = [{"type": "text", "text": part} for part in (text[:half], text[half:])]
    accepted = 0
    for number, content in enumerate((text, parts) * 15):
        if number > 1 and accepted:
            break
        found = client.chat.completions.create(prediction={"type": "content", "content": content}, **asked)
        details = found.usage.completion_tokens_details
        assert (found.choices[0].message.content, found.usage.completion_tokens) == (text, tokens)
        assert 0 <= details.accepted_prediction_tokens <= tokens
        assert details.rejected_prediction_tokens >= 0
        accepted += details.accepted_prediction_tokens
    assert accepted > 0, "how many drafts pay is measured, but some are tried, also on a busy machine"
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    chunks = list(
        client.chat.completions.create(
            prediction={"type": "content", "content": text}, stream=True, stream_options=options, **asked
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    counts = [chunk.usage.completion_tokens_details.accepted_prediction_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert server.figure("spec_decode_num_accepted_tokens_total") >= accepted + counts[-1]
    for name in ("draft_tokens", "accepted_tokens"):
        first = server.figure(f"spec_decode_num_{name}_per_pos_total", position="0")
        assert 0 < first <= server.figure("spec_decode_num_drafts_total")
        whole = server.figure(f"spec_decode_num_{name}_total")
        assert server.figure(f"spec_decode_num_{name}_per_pos_total") == whole


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ("a", "prediction is 'a': it must be an object"),
        ({"type": "text", "content": "a"}, "prediction.type is 'text': it must be content"),
        ({"type": "content"}, "prediction.content is None: it must be a text, or a list of parts of type text"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content is"),
        ({"type": "content", "content": "fox " * 2000}, "prediction is longer than the maximum context length of 1024"),
    ],
)
def test_wrong_predictions_are_refused_by_name(server: Served, prediction: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().chat.completions.create(model="kvern-12m", messages=QUESTION, prediction=prediction)
    assert said in str(refused.value)
    assert refused.value.param == "prediction"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, max_model_len=1024, dtype="float32")


CALLS = """
import json, litellm, sys
url, question = sys.argv[1], json.loads(sys.argv[2])
common = {"api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 24}
answer = litellm.completion(model="openai/kvern-12m", messages=question, **common)
stream = litellm.completion(model="openai/kvern-12m", messages=question, stream=True, **common)
text = litellm.text_completion(model="text-completion-openai/kvern-12m", prompt="The fox", **common)
claude = litellm.completion(
    model="anthropic/kvern-12m", messages=question, api_base=url.removesuffix("/v1"), api_key="none", max_tokens=24,
    extra_body={"temperature": 0},
)
ranked = litellm.rerank(
    model="hosted_vllm/kvern-12m", api_base=url, api_key="none", query="a fox", documents=["a dog", "foxes"], top_n=1
)
print(json.dumps({
    "ranked": [[entry["index"], entry["relevance_score"], entry["document"]["text"]] for entry in ranked.results],
    "answer": answer.choices[0].message.content,
    "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
    "text": text.choices[0].text,
    "claude": claude.choices[0].message.content,
}))
"""


@pytest.mark.nightly
def test_litellm(server: Served, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    chat, text = llm.chat(QUESTION, params)[0].outputs[0].text, llm.generate(["The fox"], params)[0].outputs[0].text
    command = [sys.executable, "-c", CALLS, server.url, json.dumps(QUESTION)]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    body = {"query": "a fox", "documents": ["a dog", "foxes"], "top_n": 1}
    ranked = server.raw("POST", "/v1/rerank", json.dumps(body).encode())[2]["results"]
    for [index, score, text_of], result in zip(found.pop("ranked"), ranked, strict=True):
        assert (index, text_of) == (result["index"], result["document"]["text"])
        assert score == pytest.approx(result["relevance_score"], abs=1e-3)
    assert found == {"answer": chat, "stream": chat, "text": text, "claude": chat}


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
CHOICES = 'doc_to_choice: ["42", "7", "one hundred"]\nmetric_list:\n  - metric: acc'
GENERATE = (
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 24, temperature: 0}\nmetric_list:\n  - metric: exact_match'
)


@pytest.mark.parametrize(
    ("model", "path", "kind", "more"),
    [
        pytest.param("local-completions", "completions", "multiple_choice", CHOICES, marks=pytest.mark.nightly),
        pytest.param("local-completions", "completions", "generate_until", GENERATE, marks=pytest.mark.nightly),
        pytest.param(
            "local-chat-completions", "chat/completions", "generate_until", GENERATE, marks=pytest.mark.nightly
        ),
    ],
    ids=["choices", "completions", "chat"],
)
def test_lm_eval(server: Served, llm: LLM, tmp_path: Path, model: str, path: str, kind: str, more: str) -> None:
    """Its own evaluation of a task made here: answers are the engine's, log-likelihoods also those of transformers."""
    rows = [{"question": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(10, 18)]
    if kind == "multiple_choice":
        rows = [{"question": f"What is {number} + 25? The answer is", "answer": "0"} for number in range(17, 25)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "made.yaml").write_text(TASK.format(name="made", data=data, kind=kind, more=more))
    tokenizer = llm.tokenizer.folder
    arguments = f"model=kvern-12m,base_url={server.url}/{path},tokenizer={tokenizer},tokenizer_backend=huggingface"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", "made"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    if "chat" in model:
        command.append("--apply_chat_template")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    given = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(given) == len(rows)
    for sample in given:
        check(sample, kind, "chat" in model, llm)


def check(sample: dict[str, Any], kind: str, chat: bool, llm: LLM) -> None:
    question = sample["doc"]["question"]
    if kind == "generate_until":
        params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
        if chat:
            [output] = llm.chat([{"role": "user", "content": question}], params)
        else:
            [output] = llm.generate([question], params)
        assert sample["resps"][0][0] == output.outputs[0].text
        return
    for choice, (response,) in zip(["42", "7", "one hundred"], sample["resps"], strict=True):
        [score] = llm.score([(question, f" {choice}")], add_special_tokens=False)
        context = llm.tokenizer.encode(question, add_special_tokens=False)
        logits = reference_logits(llm.tokenizer.folder, context + score.token_ids)[len(context) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(score.token_ids)[:, None])
        for found, greedy in ((float(response[0]), str(response[1]) == "True"), (score.logprob, score.is_greedy)):
            assert found == pytest.approx(float(logprobs.sum()), abs=1e-3)
            assert greedy == (logits.argmax(-1).tolist() == score.token_ids)
