"""/tokenize and /detokenize: texts and conversations as token ids, and back."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.conversation import chat_tools, plain_messages, template_variables
from kvern.api.errors import HttpError
from kvern.api.fields import Refused, check_refused, typed
from kvern.server.apis import Apis
from kvern.server.bodies import let_go, read_object
from kvern.server.http import json_response

MOST_DECODED = 1 << 17
"""The most token ids that are decoded at once if the model's context is shorter."""


REFUSED: Refused = {
    "with_pieces": ((False,), "send return_token_strs for texts beside the ids"),
    "parse_special": ((True,), "special tokens in a text are always read as such"),
}


class Tokens:
    """Handlers of both routes. Fields and answers are vLLM's; for texts, llama.cpp's too."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: `prompt`, or `messages` with all fields of a chat that its template can see.

        A text in `content` is llama.cpp's form: special tokens are added only with `add_special`.
        """
        body = await read_object(request)
        engine = self._service.engine_of(await self._service.model(body, request.state.key))
        inputs = engine.client.inputs
        continued = typed(body, "continue_final_message", bool, False)
        variables, tools = (
            template_variables(body),
            chat_tools({"tools": typed(body, "tools", list, None)})[0].definitions,
        )
        with engine.admission.enter(request.state.key):
            if "messages" in body:
                asked = plain_messages(body["messages"])
                async with self._service.seen(engine, asked, request.state.key) as messages:
                    token_ids = await inputs.chat_prompt(
                        messages,
                        list(tools) or None,
                        variables,
                        add_generation_prompt=typed(body, "add_generation_prompt", bool, not continued),
                        continue_final_message=continued,
                        add_special_tokens=typed(body, "add_special_tokens", bool, False),
                    )
            else:
                text, special = _text(body)
                token_ids = await inputs.encode(text, special)
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
        engine = self._service.engine_of(await self._service.model(body, request.state.key))
        tokens = typed(body, "tokens", list, None)
        if tokens is None:
            raise HttpError(400, "tokens is missing: send a list of token ids", param="tokens")
        most = max(engine.client.inputs.max_model_len, MOST_DECODED)
        if len(tokens) > most:
            raise HttpError(400, f"tokens holds {len(tokens)}: this server takes {most} at most", param="tokens")
        if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            raise HttpError(400, "tokens must be a list of token ids", param="tokens")
        with engine.admission.enter(request.state.key):
            text = await engine.client.inputs.decode(tokens)
        return json_response({"prompt": text, "content": text})


def _text(body: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the text of a body, and whether special tokens are added. Raises HttpError."""
    check_refused(body, REFUSED)
    prompt, content = typed(body, "prompt", str, None), typed(body, "content", str, None)
    if prompt is not None and content is not None:
        raise HttpError(400, "prompt and content are both set: give one of them", param="content")
    if content is not None:
        return content, typed(body, "add_special", bool, False)
    if prompt is None:
        raise HttpError(400, "prompt is missing: send a text, or a conversation as messages", param="prompt")
    return prompt, typed(body, "add_special_tokens", bool, True)
