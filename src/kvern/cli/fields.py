"""The options of a command: the fields of its class, and of those that hold options."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from kvern.cli.options import SamplingOptions
from kvern.config import EngineConfig
from kvern.documentation import field_documents
from kvern.server.config import ServerConfig

if TYPE_CHECKING:
    from kvern.options.rules import Rule

GROUPS: dict[type, dict[str, str]] = {
    EngineConfig: {
        "model": "The model",
        "kv_cache": "The KV cache",
        "batching": "Scheduling",
        "attention_backend": "Kernels of a GPU",
        "proposer": "Plugins",
        "overlap": "Steps and caches",
        "tool_parser": "Tools and thinking",
        "adapters": "Adapters",
        "seed": "The engine",
    },
    ServerConfig: {
        "host": "Where the server listens",
        "api_key": "Who may ask",
        "models": "Several models",
        "max_queue": "How much they may ask",
        "stream_interval": "Answers",
        "grace_seconds": "The server",
    },
    SamplingOptions: {"max_tokens": "Sampling"},
}
"""Headings of the help, each before the option that is named first."""


@dataclass(frozen=True)
class Option:
    """One option of a command, as help shows it."""

    group: str
    name: str
    kind: Any
    default: Any
    text: str


def options_of(kind: type, group: str = "Options") -> Iterator[Option]:
    """Yields the options of a command: its fields, and the fields of those that hold options."""
    hints = typing.get_type_hints(kind, include_extras=True)
    documents = field_documents(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        group = GROUPS.get(kind, {}).get(field.name, group)
        if dataclasses.is_dataclass(hint):
            yield from options_of(typing.cast("type", hint), group)
        elif typing.get_origin(hint) is not Annotated:  # positional arguments
            yield Option(group, field.name, hint, field.default, documents[field.name])


def rules_of(options: Sequence[Option]) -> Mapping[str, Rule]:
    """Returns the rules for vLLM's flags that a command with these options takes."""
    from kvern.options.vllm import VLLM, VLLM_BENCH

    names = {option.name for option in options}
    return VLLM if "max_batch_requests" in names else VLLM_BENCH if "burstiness" in names else {}


def positional(kind: type) -> Iterator[tuple[str, str, bool]]:
    """Yields the positional arguments of a command: name, help, and whether it is optional."""
    documents = field_documents(kind)
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        hidden = typing.get_origin(hint) is Annotated and "Suppress" in map(repr, hint.__metadata__)  # tyro's mark
        if typing.get_origin(hint) is Annotated and not hidden:
            names = [found for item in hint.__metadata__ if (found := getattr(item, "metavar", None))]
            yield names[0] if names else name.upper(), documents[name], type(None) in typing.get_args(hint.__origin__)
