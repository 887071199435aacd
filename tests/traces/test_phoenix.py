"""Traces in Arize Phoenix, a receiver of OTLP that others wrote, of the package arize-phoenix."""

import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import QUESTION, SMALL, eventually, serving

PHOENIX = shutil.which("phoenix") or ""
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PHOENIX, reason="phoenix of the package arize-phoenix is not on the path"),
]


@pytest.fixture
def phoenix(tmp_path: Path) -> Iterator[str]:
    """A Phoenix by its URL."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    given = {"PHOENIX_WORKING_DIR": str(tmp_path), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_TELEMETRY_ENABLED": "false"}
    given |= {"PHOENIX_PORT": str(ports[0]), "PHOENIX_GRPC_PORT": str(ports[1])}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([PHOENIX, "serve"], env=inherited | given, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        eventually(lambda: asked(f"{url}/healthz") is not None or process.poll() is not None)
        assert process.returncode is None, (tmp_path / "log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait()


def asked(url: str) -> bytes | None:
    with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())
    return None


def test_a_receiver_of_others_has_the_whole_tree(phoenix: str) -> None:
    spans: list[Any] = []

    def have_come() -> bool:
        answer = asked(f"{phoenix}/v1/projects/default/spans?limit=100")
        spans[:] = [] if answer is None else json.loads(answer)["data"]
        return any(span["name"] == "chat kvern-1m" for span in spans)

    with serving(*SMALL, "--otlp-traces-endpoint", phoenix, "--trace-share", "1") as served:
        served.client().chat.completions.create(model="kvern-1m", messages=QUESTION, max_tokens=20)
        eventually(have_come)
    names = {span["context"]["span_id"]: span["name"] for span in spans}
    assert {(span["name"], names.get(span["parent_id"], "")) for span in spans} == {
        ("kvern start", ""),
        ("chat kvern-1m", ""),
        ("engine", "chat kvern-1m"),
        ("detokenize", "chat kvern-1m"),
        ("queue", "engine"),
        ("prefill", "engine"),
        ("decode", "engine"),
        ("prefill chunk", "prefill"),
    }
    [whole] = [span for span in spans if span["name"] == "chat kvern-1m"]
    assert whole["span_kind"] == "LLM", "it knows the conventions for generative AI"
