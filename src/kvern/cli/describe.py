"""``kvern describe``: a description of a model whose type kvern does not know, found and proved with transformers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvern.errors import ConfigError, UnsupportedModel

INSTALL = "pip install 'kvern[transformers]'"


@dataclass(frozen=True)
class DescribeCommand:
    """Describe a model of a type that kvern does not know, so that it serves it itself instead of through transformers.

    Known structures are tried until kvern computes what transformers does with a small random model of this type. No
    code that comes with the model is run.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder of a model, or hub id as organisation/name."""
    output: Path | None = None
    """File for the description. None: kvern_model.json beside the model's config.json, where kvern serve reads it."""

    def execute(self) -> int:
        """Writes the description and returns the exit code. Raises KvernError if there is none."""
        from kvern.io.files import read_object
        from kvern.models.hub import resolve_model
        from kvern.models.spec_file import FILE, to_text

        folder = resolve_model(self.model)
        output = self.output or folder / FILE
        if (known := self._known(folder)) is not None:
            sys.stdout.write(f"{self.model} is described already: {known}\n")
            return 0
        try:
            from kvern.describing.proof import describe
        except ImportError as error:
            raise ConfigError(f"describing a model needs transformers ({error}): {INSTALL}") from error
        try:
            spec, lines = describe(folder)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self.model} cannot be described: {error}") from error
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        try:
            output.write_text(to_text(spec, read_object(folder / "config.json")))
        except OSError as error:
            raise ConfigError(f"output {output} cannot be written: {error.strerror}") from error
        sys.stdout.write(f"written to {output}\n")
        return 0

    def _known(self, folder: Path) -> str | None:
        """Returns what describes the model already; None: nothing, or a file that was made for another config.json."""
        from kvern.models.embedder import spec_of_folder
        from kvern.models.loader import read_config
        from kvern.models.registry import is_described
        from kvern.models.spec_file import FILE, is_current

        config = read_config(folder, described=False)
        if is_described(config):
            spec_of_folder(folder, config)
            return "a family of kvern"
        if not is_current(folder):
            return None
        spec_of_folder(folder, read_config(folder))
        return f"{folder / FILE} is there"
