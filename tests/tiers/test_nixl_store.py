"""Pages of another machine's engines, read by NIXL: here another process, over loopback."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvern.errors import ConfigError
from kvern.tiers.arena import ARENA, OwnedArena, list_path, map_arena
from kvern.tiers.host import HostStore
from kvern.tiers.nixl import NixlStore, _batches, _Line
from kvern.tiers.nixl_agent import NixlAgent
from kvern.tiers.page_server import PageServer
from kvern.tiers.remote_pages import PEER_KEY, PEER_KEY_FILE, Hello, Refused, Where, encode, peer_secret
from kvern.tiers.store import make_store
from tests.support.page_stores import IDENTITY, PAGE, get, has, name_of, put
from tests.support.ports import free_port
from tests.support.served import eventually

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("nixl_cu13") is None, reason="needs the extra nixl"
)
SIZE = 1 << 20
SECRET = "a secret of all servers"


class Remote:
    """The memory of an engine, and a page server for it."""

    def __init__(self, arena: OwnedArena, size: int, secret: str = SECRET) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ARENA, arena.path)
            self.store = HostStore(size, map_arena(size))
        self.address = "127.0.0.1", free_port()
        self.secret = secret
        self.start()

    def start(self) -> None:
        words = "127.0.0.1", str(self.address[1]), list_path("remote"), "1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvern.tiers.page_server", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, PEER_KEY: self.secret},
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == b"\n"

    def revive(self) -> bool:
        """Start it again if it has ended, as a server does: UCX may end when it answers a reader that is gone."""
        if self.process.poll() is not None:
            self.close()
            self.start()
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["tcp"])
def remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """It and its readers use TCP; the parameter names others."""
    monkeypatch.setenv(PEER_KEY, SECRET)
    monkeypatch.setenv("UCX_TLS", request.param)
    arena = OwnedArena("remote")
    found = Remote(arena, SIZE)
    yield found
    found.close()
    arena.close()


@pytest.fixture
def reader(remote: Remote) -> Iterator[NixlStore]:
    store = make_store(f"nixl://127.0.0.1:{remote.address[1]}", IDENTITY)
    assert isinstance(store, NixlStore)
    yield store
    store.close()


@pytest.mark.parametrize("remote", ["tcp", "all"], indirect=True)
def test_pages_come_as_they_are_until_they_are_evicted(remote: Remote, reader: NixlStore) -> None:
    assert has(reader, [1]) == [False]
    assert put(remote.store, range(5), 9000) == [True] * 5
    assert has(reader, range(6)) == [True] * 5 + [False]
    assert get(reader, range(6), 9000) == [True] * 5 + [False]
    assert get(reader, [1], 8999) == [False], "another length"
    put(remote.store, range(5, 200), 9000)
    kept = has(remote.store, range(200))
    assert not all(kept) and has(reader, range(200)) == kept
    assert get(reader, range(200), 9000) == kept
    assert put(reader, [200]) == [False]


def test_a_page_is_read_in_as_many_pieces_as_it_takes(
    remote: Remote, reader: NixlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are larger than the memory between the processes, and lie in cells apart."""
    assert put(remote.store, range(30), 9000) == [True] * 30
    remote.store.drop([name_of(number) for number in range(0, 30, 2)])
    assert put(remote.store, range(100, 103), 50_000) == [True] * 3
    monkeypatch.setattr("kvern.tiers.nixl.STAGING_BYTES", 30_000)
    assert get(reader, range(100, 103), 50_000) == [True] * 3
    assert get(reader, range(1, 30, 2), 9000) == [True] * 15
    pieces = [*_batches([[(0, 70_000)], [], [(100_000, 10), (5, 20_000)]])]
    assert [sum(piece.size for piece in batch) for batch in pieces] == [30_000] * 3 + [10]
    assert pieces[-1] == [(2, 20_000, 19_995, 10)]


def test_memory_that_comes_later_and_goes_is_followed(remote: Remote, reader: NixlStore) -> None:
    assert put(remote.store, [1]) == get(reader, [1]) == [True]
    arena = OwnedArena("remote")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ARENA, arena.path)
        store = HostStore(SIZE, map_arena(SIZE))
    assert put(store, [2]) == has(reader, [2]) == [True]
    with pytest.raises(OSError, match="is another meanwhile"):  # it has to be told of the memory
        get(reader, [2])
    assert get(reader, [1, 2]) == [True, True]
    arena.close()
    eventually(lambda: has(reader, [1, 2]) == [True, False])
    assert get(reader, [1, 2]) == [True, False]


