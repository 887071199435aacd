"""The requests of a load: random prompts, or those of a file."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvern.bench.serving import Sample
from kvern.bench.workloads import read_rows
from kvern.errors import ConfigError
from kvern.models.hub import resolve_model
from kvern.text.tokenizer import Tokenizer

_COMMON_WORDS = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by but some "
    "what there we can out other were all your when up use word how said an each she which do their time if will way "
    "about many then them would like so these her long make thing see him two has look more day could go come did my "
    "no most who over know than call first people may down side been now find any new work part take get place made"
)
WORDS = _COMMON_WORDS.split()
"""Words that nearly every tokenizer has as one token with the space before it."""

CHARACTERS_PER_TOKEN = 4
"""A rough value for English, for the lengths of texts without a tokenizer."""


class Prompts:
    """Random prompts of a given length: token ids below `vocabulary`, or common words if that is None."""

    def __init__(self, vocabulary: int | None, rng: random.Random) -> None:
        self.rng = rng
        self._as_text = vocabulary is None
        size = len(WORDS) if vocabulary is None else vocabulary
        self.range = range(0 if vocabulary is None else min(1000, size // 2), size)
        """The range of ids; low ids are often special tokens and are left out."""

    def tokens(self, count: int) -> list[int]:
        """Returns random ids; for words, their numbers."""
        return self.rng.choices(self.range, k=count)

    def sample(self, tokens: list[int], output_tokens: int, kind: str = "") -> Sample:
        """Returns a request with these tokens as its prompt."""
        prompt = " ".join(WORDS[token] for token in tokens) if self._as_text else tokens
        return Sample(prompt, output_tokens, len(tokens), kind)

    def length(self, mean: int, ratio: float) -> int:
        """Returns a random length within `ratio` of its mean; at least 1."""
        return max(1, self.rng.randint(int(mean * (1 - ratio)), int(mean * (1 + ratio))))


def random_samples(
    prompts: Prompts, count: int, input_tokens: int, output_tokens: int, ratio: float = 0.0, prefix_tokens: int = 0
) -> list[Sample]:
    """Returns requests with lengths within `ratio` of the given ones, after a prefix that all share."""
    prefix = prompts.tokens(prefix_tokens)
    return [
        prompts.sample(
            prefix + prompts.tokens(prompts.length(input_tokens, ratio)), prompts.length(output_tokens, ratio)
        )
        for _ in range(count)
    ]


def repeated_prefixes(
    prompts: Prompts, count: int, prefix_tokens: int, suffix_tokens: int, prefixes: int, output_tokens: int
) -> list[Sample]:
    """Returns requests with one of several prefixes and a suffix of their own, in random order."""
    heads = [prompts.tokens(prefix_tokens) for _ in range(prefixes)]
    samples = [
        prompts.sample(heads[number % prefixes] + prompts.tokens(suffix_tokens), output_tokens)
        for number in range(count)
    ]
    prompts.rng.shuffle(samples)
    return samples


def read_tokenizer(model: Path) -> Tokenizer:
    """Returns the tokenizer of a folder or of a model. Raises ConfigError or ModelNotFound if there is none."""
    tokenizer = Tokenizer(model if model.is_dir() else resolve_model(model, weights=False))
    if not tokenizer.available:
        raise ConfigError(f"tokenizer {model} has no tokenizer.json: give a model that has one")
    return tokenizer


def token_counter(folder: Path | None) -> Callable[[str], int]:
    """Returns a function that counts the tokens of texts, roughly if there is no tokenizer."""
    if folder is None:
        return lambda text: max(1, len(text) // CHARACTERS_PER_TOKEN)
    tokenizer = read_tokenizer(folder)
    return lambda text: len(tokenizer.encode(text))


def sharegpt_samples(
    path: Path, count: int, rng: random.Random, tokens: Callable[[str], int], output_tokens: int | None, longest: int
) -> list[Sample]:
    """Returns first questions of conversations with the lengths of their answers; very short and too long ones are left
    out."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset {path} cannot be read: {error}") from None
    found = []
    if isinstance(rows, list):
        rng.shuffle(rows)
        for row in rows:
            turns = row.get("conversations", []) if isinstance(row, dict) else []
            texts = [
                turn["value"] for turn in turns[:2] if isinstance(turn, dict) and isinstance(turn.get("value"), str)
            ]
            if len(texts) < 2:
                continue
            read, written = tokens(texts[0]), output_tokens or tokens(texts[1])
            if read >= 4 and written >= 4 and read + written <= longest:
                found.append(Sample(texts[0], written, read))
            if len(found) == count:
                break
    return _repeated(found, count, f"dataset {path} has no conversations of at most {longest} tokens")


def custom_samples(path: Path, count: int, output_tokens: int, tokens: Callable[[str], int]) -> list[Sample]:
    """Returns the prompts of a JSONL file: {"prompt": text or ids} or {"messages": [...]}, "output_tokens"."""
    found = []
    for place, row in read_rows(path, "dataset"):
        try:
            prompt: Any = row["messages"] if "messages" in row else row["prompt"]
            written = int(row.get("output_tokens", output_tokens))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f'{place}: {error!r}; a line is {{"prompt": "text"}}') from None
        if not isinstance(prompt, str | list) or not prompt or written < 1:
            raise ConfigError(f"{place}: the prompt must be text or a list, output_tokens at least 1")
        found.append(Sample(prompt, written, tokens(prompt) if isinstance(prompt, str) else len(prompt)))
        if len(found) == count:
            break
    return _repeated(found, count, f"dataset {path} has no prompts")


def _repeated(samples: Sequence[Sample], count: int, nothing: str) -> list[Sample]:
    if not samples:
        raise ConfigError(nothing)
    return [samples[number % len(samples)] for number in range(count)]
