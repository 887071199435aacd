"""A process that downloads one model: ``python -m kvern.models.pulling NAME``; its output is why that failed.

SIGTERM ends it at once. Files that are not whole are deleted then, as no later download could use them.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from kvern.errors import KvernError
from kvern.models.hub import resolve_model

OPEN_FILES = Path("/proc/self/fd")


def main() -> int:
    """Downloads the model and returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    try:
        resolve_model(sys.argv[1])
    except KvernError as error:
        sys.stdout.write(str(error))
        return 1
    return 0


def _leave() -> None:
    for descriptor in OPEN_FILES.iterdir():
        with contextlib.suppress(OSError):
            file = Path(os.readlink(descriptor))
            if file.suffix == ".incomplete":
                file.unlink()
    os._exit(1)  # threads that download do not notice anything else


if __name__ == "__main__":
    sys.exit(main())
