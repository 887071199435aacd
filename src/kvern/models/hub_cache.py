"""The Hugging Face hub's cache on this machine: what is there, the space for more, and deleting."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kvern.errors import ConfigError, ModelNotFound, did_you_mean
from kvern.io.files import as_size

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

    from kvern.models.repository import Listing, Repository


def cache_folder() -> Path:
    """Returns the folder of the cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def model_folder(name: str) -> Path:
    """Returns the folder in the cache of a model of the hub, organisation/name; there may be none."""
    return cache_folder() / f"models--{name.replace('/', '--')}"


def cached() -> list[CachedRepoInfo]:
    """Returns the models in the hub's cache, by name."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((item for item in found if item.repo_type == "model"), key=lambda item: item.repo_id)


def space_for(repository: Repository, listing: Listing) -> tuple[int, int]:
    """Returns the bytes of a model that are to be downloaded, and those that are free. Raises ConfigError: too few."""
    cache = cache_folder()
    here = sum(
        revision.size_on_disk
        for item in cached()
        for revision in item.revisions
        if (item.repo_id, revision.commit_hash) == (repository.name, listing.commit)
    )
    missing = max(listing.total - here, 0)
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if missing > free:
        raise ConfigError(
            f"{repository.name}: {listing.size}, of which {as_size(missing)} are missing, and {cache} has "
            f"{as_size(free)} free: free some (kvern rm MODEL), or name a folder of another disk in HF_HUB_CACHE"
        )
    return missing, free


def arrived(name: str, listing: Listing) -> dict[str, tuple[int, int]]:
    """Returns, for each file that has a digest, the bytes on this machine and the bytes of the file.

    A file that is being downloaded counts as far as it is written, whichever process downloads it.
    """
    folder, found = model_folder(name) / "blobs", {}
    for file, digest in listing.digests.items():
        size = listing.files[file]
        parts = (size if path.name == digest else path.stat().st_size for path in folder.glob(f"{digest}*"))
        try:
            found[digest] = min(max(parts, default=0), size), size
        except FileNotFoundError:  # it has just been renamed
            continue
    return found


def remove(model: str) -> int:
    """Deletes a model from the hub's cache and returns the bytes that this freed. Raises ModelNotFound."""
    from huggingface_hub import scan_cache_dir

    name, _, ending = model.partition(":")
    found = {repository.repo_id: repository for repository in cached()}
    if name not in found:
        hint = did_you_mean(name, found) or ": kvern list shows what is there"
        raise ModelNotFound(f"model {model!r} is not among those that were downloaded{hint}")
    if ending:
        return _remove_file(found[name], ending)
    strategy = scan_cache_dir().delete_revisions(*(revision.commit_hash for revision in found[name].revisions))
    strategy.execute()
    return strategy.expected_freed_size


def _remove_file(repository: CachedRepoInfo, ending: str) -> int:
    from kvern.formats.gguf.files import choose

    files = {file.file_path: file for revision in repository.revisions for file in revision.files}
    chosen = set(choose({path.name for path in files}, ending, repository.repo_id))
    freed = 0
    for path, file in files.items():
        if path.name in chosen:
            path.unlink()
            if not any(other.blob_path == file.blob_path and at.exists() for at, other in files.items() if at != path):
                freed += file.size_on_disk
                file.blob_path.unlink(missing_ok=True)
    return freed
