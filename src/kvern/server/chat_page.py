"""The chat page: files that `web/` builds, with their security headers."""

import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
GREETING = "kvern is running: OpenAI's API is at /v1, Anthropic's at /v1/messages, ollama's at /api; /docs lists all\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; style-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[Route]:
    """Returns the routes of `/` and of the files that it loads. The files are read here."""
    files = sorted(FOLDER.iterdir())
    others = [Route(f"/{file.name}", _response(file), methods=["GET"]) for file in files if file.name != INDEX]
    return [Route("/", _greet, methods=["GET"]), *others]


async def _greet(request: Request) -> Response:
    """Answers browsers with the page and other programs with a line of text."""
    if "text/html" in request.headers.get("accept", ""):
        return _response(FOLDER / INDEX)
    return PlainTextResponse(GREETING, headers={"Vary": "Accept"})


def _response(file: Path) -> Response:
    return Response(file.read_bytes(), headers=HEADERS, media_type=mimetypes.guess_type(file.name)[0])