def test_a_page_server_that_ended_is_found_again(remote: Remote, reader: NixlStore) -> None:
    """Its memory belongs to another process."""
    assert put(remote.store, [1]) == get(reader, [1]) == [True]
    remote.close()
    with pytest.raises(OSError, match="does not answer"):
        get(reader, [1])
    remote.start()
    eventually(lambda: _comes(reader, 1))


def _comes(reader: NixlStore, number: int) -> bool:
    try:
        return get(reader, [number]) == [True]
    except OSError:  # it has not connected yet, or to the one before
        return False


def test_a_stopped_page_server_is_a_failure_in_time(remote: Remote, reader: NixlStore) -> None:
    """It stops after it has said where the page is: the read has no end, and writes nothing once `get` has raised."""
    assert put(remote.store, [1, 2]) == get(reader, [1, 2]) == [True, True]
    found = reader._places.ask(Where([name_of(1)], [PAGE]))
    os.kill(remote.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(OSError, match="does not answer"):
            has(reader, [1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader._places, "ask", lambda question: found)
            patch.setattr("kvern.tiers.nixl.READ_SECONDS", 1.0)
            process = reader._reader
            with pytest.raises(OSError, match="cannot be read: timed out"):
                get(reader, [1])
            assert process is not None and process._process.returncode is not None
    finally:
        os.kill(remote.process.pid, signal.SIGCONT)
    eventually(lambda: _comes(reader, 2) or remote.revive())


def test_others_without_the_secret_hear_nothing(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.tiers.nixl.ANSWER_SECONDS", 0.3)
    line = _Line(remote.address, "another secret of somebody")
    with pytest.raises(OSError, match="does not answer, or has another secret"):
        line.ask(Hello())
    line.close()
    line = _Line(remote.address, SECRET)
    with pytest.raises(OSError, match="refuses: it speaks version 1 of the protocol, not 7"):
        line.ask(Hello(7))
    line.close()


def test_a_question_with_too_few_lengths_is_refused() -> None:
    refused = PageServer(Mock(spec=NixlAgent), list_path("nobody"), 0).answer(encode(Where([b"name"], [])))
    assert refused == Refused("the question has 1 names and 0 lengths, not as many")


@pytest.mark.parametrize(
    ("rest", "secret", "reason"),
    [
        ("127.0.0.1:1", SECRET, "it must name another server's kv_tier_listen"),
        (
            "//127.0.0.1",
            SECRET,
            "'127.0.0.1' must be HOST:PORT, with a name or IPv4 address and a port from 1 to 65535",
        ),
        ("//127.0.0.1:99999", SECRET, "must be HOST:PORT"),
        ("//no host:1", SECRET, "'no host:1' must be HOST:PORT, with a name or IPv4 address"),
        ("//127.0.0.1:1", "short", "KV_PEER_KEY has 5 characters: set KV_PEER_KEY or KV_PEER_KEY_FILE"),
        ("//127.0.0.1:1", "", "KV_PEER_KEY has 0 characters"),
    ],
)
def test_options_that_are_refused(rest: str, secret: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PEER_KEY, secret)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        make_store(f"nixl:{rest}", IDENTITY)


def test_a_secret_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PEER_KEY, raising=False)
    (tmp_path / "key").write_text(f"{SECRET}\n")
    monkeypatch.setenv(PEER_KEY_FILE, str(tmp_path / "key"))
    assert peer_secret() == SECRET
    monkeypatch.setenv(PEER_KEY, SECRET)
    with pytest.raises(ValueError, match="both set"):
        peer_secret()
    monkeypatch.delenv(PEER_KEY)
    monkeypatch.setenv(PEER_KEY_FILE, str(tmp_path / "none"))
    with pytest.raises(ValueError, match="cannot be read"):
        peer_secret()


def test_all_sockets_are_bound_to_the_named_address(remote: Remote, reader: NixlStore) -> None:
    """Those of messages, and those that UCX opens on both sides."""
    assert put(remote.store, [1]) == get(reader, [1]) == [True]
    assert reader._reader is not None
    for process in (remote.process, reader._reader._process):
        assert _listening(process.pid) == {"0100007F"}


def _listening(pid: int) -> set[str]:
    """The addresses at which a process listens, as in /proc/net/tcp."""
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists() or link.is_symlink())
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}


def test_processes_end_with_those_that_started_them(remote: Remote, reader: NixlStore) -> None:
    assert put(remote.store, [1]) == get(reader, [1]) == [True]
    assert reader._reader is not None
    process = reader._reader._process
    reader._reader._line.close()
    assert process.wait(20) == 0
    assert remote.process.stdin is not None
    remote.process.stdin.close()
    remote.process.stdin = None
    assert remote.process.wait(20) == 0
