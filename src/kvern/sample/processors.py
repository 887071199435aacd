"""Custom logits processors: Python code that changes logits on the device, of packages that the operator enables.

    entry point of an installed package --named in EngineConfig.logits_processors--> loaded when the engine starts
    request: {"name": {arguments}} --checked where requests are made--> join(slot), then apply(logits) at each token

Names and arguments come from requests, code never does. See docs/logits-processors.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from kvern.errors import ConfigError, InvalidParameter, shown
from kvern.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

GROUP = "kvern.logits_processors"
"""The group of entry points: each names a `LogitsProcessor` class that requests may use."""


@dataclass(frozen=True)
class ProcessorModel:
    """Facts about the model for the constructor of a processor."""

    folder: Path
    vocab_size: int
    """The number of columns of the logits; the tokenizer may have fewer tokens."""
    slots: int
    """Requests that run at the same time at most; they have the slots from 0 on."""
    max_model_len: int
    device: torch.device

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return Tokenizer(self.folder)


@dataclass(frozen=True)
class ProcessedRequest:
    """A request that enters a slot, with all of its tokens; after a preemption these include generated tokens."""

    arguments: Any
    """An instance of the processor's `Arguments`."""
    token_ids: Sequence[int]
    prompt_length: int


@dataclass(frozen=True)
class ProcessedRows:
    """N tokens to be sampled: one of each request, or several if the request has drafts.

    slots, positions                 on the host: the slot given to `join`, and the position of the token, which equals
                                     the number of tokens before it; tokens of one slot are adjacent and ascend
    device_slots, device_positions   [N] int64: the same on the device
    tokens                           [slots, max_model_len + 1] int32 on the device: row `slot` holds all tokens of the
                                     request, also the newest, which the host does not know yet, and then its drafts,
                                     which may differ in the next call; later entries are undefined
    """

    slots: Sequence[int]
    positions: Sequence[int]
    device_slots: torch.Tensor
    device_positions: torch.Tensor
    tokens: torch.Tensor

    @property
    def last_tokens(self) -> torch.Tensor:
        """The token before the one to be sampled, [N] int64."""
        return self.tokens[self.device_slots, self.device_positions - 1].long()


class LogitsProcessor(Protocol):
    """Changes the logits of all requests of a step that use it. It is constructed once, with a ProcessorModel."""

    Arguments: ClassVar[type[Any]]
    """The type of a request's arguments: a msgspec.Struct or a dataclass whose `__post_init__` checks the values."""

    def __init__(self, model: ProcessorModel) -> None: ...

    def join(self, slot: int, request: ProcessedRequest) -> None:
        """A request enters a slot; any earlier request of this slot has ended."""
        ...

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> None:
        """Changes `logits` [N, vocabulary] float32 in place.

        It may be called again for the same tokens, so any state must be derived from them.
        """
        ...


Processors = Mapping[str, type[LogitsProcessor]]
"""The processors of an engine by name, in the order in which they are applied."""


def load_processors(names: Sequence[str]) -> Processors:
    """Imports the classes that the entry points `names` name. Raises ConfigError."""
    if not names:  # to look at all installed packages takes a tenth of a second
        return {}
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    found = {}
    for name in names:
        if name not in installed:
            raise ConfigError(
                f"logits_processors names {name!r}: installed are {', '.join(sorted(installed)) or 'none'}; a package "
                f"provides them as entry points of group {GROUP!r}"
            )
        try:
            kind = installed[name].load()
        except Exception as error:  # whatever a module raises when it is imported
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"logits processor {name!r} ({installed[name].value}) cannot be loaded: {reason}"
            ) from error
        missing = [part for part in ("Arguments", "join", "apply") if not hasattr(kind, part)]
        if missing:
            raise ConfigError(
                f"logits processor {name!r} ({installed[name].value}) has no {' and no '.join(missing)}: it must be a "
                "class like kvern.sample.processors.LogitsProcessor"
            )
        found[name] = kind
    return found


def check_arguments(processors: Processors, asked: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks the processors and arguments of a request. Raises InvalidParameter."""
    for name, values in asked.items():
        if name not in processors:
            raise InvalidParameter(
                f"logits_processors names {shown(name)}: this engine has {', '.join(processors) or 'none'}; the option "
                "logits_processors enables more"
            )
        try:
            arguments(processors[name], values)
        except Exception as error:  # `__post_init__` is the package's own
            raise InvalidParameter(f"logits_processors: {name}: {' '.join(str(error).split())[:500]}") from error


def arguments(processor: type[LogitsProcessor], values: Mapping[str, Any]) -> Any:
    """Converts a request's arguments. Raises msgspec.ValidationError, or what the processor's `Arguments` raise."""
    return msgspec.convert(values, processor.Arguments)
