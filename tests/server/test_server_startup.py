"""What a server asks of its machine before it serves, and what it says where the machine does not have it."""

import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvern.errors import ConfigError
from kvern.io.open_files import raise_limit
from kvern.server.config import ServerConfig
from kvern.server.startup import OpenFiles, check_data_folder, check_tls, tell_systemd
from tests.support.certificates import certificate
from tests.support.served import PATIENCE, SMALL, serving


def test_a_data_folder_that_cannot_be_is_refused_if_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "new" / "one"):
        check_data_folder(ServerConfig(data_dir=folder), said.append)
    reason = f"data_dir {tmp_path}/file/kvern cannot be used: Not a directory"
    with pytest.raises(ConfigError, match=reason):
        check_data_folder(ServerConfig(data_dir=tmp_path / "file" / "kvern"), said.append)
    assert not said
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    check_data_folder(ServerConfig(), said.append)
    assert said == [f"warning: {reason}; files and batches are refused, and responses are lost at the end"]


def test_a_server_whose_own_folder_cannot_be_written_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / ("a" * 300)))
    with serving(*SMALL) as served:
        assert "cannot be used: File name too long; files and batches are refused" in served.said
        assert served.client().completions.create(model="kvern-1m", prompt="a", max_tokens=1).choices
        status, _, answer = served.raw("POST", "/v1/conversations", b"{}")
        assert status == 507 and "it has to be able to write its data_dir" in answer["error"]["message"]


def test_certificates_are_refused_with_the_file_that_is_wrong(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    (tmp_path / "other").mkdir()
    _, other = certificate(tmp_path / "other", "other")
    check_tls(ServerConfig(tls_cert=cert, tls_key=key))
    for options, reason in (
        ({"tls_cert": cert, "tls_key": other}, f"tls_key {other} is not the key of tls_cert {cert}"),
        ({"tls_cert": cert}, f"tls_cert {cert} is no certificate with its private key: give tls_key"),
        ({"tls_cert": cert, "tls_key": tmp_path / "none"}, f"tls_key {tmp_path}/none cannot be read: No such file"),
        ({"tls_cert": __file__, "tls_key": key}, "are no certificate and key in PEM"),
    ):
        paths = {name: Path(path) for name, path in options.items()}
        with pytest.raises(ConfigError, match=reason):
            check_tls(ServerConfig(**paths))


LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {}));"


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    script = LIMITED.format(64, 100) + "from kvern.io.open_files import raise_limit; print(raise_limit())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "100\n"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_that_take_nearly_all_files_are_reported_once_a_minute() -> None:
    said: list[str] = []
    files = OpenFiles(said.append)
    files.note(files.most - 100)
    assert not said
    for _ in range(3):
        files.note(files.most - 1)
    assert len(said) == 1


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_systemd("READY=1")  # without a socket, nothing happens
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with serving(*SMALL):
            assert listener.recv(100) == b"READY=1"
        assert listener.recv(100) == b"STOPPING=1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{tmp_path}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{tmp_path}")
        tell_systemd("READY=1")
        assert listener.recv(100) == b"READY=1"
