"""/v1/rerank: documents in the order of their relevance to a query, in the format of Cohere, Jina and vLLM.

{"query": "What do foxes eat?", "documents": ["Mice and berries.", "Foxes are red."], "top_n": 1}
-> {"results": [{"index": 0, "relevance_score": 0.9, "document": {"text": "Mice and berries."}}], ...}
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import typed
from kvern.api.other_names import check_extras
from kvern.api.text_pairs import OF_PAIRS, REFUSED, SHARED, Relevances, TextPairs, read_texts, text_pairs

RERANK = "/v1/rerank"
FIELDS = OF_PAIRS | {"query", "documents", "top_n", "return_documents"}
KNOWN = SHARED | FIELDS


@dataclass(frozen=True)
class RerankBody:
    """The contents of a body: the `top_n` most relevant documents are wanted."""

    asked: TextPairs
    top_n: int
    with_documents: bool


def read_rerank(body: Mapping[str, Any]) -> RerankBody:
    """Checks a body. Raises HttpError."""
    check_extras(body, FIELDS, {**REFUSED, **dict.fromkeys(("top_k", "num_results"), ((), "send top_n"))})
    query = typed(body, "query", str, "")
    if not query:
        raise HttpError(400, "query is empty: it must be a text", param="query")
    documents = read_texts(typed(body, "documents", list, []), "documents")
    top_n = typed(body, "top_n", int, len(documents))
    if top_n < 0:
        raise wrong_value("top_n", top_n, "at least 0, which is all")
    pairs = text_pairs(body, [(query, document) for document in documents], ("query", "documents"))
    return RerankBody(pairs, top_n or len(documents), typed(body, "return_documents", bool, True))


def rerank_answer(body: RerankBody, relevances: Relevances, model: str) -> dict[str, Any]:
    """Returns the best documents, most relevant first."""
    results, scores = [], relevances.scores
    for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]:
        document = {"document": {"text": body.asked.pairs[index][1]}} if body.with_documents else {}
        results.append({"index": index, "relevance_score": scores[index], **document})
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": model,
        "method": relevances.method,
        "results": results,
        "usage": relevances.usage,
        "meta": {"tokens": {"input_tokens": relevances.prompt_tokens, "output_tokens": 0}},
    }
