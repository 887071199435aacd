"""Compilation of the kernels for this processor.

    python -m kvern.cpu.build

compiles them for all processors of this architecture, into the package. A start without a compiler, for example in a
container, takes the library that suits its processor from there.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvern.cpu.cores import cpu_threads
from kvern.cpu.processor import all_isas, chosen_isa, features, usable_isas

SOURCES = Path(__file__).parent / "sources"
READY_MADE = Path(__file__).parent / "ready_made"
"""The folder of libraries that were compiled into the package, if there are any."""
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
NATIVE = ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)
TIMEOUT = 300
"""Seconds for one source: more than a slow machine that is busy takes."""


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


def find_ready_made() -> Path | None:
    """The library in the package that was compiled for this processor; None: there is none. Raises ConfigError."""
    path = _ready_made(chosen_isa().flags)
    return path if path.is_file() else None


def find_maker() -> Path | Compiler:
    """The source of the library: a file in the package, or a compiler. Raises BuildError and ConfigError."""
    return find_ready_made() or find_compiler()


def processor_flags() -> tuple[str, ...]:
    """The flags of a compiler for the chosen instructions. Raises ConfigError."""
    flags = chosen_isa().flags
    return NATIVE if flags == usable_isas()[-1].flags else flags


def library_path(folder: Path, maker: Path | Compiler, processor: tuple[str, ...] | None = None) -> Path:
    """The path of the library made by `maker`, for the current sources and this processor. Raises ConfigError.

    `processor`: compiler flags that select the instruction sets; None: the chosen ones.
    """
    if isinstance(maker, Path):
        parts = [hashlib.sha256(maker.read_bytes()).hexdigest()]
    else:
        parts = [maker.command, maker.version, *FLAGS, *(processor or processor_flags())]
    digest = _digest(*parts, " ".join(sorted(features())) or platform.processor())  # machines may share a folder
    return folder / "cpu" / f"kernels-{digest}.so"


def make_library(path: Path, maker: Path | Compiler) -> None:
    """Put the library into a folder that is there. For one process at a time. Raises BuildError and OSError."""
    if isinstance(maker, Path):
        scratch = path.with_suffix(".copying")
        shutil.copyfile(maker, scratch)
        scratch.replace(path)
    else:
        compile_library(path, maker, processor_flags())


def compile_library(path: Path, compiler: Compiler, processor: tuple[str, ...]) -> None:
    """Compile all sources, as many at a time as threads compute, and link them, into a folder that is there.

    For one process at a time. Raises BuildError and OSError.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    scratch = path.with_suffix(".building")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    try:
        objects = [scratch / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler.command, *FLAGS, *processor, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(cpu_threads()) as pool:
            list(pool.map(_run, commands))
        linked = scratch / path.name
        _run([compiler.command, *FLAGS, *processor, "-shared", "-pthread", *map(str, objects), "-o", str(linked)])
        linked.replace(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {lines[0]}")


def _ready_made(flags: tuple[str, ...]) -> Path:
    return READY_MADE / f"kernels-{_digest(*FLAGS, *flags)}.so"


def _digest(*parts: str) -> str:
    """A digest of the sources and of `parts`."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    for part in parts:
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()[:16]


def main() -> None:
    """The command above."""
    READY_MADE.mkdir(exist_ok=True)
    try:
        compiler = find_compiler()
        for isa in all_isas():
            path = _ready_made(isa.flags)
            if not path.exists():
                compile_library(path, compiler, isa.flags)
            sys.stdout.write(f"{isa.name}: {path}\n")
            sys.stdout.flush()
    except (BuildError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
