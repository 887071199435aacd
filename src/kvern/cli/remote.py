"""A running server, asked over HTTP by commands."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from kvern.errors import ConfigError, in_a_line

MOST_CHARACTERS = 500
"""The longest line of a server that is shown."""


@dataclass(frozen=True)
class RemoteServer:
    """The server at a URL; the key is that of OPENAI_API_KEY if it is None."""

    base_url: str
    api_key: str | None = None
    timeout: float | None = None
    """Seconds until an answer must come; None: any number."""

    def read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Returns the server's answer, also that it is not ready.

        Raises ConfigError if it refuses, with its reason, or if nobody is there.
        """
        base = self.base_url.rstrip("/")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"the server's URL is {self.base_url}: it must begin with http:// or https://")
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, content, headers)  # noqa: S310 (its scheme is checked)
        try:
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as answer:  # noqa: S310
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                status, answered = error.code, error.read()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ConfigError(f"{base} does not answer as kvern serve does: {in_a_line(error)}") from error
        told = _object(answered)
        if "ready" in told:
            return answered
        said = told.get("error")
        reason = said.get("message") if isinstance(said, dict) else said
        raise ConfigError(f"{base} refuses: {printable(str(reason or f'status {status}'))}")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the server's answer, a JSON object. Raises ConfigError as `read`."""
        try:
            return dict(json.loads(self.read(path, body)))
        except (RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.base_url} does not answer as kvern serve does: {error}") from error


def printable(text: str) -> str:
    """Returns a server's words as one line that changes nothing in a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)[:MOST_CHARACTERS].strip()


def _object(content: bytes) -> dict[str, Any]:
    """Decodes an answer; empty if it is no JSON object."""
    try:
        told = json.loads(content)
    except (RecursionError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
