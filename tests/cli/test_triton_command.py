"""The command kvern triton: what it writes, and bad input."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from kvern.cli.main import main


def test_a_model_that_starts_kvern(tmp_path: Path) -> None:
    options = ["--options=--max-model-len 64 --served-model-name 'my model'", "--name", "m"]
    assert main(["triton", "a/kvern-1m", "--out", str(tmp_path / "here" / "models"), *options]) == 0
    config = (tmp_path / "here/models/m/config.pbtxt").read_text()
    (command,) = re.findall(r'key: "serve" value { string_value: "(.*)" }', config)
    assert (
        command
        == f"{shlex.quote(sys.executable)} -m kvern serve a/kvern-1m --max-model-len 64 --served-model-name 'my model'"
    )
    files = {path.name: path.read_text() for path in (tmp_path / "here/models/m/1").iterdir()}
    assert files.keys() == {"model.py", "kvern_model.py"}
    assert len(files["model.py"].splitlines()) < 200, "a user reads it"
    for name, text in files.items():
        compile(text, name, "exec")


def test_a_model_that_is_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["triton", "./my model/", "--out", "here", "--name", "m"]) == 0
    assert f"kvern serve '{tmp_path}/my model'\"" in Path("here/m/config.pbtxt").read_text()


def test_a_model_that_asks_a_server_that_runs(tmp_path: Path) -> None:
    for more in ([], ["--overwrite"]):
        assert main(["triton", "kvern-1m", "--out", str(tmp_path), "--socket", "/run/k.sock", *more]) == 0
    assert 'key: "socket" value { string_value: "/run/k.sock" }' in (tmp_path / "kvern-1m/config.pbtxt").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "out is missing: give the repository's folder"),
        (["--out", "here", "--name", "a/b"], "name is 'a/b': it must be of letters"),
        (["--out", "here", "--socket", "/x", "--options=--threads 1"], "options are '--threads 1' and socket is /x"),
        (["--out", "here", "--socket", "/" + "x" * 120], "the path of a socket has 107 bytes at most"),
        (["--out", "here", "--options=--thread 1"], "there is no option --thread: did you mean --threads?"),
        (["--out", "here", "--options=--threads '1"], "No closing quotation"),
        (["--out", "here", "--options=--port 80"], "the model itself gives --uds; leave the address out"),
        (["--out", "here", "--options=--api-key s"], "options hold a secret (--api-key, or a URL with a password)"),
        (["--out", "here", "--options=--api_key=s"], "set KVERN_API_KEY, or KVERN_ and the option's name, where"),
        (["--out", "here", "--options=--kv-tier valkey://u:s@host"], "options hold a secret"),
        (
            ["--out", "here", "--like", "tensorrtllm", "--socket", "/x", "--name", "tensorrt_llm"],
            "a step of the ensemble",
        ),
        (["--out", "file"], "file/kvern-1m/config.pbtxt cannot be written: Not a directory"),
        (["--out", "here", "--like", "tensorrtllm"], "like is tensorrtllm and socket is missing"),
        (["--out", "taken"], "taken/kvern-1m exists: choose another --name"),
    ],
)
def test_bad_input(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("taken/kvern-1m").mkdir(parents=True)
    assert main(["triton", "kvern-1m", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not Path("here").exists()
