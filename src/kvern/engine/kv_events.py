"""KV events for routers of fleets: the blocks of the prefix cache, in vLLM's format, which llm-d and Dynamo read.

    prefix tree --gain, lose--> KVEvents --batch of a step--> Publisher --PUB--> whoever subscribes
                                                                 `--ROUTER--> who asks again from a number on

A message has three parts: topic, number (8 bytes, big-endian), and a batch in msgpack: [seconds, [events], rank]. Each
event is a map whose `type` is its class here. A block is announced once it is written. Its hash is the first 8 bytes of
its content key (`cache/keys.py`), so that equal hashes of engines of one model and layout stand for equal blocks.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kvern.cache.extension import CacheExtension
from kvern.cache.keys import MARK, has_marks, length_of
from kvern.cache.radix import CacheMemory, Node
from kvern.errors import ConfigError, did_you_mean, shown
from kvern.request.events import EngineStatistics

logger = logging.getLogger("kvern")

MEDIUM = "GPU"
"""The cache of the engine's device, whichever that is; stores are not told of."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number behind the last batch that is repeated."""
BUFFER_BYTES = 64 << 20
"""The limit of the batches that are kept to be repeated."""
POLL_MILLISECONDS = 200


class BlockStored(msgspec.Struct, tag=True):
    """Blocks, one behind the other, and their tokens. Positions that are no tokens have the id 0.

    parent_block_hash   the block before the first one; None: it is the first of a sequence
    lora_name           the digest of the adapter that they were computed with, in hex
    extra_keys          for each block what else its keys and values depend on: the namespace of a sequence that others
                        do not share, and the digests of images
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = MEDIUM
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that were evicted."""

    block_hashes: list[int]
    medium: str = MEDIUM


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache is empty: the engine has started."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """The events of a step."""

    ts: float
    events: list[Event]
    data_parallel_rank: int


@dataclass(frozen=True)
class KVEventsConfig:
    """The options of `kv_events_config`, by vLLM's names; `bind` is kvern's."""

    enable_kv_cache_events: bool = False
    """Publish events."""
    publisher: str | None = None
    """zmq, or null for none. None: zmq if events are enabled."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """The address of the socket that publishes; the number of the engine is added to the port."""
    bind: bool | None = None
    """Listen at the address, or connect to a subscriber there. None: listen with *, ::, ipc or inproc, and at the
    default."""
    replay_endpoint: str | None = None
    """The address to listen at for who has missed batches. None: nothing is repeated."""
    buffer_steps: int = 10_000
    """Batches that are kept to be repeated, of 64 MiB at most."""
    hwm: int = 10_000
    """Batches that wait for a subscriber; more are not sent to it, which it knows by the numbers."""
    max_queue_size: int = 0
    """No effect: the engine never waits for a queue."""
    topic: str = ""
    """The first part of each message."""
    data_parallel_rank: int = 0
    """The number of the engine."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "KVEventsConfig | None":
        """Returns the options if events are wanted. Raises ConfigError."""
        types = {"publisher": str | None, "endpoint": str, "bind": bool | None, "replay_endpoint": str | None}
        types |= {"topic": str, "enable_kv_cache_events": bool}
        for name, value in options.items():
            if name not in cls.__dataclass_fields__:
                raise ConfigError(
                    f"kv_events_config names {shown(name)}: its options are {', '.join(cls.__dataclass_fields__)}"
                    f"{did_you_mean(name, [*cls.__dataclass_fields__])}"
                )
            if not isinstance(value, types.get(name, int)) or (isinstance(value, bool) and name not in types):
                raise ConfigError(f"kv_events_config has {name} {shown(value)}, which is of another type")
        config = cls(**options)
        if config.publisher not in (None, "zmq", "null"):
            raise ConfigError(f"kv_events_config has publisher {shown(config.publisher)}: it must be zmq or null")
        for name in ("buffer_steps", "hwm"):
            if getattr(config, name) < 1:
                raise ConfigError(f"kv_events_config has {name} {getattr(config, name)}: it must be 1 or more")
        return config if config.enable_kv_cache_events and config.publisher != "null" else None

    def address(self, endpoint: str) -> str:
        """The address of this engine: the port, or the end of the name, has its number."""
        head, colon, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://") and port.isdecimal():
            return f"{head}{colon}{int(port) + self.data_parallel_rank}"
        if endpoint.startswith(("ipc://", "inproc://")):
            return f"{endpoint}_dp{self.data_parallel_rank}" if self.data_parallel_rank else endpoint
        raise ConfigError(
            f"kv_events_config has the address {shown(endpoint)}: it must be tcp://HOST:PORT or ipc://PATH"
        )

    @property
    def binds(self) -> bool:
        """The publishing socket listens."""
        if self.bind is not None:
            return self.bind
        is_any = "*" in self.endpoint or "::" in self.endpoint or not self.endpoint.startswith("tcp://")
        return is_any or self.endpoint == type(self).endpoint


