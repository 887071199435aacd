"""Pairs of texts that are compared: vLLM's /v1/score, and /v1/rerank in the format of Cohere, Jina and vLLM.

/v1/score   {"text_1": "What do foxes eat?", "text_2": ["Mice and berries.", "Foxes are red."]}
            -> {"data": [{"index": 0, "object": "score", "score": 0.9}, ...], "usage": {...}}
/v1/rerank  {"query": "What do foxes eat?", "documents": ["Mice and berries.", "Foxes are red."], "top_n": 1}
            -> {"results": [{"index": 0, "relevance_score": 0.9, "document": {"text": "Mice and berries."}}], ...}
"""

import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvern.api.completions import read_most_tokens
from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import COMMON_FIELDS, MOST_SEQUENCES, WITHOUT_EFFECT, CommonFields, Refused, read_common, typed
from kvern.api.unknown_fields import check_extras
from kvern.engine.relevance import sigmoid
from kvern.engine.scoring import Score
from kvern.errors import shown
from kvern.serving.served import named

NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names of the two texts in /v1/score, as in vLLM."""
OF_PAIRS = frozenset({"instruction", "truncate_prompt_tokens", "max_tokens_per_doc"})
SHARED = OF_PAIRS | WITHOUT_EFFECT | set(COMMON_FIELDS)
"""Fields of both routes."""
_SCORES = "scores are what `method` of the answer says; compare them with each other only"
REFUSED: Refused = {
    **dict.fromkeys(("use_activation", "activation", "normalize"), ((True,), _SCORES)),
    **dict.fromkeys(("raw_scores", "softmax", "apply_softmax"), ((False,), _SCORES)),
    "label_token_ids": (([],), "send context and continuations: their answer has a logprob for each"),
    "item_first": ((False,), "send the texts in the order in which the model reads them"),
    "rank_fields": (([], ["text"]), "a document is its text: put what is to count into that"),
    "max_chunks_per_doc": ((), "send max_tokens_per_doc"),
    **dict.fromkeys(("truncate", "truncation"), ((False, "NONE"), "send truncate_prompt_tokens, -1 for what fits")),
    "max_length": ((), "send truncate_prompt_tokens"),
    "return_embeddings": ((False,), "ask /v1/embeddings"),
    **dict.fromkeys(("chat_template", "chat_template_kwargs"), (("", {}), "the model's own template is used")),
}
"""Fields of other servers that would change scores, with the values that change nothing and advice."""
KNOWN = SHARED | {name for names in NAMES for name in names}
MOST_PAIRS = MOST_SEQUENCES // 2
MOST_CHARACTERS = 1 << 22
"""The limit of all pairs; a text counts once for each of its pairs."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""The task that Qwen3-Reranker was trained with; `INSTRUCTION` is its default instruction."""


@dataclass(frozen=True)
class TextPairs:
    """Queries and documents in pairs."""

    pairs: list[tuple[str, str]]
    names: tuple[str, str]
    """The names of queries and documents in the body."""
    instruction: str
    """The definition of a relevant document; empty for the model's own."""
    most_tokens: int | None
    """The limit of a prompt, for which documents lose their ends; -1 is the model's context."""
    most_document_tokens: int | None
    """The limit of a document's tokens; the rest is ignored."""
    common: CommonFields

    def question(self, query: str, document: str, has_roles: bool) -> list[dict[str, str]]:
        """Returns a conversation that asks for yes or no.

        Templates made for reranking have the roles `query` and `document`, and contain the task.
        """
        if has_roles:
            asked = [{"role": "system", "content": self.instruction}] if self.instruction else []
            return [*asked, {"role": "query", "content": query}, {"role": "document", "content": document}]
        about = f"<Instruct>: {self.instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return [{"role": "system", "content": TASK}, {"role": "user", "content": about}]


