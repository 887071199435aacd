"""``kvern pull``, ``kvern list`` and ``kvern rm``: models of the Hugging Face hub on this machine."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from kvern.cli.models import print_models
from kvern.errors import ConfigError, UnsupportedModel
from kvern.io.files import as_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvern.models.repository import Listing, Repository

MODEL = tyro.conf.arg(metavar="MODEL")


@dataclass(frozen=True)
class PullCommand:
    """Download a model from the Hugging Face hub: first its size, licence and kind are shown, then the progress.

    If it is interrupted, files that arrived whole are kept. kvern serve, chat and run download missing models, too.
    """

    model: Annotated[tyro.conf.Positional[str], MODEL]
    """Hub id as organisation/name; organisation/name:Q4_K_M for one of several GGUF files."""
    revision: str | None = None
    """Branch, tag or commit. None: the default branch."""

    def execute(self) -> int:
        """Downloads it and returns the exit code. Raises ModelNotFound or ConfigError."""
        from kvern.models.hub import local_model, resolve_model
        from kvern.models.repository import repository_of

        if (found := local_model(self.model)) is not None:
            sys.stdout.write(f"{self.model} is on this machine: {found}\n")
            return 0
        ending = self.model.partition(":")[2]
        repository = repository_of(self.model, self.revision)
        listing = repository.listing(ending)
        sys.stdout.write("".join(f"{line}\n" for line in told_before(self.model, repository, listing)))
        sys.stdout.flush()
        begun = time.monotonic()
        resolve_model(self.model, revision=self.revision)
        seconds = time.monotonic() - begun
        sys.stdout.write(f"{self.model} is here after {seconds:.1f} s: kvern chat {self.model}\n")
        return 0


def told_before(model: str, repository: Repository, listing: Listing) -> list[str]:
    """Returns size, licence, kind and place of a model that is about to be downloaded. Raises ConfigError: no space."""
    from kvern.models.hub_cache import cache_folder, space_for

    missing, free = space_for(repository, listing)
    lines = [f"{model}: {listing.size}, licence: {listing.licence or 'its card names none'}"]
    if (config := repository.config(listing)) is not None:
        lines.append(_kind(config))
    to_come = f"{as_size(missing)} to come" if missing else "nothing is missing"
    return [*lines, f"into {cache_folder()}, which has {as_size(free)} free; {to_come}"]


def _kind(config: Mapping[str, Any]) -> str:
    from kvern.models.registry import spec_from_config

    try:
        spec_from_config(config)
    except UnsupportedModel as error:
        return f"{error}; transformers may compute it (docs/models.md)"
    return f"model type {config.get('model_type')}: kvern computes it itself"


@dataclass(frozen=True)
class ListCommand:
    """List the models on this machine: those inside kvern, and those downloaded from the Hugging Face hub."""

    def execute(self) -> int:
        """Prints the list and returns the exit code."""
        print_models()
        return 0


@dataclass(frozen=True)
class RemoveCommand:
    """Delete a downloaded model, all its revisions, or one of its GGUF files."""

    model: Annotated[tyro.conf.Positional[str], MODEL]
    """Hub id; organisation/name:Q4_K_M for one of several GGUF files."""

    def execute(self) -> int:
        """Deletes it and returns the exit code. Raises ModelNotFound if it is not there."""
        from kvern.models.hub import EMBEDDED_FOLDER
        from kvern.models.hub_cache import remove

        if (EMBEDDED_FOLDER / self.model / "config.json").is_file():
            raise ConfigError(f"{self.model} is a part of kvern and is not deleted")
        sys.stdout.write(f"{self.model} is deleted: {as_size(remove(self.model))} are free again\n")
        return 0
