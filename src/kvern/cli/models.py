"""``kvern models``: models on this machine, known families, and the precision and memory of one model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from kvern.cli.output import make_table, print_lines, print_tables
from kvern.errors import ConfigError
from kvern.io.files import as_size

NEXT = {
    "kvern pull NAME": "downloads one of the Hugging Face hub, organisation/name",
    "kvern chat NAME": "talks to one; NAME may also be a folder or a GGUF file",
    "kvern serve NAME": "serves OpenAI's and Anthropic's APIs and a chat page, on port 8000",
    "kvern rm NAME": "deletes a downloaded one",
}
"""Commands that take the models of the list."""


@dataclass(frozen=True)
class ModelsCommand:
    """Show a model's precision, the memory that it needs and whether it fits, from the headers of its files, which are
    read from the Hugging Face hub if it is not on this machine. Without a name: list the models of this machine."""

    model: tyro.conf.Positional[str | None] = None
    """Name, folder, GGUF file, or hub id."""
    json: bool = False
    """Print the report of the model as JSON."""
    statistics: bool = False
    """Load the model and show the range of each matrix's weights and scales, and the share of saturated codes."""
    families: bool = False
    """List the model families that kvern can run."""

    def execute(self) -> int:
        """Prints the list and returns the exit code."""
        if self.model is not None:
            return self._describe(self.model)
        if self.json or self.statistics:
            raise ConfigError("--json and --statistics say what one model is: name it")
        if self.families:
            print_lines(*known_families())
            return 0
        print_models()
        return 0

    def _describe(self, model: str) -> int:
        from dataclasses import asdict

        from kvern.cli.model_report import print_statistics, report_of
        from kvern.config import EngineConfig
        from kvern.models.folder import model_folder
        from kvern.models.hub import resolve_model
        from kvern.models.loader import load_model
        from kvern.models.precision import weight_statistics
        from kvern.models.repository import outlined_model

        resolved = resolve_model(model, offline=True) if self.statistics else outlined_model(model, outlines())
        folder = model_folder(EngineConfig(str(resolved)))
        report = report_of(model, folder)
        matrices = list(weight_statistics(load_model(folder))) if self.statistics else []
        if self.json:
            told = report.as_json() | ({"matrices": [asdict(item) for item in matrices]} if matrices else {})
            sys.stdout.write(json.dumps(told, indent=1) + "\n")
            return 0
        report.print()
        if matrices:
            print_statistics(matrices)
        return 0


def outlines() -> Path:
    """Returns the folder for headers of models that are not on this machine."""
    from kvern.io.bytecode import cache_home

    return Path(os.environ.get("KVERN_CACHE_DIR") or cache_home()) / "outlines"


def print_models() -> None:
    """Prints the models on this machine, and what to do with one."""
    models = make_table("model", "where", "size", "folder", words=("where", "folder"))
    for name, where, size, folder in [*embedded(), *downloaded()]:
        models.add_row(name, where, as_size(size), str(folder))
    following = make_table("next", "", words=("",))
    for command, what in NEXT.items():
        following.add_row(command, what)
    print_tables(models, following)


def embedded() -> Iterator[tuple[str, str, int, Path]]:
    """Yields name, origin, size in bytes and folder of the models inside kvern."""
    from kvern.models.hub import embedded_models

    for folder in embedded_models():
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        yield folder.name, "embedded", size, folder


def downloaded() -> Iterator[tuple[str, str, int, Path]]:
    """Yields the same for safetensors checkpoints and GGUF files in the hub's cache."""
    from kvern.models.hub_cache import cached

    for repository in cached():
        names = {Path(file.file_name) for revision in repository.revisions for file in revision.files}
        if any(path.suffix in (".safetensors", ".gguf") for path in names):
            yield repository.repo_id, "downloaded", repository.size_on_disk, repository.repo_path


def known_families() -> list[str]:
    from kvern.models import registry

    return registry.FAMILIES.names
