"""``kvern serve --help WORD``: the options about one word, of the many that there are."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from kvern.cli.flag_rules import flag
from kvern.cli.vllm_flags import VLLM
from kvern.config import EngineConfig
from kvern.documentation import field_documents
from kvern.errors import ConfigError
from kvern.server.config import ServerConfig


def help_word(arguments: Sequence[str]) -> str | None:
    """The word that is asked about; None if the command line asks something else."""
    if len(arguments) == 3 and arguments[0] == "serve" and arguments[1] in ("--help", "-h"):
        return arguments[2]
    return None


def print_help_about(word: str) -> int:
    """Print the options of the server whose name or text holds the word, and vLLM's of that name.

    Raises ConfigError if there is none.
    """
    wanted = word.lower().strip("-").replace("-", "_")
    found: list[str] = []
    shown = set()
    for name, rule in VLLM.items():
        if wanted in name:
            found.append(f"{flag(name)}\n      {rule.help()}\n")
            shown.add(getattr(rule, "option", None))
    for kind in (ServerConfig, EngineConfig):
        documents = field_documents(kind)
        for field in dataclasses.fields(kind):
            text = documents[field.name]
            if field.name in shown or wanted in field.name or wanted.replace("_", " ") in text.lower():
                found.append(f"{flag(field.name)}  (default: {_shown(field.default)})\n      {text}\n")
    if not found:
        raise ConfigError(f"no option of kvern serve is about {word!r}: kvern serve --help lists all")
    sys.stdout.write("\n".join(found))
    return 0


def _shown(value: Any) -> str:
    if value in (None, (), dataclasses.MISSING):
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
