"""OpenAI's /v1/responses: bodies, and responses with their events."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvern.api.chat_fields import THINKING_FIELDS, ThinkingFields, read_thinking
from kvern.api.completion_answers import cached_counts, image_tokens
from kvern.api.conversation import ChatBody, plain_messages, template_variables
from kvern.api.error_bodies import status_of
from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import (
    COMMON_FIELDS,
    LONGEST_METADATA,
    MOST_METADATA,
    PARAMETERS,
    CommonFields,
    Refused,
    check_refused,
    read_common,
    read_metadata,
    sampling_params,
    typed,
)
from kvern.api.forms import response_format
from kvern.api.logprobs import finite, tables_at_once
from kvern.api.other_names import in_own_words
from kvern.api.response_items import added_tools, input_messages, kept_items
from kvern.api.response_output import OutputItems
from kvern.api.response_tools import ToolList, chat_tool_choice, read_tool_list
from kvern.errors import shown
from kvern.io.json_lines import as_json
from kvern.request.logprobs import Logprob
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.sampling_params import SamplingParams
from kvern.serving.served import named
from kvern.tools.chat import ChatRequest, PromptOptions
from kvern.tools.checks import read_tools

Messages = list[dict[str, Any]]

REFUSED: Refused = dict.fromkeys(("prompt", "moderation"), ((), "this server does not do that"))
WITHOUT_EFFECT = (
    "access_programs", "client_metadata", "context_management", "image", "prompt_cache_options", "stream_options",
)  # fmt: skip
"""Fields that only OpenAI's service uses."""
NAMES = ("user", "safety_identifier", "prompt_cache_key")
"""Names of the user, which have no effect."""
LONGEST_NAME = 512
"""The limit in characters."""
SUMMARIES = ("auto", "concise", "detailed")
INCLUDABLE = frozenset({
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
})  # fmt: skip
LEFT_OUT, CHOICE_NOTE = "kvern_tools_left_out", "kvern_tool_choice"
"""Entries of a response's metadata: tools that were not offered, and what replaced a choice of one."""

# fmt: off
KNOWN = frozenset({
    "input", "instructions", "model", "max_output_tokens", "previous_response_id", "stream", "background", "store",
    "metadata", "tools", "tool_choice", "text", "parallel_tool_calls", "service_tier", "include", "truncation",
    "max_tool_calls", "top_logprobs", "prompt_cache_retention", "chat_template_kwargs", "documents", "conversation",
    *THINKING_FIELDS, *NAMES, *PARAMETERS, *COMMON_FIELDS, *REFUSED, *WITHOUT_EFFECT,
})
# fmt: on


@dataclass(frozen=True)
class ResponseBody:
    """The contents of a body. `response` is the response before its answer, `items` the input as it is stored."""

    conversation: ChatBody
    params: SamplingParams
    common: CommonFields
    response: dict[str, Any]
    items: list[dict[str, Any]]
    stream: bool


def read_response(body: Mapping[str, Any], model: str, earlier: Messages) -> ResponseBody:
    """Checks a body. `earlier` are the messages that its input continues.

    Raises HttpError, InvalidRequest or InvalidParameter.
    """
    body = _configured(in_own_words(body, KNOWN))
    check_refused(body, REFUSED)
    if body.get("truncation") not in (None, "auto", "disabled"):
        raise wrong_value("truncation", body["truncation"], "auto or disabled")
    messages = [*earlier, *input_messages(body.get("input"))]
    instructions = typed(body, "instructions", str, None)
    prompt = [{"role": "system", "content": instructions}] * (instructions is not None) + messages
    tools = read_tool_list(typed(body, "tools", list, []), added_tools(body.get("input")))
    choice, choice_note = chat_tool_choice(body.get("tool_choice"), tools)
    definitions, places = [tool.definition for tool in tools.offered], [tool.place for tool in tools.offered]
    use = read_tools(definitions, choice, body.get("parallel_tool_calls"), places)
    form = typed(body, "text", dict, {}).get("format") or {"type": "text"}
    params, thinking = _params(body, form), read_thinking(body)
    response = _begun(body, model, params, form, thinking)
    response["metadata"] |= _notes(response["metadata"], tools, choice_note)
    if choice_note is not None:
        response["tool_choice"] = choice
    options = PromptOptions(thinking_budget=thinking.budget, variables=template_variables(body))
    conversation = ChatBody(plain_messages(prompt), use, options, thinking.include)
    stream = typed(body, "stream", bool, False)
    if response["background"] and not response["store"]:
        raise HttpError(
            400, "background is set and store is false: what is asked for later must be kept", param="store"
        )
    items = kept_items(body.get("input") or [])
    return ResponseBody(conversation, params, read_common(body), response, items, stream)


