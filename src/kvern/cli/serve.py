"""``kvern serve``: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from kvern.config import EngineConfig
from kvern.errors import ConfigError, EngineDied


@dataclass(frozen=True)
class Serve:
    """Serve a model over HTTP, with OpenAI's completions and chat completions. Ctrl-C ends it."""

    name: tyro.conf.Positional[str | None] = None
    """Folder, Hugging Face id, or the name of an embedded model; the same as --model."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    api_key: tuple[str, ...] = ()
    """Keys, one of which every request but /health must then carry."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model in the API. None: the name it was started with."""
    engine_timeout: float = 60.0
    """Seconds without a sign of life after which the engine is replaced; a step takes less."""
    config: Path | None = None
    """TOML file with options."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Serve until a signal ends it and return the exit code. Raises KvernError if the engine cannot start."""
        import asyncio
        import dataclasses

        from kvern.server.run import serve

        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}: it must be between 0 and 65535")
        engine = dataclasses.replace(self.engine, model=self.name) if self.name is not None else self.engine
        names = self.served_model_name or (engine.model or "kvern-12m",)
        try:
            asyncio.run(serve(engine, names, self.host, self.port, self.api_key, self.engine_timeout, _say))
        except EngineDied as error:
            _say(f"error: {error}")
            return 1
        return 0


def _say(text: str) -> None:
    sys.stderr.write(f"kvern: {text}\n")
    sys.stderr.flush()
