"""Log-probabilities of /v1/completions: tokens by their texts, and where each begins in the text that is sent.

Tables of log-probabilities, here and in other APIs, are encoded one by one as soon as they are made: answers hold no
objects for single entries, through which the garbage collector would go in the midst of other work.
"""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from kvern.api.completions import AnswerOptions
from kvern.io.json_lines import as_json
from kvern.request.outputs import CompletionOutput
from kvern.text.tokenizer import Tokenizer

ENTRIES_AT_ONCE = 1024
"""Log-probabilities that are written in one go."""


class TextOffsets:
    """Where tokens begin in a text, in characters: those of a part of a character where that does.

    Special tokens that are left out of an answer take no room. Of a prompt the `text` is known, and its tokens are
    looked for in it, as tokenizers may put tokens and a blank before it.
    """

    def __init__(self, tokenizer: Tokenizer, options: AnswerOptions, start: int = 0, text: str | None = None) -> None:
        self._tokenizer, self._options, self._text = tokenizer, options, text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Of the next tokens."""
        found = []
        for token_id in token_ids:
            found.append(self._next)
            self._next += self._length(token_id)
        return found

    def _length(self, token_id: int) -> int:
        """How many characters of the text end with a token."""
        options, special = self._options, self._tokenizer.is_special(token_id)
        if self._text is None and special and options.skips_special and token_id not in options.visible:
            return 0
        piece = self._decoder.decode(self._tokenizer.id_to_bytes(token_id))
        if self._text is None or self._text.startswith(piece, self._next):
            return len(piece)
        if special:
            return 0
        has_blank = piece.startswith(" ") and self._text.startswith(piece[1:], self._next)
        return min(len(piece) - has_blank, len(self._text) - self._next)  # a normalizer may have changed it


def text_logprobs(
    completion: CompletionOutput, options: AnswerOptions, tokenizer: Tokenizer, offsets: TextOffsets
) -> dict[str, Any] | None:
    """Those of an answer, or of what is new in it."""
    if completion.logprobs is None or options.logprobs is None:
        return None
    names, logprobs, tops = [], [], []
    for token_id, table in zip(completion.token_ids, completion.logprobs, strict=True):
        logprobs.append(finite(table[token_id].logprob))
        names.append(token_name(token_id, options, tokenizer))
        named = {names[-1]: table[token_id]}
        for other, entry in table.items():
            if other != token_id:
                name = token_name(other, options, tokenizer)
                named[f"token_id:{other}" if name in named else name] = entry
        best = sorted(named.items(), key=lambda item: -item[1].logprob)
        tops.append(as_json({name: finite(entry.logprob) for name, entry in best}))
    return {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets.of(completion.token_ids),
    }


def tables_at_once(count: int) -> int:
    """How many tables of `count` entries are written before other tasks have their turn."""
    return max(1, ENTRIES_AT_ONCE // (1 + count))


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that could not be sampled."""
    return logprob if math.isfinite(logprob) else -9999.0


def token_name(token_id: int, options: AnswerOptions, tokenizer: Tokenizer) -> str:
    r"""A token's text; of a part of a character its bytes, as ``bytes:\xe2\x80``, or its id if ids are wanted."""
    if options.ids_as_tokens:
        return f"token_id:{token_id}"
    data = tokenizer.id_to_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
