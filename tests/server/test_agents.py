"""Whole sessions of the coding agents that people use, with a server and a model that calls their tools."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import AGENTS, MODEL, Session
from tests.support.scripted_model import Call, make_scripted_model
from tests.support.served import Served, eventually, serving

WRITTEN = "written by a tool"
COMMAND = f"printf '{WRITTEN}' > made.txt"
DONE = "The file made.txt is there now."
LOOK = "The user wants a file, and a command can write it."
CALLS = [
    Call("exec_command", {"cmd": COMMAND}, LOOK),  # Codex
    Call("shell", {"command": ["sh", "-c", COMMAND]}, LOOK),
    Call("run_shell_command", {"command": COMMAND, "description": "Write it", "is_background": False}, LOOK),  # Qwen
    Call("bash", {"command": COMMAND, "description": "Writes the file"}, LOOK),  # OpenCode
    Call("Bash", {"command": COMMAND, "description": "Write the file"}, LOOK),  # Claude Code
]
LISTING = f"made.txt\n```\n{WRITTEN}\n```\n"
"""How aider wants a whole file: it knows no tools."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted_model(tmp_path_factory.mktemp("agents") / "model", CALLS, LISTING, DONE)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """One for all agents, and the file of its log."""
    folder = tmp_path_factory.mktemp("server")
    log = folder / "log"
    options = ("--log-requests", "summary", "--data-dir", str(folder / "data"), "--threads", "1")
    with serving(str(model), "--served-model-name", MODEL, *options, log=log) as served:
        yield served, log


QUESTIONS = ("Write the file made.txt", "Write it again, please")


@pytest.mark.nightly  # they start for longer than they ask, and speak APIs that by day other clients speak, too
@pytest.mark.parametrize("name", AGENTS)
def test_a_session(name: str, server: tuple[Served, Path], tmp_path: Path) -> None:
    agent, (served, log) = AGENTS[name], server
    agent.install()
    session = Session(agent, tmp_path, f"http://{served.host}:{served.port}")
    before = log.stat().st_size
    for question in QUESTIONS:
        said = session.ask(question)
        made = session.work / "made.txt"
        assert made.read_text().strip() == WRITTEN
        assert (DONE if agent.program != "aider" else "Applied edit to made.txt") in said
        made.unlink()

    def answers() -> list[tuple[str, str, str]]:
        return re.findall(r" (GET|POST|HEAD|OPTIONS) (\S+) (\d+) ", log.read_bytes()[before:].decode())

    eventually(lambda: len(answers()) >= len(QUESTIONS))
    assert [answer for answer in answers() if int(answer[2]) >= 400] == []
