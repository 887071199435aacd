"""Settings of the Python interpreter for a process that runs steps."""

import gc
import sys

SWITCH_SECONDS = 0.0002
"""How long a thread may keep the interpreter from others. With Python's 5 ms a step waits that long, several times, for
threads that put pages into stores or read messages."""


def settle() -> None:
    """Sets the interpreter up for steps, when all that lives as long as the process has been made."""
    gc.freeze()  # what is there now stays: collections need not look at it
    gc.enable()
    sys.setswitchinterval(SWITCH_SECONDS)
