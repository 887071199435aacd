"""Tables and lines of commands: whole on a terminal of any width, and neither cut nor broken where there is none."""

import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from kvern.cli.main import COMMANDS as COMMANDS_BY_WORDS
from kvern.cli.main import main
from kvern.cli.output import make_table, print_figures, print_lines, print_tables

COMMANDS = {
    "list": ("list",),
    "models": ("models", "kvern-1m"),
    "matrices": ("models", "kvern-1m", "--statistics"),
    "plan": ("plan", "kvern-12m", "--hardware", "2x h200"),
}
LEFT_OUT = {"model", "layers", "matrix", "keys", "values", "split", "scales", "saturated"}
"""Words of the headings of first columns and of empty ones, which the lines of a narrow terminal leave out."""
CODES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def same_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("kvern.cli.model_report.available_memory", lambda: 20_000_000_000)


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in CODES.sub("", capsys.readouterr().out).splitlines()]


def words(lines: list[str]) -> set[str]:
    return {word for line in lines for word in line.split() if "─" not in word}


@pytest.mark.sample(4)
@pytest.mark.parametrize("columns", [120, 80, 60, 40])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_fits_the_terminal_and_breaks_no_word(
    command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*COMMANDS[command]]) == 0
    piped = shown(capsys)
    on_terminal(monkeypatch, columns)
    assert main([*COMMANDS[command]]) == 0
    lines = shown(capsys)
    assert [line for line in lines if len(line) > columns and len(line.split()) > 1] == []
    assert words(piped) - LEFT_OUT <= words(lines)
    assert "…" not in "".join([*lines, *piped])


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_terminal_nothing_is_broken(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*COMMANDS[command]]) == 0
    wide = shown(capsys)
    monkeypatch.setenv("COLUMNS", "20")
    assert main([*COMMANDS[command]]) == 0
    assert shown(capsys) == wide


@pytest.mark.sample(20)
@pytest.mark.parametrize("columns", [80, 60, 40])
@pytest.mark.parametrize("command", ["", "bench", *map(" ".join, COMMANDS_BY_WORDS)])
def test_help_fits_the_terminal(
    command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    asked = [*command.split(), "--help"]
    assert main(asked) == 0
    wide = shown(capsys)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(asked) == 0
    lines = shown(capsys)
    assert [line for line in lines if len(line) > columns and len(line.split()) > 1] == []
    assert "".join("".join(lines).split()) == "".join("".join(wide).split())


def test_notes_on_other_names_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["serve", "--help", "kv"]) == 0
    lines = shown(capsys)
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("  --kv-transfer-config, of vLLM, is refused:") for line in lines)


@pytest.mark.nightly
def test_a_real_terminal_of_60_columns_has_its_lines() -> None:
    parent, child = pty.openpty()
    ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "kvern", "plan", "kvern-1m", "--hardware", "2x h200"]
    with subprocess.Popen(command, stdout=child, env=environment | {"TERM": "xterm"}) as process:
        os.close(child)
        text = b""
        while True:
            try:
                text += (part := os.read(parent, 65536))
            except OSError:  # the other end is closed
                break
            if not part:
                break
    os.close(parent)
    assert process.returncode == 0
    lines = CODES.sub("", text.decode()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 60
    assert "  weights a card  1.1 MB" in lines


def test_what_a_table_does_with_less_and_less_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def table() -> None:
        made = make_table("name of it", "format", "tokens a second", title="a title of [words]")
        made.add_row("first [red] one", "int8", "1,234.5")
        made.add_row("", "bfloat16", "2.0")
        print_tables(made)

    on_terminal(monkeypatch, 80)
    table()
    title, _, heading, rule, *rows, _ = shown(capsys)
    assert title == "a title of [words]" and set(rule) == {" ", "─"}
    assert heading == " name of it       format    tokens a second" and rows[0].startswith(" first [red] one")
    assert [len(row) for row in rows] == [len(heading)] * 2
    monkeypatch.setenv("COLUMNS", "40")
    table()
    narrower = shown(capsys)
    assert words(narrower) >= {"tokens", "second", "1,234.5", "[red]"} and max(map(len, narrower)) <= 40
    monkeypatch.setenv("COLUMNS", "24")
    table()
    assert shown(capsys) == [
        "a title of [words]",
        "first [red] one",
        "  format           int8",
        "  tokens a second",
        "1,234.5",
        "first [red] one",
        "  format",
        "bfloat16",
        "  tokens a second  2.0",
        "",
    ]


def test_figures_and_paths_are_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_terminal(monkeypatch, 30)
    print_figures("kvern run", [("requests", "12"), ("error", "2.5% at most: model.layers.0.mlp")])
    assert shown(capsys) == ["kvern run", "requests: 12", "error: 2.5% at most:", "model.layers.0.mlp", ""]
    path = "/a/folder/with/a/name/that/is/long"
    print_lines(f"it is in {path}")
    assert shown(capsys) == ["it is in", path]
