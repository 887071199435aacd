"""``kvern engines``: lists the engines of a running server, adds, removes and restarts them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from kvern.cli.remote import RemoteServer, printable
from kvern.errors import ConfigError


@dataclass(frozen=True)
class EnginesCommand:
    """List the engines of a running server and the prefill servers that it asks, add an engine, remove one or restart
    all. All but list need an API key with admin=1."""

    action: tyro.conf.Positional[Literal["list", "add", "remove", "restart"]] = "list"
    """add: start another engine on a free GPU or free processor cores; remove: end one; restart: end each and start
    another in its place, one after the other."""
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
        server = RemoteServer(self.base_url, self.api_key)
        if self.action == "list":
            self._list(server.ask("/ready"))
            return 0
        if self.action == "restart":
            self._restart(server)
        else:
            self._change(server, self.action, self.engine)
        return 0

    def _list(self, told: dict[str, Any]) -> None:
        for one in told.get("engines", [{"engine": "0", "ready": told["ready"]}]):
            sys.stdout.write(f"{one['engine']}: {'takes requests' if one['ready'] else 'takes no requests'}\n")
        for one in told.get("prefill_servers", []):
            state = "takes prompts" if one["ready"] else f"takes no prompts: {one['reason']}"
            computed = f"computed {one['computed_prompts']} of {one['computed_tokens']} tokens"
            name, failed = f"prefill server {one['prefill_server']}", one["failed_prompts"]
            sys.stdout.write(f"{printable(f'{name}: {state}; {computed}, failed {failed}')}\n")
        for said in told.get("waits_for", []):
            sys.stdout.write(f"waits for {printable(said)}\n")

    def _change(self, server: RemoteServer, action: str, engine: str | None) -> None:
        body = {"model": self.model, "engine": engine, "grace_seconds": self.grace_seconds}
        answer = server.ask(f"/v1/{action}_engine", {name: value for name, value in body.items() if value is not None})
        sys.stdout.write(f"engine {answer['id']} {'takes requests' if action == 'add' else 'has ended'}\n")
        sys.stdout.flush()

    def _restart(self, server: RemoteServer) -> None:
        """Ends each engine and starts another in its place, as long as that succeeds. Raises ConfigError."""
        told = server.ask("/ready").get("engines", [])
        model = self.model or next((one["model"] for one in told), None)
        known = dict.fromkeys(one["model"] for one in told)
        if known and model not in known:
            raise ConfigError(f"no engines are those of {model}: models with several are {', '.join(known)}; name one")
        names = [one["engine"] for one in told if one["model"] == model]
        if len(names) < 2:
            raise ConfigError(f"{model or 'the model'} has one engine: add another before, which answers meanwhile")
        for name in names:
            self._change(server, "remove", name)
            try:
                self._change(server, "add", None)
            except ConfigError as error:
                raise ConfigError(f"engine {name} has ended, and none starts in its place: {error}") from error
