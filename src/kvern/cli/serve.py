"""``kvern serve``: a model behind the HTTP APIs of OpenAI and Anthropic."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from kvern.config import DEFAULT_ADAPTERS, EngineConfig
from kvern.plugins import imported
from kvern.server.config import ServerConfig
from kvern.serving.child import EngineProcess


@dataclass(frozen=True)
class ServeCommand:
    """Serve a model, or several, over HTTP, with the APIs of OpenAI and Anthropic and a chat page. Ctrl-C ends it."""

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="MODEL")] = None
    """Folder, Hugging Face id, or the name of an embedded model; the same as --model."""
    config: Path | None = None
    """TOML or YAML file with options."""
    divided: tyro.conf.Suppress[bool] = False
    """The user has chosen how the model is divided among GPUs."""
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Serve until a signal ends it and return the exit code. Raises KvernError if the engine cannot start."""
        from kvern.cli.first_engine import engine_process

        with engine_process() as process:  # it imports PyTorch while this process imports the server
            self._serve(process)
        return 0

    def _serve(self, process: EngineProcess | None) -> None:
        import dataclasses

        import uvloop

        from kvern.cli.first_engine import signals
        from kvern.server.run import serve

        engine = dataclasses.replace(self.engine, model=self.name) if self.name is not None else self.engine
        if process is not None and engine.executor == "ray":  # all engines run where Ray says
            process.kill()
            process.forget()
            process = None
        if self.server.adapter_folder is not None and engine.max_adapters is None:
            engine = dataclasses.replace(engine, max_adapters=DEFAULT_ADAPTERS)
        models: Sequence[Any] = ()
        if self.server.models or self.server.models_dir is not None:
            read = imported("kvern.residency.options:one_or_several")
            engine, models = read(engine, self.server.models, self.server.models_dir)
        if not models and not self.divided and engine.executor == "processes":
            engine = planned(engine)
        if signals:
            return
        stamp = f"{STAMP} " if tells_time() else ""
        logging.basicConfig(format="%(asctime)skvern: %(message)s", datefmt=stamp, level=logging.WARNING)
        for name in ("kvern.requests", "kvern.verdict"):
            logging.getLogger(name).setLevel(logging.INFO)
        uvloop.run(serve(engine, self.server, process, _say, signals, models))


def planned(engine: EngineConfig) -> EngineConfig:
    """Returns the options with the model divided among several GPUs by a plan, and prints the reason.

    Raises KvernError if there is no such model.
    """
    from kvern.serving.places import seen_gpus

    if len(seen_gpus(engine)) < 2:
        return engine
    import dataclasses
    import subprocess

    import msgspec

    from kvern.models.folder import model_folder

    asked = dataclasses.asdict(dataclasses.replace(engine, model=str(model_folder(engine)), revision=None))
    command = [sys.executable, "-m", "kvern.planning.choice"]
    done = subprocess.run(command, input=msgspec.json.encode(asked), stdout=subprocess.PIPE, check=False)  # noqa: S603
    if done.returncode:
        _say("one engine takes the first GPU, since the plan for all of them failed; -tp, -pp and -dp divide the model")
        return engine
    choice = msgspec.json.decode(done.stdout)
    _say(f"{choice.pop('reason')} (-tp, -pp and -dp say it otherwise)")
    return dataclasses.replace(engine, **choice)


STAMP = "%Y-%m-%dT%H:%M:%S%z"


def tells_time() -> bool:
    """True if lines begin with the time: not on a terminal, nor in systemd's journal, which knows it."""
    return not sys.stderr.isatty() and "JOURNAL_STREAM" not in os.environ


def _say(text: str) -> None:
    stamp = time.strftime(f"{STAMP} ") if tells_time() else ""
    sys.stderr.write(f"{stamp}kvern: {text}\n")
    sys.stderr.flush()
