"""Tells which groups of kernels work on this machine, without waiting for a build.

    python -m kvern.cpu.ready FOLDER

builds and checks them now, below a cache folder, as the first start does in the background. The results are stored with
the library.
"""

import logging
import os
import shlex
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from kvern.cpu.kernel_library import BuildError, find_maker, is_due, library_path, lock_file, read_record
from kvern.cpu.processor import chosen_isa
from kvern.errors import ConfigError

logger = logging.getLogger("kvern")

INSTEAD = "PyTorch does the work of kvern's kernels for this CPU, many times more slowly"


def working_groups(folder: Path, threads: int) -> frozenset[str]:
    """The groups that work here, loaded; none while they are built, which this starts in the background.

    A library in the package only has to be checked, for which this waits. Raises ConfigError.
    """
    try:
        maker = find_maker()
        path = library_path(folder, maker)
        record = read_record(path)
        if record is not None and not is_due(path, record):
            pass
        elif isinstance(maker, Path):
            from kvern.cpu.build import build

            build(folder)
            record = read_record(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock_file(path).touch()
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
            "work, many times more slowly. To build them beforehand: python -m kvern.cpu.ready %s",
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


def begin_build(folder: Path) -> "subprocess.Popen[bytes] | None":
    """Begins to compile the kernels if they are missing and there is a compiler. Returns the process, at low priority.

    Raises ConfigError.
    """
    try:
        maker = find_maker()
        path = library_path(folder, maker)
        record = read_record(path)
        wanted = not isinstance(maker, Path) and (record is None or is_due(path, record))
        return _begin(folder) if wanted else None
    except (BuildError, OSError):  # `working_groups` says why
        return None


def _begin(folder: Path) -> "subprocess.Popen[bytes]":
    """Starts a build in a process that outlives this one."""
    command = [sys.executable, "-m", "kvern.cpu.ready", str(folder)]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)  # noqa: S603
    threading.Thread(target=process.wait, name="kernels-build", daemon=True).start()
    return process


def main() -> None:
    """Runs the command above at low priority, so that engines keep the processor."""
    from kvern.cpu.build import build

    os.nice(10)
    try:
        build(Path(sys.argv[1]))
    except (BuildError, ConfigError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
