"""Messages between the server's process and the engine's process: msgpack, never pickle.

server --> Start, then AddRequest, FinishRequests, Shutdown, and what changes adapters and weights         --> engine
server <-- Busy until Ready, then Events, at least twice a second, and what changed; Failed ends the engine <-- engine

Between Slept and Wake neither says anything but Shutdown.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvern.request.events import EngineStatistics, TokenEvent
from kvern.request.layer_times import LayerTimes
from kvern.request.request import FinishReason, Progress, RequestSpec
from kvern.request.store_figures import StorePrice
from kvern.request.weights import WeightsFound, WeightSource
from kvern.spec.facts import ModelFacts


class WireMessage(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One message; arrays on the wire, the tag first."""


class Start(WireMessage):
    """The options, as built-in values; `model` is a folder.

    `arena`: paths of host memory for pages that outlives the engine, and of the list of that of all engines.
    """

    config: dict[str, Any]
    arena: tuple[str, str] | None = None


class AddRequest(WireMessage):
    """Begin a request, or go on with those of its answers that are named in `progress`."""

    spec: RequestSpec
    progress: list[Progress] = []
    adapter: bytes | None = None
    """The digest of its adapter, for another server, where adapters have other keys."""


class BringPages(WireMessage):
    """Load what stores have of a prompt, which another engine still computes, into the prefix cache: this part of it
    alone is sent."""

    spec: RequestSpec


class FinishRequests(WireMessage):
    """End requests: their client has gone, or a stop string was seen."""

    request_ids: list[str]
    reason: FinishReason = "abort"
    stop_reason: str | None = None


class LoadAdapter(WireMessage):
    """Read the adapter in a folder; requests name it by its key, once AdapterRead has come."""

    key: int
    path: str


class UnloadAdapter(WireMessage):
    """Forget an adapter when the requests that use it have ended."""

    key: int


class EngineChange(WireMessage):
    """A change of what the engine has, between two steps."""


class ReadWeights(EngineChange):
    """Read weights of this version beside those of steps; WeightsRead will come."""

    version: str
    sources: list[WeightSource]


class TakeWeights(EngineChange):
    """Compute with the weights that were read; running requests `keep` what they have. WeightsTaken will come."""

    version: str
    keep: bool


class DropWeights(EngineChange):
    """Forget weights that are being read, or were read and not taken."""


class ReleasePages(EngineChange):
    """Give memory of so many bytes of the host back, of pages in a tier, and take no more until that is 0."""

    size: int


class ResizeCache(EngineChange):
    """Have so many chunks of KV cache, of which running requests may need more; Events tell how many there are."""

    chunks: int


class WatchCache(WireMessage):
    """Tell which prefixes are cached, all of them and then what changes, or no longer; CacheChanges will come."""

    wanted: bool


class TakeTrace(WireMessage):
    """Profile the next steps, of those that run within so many seconds; TraceTaken will come."""

    steps: int
    seconds: float


class Sleep(WireMessage):
    """Give back the memory of weights and KV cache once nothing runs, and say Slept."""


class Wake(WireMessage):
    """Take the memory again, and say Woken."""


class Shutdown(WireMessage):
    """End the process."""


class Busy(WireMessage):
    """A sign of life, while the model is loaded or before something that may take long.

    silence  seconds for which nothing may be heard after it; 0: as many as `EngineConfig.longest_silence` says
    """

    silence: float = 0.0


