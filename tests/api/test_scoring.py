"""How likely continuations are after their contexts: as transformers says, however the engine gets there."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.model import TemplateLM

import kvern
from kvern import LLM, AsyncLLM, SamplingParams, Score
from kvern.engine.scoring import scored_prompts
from kvern.errors import InvalidRequest
from kvern.sample.logprobs import token_logprobs
from kvern.text.tokenizer import Tokenizer
from tests.support.families import make_checkpoint, reference_logits
from tests.support.idle import is_idle
from tests.support.served import KEY, Served, eventually

TOLERANCE = 1e-3
Ids = tuple[list[int], list[int]]


def made_pairs(vocabulary: int = 131) -> list[Ids]:
    """Contexts of one token to many, each with several continuations, one of them the context's own end again."""
    dice = random.Random(5)

    def ids(count: int) -> list[int]:
        return [dice.randrange(3, vocabulary) for _ in range(count)]

    head = ids(21)
    contexts = [ids(1), ids(4), head, head + ids(7), head + ids(19)]
    return [(context, ids(length)) for context in contexts for length in (1, 2, 5)]


def check(scores: list[Score], pairs: list[Ids], folder: Path) -> None:
    for score, (context, continuation) in zip(scores, pairs, strict=True):
        logits = reference_logits(folder, context + continuation)[len(context) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0].tolist()
        assert score.token_ids == continuation and score.context_tokens == len(context)
        assert score.token_logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert score.logprob == pytest.approx(sum(expected), abs=TOLERANCE * len(expected))
        assert score.is_greedy == (logits.argmax(-1).tolist() == continuation)


def with_greedy(pairs: list[Ids], folder: Path) -> list[Ids]:
    """And one more for each context: what greedy decoding says."""
    found = []
    for context, _ in pairs[::3]:
        tokens = list(context)
        for _ in range(3):
            tokens.append(int(reference_logits(folder, tokens)[-1].argmax()))
        found.append((context, tokens[len(context) :]))
    return pairs + found


SMALL: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "max_batch_requests": 4, "threads": 1}
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {"max_batch_tokens": 7, "kv_cache_tokens": 512},
    "no prefix cache": {"max_batch_tokens": 7, "kv_cache_tokens": 512, "prefix_cache": False},
    "whole prompts": {"chunked_prefill": False, "kv_cache_tokens": 512},
    "one batch": {"max_batch_requests": 32, "kv_cache_tokens": 2048},
    "contiguous": {"kv_cache": "contiguous", "kv_cache_tokens": 256},
}


@pytest.fixture(
    scope="module",
    params=["llama", "gemma3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen3", "mixtral"))],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", list(ENGINES))
def test_scores_are_those_of_transformers(family: Path, name: str) -> None:
    pairs = with_greedy(made_pairs(), family)
    with LLM(str(family), **{**SMALL, **ENGINES[name]}) as llm:
        for _ in range(2):  # the second time, what may be is in the prefix cache
            check(llm.score(pairs), pairs, family)
        assert is_idle(llm)


@pytest.mark.nightly
def test_beside_other_requests_and_preempted(family: Path) -> None:
    """Others get what they get alone, and scores are right although both had to give way."""
    pairs = made_pairs()
    params = [SamplingParams(seed=seed, max_tokens=24, ignore_eos=True, prompt_logprobs=0) for seed in range(6)]
    prompts = [context for context, _ in pairs[::2]][:6]
    options = SMALL | {"max_batch_requests": 8, "max_batch_tokens": 12, "windowed_kv_cache": "off"}  # or all have room

    async def both() -> tuple[list[Score], list[Any]]:
        async with AsyncLLM(str(family), **options, kv_cache_tokens=96) as llm:
            answers, scores = await asyncio.gather(llm.generate(prompts, params), llm.score(pairs))
            assert llm.statistics().preemptions > 0
            return scores, answers

    scores, answers = asyncio.run(both())
    check(scores, pairs, family)
    with LLM(str(family), **SMALL, kv_cache_tokens=512) as llm:
        for answer, prompt, param in zip(answers, prompts, params, strict=True):
            [alone] = llm.generate([prompt], param)
            assert answer.outputs[0].token_ids == alone.outputs[0].token_ids
            assert len(answer.prompt_logprobs or ()) == len(prompt)


