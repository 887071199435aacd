"""What frees a GPU whose kernels wait for ranks that have ended: what they compute then is wrong."""

import threading
import time
import weakref

import torch

from kvern.device.ranks import Ranks

LOOK_SECONDS = 0.02


class Release:
    """Lets kernels of `ranks` on this GPU go on, whatever they wait for, from the first call on as long as these live.

    Copies overwrite the memory that the others wrote to, since they need no processor of the device.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = weakref.ref(ranks), device
        self._thread = threading.Thread(target=self._run, name="release", daemon=True)
        self._begun = threading.Lock()

    def __call__(self) -> None:
        """Begin, and wait until they have ended."""
        if self._begun.acquire(blocking=False):
            self._thread.start()
        torch.cuda.synchronize(self._device)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.default_stream(self._device)
        if (ranks := self._ranks()) is not None:
            ranks.abort()
        while (ranks := self._ranks()) is not None:
            with torch.cuda.stream(stream):
                ranks.release()
            del ranks
            if computing.query():
                time.sleep(LOOK_SECONDS)
