"""A repository on the Hugging Face hub: its listing, its headers, and what is downloaded of it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kvern.errors import CorruptCheckpoint, ModelNotFound
from kvern.formats.gguf.files import ENDING, choose, choose_in
from kvern.formats.gguf.header import read_gguf_header
from kvern.io.files import as_size, read_object
from kvern.models.hub import MEDUSA, WEIGHTS, local_model, resolve_model

NEEDED_FILES = (WEIGHTS, MEDUSA, "*.json", "tokenizer*", "*.jinja")
OTHER_FORMATS = ("original/*", "onnx/*", "openvino/*", "*/*.safetensors", "consolidated*")
FIRST_BYTES = {ENDING: 8 << 20}
"""The bytes of a file of weights that are read at first, by its ending: a GGUF file begins with the vocabulary."""
OTHER_FIRST_BYTES = 256 << 10
MOST_BYTES = 512 << 20
AT_ONCE = 8
"""The number of files whose headers are read at once."""


class Listing(NamedTuple):
    """The files of a repository that a model needs, with their bytes, at one commit.

    `licence` is as its card names it, None where it names none. `digests` are the names of files in the hub's cache:
    SHA-256 of large files, SHA-1 of Git's objects for others.
    """

    commit: str
    licence: str | None
    files: Mapping[str, int]
    digests: Mapping[str, str]

    @property
    def total(self) -> int:
        """The bytes of all files."""
        return sum(self.files.values())

    @property
    def size(self) -> str:
        """The bytes and the number of all files, for messages."""
        return f"{as_size(self.total)} in {len(self.files)} files"


def outlined_model(model: str, cache: Path) -> Path:
    """Return what `resolve_model` does; of a model that is not on this machine only headers are read.

    `cache` is the folder for such outlines, which must not be loaded: the weights in them are zeros. Raises
    ModelNotFound or CorruptCheckpoint.
    """
    if (found := local_model(model)) is not None:
        return found
    hub = repository_of(model)
    try:
        return resolve_model(model, offline=True)
    except ModelNotFound:
        if hub.is_offline:
            raise
    return hub.outline(hub.listing(model.partition(":")[2]), cache)


def repository_of(model: str, revision: str | None = None) -> Repository:
    """Return the repository that a hub id means."""
    return Repository(model.partition(":")[0], revision, None, None, None)


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
        """The GGUF file of the repository, of which the name has this ending; downloads no other.

        A file that was downloaded before is found without a network, too.
        """
        from huggingface_hub import errors

        if self.is_offline:
            return choose_in(self.download(files=("no more of it",)), ending)
        try:
            files = sorted(self.listing(ending).files)
        except ModelNotFound as error:
            if error.__cause__ is None or isinstance(
                error.__cause__, errors.RepositoryNotFoundError | errors.RevisionNotFoundError
            ):
                raise
            with contextlib.suppress(ModelNotFound):
                return self._replace(offline=True).download_gguf(ending)
            raise
        return self.download(files=files) / files[0]

    def listing(self, ending: str = "") -> Listing:
        """Returns the files that a download would fetch; `ending` chooses among GGUF files. Raises ModelNotFound."""
        import huggingface_hub
        from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # by a lazy table

        if self.is_offline:
            raise ModelNotFound(f"model {self.name!r} cannot be looked up: downloads are off (HF_HUB_OFFLINE)")
        try:
            info = huggingface_hub.HfApi(token=self.token).model_info(
                self.name, revision=self.revision, files_metadata=True
            )
        except Exception as error:  # as in `download`
            raise ModelNotFound(self.explain(error)) from error
        sizes = {item.rfilename: item.size or 0 for item in info.siblings or ()}
        needed = set(filter_repo_objects(sizes, allow_patterns=[*NEEDED_FILES], ignore_patterns=[*OTHER_FORMATS]))
        if ending or not any(name.endswith((".safetensors", MEDUSA)) for name in needed):
            if not any(name.endswith(ENDING) for name in sizes):
                raise ModelNotFound(f"model {self.name!r} has neither safetensors nor GGUF files on the hub")
            needed = set(choose(sizes, ending, self.name))
        licence = info.card_data.get("license") if info.card_data is not None else None
        files = {name: size for name, size in sizes.items() if name in needed}
        known = ((item.rfilename, item.lfs.sha256 if item.lfs else item.blob_id) for item in info.siblings or ())
        digests = {name: digest for name, digest in known if name in files and digest}
        return Listing(info.sha or "", str(licence) if licence else None, files, digests)

    def config(self, listing: Listing) -> dict[str, Any] | None:
        """Returns the model's config.json; None if it is not among the files. Raises what `download` does."""
        if "config.json" not in listing.files:
            return None
        return read_object(self._replace(revision=listing.commit).download(files=("config.json",)) / "config.json")

    def outline(self, listing: Listing, cache: Path) -> Path:
        """Makes a folder in `cache` that describes the model as its download would, by headers alone.

        A file of weights there is as long as on the hub, takes no space behind its header, and is read by what reads
        headers. Returns the folder, or the first GGUF file in it. Raises ModelNotFound or CorruptCheckpoint.
        """
        weights = [name for name in listing.files if name.endswith((".safetensors", ENDING))]
        folder = cache / f"{self.name.replace('/', '--')}-{listing.commit}-{len(weights)}-{Path(weights[0]).stem}"
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=cache))
            try:
                if not weights[0].endswith(ENDING):
                    pinned = self._replace(revision=listing.commit)
                    for path in pinned.download(weights=False).iterdir():
                        shutil.copy(path, made / path.name)
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(lambda name: self._header(listing, name, made / Path(name).name), weights))
                os.rename(made, folder)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
        return folder / Path(weights[0]).name if weights[0].endswith(ENDING) else folder

    def _header(self, listing: Listing, name: str, file: Path) -> None:
        """Writes the beginning of a file of weights, at least its header, to a sparse file of its length."""
        size = listing.files[name]
        has_header = _has_gguf_header if name.endswith(ENDING) else _has_safetensors_header
        count = FIRST_BYTES.get(Path(name).suffix, OTHER_FIRST_BYTES)
        while count <= MOST_BYTES:
            count = min(count, size)
            file.write_bytes(self._beginning(listing.commit, name, count))
            os.truncate(file, size)
            if has_header(file, count) or count == size:  # what is wrong with it, its reader says
                return
            count *= 4
        raise CorruptCheckpoint(f"{name} of {self.name!r} has no header in its first {MOST_BYTES >> 20} MiB")

    def _beginning(self, commit: str, name: str, count: int) -> bytes:
        import huggingface_hub
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # by a lazy table
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        address = huggingface_hub.hf_hub_url(self.name, name, revision=commit)
        headers = build_hf_headers(token=self.token) | {"Range": f"bytes=0-{count - 1}"}
        found = bytearray()
        try:
            with get_session().stream("GET", address, headers=headers, timeout=60) as response:
                hf_raise_for_status(response)
                for piece in response.iter_bytes():
                    found += piece
                    if len(found) >= count:  # a server may send the whole file
                        break
        except Exception as error:  # as in `download`
            raise ModelNotFound(self.explain(error)) from error
        return bytes(found[:count])

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
            case errors.HfHubHTTPError():
                return f"model {name!r}{at}: {constants.ENDPOINT} {_said(error.response.status_code)}"
            case OSError(errno=errno.ENOSPC):
                return f"model {name!r}{at}: no space is left in {constants.HF_HUB_CACHE}; whole files are kept"
            case errors.LocalEntryNotFoundError() if isinstance(error.__cause__, errors.HfHubHTTPError):
                return self.explain(error.__cause__)
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:200] or type(cause).__name__
        return (
            f"model {name!r}{at} could not be downloaded from {constants.ENDPOINT} ({reason}): "
            "check the network and HF_ENDPOINT, and try again; files that arrived whole are kept"
        )


def _said(status: int) -> str:
    """Returns the meaning of a status of the hub, and a remedy."""
    if status in (401, 403):
        return f"refuses it (status {status}): set HF_TOKEN to a token that may read it, or log in by hf auth login"
    if status == 429:
        return "refuses more requests for now (status 429): wait some minutes, or set HF_TOKEN"
    return f"answers with status {status}: try again later; files that arrived whole are kept"


def _has_safetensors_header(file: Path, count: int) -> bool:
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little") <= count


def _has_gguf_header(file: Path, count: int) -> bool:
    """Returns whether the first `count` bytes hold the header; zeros follow them."""
    try:
        header = read_gguf_header(file)
    except CorruptCheckpoint:
        return False
    return min((tensor.begin for tensor in header.tensors), default=0) <= count
