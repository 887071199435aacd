"""OpenAI's /v1/completions and /v1/chat/completions: the handlers."""

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.completion_answers import CompletionWriter
from kvern.api.completions import known_fields, read_completion
from kvern.api.fields import merge_extra
from kvern.plugins import imported
from kvern.server.apis import Apis
from kvern.server.bodies import let_go, read_object
from kvern.server.http import LACKS_HEADER, apart, header_of_names, ignored_header, loaded, path_of, whole_answer
from kvern.server.keys import ApiKey
from kvern.server.service import Answerer, Ask
from kvern.serving.served import named

if TYPE_CHECKING:
    from kvern.server.streams import EventStream


class Completions:
    """Handlers of both routes."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def create(self, request: Request) -> "Response | EventStream":
        """Answers POST to either route, with a stream or with one object."""
        body = await read_object(request)
        service = self._service
        url = path_of(request.scope)
        if body.keys() - known_fields(url):
            await loaded("kvern.api.unknown_fields")
        ask, writer, streams = await self._read(body, url, request.state.key)
        headers = ignored_header(body, known_fields(url)) | header_of_names(LACKS_HEADER, writer.lacks)
        named(writer.head("")["id"])
        let_go(request, body)
        if ask.is_large:
            await loaded("kvern.api.logprobs")
        if streams:
            await loaded("kvern.api.completion_chunks", "kvern.server.streams")
            running = await service.start(ask)
            chunks = imported("kvern.api.completion_chunks:chunks")
            news = chunks(writer, running.outputs, running, service.config.stream_interval)
            stream: EventStream = imported("kvern.server.streams:chunk_stream")(news, running.close, headers)
            return stream
        work = service.written(ask, lambda ended: writer.answer(ended.outputs), writer.write_some)
        return await whole_answer(request, work, headers)

    def answerer(self, url: str) -> Answerer:
        """Returns the answerer of batch rows for one of the routes."""

        async def answer(body: dict[str, Any], key: ApiKey) -> object:
            ask, writer, _ = await self._read(body, url, key)
            body.clear()
            outputs = await self._service.run(ask)
            return await apart(lambda: writer.answer(outputs)) if ask.is_large else writer.answer(outputs)

        return answer

    async def _read(self, body: dict[str, Any], url: str, key: ApiKey) -> tuple[Ask, CompletionWriter, bool]:
        """Returns the request, the writer of its answer, and whether the answer is a stream."""
        merge_extra(body)
        model = await self._service.model(body, key)
        engine, asked = self._service.engine_of(model), read_completion(body, url)
        chat = None
        prompts, params = asked.prompts, asked.params
        if (talk := asked.conversation) is not None:
            chat = await self._service.chat(model, talk, params, asked.common, key)
            prompts, params = [chat.prompt], chat.params
        elif asked.suffix:
            prompts, params = await engine.client.inputs.infilled(prompts, asked.suffix, params)
        elif asked.encoding is not None:
            encoded = engine.client.inputs.encoded
            prompts = [await encoded(prompt, asked.encoding, params.max_tokens) for prompt in prompts]
        ask = Ask(model, asked.common, prompts, params, key)
        writer = CompletionWriter(asked.options, model, engine.client.tokenizer, chat, engine.client.weights)
        return ask, writer, asked.stream