def _configured(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the body with the changes that items of its input make."""
    given = body.get("input")
    changed = {name: {**typed(body, name, dict, {})} for name in ("reasoning", "text")}
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and item.get("type") == "configuration_update":
            for name, values in changed.items():
                values.update(typed(item, name, dict, {}))
    return {**body, **changed}


def _notes(metadata: Mapping[str, str], tools: ToolList, choice: str | None) -> dict[str, str]:
    """Returns notes on what the request wants and does not get, as far as metadata has room."""
    left_out = ", ".join(dict.fromkeys(tools.left_out))[:LONGEST_METADATA]
    notes = {LEFT_OUT: left_out, CHOICE_NOTE: choice}
    told = {name: note for name, note in notes.items() if note}
    return dict(list(told.items())[: max(0, MOST_METADATA - len(metadata.keys() - told.keys()))])


def _included(body: Mapping[str, Any]) -> list[str]:
    """Returns the known names in `include`."""
    include = typed(body, "include", list, [])
    if not all(isinstance(name, str) for name in include):
        raise wrong_value("include", include, "a list of names")
    return sorted(INCLUDABLE & set(include))


def _reasoning(body: Mapping[str, Any], thinking: ThinkingFields) -> dict[str, Any]:
    """Returns the response's `reasoning`; its items are shown unless `exclude` is set."""
    reasoning = typed(body, "reasoning", dict, {})
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    if summary not in (None, "none", *SUMMARIES):
        message = f"reasoning.summary is {shown(summary)}: it must be one of {', '.join(SUMMARIES)}"
        raise HttpError(400, message, param="reasoning")
    effort, hidden = thinking.variables.get("reasoning_effort"), {} if thinking.include else {"exclude": True}
    return {"effort": effort, "summary": None if summary == "none" else summary, **hidden}


def _verbosity(body: Mapping[str, Any]) -> str | None:
    """Returns `text.verbosity`. The model does not see it: chat templates have no variable for it."""
    verbosity: str | None = typed(body, "text", dict, {}).get("verbosity")
    if verbosity not in (None, "low", "medium", "high"):
        message = f"text.verbosity is {shown(verbosity)}: it must be low, medium or high"
        raise HttpError(400, message, param="text")
    return verbosity


def _name(body: Mapping[str, Any], field: str) -> str | None:
    name: str | None = typed(body, field, str, None)
    if name is not None and len(name) > LONGEST_NAME:
        raise HttpError(400, f"{field} has {len(name)} characters: at most {LONGEST_NAME}", param=field)
    return name


def _params(body: Mapping[str, Any], form: object) -> SamplingParams:
    values = {name: body[name] for name in PARAMETERS if body.get(name) is not None}
    most: int | None = typed(body, "top_logprobs", int, None)
    if most is not None or "message.output_text.logprobs" in _included(body):
        values["logprobs"] = most or 0
    structured = response_format(form)
    if structured is not None:
        values["structured"] = structured
    if body.get("max_output_tokens") is not None:
        values["max_tokens"] = body["max_output_tokens"]
    return sampling_params(SamplingParams(), values)


def _begun(
    body: Mapping[str, Any], model: str, params: SamplingParams, form: object, thinking: ThinkingFields
) -> dict[str, Any]:
    """Returns a response before its answer."""
    return {
        "id": named(f"resp_{uuid.uuid4().hex}"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "completed_at": None,
        "background": typed(body, "background", bool, False),
        "error": None,
        "incomplete_details": None,
        "include": _included(body),
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": typed(body, "max_tool_calls", int, None),
        "metadata": {**read_metadata(body)},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": _name(body, "prompt_cache_key"),
        "prompt_cache_retention": _name(body, "prompt_cache_retention"),
        "reasoning": _reasoning(body, thinking),
        "safety_identifier": _name(body, "safety_identifier"),
        "service_tier": "default",
        "store": typed(body, "store", bool, True),
        "temperature": params.temperature if params.temperature is not None else 1.0,
        "text": {"format": form, "verbosity": _verbosity(body)},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [*typed(body, "tools", list, []), *added_tools(body.get("input"))],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p if params.top_p is not None else 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": _name(body, "user"),
    }


def complete(response: dict[str, Any], chat: ChatRequest, output: RequestOutput) -> None:
    """Adds the whole answer to a response."""
    items, reader = OutputItems(response), chat.reader()
    answer, length = output.outputs[0], 0
    entries = _logprobs(answer, 0, len(answer.token_ids), response["top_logprobs"])
    for entry, table in zip(entries, answer.logprobs or (), strict=False):
        length += len(next(iter(table.values())).token or "")
        items.add(reader.read(answer.text[:length], False), [entry])  # in the steps in which it grew
    items.add(reader.read(answer.text, True))
    items.end(_conclude(response, output, chat))
    response["output"] = items.items


def _logprobs(answer: CompletionOutput, first: int, end: int, most: int) -> Iterator[msgspec.Raw]:
    """Yields the log-probabilities of tokens from number `first` on, each with the `most` probable tokens.

    A token that ends the answer is not part of its text and is left out.
    """
    if answer.logprobs is None:
        return
    said = len(answer.token_ids) - (answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str))
    for table in answer.logprobs[first : min(said, end)]:
        told = next(iter(table.values()))
        best = sorted(table.values(), key=lambda entry: -entry.logprob)[:most]
        yield as_json({**_logprob(told), "top_logprobs": [_logprob(entry) for entry in best]})


def _logprob(entry: Logprob) -> dict[str, Any]:
    """Returns an entry in OpenAI's format. A token that is part of a character has no bytes of its own."""
    token = entry.token or ""
    return {
        "token": token,
        "logprob": finite(entry.logprob),
        "bytes": [] if "\ufffd" in token else list(token.encode()),
    }


def fail(response: dict[str, Any], error: Exception) -> None:
    """Marks a response as failed."""
    codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    response["status"] = "failed"
    response["error"] = {"code": codes.get(status_of(error), "server_error"), "message": str(error)}


class ResponseEvents:
    """The numbered events of one response, which grows with them."""

    def __init__(self, response: dict[str, Any], chat: ChatRequest) -> None:
        self._response, self._chat = response, chat
        self._items = OutputItems(response)
        self._number = 0

    async def of(self, output: RequestOutput, news: AsyncIterable[None]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """Yields the events of a growing output: each a name and its content."""
        response = self._response
        answer = output.outputs[0]
        reader = self._chat.reader()
        items = self._items
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        tokens, most = 0, response["top_logprobs"]
        async for _ in news:
            logprobs = list[msgspec.Raw]()
            while tokens < len(answer.token_ids):
                end = min(tokens + tables_at_once(most), len(answer.token_ids))
                logprobs += _logprobs(answer, tokens, end, most)
                tokens = end
                if logprobs:
                    await asyncio.sleep(0)
            for kind, fields in items.add(reader.read(answer.text, answer.finish_reason is not None), logprobs):
                yield self._event(kind, **fields)
        for kind, fields in items.end(_conclude(response, output, self._chat)):
            yield self._event(kind, **fields)
        response["output"] = items.items
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: Exception) -> tuple[str, dict[str, Any]]:
        """Marks the response as failed and returns its last event."""
        self._cut_off()
        fail(self._response, error)
        return self._event("response.failed", response=self._response)

    def cancelled(self) -> tuple[str, dict[str, Any]]:
        """Marks the response as cancelled and returns its last event, incomplete: clients know no other kind."""
        self._cut_off()
        self._response["status"] = "cancelled"
        return self._event("response.incomplete", response=self._response)

    def _cut_off(self) -> None:
        """Takes what was sent so far as the output."""
        self._items.close("incomplete")
        self._response["output"] = self._items.items

    def _event(self, kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        number, self._number = self._number, self._number + 1
        return kind, {"type": kind, "sequence_number": number, **fields}


def _conclude(response: dict[str, Any], output: RequestOutput, chat: ChatRequest) -> str:
    """Completes all fields but the items, and returns the status."""
    answer = output.outputs[0]
    cut = answer.finish_reason == "length"
    status = response["status"] = "incomplete" if cut else "completed"
    response["completed_at"] = None if cut else int(time.time())
    response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    prompt, generated = len(output.prompt_token_ids), len(answer.token_ids)
    response["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {
            **cached_counts([output]),
            "cache_write_tokens": 0,
            **image_tokens(chat),
        },
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": chat.reasoning_tokens(answer.token_ids)},
        "total_tokens": prompt + generated,
    }
    return status
