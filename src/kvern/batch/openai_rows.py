"""Rows in the format of OpenAI's batch API, for /v1/chat/completions and /v1/completions.

Unknown fields that would change the answer are refused by name.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from kvern.api.batch_rows import answer_row, read_row
from kvern.api.choices import choice_of
from kvern.api.completion_answers import details, of_prompt, token_counts
from kvern.api.completions import CHAT, COMPLETIONS, AnswerOptions, check_fields, read_completion
from kvern.batch.requests import BatchRequest
from kvern.errors import InvalidRequest, shown
from kvern.request.outputs import RequestOutput
from kvern.request.sampling_params import SamplingParams
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest


def is_openai_row(values: Mapping[str, Any]) -> bool:
    return "custom_id" in values and "url" in values and "body" in values


def read_openai_row(
    values: Mapping[str, Any],
    defaults: SamplingParams,
    model: str,
    created: int,
    tokenizer: Tokenizer,
    adapters: Collection[str] = (),
) -> BatchRequest:
    """Returns the request of a row in OpenAI's format.

    ``model`` and ``created`` (seconds since 1970) appear in the answer. If the body's model is one of the ``adapters``,
    that adapter answers.

    Raises:
        HttpError, InvalidRequest, InvalidParameter: the row is malformed or asks for something unsupported.
    """
    row = read_row(values, [CHAT, COMPLETIONS])
    url, body = row.url, row.body
    check_fields(body)
    name = "messages" if url == CHAT else "prompt"
    if body.get(name) is None:
        raise InvalidRequest(f"body has no {name}, which {url} needs")
    asked = read_completion(body, url, defaults)
    if len(asked.prompts) > 1:
        raise InvalidRequest(f"prompt is {shown(body['prompt'])}: a row has one, a text or a list of token ids")
    if asked.encoding is not None and asked.prompts:
        raise InvalidRequest(
            "truncate_prompt_tokens and add_special_tokens of a prompt: a batch does not support that; send token ids"
        )
    named = body.get("model")
    adapter = named if isinstance(named, str) and named in adapters else None
    answer = functools.partial(
        openai_answer,
        custom_id=row.custom_id,
        model=adapter or model,
        created=created,
        options=asked.options,
        tokenizer=tokenizer,
    )
    prompt = asked.prompts[0] if asked.prompts else None
    return BatchRequest(prompt, asked.conversation, asked.params, answer, adapter)


def openai_answer(
    output: RequestOutput,
    chat: ChatRequest | None,
    *,
    custom_id: str,
    model: str,
    created: int,
    options: AnswerOptions,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Returns the output row. Its ids derive from the row, so that a resumed job writes the same ones."""
    key = hashlib.sha256(f"{custom_id}/{output.request_id}".encode()).hexdigest()[:24]
    asked = of_prompt(output, options)
    added = {} if options.is_chat else asked
    choices = [choice_of(item, chat, options, tokenizer) | added for item in output.outputs]
    body = {
        "id": f"{'cmpl' if chat is None else 'chatcmpl'}-{key}",
        "object": "text_completion" if chat is None else "chat.completion",
        "created": created,
        "model": model,
        **(asked if options.is_chat else {}),
        "choices": choices,
        "usage": token_counts([output]) | details([output], chat),
    }
    return answer_row(custom_id, key, 200, body)