@dataclass(frozen=True)
class Relevances:
    """One score for each pair. `method` explains the scores; the tokens are those of all prompts."""

    scores: list[float]
    method: str
    prompt_tokens: int
    cached: dict[str, Any]
    """Counts of those that were cached: `cached_counts`."""

    @property
    def usage(self) -> dict[str, Any]:
        """The usage in OpenAI's format."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": self.prompt_tokens,
            "prompt_tokens_details": self.cached,
        }


def has_pairs(body: Mapping[str, Any]) -> bool:
    """True if a body of /v1/score compares texts; any other asks for probabilities of continuations."""
    return bool(_given(body))


def read_pairs(body: Mapping[str, Any]) -> TextPairs:
    """Checks a body of /v1/score: one first text for all second texts, or one for each. Raises HttpError."""
    given = _given(body)
    check_extras(body, OF_PAIRS | {name for names in NAMES for name in names}, REFUSED)
    for other in ("context", "continuations"):
        if body.get(other) is not None:
            message = f"{other} asks how likely a text is, and {given[0]} compares texts: send one of both"
            raise HttpError(400, message, param=other)
    names = next((names for names in NAMES if set(names) == set(given)), None)
    if names is None:
        spelled = ", or ".join(" and ".join(names) for names in NAMES)
        raise HttpError(400, f"{' and '.join(given)} are no pairs: send {spelled}", param=given[0])
    queries, documents = (_texts(body[name], name) for name in names)
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        message = f"{names[0]} holds {len(queries)} texts for {len(documents)} of {names[1]}: it must hold 1 or as many"
        raise HttpError(400, message, param=names[0])
    return text_pairs(body, list(zip(queries, documents, strict=True)), names)


def text_pairs(body: Mapping[str, Any], pairs: list[tuple[str, str]], names: tuple[str, str]) -> TextPairs:
    """Returns the pairs with the other fields of a body. Raises HttpError."""
    instruction = typed(body, "instruction", str, "")
    characters = len(pairs) * len(instruction) + sum(len(text) for pair in pairs for text in pair)
    if characters > MOST_CHARACTERS:
        message = (
            f"{names[1]} have {characters} characters, {names[0]} counted with each: at most {MOST_CHARACTERS}; send "
            "fewer at once"
        )
        raise HttpError(400, message, param=names[1])
    of_document = typed(body, "max_tokens_per_doc", int, None)
    if of_document is not None and of_document < 1:
        raise wrong_value("max_tokens_per_doc", of_document, "1 or more")
    return TextPairs(pairs, names, instruction, read_most_tokens(body), of_document, read_common(body))


def read_texts(given: Sequence[object], name: str) -> list[str]:
    """Reads texts, each of which may be an object with a `text`. Raises HttpError."""
    if not 0 < len(given) <= MOST_PAIRS:
        raise HttpError(400, f"{name} holds {len(given)}: it must hold 1 to {MOST_PAIRS} texts", param=name)
    texts = []
    for number, one in enumerate(given):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str) or not text:
            message = f"{name}[{number}] is {shown(one)}: it must be a text, or an object with one as text"
            raise HttpError(400, message, param=name)
        texts.append(text)
    return texts


def _texts(given: object, name: str) -> list[str]:
    return read_texts(given if isinstance(given, list) else [given], name)


def _given(body: Mapping[str, Any]) -> list[str]:
    """Returns the names of texts that a body holds."""
    return [name for name in dict.fromkeys(itertools.chain(*NAMES)) if body.get(name) is not None]


def probability_of_yes(yes: Score, no: Score) -> float:
    """Returns the probability of yes against no; 0.5 if the model gives neither."""
    return 0.5 if yes.logprob == no.logprob else sigmoid(yes.logprob - no.logprob)


def pairs_answer(relevances: Relevances, model: str) -> dict[str, Any]:
    """Returns the scores in the order of the pairs."""
    return {
        "id": named(f"score-{uuid.uuid4().hex}"),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "method": relevances.method,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(relevances.scores)],
        "usage": relevances.usage,
    }


RERANK = "/v1/rerank"
RERANK_FIELDS = OF_PAIRS | {"query", "documents", "top_n", "return_documents"}
RERANK_KNOWN = SHARED | RERANK_FIELDS


@dataclass(frozen=True)
class RerankBody:
    """The contents of a body: the `top_n` most relevant documents are wanted."""

    asked: TextPairs
    top_n: int
    with_documents: bool


def read_rerank(body: Mapping[str, Any]) -> RerankBody:
    """Checks a body. Raises HttpError."""
    check_extras(body, RERANK_FIELDS, {**REFUSED, **dict.fromkeys(("top_k", "num_results"), ((), "send top_n"))})
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
        "id": named(f"rerank-{uuid.uuid4().hex}"),
        "model": model,
        "method": relevances.method,
        "results": results,
        "usage": relevances.usage,
        "meta": {"tokens": {"input_tokens": relevances.prompt_tokens, "output_tokens": 0}},
    }
