"""The files of a GGUF model, and those of a model folder that are made of them. No torch is imported."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from kvern.errors import CorruptCheckpoint, ModelNotFound, shown
from kvern.formats.gguf.config import config_of
from kvern.formats.gguf.header import GgufModel, read_gguf_header
from kvern.formats.gguf.tokenizer import as_text, tokenizer_files

ENDING = ".gguf"
MOST_FILES = 1000
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf(file: Path) -> GgufModel:
    """The headers of a model, of which this is the file or one of the files.

    Raises CorruptCheckpoint or UnsupportedModel.
    """
    headers = [read_gguf_header(item) for item in split_files(file)]
    names: dict[str, Path] = {}
    for header in headers:
        for tensor in header.tensors:
            if names.setdefault(tensor.name, header.file) != header.file:
                raise CorruptCheckpoint(
                    f"the tensor {shown(tensor.name)} is in two files: {names[tensor.name]} and {header.file}"
                )
    expected = headers[0].get("split.tensors.count", int, len(names))
    if expected != len(names):
        raise CorruptCheckpoint(f"{file}: the model has {expected} tensors, and its files {len(names)}")
    return GgufModel(headers[0], tuple(tensor for header in headers for tensor in header.tensors))


def split_files(file: Path) -> list[Path]:
    """All files of the model that this one belongs to, the first of them first. Raises CorruptCheckpoint."""
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match[3])
    files = [file.with_name(f"{match[1]}-{index:05}-of-{match[3]}{ENDING}") for index in range(1, count + 1)]
    missing = [item.name for item in files[:MOST_FILES] if not item.is_file()]
    if missing or not 1 <= count <= MOST_FILES:
        shown_names = ", ".join(missing[:3])
        raise CorruptCheckpoint(f"{file} is one of {count} files, {len(missing)} of them missing: {shown_names}")
    return files


def choose_in(folder: Path, wanted: str) -> Path:
    """The first file of one model in a folder, see `choose`."""
    found = [path for pattern in (f"*{ENDING}", f"*/*{ENDING}") for path in folder.glob(pattern)]
    return folder / choose([path.relative_to(folder).as_posix() for path in found], wanted, str(folder))[0]


def choose(names: Iterable[str], wanted: str, where: str) -> list[str]:
    """Chooses the files of one model in a folder or repository; its name ends with `wanted`, such as "Q4_K_M".

    Raises ModelNotFound, which lists the models.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(ENDING) and not Path(name).name.startswith("mmproj"):
            match = _SPLIT.fullmatch(name)
            models.setdefault(match[1] if match else name.removesuffix(ENDING), []).append(name)
    found = [stem for stem in models if stem.lower().endswith(wanted.lower().removesuffix(ENDING))]
    exact = [stem for stem in found if re.search(rf"(^|[-._/]){re.escape(wanted)}$", stem, re.IGNORECASE)]
    if wanted and len(exact) == 1:
        found = exact
    if len(found) == 1:
        return models[found[0]]
    listed = ", ".join(list(models)[:12]) + (", ..." if len(models) > 12 else "")
    choice = f"{where}:{next(iter(models), '').rpartition('-')[2] or 'Q4_K_M'}"
    what = f"no, or more than one, GGUF file that ends in {wanted!r:.60}" if wanted else f"{len(models)} GGUF files"
    raise ModelNotFound(f"{where} holds {what}: choose one by its ending, as {choice} ({listed})")


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