EMBEDDED = Path(kvern.__file__).parent / "embedded"
QUESTION = "What is the capital of France? The answer is a city that everybody knows. It is called"
CITIES = [" Paris", " London", " the big one by the river", "x"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("kvern-1m", dtype="float32", max_model_len=512, kv_cache_tokens=4096, threads=1) as llm:
        yield llm


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["kvern-12m", "kvern-1m"])
def test_the_embedded_models(model: str) -> None:
    with LLM(model, dtype="float32", max_model_len=256, kv_cache_tokens=2048, threads=1) as llm:
        texts = [(QUESTION, city) for city in CITIES] + [("", "Once upon a time"), ("2 + 2 = ", "4")]
        scores = llm.score(texts)
        prompts = scored_prompts(llm.tokenizer, texts)
        pairs = [
            (prompt.token_ids[: prompt.context_tokens], prompt.token_ids[prompt.context_tokens :]) for prompt in prompts
        ]
        check(scores, pairs, EMBEDDED / model)
        greedy = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids
        context = llm.tokenizer.encode(QUESTION)
        same, other = llm.score([(context, greedy), (context, [*greedy[:3], 7])])
        assert same.is_greedy and not other.is_greedy


def test_of_equally_probable_tokens_the_first_is_greedy() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]] * 4)
    found = token_logprobs(logits, torch.arange(4), 0)
    assert found.ranks.tolist() == [3, 1, 2, 4] and int(logits[0].argmax()) == 1


def test_a_context_is_computed_once(llm: LLM) -> None:
    context = llm.tokenizer.encode(QUESTION * 8)
    before = llm.statistics().computed_tokens
    pairs = [(context, [token]) for token in range(50, 82)]
    first = llm.score(pairs)
    computed = llm.statistics().computed_tokens - before
    assert computed < len(context) + 32 * (16 + 1), "beside the context no more than a part of a block for each"
    again = llm.score(pairs)
    for one, other in zip(first, again, strict=True):
        assert other.cached_tokens == len(context) - 1, "the context's last token predicts the continuation"
        assert other.token_logprobs == pytest.approx(one.token_logprobs, abs=TOLERANCE)
    assert llm.statistics().computed_tokens - before - computed == 2 * 32


def test_logprobs_from_a_position_on(llm: LLM) -> None:
    ids = llm.tokenizer.encode(QUESTION)
    [whole] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    for start in (1, 5, len(ids) - 1, len(ids), 400):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, prompt_logprobs_from=start)
        [part] = llm.generate([ids], params)
        tables = part.prompt_logprobs
        assert tables is not None and whole.prompt_logprobs is not None
        assert len(tables) == len(ids) and tables[:start] == [None] * min(start, len(ids))
        for table, expected in zip(tables[start:], whole.prompt_logprobs[start:], strict=True):
            assert table is not None and expected is not None and list(table) == list(expected)
            values = [entry.logprob for entry in table.values()]
            assert values == pytest.approx([entry.logprob for entry in expected.values()], abs=TOLERANCE)
        assert part.cached_tokens == min(start, len(ids)) - 1


