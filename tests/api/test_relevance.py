"""How well documents answer queries: the scores of transformers, by every way that a model can tell."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvern.api.errors import HttpError
from kvern.api.text_pairs import read_pairs
from kvern.engine.relevance import ANSWERS_FILE, HEAD, Classifier, YesOrNo, way_of
from kvern.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from kvern.models.registry import spec_from_config
from kvern.text.tokenizer import Tokenizer
from tests.support.rerankers import expected_scores, make_classifier, make_reranker, prompt_of
from tests.support.served import Served, eventually, serving

TOLERANCE = 1e-4
QUERY = "What do foxes eat?"
DOCUMENTS = ["Mice and berries.", "Foxes are red.", "yes", "Ärger über 日本語", " two\n\nlines "]
PAIRS = [(QUERY, document) for document in DOCUMENTS]
OTHERS = [("a", "b"), (QUERY, "Mice and berries."), ("Are foxes red?", "Foxes are red.")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("rerankers")
    return {"asked": make_reranker(parent / "asked"), "classifier": make_classifier(parent / "classifier")}


@pytest.fixture(scope="module", params=["asked", "classifier"])
def served(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Path]]:
    folder = folders[request.param]
    data = ("--data-dir", str(tmp_path_factory.mktemp("data")))
    with serving(str(folder), "--served-model-name", "tiny", "--threads", "1", "--dtype", "float32", *data) as server:
        yield server, folder


def ask(server: Served, path: str, status: int = 200, **body: Any) -> Any:
    found, _, content = server.raw("POST", path, json.dumps(body).encode())
    assert found == status, content
    return content


@pytest.mark.sample(1)
def test_scores_are_those_of_transformers(served: tuple[Served, Path]) -> None:
    """All documents at once, and each alone."""
    server, folder = served
    expected = expected_scores(folder, PAIRS)
    assert max(expected) - min(expected) > 100 * TOLERANCE, "the model tells documents apart"
    answer = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [found[index] for index in range(len(DOCUMENTS))] == pytest.approx(expected, abs=TOLERANCE)
    assert (
        list(found.values()) == sorted(expected, reverse=True) or list(found.values()) == sorted(found.values())[::-1]
    )
    assert answer["method"] == ("classifier" if folder.name == "classifier" else "yes against no")
    assert all(result["document"]["text"] == DOCUMENTS[result["index"]] for result in answer["results"])
    for document, score in zip(DOCUMENTS, expected, strict=True):
        [alone] = ask(server, "/v1/score", text_1=QUERY, text_2=document)["data"]
        assert alone["score"] == pytest.approx(score, abs=TOLERANCE)


def test_pairs_by_all_their_names(served: tuple[Served, Path]) -> None:
    server, folder = served
    queries, documents = map(list, zip(*OTHERS, strict=True))
    answer = ask(server, "/score", text_1=queries, text_2=documents, model="tiny")
    assert answer["object"] == "list" and answer["model"] == "tiny" and answer["id"].startswith("score-")
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(index, "score") for index in range(3)]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected_scores(folder, OTHERS), abs=TOLERANCE)
    tokenizer = Tokenizer(folder)
    tokens = sum(len(tokenizer.encode(prompt_of(*pair))) for pair in OTHERS)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        texts = dict(zip(names, (queries, [{"text": text} for text in documents]), strict=True))
        again = ask(server, "/v1/score", **texts)
        assert [entry["score"] for entry in again["data"]] == pytest.approx(
            [entry["score"] for entry in answer["data"]], abs=TOLERANCE
        )
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_counts_as_an_answer(served: tuple[Served, Path]) -> None:
    server, folder = served
    instruction = "Find what foxes eat"
    answer = ask(server, "/rerank", query=QUERY, documents=DOCUMENTS, instruction=instruction, top_n=2)
    expected = expected_scores(folder, PAIRS, instruction)
    best = sorted(range(len(expected)), key=lambda index: -expected[index])[:2]
    assert [result["index"] for result in answer["results"]] == best
    found = [result["relevance_score"] for result in answer["results"]]
    assert found == pytest.approx([expected[index] for index in best], abs=TOLERANCE)
    assert answer["meta"]["tokens"]["input_tokens"] == answer["usage"]["prompt_tokens"]


def test_long_documents_lose_their_ends(served: tuple[Served, Path]) -> None:
    server, folder = served
    long, tokenizer = "mice and berries " * 400, Tokenizer(folder)
    refused = ask(server, "/v1/rerank", 400, query=QUERY, documents=["a", long])["error"]
    assert refused["param"] == "documents" and "documents[1] has" in refused["message"]
    assert "send truncate_prompt_tokens" in refused["message"]
    refused = ask(server, "/v1/rerank", 400, query=long, documents=["a"], truncate_prompt_tokens=-1)["error"]
    assert "shorten the query" in refused["message"]
    first = tokenizer.decode(tokenizer.encode(long)[:5])
    [expected] = expected_scores(folder, [(QUERY, first)])
    [score] = ask(server, "/v1/score", text_1=QUERY, text_2=long, max_tokens_per_doc=5)["data"]
    assert score["score"] == pytest.approx(expected, abs=TOLERANCE)
    size = len(tokenizer.encode(prompt_of(QUERY, first)))
    answer = ask(server, "/v1/score", text_1=QUERY, text_2=[long, "a"], truncate_prompt_tokens=size)
    assert answer["data"][0]["score"] == pytest.approx(expected, abs=TOLERANCE)
    [short] = expected_scores(folder, [(QUERY, "a")])
    assert answer["data"][1]["score"] == pytest.approx(short, abs=TOLERANCE)
    whole = ask(server, "/v1/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=-1)
    assert 500 <= whole["usage"]["prompt_tokens"] < 512


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"text_1": "a"}, "text_1 are no pairs: send text_1 and text_2, or queries and documents", "text_1"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "text_1 and text_2 and items are no pairs", "text_1"),
        ({"text_1": [], "text_2": "a"}, "text_1 holds 0: it must hold 1 to 512 texts", "text_1"),
        ({"text_1": "a", "text_2": ["b"] * 513}, "text_2 holds 513", "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1 holds 2 texts for 3 of text_2", "text_1"),
        ({"queries": "a", "documents": ["b", 5]}, "documents[1] is 5: it must be a text", "documents"),
        ({"text_1": "a", "text_2": "b", "continuations": ["c"]}, "and text_1 compares texts", "continuations"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 0}, "max_tokens_per_doc is 0", "max_tokens_per_doc"),
        (
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": -2},
            "truncate_prompt_tokens is -2",
            "truncate_prompt_tokens",
        ),
        ({"text_1": "a" * 9000, "text_2": ["b"] * 512}, "text_1 counted with each: at most 4194304", "text_2"),
        ({"text_1": "a", "text_2": "b", "instruction": 3}, "instruction is 3", "instruction"),
    ],
)
def test_bodies_that_cannot_be_compared(body: dict[str, Any], said: str, param: str) -> None:
    with pytest.raises(HttpError) as raised:
        read_pairs(body)
    assert said in raised.value.message and raised.value.param == param


def test_in_batches(served: tuple[Served, Path]) -> None:
    server, folder = served
    client = server.client()
    row = {"custom_id": "a", "method": "POST", "url": "/v1/rerank", "body": {"query": QUERY, "documents": DOCUMENTS}}
    file = client.files.create(file=("in.jsonl", json.dumps(row).encode()), purpose="batch")
    endpoint: Any = "/v1/rerank"
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id or ""
    [best, *_] = json.loads(client.files.content(output).text)["response"]["body"]["results"]
    assert best["relevance_score"] == pytest.approx(max(expected_scores(folder, PAIRS)), abs=TOLERANCE)


def test_a_classifier_generates_nothing(served: tuple[Served, Path]) -> None:
    server, folder = served
    body = {"prompt": "a", "max_tokens": 1}
    if folder.name == "asked":
        ask(server, "/v1/completions", **body)
    else:
        refused = ask(server, "/v1/completions", 400, **body)["error"]["message"]
        assert refused.startswith("the model is a classifier and generates no text")


# What a folder says


def test_the_tokens_of_the_answers(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = make_reranker(tmp_path / "model")
    tokenizer = Tokenizer(folder)
    [yes], [no] = tokenizer.encode("yes"), tokenizer.encode("no")
    assert way_of(folder, tokenizer) == YesOrNo([yes], [no])
    config = json.loads((folder / "config.json").read_text())
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["foxes", "mice"]}
    (folder / "config.json").write_text(json.dumps(config | overrides))
    assert way_of(folder, tokenizer) == YesOrNo(tokenizer.encode("mice"), tokenizer.encode("foxes"))
    (folder / "config.json").write_text(json.dumps(config | {"classifier_from_token": ["yes"]}))
    with pytest.raises(InvalidRequest, match="it must be two texts, no and yes"):
        way_of(folder, tokenizer)
    (folder / ANSWERS_FILE).parent.mkdir()
    (folder / ANSWERS_FILE).write_text(json.dumps({"true_token_id": 7, "false_token_id": 9}))
    assert way_of(folder, tokenizer) == YesOrNo([7], [9])
    (folder / ANSWERS_FILE).write_text(json.dumps({"true_token_id": 7, "false_token_id": None}))
    with pytest.raises(InvalidRequest, match="false_token_id None: only models that tell relevance by two tokens"):
        way_of(folder, tokenizer)


def test_classifiers_have_one_label(folders: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders["classifier"] / "config.json").read_text())
    for labels in ({"0": "a", "1": "b", "2": "c"}, None):
        with pytest.raises(UnsupportedModel, match="classifiers of one label, rerankers, are supported"):
            spec_from_config(config | {"id2label": labels})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folders["asked"] / "model.safetensors")
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(CorruptCheckpoint, match=r"has no score.weight, the head of a classifier"):
        way_of(tmp_path, tokenizer)
    row = torch.linspace(-3, 5, 48)[None]
    save_file({HEAD: row[:, :40].contiguous()}, tmp_path / "head.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"it must be F32, F16 or BF16 \[1, 48\]"):
        way_of(tmp_path, tokenizer)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        save_file({HEAD: row.to(dtype)}, tmp_path / "head.safetensors")
        way = way_of(tmp_path, tokenizer)
        assert isinstance(way, Classifier) and way.weight.tolist() == row[0].to(dtype).tolist()
    save_file({HEAD: row.repeat(2, 1)}, tmp_path / "head.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"is F32 \[2, 48\]: it must be F32, F16 or BF16 \[1, 48\]"):
        way_of(tmp_path, tokenizer)