class Publisher:
    """Sends batches, without ever waiting for who reads them, and repeats them in a thread."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises ConfigError if an address cannot be used."""
        self._rank = config.data_parallel_rank
        self._topic = config.topic.encode()
        self._number = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._most = config.buffer_steps
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._context = zmq.Context()
        self._replays: threading.Thread | None = None
        try:
            self._socket = self._context.socket(zmq.PUB)
            self._socket.set(zmq.SNDHWM, config.hwm)
            self._socket.set(zmq.LINGER, 0)
            address = config.address(config.endpoint)
            _open(self._socket, address, config.binds)
            if not re.match(r"ipc://|inproc://|tcp://(127\.|localhost:|\[::1\])", address):
                logger.warning("KV events with the tokens of all prompts go over the network, unencrypted: %s", address)
            if config.replay_endpoint is not None:
                replay = self._context.socket(zmq.ROUTER)
                replay.set(zmq.SNDHWM, config.buffer_steps + 1)
                replay.set(zmq.LINGER, 0)
                _open(replay, config.address(config.replay_endpoint), True)
                self._replays = threading.Thread(target=self._replay, args=(replay,), name="kv-events", daemon=True)
                self._replays.start()
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: list[Event]) -> None:
        """Send a batch to those who subscribe and are not behind by too many."""
        payload = self._encode(EventBatch(time.time(), events, self._rank))
        number, self._number = self._number, self._number + 1
        if self._replays is not None:
            with self._lock:
                self._kept.append((number, payload))
                self._kept_bytes += len(payload)
                while len(self._kept) > self._most or self._kept_bytes > BUFFER_BYTES:
                    self._kept_bytes -= len(self._kept.popleft()[1])
        self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def close(self) -> None:
        """Send nothing more."""
        self._ended.set()
        if self._replays is not None:
            self._replays.join()
        self._context.destroy(linger=0)

    def _replay(self, socket: "zmq.Socket[bytes]") -> None:
        """Repeat what is kept from a number on, for each who asks, then END."""
        while not self._ended.is_set():
            if not socket.poll(POLL_MILLISECONDS):
                continue
            frames = socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("a request for KV events has %d parts: it must be empty, then 8 bytes", len(frames) - 1)
                continue
            asker, first = frames[0], int.from_bytes(frames[2], "big")
            with self._lock:
                kept = [(number, payload) for number, payload in self._kept if number >= first]
            for number, payload in kept:
                socket.send_multipart([asker, b"", number.to_bytes(8, "big"), payload])
            socket.send_multipart([asker, b"", END, b""])
        socket.close()


def _open(socket: "zmq.Socket[bytes]", address: str, binds: bool) -> None:
    """Raises ConfigError if the address cannot be used."""
    socket.set(zmq.IPV6, int("[" in address or "::" in address))
    try:
        (socket.bind if binds else socket.connect)(address)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv_events_config: {address} cannot be {'listened at' if binds else 'connected to'}: {error}"
        ) from error


def _adapter(namespace: bytes) -> str | None:
    """The adapter that a namespace names behind its weights, see `cache_namespace`."""
    found = re.match(rb"(?:weights [^\0]*\0)?adapter ([^\0]*)\0", namespace)
    return None if found is None else found[1].decode()


class KVEvents(CacheExtension):
    """Publishes the full blocks that the prefix tree gains and loses, those of a step together."""

    name = "kv_events"

    def __init__(self, config: KVEventsConfig, memory: CacheMemory) -> None:
        """Raises ConfigError if an address cannot be used."""
        self._tree = memory.tree
        self._block_size = memory.block_size
        self._stored: dict[Node, bytes] = {}
        """Nodes that were not announced, and their namespaces."""
        self._announced: set[Node] = set()
        self._removed: list[int] = []
        self._publisher = Publisher(config)
        memory.tree.gaining.append(self._gain)
        self._publisher.publish([AllBlocksCleared()])

    def lose(self, node: Node) -> None:
        if node in self._announced:
            self._announced.remove(node)
            self._removed.append(self._hash(node))
        else:
            self._stored.pop(node, None)

    def completed(self, step: int) -> None:
        self._tell()

    def count(self, statistics: EngineStatistics) -> None:
        """The last block of an answer enters the tree behind its last step."""
        self._tell()

    def _tell(self) -> None:
        """Announces blocks that are written now, behind those that are gone."""
        events: list[Event] = []
        if self._removed:
            events.append(BlockRemoved(self._removed))
            self._removed = []
        written = [node for node in self._stored if self._tree.is_written(node)] if self._stored else []
        last, event = None, None
        for node in written:
            namespace = self._stored.pop(node)
            self._announced.add(node)
            if event is None or node.parent is not last:
                event = self._first(namespace, node)
                events.append(event)
            self._add(event, node, namespace)
            last = node
        if events:
            self._publisher.publish(events)

    def close(self) -> None:
        self._publisher.close()

    def _gain(self, namespace: bytes, node: Node) -> None:
        if length_of(node.edge) == self._block_size:
            self._stored[node] = namespace

    def _hash(self, node: Node) -> int:
        return int.from_bytes(self._tree.key(node)[:8], "big")

    def _first(self, namespace: bytes, node: Node) -> BlockStored:
        """An event for blocks from a node on."""
        assert node.parent is not None
        parent = None if node.parent.parent is None else self._hash(node.parent)
        return BlockStored([], parent, [], self._block_size, lora_name=_adapter(namespace))

    def _add(self, event: BlockStored, node: Node, namespace: bytes) -> None:
        tokens, keys = list(node.tokens), []
        if has_marks(node.edge):
            keys = [f"{item - MARK:032x}" for item in tokens if item >= MARK]
            tokens = [0 if item >= MARK else item for item in tokens]
        if namespace and node.parent is not None and node.parent.parent is None:
            keys.insert(0, self._tree.root_key(namespace).hex())
        if keys or event.extra_keys is not None:
            event.extra_keys = event.extra_keys or [None] * len(event.block_hashes)
            event.extra_keys.append(keys or None)
        event.block_hashes.append(self._hash(node))
        event.token_ids += tokens