@pytest.mark.parametrize("special", [True, False])
def test_texts_become_tokens_as_evaluation_harnesses_have_it(special: bool) -> None:
    tokenizer = Tokenizer(EMBEDDED / "kvern-1m")
    texts = [
        ("The fox", " jumps"),
        ("The fox ", "jumps"),
        ("The fox \n\n", "jumps over"),
        ("The", "\n"),
        ("Frage: schön?", " nö, ärgerlich"),
        ("def f(x):\n    ", "return x"),
        ("日本", "語です"),
    ]
    reference = SimpleNamespace(backend="causal", tok_encode=lambda text: tokenizer.encode(text, special))
    for pair, prompt in zip(texts, scored_prompts(tokenizer, texts, special), strict=True):
        context, continuation = TemplateLM._encode_pair(reference, *pair)
        assert (prompt.token_ids, prompt.context_tokens) == (context + continuation, len(context))


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (("The fox", ""), "continuation 1: the continuation is empty"),
        (([], [5]), "continuation 1: the context is empty"),
        (("The fox", [5]), "give both alike"),
        (([5], [10**9]), "token id 1000000000 at position 1"),
        (([5], 7), "must be a text or a list of token ids"),
        (([5] * 600, [5]), "601 tokens"),
        (("x" * (17 << 20), "y"), "characters, contexts counted for each: at most 16777216"),
        ("ab", "pair 1 is 'ab'"),
    ],
    ids=range(8),
)
def test_pairs_that_cannot_be_scored(llm: LLM, pair: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        llm.score([("a", " b"), pair])
    assert is_idle(llm)


def test_a_continuation_without_a_token_of_its_own(llm: LLM) -> None:
    """A text and its beginning may have equally many tokens."""
    tokens = [llm.tokenizer.id_to_token(token) for token in range(3, 1000)]
    known = set(tokens)
    word = next(token for token in tokens if token.isalpha() and len(token) > 2 and token[:-1] in known)
    with pytest.raises(InvalidRequest, match="adds no token"):
        llm.score([(word[:-1], word[-1])])


# Over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"main:{KEY} admin=1\nfew:{KEY}-few per_minute=2\n")
    data = tmp_path_factory.mktemp("data")
    arguments = ("--dtype", "float32", "--threads", "1", "--max-model-len", "512", "--data-dir", str(data))
    served = Served("kvern-1m", *arguments, "--api-key-file", str(keys), "--kv-cache-tokens", "4096")
    yield served
    served.stop()


def ask(server: Served, body: object, key: str | None = KEY) -> tuple[int, Any]:
    status, _, answer = server.raw("POST", "/v1/score", json.dumps(body).encode(), key)
    return status, answer


def test_the_route(server: Served, llm: LLM) -> None:
    expected = llm.score([(QUESTION, city) for city in CITIES])
    status, answer = ask(server, {"context": QUESTION, "continuations": CITIES, "logprobs": True})
    assert status == 200 and answer["model"] == "kvern-1m"
    for index, (entry, score) in enumerate(zip(answer["data"], expected, strict=True)):
        assert (entry["index"], entry["tokens"], entry["is_greedy"]) == (index, len(score.token_ids), score.is_greedy)
        assert entry["logprob"] == pytest.approx(score.logprob, abs=TOLERANCE)
        assert entry["token_ids"] == score.token_ids
        assert entry["token_logprobs"] == pytest.approx(score.token_logprobs, abs=TOLERANCE)
    prompt = sum(score.context_tokens + len(score.token_ids) for score in expected)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 0, prompt)
    ids = llm.tokenizer.encode(QUESTION)
    spellings: list[dict[str, Any]] = [
        {"context": [QUESTION] * 4, "continuations": CITIES},
        {"context": ids, "continuations": [score.token_ids for score in expected]},
        {"context": [ids] * 4, "continuations": [score.token_ids for score in expected], "model": "kvern-1m"},
        {"extra_body": {"context": QUESTION, "continuations": CITIES}},
    ]
    for body in spellings:
        status, again = ask(server, body)
        assert status == 200 and "token_logprobs" not in again["data"][0]
        values = [entry["logprob"] for entry in again["data"]]
        assert values == pytest.approx([score.logprob for score in expected], abs=TOLERANCE)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert server.figure("prompt_tokens_total") > 0 and server.figure("num_requests_running") == 0


