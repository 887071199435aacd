"""Tokenizers that have more tokens than their model."""

from typing import Any

import msgspec


def within(vocab_size: int, text: str) -> str:
    """A `tokenizer.json` without tokens whose ids are beyond a model's `vocab_size`.

    Image and padding tokens are often appended to the vocabulary of a checkpoint whose embeddings were not extended.
    """
    held = msgspec.json.decode(text)
    model: dict[str, Any] = held["model"]
    added = held.get("added_tokens") or []
    vocabulary = model["vocab"]
    last = max((token["id"] for token in added), default=0)
    last = max(last, len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=0))
    if last < vocab_size:
        return text
    held["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    if isinstance(vocabulary, list):  # of pieces with their scores; the place is the id
        model["vocab"] = vocabulary[:vocab_size]
    else:
        model["vocab"] = kept = {token: number for token, number in vocabulary.items() if number < vocab_size}
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if _is_within(merge, kept)]
    return msgspec.json.encode(held).decode()


def _is_within(merge: str | list[str], vocabulary: dict[str, int]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in vocabulary and right in vocabulary and left + right in vocabulary
