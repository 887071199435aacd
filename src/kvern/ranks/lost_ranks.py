"""The release of a GPU whose kernels wait for a rank that has ended.

Such a kernel would wait for ever, and so would everything that waits for its GPU. A word in the host's memory is set,
which waiting kernels read after some milliseconds; if that is not enough, NCCL's groups are aborted. What the step
computes after that is wrong and is thrown away.
"""

import atexit
import contextlib
import ctypes
import threading
import time
import weakref

import torch

from kvern.ranks.ranks import Ranks

LOOK_SECONDS = 0.02
NCCL_SECONDS = 1.0
"""After so long only NCCL can be what a kernel waits in. Until a group is aborted, its other calls come back."""
EXIT_SECONDS = 2.0
"""So long Python's end waits for what aborts NCCL's groups."""


class Release:
    """Lets kernels of `ranks` on this GPU go on, whatever they wait for.

    Kernels look at a word of the host's, which takes no call that could wait for them. `owner`: of CUDA graphs.
    """

    def __init__(self, ranks: Ranks, device: torch.device, owner: object) -> None:
        self._ranks = weakref.ref(ranks)
        self._device = device
        self._owner = weakref.ref(owner)
        self._thread = threading.Thread(target=self._abort, name="release", daemon=True)
        self._begun = threading.Lock()

    def free(self) -> None:
        """Let those go on that are kvern's."""
        if (ranks := self._ranks()) is not None:
            ranks.release()

    def begin(self) -> None:
        """Let all go on, from now on as long as the ranks live; any thread may call this, and again."""
        self.free()
        if self._begun.acquire(blocking=False):
            self._thread.start()

    def finish(self) -> None:
        """Release the GPU, and wait until nothing runs."""
        self.begin()
        with contextlib.suppress(RuntimeError):  # of a GPU that has failed, which whoever ends ranks knows
            torch.cuda.synchronize(self._device)

    def _abort(self) -> None:
        """End NCCL's groups if the GPU has something to do for too long."""
        computing = torch.cuda.default_stream(self._device)
        idle = time.monotonic()
        with contextlib.suppress(RuntimeError):  # a GPU that has failed computes nothing any more
            while (ranks := self._ranks()) is not None:
                if computing.query():
                    idle = time.monotonic()
                elif time.monotonic() > idle + NCCL_SECONDS:
                    atexit.register(_outlive, ranks.abort(), self._owner)
                    return
                del ranks
                time.sleep(LOOK_SECONDS)


def _outlive(threads: list[threading.Thread], owner: "weakref.ref[object]") -> None:
    """Let Python end while NCCL's groups wait for the end of CUDA graphs: these then never end.

    A thread that comes back from there later would end the process with an error.
    """
    for thread in threads:
        thread.join(EXIT_SECONDS)
    if any(thread.is_alive() for thread in threads) and (found := owner()) is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
