"""``kvern engines``: lists the engines of a running server, adds and removes them."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from kvern.errors import ConfigError


@dataclass(frozen=True)
class EnginesCommand:
    """List the engines of a running server, add one or remove one. The last two need an API key with admin=1."""

    action: tyro.conf.Positional[Literal["list", "add", "remove"]] = "list"
    """add: start another engine on a free GPU or free processor cores; remove: end one."""
    engine: tyro.conf.Positional[str | None] = None
    """Engine to remove, as list names it."""
    base_url: str = "http://127.0.0.1:8000"
    """URL of the server: http://host:port or https://host, with a prefix if it has one."""
    api_key: str | None = None
    """API key, sent as bearer token. None: OPENAI_API_KEY, if it is set."""
    model: str | None = None
    """Model whose engines are meant, on a server of several models. None: the first."""
    grace_seconds: float | None = None
    """Seconds that requests may go on in a removed engine before other engines take them over. None: the server's
    grace_seconds."""

    def execute(self) -> int:
        """Carries out the action, prints the result and returns the exit code. Raises ConfigError."""
        if (self.engine is not None) is not (self.action == "remove"):
            raise ConfigError(
                f"kvern engines {self.action} takes {'the name of an' if self.engine is None else 'no'} engine"
            )
        if self.action == "list":
            told = self._ask("/ready")
            for one in told.get("engines", [{"engine": "0", "ready": told["ready"]}]):
                sys.stdout.write(f"{one['engine']}: {'takes requests' if one['ready'] else 'takes no requests'}\n")
            return 0
        body = {"model": self.model, "engine": self.engine, "grace_seconds": self.grace_seconds}
        answer = self._ask(
            f"/v1/{self.action}_engine", {name: value for name, value in body.items() if value is not None}
        )
        sys.stdout.write(f"engine {answer['id']} {'takes requests' if self.action == 'add' else 'has ended'}\n")
        return 0

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the server's answer. Raises ConfigError with its reason if it refuses."""
        base = self.base_url.rstrip("/")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"base_url is {self.base_url}: it must begin with http:// or https://")
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, content, headers)  # noqa: S310 (its scheme is checked)
        try:
            with urllib.request.urlopen(request) as answer:  # noqa: S310
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            told = _object(error.read())
            if "ready" in told:
                return told
            reason = told.get("error", {}).get("message", f"status {error.code}")
            raise ConfigError(f"{base} refuses: {reason}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{base} does not answer as kvern serve does: {error}") from error


def _object(content: bytes) -> dict[str, Any]:
    """Decodes an answer; empty if it is no JSON object."""
    try:
        told = json.loads(content)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
