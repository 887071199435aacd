"""Options of a request for the tokenization of its prompt."""

from dataclasses import dataclass, replace

from kvern.text.tokenizer import Tokenizer

ROOM_FOR_ANSWER = -1
"""A value of `most`: as many tokens as the context holds beside the answer."""
LONGEST_TRUNCATED = 1 << 17
"""Tokens of a text that is to be cut, where the model's context is shorter."""


@dataclass(frozen=True)
class Encoding:
    """Options for tokenization.

    add_special_tokens  adds the special tokens that the tokenizer puts around a text
    most                limit of tokens; beyond it the last ones stay, or the first if `keeps_end` is false
    keeps_special       a text is cut between the special tokens that are put around it
    """

    add_special_tokens: bool
    most: int | None = None
    keeps_end: bool = True
    keeps_special: bool = False

    def within(self, room: int) -> "Encoding":
        """These options for texts without an answer, with a limit of `room` tokens."""
        return self if self.most is None else replace(self, most=room if self.most < 0 else min(self.most, room))

    def encode(self, tokenizer: Tokenizer, text: str, max_model_len: int, answer: int | None) -> list[int]:
        """The tokens of a prompt with room for `answer` tokens of its answer. Raises InvalidRequest."""
        longest = max_model_len if self.most is None else max(max_model_len, LONGEST_TRUNCATED)
        token_ids = tokenizer.encode(text, self.add_special_tokens, most_tokens=longest)
        if self.most is None or not self.keeps_special or len(token_ids) <= self.most:
            return self.cut(token_ids, max_model_len, answer)
        of_text = tokenizer.encode(text, add_special_tokens=False)
        added = len(token_ids) - len(of_text)
        before = next((at for at in range(added) if token_ids[at : at + len(of_text)] == of_text), added)
        within = replace(self, most=max(self.most - added, 0)).cut(of_text, max_model_len, answer)
        return [*token_ids[:before], *within, *token_ids[before + len(of_text) :]][: self.most]

    def cut(self, token_ids: list[int], max_model_len: int, answer: int | None) -> list[int]:
        """The tokens of a prompt that remain within the limit."""
        if self.most is None:
            return token_ids
        most = max(max_model_len - (answer or 1), 1) if self.most == ROOM_FOR_ANSWER else self.most
        return token_ids[max(len(token_ids) - most, 0) :] if self.keeps_end else token_ids[:most]
