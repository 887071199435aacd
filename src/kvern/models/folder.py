"""The folder of a configuration's model, with the files that options replace (`changed_folder.py`)."""

import dataclasses
from pathlib import Path

from kvern.config import EngineConfig
from kvern.models.hub import resolve_model


def model_folder(config: EngineConfig) -> Path:
    """The folder with the model's files, as options change them.

    Raises ModelNotFound, ConfigError, CorruptCheckpoint or UnsupportedModel.
    """
    folder = resolve_model(config.model, revision=config.revision, cache_folder=config.download_dir).absolute()
    if not (folder.is_file() or _is_changed(config)):
        return folder
    from kvern.models.changed_folder import changed_folder

    return changed_folder(config, folder)


def _is_changed(config: EngineConfig) -> bool:
    """True if options replace files of the model."""
    return bool(
        config.tokenizer is not None
        or config.chat_template is not None
        or config.hf_overrides
        or config.generation_config != "auto"
        or config.override_generation_config
    )


def for_engines(config: EngineConfig, folder: Path) -> EngineConfig:
    """The options for engines whose model is in `folder`; on a Ray cluster each machine has its own folder."""
    return config if config.executor == "ray" else at_folder(config, folder)


def at_folder(config: EngineConfig, folder: Path) -> EngineConfig:
    """The options of a model in `folder`, with the names by which clients request it."""
    return dataclasses.replace(config, model=str(folder), revision=None, served_model_name=config.model_names)


def folder_here(config: EngineConfig, folder: str) -> Path:
    """The model's folder for an engine or rank that was started by a process whose folder is `folder`.

    On a Ray cluster the process may be on another machine. Raises what `model_folder` does.
    """
    return model_folder(config) if config.executor == "ray" else Path(folder)
