"""Bodies of the routes that take texts and write none: what would change an answer is obeyed or refused by name."""

from typing import Any

import pytest

from kvern.api import embeddings, scores, text_pairs
from kvern.api.embeddings import read_embedding
from kvern.api.error_bodies import as_sent
from kvern.api.errors import HttpError
from kvern.api.fields import sampling_params, typed
from kvern.api.other_names import sent_names
from kvern.api.scores import read_score
from kvern.api.text_pairs import read_pairs, read_rerank
from kvern.batch.job import failure
from kvern.batch.readers import Row
from kvern.engine.embedding import embedding_of
from kvern.errors import EngineDied, InvalidParameter, KvernError, PromptTooLong
from kvern.request.sampling_params import SamplingParams

READERS: dict[str, Any] = {
    "embeddings": lambda fields: read_embedding({"input": "a", **fields}),
    "rerank": lambda fields: read_rerank({"query": "a", "documents": ["b", "c"], **fields}),
    "pairs": lambda fields: read_pairs({"text_1": "a", "text_2": "b", **fields}),
    "continuations": lambda fields: read_score({"context": "a", "continuations": ["b"], **fields}),
}


@pytest.mark.parametrize(
    ("route", "fields", "said"),
    [
        ("embeddings", {"input_type": "query"}, "input_type is 'query': write what the model wants before a text"),
        ("embeddings", {"prompt_name": "query"}, "prompt_name is 'query'"),
        ("embeddings", {"task": "retrieval.query"}, "task is 'retrieval.query'"),
        ("embeddings", {"output_dimension": 8}, "output_dimension is 8: send dimensions"),
        ("embeddings", {"output_dtype": "int8"}, "output_dtype is 'int8': numbers are float32"),
        ("embeddings", {"embedding_types": ["int8"]}, "embedding_types is"),
        ("embeddings", {"truncate": "END"}, "truncate is 'END': send truncate_prompt_tokens"),
        ("embeddings", {"late_chunking": True}, "late_chunking is True"),
        ("embeddings", {"dimension": 8}, "dimension is no field: did you mean dimensions"),
        ("embeddings", {"normalise": False}, "normalise is no field: did you mean normalize"),
        ("embeddings", {"normalize": 1}, "normalize is 1: it must be true or false"),
        ("embeddings", {"normalize": True, "use_activation": False}, "they mean the same"),
        ("embeddings", {f"x{number}": 1 for number in range(65)}, "65 fields"),
        ("rerank", {"top_k": 1}, "top_k is 1: send top_n"),
        ("rerank", {"topN": 1}, "topN is no field: did you mean top_n"),
        ("rerank", {"raw_scores": True}, "raw_scores is True"),
        ("rerank", {"rank_fields": ["title"]}, "rank_fields is"),
        ("rerank", {"max_chunks_per_doc": 2}, "max_chunks_per_doc is 2: send max_tokens_per_doc"),
        ("rerank", {"return_document": False}, "did you mean return_documents"),
        ("pairs", {"use_activation": False}, "use_activation is False: scores are what"),
        ("pairs", {"label_token_ids": [1, 2]}, "label_token_ids is"),
        ("pairs", {"apply_softmax": True}, "apply_softmax is True"),
        ("continuations", {"truncate_prompt_tokens": 1}, "truncate_prompt_tokens is 1"),
        ("continuations", {"temperature": 0.5}, "temperature is 0.5"),
        ("continuations", {"instruction": "a"}, "instruction is 'a': it is of pairs of texts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_would_change_an_answer_is_refused(route: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(HttpError, match=said):
        READERS[route](fields)


def test_what_asks_for_nothing_is_taken() -> None:
    harmless = {"user_id": "x", "colour": "red", "usr": 1, "mdel": "x", "truncate": False, "normalize": None}
    for route, fields in (
        ("embeddings", {"input_type": "", "embedding_types": ["float"], "output_dtype": "float", "top_k": 3}),
        ("rerank", {"top_k": None, "raw_scores": False, "normalize": True, "rank_fields": ["text"]}),
        ("pairs", {"use_activation": True, "label_token_ids": None}),
        ("continuations", {"temperature": 1.0}),
    ):
        assert READERS[route](harmless | fields) == READERS[route]({})
    fields = (embeddings.KNOWN, scores.KNOWN, text_pairs.KNOWN, text_pairs.RERANK_KNOWN)
    assert all("colour" not in known for known in fields)


@pytest.mark.parametrize("fields", [{"normalize": False}, {"use_activation": False}, {"normalize": True}, {}])
def test_vectors_are_normalized_unless_a_body_says_no(fields: dict[str, Any]) -> None:
    state = b"\x00\x00\x40\x40\x00\x00\x80\x40\x00\x00\x80\x3f"  # 3, 4, 1
    asked = read_embedding({"input": "a", "dimensions": 2, **fields})
    plain = False in fields.values()
    assert asked.normalize is not plain
    assert embedding_of(state, 2, asked.normalize) == pytest.approx([3, 4] if plain else [0.6, 0.8])


@pytest.mark.parametrize(
    ("body", "error", "said", "param"),
    [
        ({"n_predict": 0}, InvalidParameter("max_tokens is 0: it must be at least 1"), "n_predict is 0", "n_predict"),
        ({"typ_p": -1}, InvalidParameter("typical_p is -1"), "typ_p is -1", "typ_p"),
        ({"options": {"num_predict": "x"}}, HttpError(400, "max_tokens is 'x'", param="max_tokens"),
         "num_predict is 'x'", "num_predict"),
        ({"stop_sequences": ["stop"]}, InvalidParameter("stop holds 'stop'"), "stop_sequences holds 'stop'",
         "stop_sequences"),
        ({"max_new_tokens": 4}, InvalidParameter("min_tokens is 10, above max_tokens 4: raise max_tokens"),
         "min_tokens is 10, above max_new_tokens 4: raise max_new_tokens", "min_tokens"),
        ({"max_output_tokens": 0}, InvalidParameter("max_tokens is 0"), "max_output_tokens is 0", "max_output_tokens"),
        ({"n_predict": 1, "max_tokens": 2}, HttpError(400, "n_predict is 1 and max_tokens 2", param="n_predict"),
         "n_predict is 1 and max_tokens 2", "n_predict"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_refusals_name_fields_as_they_were_sent(body: Any, error: KvernError, said: str, param: str) -> None:
    told: Any = as_sent(error, sent_names(body))
    assert str(told).startswith(said)
    assert isinstance(told, HttpError) and (told.status, told.param) == (400, param)


def test_other_errors_stay_what_they_are() -> None:
    names = sent_names({"n_predict": 3})
    for error in (
        EngineDied("max_tokens"),
        HttpError(429, "max_tokens"),
        ValueError("x"),
    ):
        assert as_sent(error, names) is error
    long: Any = as_sent(PromptTooLong("too long: lower max_tokens", 9, 5), names)
    assert (str(long), long.code) == ("too long: lower n_predict", "context_length_exceeded")


@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_fail_name_fields_as_they_were_sent(nested: bool) -> None:
    values = {"custom_id": "a", "body": {"n_predict": 0}} if nested else {"custom_id": "a", "n_predict": 0}
    line = failure(Row(1, values, None), InvalidParameter("max_tokens is 0: too few")).line
    assert b'"n_predict is 0: too few"' in line


def test_whole_numbers_may_be_written_with_a_point() -> None:
    params = sampling_params(SamplingParams(), {"max_tokens": 8.0, "top_k": 40.0, "seed": 5.0, "temperature": 1.0})
    assert (params.max_tokens, params.top_k, params.seed, params.temperature) == (8, 40, 5, 1.0)
    assert typed({"top_n": 2.0}, "top_n", int, None) == 2 and type(typed({"a": 2.0}, "a", int, None)) is int
    assert type(typed({"timeout": 2.0}, "timeout", (int, float), None)) is float
    for value in (8.5, 1e300, float("inf"), float("nan")):
        with pytest.raises(HttpError):
            typed({"top_n": value}, "top_n", int, None)
        with pytest.raises(InvalidParameter):
            sampling_params(SamplingParams(), {"max_tokens": value})
    with pytest.raises(HttpError):
        typed({"stream": 1.0}, "stream", bool, None)