class Ready(WireMessage):
    """The model is loaded; `report` says how long each stage took, `gpu` which one it runs on, by its UUID."""

    max_model_len: int
    max_batch_requests: int
    report: str
    gpu: str | None = None
    model: ModelFacts = ModelFacts()
    cache_tokens: int = 0
    """The most tokens of finished requests that the prefix cache keeps."""
    dp_attention_size: int = 1
    """Ranks that each run `max_batch_requests` sequences, of requests of their own."""
    cache_bytes: int = 0
    """The KV cache's size, on a CPU of memory that is taken as sequences grow."""

    chunk_bytes: int = 0
    """The bytes of a chunk of a KV cache that changes while the engine runs; 0: it does not."""
    least_chunks: int = 0
    """The chunks that it has at least, for one sequence, and at the start."""
    most_chunks: int = 0

    sleeps: bool = False
    """The engine can give its memory back and take it again."""
    steps_file: str = ""
    """The file on its machine with its last steps; empty if there is none."""
    pages: str = ""
    """The identity of its pages, with the division of each among ranks; empty if it has no tier."""
    gpu_bytes: int = 0
    """The bytes that it takes of each GPU with the least of a cache that changes; 0: it has no such cache there."""
    own_chunks: int = 0
    """The chunks that its KV cache has if the model shares memory with no other."""

    @property
    def least_cache_bytes(self) -> int:
        """The bytes that its KV cache may take at least."""
        return self.least_chunks * self.chunk_bytes if self.chunk_bytes else self.cache_bytes

    @property
    def sequences(self) -> int:
        """The most sequences that run at the same time."""
        return self.dp_attention_size * self.max_batch_requests


class Failed(WireMessage):
    """The engine cannot start, or a step failed; the process ends."""

    reason: str


class Slept(WireMessage):
    """The memory is given back, or why it is not: then the engine is awake. `gpu_bytes`: what it takes of its GPU."""

    error: str | None = None
    gpu_bytes: int = 0


class Woken(WireMessage):
    """The engine takes requests again."""


class AdapterRead(WireMessage):
    """An adapter can be used, or why not."""

    key: int
    error: str | None = None
    digest: bytes = b""
    """Names its content in the namespaces of cached blocks."""


class AdaptersKept(WireMessage):
    """The digests of the adapters with which a prefill server computes prompts; a sign of life."""

    digests: list[bytes]


class WeightsRead(WireMessage):
    """The result of reading weights."""

    version: str
    found: WeightsFound


class WeightsTaken(WireMessage):
    """Steps compute with the weights of this version."""

    version: str


class TraceTaken(WireMessage):
    """A Chrome trace as JSON, compressed by gzip, or why there is none."""

    trace: bytes = b""
    error: str | None = None


class CacheChanges(WireMessage):
    """Names of prefixes (`cache/prefix_names.py`) that are cached now, and of some that are no longer.

    Messages are numbered from 0 on, which is the first that tells of the cache since WatchCache.
    """

    number: int
    stored: list[bytes]
    removed: list[bytes]
    prices: Mapping[str, StorePrice] | None = None
    """The prices of loads from the stores of the engine's tier that are on; None: nobody knows them."""


class Events(WireMessage):
    """The results of one step and the engine's statistics after it; without events a sign of life."""

    events: list[TokenEvent]
    statistics: EngineStatistics
    seconds: float
    silence: float = 0.0
    """See `Busy`."""
    layer_times: LayerTimes = {}
    """The times of the parts of measured steps, if there are new ones."""
    expert_tokens: list[list[int]] = []
    """The tokens of each expert of each layer, sent occasionally if wanted."""


encode = msgspec.msgpack.Encoder().encode
decode_for_engine = msgspec.msgpack.Decoder(
    Start
    | AddRequest
    | BringPages
    | FinishRequests
    | LoadAdapter
    | UnloadAdapter
    | ReadWeights
    | TakeWeights
    | DropWeights
    | ReleasePages
    | ResizeCache
    | WatchCache
    | TakeTrace
    | Sleep
    | Wake
    | Shutdown
).decode
Heard = AdapterRead | WeightsRead | WeightsTaken | TraceTaken | CacheChanges | Events
"""The messages of an engine while it takes requests, besides signs of life."""
decode_for_server = msgspec.msgpack.Decoder(Busy | Ready | Failed | Slept | Woken | AdaptersKept | Heard).decode
