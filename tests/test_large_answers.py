"""Many log-probabilities are told and written in small parts."""

from typing import Any

import msgspec
import pytest

from kvern.events import MOST_TOLD, TokenEvent, in_parts
from kvern.server.large_answers import json_parts
from kvern.step import Logprob

LEAF = {"token": "a", "logprob": -1.5, "bytes": [97]}
TOP: list[dict[str, Any]] = [{**LEAF, "top_logprobs": [LEAF] * 100} for _ in range(500)]
TABLES = [None, *({token: {"logprob": 0.5, "rank": 1, "decoded_token": "é"} for token in range(100)},) * 1900]


@pytest.mark.parametrize(
    "answer",
    [
        {"id": "a", "choices": [{"message": {"content": "é"}, "logprobs": {"content": TOP, "refusal": None}}]},
        {"choices": [{"text": "", "prompt_logprobs": TABLES, "logprobs": None}], "usage": {"a": 1}},
        {"prompt_logprobs": TABLES, "choices": []},
        {"logprobs": {"top_logprobs": [{"a": -1.0}] * 9, "tokens": []}, "nothing": {}},
    ],
)
def test_no_part_of_a_large_answer_is_large(answer: dict[str, Any]) -> None:
    parts = list(json_parts(answer))
    assert msgspec.json.decode(b"".join(parts)) == msgspec.json.decode(msgspec.json.encode(answer))
    assert max(map(len, parts)) < 10_000


def test_log_probabilities_are_told_in_parts() -> None:
    table = {token: Logprob(-1.0, 1) for token in range(101)}
    events = [
        TokenEvent("a", [1], prompt_logprobs=[table] * 1900, cached_tokens=3, finish_reason="stop"),
        *(TokenEvent(str(number), [number], [table]) for number in range(100)),
        TokenEvent("b", [2]),
    ]
    parts = list(in_parts(events))
    tables = [
        [table for event in part for table in (*(event.prompt_logprobs or ()), *(event.logprobs or ()))]
        for part in parts
    ]
    told = [sum(map(len, each)) for each in tables]
    assert max(told) <= MOST_TOLD + len(table) and sum(told) == 2000 * len(table)
    ends = [event for part in parts for event in part if event.token_ids]
    assert [(event.request_id, event.token_ids) for event in ends] == [
        (item.request_id, item.token_ids) for item in events
    ]
    assert (ends[0].cached_tokens, ends[0].finish_reason) == (3, "stop")
    assert list(in_parts([])) == [[]]
