"""The OpenAPI description of embeddings, scores and reranking."""

from kvern.api.embeddings import EMBEDDINGS
from kvern.api.limits import MOST_SEQUENCES
from kvern.api.rerank import RERANK
from kvern.api.scores import SCORE
from kvern.api.text_pairs import MOST_PAIRS, NAMES
from kvern.server.openapi.bodies import common_fields, prompts, token_of
from kvern.server.openapi.schemas import (
    LISTING,
    NAMED,
    NUMBER,
    OBJECT,
    SWITCH,
    TEXT,
    WHOLE,
    Schema,
    listed,
    one_of,
    optional,
    post,
    record,
)

COMPARED: Schema = {"anyOf": [NAMED, record({"text": NAMED}, "text")]}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
CUT: Schema = optional({"anyOf": [POSITIVE, {"type": "integer", "enum": [-1]}]})
LOGPROB = record(
    {
        "index": WHOLE,
        "logprob": NUMBER,
        "tokens": WHOLE,
        "is_greedy": SWITCH,
        "token_ids": listed(WHOLE),
        "token_logprobs": listed(NUMBER),
    },
    "index",
    "logprob",
    "tokens",
    "is_greedy",
)
PAIR_SCORE = record({"index": WHOLE, "score": NUMBER}, "index", "score")


def score_paths(models: list[str], vocab_size: int) -> dict[str, Schema]:
    """Returns the routes of embeddings, scores and reranking."""
    return {
        EMBEDDINGS: {
            "post": post(
                "Embeddings of texts, for embedding models.",
                record(
                    {
                        **common_fields(models),
                        "input": prompts(vocab_size),
                        "dimensions": optional(POSITIVE),
                        "normalize": optional(SWITCH),
                        "encoding_format": optional(one_of("float", "base64")),
                        "add_special_tokens": optional(SWITCH),
                        "truncate_prompt_tokens": CUT,
                        "truncation_side": optional(one_of("left", "right")),
                    },
                    "input",
                ),
                LISTING,
            )
        },
        SCORE: {
            "post": post(
                "Probabilities of continuations after their contexts; or relevance of texts to others, for rerankers "
                "and embedding models.",
                {"anyOf": [_continuations(models, vocab_size), *(_pairs(models, names) for names in NAMES)]},
                record(
                    {"object": one_of("list"), "data": listed({"anyOf": [LOGPROB, PAIR_SCORE]}), "usage": OBJECT},
                    "object",
                    "data",
                    "usage",
                ),
            )
        },
        RERANK: {
            "post": post(
                "Documents in the order of their relevance to a query; also as /rerank and /v2/rerank.",
                record(
                    {
                        **common_fields(models),
                        **_limits(),
                        "query": NAMED,
                        "documents": listed(COMPARED, minItems=1, maxItems=MOST_PAIRS),
                        "top_n": optional({"type": "integer", "minimum": 0}),
                        "return_documents": optional(SWITCH),
                    },
                    "query",
                    "documents",
                ),
                record({"id": TEXT, "results": listed(_result()), "usage": OBJECT}, "id", "results", "usage"),
            )
        },
    }


def _continuations(models: list[str], vocab_size: int) -> Schema:
    some_text: Schema = {"anyOf": [TEXT, listed(token_of(vocab_size), minItems=1)]}
    return record(
        {
            **common_fields(models),
            "context": {"anyOf": [some_text, listed(some_text, minItems=1, maxItems=MOST_SEQUENCES)]},
            "continuations": listed(some_text, minItems=1, maxItems=MOST_SEQUENCES),
            "logprobs": optional(SWITCH),
            "add_special_tokens": optional(SWITCH),
        },
        "context",
        "continuations",
    )


def _pairs(models: list[str], names: tuple[str, str]) -> Schema:
    texts: Schema = {"anyOf": [COMPARED, listed(COMPARED, minItems=1, maxItems=MOST_PAIRS)]}
    return record({**common_fields(models), **_limits(), **dict.fromkeys(names, texts)}, *names)


def _limits() -> dict[str, Schema]:
    return {
        "instruction": optional(TEXT),
        "truncate_prompt_tokens": CUT,
        "max_tokens_per_doc": optional(POSITIVE),
    }


def _result() -> Schema:
    return record({"index": WHOLE, "relevance_score": NUMBER}, "index", "relevance_score")
