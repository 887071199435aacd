"""Log-likelihoods of continuations after their contexts, as evaluation harnesses use them.

A pair is one prompt with log-probabilities from the continuation on. Contexts come from the prefix cache, and pairs
with one context compute it once.
"""

import functools
import math
from collections.abc import Iterable, Sized
from dataclasses import dataclass

from kvern.engine.inputs import Prompt, as_list
from kvern.errors import InvalidRequest, shown
from kvern.request.outputs import RequestOutput
from kvern.request.sampling_params import SamplingParams
from kvern.text.tokenizer import Tokenizer

Pair = tuple[Prompt, Prompt]
"""Context and continuation, both texts or both token ids."""

MOST_CHARACTERS = 1 << 24
"""The limit of all pairs together in characters: each pair is tokenized as a whole."""


MOST_TOKENS = 1 << 22
"""The limit of all pairs together in token ids: a prompt is made of each."""


@dataclass(frozen=True)
class Score:
    """The log-likelihood of one continuation. Logarithms are natural."""

    logprob: float
    """The log-likelihood of the whole continuation: the sum over its tokens."""
    is_greedy: bool
    """True if greedy decoding after the context gives exactly this continuation."""
    token_ids: list[int]
    """The tokens of the continuation."""
    token_logprobs: list[float]
    context_tokens: int
    cached_tokens: int
    """The number of the context's tokens that came from the prefix cache."""


@dataclass(frozen=True)
class ScoredPrompt:
    """A pair as a prompt: `token_ids` of both, of which the first `context_tokens` are the context's."""

    token_ids: list[int]
    context_tokens: int

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters that compute it; the one token that is sampled is ignored."""
        return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=self.context_tokens)


def scored_prompts(
    tokenizer: Tokenizer, pairs: Iterable[Pair], add_special_tokens: bool = True, max_model_len: int | None = None
) -> list[ScoredPrompt]:
    """Returns pairs as prompts. Raises InvalidRequest, which names the pair.

    The tokens of a continuation are those of the joined text after those of the context; blanks at the end of the
    context count as the beginning of the continuation. An empty context is replaced by the token that begins texts, or
    else by the one that ends them.
    """
    encoder = PairEncoder(tokenizer, add_special_tokens, max_model_len)
    characters = 0
    tokens = 0
    pairs = list(pairs)
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidRequest(f"pair {index} is {shown(pair)}: it must be (context, continuation)")
        characters += sum(len(text) for text in pair if isinstance(text, str))
        ids = sum(len(side) for side in pair if not isinstance(side, str) and isinstance(side, Sized))
        if max_model_len is not None and ids >= max_model_len:
            raise InvalidRequest(
                f"continuation {index} has {ids} tokens with its context, and at most {max_model_len - 1} leave room "
                f"in the context of {max_model_len}: shorten it, or raise max_model_len if the model allows"
            )
        tokens += ids
    if tokens > MOST_TOKENS:
        raise InvalidRequest(
            f"the pairs have {tokens} tokens, contexts counted for each: at most {MOST_TOKENS}; send fewer at once"
        )
    if characters > MOST_CHARACTERS:
        raise InvalidRequest(
            f"the pairs have {characters} characters, contexts counted for each: at most {MOST_CHARACTERS}; send fewer "
            "at once, or token ids"
        )
    prompts = []
    for index, pair in enumerate(pairs):
        try:
            prompts.append(encoder.encode(*pair))
        except InvalidRequest as error:
            raise InvalidRequest(f"continuation {index}: {error}") from error
    return prompts


class PairEncoder:
    """Tokenizes pairs; a context that occurs several times in succession is tokenized once."""

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool, max_model_len: int | None) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._special = add_special_tokens
        self._context: tuple[str, list[int]] | None = None

    def encode(self, context: Prompt, continuation: Prompt) -> ScoredPrompt:
        """Returns one pair as a prompt. Raises InvalidRequest."""
        if isinstance(context, str) and isinstance(continuation, str):
            before, after = self._texts(context, continuation)
        elif isinstance(context, str) or isinstance(continuation, str):
            raise InvalidRequest("one of context and continuation is a text and the other is not: give both alike")
        else:
            before, after = as_list(context), as_list(continuation)
        if not before:
            raise InvalidRequest("the context is empty, and the model names no token that begins or ends a text")
        if not after:
            raise InvalidRequest("the continuation is empty: it needs at least one token")
        return ScoredPrompt(before + after, len(before))

    def _texts(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if not kept:
            return self._begin or self._first(), self._encode(continuation)
        if self._context is None or self._context[0] != kept:
            self._context = kept, self._encode(kept)
        before = self._context[1]
        after = self._encode(kept + continuation)[len(before) :]
        if continuation and not after:
            raise InvalidRequest(
                f"{shown(continuation)} adds no token to those of its context: both end in one token; begin the "
                "continuation at a word, or send token ids"
            )
        return self._begin + before, after

    @functools.cached_property
    def _begin(self) -> list[int]:
        return self._tokenizer.leading_special_tokens() if self._special else []

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, most_tokens=self._max_model_len)

    def _first(self) -> list[int]:
        """Returns the token for an empty context."""
        begins = self._tokenizer.bos_token_id
        return [begins] if begins is not None else list(self._tokenizer.eos_token_ids[:1])


def score_of(output: RequestOutput, prompt: ScoredPrompt) -> Score:
    """Returns the score of a pair from the engine's output. Raises RequestFailed if the request failed."""
    output.check()
    assert output.prompt_logprobs is not None
    token_ids = prompt.token_ids[prompt.context_tokens :]
    rows = list(output.prompt_logprobs.told.rows(prompt.context_tokens - output.prompt_logprobs.missing))
    logprobs = [row.logprobs[0] for row in rows]
    return Score(
        math.fsum(logprobs),
        all(row.rank == 1 for row in rows),
        token_ids,
        logprobs,
        prompt.context_tokens,
        output.cached_tokens,
    )
