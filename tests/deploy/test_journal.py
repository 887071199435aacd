"""The folder of a deployment: what stands of earlier processes, and how a bundle takes the place of another."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvern.cli.main import main
from kvern.deploy import journal, pipeline
from kvern.deploy.journal import Entry, Journal
from kvern.deploy.pipeline import Outcome
from kvern.deploy.stage import Asked, Work
from kvern.errors import ConfigError

ONE = {"model": "one"}
OTHER = {"model": "other"}


def no_exchange(one: Path, other: Path) -> None:
    """A file system that does not exchange folders."""
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def work(out: Path, asked: dict[str, Any], content: str, ends: bool = True) -> Journal:
    """Makes a bundle of one file, or begins it."""
    made = Journal(out)
    with made.held(asked, overwrite=True):
        made.begin("tune")
        (made.out / "content").unlink(missing_ok=True)
        (made.out / "content").write_text(content)
        if ends:
            made.finish()
    return made


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way in which a bundle takes the place of another."""
    if request.param != "exchange":
        monkeypatch.setattr(journal, "exchange", no_exchange)
    return str(request.param)


def test_a_bundle_is_replaced_in_the_working_directory(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    work(out, ONE, "one")
    monkeypatch.chdir(out)
    work(Path(), OTHER, "other")
    assert (out / "content").read_text() == "other"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["content", "journal"]


def test_a_working_directory_that_was_replaced_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deploy(asked: Asked, *_: object) -> Outcome:
        return Outcome([], [], Work(asked, work(asked.out, asked.identity, "other"), print))

    out = tmp_path / "out"
    work(out, ONE, "one")
    monkeypatch.chdir(out)
    monkeypatch.setattr(pipeline, "deploy", deploy)
    assert main(["deploy", "kvern-1m", "--out", ".", "--overwrite"]) == 0
    assert f"enter it again by cd {out}" in capsys.readouterr().err


def test_a_bundle_that_cannot_be_put_in_its_place_is_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(one: Path, other: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    work(tmp_path / "out", ONE, "one")
    with monkeypatch.context() as patch:
        patch.setattr(journal, "exchange", refuse)
        with pytest.raises(ConfigError, match=r"whole, and cannot be put in its place, .*out: Permission denied"):
            work(tmp_path / "out", OTHER, "other")
    assert (tmp_path / "out" / "content").read_text() == "one"
    again = Journal(tmp_path / "out")
    with again.held(OTHER, overwrite=False):
        assert (again.out / "content").read_text() == "other"
        again.finish()
    assert (tmp_path / "out" / "content").read_text() == "other"


@pytest.mark.parametrize("asked", [ONE, OTHER])
def test_what_was_begun_beside_a_whole_bundle_goes_on(asked: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    work(out, ONE, "one")
    begun = work(out, asked, "begun", ends=False)
    begun.write("tune", "key", Entry("", msgspec.Raw(b"1"), 0.0), 5.0)
    assert (out / "content").read_text() == "one"
    for _ in range(2):
        again = Journal(out)
        with again.held(asked, overwrite=False):
            assert again.is_beside and not again.is_copy
            assert again.read("tune", "key", Entry) is not None
            again.begin("verify")
            assert (again.out / "content").read_text() == "begun"
    with pytest.raises(ConfigError, match="has a bundle with model 'one'"), Journal(out).held({"model": "3"}, False):
        pass


def test_another_process_never_sees_a_bundle_missing(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, seen = tmp_path / "out", list[str]()

    def looking(self: Journal) -> None:
        second = Journal(out)
        with pytest.raises(ConfigError, match="being made by another process"), second.held(OTHER, True):
            pass
        seen.append((out / "content").read_text())

    def rename(source: Path, target: Path) -> None:
        moved(source, target)
        monkeypatch.setattr(os, "rename", moved)
        looking(Journal(out))

    work(out, ONE, "one")
    moved = os.rename
    monkeypatch.setattr(os, "rename", rename)
    if way == "exchange":
        swap = journal.exchange

        def exchange(one: Path, other: Path) -> None:
            swap(one, other)
            looking(Journal(out))

        monkeypatch.setattr(journal, "exchange", exchange)
    work(out, OTHER, "other")
    assert seen == ["other"] and (out / "content").read_text() == "other"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_folder_is_made_while_a_bundle_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    work(out, ONE, "one")
    check = Journal._check

    def moving(self: Journal, identity: dict[str, Any], overwrite: bool) -> None:
        check(self, identity, overwrite)
        out.rename(tmp_path / "moved")

    monkeypatch.setattr(Journal, "_check", moving)
    with pytest.raises(ConfigError, match="being made by another process"), Journal(out).held(ONE, False):
        pass
    assert not out.exists()


def test_a_replaced_bundle_that_a_killed_process_left_is_not_taken_for_a_begun_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    work(out, ONE, "one")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        work(out, OTHER, "other")
    assert (tmp_path / ".out.next" / "content").read_text() == "one"
    with pytest.raises(ConfigError, match="has a bundle with model 'other'"), Journal(out).held(ONE, False):
        pass
    with Journal(out).held(OTHER, False):
        assert not (tmp_path / ".out.next").exists()


@pytest.mark.parametrize("name", ["/", 250 * "a", 300 * "a", "circle"])
def test_a_folder_that_cannot_be_a_bundle_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    for model in ("kvern-1m", "none/deploy.toml"):
        assert main(["deploy", model, "--out", name]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"out {name:.80} cannot be" in line or f"out {name} is" in line, line
