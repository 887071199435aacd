"""Errors as answers. It is loaded with the first."""

import html
import http
import math

from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from kvern.api.error_bodies import anthropic_error, as_sent, body_of, ollama_error, status_of
from kvern.errors import EngineUnavailable, ServerBusy
from kvern.server.http import PAGE_HEADERS, is_anthropic, json_response, path_of


def answer_of(error: Exception, scope: Scope) -> Response:
    """Answers with an error: as a page for a browser, else as JSON in the format of the client's API."""
    error = as_sent(error, scope["state"].get("sent_names", {}))
    headers = getattr(error, "headers", None)
    if isinstance(error, EngineUnavailable | ServerBusy):
        headers = {"retry-after": str(math.ceil(error.seconds))}
    status, path = status_of(error), path_of(scope)
    if _is_looked_at(scope):
        content = error_page(status, str(error), scope.get("root_path", ""))
        return HTMLResponse(content, status, {**(headers or {}), **PAGE_HEADERS})
    if path.startswith("/api/"):
        return json_response(ollama_error(error), status, headers)
    request_id = scope["state"]["request_id"]
    body = anthropic_error(error, request_id) if is_anthropic(scope) else body_of(error)
    return json_response(body, status, headers)


def _is_looked_at(scope: Scope) -> bool:
    """True if a browser navigates to the route. Some client libraries accept text/html always, but then JSON as
    well."""
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    return scope["method"] in ("GET", "HEAD") and b"text/html" in accepted and b"application/json" not in accepted


def error_page(status: int, message: str, root_path: str) -> str:
    """Returns the HTML page of an error."""
    phrase, base = http.HTTPStatus(status).phrase, html.escape(root_path)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{status} {phrase}</title><style>:root{{color-scheme:light dark}}body{{font:16px/1.5 system-ui;"
        "max-width:40rem;margin:4rem auto;padding:0 1rem;overflow-wrap:anywhere}</style>"
        f"<h1>{status} {phrase}</h1><p>{html.escape(message)}</p>"
        f'<p><a href="{base}/">Chat</a> · <a href="{base}/docs">All routes</a></html>'
    )
