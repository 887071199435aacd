"""Encoders behind the server: the same routes, and an engine that is replaced when it dies."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvern.engine.relevance import sigmoid
from kvern.text.tokenizer import Tokenizer
from tests.support.encoders import LENGTH, expected_labels, expected_vector, make_encoder
from tests.support.served import Served, serving

TOLERANCE = 1e-4
QUERY = "What do foxes eat?"
DOCUMENTS = ["Mice and berries.", "Foxes are red.", "yes", "Ärger über 日本語"]


def ask(server: Served, path: str, status: int = 200, **body: Any) -> Any:
    found, _, content = server.raw("POST", path, json.dumps(body).encode())
    assert found == status, content
    return content


@pytest.mark.nightly
def test_embeddings_outlive_an_engine(tmp_path: Path) -> None:
    folder = make_encoder("xlm-roberta", tmp_path / "model")
    tokenizer = Tokenizer(folder)
    vectors = [expected_vector(folder, tokenizer.encode(text)) for text in (QUERY, *DOCUMENTS)]
    with serving(str(folder), "--threads", "1", "--dtype", "float32") as server:
        for _ in range(2):
            answer = ask(server, "/v1/embeddings", input=[QUERY, *DOCUMENTS])
            for entry, vector in zip(answer["data"], vectors, strict=True):
                assert entry["embedding"] == pytest.approx(vector, abs=TOLERANCE)
            assert answer["usage"]["prompt_tokens"] > 5 * 3
            server.kill_engine()
        ranked = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
        assert ranked["method"] == "cosine"
        best = max(range(4), key=lambda place: sum(a * b for a, b in zip(vectors[0], vectors[1 + place], strict=True)))
        assert ranked["results"][0]["index"] == best
        refused = ask(server, "/v1/embeddings", 400, input=["a", [5] * (LENGTH + 1)])["error"]["message"]
        assert refused.startswith(f"the text has {LENGTH + 1} tokens, and xlm-roberta reads {LENGTH} at most")
        assert len(ask(server, "/v1/embeddings", input=["a"] * 2048)["data"]) == 2048
        refused = ask(server, "/v1/embeddings", 400, input=["a"] * 2049)["error"]["message"]
        assert refused == "input holds 2049 prompts: at most 2048"
        [plain] = ask(server, "/v1/embeddings", input=QUERY, normalize=False)["data"]
        length = sum(number**2 for number in plain["embedding"]) ** 0.5
        assert [number / length for number in plain["embedding"]] == pytest.approx(vectors[0], abs=TOLERANCE)
        assert abs(length - 1) > 0.01
        refused = ask(server, "/v1/embeddings", 400, input=QUERY, extra_body={"input_type": "query"})["error"]
        assert refused["param"] == "input_type"
        _, headers, _ = server.raw("POST", "/v1/embeddings", b'{"input": "a", "colour": 1, "n_predict": 1}')
        assert headers["x-kvern-ignored-fields"] == "colour, n_predict"
        for given in ({"input": 5}, {"input": []}, {"input": None}):
            assert ask(server, "/v1/embeddings", 400, **given)["error"]["message"].startswith("input is ")
        check_cuts(server, folder, tokenizer)
        assert server.figure("step_requests_sum") >= server.figure("step_requests_count") > 0
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/score", {"context": "a", "continuations": ["b"]}),
        ):
            message = ask(server, path, 400, **body)["error"]["message"]
            assert message.startswith("xlm-roberta is an encoder: it gives embeddings and generates nothing")


def check_cuts(server: Served, folder: Path, tokenizer: Tokenizer) -> None:
    """Of texts that are too long, beginnings within the tokenizer's own tokens."""
    long = " ".join(DOCUMENTS * 20)
    begin, *of_text, end = tokenizer.encode(long)
    for body, token_ids in (
        ({"truncate_prompt_tokens": -1}, [begin, *of_text[: LENGTH - 2], end]),
        ({"truncate_prompt_tokens": 9999}, [begin, *of_text[: LENGTH - 2], end]),
        ({"truncate_prompt_tokens": 7}, [begin, *of_text[:5], end]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, [begin, *of_text[-5:], end]),
        ({"truncate_prompt_tokens": 1}, [begin]),
        ({"truncate_prompt_tokens": 7, "add_special_tokens": False}, of_text[:7]),
        ({"truncate_prompt_tokens": 7, "input": of_text}, of_text[:7]),
    ):
        answer = ask(server, "/v1/embeddings", **{"input": long} | body)
        assert answer["usage"]["prompt_tokens"] == len(token_ids), body
        assert answer["data"][0]["embedding"] == pytest.approx(expected_vector(folder, token_ids), abs=TOLERANCE)
    for fields in ({}, {"truncate": True}, {"truncate": None}):  # ollama's
        vectors = ask(server, "/api/embed", input=["a", long], **fields)["embeddings"]
        assert vectors[1] == pytest.approx(expected_vector(folder, [begin, *of_text[: LENGTH - 2], end]), abs=TOLERANCE)
        assert ask(server, "/api/embeddings", prompt=long, **fields)["embedding"] == pytest.approx(vectors[1])
    for path, name in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        told = ask(server, path, 400, **{name: long, "truncate": False})["error"]
        assert f"the maximum context length of {LENGTH} tokens" in told
        assert ask(server, path, 400, **{name: long, "truncate": 1})["error"].startswith("truncate is 1")
        assert not ask(server, path, **{name: ""})[f"embedding{'s' if name == 'input' else ''}"]
    message = ask(server, "/v1/embeddings", 400, input=long, truncate_prompt_tokens=0)["error"]["message"]
    assert message.startswith("truncate_prompt_tokens is 0")


