"""``kvern cache``: what a folder of KV pages has, as ``--kv-tier disk:PATH:SIZE`` keeps them, and clearing it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro

from kvern.cli.output import make_table, print_figures, print_lines, print_tables
from kvern.errors import ConfigError
from kvern.io.files import as_size
from kvern.tiers.page_folder import PageFile, PageFolder
from kvern.tiers.store import read_age

PATH = tyro.conf.arg(metavar="PATH")
AGES = {"an hour": 3600.0, "a day": 86400.0, "a week": 7 * 86400.0}
LEAST_IDENTITY_DIGITS = 4


@dataclass(frozen=True)
class Kept:
    """The pages of one identity: their bytes, and seconds since 1970 at which the first and the last was written."""

    identity: str
    model: str | None
    description: dict[str, str]
    pages: int
    bytes: int
    oldest: float | None
    newest: float | None
    hits: int


@dataclass(frozen=True)
class CacheListCommand:
    """List the models whose KV pages a folder has. Servers may use it meanwhile."""

    path: Annotated[tyro.conf.Positional[Path], PATH]
    """Folder of an option --kv-tier disk:PATH:SIZE."""
    json: bool = False
    """Print the list as JSON, with times as seconds since 1970."""

    def execute(self) -> int:
        """Prints the list and returns the exit code. Raises ConfigError."""
        with opened(self.path) as folder:
            found = [kept_in(folder, identity) for identity in folder.identities()]
        if self.json:
            sys.stdout.write(json.dumps([asdict(kept) for kept in found], indent=1) + "\n")
            return 0
        table = make_table("identity", "model", "pages", "size", "oldest", "newest", "hits", words=("model",))
        for kept in found:
            times = [as_time(kept.oldest), as_time(kept.newest)]
            model = kept.model or "unknown"
            table.add_row(kept.identity, model, f"{kept.pages:,}", as_size(kept.bytes), *times, f"{kept.hits:,}")
        if found:
            print_tables(table)
        else:
            print_lines(f"{self.path} has no pages")
        return 0


@dataclass(frozen=True)
class CacheStatsCommand:
    """Show how many KV pages a folder has, how long they were not used, and the free space. Servers may use it
    meanwhile."""

    path: Annotated[tyro.conf.Positional[Path], PATH]
    """Folder of an option --kv-tier disk:PATH:SIZE."""
    json: bool = False
    """Print the figures as JSON."""

    def execute(self) -> int:
        """Prints the figures and returns the exit code. Raises ConfigError."""
        now = time.time()
        used = dict.fromkeys(AGES, 0)
        count = total = 0
        with opened(self.path) as folder:
            identities = folder.identities()
            for page in (page for identity in identities for page in pages_of(folder, identity)):
                count += 1
                total += page.size
                for name, age in AGES.items():
                    used[name] += now - page.used < age
            hits = sum(folder.add_hits(identity) for identity in identities)
            free = folder.free()
        if self.json:
            told = {
                "identities": len(identities),
                "pages": count,
                "bytes": total,
                "free_bytes": free,
                "hits": hits,
            }
            within = {"used_within_seconds": {int(AGES[name]): number for name, number in used.items()}}
            sys.stdout.write(json.dumps(told | within, indent=1) + "\n")
            return 0
        figures = [
            ("identities", f"{len(identities)}"),
            ("pages", f"{count:,}"),
            ("size", as_size(total)),
            ("free on the disk", as_size(free)),
            ("hits", f"{hits:,}"),
            *((f"pages used within {name}", f"{number:,}") for name, number in used.items()),
        ]
        print_figures(f"KV pages in {self.path}", figures)
        return 0


@dataclass(frozen=True)
class CacheClearCommand:
    """Delete KV pages of a folder. Servers may use it meanwhile: they compute what they do not find."""

    path: Annotated[tyro.conf.Positional[Path], PATH]
    """Folder of an option --kv-tier disk:PATH:SIZE."""
    identity: str | None = None
    """Delete only the pages of this identity: its first digits, as kvern cache ls shows them."""
    older_than: str | None = None
    """Delete only pages that were written so long ago, such as 3600, 90m, 12h or 7d."""
    yes: bool = False
    """Delete without asking."""

    def execute(self) -> int:
        """Deletes the pages and returns the exit code: 1 if the user says no. Raises ConfigError."""
        newest = time.time() - self._age()
        with opened(self.path) as folder:
            identities = self._identities(folder)
            pages = [page for identity in identities for page in pages_of(folder, identity) if page.written <= newest]
            if pages and not self._is_agreed(pages):
                sys.stdout.write("nothing is deleted\n")
                return 1
            freed = sum(folder.remove(page.path, page.size) for page in pages)
            for identity in identities:
                folder.remove_empty(identity)
        sys.stdout.write(f"pages deleted: {len(pages):,}; {as_size(freed)} are free again\n")
        return 0

    def _age(self) -> float:
        if self.older_than is None:
            return 0.0
        try:
            return read_age(self.older_than)
        except ValueError as error:
            raise ConfigError(f"older_than: {error}") from error

    def _identities(self, folder: PageFolder) -> list[str]:
        every = folder.identities()
        if self.identity is None:
            return every
        if len(self.identity) < LEAST_IDENTITY_DIGITS:
            raise ConfigError(f"identity is {self.identity!r}: give {LEAST_IDENTITY_DIGITS} of its digits at least")
        found = [identity for identity in every if identity.startswith(self.identity.lower())]
        if len(found) != 1:
            what = "several identities begin so" if found else "no identity begins so"
            raise ConfigError(f"identity is {self.identity!r}: {what}; kvern cache ls {self.path} lists them")
        return found

    def _is_agreed(self, pages: Sequence[PageFile]) -> bool:
        if self.yes:
            return True
        if not sys.stdin.isatty():
            raise ConfigError("there is no terminal to ask at: give --yes to delete the pages")
        size = as_size(sum(page.size for page in pages))
        sys.stdout.write(f"Delete {len(pages):,} pages, {size}, in {self.path}? [y/N] ")
        sys.stdout.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[PageFolder]:
    """The folder of pages at a path. Raises ConfigError if it is none, or cannot be read or changed."""
    try:
        with contextlib.closing(PageFolder.existing(path)) as folder:
            yield folder
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}") from error


def pages_of(folder: PageFolder, identity: str) -> Iterator[PageFile]:
    """Yields the pages of an identity."""
    for listing in folder.listings(identity, clean=True):
        yield from listing.pages


def kept_in(folder: PageFolder, identity: str) -> Kept:
    """Returns what a folder has of an identity."""
    pages = [*pages_of(folder, identity)]
    written = [page.written for page in pages]
    description = folder.description(identity)
    return Kept(
        identity,
        description.get("model"),
        description,
        len(pages),
        sum(page.size for page in pages),
        min(written, default=None),
        max(written, default=None),
        folder.add_hits(identity),
    )


def as_time(seconds: float | None) -> str:
    """Returns a time of this place for people, to the minute."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")  # noqa: DTZ006
