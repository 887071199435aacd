"""Guesses of a server whose model has other tokens: by text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM
from kvern.config import EngineConfig
from kvern.drafting.remote import RemoteProposer, Translation
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.text.tokenizer import Tokenizer
from tests.support.draft_server import MODELS, Drafts, drafts_served
from tests.support.remote_drafts import SMALL, answered, ask_always, compare, request, wait_for_answers
from tests.support.served import serving


@pytest.fixture
def served() -> Iterator[tuple[Drafts, str]]:
    with drafts_served() as found:
        yield found


def test_a_server_with_other_tokens_is_asked_by_text(served: tuple[Drafts, str], tiny_model: Path) -> None:
    """Its words become the model's tokens, but for the last, which may not be whole."""
    drafts, url = served
    config = EngineConfig(str(tiny_model), proposer="remote", draft_url=url, draft_as_text=True)
    spec = describe_model(tiny_model, read_config(tiny_model), config.model_implementation)
    proposer, tokenizer = RemoteProposer(config, spec), Tokenizer(tiny_model)
    known, follows = (
        tokenizer.encode("the cat sat on"),
        tokenizer.encode(" the mat and then it", add_special_tokens=False),
    )
    drafts.answer = lambda body: {"choices": [{"index": 0, "text": " the mat and then it"}]}
    one = request(known, params={"temperature": 0.7})
    assert answered(proposer, one, count=6) == follows[:-1][:6]
    body = drafts.bodies[0]
    assert body == {"model": "small", "max_tokens": 8, "temperature": 0, "prompt": ["the cat sat on"]}, "as any knows"
    one.token_ids += follows[:-1]
    drafts.answer = lambda body: {"choices": [{"index": 0, "token_ids": [5]}]}
    assert answered(proposer, one) == [], "it has to answer with text"


def test_of_a_long_text_the_end_is_asked(served: tuple[Drafts, str], tiny_model: Path) -> None:
    """As much as fits, cut in one place while it grows; a server that does not tell its context gets more."""
    tokenizer = Tokenizer(tiny_model)
    translation, ids = Translation(tokenizer), tokenizer.encode(" ".join(map(str, range(100, 160))))[:100]
    lengths, begins = range(30, 100, 3), []
    for length in lengths:
        cuts = [tokenizer.decode(ids[begin:length], skip_special_tokens=False) for begin in range(length)]
        begins.append(cuts.index(translation.text(ids[:length], 30)))
    assert begins == [-((30 - length) // 10) * 10 for length in lengths]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    drafts, url = served
    config = EngineConfig(str(tiny_model), proposer="remote", draft_url=url, draft_as_text=True)
    spec = describe_model(tiny_model, read_config(tiny_model), config.model_implementation)
    drafts.answer = lambda body: {"choices": [{"index": 0, "text": " a b"}]}
    for models, cut in ((MODELS, True), ({"data": [{"id": "small"}]}, False)):
        drafts.models = models
        answered(RemoteProposer(config, spec), request(ids))
        assert (len(drafts.bodies[-1]["prompt"][0]) < len(whole)) == cut


@pytest.mark.nightly
def test_texts_cross_between_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of another kvern are right that have come as text, and change no token."""
    wait_for_answers(monkeypatch)
    flags = ("--dtype", "float32", "--threads", "1", "--max-model-len", "256")
    options: dict[str, Any] = SMALL | {"draft_as_text": True}
    with (
        serving("--model", "kvern-1m", *flags) as served,
        LLM("kvern-1m", **SMALL, speculation="off") as plain,
        LLM("kvern-1m", proposer="remote", draft_url=served.url, **options) as guessing,
    ):
        ask_always(guessing)
        for temperature in (0, 1):
            count, right = compare(plain, guessing, temperature)
            assert 0 < right < count
