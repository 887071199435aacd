"""From the name of a model to a folder with its files: embedded, local, or from the Hugging Face hub."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from kvern.config import DEFAULT_MODEL
from kvern.errors import ModelNotFound
from kvern.plugins import imported

EMBEDDED_FOLDER = Path(__file__).parent.parent / "embedded"
WEIGHTS = "*.safetensors"
GGUF = "*.gguf"
MEDUSA = "medusa_lm_head.pt"
"""The file name of the heads that Medusa's authors publish."""


def embedded_models() -> list[Path]:
    """Return the folders of the models that ship inside the package."""
    return sorted(path.parent for path in EMBEDDED_FOLDER.glob("*/config.json"))


def resolve_model(
    model: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    cache_folder: str | Path | None = None,
    weights: bool = True,
) -> Path:
    """Return the folder that holds ``config.json`` and the weights of ``model``, or its GGUF file; downloads if needed.

    Args:
        model: ``None`` for the embedded chat model, the name of an embedded model, a folder, a GGUF file, or a hub id
            (``organisation/name``). A folder of that name takes precedence over the hub. Of a folder or repository
            with several GGUF files, ``name:Q4_K_M`` is the one whose name ends so.
        revision: branch, tag or commit of a hub id; its default branch if ``None``.
        token: overrides ``HF_TOKEN`` and the token stored by ``hf auth login``.
        offline: ``True`` uses only what was downloaded before; ``None`` follows ``HF_HUB_OFFLINE``.
        cache_folder: overrides ``HF_HUB_CACHE``.
        weights: download the weights too, not only the other files.

    Raises:
        ModelNotFound: there is no such model, or the hub does not deliver it.
    """
    name = os.fspath(model) if model is not None else DEFAULT_MODEL
    if (found := local_model(name)) is not None:
        return found
    repository, _, ending = name.partition(":")
    hub = imported("kvern.models.repository:Repository")(repository, revision, token, offline, cache_folder)
    path: Path = Path("") if ending else hub.download(weights)
    if ending or (weights and not any(path.glob(WEIGHTS)) and not (path / MEDUSA).is_file()):
        return Path(hub.download_gguf(ending))
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"model {name!r} has no config.json on the hub: kvern cannot tell what it is")
    return path


def local_model(name: str) -> Path | None:
    """Return what `resolve_model` does for a model of this machine; None for a hub id. Raises ModelNotFound."""
    folder = Path(name).expanduser()
    if name and folder.exists():
        return _checked(folder)
    if (EMBEDDED_FOLDER / name / "config.json").is_file():
        return EMBEDDED_FOLDER / name
    stem, _, ending = name.rpartition(":")
    if ending and (folder := Path(stem).expanduser()).is_dir() and stem:
        return _gguf_in(folder, ending)
    if name.endswith(".gguf"):
        raise ModelNotFound(f"model {name!r}: there is no such file{_nearest(name)}")
    if not name or Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"model {name!r}: there is no such folder{_nearest(name)}")
    if "/" not in name:
        known = ", ".join(path.name for path in embedded_models()) or "none"
        remedy = ": give a folder, a GGUF file, or a hub id as organisation/name, such as Qwen/Qwen3-0.6B"
        raise ModelNotFound(
            f"model {name!r} is neither a file or folder here nor an embedded model ({known}){_nearest(name) or remedy}"
        )
    return None


def _nearest(name: str) -> str:
    """Returns the end of a message about a wrong name: the model of this machine that is most like it, if one is."""
    path = Path(name).expanduser()
    folders = (Path("~/Downloads").expanduser(), Path(), path.parent)
    found = {item.name: str(item) for folder in folders for item in (*folder.glob(GGUF), *_folders_in(folder))}
    found |= {item.name: item.name for item in embedded_models() if "/" not in name}
    near = difflib.get_close_matches(
        path.name, [*found, *(item.removesuffix(".gguf") for item in found)], n=1, cutoff=0.8
    )
    return f": did you mean {found.get(near[0], found.get(f'{near[0]}.gguf'))}?" if near else ""


def _folders_in(folder: Path) -> list[Path]:
    """Returns the folders of models in a folder."""
    return [file.parent for file in folder.glob("*/config.json")]


def _checked(path: Path) -> Path:
    """A folder with a model's files, or a GGUF file."""
    if path.is_dir():
        if any(path.glob(WEIGHTS)) or not any(path.glob(GGUF)):
            return _checked_folder(path)
        return _gguf_in(path, "")
    if path.suffix != ".gguf":
        raise ModelNotFound(
            f"model {str(path)!r} is a file: give the folder that holds its config.json, or a file that ends in .gguf"
        )
    return path


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        found = sorted(path.name for path in folder.iterdir())
        listed = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "") if found else "nothing"
        raise ModelNotFound(
            f"model {str(folder)!r} has no config.json (the folder holds {listed}): "
            "give the folder of a checkpoint in Hugging Face format"
        )
    return folder


def _gguf_in(folder: Path, ending: str) -> Path:
    from kvern.formats.gguf.files import choose_in

    return choose_in(folder, ending)
