"""The store on Valkey and Redis, with a real server: users, TLS, MACs, ages, evictions, servers that stop and die."""

import logging
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from kvern.errors import ConfigError
from kvern.tiers.store import Identity, Store, make_store
from tests.support.certificates import certificate
from tests.support.page_stores import IDENTITY, PAGE, get, has, name_of, opened, put
from tests.support.redis_server import RedisServer, needs_server, redis_server

pytestmark = needs_server
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def store(server: RedisServer) -> Iterator[Store]:
    with opened(f"valkey://127.0.0.1:{server.port}?timeout=0.5") as store:
        yield store


def client(server: RedisServer) -> Redis:
    return Redis(port=server.port)


def keys(server: RedisServer) -> list[bytes]:
    with client(server) as direct:
        return list(direct.scan_iter("kvern:*"))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("valkey:127.0.0.1", "it must name a server, as valkey://[user:password@]host"),
        ("valkey://", "it must name a server"),
        ("valkey://host:none", "the port must be a number from 1 to 65535"),
        ("valkey://host:99999", "the port must be a number from 1 to 65535"),
        ("valkey://host/first", "the database 'first' must be a number"),
        ("valkey://host?timeout=0", "the timeout '0' must be a number of seconds above 0"),
        ("valkey://host?timeout=soon", "the timeout 'soon' must be"),
        ("valkey://host?color=red", "there is no setting 'color', only timeout"),
    ],
)
def test_a_wrong_option_is_named(option: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_store(option, IDENTITY)
    assert text in str(caught.value) and option in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"VALKEY_PAGE_KEY": "short"}, "the key of VALKEY_PAGE_KEY has 5 characters: it must have 16"),
        ({"VALKEY_PAGE_KEY_FILE": "/nowhere/key"}, "the file /nowhere/key of VALKEY_PAGE_KEY_FILE cannot be read"),
        ({"VALKEY_PAGE_KEY_FILE": "/x", "VALKEY_PAGE_KEY": SECRET}, "are both set"),
    ],
)
def test_a_wrong_key_is_named(variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        make_store("valkey://host", IDENTITY)
    assert text in str(caught.value) and SECRET not in str(caught.value)


def test_users_and_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = ["--user", "engine", "on", ">a/b:c", "~kvern:*", "+@all", "--user", "default", "off"]
    with redis_server(tmp_path, *users) as server:
        where = f"127.0.0.1:{server.port}"
        with opened(f"valkey://engine:a%2Fb%3Ac@{where}/0") as store:
            assert put(store, [1]) == get(store, [1]) == [True]
        for wrong in ("engine:wrong@", "nobody:a%2Fb%3Ac@"):
            with pytest.raises(ConfigError, match="refuses the user or the password") as caught:
                make_store(f"valkey://{wrong}{where}", IDENTITY)
            assert "wrong" not in str(caught.value) and "a%2Fb" not in str(caught.value)
        monkeypatch.setenv("VALKEY_USER", "engine")
        monkeypatch.setenv("VALKEY_PASSWORD", "a/b:c")
        with opened(f"valkey://{where}") as store:
            assert get(store, [1]) == [True]
        with Redis(port=server.port, username="engine", password="a/b:c") as direct:
            direct.acl_setuser("engine", commands=["-exists"])
        with pytest.raises(ConfigError, match="refuses the user"):
            make_store(f"valkey://{where}", IDENTITY)


def test_a_user_who_may_read_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path, "--user", "reader", "on", "nopass", "~kvern:*", "+get", "+exists") as server:
        with opened(f"valkey://127.0.0.1:{server.port}") as store:
            put(store, [1])
        with opened(f"valkey://reader:x@127.0.0.1:{server.port}") as store:
            assert get(store, [1]) == [True] and put(store, [1, 2]) == [True, False]
    assert len([message for message in caplog.messages if "the server refuses pages" in message]) == 1


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate(tmp_path, "kvern")
    files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert]
    with redis_server(tmp_path, *map(str, files), tls=True) as server:
        option = f"valkeys://127.0.0.1:{server.port}?timeout=2"
        with opened(option) as store, pytest.raises(RedisError, match=r"(?i)certificate verify failed"):
            put(store, [1])
        for name, path in (("CA", cert), ("CERT", cert), ("KEY", key)):
            monkeypatch.setenv(f"VALKEY_{name}_FILE", str(path))
        with opened(option) as store:
            assert put(store, [1]) == get(store, [1]) == [True]
        with opened(option.replace("valkeys", "valkey")) as store, pytest.raises(RedisError):
            get(store, [1])
        monkeypatch.setenv("VALKEY_CA_FILE", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match=r"there is no file .*none"):
            make_store(option, IDENTITY)


