"""The store on Mooncake, with a real master over TCP: empty and full pools, owners and masters that stop and die."""

import importlib
import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvern.errors import ConfigError
from kvern.tiers.store import Identity, Store, make_store
from tests.support.mooncake_master import Master, mooncake_master, needs_mooncake
from tests.support.page_stores import IDENTITY, get, has, opened, put, writer

pytestmark = needs_mooncake
SIZE = 1 << 20


@pytest.fixture
def master() -> Iterator[Master]:
    with mooncake_master() as master:
        yield master


@pytest.fixture
def option(master: Master) -> str:
    return f"mooncake://127.0.0.1:{master.port}"


@pytest.fixture
def store(option: str) -> Iterator[Store]:
    """A store that has no memory of its own for the pool."""
    with opened(option) as store:
        yield store


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("mooncake:host", "it must name a master, as mooncake://master[:port]"),
        ("mooncake://host/0", "it must name a master"),
        ("mooncake://host:none", "the port must be a number"),
        ("mooncake://host?segment=all", "the size 'all' must be a number of bytes"),
        ("mooncake://host?protocol=http", "the protocol 'http' must be one of tcp, rdma"),
        ("mooncake://host?color=red", "there is no setting 'color', only segment, protocol"),
    ],
)
def test_a_wrong_option_is_named(option: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_store(option, IDENTITY)
    assert text in str(caught.value) and option in str(caught.value)


def test_ages_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not know how old a page is"):
        make_store("mooncake://host", Identity(bytes(16), max_age=5.0))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvern.tiers.mooncake", raising=False)
    monkeypatch.setattr("kvern.tiers.store.STORES._registered", {})
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvern\[mooncake\]', and the system's packages libibverbs1"):
        make_store("mooncake://host", IDENTITY)


def test_a_pool_without_memory_keeps_nothing(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert put(store, [1, 2]) == get(store, [1, 2]) == has(store, [1, 2]) == [False, False]
    assert [message for message in caplog.messages if "the pool refuses pages" in message] == caplog.messages[-1:]


def test_a_pool_that_is_full_evicts_or_refuses(option: str) -> None:
    with opened(f"{option}?segment=32MB") as store:
        kept = [put(store, [number], SIZE)[0] for number in range(60)]
        assert any(kept) and sum(get(store, range(60), SIZE)) < 40


def test_pages_of_another_process(option: str, store: Store) -> None:
    with writer(f"{option}?segment=64MB", 0, 20, SIZE) as owner:
        assert owner.stdout is not None
        done = list(itertools.islice(owner.stdout, 10))
        assert done == ["1\n"] * 10 and get(store, range(10), SIZE) == has(store, range(10)) == [True] * 10
        assert get(store, range(10), SIZE + 1) == [False] * 10


@pytest.mark.nightly
@pytest.mark.parametrize(
    "delay", [pytest.param(0.0, marks=pytest.mark.nightly), 0.01, pytest.param(0.05, marks=pytest.mark.nightly)]
)
def test_an_owner_that_is_killed_amid_answers(option: str, store: Store, delay: float) -> None:
    """What comes is right; the rest does not come, whatever the master believes."""
    with writer(f"{option}?segment=64MB", 0, 10_000, SIZE) as owner, ThreadPoolExecutor(1) as pool:
        assert owner.stdout is not None
        assert list(itertools.islice(owner.stdout, 10)) == ["1\n"] * 10
        reads = pool.submit(lambda: [get(store, range(10), SIZE) for _ in range(20)])
        threading.Event().wait(delay)  # the moment is to be anywhere within an answer
        owner.kill()
        owner.wait()
        assert reads.result()
        assert get(store, range(10), SIZE) == [False] * 10


@pytest.mark.nightly
def test_an_owner_that_is_stopped_holds_up_its_readers_for_a_while(option: str, store: Store) -> None:
    with writer(f"{option}?segment=256MB", 0, 10_000, SIZE) as owner, ThreadPoolExecutor(1) as pool:
        assert owner.stdout is not None
        assert list(itertools.islice(owner.stdout, 10)) == ["1\n"] * 10
        assert get(store, range(3), SIZE) == [True] * 3
        owner.send_signal(signal.SIGSTOP)
        read = pool.submit(get, store, range(3), SIZE)
        assert has(store, range(3)) == [True] * 3
        assert read.result() == [False] * 3
        owner.send_signal(signal.SIGCONT)


@pytest.mark.nightly
def test_a_master_that_is_stopped(master: Master, store: Store) -> None:
    assert has(store, [1]) == [False]
    master.send(signal.SIGSTOP)
    with pytest.raises(OSError, match="does not answer"):
        has(store, [1])
    master.send(signal.SIGCONT)
    assert has(store, [1]) == [False]


def test_a_master_that_is_not_there_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    master = Master()
    with opened(f"mooncake://127.0.0.1:{master.port}?segment=32MB") as store:
        assert "the master does not answer, and is tried again later" in caplog.text
        for call in (put, get, has):
            with pytest.raises(OSError, match="refused"):
                call(store, [1])
        try:
            master.start()
            assert put(store, [1]) == get(store, [1]) == [True]
        finally:
            master.kill()


@pytest.mark.nightly
def test_a_master_that_is_stopped_at_the_start(
    option: str, master: Master, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is not asked to connect, since no thread of this process would run for minutes."""
    connected: list[object] = []
    mooncake = importlib.import_module("kvern.tiers.mooncake")  # cannot be imported where the library is not installed
    library = mooncake.MooncakeDistributedStore
    monkeypatch.setattr(mooncake, "MooncakeDistributedStore", lambda: connected.append(1) or library())
    with monkeypatch.context() as patched:
        patched.setattr(mooncake, "TRY_SECONDS", 1.0)
        master.send(signal.SIGSTOP)
        with opened(option) as store:
            assert "does not answer within 1 s" in caplog.text
            with pytest.raises(OSError, match="does not answer"):
                has(store, [1])
            assert not connected
            master.send(signal.SIGCONT)
            patched.undo()
            monkeypatch.setattr(mooncake, "MooncakeDistributedStore", library)
            assert has(store, [1]) == [False]


@pytest.mark.nightly
def test_a_master_that_is_killed(option: str, master: Master) -> None:
    with opened(f"{option}?segment=32MB") as store:
        assert put(store, [1]) == [True]
        master.kill()
        for call in (has, put):
            with pytest.raises(OSError, match="does not answer"):
                call(store, [2])
        master.start()
        assert set(get(store, [1])) <= {True, False}
