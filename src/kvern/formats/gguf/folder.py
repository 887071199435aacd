"""The files that a model folder has, made of a GGUF file. No torch is imported here."""

import hashlib
import os
from pathlib import Path

from kvern.formats.gguf.config import config_of
from kvern.formats.gguf.files import read_gguf, split_files
from kvern.formats.gguf.tokenizer import as_text, tokenizer_files


def gguf_folder_files(file: Path, *, tokenizer: bool = True) -> dict[str, Path | bytes]:
    """The files of a model's folder by name: paths of weights, and contents of the others; `tokenizer`: with its files.

    Raises CorruptCheckpoint or UnsupportedModel.
    """
    model = read_gguf(file)
    made = {"config.json": config_of(model)}
    if tokenizer:
        made |= tokenizer_files(model.header)
    return {item.name: item for item in split_files(file)} | {name: as_text(value) for name, value in made.items()}


def gguf_state(file: Path, *, tokenizer: bool = True) -> str:
    """A name for the folder: of another file, or of another kvern that makes it otherwise, it is another name."""
    state = hashlib.blake2b(repr(tokenizer).encode(), digest_size=16)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        state.update(source.read_bytes())
    for item in split_files(file):
        status = os.stat(item)
        state.update(repr((str(item), status.st_size, status.st_mtime_ns)).encode())
    return state.hexdigest()