@pytest.mark.parametrize("with_key", [False, True])
def test_values_that_were_cut_or_changed(
    server: RedisServer, with_key: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if with_key:
        (tmp_path / "key").write_text(SECRET + "\n")
        monkeypatch.setenv("VALKEY_PAGE_KEY_FILE", str(tmp_path / "key"))
    with opened(f"valkey://127.0.0.1:{server.port}") as store, client(server) as direct:
        for change in ("cut", "grown", "empty", "list", "flipped", "swapped"):
            assert put(store, [1, 2]) == get(store, [1, 2]) == [True, True]
            key, other = sorted(keys(server), key=lambda key: key.endswith(name_of(2).hex().encode()))
            value, size = direct.get(key), direct.strlen(key)
            match change:
                case "cut":
                    direct.set(key, value[:-1])
                case "grown":
                    direct.append(key, b".")
                case "empty":
                    direct.set(key, b"")
                case "flipped":
                    direct.setbit(key, 8 * (size - 1), 1 - direct.getbit(key, 8 * (size - 1)))
                case "swapped":
                    direct.set(key, direct.get(other))
            if change in ("flipped", "swapped") and not with_key:
                place = memoryview(bytearray(PAGE))  # the sum in the page's header is the shelf's to check
                assert store.get([name_of(1)], [place]) == [True]
            elif change != "list":
                assert get(store, [1, 2]) == [False, True], change
            store.drop([name_of(1)])
            assert has(store, [1, 2]) == [False, True]


def test_pages_of_other_keys_are_others(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    option = f"valkey://127.0.0.1:{server.port}"
    for number, secret in enumerate((SECRET, SECRET[::-1], None)):
        if secret is None:
            monkeypatch.delenv("VALKEY_PAGE_KEY")
        else:
            monkeypatch.setenv("VALKEY_PAGE_KEY", secret)
        with opened(option) as store:
            assert get(store, [1]) == [False] and put(store, [1]) == [True]
        assert len(keys(server)) == number + 1


def test_the_log_says_whether_there_are_macs(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    option = f"valkey://me:secret@127.0.0.1:{server.port}"
    with client(server) as direct:
        direct.acl_setuser("me", enabled=True, nopass=True, keys=["*"], categories=["+@all"])
    monkeypatch.setenv("VALKEY_PAGE_KEY", SECRET)
    with opened(option):
        assert not caplog.messages
    monkeypatch.delenv("VALKEY_PAGE_KEY")
    with opened(option):
        assert re.search("have no MAC.*set VALKEY_PAGE_KEY", caplog.text) and "secret" not in caplog.text


def test_pages_go_when_they_are_too_old(server: RedisServer) -> None:
    with opened(f"valkey://127.0.0.1:{server.port}", Identity(bytes(16), max_age=1000.5)) as store:
        put(store, [1])
        with client(server) as direct:
            assert 900 < direct.ttl(keys(server)[0]) <= 1000


def test_a_server_that_evicts(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as server,
        opened(f"valkey://127.0.0.1:{server.port}") as store,
    ):
        for number in range(0, 400, 8):
            assert all(put(store, range(number, number + 8)))
        there = get(store, range(400))
        assert 0 < there.count(True) < 300


def test_a_server_that_is_full_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server,
        opened(f"valkey://127.0.0.1:{server.port}") as store,
        caplog.at_level(logging.WARNING, "kvern"),
    ):
        kept = [put(store, [number])[0] for number in range(300)]
        assert kept[0] and not kept[-1] and get(store, range(300)) == kept
        assert len([message for message in caplog.messages if "maxmemory" in message]) == 1


def test_a_server_that_is_not_there_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path)
    with opened(f"valkey://127.0.0.1:{server.port}") as store:
        assert "does not answer, and is tried again later" in caplog.text
        with pytest.raises(RedisError):
            has(store, [1])
        try:
            server.start()
            assert put(store, [1]) == get(store, [1]) == [True]
        finally:
            server.kill()


def test_a_server_that_is_killed_and_starts_again(server: RedisServer, store: Store) -> None:
    put(store, [1])
    server.kill()
    for call in (put, get, has):
        with pytest.raises(RedisError):
            call(store, [1])
    server.start()
    assert get(store, [1]) == [False] and put(store, [1]) == get(store, [1]) == [True]


def test_a_server_that_starts_again_unseen(server: RedisServer, store: Store) -> None:
    """A connection that was closed meanwhile is no failure."""
    put(store, [1])
    server.kill()
    server.start()
    assert get(store, [1]) == [False] and put(store, [1]) == [True]


def test_a_server_that_stops_answers_late_and_to_nobody(server: RedisServer, store: Store) -> None:
    put(store, [1, 2, 3])
    for number in range(3):
        server.send(signal.SIGSTOP)
        for call in (get, has):
            with pytest.raises(RedisError):
                call(store, [1])
        server.send(signal.SIGCONT)
        assert get(store, [2 + number % 2, 7, 1]) == [True, False, True], "an answer to another question"


@pytest.mark.sample(2)
@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01, 0.02, 0.05])
def test_a_server_that_is_killed_amid_answers(server: RedisServer, store: Store, delay: float) -> None:
    size = 1 << 20
    assert all(put(store, range(8), size))

    def read() -> int:
        count = 0
        try:
            while True:
                assert all(get(store, range(8), size))
                count += 1
        except RedisError:
            return count

    with ThreadPoolExecutor(2) as pool:
        counts = [pool.submit(read) for _ in range(2)]
        threading.Event().wait(delay)  # the moment is to be anywhere within an answer
        server.kill()
        assert all(count.result() >= 0 for count in counts)
