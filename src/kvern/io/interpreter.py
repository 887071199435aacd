"""Settings of the Python interpreter for a process that runs steps."""

import gc
import sys

SWITCH_SECONDS = 0.0002
"""The time for which a thread may keep the interpreter from others. With Python's 5 ms a step waits that long, several
times, for threads that put pages into stores or read messages."""

NEW_OBJECTS = 20_000
"""The number of objects that are made beyond those that go, before the collector looks at them. With Python's 700 it
took a fifth of the time of steps that load pages, up to 20 ms at once."""


def settle() -> None:
    """Sets the interpreter up for steps, when all that lives as long as the process has been made."""
    gc.freeze()  # what is there now stays: collections need not look at it
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
    gc.enable()
    sys.setswitchinterval(SWITCH_SECONDS)
