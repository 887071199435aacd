"""New weights of a rank: read in a thread beside steps, then taken between two of them, or dropped."""

import gc
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from kvern.errors import ConfigError, KvernError, in_a_line
from kvern.request.weights import WeightsFound, WeightSource

if TYPE_CHECKING:
    from kvern.runner.new_weights import NewWeights
    from kvern.runner.worker import Worker

logger = logging.getLogger("kvern")


class WeightReader:
    """The new weights of a rank: read in a thread, then taken or dropped."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._pool: ThreadPoolExecutor | None = None
        self._reading: Future[NewWeights] | None = None
        self._new: NewWeights | None = None
        self._given_up: Future[NewWeights] | None = None
        """The read of the thread for which nobody waits any more."""
        self.version = ""
        """The version that is being read, or was read last."""

    @property
    def is_busy(self) -> bool:
        """True if `answer` has something to say, now or later."""
        return self._reading is not None

    def begin(self, version: str, sources: Sequence[WeightSource]) -> None:
        """Begin to read; what was read before is dropped."""
        self.drop()
        self.version = version
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "kvern-weights", initializer=_use, initargs=(self._worker.device,))
        self._reading = self._pool.submit(self._worker.read_weights, sources)

    def answer(self) -> WeightsFound | None:
        """The result of reading, returned once; None: there is no new one."""
        if self._reading is None or not self._reading.done():
            return None
        reading, self._reading = self._reading, None
        try:
            self._new = reading.result()
        except ConfigError as error:
            return WeightsFound(str(error), is_refused=True)
        except KvernError as error:
            return WeightsFound(str(error))
        except Exception as error:  # the fault of these weights alone
            logger.exception("new weights cannot be read")
            return WeightsFound(f"they cannot be read: {in_a_line(error)}")
        finally:
            del reading  # its error knows this frame: both would stay, and with them a model
            if self._new is None:
                gc.collect()
        return self._new.found

    def take(self) -> None:
        """Let steps use what was read."""
        assert self._new is not None, "weights are read before they are taken"
        gone = self._new.take()
        if (sleeping := vars(self._worker).get("sleeping")) is not None:
            sleeping.forget(gone)
        self._new = None
        gc.collect()  # of a device's memory there is none to spare until the collector comes by itself

    def drop(self) -> None:
        """Forget what is being read, or was."""
        if self._reading is not None and not self._reading.cancel():
            self._given_up = self._reading
        if self._reading is not None or self._new is not None:
            self._reading = self._new = None
            gc.collect()

    def settle(self) -> None:
        """Waits until the thread makes no more tensors of what was given up."""
        if self._given_up is not None:
            wait([self._given_up])
            self._given_up = None
            gc.collect()


def _use(device: torch.device) -> None:
    """Let a thread use a device: it begins at the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
