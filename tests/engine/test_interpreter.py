"""The interpreter of processes that run steps: a thread that is busy in Python does not hold steps up."""

import subprocess
import sys

SETTLED = """
import gc, sys
gc.disable()
from kvern.io.interpreter import settle
settle()
print(gc.isenabled(), gc.get_freeze_count() > 1000, sys.getswitchinterval() < 0.001, gc.get_threshold()[0] >= 10_000)
"""


def test_a_settled_process_switches_threads_soon_and_leaves_old_objects_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SETTLED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == 4 * ["True"]
