"""Anthropic's /v1/messages and /v1/messages/count_tokens: the handlers."""

import asyncio
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.error_bodies import anthropic_error
from kvern.api.fields import merge_extra, typed
from kvern.api.messages import KNOWN, ignored_tools, message_answer, message_events, read_conversation, read_message
from kvern.api.other_names import ignored
from kvern.server.apis import Apis
from kvern.server.bodies import let_go, read_object
from kvern.server.http import IGNORED_HEADER, LACKS_HEADER, header_of_names, json_response, whole_answer
from kvern.server.keys import ApiKey
from kvern.server.service import Ask, Running
from kvern.server.streams import EventStream, StreamFormat
from kvern.tools.chat import ChatRequest

IGNORED_TOOLS_HEADER = "x-kvern-ignored-tools"


@dataclass(frozen=True)
class _Asked:
    """A request, and how it is answered."""

    ask: Ask
    chat: ChatRequest
    model: str
    headers: dict[str, str]
    stream: bool

    def written(self, ended: Running) -> object:
        """Returns the whole answer."""
        return message_answer(ended.outputs[0], self.chat, self.model)


class MessagesApi:
    """Handlers of both routes."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def create(self, request: Request) -> Response | EventStream:
        """POST /v1/messages."""
        body = await read_object(request)
        asked = await self._read(body, request.state.key)
        let_go(request, body)
        if asked.stream:
            running = await self._service.start(asked.ask)
            [output] = running.outputs
            events = message_events(output, asked.chat, asked.model, running)
            failed = functools.partial(_failed_event, request.state.request_id)
            return EventStream(events, running.close, asked.headers, StreamFormat(failed=failed))
        return await whole_answer(request, self._service.written(asked.ask, asked.written), asked.headers)

    async def answer(self, body: dict[str, Any], key: ApiKey) -> object:
        """Answers a row of a batch."""
        asked = await self._read(body, key)
        body.clear()
        outputs = await self._service.run(asked.ask)
        return message_answer(outputs[0], asked.chat, asked.model)

    async def _read(self, body: dict[str, Any], key: ApiKey) -> "_Asked":
        merge_extra(body)
        service = self._service
        model = await service.model(body, key)
        asked = read_message(body, service.config.strip_billing_header)
        engine, conversation = service.engine_of(model), asked.conversation
        unused = ignored(body, KNOWN)
        inputs, has_budget = engine.client.inputs, conversation.options.thinking_budget is not None
        can_bound = inputs.processor.chat.can_bound_thinking
        if has_budget and not await asyncio.to_thread(can_bound, bool(conversation.use.definitions)):
            # agents send a budget by the name of the model, whether or not it can be obeyed
            options = dataclasses.replace(conversation.options, thinking_budget=None)
            conversation = dataclasses.replace(conversation, options=options)
            unused.append("thinking.budget_tokens")
        chat = await service.chat(model, conversation, asked.params, asked.common, key)
        ask = Ask(model, asked.common, [chat.prompt], chat.params, key)
        left_out = ignored_tools(typed(body, "tools", list, []))
        headers = header_of_names(IGNORED_HEADER, unused) | header_of_names(IGNORED_TOOLS_HEADER, left_out)
        return _Asked(ask, chat, model, headers | header_of_names(LACKS_HEADER, chat.lacks), asked.stream)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        body = await read_object(request)
        engine = self._service.engine_of(await self._service.model(body, request.state.key))
        chat = read_conversation(body, self._service.config.strip_billing_header)
        key, definitions = request.state.key, list(chat.use.definitions) or None
        with engine.admission.enter(key):
            async with self._service.seen(engine, chat.messages, key) as messages:
                prompt = await engine.client.inputs.chat_prompt(messages, definitions, chat.options.variables)
        return json_response({"input_tokens": len(prompt)})


def _failed_event(request_id: str, error: Exception) -> object:
    return "error", anthropic_error(error, request_id)
