"""A repository on the Hugging Face hub, and what is downloaded of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvern.errors import ModelNotFound
from kvern.formats.gguf.files import choose, choose_in
from kvern.models.hub import MEDUSA, WEIGHTS

NEEDED_FILES = (WEIGHTS, MEDUSA, "*.json", "tokenizer*", "*.jinja")
OTHER_FORMATS = ("original/*", "onnx/*", "openvino/*", "*/*.safetensors", "consolidated*")


class Repository(NamedTuple):
    """A repository on the hub, and how the hub is asked, see `resolve_model`."""

    name: str
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
                self.name,
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
            return choose_in(self.download(files=("no more of it",)), ending)
        try:
            names = huggingface_hub.HfApi(token=self.token).list_repo_files(self.name, revision=self.revision)
        except Exception as error:  # as in `download`
            raise ModelNotFound(self.explain(error)) from error
        if not any(name.endswith(".gguf") for name in names):
            raise ModelNotFound(f"model {self.name!r} has neither safetensors nor GGUF files on the hub")
        files = choose(names, ending, self.name)
        return self.download(files=files) / files[0]

    def explain(self, error: Exception) -> str:
        """One line that names the failure and a remedy."""
        from huggingface_hub import constants, errors

        name, at = self.name, f" at revision {self.revision!r}" if self.revision else ""
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