def test_echo_from_a_position_on(server: Served, llm: LLM) -> None:
    ids = llm.tokenizer.encode(QUESTION)
    whole, part = (
        server.client()
        .completions.create(
            model="kvern-1m", prompt=ids, max_tokens=1, echo=True, logprobs=0, temperature=0, extra_body=extra
        )
        .choices[0]
        for extra in ({}, {"prompt_logprobs_from": 5})
    )
    assert whole.text == part.text
    assert whole.logprobs.tokens == part.logprobs.tokens and whole.logprobs.text_offset == part.logprobs.text_offset
    assert part.logprobs.token_logprobs[:5] == [None] * 5
    assert part.logprobs.token_logprobs[5:] == pytest.approx(whole.logprobs.token_logprobs[5:], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"text_1": "a"}, "text_1 are no pairs", "text_1"),
        ({"context": "a"}, "continuations is empty", "continuations"),
        ({"context": "a", "continuations": "b"}, "must be a list", "continuations"),
        ({"continuations": ["b"]}, "context is None", "context"),
        ({"context": "a", "continuations": ["b", 5]}, "continuations is 5 for continuation 1", "continuations"),
        ({"context": ["a", "b"], "continuations": ["c"]}, "2 contexts for 1", "context"),
        ({"context": "a", "continuations": [" b"] * 1025}, "1024 at most", "continuations"),
        ({"context": [5] * 600, "continuations": [[5]]}, "601 tokens", None),
        ({"context": [5], "continuations": [["x"]]}, "token ids are integers", None),
        ({"context": "a", "continuations": [[5]]}, "give both alike", None),
        ({"context": "a", "continuations": [" b"], "logprobs": 3}, "logprobs is 3", "logprobs"),
        ({"context": "\ud800", "continuations": [" b"]}, "", None),
        ({"context": "a" * (9 << 20), "continuations": ["b", "c"]}, "contexts counted for each: at most", None),
    ],
    ids=range(13),
)
def test_bodies_that_cannot_be_scored(server: Served, body: object, said: str, param: str | None) -> None:
    status, answer = ask(server, body)
    assert status == 400 and said in answer["error"]["message"] and answer["error"]["param"] == param


def test_keys_limits_and_unknown_models(server: Served) -> None:
    body = {"context": "a", "continuations": [" b"]}
    assert ask(server, body, None)[0] == 401
    assert [ask(server, body, f"{KEY}-few")[0] for _ in range(3)] == [200, 200, 429]
    assert ask(server, body | {"model": "other"})[0] == 404
    assert ask(server, body | {"timeout": 0.000001})[0] == 408


def test_in_batches(server: Served) -> None:
    client = server.client()
    row = {"custom_id": "a", "method": "POST", "url": "/v1/score"}
    lines = [row | {"body": {"context": "2 + 2 =", "continuations": [" 4"]}}, row | {"custom_id": "b", "body": {}}]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    endpoint: Any = "/v1/score"
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts is not None and batch.request_counts.failed == 1
    given = json.loads(client.files.content(batch.output_file_id or "").text)
    assert given["custom_id"] == "a" and given["response"]["body"]["data"][0]["logprob"] < 0


@pytest.mark.nightly
def test_scores_survive_the_death_of_the_engine(server: Served, llm: LLM) -> None:
    """The next one begins again what has no answer."""
    context = llm.tokenizer.encode(QUESTION * 24)[:480]
    pairs = [(context[number:], [60 + number, 61, 62]) for number in range(48)]
    body = {"context": [pair[0] for pair in pairs], "continuations": [pair[1] for pair in pairs]}
    before, computed = server.figure("engine_restarts_total"), server.figure("prefill_tokens_total")

    def kill_while_it_works() -> None:
        eventually(lambda: server.figure("prefill_tokens_total") > computed)
        server.kill_engine()

    killer = threading.Thread(target=kill_while_it_works)
    killer.start()
    status, answer = ask(server, body)
    killer.join()
    assert status == 200
    expected = [score.logprob for score in llm.score(pairs)]
    assert [entry["logprob"] for entry in answer["data"]] == pytest.approx(expected, abs=TOLERANCE * 3)
    eventually(lambda: server.figure("engine_restarts_total") == before + 1)
