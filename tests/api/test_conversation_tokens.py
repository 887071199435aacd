"""A conversation's tokens are the same whether its beginning is tokenized anew or known."""

import random
from pathlib import Path

import pytest
import tokenizers

from kvern.errors import InvalidRequest, PromptTooLong
from kvern.text.tokenizer import Tokenizer
from kvern.tools import encoding
from kvern.tools.encoding import SHORTEST_PIECE, ConversationEncoder
from tests.support.tiny_tokenizer import CORPUS, byte_level, save, sentencepiece

TEMPLATE = "<|user|>{{ messages[0].content }}</s><|assistant|>"
PARTS = ["<|user|>", "<|assistant|>", "</s>", "<s>", "<call>", "<", "|user", "s>", " ", "  \n", "漢字", "😀", *CORPUS]


class Counting(Tokenizer):
    """Counts the characters that it has tokenized."""

    characters = 0

    def encode_each(self, texts, add_special_tokens=False):  # type: ignore[no-untyped-def]
        self.characters += sum(map(len, texts))
        return super().encode_each(texts, add_special_tokens)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Counting:
    return Counting(save(tmp_path, byte_level(), template=TEMPLATE))


def texts(dice: random.Random, count: int) -> list[str]:
    return ["".join(dice.choices(PARTS, k=dice.randrange(5, 900))) for _ in range(count)]


def test_pieces_have_the_tokens_of_the_whole(tokenizer: Counting) -> None:
    dice, encoder = random.Random(3), ConversationEncoder(tokenizer)
    assert tokenizer.cutting_tokens(TEMPLATE) == ["</s>", "<|user|>", "<|assistant|>"]
    beginnings = texts(dice, 20)
    for _ in range(200):
        text = "".join(dice.sample(beginnings, 2)) + dice.choice(texts(dice, 1))
        assert encoder.encode(text, False, b"", 10**6) == tokenizer.encode(text, add_special_tokens=False)


def test_what_came_before_is_tokenized_once(tokenizer: Counting) -> None:
    encoder, dice = ConversationEncoder(tokenizer), random.Random(4)
    text = ""
    for _ in range(30):
        text += "<|user|>" + "hello world " * dice.randrange(20, 200) + "</s>"
        tokenizer.characters = 0
        encoder.encode(text + "<|assistant|>", False, b"one", 10**6)
        assert tokenizer.characters < SHORTEST_PIECE + 12 * 200 + 40
    tokenizer.characters = 0
    encoder.encode(text, False, b"two", 10**6)  # another namespace learns nothing
    assert tokenizer.characters == len(text)


def test_what_is_kept_is_bounded(tokenizer: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MOST_CHARACTERS", 10_000)
    encoder = ConversationEncoder(tokenizer)
    for number in range(40):
        text = f"{number}" + "hello " * 500 + "</s>end"
        assert encoder.encode(text, False, b"", 10**6) == tokenizer.encode(text, add_special_tokens=False)
        assert sum(len(piece) for _, piece in encoder._kept) == encoder._characters <= 10_000
    assert len(encoder._kept) == 3
    huge = "hello " * 5000 + "</s>end"
    assert encoder.encode(huge, False, b"", 10**6) == tokenizer.encode(huge, add_special_tokens=False)
    assert len(encoder._kept) == 3


def test_refusals_are_those_of_the_tokenizer(tokenizer: Counting) -> None:
    encoder = ConversationEncoder(tokenizer)
    with pytest.raises(PromptTooLong, match="maximum context length of 20 tokens has"):
        encoder.encode("hello" * 1000, False, b"", 20)
    with pytest.raises(InvalidRequest, match="half of a surrogate pair, which is no character"):
        encoder.encode("hello " * 500 + "</s>\ud800", False, b"", 10**6)


def test_a_text_is_cut_only_where_nothing_reaches_over_the_cut(tmp_path: Path) -> None:
    assert Tokenizer(save(tmp_path / "a", sentencepiece())).cutting_tokens(TEMPLATE) == []
    for name, other, left in (
        ("in", "[</s>]", ["<|user|>", "<|assistant|>"]),
        ("over", "x<|user", ["</s>", "<|assistant|>"]),
        ("strip", tokenizers.AddedToken("</s>", rstrip=True, special=True), ["<|user|>", "<|assistant|>"]),
        ("word", tokenizers.AddedToken("word", single_word=True), []),
    ):
        backend = byte_level()
        backend.add_special_tokens([other])
        found = Tokenizer(save(tmp_path / name, backend, template=TEMPLATE)).cutting_tokens(TEMPLATE)
        assert found == left, name
