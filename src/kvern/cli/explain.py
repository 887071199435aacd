"""``kvern explain``: says what a request to a running server spent its time on."""

from __future__ import annotations

import json
import sys
import urllib.parse
from dataclasses import dataclass

import tyro

from kvern.cli.remote import RemoteServer


@dataclass(frozen=True)
class ExplainCommand:
    """Say what a request to a running server spent its time on: the largest cause first, then a timeline."""

    request_id: tyro.conf.Positional[str]
    """The x-request-id of the answer, or the id in it (chatcmpl-..., msg_...)."""
    base_url: str = "http://127.0.0.1:8000"
    """URL of the server: http://host:port or https://host, with a prefix if it has one."""
    api_key: str | None = None
    """API key that made the request, or one with admin=1. None: OPENAI_API_KEY, if it is set."""
    json: bool = False
    """Print the server's answer as JSON."""

    def execute(self) -> int:
        """Prints the explanation and returns the exit code. Raises ConfigError."""
        name = urllib.parse.quote(self.request_id, safe="")
        told = RemoteServer(self.base_url, self.api_key).ask(f"/v1/requests/{name}/explain")
        if self.json:
            sys.stdout.write(json.dumps(told, indent=2) + "\n")
            return 0
        lines = [told["summary"], ""]
        lines += [f"{_seconds(one['seconds'])}  {one['share']:4.0%}  {one['text']}" for one in told["causes"]]
        lines += ["", *(f"{_seconds(one['seconds'])}  {one['text']}" for one in told["timeline"])]
        sys.stdout.write("\n".join(lines) + "\n")
        return 0


def _seconds(seconds: float) -> str:
    return f"{seconds:10.4f} s"
