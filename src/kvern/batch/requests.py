"""Rows as requests, and outputs as answers.

A plain row is ``{"prompt": text or token ids}`` or ``{"messages": [...], "tools": [...]}``. In JSONL it may also have
fields of ``SamplingParams`` and ``adapter``; all its columns are copied to the answer. A row with ``custom_id``,
``url`` and ``body`` is in OpenAI's batch format and is answered in it; there, unknown fields that would change
the answer are refused by name.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvern.api.batch_rows import answer_row, read_row
from kvern.api.completion_answers import choice_of, details, of_prompt, token_counts
from kvern.api.completions import CHAT, COMPLETIONS, AnswerOptions, check_fields, read_completion
from kvern.api.conversation import ChatBody
from kvern.api.fields import check_refused, sampling_params
from kvern.api.unknown_fields import REFUSED_SAMPLING, with_own_names
from kvern.errors import BatchFileError, InvalidParameter, InvalidRequest, shown
from kvern.request.other_names import RENAMED
from kvern.request.outputs import RequestOutput
from kvern.request.sampling_params import SamplingParams
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest
from kvern.tools.checks import read_tools

if TYPE_CHECKING:
    from kvern.engine.inputs import Prompt

ANSWER_COLUMNS = ("answer", "finish_reason", "prompt_tokens", "completion_tokens")
PROMPT_COLUMNS = ("prompt", "messages")

Answer = Callable[[RequestOutput, ChatRequest | None], dict[str, Any]]


@dataclass(frozen=True)
class BatchRequest:
    """The request of one row: a prompt (text or token ids) or a conversation. ``answer`` makes the fields to write from
    the engine's output and the conversation."""

    prompt: Prompt | None
    chat: ChatBody | None
    params: SamplingParams
    answer: Answer
    adapter: str | None = None


@dataclass(frozen=True)
class RowRules:
    """Rules to read plain rows: the column with the prompt (None: prompt or messages), whether a text is sent as a
    user's message, its system message, and the sampling parameters of rows that set none."""

    params: SamplingParams
    column: str | None = None
    chat: bool = False
    system: str | None = None
    fields_are_parameters: bool = True
    """False for CSV and Parquet, whose other columns are the user's data."""

    def check_columns(self, columns: Sequence[str], name: str) -> None:
        """Refuses a table without the column that holds the prompts."""
        wanted = [self.column] if self.column else list(PROMPT_COLUMNS)
        if not set(wanted) & set(columns):
            raise BatchFileError(
                f"{name} has no column {' or '.join(map(repr, wanted))} (it has {', '.join(columns)}): "
                "name the column of the prompts with --column"
            )

    def read(self, values: Mapping[str, Any]) -> BatchRequest:
        """Returns the request of a plain row.

        Raises:
            InvalidRequest: there is no prompt, two of them, or one that cannot be sent.
            InvalidParameter: a sampling parameter of the row is wrong.
        """
        names = [self.column] if self.column else list(PROMPT_COLUMNS)
        found = [name for name in names if values.get(name) is not None]
        if len(found) != 1:
            problem = "both prompt and messages" if found else f"no {' or '.join(names)}"
            raise InvalidRequest(f"the row has {problem}: it needs exactly one of them")
        prompt, messages = split_prompt(values[found[0]], found[0])
        if isinstance(prompt, str) and (self.chat or self.system is not None):
            prompt, messages = None, [{"role": "user", "content": prompt}]
        if messages is not None and self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        params = self.params
        if self.fields_are_parameters:
            check_refused(values, REFUSED_SAMPLING)
            for name in values:
                if (meant := misspelt(name)) is not None:
                    raise InvalidParameter(
                        f"{name!r} is no sampling parameter: did you mean {meant}? Name a column of your own otherwise"
                    )
            params = sampling_params(params, with_own_names(values, SamplingParams.__struct_fields__))
        if params.n > 1:
            raise InvalidParameter(
                f"n is {params.n}: a plain row has one answer; use OpenAI's batch format for several"
            )
        adapter = values.get("adapter") if self.fields_are_parameters else None
        chat = None if messages is None else ChatBody(messages, read_tools(values.get("tools")))
        return BatchRequest(prompt, chat, params, plain_answer, adapter)


@functools.lru_cache(maxsize=4096)
def misspelt(name: str) -> str | None:
    """Returns the sampling parameter that a field's name nearly is; None: it is one, or something else."""
    fields = SamplingParams.__struct_fields__
    if name in fields or name in RENAMED:
        return None
    return next(iter(difflib.get_close_matches(name.replace("-", "_").lower(), fields, n=1, cutoff=0.9)), None)


def split_prompt(value: object, name: str) -> tuple[Prompt | None, list[dict[str, Any]] | None]:
    """Returns a text or token ids, or messages, which may be JSON text as CSV has no lists."""
    if isinstance(value, str) and name == "messages":
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"messages is text but not valid JSON: {error}") from error
    if isinstance(value, str):
        return value, None
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value, None
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return None, [{key: item for key, item in message.items() if item is not None} for message in value]
    raise InvalidRequest(f"{name} is {shown(value)}: it must be a text, a list of token ids or a list of messages")


def plain_answer(output: RequestOutput, chat: ChatRequest | None) -> dict[str, Any]:
    completion = output.outputs[0]
    values = (
        completion.text,
        completion.finish_reason,
        len(output.prompt_token_ids),
        len(completion.token_ids),
    )
    return dict(zip(ANSWER_COLUMNS, values, strict=True))


def merged(values: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row with its answer; an input column with an answer's name becomes ``input_<name>``."""
    renamed = input_names(list(values), list(answer))
    return {**{renamed[name]: value for name, value in values.items()}, **answer}


def input_names(columns: Sequence[str], answer_columns: Sequence[str]) -> dict[str, str]:
    """Returns the name under which each input column is written."""
    taken = {*columns, *answer_columns}
    names: dict[str, str] = {}
    for column in columns:
        name = column
        if column in answer_columns:
            name = f"input_{column}"
            while name in taken:
                name = f"input_{name}"
            taken.add(name)
        names[column] = name
    return names


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
