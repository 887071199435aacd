"""Tokens, texts and log-probabilities of the outputs of an engine."""

from collections.abc import Iterator
from typing import Any

from kvern import RequestOutput


def tokens_and_texts(outputs: list[RequestOutput]) -> list[list[Any]]:
    return [[(answer.token_ids, answer.text, answer.stop_reason) for answer in output.outputs] for output in outputs]


def answer_logprobs(outputs: list[RequestOutput]) -> Iterator[float]:
    for output in outputs:
        for answer in output.outputs:
            for entry in answer.logprobs or []:
                yield from (item.logprob for item in entry.values())


def token_ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def chosen_logprobs(outputs: list[RequestOutput]) -> Iterator[float]:
    for output in outputs:
        for entries in (output.prompt_logprobs or [])[1:], output.outputs[0].logprobs or []:
            yield from (next(iter(entry.values())).logprob for entry in entries if entry)
