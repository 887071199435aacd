"""Workloads on which engines are compared: prompts as token ids, and the number of tokens that each request generates.

The same name and vocabulary give the same work on any machine. Token ids are drawn from 1000 (half of a vocabulary that
is smaller than 2000) up to the vocabulary's size.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvern.errors import ConfigError, did_you_mean
from kvern.io.files import reason


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at once."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    """The number of tokens that each request generates."""

    @property
    def longest(self) -> int:
        """The number of tokens of the longest request, prompt and answer."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.lengths, strict=True))

    @property
    def digest(self) -> str:
        """A hash of the prompts and lengths, which tells this workload from others."""
        return hashlib.sha256(json.dumps([self.prompts, self.lengths]).encode()).hexdigest()[:16]


Requests = tuple[list[list[int]], list[int]]


def _tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    low = min(1000, vocabulary // 2)
    return [rng.randrange(low, vocabulary) for _ in range(count)]


def mixed(vocabulary: int, requests: int = 256) -> Requests:
    """Prompts and answers of 100 to 1024 tokens."""
    rng = random.Random(0)
    prompts = [_tokens(rng, rng.randint(100, 1024), vocabulary) for _ in range(requests)]
    return prompts, [rng.randint(100, 1024) for _ in range(requests)]


def decode(vocabulary: int, batch: int) -> Requests:
    """Prompts of 128 tokens, answers of 256: nearly all time is decode."""
    rng = random.Random(1 + batch)
    return [_tokens(rng, 128, vocabulary) for _ in range(batch)], [256] * batch


def prefill(vocabulary: int, requests: int = 64, length: int = 4096) -> Requests:
    """Long prompts, answers of 8 tokens."""
    rng = random.Random(2)
    return [_tokens(rng, length, vocabulary) for _ in range(requests)], [8] * requests


def shared_prefix(vocabulary: int, requests: int = 256, prefix: int = 2048) -> Requests:
    """Prompts of a common prefix and 128 tokens of their own, answers of 64."""
    rng = random.Random(3)
    head = _tokens(rng, prefix, vocabulary)
    return [head + _tokens(rng, 128, vocabulary) for _ in range(requests)], [64] * requests


WORKLOADS: dict[str, Callable[[int], Requests]] = {
    "mixed256": mixed,
    **{f"decode{batch}": partial(decode, batch=batch) for batch in (1, 8, 32, 64, 128, 256)},
    "prefill64x4096": prefill,
    "shared2048x256": shared_prefix,
}
SUITES = {
    "small": ("mixed256", "decode1", "decode64"),
    "brief": ("mixed256", "decode1", "decode32", "prefill64x4096"),
    "full": (
        "mixed256",
        "decode1",
        "decode8",
        "decode32",
        "decode128",
        "decode256",
        "prefill64x4096",
        "shared2048x256",
    ),
}


def resolve(names: tuple[str, ...], vocabulary: int) -> list[Workload]:
    """Returns the workloads with these names, of these suites, and in these JSONL files, in order. Raises
    ConfigError."""
    return [_make(single, vocabulary) for name in names for single in SUITES.get(name, (name,))]


def _make(name: str, vocabulary: int) -> Workload:
    if name in WORKLOADS:
        prompts, lengths = WORKLOADS[name](vocabulary)
        return Workload(name, prompts, lengths)
    path = Path(name)
    if path.suffix == ".jsonl" or path.exists():
        return _read(path, vocabulary)
    known = [*WORKLOADS, *SUITES]
    hint = did_you_mean(name, known) or f": choose one of {', '.join(known)}, or a .jsonl file"
    raise ConfigError(f"workload {name!r} is unknown{hint}")


def _read(path: Path, vocabulary: int) -> Workload:
    prompts, lengths = [], []
    for place, row in read_rows(path, "workload"):
        try:
            prompt, length = row["prompt_token_ids"], row["max_tokens"]
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f'{place}: {error!r}; a line is {{"prompt_token_ids": [1, 2], "max_tokens": 64}}'
            ) from None
        valid = isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt)
        if not valid or not isinstance(length, int) or length < 1 or max(prompt) >= vocabulary or min(prompt) < 0:
            raise ConfigError(f"{place}: prompt_token_ids must be token ids below {vocabulary}, max_tokens at least 1")
        prompts.append(prompt)
        lengths.append(length)
    if not prompts:
        raise ConfigError(f"workload {path} has no requests")
    return Workload(path.stem, prompts, lengths)


def read_rows(path: Path, what: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of a JSONL file, each with its place for messages, in which `what` names the file.

    Raises ConfigError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {reason(error)}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: it is not JSON: {error}") from None
        yield f"{path}, line {number}", row
