"""From the name of a model to a folder with its files: embedded, local, or from the Hugging Face hub."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvern.config import DEFAULT_MODEL
from kvern.errors import ModelNotFound

EMBEDDED_FOLDER = Path(__file__).parent.parent / "embedded"
WEIGHTS = "*.safetensors"
GGUF = "*.gguf"
MEDUSA = "medusa_lm_head.pt"
"""The file name of the heads that Medusa's authors publish."""
NEEDED_FILES = (WEIGHTS, MEDUSA, "*.json", "tokenizer*", "*.jinja")
OTHER_FORMATS = ("original/*", "onnx/*", "openvino/*", "*/*.safetensors", "consolidated*")


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
    folder = Path(name).expanduser()
    if name and folder.exists():
        return _checked(folder)
    if (EMBEDDED_FOLDER / name / "config.json").is_file():
        return EMBEDDED_FOLDER / name
    stem, _, ending = name.rpartition(":")
    if ending and (folder := Path(stem).expanduser()).is_dir() and stem:
        return _chosen(folder, ending)
    if name.endswith(".gguf"):
        raise ModelNotFound(f"model {name!r}: there is no such file")
    if not name or Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"model {name!r}: there is no such folder")
    if "/" not in name:
        known = ", ".join(path.name for path in embedded_models()) or "none"
        raise ModelNotFound(
            f"model {name!r} is neither a folder nor an embedded model ({known}): "
            "give a folder, or a hub id as organisation/name"
        )
    repository, _, ending = name.partition(":")
    hub = _Hub(repository, revision, token, offline, cache_folder)
    path = Path("") if ending else hub.download(weights)
    if ending or (weights and not any(path.glob(WEIGHTS)) and not (path / MEDUSA).is_file()):
        return hub.download_gguf(ending)
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"model {name!r} has no config.json on the hub: kvern cannot tell what it is")
    return path


def _checked(path: Path) -> Path:
    """A folder with a model's files, or a GGUF file."""
    if path.is_dir():
        if any(path.glob(WEIGHTS)) or not any(path.glob(GGUF)):
            return _checked_folder(path)
        return _chosen(path, "")
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


def _chosen(folder: Path, ending: str) -> Path:
    """The GGUF file of a folder, of which the name has this ending."""
    names = [path.relative_to(folder).as_posix() for pattern in (GGUF, f"*/{GGUF}") for path in folder.glob(pattern)]
    from kvern.formats.gguf.files import choose

    return folder / choose(names, ending, str(folder))[0]


class _Hub(NamedTuple):
    """A repository on the hub, and how the hub is asked, see `resolve_model`."""

    repository: str
    revision: str | None
    token: str | None
    offline: bool | None
    cache_folder: str | Path | None

    @property
    def is_offline(self) -> bool:
        """True if nothing may be downloaded."""
        from huggingface_hub import constants

        return constants.HF_HUB_OFFLINE if self.offline is None else self.offline

    def download(self, weights: bool = True, files: Sequence[str] = ()) -> Path:
        """The folder of the repository, with all files that a model needs, or with `files`."""
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # by a lazy table

        if not sys.stderr.isatty():
            disable_progress_bars()
        try:
            path = huggingface_hub.snapshot_download(
                self.repository,
                revision=self.revision,
                token=self.token,
                cache_dir=self.cache_folder,
                local_files_only=self.is_offline,
                allow_patterns=list(files or NEEDED_FILES),
                ignore_patterns=None if files else [*OTHER_FORMATS, *([] if weights else [WEIGHTS, MEDUSA])],
            )
        except Exception as error:  # the hub's client raises the errors of its HTTP library, which share no base class
            raise ModelNotFound(self.explain(error)) from error
        return Path(path)

    def download_gguf(self, ending: str) -> Path:
        """The GGUF file of the repository, of which the name has this ending; downloads no other."""
        import huggingface_hub

        if self.is_offline:
            return _chosen(self.download(files=("no more of it",)), ending)
        try:
            names = huggingface_hub.HfApi(token=self.token).list_repo_files(self.repository, revision=self.revision)
        except Exception as error:  # as in `download`
            raise ModelNotFound(self.explain(error)) from error
        if not any(name.endswith(".gguf") for name in names):
            raise ModelNotFound(f"model {self.repository!r} has neither safetensors nor GGUF files on the hub")
        from kvern.formats.gguf.files import choose

        files = choose(names, ending, self.repository)
        return self.download(files=files) / files[0]

    def explain(self, error: Exception) -> str:
        """One line that names the failure and a remedy."""
        from huggingface_hub import constants, errors

        name, at = self.repository, f" at revision {self.revision!r}" if self.revision else ""
        match error:
            case errors.GatedRepoError():
                return (
                    f"model {name!r} is gated: accept its terms at {constants.ENDPOINT}/{name}, "
                    "then set HF_TOKEN to a token of that account"
                )
            case errors.RepositoryNotFoundError():
                return (
                    f"model {name!r} is not on {constants.ENDPOINT}, or it is private: "
                    "check the spelling, or set HF_TOKEN to a token that may read it"
                )
            case errors.RevisionNotFoundError():
                return f"model {name!r} has no revision {self.revision!r}: name a branch, a tag or a commit of it"
            case errors.HFValidationError():
                return f"model {name!r} is no valid hub id (organisation/name) and no folder of that name exists"
            case errors.LocalEntryNotFoundError() if self.is_offline:
                return (
                    f"model {name!r}{at} is not, or only partly, in the cache {constants.HF_HUB_CACHE}, "
                    "and downloads are off (HF_HUB_OFFLINE): unset it once to download the model"
                )
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:200] or type(cause).__name__
        return (
            f"model {name!r}{at} could not be downloaded from {constants.ENDPOINT} ({reason}): "
            "check the network and HF_ENDPOINT, and try again; what arrived is kept"
        )
