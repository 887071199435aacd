"""The store on a disk: bounds, ages, damage, full and vanished disks, several processes, writers that are killed."""

import contextlib
import errno
import itertools
import logging
import os
import random
import resource
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.errors import ConfigError
from kvern.tiers.disk import DiskStore, disk
from kvern.tiers.page_folder import MARK, PageFolder, on_disk, page_path, temporary_path
from kvern.tiers.store import Identity, make_store
from tests.support.page_stores import IDENTITY, PAGE, get, has, name_of, page_of, put, writer
from tests.support.sampling import examples

WEEK = 7 * 86400


@contextlib.contextmanager
def opened(path: Path, limit: str = "1GB", identity: Identity = IDENTITY) -> Iterator[DiskStore]:
    store = disk(f"{path}:{limit}", identity)
    try:
        store.scan()
        yield store
    finally:
        store.close()


def file_of(path: Path, number: int) -> Path:
    return path / page_path(IDENTITY.digest.hex(), name_of(number))


def files_in(path: Path) -> list[Path]:
    return [file for file in path.glob("*/??/*") if file.is_file()]


def bytes_of(path: Path) -> int:
    return sum(on_disk(file.stat().st_size) for file in files_in(path))


def age(path: Path, number: int, seconds: float) -> None:
    """Makes a page as if it had been written and used so long ago."""
    file = file_of(path, number)
    status = file.stat()
    os.utime(file, (status.st_atime - seconds, status.st_mtime - seconds))


def test_a_page_is_a_file_that_only_its_user_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pages"
    with opened(path) as store:
        put(store, [1])
    assert file_of(path, 1).read_bytes() == page_of(name_of(1))
    assert stat.S_IMODE(file_of(path, 1).stat().st_mode) == 0o600
    for folder in (path, file_of(path, 1).parent, file_of(path, 1).parents[1]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with contextlib.closing(PageFolder.existing(path)) as folder:
        assert folder.description(IDENTITY.digest.hex()) == IDENTITY.description


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ("pages:1GB", "the folder 'pages' must be an absolute path, as in disk:/path:500GB"),
        ("/tmp:much", "the size 'much' must be a number of bytes above 0, such as 500GB"),
        ("", "must be an absolute path"),
        ("/dev/null", "cannot be used: File exists"),
    ],
)
def test_a_wrong_option_is_named(rest: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_store(f"disk:{rest}", IDENTITY)
    assert text in str(caught.value) and f"disk:{rest}" in str(caught.value)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"other files, such as 'diary.txt'"):
        make_store(f"disk:{tmp_path}:1GB", IDENTITY)
    (tmp_path / "diary.txt").unlink()
    (tmp_path / MARK).write_text("kvern pages, format 2\n")
    with pytest.raises(ConfigError, match="another version"):
        make_store(f"disk:{tmp_path}:1GB", IDENTITY)


def test_a_path_may_have_colons_and_no_size(tmp_path: Path) -> None:
    for rest in (f"{tmp_path}/a:b/c", f"{tmp_path}/a:b/c:1GB"):
        with contextlib.closing(disk(rest, IDENTITY)):
            assert (tmp_path / "a:b/c" / MARK).is_file()


def test_the_least_recently_used_pages_are_evicted(tmp_path: Path) -> None:
    limit = 20 * on_disk(PAGE)
    with opened(tmp_path, str(limit)) as store:
        for number in range(20):
            assert put(store, [number]) == [True]
            age(tmp_path, number, 1000 - number)
        assert get(store, [0]) == [True]
        assert put(store, range(100, 105)) == [True] * 5
        assert bytes_of(tmp_path) <= limit
        assert get(store, [0]) == [True] and get(store, [1]) == has(store, [1]) == [False]
        assert all(get(store, [19, *range(100, 105)]))


def test_a_page_that_was_used_after_it_was_listed_stays(tmp_path: Path) -> None:
    with opened(tmp_path, str(20 * on_disk(PAGE))) as store:
        put(store, range(20))
        for number in range(20):
            age(tmp_path, number, 1000 - number)
        store.scan()
        store._touched.clear()
        assert get(store, [0]) == [True]
        put(store, [100])
        assert get(store, [0, 1]) == [True, False]


def test_the_limit_is_that_of_all_identities(tmp_path: Path) -> None:
    limit = str(10 * on_disk(PAGE))
    with opened(tmp_path, limit) as store:
        assert all(put(store, range(10)))
    for number in range(10):
        age(tmp_path, number, 100)
    with opened(tmp_path, limit, Identity(bytes(16))) as other:
        assert all(put(other, range(6)))
        assert all(get(other, range(6)))
    assert bytes_of(tmp_path) <= 10 * on_disk(PAGE)


def test_a_page_that_exceeds_the_limit_is_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path, str(3 * on_disk(PAGE))) as store:
        assert put(store, [1]) == [True]
        assert put(store, [2], 4 * PAGE) == [False]
        assert get(store, [1]) == [True]


