"""Prompts that have a model write what is missing between a prefix and a suffix (fill in the middle)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvern.errors import InvalidRequest, shown

if TYPE_CHECKING:
    from kvern.text.tokenizer import Tokenizer

FORMS = """
<|fim_prefix|> PREFIX <|fim_suffix|> SUFFIX <|fim_middle|>
<fim_prefix> PREFIX <fim_suffix> SUFFIX <fim_middle>
<fim-prefix> PREFIX <fim-suffix> SUFFIX <fim-middle>
▁<PRE> PREFIX ▁<SUF> SUFFIX ▁<MID>
<｜fim▁begin｜> PREFIX <｜fim▁hole｜> SUFFIX <｜fim▁end｜>
<[fim-suffix]> SUFFIX <[fim-prefix]> PREFIX <[fim-middle]>
[SUFFIX] SUFFIX [PREFIX] PREFIX
"""
"""The tokens of families, and the order in which each was trained: Qwen2.5-Coder, CodeGemma and Granite 4; StarCoder,
StableCode and Granite Code; SantaCoder; CodeLlama; DeepSeek-Coder; Seed-Coder; Codestral."""
NAMED = ("prefix_token", "suffix_token", "middle_token")
"""The names of such tokens in tokenizer_config.json, for models that are not in the table."""
ENDS = "▁<EOT> <|fim_pad|> <|repo_name|> <|file_sep|> <|file_separator|> <fim_pad> <fim-pad> <file_sep> <|endoftext|>"
"""Tokens after which the text is of another file, where a model has them."""
BEFORE = "☺"
"""A character whose tokens are cut off again: SentencePiece puts a space before a text."""


@dataclass(frozen=True)
class Infill:
    """The form of one model. `ends` are ids of tokens that end an answer beside the model's own."""

    tokenizer: Tokenizer
    words: Sequence[str]
    ends: Sequence[int]

    def prompt(self, prefix: str | list[int], suffix: str) -> list[int]:
        """Returns the token ids of a prompt. Raises InvalidRequest."""
        return [*self.tokenizer.leading_special_tokens(), *self._ids(prefix, suffix)]

    def _ids(self, prefix: str | list[int], suffix: str) -> Iterator[int]:
        encode = self.tokenizer.encode_each
        for word in self.words:
            if word == "SUFFIX":
                before, whole = encode([BEFORE, BEFORE + suffix])
                is_cut = not self.tokenizer.is_byte_level and whole[: len(before)] == before
                yield from whole[len(before) :] if is_cut else encode([suffix])[0]
            elif word == "PREFIX":
                yield from encode([prefix])[0] if isinstance(prefix, str) else prefix
            else:
                yield self.tokenizer.token_to_id(word) or 0


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """Returns the form of a model, by the tokens that it has; None if it has none for this."""
    named = [tokenizer.named_token(name) or "" for name in NAMED]
    rows = [line.split() for line in FORMS.strip().splitlines()]
    rows.append([named[0], "PREFIX", named[1], "SUFFIX", named[2]])
    for row in rows:
        markers = [word for word in row if word not in ("PREFIX", "SUFFIX")]
        if all(tokenizer.token_to_id(word) is not None for word in markers):
            ends = (tokenizer.token_to_id(word) for word in (*markers, *ENDS.split()))
            return Infill(tokenizer, row, [token for token in ends if token is not None])
    return None


def needed_infill(tokenizer: Tokenizer, suffix: str) -> Infill:
    """Returns the form of a model. Raises InvalidRequest if it has none."""
    if (found := infill_of(tokenizer)) is None:
        raise InvalidRequest(
            f"suffix is {shown(suffix)}: this model's tokenizer has no tokens for filling gaps, such as <|fim_prefix|> "
            "or [SUFFIX]: take a code model that has them, or leave it out"
        )
    return found
