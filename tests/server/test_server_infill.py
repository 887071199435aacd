"""`suffix` of /v1/completions and of ollama's /api/generate, by their own clients."""

from collections.abc import Iterator
from typing import Any

import ollama
import openai
import pytest

from tests.support.served import Served, serving
from tests.support.tiny_model import SPECIAL, make_tiny_model

MARKERS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
PREFIX, SUFFIX, MIDDLE, PAD = range(len(SPECIAL), len(SPECIAL) + 4)
ASKED: dict[str, Any] = {"model": "coder", "max_tokens": 8, "temperature": 0}
SHOWN: dict[str, Any] = {"return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_tiny_model(tmp_path_factory.mktemp("coder"), MARKERS)
    with serving(str(folder), "--threads", "1", "--max-model-len", "256", "--served-model-name", "coder") as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.client()


def ids_of(client: openai.OpenAI, text: str) -> list[int]:
    shown = client.completions.create(**{**ASKED, "max_tokens": 1}, prompt=text, extra_body=SHOWN)
    return shown.choices[0].prompt_token_ids  # type: ignore[attr-defined]


def test_the_gap_is_asked_for(client: openai.OpenAI) -> None:
    """Whole, streamed, and of several prompts, one of them token ids."""
    expected = [PREFIX, *ids_of(client, "the quick"), SUFFIX, *ids_of(client, " dog"), MIDDLE]
    plain = client.completions.create(**ASKED, prompt=expected)
    found = client.completions.create(**ASKED, prompt="the quick", suffix=" dog", extra_body=SHOWN)
    assert found.choices[0].prompt_token_ids == expected  # type: ignore[attr-defined]
    assert found.choices[0].text == plain.choices[0].text
    stream = client.completions.create(**ASKED, prompt="the quick", suffix=" dog", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
    pair: Any = [ids_of(client, "the quick"), ids_of(client, "fox")]
    both = client.completions.create(**ASKED, prompt=pair, suffix=" dog", extra_body=SHOWN)
    assert both.choices[0].text == plain.choices[0].text
    assert both.choices[1].prompt_token_ids[:3] == [PREFIX, *ids_of(client, "fox")[:2]]  # type: ignore[attr-defined]
    empty = client.completions.create(**ASKED, prompt="the", suffix="", extra_body=SHOWN)
    assert empty.choices[0].prompt_token_ids == ids_of(client, "the")  # type: ignore[attr-defined]


def test_an_answer_ends_where_the_file_does(client: openai.OpenAI) -> None:
    answer = client.completions.create(**ASKED, prompt="the", suffix=" dog", logit_bias={str(PAD): 100})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    answer = client.completions.create(**ASKED, prompt="the", logit_bias={str(PAD): 100})
    assert answer.choices[0].finish_reason == "length", "without a gap it is a token as any other"


def test_ollamas_clients_fill_gaps(server: Served, client: openai.OpenAI) -> None:
    expected = client.completions.create(**ASKED, prompt="the quick", suffix=" dog").choices[0].text
    options = {"temperature": 0, "num_predict": 8}
    with ollama.Client(host=server.url.removesuffix("/v1")) as other:
        assert other.generate("coder", "the quick", suffix=" dog", options=options).response == expected
        parts = other.generate("coder", "the quick", suffix=" dog", options=options, stream=True)
        assert "".join(part.response for part in parts) == expected
        assert "insert" in (other.show("coder").capabilities or ())
        with pytest.raises(ollama.ResponseError, match="with a prompt alone, without system"):
            other.generate("coder", "the", suffix=" dog", system="Be brief.")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"echo": True}, "it does not go with echo"),
        ({"extra_body": {"truncate_prompt_tokens": 4}}, "it does not go with echo, truncate_prompt_tokens"),
        ({"suffix": "a" * 100_000}, "the prompt is too long"),
    ],
)
def test_what_does_not_go_with_it(client: openai.OpenAI, more: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(**{**ASKED, "prompt": "the", "suffix": " dog", **more})
