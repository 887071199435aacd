"""/tokenize and /detokenize: texts and conversations as token ids, and back."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.conversation import plain_messages, template_variables
from kvern.api.errors import HttpError
from kvern.api.fields import typed
from kvern.server.bodies import let_go, read_object
from kvern.server.http import json_response
from kvern.server.service import Service
from kvern.tools.definitions import read_tools

MOST_DECODED = 1 << 17
"""Token ids to turn into text at once, where the model's context is shorter."""


class Tokens:
    """The handlers; fields and answers are vLLM's."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: `prompt`, or `messages` and what else a chat has that its template can see."""
        body = await read_object(request)
        engine = self._service.engine_of(self._service.model(body))
        inputs = engine.client.inputs
        continued = typed(body, "continue_final_message", bool, False)
        variables, tools = template_variables(body), read_tools(typed(body, "tools", list, None)).definitions
        with engine.admission.enter(request.state.key):
            if "messages" in body:
                token_ids = await inputs.chat_prompt(
                    plain_messages(body["messages"]),
                    list(tools) or None,
                    variables,
                    add_generation_prompt=typed(body, "add_generation_prompt", bool, not continued),
                    continue_final_message=continued,
                    add_special_tokens=typed(body, "add_special_tokens", bool, False),
                )
            else:
                special = typed(body, "add_special_tokens", bool, True)
                token_ids = await inputs.encode(typed(body, "prompt", str, ""), special)
        with_texts = typed(body, "return_token_strs", bool, False)
        let_go(request, body)
        answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": inputs.max_model_len, "tokens": token_ids}
        if with_texts:
            name = engine.client.tokenizer.id_to_token
            answer["token_strs"] = await asyncio.to_thread(lambda: [name(token) for token in token_ids])
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: `tokens`."""
        body = await read_object(request)
        engine = self._service.engine_of(self._service.model(body))
        tokens = typed(body, "tokens", list, [])
        most = max(engine.client.inputs.max_model_len, MOST_DECODED)
        if len(tokens) > most:
            raise HttpError(400, f"tokens holds {len(tokens)}: this server takes {most} at most", param="tokens")
        if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            raise HttpError(400, "tokens must be a list of token ids", param="tokens")
        with engine.admission.enter(request.state.key):
            return json_response({"prompt": await engine.client.inputs.decode(tokens)})
