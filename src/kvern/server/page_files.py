"""The files of the chat page that `web/` builds, compressed for clients that accept gzip."""

import asyncio
import gzip
import hashlib
import mimetypes
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; style-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept, Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}


class PageFile:
    """One file. It is compressed once, for the first client that accepts gzip."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._kind = mimetypes.guess_type(path.name)[0]
        # A weak tag names what the file holds, whether it is sent compressed or not.
        self._tag = f'W/"{hashlib.sha256(self._content).hexdigest()[:32]}"'

    async def answer(self, request: Request) -> Response:
        """Answers with the file, or with 304 if the client has it."""
        headers = {**HEADERS, "ETag": self._tag}
        held = [tag.strip() for tag in ",".join(request.headers.getlist("if-none-match")).split(",")]
        if "*" in held or self._tag in held or self._tag.removeprefix("W/") in held:
            return Response(status_code=304, headers=headers)
        if not accepts_gzip(",".join(request.headers.getlist("accept-encoding"))):
            return Response(self._content, headers=headers, media_type=self._kind)
        content = await asyncio.to_thread(lambda: self._compressed)
        return Response(content, headers={**headers, "Content-Encoding": "gzip"}, media_type=self._kind)

    @cached_property
    def _compressed(self) -> bytes:
        return gzip.compress(self._content, mtime=0)


def accepts_gzip(accepted: str) -> bool:
    """Returns whether the value of Accept-Encoding allows gzip: by name, or as `*`, with a weight above 0."""
    weights = {}
    for coding in accepted.lower().replace(" ", "").split(","):
        name, _, weight = coding.partition(";q=")
        weights[name] = weight.strip("0.") != "" or weight == ""
    return weights.get("gzip", weights.get("*", False))


def page_files() -> dict[str, PageFile]:
    """Returns the files of the page by name. They are read here."""
    return {path.name: PageFile(path) for path in sorted(FOLDER.iterdir())}
