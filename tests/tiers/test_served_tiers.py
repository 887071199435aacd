"""`kvern serve --kv-tier host:SIZE`: figures of the store, and an engine that was killed comes back warm."""

import sys
from typing import Any

import anthropic
import pytest

from tests.support.served import Served, eventually, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory in /proc")
STORY = "Once upon a time there was a little dog who had a red ball. " * 20
OPTIONS = ("kvern-1m", "--threads", "1", "--max-model-len", "1024", "--dtype", "float32", "--device", "cpu")


@pytest.mark.nightly
def test_an_engine_that_was_killed_comes_back_warm() -> None:
    with serving(*OPTIONS, "--kv-tier", "host:64MB", "--kv-cache-tokens", "2048") as served:
        client = served.client()

        def ask() -> tuple[str, int]:
            answer = client.completions.create(model="kvern-1m", prompt=STORY, max_tokens=8, temperature=0)
            details = answer.usage.prompt_tokens_details if answer.usage else None
            return answer.choices[0].text, (details.cached_tokens if details else None) or 0

        expected, cached = ask()
        assert not cached
        eventually(lambda: bool(ask()) and served.figure("tier_stored_tokens_total", store="host") >= 128)
        served.kill_engine()
        eventually(lambda: served.figure("engine_ready") == 1)
        for number in range(10):  # a load may be late, and then the prompt is computed
            text, cached = ask()
            assert text == expected
            if served.figure("tier_hit_tokens_total", store="host"):
                assert number or cached >= 64
                break
        assert served.figure("tier_hit_tokens_total", store="host") >= 64
        assert served.figure("tier_stored_tokens_total", store="host") >= 128, "counts are those of both engines"
        assert served.figure("tier_is_on", store="host") == 1
        check_sources(served)


def check_sources(served: Served) -> None:
    """Each API says where the cached part of a prompt was."""
    asked: Any = {"model": "kvern-1m", "temperature": 0}
    talk: Any = [{"role": "user", "content": STORY}]
    client = served.client()
    messages = anthropic.Anthropic(base_url=served.url, api_key="none").messages
    usage: Any = client.completions.create(prompt=STORY, max_tokens=1, **asked).usage
    chat: Any = client.chat.completions.create(messages=talk, max_tokens=1, **asked).usage
    *_, last = client.chat.completions.create(
        messages=talk, max_tokens=1, stream=True, stream_options={"include_usage": True}, **asked
    )
    response: Any = client.responses.create(input=talk, max_output_tokens=1, **asked).usage
    message: Any = messages.create(messages=talk, max_tokens=1, model="kvern-1m").usage
    found = [usage.prompt_tokens_details, chat.prompt_tokens_details, last.usage.prompt_tokens_details]
    for details in [*found, response.input_tokens_details, message]:
        counts = details.cached_tokens_details
        cached = message.cache_read_input_tokens if details is message else details.cached_tokens
        assert counts.keys() == {"device", "host"}
        assert sum(counts.values()) == cached
    assert last.usage.prompt_tokens_details.cached_tokens_details["device"] > 0
