"""/v1/rerank: documents in the order in which they answer a query, as Cohere, Jina and vLLM have it.

{"query": "What do foxes eat?", "documents": ["Mice and berries.", "Foxes are red."], "top_n": 1}
-> {"results": [{"index": 0, "relevance_score": 0.9, "document": {"text": "Mice and berries."}}], ...}

A relevance is what the model can say truly. One that was trained for embeddings: the cosine of query and document. Any
other is asked whether the document meets the query, and its relevance is the probability of yes against that of no,
which is how Qwen3-Reranker and its like are trained; a model that was not trained for it says what it believes.
"""

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvern.api.errors import HttpError
from kvern.api.fields import COMMON_FIELDS, WITHOUT_EFFECT, CommonFields, read_common, typed
from kvern.api.limits import MOST_SEQUENCES
from kvern.engine.scoring import Score
from kvern.errors import shown
from kvern.outputs import RequestOutput

RERANK = "/v1/rerank"
KNOWN = frozenset({"query", "documents", "top_n", "return_documents", "instruction", *WITHOUT_EFFECT, *COMMON_FIELDS})
MOST_DOCUMENTS = MOST_SEQUENCES // 2
MOST_CHARACTERS = 1 << 22
"""Of all documents, the query counted with each."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""What Qwen3-Reranker was trained with, and with `INSTRUCTION` where there is none."""
ANSWERS = ("yes", "no")


@dataclass(frozen=True)
class RerankBody:
    """What a body asks for: the `top_n` documents that answer the query best."""

    query: str
    documents: list[str]
    instruction: str
    """What counts as an answer; empty for `INSTRUCTION`."""
    top_n: int
    with_documents: bool
    common: CommonFields

    def questions(self, has_roles: bool) -> list[list[dict[str, str]]]:
        """A conversation for each document that asks for yes or no.

        Templates made for reranking have the roles `query` and `document`, and say the task themselves.
        """
        instruction = self.instruction or INSTRUCTION
        if has_roles:
            asked = [{"role": "system", "content": instruction}, {"role": "query", "content": self.query}]
            return [[*asked, {"role": "document", "content": document}] for document in self.documents]
        about, task = f"<Instruct>: {instruction}\n<Query>: {self.query}\n", {"role": "system", "content": TASK}
        return [[task, {"role": "user", "content": f"{about}<Document>: {document}"}] for document in self.documents]


def read_rerank(body: Mapping[str, Any]) -> RerankBody:
    """Check a body. Raises HttpError."""
    query, given = typed(body, "query", str, ""), typed(body, "documents", list, [])
    if not query:
        raise HttpError(400, "query is empty: it must be a text", param="query")
    if not 0 < len(given) <= MOST_DOCUMENTS:
        message = f"documents holds {len(given)}: it must hold 1 to {MOST_DOCUMENTS} texts"
        raise HttpError(400, message, param="documents")
    documents = [_text(document, number) for number, document in enumerate(given)]
    instruction = typed(body, "instruction", str, "")
    characters = len(documents) * (len(query) + len(instruction)) + sum(map(len, documents))
    if characters > MOST_CHARACTERS:
        message = f"documents have {characters} characters, the query counted with each: at most {MOST_CHARACTERS}"
        raise HttpError(400, f"{message}; send fewer at once", param="documents")
    top_n = typed(body, "top_n", int, len(documents))
    if top_n < 0:
        raise HttpError(400, f"top_n is {top_n}: it must be at least 0, which is all", param="top_n")
    with_documents = typed(body, "return_documents", bool, True)
    return RerankBody(query, documents, instruction, top_n or len(documents), with_documents, read_common(body))


def _text(document: object, number: int) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str) or not text:
        message = f"documents[{number}] is {shown(document)}: it must be a text, or an object with one as text"
        raise HttpError(400, message, param="documents")
    return text


def probability_of_yes(yes: Score, no: Score) -> float:
    """Against no; half where the model gives neither."""
    if yes.logprob == no.logprob:
        return 0.5
    return 1 / (1 + math.exp(min(no.logprob - yes.logprob, 700.0)))


def rerank_answer(
    asked: RerankBody, relevances: Sequence[float], outputs: Sequence[RequestOutput], model: str, method: str
) -> dict[str, Any]:
    """The best documents, the most relevant first; `method` says what a relevance is."""
    results = []
    for index in sorted(range(len(relevances)), key=lambda index: -relevances[index])[: asked.top_n]:
        document = {"document": {"text": asked.documents[index]}} if asked.with_documents else {}
        results.append({"index": index, "relevance_score": relevances[index], **document})
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": model, "method": method, "results": results, "usage": usage}
