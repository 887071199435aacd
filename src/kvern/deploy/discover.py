"""The facts about a model before anything is downloaded: family, formats, licence, size."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvern.cache.keys import model_identity
from kvern.config import EngineConfig
from kvern.deploy.stage import Part, Work
from kvern.errors import ConfigError, CorruptCheckpoint, shown
from kvern.formats.gguf.files import split_files
from kvern.io.bytecode import cache_home
from kvern.io.files import as_size
from kvern.models.fallback.spec import TransformersSpec
from kvern.models.folder import model_folder
from kvern.models.hub import EMBEDDED_FOLDER, local_model
from kvern.models.hub_cache import space_for
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.models.registry import KEY
from kvern.models.repository import repository_of
from kvern.models.spec_file import FILE

FALLBACK = "transformers"
BY_TRANSFORMERS = (
    "none: transformers computes it, and kvern those parts that compute the same; kvern describe may find a description"
)


class Discovered(msgspec.Struct):
    """A model. `revision`: the hub's commit; None for a folder. `outline`: the folder that describes it, which has
    whole weights if the model is on this machine, else their headers. `described`: by whom. `identity`: that of its
    files."""

    model: str
    name: str
    revision: str | None
    outline: str
    licence: str | None
    nbytes: int
    family: str
    described: str
    formats: list[str]
    quantized: str | None
    identity: str


class Discover:
    """The first stage; it is short, and runs each time, so that a changed folder is noticed."""

    name = "discover"
    result = Discovered

    def inputs(self, work: Work) -> Mapping[str, Any]:
        """Its result is looked up each time."""
        return {"model": work.asked.model, "revision": work.asked.revision}

    def run(self, work: Work) -> Discovered:
        """Looks at the folder, or asks the hub. Raises KvernError."""
        model, revision = work.asked.model, work.asked.revision
        if (folder := local_model(model)) is not None:
            if revision is not None:
                raise ConfigError(
                    f"revision is {shown(revision)}, and {model} is of this machine, without revisions: leave it out"
                )
            return _described(model, None, folder.absolute(), _licence(folder), sum(_sizes(folder).values()))
        repository = repository_of(model, revision)
        listing = repository.listing(model.partition(":")[2])
        space_for(repository, listing)
        work.say(f"    {model}: {listing.size}, licence: {listing.licence or 'its card names none'}")
        pinned = repository_of(model, listing.commit)
        outline = pinned.outline(listing, cache_home() / "outlines")
        return _described(model, listing.commit, outline, listing.licence, listing.total)

    def stands(self, work: Work, result: Discovered) -> bool:
        """False for folders of this machine, which may have changed; a commit of the hub never does."""
        return result.revision is not None and Path(result.outline).exists()

    def report(self, result: Discovered) -> Part:
        """The model in figures."""
        rows = [
            ("model", result.model + (f" at {result.revision}" if result.revision else "")),
            ("family", result.family),
            ("described by", result.described),
            ("formats", ", ".join(result.formats)),
            ("licence", result.licence or "its card names none"),
            ("size", as_size(result.nbytes)),
        ]
        return Part(rows)


def _described(model: str, revision: str | None, outline: Path, licence: str | None, nbytes: int) -> Discovered:
    folder = model_folder(EngineConfig(str(outline)))
    formats = ["GGUF"] if outline.is_file() else _formats(outline)
    if not formats:
        raise ConfigError(f"{model} has neither safetensors nor GGUF files: give the folder of a model's weights")
    config = read_config(folder)
    spec = describe_model(folder, config, "auto")
    by_transformers = isinstance(spec, TransformersSpec)
    is_hub = revision is not None or outline.parent == EMBEDDED_FOLDER
    return Discovered(
        model=model if is_hub else str(outline),
        name=model if is_hub else Path(model).name,
        revision=revision,
        outline=str(outline),
        licence=licence,
        nbytes=nbytes,
        family=FALLBACK if by_transformers else spec.model_type,
        described=BY_TRANSFORMERS if by_transformers else FILE if KEY in config else "a family of kvern",
        formats=formats,
        quantized="GGUF" if outline.is_file() else _method(config),
        identity=revision or _identity(folder),
    )


def _sizes(folder: Path) -> dict[str, int]:
    files = folder.iterdir() if folder.is_dir() else split_files(folder)
    return {path.name: path.stat().st_size for path in files if path.is_file()}


def _formats(folder: Path) -> list[str]:
    offered = {"safetensors": "safetensors", "gguf": "GGUF"}
    return list(
        dict.fromkeys(offered[path.suffix[1:]] for path in sorted(folder.iterdir()) if path.suffix[1:] in offered)
    )


def _method(config: Mapping[str, Any]) -> str | None:
    """Returns how weights are quantized already; None if they are plain."""
    told = config.get("quantization_config")
    return str(told.get("quant_method", "unknown")) if isinstance(told, Mapping) else None


def _identity(folder: Path) -> str:
    try:
        return model_identity(folder).hex()
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{folder} cannot be read: {error}") from None


def _licence(folder: Path) -> str | None:
    """Returns the licence that the card in a folder names."""
    card = folder / "README.md"
    if folder.parent == EMBEDDED_FOLDER or not card.is_file():
        return "that of kvern" if folder.parent == EMBEDDED_FOLDER else None
    found = re.search(r"^license:\s*(\S+)", card.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else None
