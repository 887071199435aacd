"""Guesses of another server, whatever it does."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.drafting.remote import RemoteProposer
from kvern.errors import ConfigError
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from tests.support.draft_server import MODELS, Body, Drafts, counting, drafts_served
from tests.support.ports import free_port
from tests.support.remote_drafts import PROMPTS, SMALL, answered, ask_always, compare, request, settle, wait_for_answers
from tests.support.served import serving


@pytest.fixture
def served() -> Iterator[tuple[Drafts, str]]:
    with drafts_served() as found:
        yield found


@pytest.fixture
def asking(tiny_model: Path) -> Callable[[str], RemoteProposer]:
    def make(url: str) -> RemoteProposer:
        config = EngineConfig(str(tiny_model), proposer="remote", draft_url=url)
        return RemoteProposer(config, describe_model(tiny_model, read_config(tiny_model), config.model_implementation))

    return make


def test_nobody_waits_and_a_late_answer_is_used_where_it_fits(
    served: tuple[Drafts, str], asking: Callable[[str], RemoteProposer]
) -> None:
    drafts, url = served
    proposer, fits, differs = asking(url), request([1, 5]), request([1, 30])
    drafts.gate.clear()
    assert proposer.propose([fits, differs], [3, 3]) == [[], []]
    fits.token_ids += [6]
    differs.token_ids += [31]
    assert proposer.propose([fits, differs], [3, 3]) == [[], []]
    fits.token_ids += [7]
    differs.token_ids += [9]
    drafts.gate.set()
    settle(proposer)
    assert proposer.propose([fits, differs], [2, 2]) == [[8, 9], []]
    assert drafts.bodies[0]["prompt"] == [[1, 5], [1, 30]]
    settle(proposer)
    assert drafts.bodies[1]["prompt"] == [[1, 5, 6, 7, 8, 9], [1, 30, 31, 9]], "it is asked ahead of what is verified"
    fits.token_ids += [8, 9, 10]
    differs.token_ids += [10]
    assert proposer.propose([fits, differs], [2, 2]) == [[11, 12], [11, 12]]


def test_an_answer_that_comes_too_late_is_given_up(
    served: tuple[Drafts, str], asking: Callable[[str], RemoteProposer], caplog: pytest.LogCaptureFixture
) -> None:
    """By how many tokens it has; the server is asked again after longer and longer pauses, and believed again."""
    drafts, url = served
    proposer, one = asking(url), request([1, 5])
    assert answered(proposer, one) == [6, 7, 8]
    drafts.gate.clear()
    steps = []
    for _ in range(3):
        before = len(drafts.bodies)
        count = 0
        proposer._guesses.clear()
        while proposer._asked is None or proposer._asked.answer.done():
            proposer.propose([one], [3])
            proposer._guesses.clear()
        asked = proposer._asked
        while proposer._asked is asked:
            assert proposer.propose([one], [3]) == [[]]
            count += 1
        assert asked.answer.cancelled()
        steps.append((count, proposer._pause))
        assert len(drafts.bodies) <= before + 1
    assert {count for count, _ in steps} == {asked.count + 1}
    assert [pause for _, pause in steps] == [0, 1, 3], "of 1, 2 and 4 steps the first has passed"
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the draft server {url} has not answered within {asked.count} steps; answers go on without its drafts, and it "
        "is asked again now and then"
    )
    drafts.gate.set()
    for _ in range(4):
        proposer.propose([one], [3])
    settle(proposer)
    assert proposer.propose([one], [3]) == [[6, 7, 8]]
    assert proposer._paused == 0


def of_first(**changes: Any) -> Callable[[Body], Body]:
    def answer(body: Body) -> Body:
        found = counting(body)
        found["choices"][0] |= changes
        return found

    return answer


LIES: dict[str, tuple[Callable[[Body], Any], str]] = {
    "page": (lambda _: b"<html>Welcome</html>", "is answered by no JSON: b'<html>"),
    "nothing": (lambda _: b"", "is answered by no JSON"),
    "depth": (lambda _: b"[" * 15_000, "is answered by no JSON"),
    "list": (lambda _: [], "1 texts are answered by None"),
    "no choice": (lambda _: {"choices": []}, "1 texts are answered by []: it must be a list of 1 choices"),
    "more rows": (lambda body: {"choices": counting(body)["choices"] * 2}, "must be a list of 1 choices"),
    "text": (lambda _: {"choices": ["a"]}, "a choice is 'a'"),
    "no tokens": (of_first(token_ids=None), "a choice has token_ids None"),
    "too many": (of_first(token_ids=[7] * 99), "at most"),
    "out of range": (of_first(token_ids=[1 << 40]), "it guesses 1099511627776: the model has token ids 0 to"),
    "negative": (of_first(token_ids=[-1]), "it guesses -1"),
    "number": (of_first(token_ids=[6.0]), "it guesses 6.0"),
    "truth": (of_first(token_ids=[True]), "it guesses True"),
    "index": (of_first(index=1), "a choice has the index 1"),
    "flood": (lambda _: b" " * 100_000, "is answered by more than"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_costs_its_drafts_alone(
    lie: str, served: tuple[Drafts, str], asking: Callable[[str], RemoteProposer], caplog: pytest.LogCaptureFixture
) -> None:
    drafts, url = served
    proposer, one = asking(url), request([1, 5])
    drafts.answer, said = LIES[lie]
    assert answered(proposer, one) == []
    for _ in range(2):
        while proposer._asked is None:
            assert proposer.propose([one], [3]) == [[]]
        settle(proposer)
        assert proposer.propose([one], [3]) == [[]]
    assert len(caplog.records) == 1
    assert said in caplog.text
    drafts.answer = counting
    while proposer._asked is None:
        proposer.propose([one], [3])
    settle(proposer)
    assert proposer.propose([one], [3]) == [[6, 7, 8]]


@pytest.mark.parametrize(
    ("status", "headers", "models", "said"),
    [
        (500, {}, MODELS, "GET /v1/models is answered by status 500"),
        (302, {"Location": "http://127.0.0.1:9/"}, MODELS, "answered by status 302"),
        (200, {"Content-Length": "5000"}, MODELS, "fails: "),
        (200, {}, {"data": []}, "it must name a model and its max_model_len"),
        (200, {}, [1], "it must name a model and its max_model_len"),
    ],
)
def test_what_is_no_draft_server_is_said_once(
    status: int,
    headers: dict[str, str],
    models: Any,
    said: str,
    served: tuple[Drafts, str],
    asking: Callable[[str], RemoteProposer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafts, url = served
    drafts.status, drafts.headers, drafts.models = status, {"Connection": "close", **headers}, models
    assert answered(asking(url), request([1, 5])) == []
    assert len(caplog.records) == 1
    assert said in caplog.text


def test_a_server_that_dies_and_comes_back(
    asking: Callable[[str], RemoteProposer], caplog: pytest.LogCaptureFixture
) -> None:
    with drafts_served() as (drafts, url):
        proposer, one = asking(url), request([1, 5])
        assert answered(proposer, one) == [6, 7, 8]
        drafts.headers = {"Connection": "close"}
        one.token_ids += [50]
        assert answered(proposer, one) in ([], [51, 52, 53])
    one.token_ids += [60]
    assert answered(proposer, one) == []
    assert "Cannot connect" in caplog.text
    assert len(caplog.records) == 1


def test_nobody_listens(asking: Callable[[str], RemoteProposer], caplog: pytest.LogCaptureFixture) -> None:
    assert answered(asking(f"http://127.0.0.1:{free_port()}/v1"), request([1, 5])) == []
    assert "Cannot connect" in caplog.text


def test_how_texts_are_asked_for(served: tuple[Drafts, str], asking: Callable[[str], RemoteProposer]) -> None:
    """Greedy ones together; others with their seeds, tenants with salts that do not name them, and none too long."""
    drafts, url = served
    proposer = asking(url)
    drawn = {"temperature": 0.5, "top_p": 0.9}
    texts = [
        request([1, 5]),
        request([1, 6], params=drawn, seed=7),
        request([1, 7], namespace=b"tenant\0salt"),
        request([1] * 64),
        request([1, 8]),
        request([1, 9]),
    ]
    proposer.propose(texts, [2, 2, 2, 2, 2, 0])
    settle(proposer)
    found = {tuple(prompt[-1] for prompt in body["prompt"]): body for body in drafts.bodies}
    assert found.keys() == {(5, 8), (6,), (7,)}
    assert found[6,].items() >= {"temperature": 0.5, "top_p": 0.9, "seed": 7}.items()
    assert found[5, 8]["temperature"] == 0
    assert "cache_salt" not in found[5, 8]
    assert "tenant" not in found[7,]["cache_salt"]
    assert [guess[:1] for guess in proposer.propose(texts, [2] * 6)] == [[6], [7], [8], [], [9], []]


def test_the_thread_ends_with_the_proposer(served: tuple[Drafts, str], asking: Callable[[str], RemoteProposer]) -> None:
    others = set(threading.enumerate())
    proposer = asking(served[1])
    (thread,) = {thread for thread in threading.enumerate() if thread.name == "kvern-drafts"} - others
    served[0].gate.clear()
    proposer.propose([request([1, 5])], [3])
    del proposer
    gc.collect()
    thread.join(240)
    assert not thread.is_alive()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_answers(monkeypatch)


@pytest.mark.parametrize("temperature", [0, 1])
def test_tokens_are_those_without(
    temperature: int, patient: None, served: tuple[Drafts, str], tiny_model: Path
) -> None:
    """Whatever is guessed, right for a while and wrong at every seventh place."""
    drafts, url = served
    with (
        LLM(str(tiny_model), **SMALL) as plain,
        LLM(str(tiny_model), proposer="remote", draft_url=url, **SMALL) as guessing,
    ):
        ask_always(guessing)
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=50, ignore_eos=True, n=1 + temperature)
        texts = [
            output.prompt_token_ids + answer.token_ids
            for output in plain.generate(PROMPTS, params)
            for answer in output.outputs
        ]

        def answer(body: Body) -> Body:
            choices = []
            for index, prompt in enumerate(body["prompt"]):
                text = next((text for text in texts if text[: len(prompt)] == prompt), [])
                known = text[len(prompt) : len(prompt) + body["max_tokens"]]
                guess = [token if (len(prompt) + ahead) % 7 else 3 for ahead, token in enumerate(known)]
                choices.append({"index": index, "token_ids": guess})
            return {"choices": choices}

        drafts.answer = answer
        count, right = compare(plain, guessing, temperature)
        assert 0 < right < count


@pytest.mark.nightly
def test_another_kvern_draws_by_the_same_random_numbers(patient: None, tiny_model: Path) -> None:
    """With the same model nearly all of its drafts are right, greedy or not."""
    flags = ("--dtype", "float32", "--threads", "1", "--max-model-len", "64")
    with (
        serving("--model", str(tiny_model), *flags) as served,
        LLM(str(tiny_model), **SMALL) as plain,
        LLM(str(tiny_model), proposer="remote", draft_url=served.url, **SMALL) as guessing,
    ):
        ask_always(guessing)
        for temperature in (0, 1):
            count, right = compare(plain, guessing, temperature)
            assert right > 0.9 * count > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_as_text": True}, "draft_as_text is on, and says how the server at draft_url is asked: give that, too"),
        ({"draft_url": "http://a"}, "nobody asks it: give proposer remote, too"),
        ({"draft_url": "a:80", "proposer": "remote"}, "draft_url is 'a:80': it must begin with http:// or https://"),
        ({"proposer": "remote"}, "name it by draft_url"),
        ({"proposer": "ngram", "draft_model": "small"}, "proposer is ngram and draft_model small: leave one out"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**options)
