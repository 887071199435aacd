"""The library of kernels for this processor: who makes it, where it is kept, and what a check of it has found."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvern.cpu.processor import chosen_isa, features, usable_isas

SOURCES = Path(__file__).parent / "sources"
READY_MADE = Path(__file__).parent / "ready_made"
"""The folder of libraries that were compiled into the package, if there are any."""
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
NATIVE = ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)
PROBLEMS_HOLD = 24 * 60 * 60
"""Seconds until a failure is tried again, because it may have been a lack of memory or time."""


class BuildError(Exception):
    """The kernels cannot be compiled here; the message gives the reason."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and the line with which it introduces itself."""

    command: str
    version: str


def find_compiler() -> Compiler:
    """The one that CXX names, else the first of the usual ones. Raises BuildError."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        command = shutil.which(name)
        if command is not None:
            try:
                said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30, check=True)  # noqa: S603
            except (OSError, subprocess.SubprocessError):
                continue
            return Compiler(command, said.stdout.partition("\n")[0])
    raise BuildError(f"there is no C++ compiler ({asked or ', '.join(COMPILERS)})")


def find_maker() -> Path | Compiler:
    """The source of the library: a file in the package that was compiled for this processor, or a compiler.

    Raises BuildError and ConfigError.
    """
    path = ready_made_path(chosen_isa().flags)
    return path if path.is_file() else find_compiler()


def processor_flags() -> tuple[str, ...]:
    """The flags of a compiler for the chosen instructions. Raises ConfigError."""
    flags = chosen_isa().flags
    return NATIVE if flags == usable_isas()[-1].flags else flags


def library_path(folder: Path, maker: Path | Compiler) -> Path:
    """The path of the library made by `maker`, for the current sources and this processor. Raises ConfigError."""
    if isinstance(maker, Path):
        parts = [hashlib.sha256(maker.read_bytes()).hexdigest()]
    else:
        parts = [maker.command, maker.version, *FLAGS, *processor_flags()]
    digest = _digest(*parts, " ".join(sorted(features())) or platform.processor())  # machines may share a folder
    return folder / "cpu" / f"kernels-{digest}.so"


def ready_made_path(flags: tuple[str, ...]) -> Path:
    """The path of the library in the package that was compiled with these flags, whether or not it is there."""
    return READY_MADE / f"kernels-{_digest(*FLAGS, *flags)}.so"


def _digest(*parts: str) -> str:
    """A digest of the sources and of `parts`."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    for part in parts:
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()[:16]


class Record(NamedTuple):
    """Results of a build: the compile error, or the fault of each group, "" if it has none."""

    error: str = ""
    groups: Mapping[str, str] = {}
    digest: str = ""
    """A digest of the library, which another program may have changed or truncated."""


def lock_file(path: Path) -> Path:
    """The file that a process locks while it builds the library."""
    return path.with_suffix(".lock")


def read_record(path: Path) -> Record | None:
    """The stored results, unless their library is gone or has changed."""
    try:
        found = json.loads(path.with_suffix(".json").read_bytes())
        groups = {str(name): str(fault) for name, fault in found["groups"].items()}
        record = Record(str(found["error"]), groups, str(found["digest"]))
        return record if record.error or record.digest == digest_of(path) else None
    except (OSError, ValueError, TypeError, LookupError, AttributeError):  # damaged, or of another version
        return None


def digest_of(path: Path) -> str:
    """Returns the digest of a library's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_due(path: Path, record: Record) -> bool:
    """True if a failure should be tried again."""
    age = time.time() - path.with_suffix(".json").stat().st_mtime
    return age > PROBLEMS_HOLD and bool(record.error or any(record.groups.values()))