def test_pages_beyond_max_age_are_misses_and_removed(tmp_path: Path) -> None:
    identity = Identity(IDENTITY.digest, IDENTITY.description, max_age=WEEK)
    with opened(tmp_path, identity=identity) as store:
        put(store, [1, 2, 3])
        for number in (1, 2):
            age(tmp_path, number, WEEK + 5)
        assert get(store, [1, 3]) == [False, True]
        assert put(store, [1]) == [True] and get(store, [1]) == [True]
        assert file_of(tmp_path, 2).exists()
        store.scan()
        assert has(store, [1, 2, 3]) == [True, False, True]
        assert not file_of(tmp_path, 2).exists()


def test_being_used_makes_no_page_younger(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
        age(tmp_path, 1, 1000)
        written = file_of(tmp_path, 1).stat().st_mtime_ns
        used = file_of(tmp_path, 1).stat().st_atime_ns
        get(store, [1])
        put(store, [1])
        assert file_of(tmp_path, 1).stat().st_mtime_ns == written
        assert file_of(tmp_path, 1).stat().st_atime_ns > used


def test_the_time_of_use_is_written_once_a_minute(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
        get(store, [1])
        then = time.time() - 1000  # after the page was written, or the kernel sets the time itself
        os.utime(file_of(tmp_path, 1), (then, then - 1000))
        get(store, [1])
        assert file_of(tmp_path, 1).stat().st_atime == pytest.approx(then)


def test_what_another_process_writes_is_found_by_a_scan(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        put(one, [1])
        assert has(two, [1]) == [False] and get(two, [1]) == [True]
        two.scan()
        assert has(two, [1]) == [True]
        file_of(tmp_path, 1).unlink()
        assert get(two, [1]) == has(two, [1]) == [False]
        assert put(one, [1]) == [True] and get(two, [1]) == [True]


def test_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
        folder = file_of(tmp_path, 1).parent
        dead = subprocess.Popen(["true"])
        dead.wait()
        machine = temporary_path("/page").split("-")[0].removeprefix("/")
        left = folder / f"{machine}-{dead.pid}-0"
        unknown = folder / f".0123456789ab-{os.getpid()}-0"
        own = folder / f"{machine}-{os.getpid()}-999999"
        for file in (left, unknown, own):
            file.write_bytes(b"half")
        store.scan()
        assert not left.exists() and unknown.exists() and own.exists()
        for file in (unknown, own):
            os.utime(file, (1, 1))
        store.scan()
        assert not unknown.exists() and not own.exists() and get(store, [1]) == [True]


@settings(max_examples=examples(60))
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "cut", "grow", "swap", "remove", "reopen", "scan"]), st.integers(0, 5)
        ),
        max_size=25,
    )
)
def test_damage_is_never_more_than_a_miss(
    calls: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Only a file with the bytes of another page of the same size is taken for a page: the shelf finds that."""
    path = tmp_path_factory.mktemp("pages")
    swapped = set[int]()
    kept = set[int]()
    store = disk(f"{path}:1GB", IDENTITY)
    try:
        for call, number in calls:
            file = file_of(path, number)
            match call:
                case "put":
                    assert put(store, [number]) == [True]
                    kept.add(number)
                case "get" if number not in swapped:
                    assert get(store, [number]) == [number in kept]
                case "cut" if file.exists():
                    os.truncate(file, 100)
                    kept.discard(number)
                    swapped.discard(number)
                case "grow" if file.exists():
                    file.write_bytes(file.read_bytes() + b".")
                    kept.discard(number)
                    swapped.discard(number)
                case "swap" if file.exists():
                    file.write_bytes(bytes(PAGE))
                    swapped.add(number)
                case "remove":
                    file.unlink(missing_ok=True)
                    kept.discard(number)
                    swapped.discard(number)
                case "reopen":
                    store.close()
                    store = disk(f"{path}:1GB", IDENTITY)
                case "scan":
                    store.scan()
                    assert all(has(store, sorted(kept)))
    finally:
        store.close()


@pytest.mark.parametrize("size", [0, 100, PAGE - 1, PAGE + 1])
def test_a_file_of_another_size_is_a_miss(size: int, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1, 2])
        os.truncate(file_of(tmp_path, 1), size)
        assert get(store, [1, 2]) == [False, True]
        assert put(store, [1]) == get(store, [1]) == [True]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 50))])
def test_no_page_of_a_killed_writer_is_read_in_part(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    size = 3 << 20
    with writer(f"disk:{tmp_path}:1GB", 0, 1000, size) as process:
        assert process.stdout is not None
        done = list(itertools.islice(process.stdout, draw.randrange(1, 12)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.random() * 0.02)  # the moment is to be anywhere within a write
        process.kill()
        process.wait()
    assert done == ["1\n"] * len(done)
    with opened(tmp_path) as store:
        assert all(get(store, range(len(done)), size))
        known = [number for number in range(100) if has(store, [number])[0]]
        assert known == [number for number in range(100) if get(store, [number], size)[0]]
        assert {file.stat().st_size for file in files_in(tmp_path)} == {size}, "a leftover is still there"


def test_two_processes_share_one_folder(tmp_path: Path) -> None:
    limit = 40 * on_disk(PAGE)
    option = f"disk:{tmp_path}:{limit}"
    with writer(option, 0, 60, PAGE) as one, writer(option, 30, 60, PAGE) as two, opened(tmp_path, str(limit)) as store:
        assert one.stdout is not None and two.stdout is not None
        told = []
        for lines in itertools.zip_longest(one.stdout, two.stdout):
            told += lines
            get(store, range(90))
            put(store, [200])
        assert told.count("1\n") > 60 and one.wait() == two.wait() == 0
        store.scan()
        assert 0 < bytes_of(tmp_path) <= limit
        with contextlib.closing(PageFolder.existing(tmp_path)) as folder:
            assert folder.bytes.add() == bytes_of(tmp_path)


def test_a_process_that_stopped_while_it_counted_stops_no_other(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(["python3", "-c", code, tmp_path / "bytes"], **pipes) as holder:  # type: ignore[call-overload]
            holder.stdout.readline()
            assert put(store, [1, 2]) == [True, True] and get(store, [1, 2]) == [True, True]
            holder.stdin.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_disk_that_fills_is_no_error(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(small_disk) as store, caplog.at_level(logging.WARNING, "kvern"):
        kept = [put(store, [number])[0] for number in range(300)]
        assert kept[:40] == [True] * 40 and 0 < kept.count(False) < 10
        assert [message for message in caplog.messages if "No space left" in message] == caplog.messages
        assert len(caplog.messages) == 1
        assert get(store, [299]) == [True]
        assert kept[-100:] == [True] * 100, "it has given up a share of the disk and keeps to that"


def test_a_disk_that_others_fill_is_tried_again_when_they_make_space(small_disk: Path) -> None:
    with opened(small_disk) as store:
        put(store, [1])
        with contextlib.suppress(OSError):
            (small_disk / "others").write_bytes(bytes(2 << 20))
        assert not any(put(store, range(10, 20)))
        assert not any(put(store, range(10, 20)))
        (small_disk / "others").unlink()
        assert all(put(store, range(10, 20))) and all(get(store, range(10, 20)))


def test_a_file_that_may_not_grow_is_a_failure_of_its_page(tmp_path: Path) -> None:
    """Half a page is written before the limit of this process stops it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as store:
        put(store, [1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE // 2, before[1]))
        try:
            assert put(store, [1, 2]) == [True, False]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert get(store, [1, 2]) == [True, False] and files_in(tmp_path) == [file_of(tmp_path, 1)]
        assert put(store, [2]) == [True]


def test_a_folder_that_is_gone_is_a_miss_and_not_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pages"
    with opened(path) as store, caplog.at_level(logging.WARNING, "kvern"):
        put(store, [1])
        shutil.rmtree(path)
        assert put(store, [1, 2]) == get(store, [1, 2]) == [False, False]
        assert not path.exists() and len(caplog.messages) == 1


@pytest.mark.parametrize(("call", "work"), [("preadv", get), ("pwritev", put)])
def test_a_broken_disk_is_a_failure_of_the_store(
    call: str, work: Callable[..., list[bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised when no thread uses the places any more."""
    done: list[int] = []
    works = getattr(os, call)

    def first_fails(file: int, *more: object) -> int:
        done.append(file)
        if len(done) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return int(works(file, *more))

    with opened(tmp_path) as store:
        put(store, range(8))
        with monkeypatch.context() as patched:
            patched.setattr(os, call, first_fails)
            with pytest.raises(OSError, match="Input/output"):
                work(store, range(8) if work is get else range(10, 18))
            assert len(done) == 8
        assert get(store, range(8)) == [True] * 8
        assert put(store, range(10, 18)) == [True] * 8


def test_folders_that_were_cleared_are_made_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
        shutil.rmtree(tmp_path / IDENTITY.digest.hex())
        assert get(store, [1]) == [False] and put(store, [1]) == [True] and get(store, [1]) == [True]


def test_what_cannot_be_opened_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1, 2])
        target = file_of(tmp_path, 1)
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "elsewhere")
        assert get(store, [1, 2]) == [False, True]
        folder = file_of(tmp_path, 2).parent
        shutil.rmtree(folder)
        folder.write_text("no folder")
        assert get(store, [2]) == put(store, [2]) == [False]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_minute_of_writing_leaks_nothing(tmp_path: Path) -> None:
    limit = 200 * on_disk(PAGE)
    with opened(tmp_path, str(limit)) as store:
        rounds = []
        for number in range(0, 12_000, 40):
            put(store, range(number, number + 40))
            get(store, range(number - 100, number + 40))
            if not number % 400:
                with open("/proc/self/statm") as file:
                    pages = int(file.read().split()[1])
                rounds.append((pages, len(os.listdir("/proc/self/fd")), bytes_of(tmp_path)))
        memory, descriptors, kept = zip(*rounds[len(rounds) // 3 :], strict=True)
        assert max(memory) - min(memory) < 4096 and max(descriptors) - min(descriptors) <= 80
        assert max(kept) <= limit
