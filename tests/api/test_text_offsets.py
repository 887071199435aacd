"""Where tokens begin in the text that is sent, whatever a tokenizer puts before it or makes of it."""

from typing import cast

import pytest

from kvern.api.completions import AnswerOptions
from kvern.api.logprobs import TextOffsets
from kvern.text.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|user|>"]


class Written:
    """Token ids are places in a list of texts and of parts of characters; the first are special."""

    def __init__(self, *tokens: str | bytes) -> None:
        self._tokens = [*SPECIAL, *tokens]

    def id_to_bytes(self, token_id: int) -> bytes:
        token = self._tokens[token_id]
        return token.encode() if isinstance(token, str) else token

    def is_special(self, token_id: int) -> bool:
        return token_id < len(SPECIAL)


@pytest.mark.parametrize(
    ("tokens", "ids", "text", "expected"),
    [
        (["The", " fox"], [0, 3, 4], "The fox", [0, 0, 3]),
        (["The", " fox"], [0, 3, 4, 1], "The fox", [0, 0, 3, 7]),
        (["The", " fox"], [0, 2, 3], "<|user|>The", [0, 0, 8]),
        ([" The", " fox"], [0, 3, 4], "The fox", [0, 0, 3]),
        ([" The", " fox"], [0, 3, 4], " The fox", [0, 0, 4]),
        (["a", b"\xe6\x97", b"\xa5", "b"], [3, 4, 5, 6], "a日b", [0, 1, 1, 2]),
        (["a", b"\xf0", b"\x9f", b"\x98", b"\x80", "b"], [3, 4, 5, 6, 7, 8], "a\U0001f600b", [0, 1, 1, 1, 1, 2]),
        (["the", " fox", "s"], [0, 3, 4, 5], "The Foxs", [0, 0, 3, 7]),
        (["a", b"\xff", "b"], [3, 4, 5], "a\ufffdb", [0, 1, 2]),
        (["long"], [3, 3], "lo", [0, 2]),
    ],
    ids=range(10),
)
def test_offsets_of_a_prompt(tokens: list[str | bytes], ids: list[int], text: str, expected: list[int]) -> None:
    tokenizer = cast("Tokenizer", Written(*tokens))
    assert TextOffsets(tokenizer, AnswerOptions(), text=text).of(ids) == expected


def test_offsets_of_an_answer() -> None:
    """Special tokens take room where they are a part of the text; parts that come one by one add up."""
    tokenizer, ids = cast("Tokenizer", Written(" a", b"\xe6\x97", b"\xa5", "b")), [3, 2, 4, 5, 6, 1]
    for options, expected in (
        (AnswerOptions(), [5, 7, 7, 7, 8, 9]),
        (AnswerOptions(visible=frozenset({2})), [5, 7, 15, 15, 16, 17]),
        (AnswerOptions(skips_special=False), [5, 7, 15, 15, 16, 17]),
    ):
        assert TextOffsets(tokenizer, options, 5).of(ids) == expected
        growing = TextOffsets(tokenizer, options, 5)
        assert [place for token_id in ids for place in growing.of([token_id])] == expected
