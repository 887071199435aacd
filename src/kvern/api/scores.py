"""/v1/score: the probabilities of continuations after their contexts, by the model.

{"context": "2 + 2 =", "continuations": [" 4", " 5"]}
-> {"data": [{"index": 0, "logprob": -0.1, "tokens": 1, "is_greedy": true}, ...], "usage": {...}}
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvern.api.completion_answers import usage
from kvern.api.errors import HttpError
from kvern.api.fields import COMMON_FIELDS, MOST_SEQUENCES, WITHOUT_EFFECT, CommonFields, Refused, read_common, typed
from kvern.api.logprobs import finite
from kvern.api.unknown_fields import check_extras
from kvern.engine.scoring import Pair, Score, ScoredPrompt, score_of
from kvern.errors import shown
from kvern.request.outputs import RequestOutput
from kvern.serving.served import named

SCORE = "/v1/score"
FIELDS = frozenset({"context", "continuations", "logprobs", "add_special_tokens"})
KNOWN = FIELDS | WITHOUT_EFFECT | set(COMMON_FIELDS)
_PAIRS = "it is of pairs of texts; send text_1 and text_2"
REFUSED: Refused = {
    **dict.fromkeys(("instruction", "max_tokens_per_doc", "use_activation"), ((), _PAIRS)),
    "truncate_prompt_tokens": ((), "contexts and continuations are scored whole: shorten them"),
    "temperature": ((1,), "scores are of the model's own probabilities"),
}


@dataclass(frozen=True)
class ScoreBody:
    """Pairs to score; `logprobs` adds the score of each token."""

    pairs: list[Pair]
    add_special_tokens: bool
    logprobs: bool
    common: CommonFields


def read_score(body: Mapping[str, Any]) -> ScoreBody:
    """Checks a body. Raises HttpError."""
    check_extras(body, FIELDS, REFUSED)
    logprobs = typed(body, "logprobs", bool, False)
    special = typed(body, "add_special_tokens", bool, True)
    return ScoreBody(_read_pairs(body), special, logprobs, read_common(body))


def score_answer(
    outputs: Sequence[RequestOutput], prompts: Sequence[ScoredPrompt], model: str, logprobs: bool
) -> dict[str, Any]:
    """Returns the scores of pairs; `prompts` are made of the pairs."""
    scores = [score_of(output, prompt) for output, prompt in zip(outputs, prompts, strict=True)]
    return {
        "id": named(f"score-{uuid.uuid4().hex}"),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [_entry(index, score, logprobs) for index, score in enumerate(scores)],
        "usage": usage(outputs, 0),
    }


def _entry(index: int, score: Score, with_logprobs: bool) -> dict[str, Any]:
    entry = {
        "index": index,
        "object": "score",
        "logprob": finite(score.logprob),
        "tokens": len(score.token_ids),
        "is_greedy": score.is_greedy,
    }
    if with_logprobs:
        entry |= {"token_ids": score.token_ids, "token_logprobs": [finite(value) for value in score.token_logprobs]}
    return entry


def _read_pairs(body: Mapping[str, Any]) -> list[Pair]:
    """Reads the pairs of a body: one context for all continuations, or one for each. Raises HttpError."""
    context: Any = body.get("context")
    continuations = typed(body, "continuations", list, [])
    if not continuations:
        raise HttpError(400, "continuations is empty: give a list of texts or of token ids", param="continuations")
    if len(continuations) > MOST_SEQUENCES:
        message = f"continuations holds {len(continuations)}: this server scores {MOST_SEQUENCES} at most at once"
        raise HttpError(400, message, param="continuations")
    several = isinstance(context, list) and context and isinstance(context[0], str | list)
    contexts = context if several else [context] * len(continuations)
    if len(contexts) != len(continuations):
        message = (
            f"context holds {len(contexts)} contexts for {len(continuations)} continuations: give one for all, or one "
            "for each"
        )
        raise HttpError(400, message, param="context")
    pairs = list(zip(contexts, continuations, strict=True))
    for index, pair in enumerate(pairs):
        for name, value in zip(("context", "continuations"), pair, strict=True):
            if not isinstance(value, str | list):
                message = f"{name} is {shown(value)} for continuation {index}: it must be a text or a list of token ids"
                raise HttpError(400, message, param=name)
    return pairs
