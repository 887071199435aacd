"""The chat page: files that `web/` builds, and what a browser may do with them."""

import mimetypes
from pathlib import Path

from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; style-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[Route]:
    """`/` and the files that it loads, which are read here."""
    return [
        Route("/" if file.name == "index.html" else f"/{file.name}", _response(file), methods=["GET"])
        for file in sorted(FOLDER.iterdir())
    ]


def _response(file: Path) -> Response:
    return Response(file.read_bytes(), headers=HEADERS, media_type=mimetypes.guess_type(file.name)[0])
