"""Coding agents that people use, as the package indexes have them: installed once, run in folders of their own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

INSTALLED = Path(__file__).parents[2] / ".clients"
"""Hundreds of megabytes that stay for the next run."""
UNREACHABLE = ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN", "ETARGET", "E404")
NOT_THERE = ("No matching distribution", "Failed to establish a new connection", "Temporary failure in name resolution")
MODEL = "scripted"


@dataclass(frozen=True)
class Agent:
    """A program: its package, how one asks it something in a session, and how it is told where the server is.

    `ask` makes a command of a question and of whether the session goes on; `prepare` writes its settings into its home
    and its working folder, for the server's address; `environment` is for that address too.
    """

    package: str
    version: str
    program: str
    ask: Callable[[str, bool], Sequence[str]]
    environment: Callable[[str], Mapping[str, str]] = lambda url: {}
    prepare: Callable[[Path, Path, str], None] = lambda home, work, url: None
    python: bool = False

    @property
    def folder(self) -> Path:
        """The folder in which the agent is installed."""
        return INSTALLED / f"{self.program}-{self.version}"

    @property
    def path(self) -> Path:
        """The program."""
        return self.folder / ("bin" if self.python else "node_modules/.bin") / self.program

    def install(self) -> None:
        """Once; skips the test where the package index or npm is missing."""
        if self.path.exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.python:
            _run([sys.executable, "-m", "venv", str(self.folder)])
            pip = [str(self.folder / "bin" / "pip"), "install", "--quiet", "--no-compile"]
            _run([*pip, f"{self.package}=={self.version}"])
        else:
            npm = shutil.which("npm")
            if npm is None:
                pytest.skip(f"there is no npm to install {self.package} with")
            options = ["--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(self.folder)]
            _run([npm, "install", *options, f"{self.package}@{self.version}"])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    if done.returncode:
        said = done.stdout + done.stderr
        if any(word in said for word in (*UNREACHABLE, *NOT_THERE)):
            pytest.skip(f"the package index cannot be reached, or lacks it: {said.strip().splitlines()[-1]:.200}")
        raise AssertionError(said)


@dataclass
class Session:
    """A conversation of an agent with the user, in a new home and a new working folder."""

    agent: Agent
    folder: Path
    url: str
    """The server's address, without /v1."""
    _begun: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.home, self.work = self.folder / "home", self.folder / "work"
        self.home.mkdir(parents=True)
        self.work.mkdir()
        self.agent.prepare(self.home, self.work, self.url)

    def ask(self, question: str) -> str:
        """Runs the program with a task and returns its output."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
        variables = {**kept, "HOME": str(self.home), "NO_COLOR": "1", **self.agent.environment(self.url)}
        command = [str(self.agent.path), *self.agent.ask(question, self._begun)]
        self._begun = True
        done = subprocess.run(
            command,
            cwd=self.work,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return said


def _codex_settings(home: Path, work: Path, url: str) -> None:
    (home / ".codex").mkdir()
    settings = f'model = "{MODEL}"\nmodel_provider = "kvern"\nmodel_reasoning_summary = "auto"\n'
    provider = f'[model_providers.kvern]\nname = "kvern"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    (home / ".codex" / "config.toml").write_text(settings + provider)


def _opencode_settings(home: Path, work: Path, url: str) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvern",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL}},
    }
    name = f"kvern/{MODEL}"
    settings = {"provider": {"kvern": provider}, "model": name, "small_model": name, "autoupdate": False}
    (work / "opencode.json").write_text(json.dumps(settings))


def _openai_variables(url: str) -> dict[str, str]:
    return {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": MODEL}


AGENTS = {
    "codex": Agent(
        "@openai/codex",
        "0.169.0",
        "codex",
        lambda question, goes_on: [
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            *(("resume", "--last") if goes_on else ()),
            question,
        ],
        prepare=_codex_settings,
    ),
    "qwen": Agent(
        "@qwen-code/qwen-code",
        "0.24.4",
        "qwen",
        lambda question, goes_on: [
            "--yolo",
            "--auth-type",
            "openai",
            *(("--continue",) if goes_on else ()),
            "-p",
            question,
        ],
        _openai_variables,
    ),
    "opencode": Agent(
        "opencode-ai",
        "1.18.33",
        "opencode",
        lambda question, goes_on: ["run", *(("--continue",) if goes_on else ()), question],
        lambda url: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        _opencode_settings,
    ),
    "claude": Agent(
        "@anthropic-ai/claude-code",
        "2.1.330",
        "claude",
        lambda question, goes_on: [
            "--dangerously-skip-permissions",
            *(("--continue",) if goes_on else ()),
            "-p",
            question,
        ],
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # it refuses to run without questions as root otherwise
        },
    ),
    "aider": Agent(
        "aider-chat",
        "0.86.2",
        "aider",
        lambda question, goes_on: [
            f"--model=openai/{MODEL}",
            "--edit-format=whole",
            "--no-git",
            "--yes-always",
            "--no-show-model-warnings",
            "--no-check-update",
            "--no-analytics",
            *(("--restore-chat-history",) if goes_on else ()),
            f"--message={question}",
        ],
        lambda url: {"OPENAI_API_KEY": "none", "OPENAI_API_BASE": f"{url}/v1"},
        python=True,
    ),
}
