"""`kvern completion`: what bash completes with the script that is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPLETED = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p kvern | sed 's/.*-F \\([^ ]*\\).*/\\1/') kvern "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "kvern.cli.main", "completion"]
    done = subprocess.run([*command, "bash", "--install"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "bash-completion" / "completions" / "kvern"
    assert str(script) in done.stdout

    def completed(*words: str) -> list[str]:
        typed = subprocess.run(
            ["bash", "-c", COMPLETED, "bash", str(script), *words], capture_output=True, text=True, timeout=60
        )
        assert typed.returncode == 0, typed.stderr
        return [line.strip() for line in typed.stdout.split()]

    assert {"serve", "pull"} <= set(completed("kvern", ""))
    assert completed("kvern", "serv") == ["serve"]
    assert completed("kvern", "serve", "--max-model") == ["--max-model-len"]


@pytest.mark.nightly
def test_a_script_for_zsh_is_printed() -> None:
    command = [sys.executable, "-m", "kvern.cli.main", "completion", "zsh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("#compdef kvern") and "--max-model-len" in done.stdout
