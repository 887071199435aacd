"""KV events as routers of fleets read them: over real sockets, decoded as vLLM documents them."""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvern import LLM, SamplingParams
from kvern.cache.radix import RadixCache
from kvern.engine.kv_events import END, KVEventsConfig, Publisher
from kvern.errors import ConfigError
from tests.support.internals import engine_of
from tests.support.peft_adapters import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
WAIT = 20_000
"""Milliseconds after which a message is missing."""


class Subscriber:
    """A set of cached blocks, kept by what is published."""

    def __init__(self, endpoint: str, replay: str, hwm: int = 0, rank: int = 0) -> None:
        self.rank = rank
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.set(zmq.RCVHWM, hwm)
        self.socket.set(zmq.SUBSCRIBE, b"kv@")
        self.socket.connect(endpoint)
        self.asks = self._context.socket(zmq.DEALER)
        self.asks.connect(replay)
        self.next = 0
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        self._context.destroy(linger=0)

    def hear(self, number: int, payload: bytes) -> None:
        assert number == self.next
        self.next += 1
        seconds, events, rank = msgspec.msgpack.decode(payload)
        assert abs(time.time() - seconds) < 1000 and rank == self.rank
        for event in events:
            self.events.append(event)
            match event["type"]:
                case "AllBlocksCleared":
                    self.blocks.clear()
                case "BlockRemoved":
                    for block in event["block_hashes"]:
                        del self.blocks[block]
                case "BlockStored":
                    parent, size = event["parent_block_hash"], event["block_size"]
                    assert len(event["token_ids"]) == size * len(event["block_hashes"])
                    assert event["medium"] == "GPU" and event["lora_id"] is None
                    assert event["extra_keys"] is None or len(event["extra_keys"]) == len(event["block_hashes"])
                    assert parent is None or parent in self.blocks
                    for place, block in enumerate(event["block_hashes"]):
                        assert block not in self.blocks
                        self.blocks[block] = parent, tuple(event["token_ids"][place * size : (place + 1) * size])
                        parent = block

    def replay(self, first: int) -> None:
        """Ask for what was missed."""
        self.asks.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self.asks.poll(WAIT)
            empty, number, payload = self.asks.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return
            if int.from_bytes(number, "big") >= self.next:
                self.hear(int.from_bytes(number, "big"), payload)

    def numbers(self) -> list[int]:
        """The numbers of what waits, until nothing comes any more."""
        found = []
        while self.socket.poll(500):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"kv@pod@model" and len(number) == 8
            found.append(int.from_bytes(number, "big"))
            if found[-1] > self.next:
                self.replay(self.next)
            if found[-1] == self.next:
                self.hear(found[-1], payload)
        return found


@pytest.fixture
def addresses(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path if len(str(tmp_path)) < 80 else Path(os.path.relpath(tmp_path))
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv@pod@model",
    }


@pytest.fixture
def subscriber(addresses: dict[str, Any]) -> Iterator[Subscriber]:
    one = Subscriber(addresses["endpoint"], addresses["replay_endpoint"])
    yield one
    one.close()


def published(options: dict[str, Any]) -> Publisher:
    config = KVEventsConfig.of({"enable_kv_cache_events": True} | options)
    assert config is not None
    return Publisher(config)


def cached(llm: LLM) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """The full blocks of an engine's prefix tree: their hashes, their parents', and their tokens."""
    engine: Any = engine_of(llm)
    tree: RadixCache = engine.core.scheduler.cache.tree

    def named(node: Any) -> int | None:
        return None if node.parent is None else int.from_bytes(tree.key(node)[:8], "big")

    return {
        named(node): (named(node.parent), node.tokens)  # type: ignore[misc]
        for node in tree.nodes()
        if len(node.tokens) == 16
    }


def test_a_subscriber_knows_the_cached_blocks(
    tiny_model: Path, addresses: dict[str, Any], subscriber: Subscriber, tmp_path: Path
) -> None:
    """Through evictions, from a number on that it has not heard, and with an adapter."""
    adapter = make_adapter(tiny_model, tmp_path / "one", 0, r=4)
    dice = random.Random(0)
    beginnings = [[dice.randrange(100) for _ in range(64)] for _ in range(3)]
    options: dict[str, Any] = {"threads": 1, "kv_cache_tokens": 768, "max_model_len": 256, "max_batch_requests": 2}
    with LLM(str(tiny_model), kv_events_config=addresses, adapters={"one": str(adapter)}, **options) as llm:
        for turn in range(12):
            prompts = [[*dice.choice(beginnings), *(dice.randrange(100) for _ in range(dice.randrange(90)))]] * 2
            llm.generate(prompts, PARAMS, adapter="one" if turn % 4 == 3 else None)
        llm.statistics()
        expected = cached(llm)
        subscriber.replay(0)
        subscriber.numbers()
        assert subscriber.blocks == expected and len(expected) > 20
        kinds = {event["type"] for event in subscriber.events}
        assert kinds == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}
        named = {event["lora_name"] for event in subscriber.events if event["type"] == "BlockStored"}
        assert len(named) == 2 and None in named
        llm.generate([[7] * 100], PARAMS)
        llm.statistics()
        assert subscriber.numbers() and subscriber.blocks == cached(llm), "it hears what is published"
    with LLM(str(tiny_model), kv_events_config=addresses, **options) as llm:  # the addresses are free again
        llm.generate([[7] * 100], PARAMS)


