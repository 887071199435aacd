"""`kvern cache ls`, `stats` and `clear`: what a folder of KV pages has, and clearing it while servers use it."""

import contextlib
import json
import os
import re
import sys
from io import StringIO
from pathlib import Path

import pytest

from kvern.cli.main import main
from kvern.tiers.disk import DiskStore, disk
from kvern.tiers.page_folder import PageFolder, on_disk
from kvern.tiers.store import Identity
from tests.support.page_stores import IDENTITY, PAGE, get, put

OTHER = Identity(bytes(16), {"model": "other"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with three pages of one model and two of another."""
    for identity, numbers in ((IDENTITY, range(3)), (OTHER, range(2))):
        with contextlib.closing(disk(f"{tmp_path}:1GB", identity)) as store:
            assert all(put(store, numbers))
            get(store, numbers)
    return tmp_path


def kvern(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What a command says."""
    assert main(["cache", *map(str, arguments)]) == code
    told = capsys.readouterr()
    return told.out + told.err


def test_ls_shows_the_models(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = kvern(capsys, "ls", path).splitlines()
    [other, tiny] = [line.split() for line in lines if " kB" in line]
    assert other[:4] == [bytes(16).hex(), "other", "2", "32.8"] and other[-1] == "2"
    assert tiny[:4] == [IDENTITY.digest.hex(), "tiny", "3", "49.2"] and tiny[-1] == "3"
    told = json.loads(kvern(capsys, "ls", path, "--json"))
    assert [kept["model"] for kept in told] == ["other", "tiny"]
    assert told[1]["bytes"] == 3 * on_disk(PAGE) and told[1]["hits"] == 3
    assert told[1]["description"] == IDENTITY.description and told[1]["oldest"] <= told[1]["newest"]


def test_stats_count_pages_by_their_last_use(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = next(path.glob("*/??/*"))
    os.utime(page, (page.stat().st_atime - 2 * 86400, page.stat().st_mtime))
    text = kvern(capsys, "stats", path)
    assert "free on the disk" in text and re.search("pages used within a day +4", text)
    told = json.loads(kvern(capsys, "stats", path, "--json"))
    assert told["pages"] == 5 and told["identities"] == 2 and told["bytes"] == 5 * on_disk(PAGE)
    assert told["used_within_seconds"] == {"3600": 4, "86400": 4, "604800": 5}


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PageFolder.made(tmp_path).close()
    assert "has no pages" in kvern(capsys, "ls", tmp_path)
    assert "pages deleted: 0" in kvern(capsys, "clear", tmp_path)
    assert json.loads(kvern(capsys, "stats", tmp_path, "--json"))["pages"] == 0


@pytest.mark.parametrize("action", ["ls", "stats", "clear"])
def test_another_folder_is_refused(tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ("0" * 32)).mkdir()
    text = kvern(capsys, action, tmp_path, code=2)
    assert f"{tmp_path} is no folder of kvern's pages: it has no file kvern-pages" in text
    assert "is no folder" in kvern(capsys, action, tmp_path / "missing", code=2)
    assert [*tmp_path.iterdir()] == [tmp_path / ("0" * 32)]


def test_clear_asks(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("yes\n"))
    assert "give --yes" in kvern(capsys, "clear", path, code=2)
    for answer, left in (("n", 5), ("", 5), ("y", 0)):
        terminal = StringIO(answer + "\n")
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", terminal)
        text = kvern(capsys, "clear", path, code=1 if left else 0)
        assert f"Delete 5 pages, 81.9 kB, in {path}? [y/N]" in text
        assert ("nothing is deleted" in text) == bool(left)
        assert len([*path.glob("*/??/*")]) == left
    assert sorted(file.name for file in path.iterdir()) == ["bytes", "kvern-pages"]


def test_clear_may_be_restricted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = next((path / IDENTITY.digest.hex()).glob("??/*"))
    os.utime(old, (old.stat().st_atime, old.stat().st_mtime - 7200))
    assert "pages deleted: 1; 16.4 kB" in kvern(capsys, "clear", path, "--older-than", "1h", "--yes")
    assert not old.exists()
    assert "pages deleted: 2; 32.8 kB" in kvern(capsys, "clear", path, "--identity", "0000", "--yes")
    assert [kept["pages"] for kept in json.loads(kvern(capsys, "ls", path, "--json"))] == [2]
    for digits, text in (("ffff", "no identity begins so"), ("00", "give 4 of its digits at least")):
        assert text in kvern(capsys, "clear", path, "--identity", digits, "--yes", code=2)
    assert "the age '1y' must be" in kvern(capsys, "clear", path, "--older-than", "1y", "--yes", code=2)


def test_clear_while_a_server_uses_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store: DiskStore
    with contextlib.closing(disk(f"{path}:1GB", IDENTITY)) as store:
        store.scan()
        assert all(get(store, range(3)))
        kvern(capsys, "clear", path, "--yes")
        assert not any(get(store, range(3)))
        assert all(put(store, range(3))) and all(get(store, range(3)))
    [kept] = json.loads(kvern(capsys, "ls", path, "--json"))
    assert kept["pages"] == 3 and kept["model"] == "tiny" and kept["hits"] == 6
    with contextlib.closing(PageFolder.existing(path)) as folder:
        assert folder.bytes.add() == 3 * on_disk(PAGE)
