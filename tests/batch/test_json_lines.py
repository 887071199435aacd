"""Characters that some programs take for the end of a line, byte order marks and other encodings."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ollama
import pytest

from kvern.batch.readers import open_reader
from kvern.cli.options import read_file
from kvern.errors import BatchFileError, ConfigError
from kvern.io.json_lines import json_line, read_json
from kvern.server.config import ServerConfig
from kvern.server.handlers.batches import check_rows, iter_rows
from kvern.server.keys import read_keys
from tests.support.served import Served

BREAKS = "".join(character for character in map(chr, range(1, 0x3000)) if len(f"a{character}b".splitlines()) > 1)
SAID = f"a{BREAKS}b"
MARK = "\ufeff"


def test_a_line_of_json_is_one_line_to_every_reader() -> None:
    assert {"\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029"} < set(BREAKS)
    value = {SAID: [SAID, "Â…â\u0080¨é\U0001f600"], "kept": msgspec.Raw(msgspec.json.encode(SAID))}
    line = json_line(value)
    assert line.decode().splitlines() == [line.decode()]
    assert json.loads(line) == {SAID: value[SAID], "kept": SAID}


BOUND: dict[str, Any] = {"structured": {"choice": [SAID]}, "max_tokens": 100, "stream": True}
CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", **BOUND}),
        ("/v1/completions", {"prompt": SAID, "echo": True, "max_tokens": 1, "stream": True}),
        ("/v1/chat/completions", {"messages": CHAT, **BOUND}),
        ("/v1/messages", {"messages": CHAT, **BOUND}),
        ("/v1/responses", {"input": "a", "structured": BOUND["structured"], "stream": True}),
        ("/api/chat", {"messages": CHAT, "format": {"enum": [SAID]}}),
    ],
    ids=["completions", "echo", "chat", "messages", "responses", "ollama"],
)
def test_streams_have_no_other_ends_of_lines(server: Served, path: str, body: dict[str, Any]) -> None:
    with httpx.stream("POST", server.url.removesuffix("/v1") + path, json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert all(line.startswith(("{", "data: ", "event: ")) for line in lines)
    values = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("{", "data: {"))]
    texts = "".join(text_of(value) for value in values)
    assert SAID in (json.loads(texts) if path == "/api/chat" else texts)


def text_of(value: dict[str, Any]) -> str:
    """What a chunk adds to an answer, in the shapes of all APIs."""
    delta = value.get("delta", "")
    if value.get("type") == "response.output_text.delta":
        return str(delta)
    choices = value.get("choices", [])
    held = [value.get("message", {}), *choices, *(choice.get("delta", {}) for choice in choices)]
    held += [delta] if isinstance(delta, dict) else []
    texts = [item.get("text") or item.get("content") for item in held]
    return "".join(text for text in texts if isinstance(text, str))


def test_ollamas_client_reads_them(server: Served) -> None:
    with ollama.Client(host=server.url.removesuffix("/v1")) as client:
        parts = client.generate("kvern-1m", "a", format={"enum": [SAID]}, stream=True)
        assert json.loads("".join(part.response for part in parts)) == SAID


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (rb'{"prompt": "\ud83d"}', "half of a surrogate pair, which is no character: send both"),
        (rb'{"prompt": "a\ude00b and more text"}', "half of a surrogate pair"),
        (rb'{"\ud83d": 1, "prompt": "a"}', "half of a surrogate pair"),
        (rb'{"prompt": "a", "stop": ["\ud83d\ud83d\ude00 and more text"]}', "half of a surrogate pair"),
        (b'{"prompt": "\xed\xa0\xbd"}', "it is not UTF-8 text"),
        ('{"prompt": "a"}'.encode("utf-16"), "it is UTF-16 text: write it as UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16-be"), "it is UTF-16 text: write it as UTF-8"),
        ('{"prompt": "a"}'.encode("utf-32"), "it is UTF-32 text: write it as UTF-8"),
        (b'{"prompt": "a', "truncated"),
    ],
    ids=range(9),
)  # fmt: skip
def test_what_is_wrong_with_a_body_is_said(server: Served, body: bytes, said: str) -> None:
    status, _, content = server.raw("POST", "/v1/completions", body)
    assert status == 400 and said in content["error"]["message"]


def test_a_byte_order_mark_means_nothing(server: Served, tmp_path: Path) -> None:
    assert server.raw("POST", "/v1/completions", (MARK + '{"prompt": "a", "max_tokens": 1}').encode())[0] == 200
    assert read_json((MARK + "[1]").encode()) == [1]
    row = '{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
    batch = tmp_path / "batch.jsonl"
    batch.write_text(MARK + row % "a" + MARK + row % "b" + MARK + "\n")  # two files that were put together
    assert check_rows(batch, "/v1/completions") == (2, [])
    assert len(list(iter_rows(batch, {"a"}))) == 1
    assert [found.values["custom_id"] for found in open_reader(batch)] == ["a", "b"]
    table = tmp_path / "table.csv"
    table.write_text(MARK + "prompt\na\n")
    assert [found.values for found in open_reader(table)] == [{"prompt": "a"}]
    options = tmp_path / "options.toml"
    options.write_text(MARK + "max_queue = 5\n")
    assert read_file(options) == {"max_queue": 5}
    keys = tmp_path / "keys"
    keys.write_text(MARK + "alice:secret\n" + MARK + "bob:other\n")
    given = read_keys(ServerConfig(api_key=(MARK + "third",), api_key_file=keys))
    assert {key.secret for key in given} == {b"secret", b"other", b"third"}


def test_files_in_other_encodings_are_refused_as_such(tmp_path: Path) -> None:
    row = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n' * 3
    for number, encoding in enumerate(("utf-16", "utf-16-le", "utf-16-be")):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(row, encoding=encoding)
        assert [error["message"] for error in check_rows(path, "/v1/completions")[1]] == [
            "the file is wrong: it is UTF-16 text: write it as UTF-8"
        ]
        with pytest.raises(BatchFileError, match="it is UTF-16 text: write it as UTF-8"):
            open_reader(path)
        path.rename(path.with_suffix(".csv"))
        with pytest.raises(BatchFileError, match="it is UTF-16 text: write it as UTF-8"):
            open_reader(path.with_suffix(".csv"))
    keys = tmp_path / "keys"
    keys.write_text("alice:secret\n", encoding="utf-16")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(ServerConfig(api_key_file=keys))
