"""What frees a GPU whose kernels wait for ranks that have ended: what they compute then is wrong."""

import threading
import time
import weakref

import torch

from kvern.device.ranks import Ranks

LOOK_SECONDS = 0.02
NCCL_SECONDS = 1.0
"""After so long only NCCL can be what a kernel waits in. Until a group is aborted, its other calls come back."""


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

    @torch.inference_mode()  # as the memory was made
    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.default_stream(self._device)
        idle, aborted = time.monotonic(), False
        while (ranks := self._ranks()) is not None:
            if not computing.query():
                with torch.cuda.stream(stream):
                    ranks.release()
                if not aborted and time.monotonic() > idle + NCCL_SECONDS:
                    ranks.abort()
                    aborted = True
                continue
            del ranks
            idle = time.monotonic()
            time.sleep(LOOK_SECONDS)
