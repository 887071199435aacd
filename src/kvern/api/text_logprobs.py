"""Log-probabilities of /v1/completions: tokens by their texts, and the offset of each in the text that is sent.

Tables of log-probabilities, here and in other APIs, are encoded one by one at once. Answers then hold no object for
each entry, which would make garbage collections slow.
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
"""The log-probabilities that are encoded at once."""


class TextOffsets:
    """Offsets of tokens in a text, in characters. Tokens that are parts of one character have the same offset.

    Special tokens that are left out of an answer have no length. For a prompt the `text` is known; tokens are searched
    in it, as tokenizers may put tokens and a blank before it.
    """

    def __init__(self, tokenizer: Tokenizer, options: AnswerOptions, start: int = 0, text: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
        found = []
        for token_id in token_ids:
            found.append(self._next)
            self._next += self._length(token_id)
        return found

    def _length(self, token_id: int) -> int:
        """Returns the number of characters that end with a token."""
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
    """Returns the log-probabilities of an answer, or of a part of it."""
    if completion.logprobs is None or options.logprobs is None:
        return None
    names = []
    logprobs = []
    tops = []
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
    """Returns how many tables of `count` entries are encoded before other tasks have a turn."""
    return max(1, ENTRIES_AT_ONCE // (1 + count))


def finite(logprob: float) -> float:
    """Returns a log-probability for JSON, which has no infinity: -9999, as OpenAI writes for impossible tokens."""
    return logprob if math.isfinite(logprob) else -9999.0


def token_name(token_id: int, options: AnswerOptions, tokenizer: Tokenizer) -> str:
    r"""Returns a token's text; for a part of a character its bytes, as ``bytes:\xe2\x80``, or its id if ids are
    wanted."""
    if options.ids_as_tokens:
        return f"token_id:{token_id}"
    data = tokenizer.id_to_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
