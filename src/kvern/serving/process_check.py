"""The check that an engine is used in the process in which it was made."""

import os

from kvern.errors import EngineDied


def check_process(made_in: int) -> None:
    """Raises EngineDied in another process than the one in which an engine was made."""
    if os.getpid() != made_in:
        raise EngineDied(
            f"this engine was made in process {made_in}, and this is process {os.getpid()}, which was forked from it: "
            "threads, locks and devices of an engine do not go along. Make the LLM in the new process, or start that "
            "with multiprocessing's method 'spawn'"
        )