@pytest.mark.nightly
def test_each_engine_has_its_address(tiny_model: Path, addresses: dict[str, Any], subscriber: Subscriber) -> None:
    second = Subscriber(addresses["endpoint"] + "_dp1", addresses["replay_endpoint"] + "_dp1", rank=1)
    with LLM(str(tiny_model), threads=1, data_parallel_size=2, kv_events_config=addresses) as llm:
        llm.generate([[number] * 40 for number in range(5, 9)], PARAMS)
        for one in (subscriber, second):
            one.replay(0)
            one.numbers()
            assert one.events[0] == {"type": "AllBlocksCleared"} and len(one.blocks) >= 2 * 2
    second.close()


def test_a_slow_subscriber_misses_batches_and_asks_for_them(addresses: dict[str, Any], subscriber: Subscriber) -> None:
    """Whoever publishes waits for nobody: it is done while nothing is read, and what was left out shows."""
    config = KVEventsConfig.of(addresses | {"hwm": 4, "buffer_steps": 5000})
    assert config is not None
    publisher = Publisher(config)
    subscriber.socket.set(zmq.RCVBUF, 4096)
    publisher.publish([])
    while not subscriber.numbers():  # until it is connected
        publisher.publish([])
    begun = subscriber.next
    slow = Subscriber(addresses["endpoint"], addresses["replay_endpoint"], hwm=1)
    while not slow.socket.poll(100):
        publisher.publish([])
    many: list[Any] = [{"type": "Noise", "of": "x" * 20_000}]
    done = threading.Event()

    def publish() -> None:
        for _ in range(3000):
            publisher.publish(many)
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    assert done.wait(60), "the publisher waits for a subscriber"
    thread.join()
    slow.replay(0)
    assert slow.next == publisher._number, "all that it missed is repeated"
    heard = slow.numbers()
    assert 0 < len(heard) < 3000 and begun < publisher._number
    slow.close()
    publisher.close()


def test_what_is_kept_is_bounded(addresses: dict[str, Any], subscriber: Subscriber) -> None:
    config = KVEventsConfig.of(addresses | {"buffer_steps": 3})
    assert config is not None
    publisher = Publisher(config)
    for _ in range(8):
        publisher.publish([])
    subscriber.asks.send_multipart([b"", b"short"])
    subscriber.next = 5
    subscriber.replay(0)
    assert subscriber.next == 8
    publisher.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"endpont": "tcp://*:1"}, "names 'endpont'.*did you mean endpoint"),
        ({"hwm": 0}, "hwm 0: it must be 1 or more"),
        ({"hwm": "5"}, "hwm '5', which is of another type"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events 1, which is of another type"),
        ({"publisher": "kafka"}, "publisher 'kafka': it must be zmq or null"),
        ({"endpoint": "http://x"}, "the address 'http://x': it must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://256.1.1.1:5", "bind": True}, "tcp://256.1.1.1:5 cannot be listened at"),
    ],
)
def test_what_is_wrong_with_the_options_is_named(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        published(options)


def test_addresses_are_those_of_the_engine_and_of_this_machine_alone() -> None:
    """Nothing listens on all interfaces that was not asked to."""

    def made(**options: Any) -> KVEventsConfig:
        config = KVEventsConfig.of({"enable_kv_cache_events": True} | options)
        assert config is not None
        return config

    assert made().endpoint.startswith("tcp://127.0.0.1:") and made().binds
    assert made(endpoint="tcp://*:5557").binds and not made(endpoint="tcp://router:5557").binds
    assert made(endpoint="tcp://10.0.0.1:5557", bind=True).binds
    assert made(data_parallel_rank=2).address("tcp://*:5557") == "tcp://*:5559"
    assert made(data_parallel_rank=2).address("ipc:///x") == "ipc:///x_dp2"
    assert KVEventsConfig.of({"endpoint": "tcp://*:5557"}) is None
    assert KVEventsConfig.of({"enable_kv_cache_events": True, "publisher": "null"}) is None


def test_whoever_starts_it_hears_that_prompts_go_over_the_network(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="cannot be listened at"):
        published({"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://256.0.0.1:1", "bind": False})
    assert not caplog.text
    published({"endpoint": "tcp://192.0.2.1:5557"}).close()
    assert "go over the network, unencrypted: tcp://192.0.2.1:5557" in caplog.text


def test_an_engine_without_a_prefix_cache_has_no_events(tiny_model: Path, addresses: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kv_events_config needs one prefix cache"):
        LLM(str(tiny_model), threads=1, kv_events_config=addresses, prefix_cache=False)
