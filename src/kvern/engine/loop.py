"""The base of the cores that drive models, for the engine's process and the Python API."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvern.errors import ConfigError, in_a_line
from kvern.request.events import EngineStatistics, TokenEvent
from kvern.request.layer_times import LayerTimes
from kvern.request.request import FinishReason, Progress, RequestSpec
from kvern.request.store_figures import StorePrice
from kvern.request.weights import WeightsFound, WeightSource

if TYPE_CHECKING:
    from kvern.adapters.peft import Adapter
    from kvern.cache.journal import NameLedger
    from kvern.runner.ranks.experts import LayerCounts

logger = logging.getLogger("kvern")
LOADING_SECONDS = 0.0005
"""Seconds that an engine rests while all of its requests wait for loads, before it looks again."""


class EngineLoop(ABC):
    """The base of `EngineCore`, of `DPAttentionCore`, and of the `EncoderCore` of a model that reads texts whole.

    It is not thread-safe: one thread calls it.
    """

    pages: bytes = b""
    """The identity of its pages in stores; nothing: it has no tier."""
    store_prices: Callable[[], Mapping[str, StorePrice] | None] = staticmethod(lambda: None)
    """Returns the prices of loads from the stores of its tier that are on; None: nobody knows them."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """A call of `step` would do something."""

    @abstractmethod
    def add(self, spec: RequestSpec, progress: Sequence[Progress] = ()) -> None:
        """Queue what a user asked in one; `progress` says how far an earlier engine brought which answers."""

    def bring(self, spec: RequestSpec) -> None:  # noqa: B027 (an engine without a tier has nothing to load)
        """Load what stores have of a prompt that another engine still computes, if there is room for it."""

    @abstractmethod
    def finish(
        self, request_ids: Iterable[str], reason: FinishReason = "abort", stop_reason: str | None = None
    ) -> list[TokenEvent]:
        """End requests from outside: a client has gone, or a stop string was seen. Ended ones are ignored.

        Returns events with the records of the others and nothing else, as far as they are known at once.
        """

    @abstractmethod
    def step(self) -> list[TokenEvent]:
        """Do the next thing there is to do; what it did for which answers. Raises what breaks the engine itself."""

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """The counters as they stand."""

    def close(self) -> None:  # noqa: B027 (an encoder has nothing to close)
        """The engine ends."""

    def count_experts(self) -> "Callable[[], LayerCounts]":
        """Begin to read how many tokens each expert of each layer has had; what is returned may wait for the device."""
        return list

    def layer_times(self) -> LayerTimes:
        """The times of the parts of measured steps, if there are new ones; else nothing."""
        return {}

    def spare_seconds(self) -> float:
        """Returns how long the next step can wait for further requests while the device computes another."""
        return 0.0

    prepares_again = False
    """`idle` may have something to make again after steps."""

    def idle(self) -> bool:
        """Make one thing that steps would run faster with, while none runs; whether there are more."""
        return False

    sleeps = False
    """The core can give its memory back, on a GPU with `enable_sleep`."""

    def sleep(self) -> int:
        """Forget what is cached, and give the memory of this model back until `wake`. Nothing runs. Raises OSError.

        Returns the bytes that the process still takes of its GPU; 0 on a CPU.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Take the memory again."""
        raise NotImplementedError

    def release_pages(self, size: int) -> None:  # noqa: B027 (an encoder has none)
        """Give memory of so many bytes of the host back, of pages in a tier, and take no more until that is 0."""

    def resize_cache(self, chunks: int) -> tuple[int, list[TokenEvent]]:
        """Have so many chunks of KV cache from the next step on, or more if blocks of others are in use.

        Fewer if there is no memory for them. Returns how many, and what steps on their way have done.
        """
        raise NotImplementedError("the cache is in one piece")

    def watch_cache(self, wanted: bool) -> None:  # noqa: B027 (an encoder caches nothing)
        """Keep the ledger of cached prefixes from now on, a new one that has them all, or no more."""

    @property
    def cached_names(self) -> "NameLedger | None":
        """The names of the prefixes that are cached, if they are wanted."""
        return None

    @abstractmethod
    def read_adapter(self, path: str) -> "Adapter":
        """The adapter in a folder, checked; any thread may call this. Raises InvalidAdapter."""

    @abstractmethod
    def add_adapter(self, key: int, adapter: "Adapter") -> None:
        """Let requests use an adapter that was read."""

    @abstractmethod
    def unload_adapter(self, key: int) -> None:
        """Forget an adapter, once the requests that use it have ended."""

    def read_weights(self, version: str, sources: Sequence[WeightSource]) -> None:
        """Begin to read new weights beside those of steps. Raises ConfigError if the engine cannot change its own."""
        raise ConfigError(
            "this engine cannot change its weights while it runs: those of encoders, and of ranks in DP attention, are "
            "read when it starts; restart it with them"
        )

    def weights_found(self) -> WeightsFound | None:
        """The result of reading new weights, once; None: nothing new."""
        return None

    def take_weights(self, version: str, keep: bool) -> list[TokenEvent]:
        """Compute with the weights of this version, which were read, from the next step on.

        Running requests `keep` what they have computed, or compute it again. Returns what steps on their way have done.
        """
        raise NotImplementedError("none were read")

    def drop_weights(self) -> None:
        """Forget new weights that are being read, or were read and not taken."""
        raise NotImplementedError("none were read")


def refused(spec: RequestSpec, error: Exception) -> list[TokenEvent]:
    """The events that say why a request cannot be queued: that is the fault of this request alone."""
    logger.error("request %s cannot be queued", spec.request_id, exc_info=error)
    reason = f"it cannot be queued: {in_a_line(error)}"
    return [TokenEvent(name, finish_reason="abort", stop_reason=reason) for name in spec.answer_ids]
