"""Tells which groups of kernels work on this machine, without waiting for a build.

    python -m kvern.cpu.ready FOLDER

builds and checks them now, below a cache folder, as the first start does in the background. The results are stored with
the library.
"""

import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from kvern.cpu.build import BuildError, find_maker, library_path, make_library
from kvern.cpu.processor import chosen_isa
from kvern.errors import ConfigError

logger = logging.getLogger("kvern")

CHECK_TIMEOUT = 120
"""Seconds for all checks: far more than a slow machine that is busy takes."""
PROBLEMS_HOLD = 24 * 60 * 60
"""Seconds until a failure is tried again, because it may have been a lack of memory or time."""
KEPT = 8
"""Libraries in a folder: of compilers, versions of kvern and machines that share it."""
INSTEAD = "PyTorch does the work of kvern's kernels for this CPU, several times more slowly"


class Record(msgspec.Struct):
    """Results of a build: the compile error, or the fault of each group, "" if it has none."""

    error: str = ""
    groups: dict[str, str] = {}
    digest: str = ""
    """A digest of the library, which another program may have changed or truncated."""


def working_groups(folder: Path, threads: int) -> frozenset[str]:
    """The groups that work here, loaded; none while they are built, which this starts in the background.

    A library in the package only has to be checked, for which this waits. Raises ConfigError.
    """
    try:
        maker = find_maker()
        path = library_path(folder, maker)
        record = _read(path)
        if record is not None and not _is_due(path, record):
            pass
        elif isinstance(maker, Path):
            build(folder)
            record = _read(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _lock_file(path).touch()
            _begin(folder)
    except BuildError as error:
        logger.warning("%s, so %s", error, INSTEAD)
        return frozenset()
    except OSError as error:
        logger.warning("kernels cannot be kept (%s; see cache_dir), so %s", error, INSTEAD)
        return frozenset()
    if record is None:
        logger.warning(
            "kernels for this CPU are being built in the background, for the next start; until then PyTorch does their "
            "work, several times more slowly. To build them beforehand: python -m kvern.cpu.ready %s",
            shlex.quote(str(folder)),
        )
        return frozenset()
    if record.error:
        logger.warning("%s, so %s", record.error, INSTEAD)
        return frozenset()
    for name, problem in record.groups.items():
        if problem:
            logger.warning("kernels %s do not work here, PyTorch does their work: %s", name, problem)
    working = frozenset(name for name, problem in record.groups.items() if not problem)
    if working:
        from kvern.cpu.library import load

        load(path, threads)
        origin = "which came with the package" if isinstance(maker, Path) else "compiled here"
        logger.info("kernels for this CPU use %s, %s", chosen_isa().name, origin)
        with suppress(OSError):
            os.utime(path)  # it is used
    return working


def build(folder: Path) -> None:
    """Builds and checks the kernels once; a process that finds another at work waits for its results.

    Raises BuildError without a compiler, OSError where the folder cannot be written to, and ConfigError.
    """
    maker = find_maker()
    path = library_path(folder, maker)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = _read(path)
        if record is not None and not _is_due(path, record):
            return
        try:
            make_library(path, maker)
            record = Record(groups=_check(path), digest=_digest(path))
        except BuildError as error:
            record = Record(error=str(error))
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(msgspec.json.encode(record))
        written.replace(path.with_suffix(".json"))
    _forget_unused(path.parent)


def _lock_file(path: Path) -> Path:
    return path.with_suffix(".lock")


def _read(path: Path) -> Record | None:
    """The stored results, unless their library is gone or has changed."""
    try:
        record = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Record)
        return record if record.error or record.digest == _digest(path) else None
    except (OSError, msgspec.DecodeError):
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_due(path: Path, record: Record) -> bool:
    """True if a failure should be tried again."""
    age = time.time() - path.with_suffix(".json").stat().st_mtime
    return age > PROBLEMS_HOLD and bool(record.error or any(record.groups.values()))


def _forget_unused(folder: Path) -> None:
    """Removes the files of all libraries except those that were used last."""
    used: dict[str, float] = {}
    with suppress(OSError):  # of another process that removes them
        for file in folder.glob("kernels-*"):
            used[file.stem] = max(used.get(file.stem, 0.0), file.stat().st_mtime)
        for stem in sorted(used, key=used.__getitem__)[:-KEPT]:
            for file in folder.glob(f"{stem}.*"):
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def _begin(folder: Path) -> None:
    """Starts a build in a process that outlives this one."""
    command = [sys.executable, "-m", "kvern.cpu.ready", str(folder)]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)  # noqa: S603
    threading.Thread(target=process.wait, name="kernels-build", daemon=True).start()


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


def main() -> None:
    """Runs the command above at low priority, so that engines keep the processor."""
    os.nice(10)
    try:
        build(Path(sys.argv[1]))
    except (BuildError, ConfigError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
