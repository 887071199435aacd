"""Rows as requests, and outputs as answers.

A plain row is ``{"prompt": text or token ids}`` or ``{"messages": [...], "tools": [...]}``. In JSONL it may also have
fields of ``SamplingParams`` and ``adapter``; all its columns are copied to the answer. A row with ``custom_id``,
``url`` and ``body`` is in OpenAI's batch format (see ``openai_rows``) and is answered in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from kvern.api.conversation import ChatBody
from kvern.api.fields import sampling_params
from kvern.api.other_names import REFUSED_SAMPLING, check_refused, with_own_names
from kvern.errors import BatchFileError, InvalidParameter, InvalidRequest, shown
from kvern.request.sampling_params import SamplingParams
from kvern.tools.definitions import read_tools

if TYPE_CHECKING:
    from kvern.engine.inputs import Prompt
    from kvern.request.outputs import RequestOutput
    from kvern.tools.chat import ChatRequest

ANSWER_COLUMNS = ("answer", "finish_reason", "prompt_tokens", "completion_tokens")
PROMPT_COLUMNS = ("prompt", "messages")

Answer = Callable[["RequestOutput", "ChatRequest | None"], dict[str, Any]]


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
            params = sampling_params(params, with_own_names(values, SamplingParams.__struct_fields__))
        if params.n > 1:
            raise InvalidParameter(
                f"n is {params.n}: a plain row has one answer; use OpenAI's batch format for several"
            )
        adapter = values.get("adapter") if self.fields_are_parameters else None
        chat = None if messages is None else ChatBody(messages, read_tools(values.get("tools")))
        return BatchRequest(prompt, chat, params, plain_answer, adapter)

    def for_tables(self) -> RowRules:
        """Returns the rules for CSV and Parquet, whose other columns are the user's data and never parameters."""
        return replace(self, fields_are_parameters=False)


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
