"""Many log-probabilities are told and written in small parts, and the event loop does other work in between."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvern.engine.output import Answer
from kvern.request.events import MOST_TOLD, TokenEvent, in_parts
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import Logprob
from kvern.server.config import ServerConfig
from kvern.server.http import json_parts
from kvern.text.tokenizer import Tokenizer
from tests.support.watched_loop import Ask, watched_server

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


def test_tokens_and_their_log_probabilities_come_together(tiny_model: Path) -> None:
    """Also if an engine died after it had told some of the log-probabilities, and another one begins anew."""
    tokenizer = Tokenizer(tiny_model)
    tokens = tokenizer.encode("the quick fox jumps over the fox" * 4)
    tables = [{token: Logprob(-place / 8, 1), 9999: Logprob(-9.0, 2)} for place, token in enumerate(tokens)]
    event = TokenEvent("r", tokens, tables, finish_reason="length")
    whole, parted = (Answer(tokenizer, [5], ResolvedParams(logprobs=1), None, 0) for _ in range(2))
    whole.add(event)
    parted.expect(tables[:3])
    parted.expect(tables[:20])
    parted.add(replace(event, logprobs=tables[20:]))
    assert parted.output == whole.output
    assert whole.output.text == tokenizer.decode(tokens) and len(whole.output.logprobs or ()) == len(tokens)


Watched = Callable[[str, dict[str, Any]], tuple[bytes, float]]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """What asks a server, and returns the answer and the seconds that a callback of its loop computed at most."""
    config = ServerConfig(data_dir=tmp_path_factory.mktemp("data"))
    with asyncio.Runner() as runner:
        server = watched_server(config)
        ask, times = runner.run(server.__aenter__())
        runner.run(_answered(ask, "/v1/chat/completions", SAID | {"max_tokens": 1}))  # compiles the template

        def asked(path: str, body: dict[str, Any]) -> tuple[bytes, float]:
            times.clear()
            answer = runner.run(_answered(ask, path, body))
            return b"".join(answer), max(times)

        yield asked
        runner.run(server.__aexit__(None, None, None))


async def _answered(ask: Ask, path: str, body: dict[str, Any]) -> list[bytes]:
    return await ask(path, body)


SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story"}]}
LONG: dict[str, Any] = {"ignore_eos": True, "temperature": 1}
MANY: dict[str, Any] = LONG | {"max_tokens": 30}
TEXTS: dict[str, Any] = {"prompt": [f"Once {number}" for number in range(8)], "n": 8, "logprobs": 100}
CHATS: dict[str, Any] = SAID | {"n": 64, "logprobs": True, "top_logprobs": 100}
PROMPT: dict[str, Any] = {"prompt": [7] * 1200, "prompt_logprobs": 100, "max_tokens": 1, "logprobs": 100}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 150, "ignore_eos": True, "temperature": 0}
RESPONSE: dict[str, Any] = {"input": "Tell me a story", "top_logprobs": 100, "max_output_tokens": 500, **LONG}
OLLAMA: dict[str, Any] = {"model": "kvern-1m", "logprobs": True, "top_logprobs": 100}
STREAM: dict[str, Any] = {"stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXTS | MANY),
        ("/v1/completions", TEXTS | MANY | STREAM),
        ("/v1/completions", PROMPT | {"echo": True}),
        ("/v1/completions", BEAMS | {"prompt": "Once", "logprobs": 100}),
        ("/v1/chat/completions", CHATS | MANY),
        ("/v1/chat/completions", CHATS | MANY | STREAM | {"stream_interval": 40}),
        ("/v1/responses", RESPONSE),
        ("/v1/responses", RESPONSE | STREAM),
        ("/v1/responses", RESPONSE | STREAM | {"background": True}),
        ("/api/chat", OLLAMA | SAID | {"options": {"num_predict": 200}, "stream": False}),
        ("/api/generate", OLLAMA | {"prompt": "Once", "options": {"num_predict": 200}}),
    ],
)
def test_the_event_loop_writes_log_probabilities_in_turn(path: str, body: dict[str, Any], watched: Watched) -> None:
    answer, longest = watched(path, body)
    assert answer.count(b'"logprob') > 0
    assert 0 < longest < 0.020
