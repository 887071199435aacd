"""Log-probabilities as JSON: the same bytes, however few tokens at a time are encoded."""

import math
import random
import struct
from typing import Any

import msgspec
import pytest

from kvern.api.completion_answers import CompletionWriter
from kvern.api.completions import AnswerOptions
from kvern.api.logprobs import LogprobWriter, finite
from kvern.request.logprobs import LogprobRows, LogprobTables, PromptTables, Row, packed
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.text.tokenizer import Tokenizer


def single(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def drawn(dice: random.Random, most: int, vocabulary: int) -> LogprobRows:
    """A row, often with equally probable tokens, and its token among the most probable ones or not."""
    ids = dice.sample(range(vocabulary), most + 1)
    logprobs = sorted((single(dice.choice((-0.25, -1.1, -2.5, -3.75, -math.inf))) for _ in ids), reverse=True)
    place = dice.randrange(most + 1)
    return packed([ids[place], *ids[:most]], [logprobs[place], *logprobs[:most]], place + 1)


def expected(row: Row) -> dict[int, float]:
    best = sorted(row.by_id().items(), key=lambda entry: (-entry[1], entry[0] != row.token_ids[0]))
    return {token_id: finite(logprob) for token_id, logprob in best}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Any) -> Tokenizer:
    return Tokenizer(tiny_model)


def answer_of(rows: list[LogprobRows], tokenizer: Tokenizer) -> CompletionOutput:
    tables = LogprobTables(tokenizer.texts)
    for row in rows:
        tables.extend(row)
    ids = [row.token_ids[0] for row in tables.rows()]
    return CompletionOutput(0, tokenizer.decode(ids)[:20], ids, finish_reason="length", logprobs=tables)


@pytest.mark.parametrize("most", [0, 1, 5, 20])
@pytest.mark.parametrize("is_chat", [False, True])
def test_pieces_of_an_answer_are_the_whole(most: int, is_chat: bool, tokenizer: Tokenizer) -> None:
    dice = random.Random(most)
    rows = [drawn(dice, most, 90) for _ in range(150)]
    answer, options = answer_of(rows, tokenizer), AnswerOptions(logprobs=most, ids_as_tokens=True)
    whole = LogprobWriter(answer, options, tokenizer, is_chat).whole()
    growing = CompletionOutput(0, logprobs=LogprobTables(tokenizer.texts))
    kept, sent = (LogprobWriter(growing, options, tokenizer, is_chat) for _ in range(2))
    chunks = []
    for number, row in enumerate(rows):
        assert growing.logprobs is not None
        growing.logprobs.extend(row)
        growing.token_ids.append(answer.token_ids[number])
        if number % 3 == 0:
            assert kept.write_some() and not kept.write_some()
        if number % 7 == 0:
            chunks.append(sent.take())
    growing.text = answer.text
    assert kept.whole() == whole
    chunks.append(sent.take())
    told = [msgspec.json.decode(chunk) for chunk in chunks if chunk is not None]
    name = "content" if is_chat else "top_logprobs"
    found = [entry for chunk in told for entry in chunk[name]]
    assert whole is not None and found == msgspec.json.decode(whole)[name]
    for entry, row in zip(found, LogprobTables.rows(growing.logprobs), strict=True):
        table = {f"token_id:{token_id}": logprob for token_id, logprob in expected(row).items()}
        if is_chat:
            own = f"token_id:{row.token_ids[0]}"
            names = [name for name in table if name != own or len(table) <= most]
            assert [(one["token"], one["logprob"]) for one in entry["top_logprobs"]] == [(n, table[n]) for n in names]
            assert (entry["token"], entry["logprob"]) == (own, table[own])
        else:
            assert list(entry.items()) == list(table.items())


@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_that_was_written_while_it_grew_is_the_same(echo: bool, tokenizer: Tokenizer) -> None:
    dice = random.Random(0)
    answer = answer_of([drawn(dice, 5, 90) for _ in range(40)], tokenizer)
    told = LogprobTables(tokenizer.texts)
    prompt = [drawn(dice, 5, 90) for _ in range(9)]
    for row in prompt:
        told.extend(row)
    ids = [3, *(row.token_ids[0] for row in told.rows())]
    output = RequestOutput("r", None, ids, [answer], prompt_logprobs=PromptTables(1, told))
    options = AnswerOptions(logprobs=5, prompt_logprobs=True, echo=echo, request_id="0")
    one, other = (CompletionWriter(options, "m", tokenizer, None) for _ in range(2))
    counts = []
    while count := other.write_some([output]):
        counts.append(count)
    assert counts == ([] if echo else [40 * 6])
    choices, again = (msgspec.json.encode(writer.answer([output])["choices"]) for writer in (one, other))
    assert choices == again
    [choice] = msgspec.json.decode(choices)
    assert len(choice["logprobs"]["tokens"]) == 40 + (10 if echo else 0)
    assert max(choice["logprobs"]["text_offset"]) <= len(choice["text"]), "tokens behind a stop string are not sent"
    tables = [
        None
        if table is None
        else {
            str(token_id): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.token}
            for token_id, entry in table.items()
        }
        for table in output.prompt_logprobs or ()
    ]
    assert choice["prompt_logprobs"] == tables
