"""Many log-probabilities are written in small parts, and the event loop does other work in between."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from kvern.api.completion_answers import CompletionWriter
from kvern.request.outputs import RequestOutput
from kvern.server.config import ServerConfig
from kvern.server.http import json_parts
from kvern.serving.workload import STEPS_AT_ONCE
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


@pytest.mark.sample(3)
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


def test_whole_answers_are_written_while_they_grow(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that answers which end together do not wait for each other's log-probabilities."""
    write, written = CompletionWriter.write_some, Counter[bool]()

    def noting(self: CompletionWriter, outputs: Sequence[RequestOutput]) -> int:
        count = write(self, outputs)
        written[outputs[0].finished] += count
        return count

    monkeypatch.setattr(CompletionWriter, "write_some", noting)
    watched("/v1/completions", LONG | {"prompt": "Once", "max_tokens": 100, "logprobs": 5})
    assert sum(written.values()) == 600 and written[False] >= 6 * (100 - 2 * STEPS_AT_ONCE)
