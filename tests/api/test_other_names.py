"""Fields of other engines, and fields that nobody knows: obeyed, refused by name, or ignored."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvern.api.completions import CHAT, COMPLETIONS, known_fields, read_completion
from kvern.api.errors import HttpError
from kvern.api.messages import MESSAGES, read_message
from kvern.api.ollama import CHAT as OLLAMA
from kvern.api.ollama import read_body
from kvern.api.other_names import ignored
from kvern.api.responses import read_response
from kvern.batch.requests import RowRules, read_openai_row
from kvern.errors import InvalidParameter, KvernError
from kvern.request.sampling_params import SamplingParams
from kvern.text.tokenizer import Tokenizer
from tests.support.served import Served

TALK = [{"role": "user", "content": "a"}]
RESPONSES = "/v1/responses"


def asked(url: str, fields: dict[str, Any]) -> SamplingParams:
    """What a body with these fields asks for."""
    if url == OLLAMA:
        return read_body({"messages": TALK, "options": fields}, url).params
    if url == MESSAGES:
        given = fields if set(fields) & {"n_predict", "max_new_tokens"} else {"max_tokens": 9, **fields}
        return read_message({"messages": TALK, **given}, False).params
    if url == RESPONSES:
        return read_response({"input": "a", **fields}, "m", []).params
    if url == "batch":
        row = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "a", **fields}}
        return read_openai_row(row, SamplingParams(), "m", 0, Tokenizer(Path())).params
    if url == "row":
        return RowRules(SamplingParams()).read({"prompt": "a", **fields}).params
    return read_completion({"messages": TALK, **fields} if url == CHAT else {"prompt": "a", **fields}, url).params


EVERYWHERE = (COMPLETIONS, CHAT, MESSAGES, RESPONSES, OLLAMA, "batch", "row")


@pytest.mark.parametrize("url", EVERYWHERE)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"n_predict": -1}, {"max_tokens": None}),
        ({"n_predict": -2}, {"max_tokens": None}),
        ({"max_new_tokens": 5, "min_new_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"repeat_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "repeat_last_n": -1}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "repeat_last_n": 0}, {"repetition_penalty": 1}),
        ({"repeat_last_n": 64}, {"repetition_penalty": None}),
        ({"typ_p": 0.5, "nsigma": 2.0, "sampling_seed": 3}, {"typical_p": 0.5, "top_n_sigma": 2.0, "seed": 3}),
        ({"stopping_strings": ["b"]}, {"stop": ["b"]}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"mirostat": 0, "tfs_z": 1.0, "min_keep": 1, "samplers": None}, {}),
    ],
    ids=lambda value: "-".join(value),
)
def test_other_names_are_obeyed(url: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    if url == "batch" and "mirostat" in fields:
        return  # its rows name nothing that they do not ask for
    params = asked(url, fields)
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize("url", EVERYWHERE)
@pytest.mark.parametrize(
    "fields",
    [{"mirostat": 2}, {"tfs_z": 0.5}, {"lora": [{"id": 0, "scale": 1.0}]}, {"lora_path": "a"}, {"samplers": ["top_k"]},
     {"min_keep": 3}, {"penalize_nl": False}, {"repeat_penalty": 1.3, "repeat_last_n": 64},
     {"n_predict": 5, "max_tokens": 6}, {"repeat_last_n": "all"}],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_would_change_an_answer_is_refused_by_name(url: str, fields: dict[str, Any]) -> None:
    with pytest.raises(KvernError, match=list(fields)[0 if "n_predict" in fields else -1]):
        asked(url, fields)


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT, MESSAGES, RESPONSES, OLLAMA])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temprature", 0, "did you mean temperature?"),
        ("maxTokens", 5, "did you mean max_tokens?"),
        ("stopSequences", ["a"], "did you mean stop_sequences?"),
        ("topK", 5, None),
        ("repetition_penality", 1.5, "did you mean repetition_penalty?"),
        ("no_repeat_ngram_size", 3, "does not know it"),
        ("smoothing_factor", 0.5, "does not know it"),
        ("top_a", 0.2, "does not know it"),
        ("penalty_alpha", 0.2, "does not know it"),
        ("sampling_params", {"top_k": 3}, "beside the others"),
        ("num_beams", 4, "use_beam_search"),
        ("custom_logit_processor", "x", "logits_processors"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_misspellings_and_unknown_sampling_are_refused(url: str, name: str, value: Any, said: str | None) -> None:
    if said is None:
        assert read_completion({"prompt": "a", "top_k": 5}, COMPLETIONS).params.top_k == 5
        return
    with pytest.raises(HttpError, match=name) as refused:
        asked(url, {name: value})
    assert said in str(refused.value) and refused.value.param == name
    if not said.startswith("did you"):
        assert asked(url, {name: None}) == asked(url, {})


HARMLESS = {
    "cache_prompt": True, "id_slot": 1, "slot_id": 1, "n_keep": 5, "timings_per_token": True, "return_progress": True,
    "mirostat_tau": 5.0, "top_a": 0, "smoothing_factor": 0.0, "no_repeat_ngram_size": 0, "models": ["a"],
    "provider": {},
    "user_id": "x", "trace_id": "x", "rid": "x", "keep_alive": "5m", "num_ctx": 4096, "num_thread": 4, "details": True,
    "guided_decoding_backend": "auto", "temprature": None, "colour": "red",
}  # fmt: skip


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT, MESSAGES, RESPONSES, OLLAMA])
def test_what_changes_nothing_is_ignored(url: str) -> None:
    assert asked(url, HARMLESS) == asked(url, {})
    assert {"cache_prompt", "colour"} < set(ignored(HARMLESS, known_fields(CHAT)))


@pytest.mark.parametrize(
    ("url", "fields", "said"),
    [
        (COMPLETIONS, {"tools": [{"type": "function"}]}, "tools is .*: it is of conversations"),
        (COMPLETIONS, {"reasoning_effort": "low"}, "reasoning_effort is 'low': it is of conversations"),
        (COMPLETIONS, {"messages": TALK}, "messages is .*: it is of conversations"),
        (CHAT, {"prompt": "b"}, "prompt is 'b': it is of /v1/completions"),
        (CHAT, {"system": "b"}, "system is 'b': send a message of role system"),
        (CHAT, {"options": {"top_k": 1}}, "options is .*: send its fields beside the others"),
        (CHAT, {"think": False}, "think is False: send enable_thinking"),
        (CHAT, {"separate_reasoning": False}, "separate_reasoning is False"),
        (MESSAGES, {"n": 2}, "n is 2: this API gives one answer"),
        (MESSAGES, {"logprobs": True}, "logprobs is True"),
        (RESPONSES, {"n": 2}, "n is 2: this API gives one answer"),
        (RESPONSES, {"prompt_logprobs": 1}, "prompt_logprobs is 1"),
        (OLLAMA, {"n": 2}, "options.n is 2: this API gives one answer"),
        (OLLAMA, {"logprobs": 2}, "options.logprobs is 2"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_fields_of_another_api(url: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(HttpError, match=said):
        asked(url, fields)


def test_ollamas_options_stand_in_options() -> None:
    with pytest.raises(HttpError, match=r"temperature is 0\.5: this API does not take it there"):
        read_body({"messages": TALK, "temperature": 0.5}, OLLAMA)


def test_nothing_that_asks_for_nothing_is_refused() -> None:
    plain = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "messages": None, "n": 1}
    assert asked(COMPLETIONS, plain) == asked(COMPLETIONS, {})
    assert asked(MESSAGES, {"n": 1, "logprobs": False}) == asked(MESSAGES, {})
    assert asked(CHAT, {"do_sample": True}).temperature is None
    assert asked(CHAT, {"do_sample": False, "temperature": 0.7}).temperature == 0
    assert asked("row", {"lora": "", "options": ["A", "B"], "context": "my own column"}) == SamplingParams()


def test_bodies_of_unknown_fields_are_refused_at_once() -> None:
    with pytest.raises(HttpError, match="the body has 10000 fields that this API does not know"):
        asked(CHAT, {f"temperatur{number}": 1 for number in range(10_000)})


def test_batches_name_what_they_do_not_know() -> None:
    with pytest.raises(InvalidParameter, match="unknown field 'colour'"):
        asked("batch", {"colour": 1})


def test_over_http(server: Served, tmp_path: Path) -> None:
    plain = {"prompt": "Once", "temperature": 0, "max_tokens": 5, "stop": [" "], "return_token_ids": True}
    other = {"prompt": "Once", "do_sample": False, "n_predict": 5, "stop_sequences": [" "], "return_token_ids": True}
    texts, headers = [], []
    for body in (plain, other, {**plain, "cache_prompt": True}):
        status, head, answer = server.raw("POST", COMPLETIONS, json.dumps(body).encode())
        assert status == 200
        texts.append(answer["choices"][0])
        headers.append(head.get("x-kvern-ignored-fields"))
    assert texts[0] == texts[1] == texts[2] and headers == [None, None, "cache_prompt"]
    for path, body in ((MESSAGES, {"messages": TALK, "max_tokens": 1}), (RESPONSES, {"input": "a"})):
        extra = {**body, "extra_body": {"mirostat": 2}}
        status, _, answer = server.raw("POST", path, json.dumps(extra).encode())
        assert status == 400 and "mirostat is 2" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("name", "meant"), [("temprature", "temperature"), ("maxTokens", "max_tokens"), ("Top-K", "top_k")]
)
def test_a_misspelt_parameter_of_a_row_is_refused(name: str, meant: str) -> None:
    with pytest.raises(InvalidParameter, match=f"'{name}' is no sampling parameter: did you mean {meant}"):
        RowRules(SamplingParams()).read({"prompt": "hello", name: 1})


@pytest.mark.parametrize("name", ["seeds", "label", "n_predict", "steps", "max_tokens"])
def test_what_is_no_misspelling_is_read(name: str) -> None:
    assert RowRules(SamplingParams()).read({"prompt": "hello", name: 1}).prompt == "hello"
