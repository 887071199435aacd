"""Answers of routes that never stream."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.fields import merge_extra
from kvern.server.bodies import read_object
from kvern.server.http import json_response, strangers_header, until_gone


async def whole_answer(
    request: Request,
    answer: Callable[..., Awaitable[dict[str, Any]]],
    known: Callable[[Mapping[str, Any]], Collection[str]],
) -> Response:
    """Answers a request with what `answer(body, key, has_read)` returns; `known` gives the fields with an effect."""
    body = await read_object(request)
    merge_extra(body)
    headers = strangers_header(body, known(body))
    work = answer(body, request.state.key, request.state.held.close)
    return json_response(await until_gone(work, request.receive), headers=headers)
