"""Answers for paths and methods that the server does not have, with advice."""

import difflib
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from kvern.api.errors import HttpError
from kvern.errors import shown
from kvern.server.http import error_response, path_of

EXAMPLES = {
    "/v1/chat/completions": '{"messages": [{"role": "user", "content": "Hello"}]}',
    "/v1/completions": '{"prompt": "Once upon a time"}',
    "/v1/embeddings": '{"input": "Hello"}',
    "/v1/messages": '{"max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}',
    "/v1/responses": '{"input": "Hello"}',
    "/api/chat": '{"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]}',
    "/api/generate": '{"model": "NAME", "prompt": "Hello"}',
}
"""Example bodies of routes."""
COMPARED = 64
"""The number of characters of a path that are compared with those of routes."""


class Signposts:
    """Answers for paths and methods that these routes do not have."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    async def refused(self, request: Request, error: Exception) -> Response:
        """Answers 404 and 405 with advice, and OPTIONS."""
        assert isinstance(error, HTTPException)
        methods = self._methods(request.scope)
        path = path_of(request.scope)
        asked = f"{request.method} {shown(path)}"
        if not methods:
            message = f"{asked}: there is no such route{self._nearest(path)}; /docs lists them"
            return error_response(HttpError(404, message), request.scope)
        headers = {"allow": ", ".join([*methods, "OPTIONS"])}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        body = f" with a body such as {EXAMPLES[path]}" if path in EXAMPLES else ""
        message = f"{asked}: this route takes {' and '.join(methods)}{body}; /docs tells its fields"
        return error_response(HttpError(405, message, headers=headers), request.scope)

    def _methods(self, scope: Scope) -> list[str]:
        """Returns the methods of all routes with the path."""
        fitting = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        return sorted({method for route in fitting for method in route.methods or ()})

    def _nearest(self, path: str) -> str:
        paths = {route.path for route in self._routes}
        found = difflib.get_close_matches(path[:COMPARED], sorted(paths), n=2)
        return f", the nearest are {' and '.join(found)}" if found else ""