def test_relevance_by_both_texts_together(tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path / "model", labels=1)
    labels = expected_labels(folder, [(QUERY, document) for document in DOCUMENTS])
    expected = [sigmoid(label) for label in labels]
    with serving(str(folder), "--threads", "1", "--dtype", "float32", "--served-model-name", "tiny") as server:
        answer = ask(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=TOLERANCE)
        assert answer["method"] == "classifier"
        ranked = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)["results"]
        order = sorted(range(4), key=lambda place: -expected[place])
        assert [result["index"] for result in ranked] == order[:2]
        long = "mice and berries " * 40
        refused = ask(server, "/v1/rerank", 400, query=QUERY, documents=["a", long])["error"]
        assert "documents[1] has" in refused["message"] and f"at most {LENGTH} fit" in refused["message"]
        cut = ask(server, "/v1/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=-1)
        assert cut["usage"]["prompt_tokens"] == LENGTH
        short = Tokenizer(folder).decode(Tokenizer(folder).encode(long, add_special_tokens=False)[:5])
        [label] = expected_labels(folder, [(QUERY, short)])
        [score] = ask(server, "/v1/score", text_1=QUERY, text_2=long, max_tokens_per_doc=5)["data"]
        assert score["score"] == pytest.approx(sigmoid(label), abs=TOLERANCE)
        said = ask(server, "/v1/score", 400, text_1="a", text_2="b", instruction="c")["error"]["message"]
        assert said.startswith("instruction is for models that are asked; this one compares texts")
        refused = ask(server, "/v1/embeddings", 400, input="a")["error"]["message"]
        assert refused == "tiny is a classifier and gives no embeddings: ask /v1/rerank or /v1/score"
        refused = ask(server, "/v1/completions", 400, prompt="a")["error"]["message"]
        assert refused.startswith("the model is a classifier and generates no text")


def test_a_label_that_is_no_probability(tmp_path: Path) -> None:
    from kvern.engine.relevance import PairClassifier, way_of
    from kvern.errors import InvalidRequest
    from kvern.models.loader import read_config

    folder = make_encoder("bert", tmp_path / "model", labels=1)
    tokenizer, config = Tokenizer(folder), read_config(folder)
    for fields, expected in (
        ({}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
        ({"sentence_transformers": {"activation_fn": "somebody.Softplus"}}, None),
    ):
        (folder / "config.json").write_text(json.dumps(config | fields))
        if expected is None:
            with pytest.raises(InvalidRequest, match=r"the activation 'somebody.Softplus'|is 'somebody.Softplus'"):
                way_of(folder, tokenizer)
        else:
            assert way_of(folder, tokenizer) == PairClassifier(expected)
