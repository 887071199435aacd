"""The folder of a model of which options replace files.

    tokenizer                      tokenizer.json, its configuration, and the chat templates beside it
    chat_template                  chat_template.jinja
    hf_overrides                   values of config.json
    generation_config, override_   generation_config.json

It has links to the model's files, and its own changed files. It is in the cache under a name derived from its contents,
so that the next start of this model finds it. A GGUF file becomes such a folder too, with its settings in the files
that other models have.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvern.config import EngineConfig
from kvern.errors import ConfigError, InvalidParameter
from kvern.io.files import MOST_CONFIG_BYTES, read_object, read_whole, reason
from kvern.models.hub import resolve_model
from kvern.request.sampling_params import USUAL, SamplingParams
from kvern.text.chat_template import environment
from kvern.text.tokenizer import end_token_ids

TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *TEMPLATES,
)
GENERATION_VALUES = (*USUAL, "do_sample", "eos_token_id")
"""The fields of generation_config.json that kvern reads."""

Files = dict[str, Path | bytes]
"""Files by name: a path to link to, or contents."""


def changed_folder(config: EngineConfig, folder: Path) -> Path:
    """The folder of the model in `folder`, or of a GGUF file, as options change it. Raises as `model_folder`."""
    cache = config.cache_folder / "models"
    if folder.is_file():
        folder = _made_of_gguf(folder, cache, tokenizer=config.tokenizer is None)
    found: Files = {path.name: path for path in folder.iterdir()}
    files = dict(found)
    if config.tokenizer is not None:
        files = _with_tokenizer(files, config.tokenizer, config.download_dir)
    if config.chat_template is not None:
        files = _with_template(files, template_text(config.chat_template))
    if config.hf_overrides:
        files["config.json"] = as_json(merged(_object(files, "config.json"), config.hf_overrides))
    if config.generation_config != "auto" or config.override_generation_config:
        files["generation_config.json"] = as_json(_generation_config(files, config))
    return folder if files == found else _linked(files, cache)


def _made_of_gguf(file: Path, cache: Path, *, tokenizer: bool) -> Path:
    """The folder of a GGUF file, which is read only where it was not before."""
    from kvern.formats.gguf.files import gguf_folder_files, gguf_state

    folder = cache / gguf_state(file, tokenizer=tokenizer)
    return folder if folder.is_dir() else _made(gguf_folder_files(file, tokenizer=tokenizer), folder)


def template_text(given: str) -> str:
    """The chat template that the option gives, a file or the template itself. Raises ConfigError."""
    text = given
    if not ("{" in given or "\n" in given):
        try:
            text = read_whole(Path(given).expanduser(), MOST_CONFIG_BYTES).decode()
        except FileNotFoundError:
            raise ConfigError(f"chat_template is {given!r}: it is neither a file nor a template") from None
        except UnicodeDecodeError:
            raise ConfigError(f"chat_template is {given!r}: that file is not UTF-8 text") from None
    try:
        environment().from_string(text)
    except Exception as error:  # a template's syntax can fail in any way
        raise ConfigError(f"chat_template cannot be compiled: {reason(error)}") from None
    return text


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values with overrides applied, also within inner configurations such as text_config."""
    result = dict(values)
    for name, value in overrides.items():
        inner = values.get(name)
        within = name.endswith("_config") and isinstance(inner, dict) and isinstance(value, Mapping)
        result[name] = merged(inner, value) if within and isinstance(inner, dict) else value
    return result


def as_json(values: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(values, indent=1).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"hf_overrides or override_generation_config is not JSON: {reason(error)}") from None


def _with_tokenizer(files: Files, name: str, download_dir: str | None) -> Files:
    given = Path(name).expanduser()
    folder = given.absolute() if given.is_dir() else _downloaded(name, download_dir)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"tokenizer is {name!r}: there is no tokenizer.json")
    rest = {name: file for name, file in files.items() if name not in TOKENIZER_FILES}
    return rest | {name: folder / name for name in TOKENIZER_FILES if (folder / name).exists()}


def _downloaded(name: str, download_dir: str | None) -> Path:
    """The folder of another model without its weights."""
    return resolve_model(name, cache_folder=download_dir, weights=False).absolute()


def _with_template(files: Files, text: str) -> Files:
    rest = {name: file for name, file in files.items() if name not in TEMPLATES}
    tokenizer = _object(files, "tokenizer_config.json")
    if tokenizer.pop("chat_template", None) is not None:
        rest["tokenizer_config.json"] = as_json(tokenizer)
    return rest | {"chat_template.jinja": text.encode()}


def _generation_config(files: Files, config: EngineConfig) -> dict[str, Any]:
    stored = _object(files, "generation_config.json")
    if config.generation_config == "none":
        stored = {name: value for name, value in stored.items() if name.endswith("token_id")}
    elif config.generation_config != "auto":
        file = Path(config.generation_config).expanduser() / "generation_config.json"
        if not file.is_file():
            raise ConfigError(
                f"generation_config is {config.generation_config!r}: it must be auto, none, or a folder with a "
                "generation_config.json"
            )
        stored = read_object(file)
    unknown = sorted(set(config.override_generation_config) - set(GENERATION_VALUES))
    if unknown:
        raise ConfigError(
            f"override_generation_config holds {unknown[0]!r}: kvern reads {', '.join(GENERATION_VALUES)} there; other "
            "parameters go into requests"
        )
    try:
        SamplingParams(**{name: value for name, value in config.override_generation_config.items() if name in USUAL})
        if (ends := config.override_generation_config.get("eos_token_id")) is not None:
            end_token_ids(ends)
    except (InvalidParameter, ValueError) as error:
        raise ConfigError(f"override_generation_config: {error}") from None
    return stored | dict(config.override_generation_config)


def _object(files: Files, name: str) -> dict[str, Any]:
    file = files.get(name, b"{}")
    return dict(json.loads(file)) if isinstance(file, bytes) else read_object(file)


def _linked(files: Files, cache: Path) -> Path:
    """The folder in the cache with these files. Raises ConfigError."""
    state = hashlib.blake2b(digest_size=16)
    for name, file in sorted(files.items()):
        state.update(repr((name, file if isinstance(file, bytes) else str(file))).encode())
    folder = cache / state.hexdigest()
    return folder if folder.is_dir() else _made(files, folder)


def _made(files: Files, folder: Path) -> Path:
    """`folder` with these files, made whole elsewhere and then renamed. Raises ConfigError."""
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
        try:
            for name, file in files.items():
                if isinstance(file, bytes):
                    (made / name).write_bytes(file)
                else:
                    (made / name).symlink_to(file)
            os.rename(made, folder)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not folder.is_dir():  # another start was faster
                raise
    except OSError as error:
        raise ConfigError(f"{cache} cannot be written: {reason(error)}; give another cache_dir") from error
    return folder
