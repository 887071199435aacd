"""Compilation and checks of the kernels for this processor.

    python -m kvern.cpu.build

compiles them for all processors of this architecture, into the package. It needs Python and a compiler, and no other
package. A start without a compiler, for example in a container, takes the library that suits its processor from there.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from kvern.cpu.cores import cpu_threads
from kvern.cpu.kernel_library import (
    FLAGS,
    READY_MADE,
    SOURCES,
    BuildError,
    Compiler,
    Record,
    digest_of,
    find_compiler,
    find_maker,
    is_due,
    library_path,
    lock_file,
    processor_flags,
    read_record,
    ready_made_path,
)
from kvern.cpu.processor import all_isas

TIMEOUT = 300
"""Seconds for one source: more than a slow machine that is busy takes."""
CHECK_TIMEOUT = 120
"""Seconds for all checks: far more than a slow machine that is busy takes."""
KEPT = 8
"""Libraries in a folder: of compilers, versions of kvern and machines that share it."""


def build(folder: Path) -> None:
    """Builds and checks the kernels once; a process that finds another at work waits for its results.

    Raises BuildError without a compiler, OSError where the folder cannot be written to, and ConfigError.
    """
    maker = find_maker()
    path = library_path(folder, maker)
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = read_record(path)
        if record is not None and not is_due(path, record):
            return
        try:
            make_library(path, maker)
            record = Record(groups=_check(path), digest=digest_of(path))
        except BuildError as error:
            record = Record(error=str(error))
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(record._asdict()))
        written.replace(path.with_suffix(".json"))
    _forget_unused(path.parent)


def _check(path: Path) -> dict[str, str]:
    """Checks all groups in a process that may crash; the remaining ones are then checked by another process."""
    from kvern.cpu.check import GROUPS

    found: dict[str, str] = {}
    while missing := [name for name in GROUPS if name not in found]:
        command = [sys.executable, "-m", "kvern.cpu.check", str(path), *missing]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT)  # noqa: S603
            said, ended = done.stdout, f"its check ended with status {done.returncode}"
        except subprocess.TimeoutExpired as error:
            said, ended = _text(error.stdout), f"its check took more than {CHECK_TIMEOUT} s"
        for line in said.splitlines():
            name, _, problem = line.partition(" ")
            found[name] = problem
        if all(name in found for name in missing):
            break
        found[next(name for name in missing if name not in found)] = ended
    return {name: found[name] for name in GROUPS}


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _forget_unused(folder: Path) -> None:
    """Removes the files of all libraries except those that were used last."""
    used: dict[str, float] = {}
    with suppress(OSError):  # of another process that removes them
        for file in folder.glob("kernels-*"):
            used[file.stem] = max(used.get(file.stem, 0.0), file.stat().st_mtime)
        for stem in sorted(used, key=used.__getitem__)[:-KEPT]:
            for file in folder.glob(f"{stem}.*"):
                shutil.rmtree(file) if file.is_dir() else file.unlink()


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


def main() -> None:
    """The command above."""
    READY_MADE.mkdir(exist_ok=True)
    try:
        compiler = find_compiler()
        for isa in all_isas():
            path = ready_made_path(isa.flags)
            if not path.exists():
                compile_library(path, compiler, isa.flags)
            sys.stdout.write(f"{isa.name}: {path}\n")
            sys.stdout.flush()
    except (BuildError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
