"""How the text of a prompt becomes its tokens, where a request says something about it."""

from dataclasses import dataclass

from kvern.tokenizer import Tokenizer

ROOM_FOR_ANSWER = -1
"""As `most`: as many tokens as the model's context has beside the answer."""
LONGEST_TRUNCATED = 1 << 17
"""Tokens of a text that is to be cut, where the model's context is shorter."""


@dataclass(frozen=True)
class Encoding:
    """`add_special_tokens` puts those before the text that the tokenizer names; of more than `most` tokens, if that is
    given, the last ones stay, or with `keeps_end` false the first."""

    add_special_tokens: bool
    most: int | None = None
    keeps_end: bool = True

    def encode(self, tokenizer: Tokenizer, text: str, max_model_len: int, answer: int | None) -> list[int]:
        """The tokens of a prompt, whose answer may have `answer` tokens. Raises InvalidRequest."""
        longest = max_model_len if self.most is None else max(max_model_len, LONGEST_TRUNCATED)
        token_ids = tokenizer.encode(text, self.add_special_tokens, most_tokens=longest)
        return self.cut(token_ids, max_model_len, answer)

    def cut(self, token_ids: list[int], max_model_len: int, answer: int | None) -> list[int]:
        """What stays of the tokens of a prompt."""
        if self.most is None:
            return token_ids
        most = max(max_model_len - (answer or 1), 1) if self.most == ROOM_FOR_ANSWER else self.most
        return token_ids[-most:] if self.keeps_end else token_ids[:most]
