"""Anthropic's /v1/messages and /v1/messages/count_tokens: the handlers."""

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.errors import status_of
from kvern.api.messages import KNOWN, error_body, message_answer, message_events, read_conversation, read_message
from kvern.server.bodies import let_go, read_object
from kvern.server.http import EventStream, ignored_header, json_response, until_gone
from kvern.server.service import Service


class MessagesApi:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response | EventStream:
        """POST /v1/messages."""
        body = await read_object(request)
        service, key = self._service, request.state.key
        model = service.model(body)
        asked = read_message(body)
        chat = await service.engine_of(model).chat(asked.conversation, asked.params, key)
        ask, stream = service.ask(model, asked.common, [chat.prompt], chat.params, key), asked.stream
        headers = ignored_header(body, KNOWN)
        del asked
        let_go(request, body)
        if stream:
            running = await service.start(ask)
            [output] = running.outputs
            events = message_events(output, chat, model, running)
            return EventStream(events, running.close, headers, last=b"", failed=_failed_event)
        outputs = await until_gone(service.run(ask), request.receive)
        return json_response({} if outputs is None else message_answer(outputs[0], chat, model), headers=headers)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        body = await read_object(request)
        engine = self._service.engine_of(self._service.model(body))
        chat = read_conversation(body)
        with engine.admission.enter(request.state.key):
            prompt = await engine.client.inputs.chat_prompt(chat.messages, list(chat.use.definitions) or None)
        return json_response({"input_tokens": len(prompt)})


def _failed_event(error: Exception) -> object:
    return "error", error_body(status_of(error), str(error))
