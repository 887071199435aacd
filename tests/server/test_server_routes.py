"""Routes beside completions: reranking, tokens, load; and what is said to requests that no route answers."""

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from kvern import LLM
from kvern.api.text_pairs import read_rerank
from kvern.errors import ConfigError
from kvern.request.events import CAUSES
from kvern.server.config import ServerConfig
from tests.support.served import KEY, QUESTION, Served, serving
from tests.support.tiny_model import TEMPLATE, make_tiny_model

DOCUMENTS = ["the quick brown fox", "the lazy dog", "over the fox"]
LONG = "the lazy dog " * 200
SITE = "https://chat.example"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that gives embeddings, and thinks."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    (folder / "chat_template.jinja").write_text(f"{TEMPLATE}{{{{ '<think>' }}}}{{# </think> #}}")
    return folder


@pytest.fixture(scope="module")
def guarded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With two keys, and pages of another origin that may ask some of it."""
    cors = ("--allowed-origins", f'["{SITE}"]', "--allow-credentials", "--allowed-methods", "GET", "POST")
    keys = ("--api-key", f"alice:{KEY}", f"operator:{KEY}-operator admin=1")
    names = ("--served-model-name", "tiny", "--dtype", "float32", "--threads", "1")
    data = ("--data-dir", str(tmp_path_factory.mktemp("data")))
    with serving("--model", str(folder), *names, *keys, *data, *cors, "--allowed-headers", "authorization") as served:
        yield served


def ask(server: Served, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=240)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, None if body is None else json.dumps(body), named)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content


def rerank(server: Served, path: str = "/v1/rerank", **body: Any) -> Any:
    status, _, content = server.raw("POST", path, json.dumps(body).encode())
    assert status == 200, content
    return content


# Reranking


def test_a_model_that_is_asked_says_yes_or_no(server: Served) -> None:
    """The probabilities are those of the continuations, as /v1/score has them."""
    llm = LLM("kvern-1m", threads=1, max_model_len=512, dtype="float32")
    asked = {"query": "Where is the fox?", "documents": DOCUMENTS}
    expected = []
    body = read_rerank(asked).asked
    for query, document in body.pairs:
        prompt = llm.tokenizer.chat_prompt_ids(body.question(query, document, has_roles=False))
        pairs = [(prompt, llm.tokenizer.encode(answer, add_special_tokens=False)) for answer in ("yes", "no")]
        yes, no = (2.718281828459045**score.logprob for score in llm.score(pairs))
        expected.append(yes / (yes + no))
    answer = rerank(server, **asked)
    assert answer["method"] == "yes against no" and answer["usage"]["prompt_tokens"] > 0
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [found[index] for index in range(3)] == pytest.approx(expected, rel=1e-3)
    assert list(found) == sorted(range(3), key=lambda index: -expected[index])
    assert all(result["document"]["text"] == DOCUMENTS[result["index"]] for result in answer["results"])
    same = [{"text": text} for text in DOCUMENTS]
    for path in ("/rerank", "/v2/rerank"):
        best = rerank(server, path, query=asked["query"], documents=same, top_n=1, return_documents=False)
        [result], first = best["results"], answer["results"][0]
        assert result == {"index": first["index"], "relevance_score": pytest.approx(first["relevance_score"], rel=1e-3)}


def test_a_model_with_embeddings_compares_them(guarded: Served, folder: Path) -> None:
    with LLM(str(folder), threads=1, dtype="float32") as llm:
        query, *others = llm.embed(["a fox", *DOCUMENTS])
        first = llm.tokenizer.decode(llm.tokenizer.encode(LONG)[:7])
        [cut] = llm.embed([first])
    expected = [sum(a * b for a, b in zip(query, other, strict=True)) for other in others]
    answer = rerank(guarded, query="a fox", documents=DOCUMENTS)
    assert answer["method"] == "cosine"
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [scores[index] for index in range(3)] == pytest.approx(expected, abs=1e-4)
    pairs = {"text_1": ["a fox", "a fox", DOCUMENTS[0]], "text_2": [*DOCUMENTS[:2], DOCUMENTS[0]]}
    status, _, answer = guarded.raw("POST", "/v1/score", json.dumps(pairs).encode())
    assert status == 200, answer
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([*expected[:2], 1.0], abs=1e-4)
    pair = {"text_1": "a fox", "text_2": LONG}
    status, _, answer = guarded.raw("POST", "/v1/score", json.dumps(pair).encode())
    assert status == 400 and "text_2[0] has" in answer["error"]["message"]
    answer = guarded.raw("POST", "/v1/score", json.dumps(pair | {"truncate_prompt_tokens": 7}).encode())[2]
    assert answer["data"][0]["score"] == pytest.approx(sum(a * b for a, b in zip(query, cut, strict=True)), abs=1e-4)
    body = {"query": "a", "documents": ["b"], "instruction": "c"}
    assert guarded.raw("POST", "/v1/rerank", json.dumps(body).encode())[0] == 400


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"documents": ["a"]}, "query is empty"),
        ({"query": "a"}, "documents holds 0: it must hold 1 to 512"),
        ({"query": "a", "documents": ["a"] * 513}, "documents holds 513"),
        ({"query": "a", "documents": ["a", {"title": "b"}]}, "documents[1] is {'title': 'b'}: it must be a text"),
        ({"query": "a" * 9000, "documents": ["a"] * 512}, "query counted with each: at most 4194304"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n is -1"),
        ({"query": "a", "documents": ["fox " * 600]}, "documents[0] has"),
    ],
)
def test_what_cannot_be_ranked(server: Served, body: Any, said: str) -> None:
    status, _, content = server.raw("POST", "/v1/rerank", json.dumps(body).encode())
    assert status == 400 and said in content["error"]["message"]


# ollama, with a model that thinks and has embeddings


def test_thinking_and_embeddings_by_ollamas_client(guarded: Served, folder: Path) -> None:
    with ollama.Client(f"http://{guarded.host}:{guarded.port}", headers={"authorization": f"Bearer {KEY}"}) as client:
        whole = client.chat("tiny", messages=QUESTION, think=True, options={"num_predict": 8, "seed": 1})
        assert whole.message.thinking and not whole.message.content
        parts = client.chat("tiny", messages=QUESTION, stream=True, options={"num_predict": 8, "seed": 1})
        assert "".join(part.message.thinking or "" for part in parts).strip() == whole.message.thinking.strip()
        assert client.show("tiny").capabilities == ["completion", "embedding", "thinking"]
        with LLM(str(folder), threads=1, dtype="float32") as llm:
            expected = llm.embed(DOCUMENTS)
        for vector, other in zip(client.embed("tiny", DOCUMENTS).embeddings, expected, strict=True):
            assert list(vector) == pytest.approx(other, abs=1e-4)
        assert list(client.embeddings("tiny", DOCUMENTS[0]).embedding) == pytest.approx(expected[0], abs=1e-4)
        assert len(client.embed("tiny", "a", dimensions=4).embeddings[0]) == 4
    assert ask(guarded, "GET", "/api/tags")[0] == 401


# Tokens, models, load


def test_tokens_of_a_conversation_that_is_not_answered_yet(server: Served) -> None:
    def tokens(**body: Any) -> list[int]:
        return server.raw("POST", "/v1/tokenize", json.dumps({"messages": QUESTION, **body}).encode())[2]["tokens"]  # type: ignore[no-any-return]

    assert tokens()[: len(tokens(add_generation_prompt=False))] == tokens(add_generation_prompt=False) != tokens()
    assert tokens(add_special_tokens=True)[1:] == tokens()
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    whole, going_on = (
        tokens(messages=begun, add_generation_prompt=False, continue_final_message=on) for on in (False, True)
    )
    assert going_on == tokens(messages=begun, continue_final_message=True) == whole[:-1]


def test_names_of_models_say_where_they_come_from(server: Served) -> None:
    [entry] = server.raw("GET", "/v1/models")[2]["data"]
    assert (entry["root"], entry["parent"], entry["permission"]) == ("kvern-1m", None, [])


def test_metrics_tell_the_name_by_which_clients_ask(server: Served) -> None:
    listed = json.loads(ask(server, "GET", "/v1/models")[2])["data"][0]["id"]
    assert set(re.findall(r'model_name="([^"]*)"', ask(server, "GET", "/metrics")[2])) == {listed}


def test_load_is_what_runs_and_for_those_who_watch(server: Served, guarded: Served) -> None:
    assert server.raw("GET", "/load")[2] == {"server_load": 0}
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    with server.client().completions.create(model="kvern-1m", stream=True, **body) as stream:
        next(stream)
        assert server.raw("GET", "/load")[2] == {"server_load": 1}
    assert guarded.raw("GET", "/load")[0] == 403
    assert guarded.raw("GET", "/load", key=f"{KEY}-operator")[2] == {"server_load": 0}


def test_engines_tell_their_verdict_and_oldest_requests_to_those_who_watch(server: Served, guarded: Served) -> None:
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    with server.client().completions.create(model="kvern-1m", stream=True, **body) as stream:
        next(stream)
        [engine] = server.raw("GET", "/v1/engines")[2]["data"]
        assert (engine["model"], engine["engine"], engine["ready"]) == ("kvern-1m", "0", True)
        [request] = engine["oldest_requests"]
        assert request["id"] and request["seconds"] > 0 and 0 < request["tokens"] <= 400
        assert engine["options"]["threads"] == 1 and "model" not in engine["options"]
        before = server.raw("GET", "/v1/engines")[2]
    after = server.raw("GET", "/v1/engines")[2]
    assert after["processor_seconds"] > before["processor_seconds"] > 0
    assert after["data"][0]["processor_seconds"] >= before["data"][0]["processor_seconds"] > 0
    until = time.monotonic() + 60
    while (engine := server.raw("GET", "/v1/engines")[2]["data"][0])["verdict"] is None:
        assert time.monotonic() < until
        time.sleep(0.2)
    verdict = engine["verdict"]
    assert verdict["cause"] in CAUSES and 0 < verdict["share"] <= 1 and verdict["evidence"] and verdict["action"]
    assert f'cause="{verdict["cause"]}"' in ask(server, "GET", "/metrics")[2]
    assert guarded.raw("GET", "/v1/engines")[0] == 403
    assert guarded.raw("GET", "/v1/engines", key=f"{KEY}-operator")[0] == 200


def test_who_pings_needs_no_key(guarded: Served) -> None:
    for method in ("GET", "HEAD", "POST"):
        assert ask(guarded, method, "/ping")[::2] == (200, "")


# What no route answers


def test_base_urls_without_their_version_or_with_two(server: Served) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
    for path in ("/completions", "/v1/v1/completions"):
        assert server.raw("POST", path, body)[0] == 200
    assert server.raw("POST", "/v1/v1/messages", b"{}")[2]["type"] == "error", "Anthropic's clients know its shape"
    for path in ("/models", "/v1/version", "/v1/api/tags", "/v1/health"):
        assert server.raw("GET", path)[0] == 200
    for path in ("/v1", "/v1/", "/v1//models", "/v3/models", "//"):
        assert server.raw("GET", path)[0] == 404


def test_the_way_to_the_nearest_route(server: Served) -> None:
    status, headers, content = server.raw("POST", "/v1/chat/completion")
    assert status == 404 and "the nearest are /v1/chat/completions and" in content["error"]["message"]
    for method, path in (("GET", "/v1/chat/completions"), ("PUT", "/chat/completions")):
        status, headers, content = server.raw(method, path)
        assert (status, headers["allow"]) == (405, "post, options")
        assert 'this route takes POST with a body such as {"messages"' in content["error"]["message"]
    assert server.raw("GET", "/api/chat")[2]["error"].startswith("GET '/api/chat': this route takes POST")
    assert "the body is empty" in server.raw("POST", "/v1/completions")[2]["error"]["message"]
    for path, allowed in (
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/responses/x", "DELETE, GET, HEAD"),
        ("/", "GET, HEAD"),
    ):
        status, headers, content = server.raw("OPTIONS", path)
        assert (status, headers["allow"], content) == (204, f"{allowed}, OPTIONS".lower(), None)
    assert server.raw("OPTIONS", "/nothing")[0] == 404


def test_browsers_get_pages_and_others_do_not(server: Served, guarded: Served) -> None:
    html = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for asked, status in ((server, 404), (guarded, 401)):
        found, headers, content = ask(asked, "GET", "/%3Cscript%3E", **html)
        assert (found, headers["content-type"]) == (status, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["content-security-policy"] and "<script" not in content
        for other in ("*/*", "application/json, text/html;q=0.1"):
            assert ask(asked, "GET", "/%3Cscript%3E", accept=other)[1]["content-type"] == "application/json"
        assert ask(asked, "POST", "/v1/completions", {}, **html)[1]["content-type"] == "application/json"
    assert "&lt;script&gt;" in ask(server, "GET", "/%3Cscript%3E", **html)[2]
    assert "www-authenticate" in headers and "Authorization: Bearer KEY, or as x-api-key" in content
    assert "none of this server" in ask(guarded, "GET", "/v1/models", x_api_key="wrong")[2]
    assert ask(server, "GET", "/", **html)[2].startswith("<!doctype html>")
    assert ask(server, "GET", "/")[2].startswith("kvern is running") and ask(server, "HEAD", "/")[0] == 200


# Pages of other origins


@pytest.mark.parametrize("origin", ["*", "null"])
def test_credentials_are_for_origins_that_are_named(origin: str) -> None:
    with pytest.raises(ConfigError, match="which any page can be: name the origins"):
        ServerConfig(allowed_origins=(SITE, origin), allow_credentials=True)


def test_origins_methods_headers_and_credentials(guarded: Served) -> None:
    wanted = {"access_control_request_method": "DELETE", "access_control_request_headers": "authorization, x-evil"}
    for path in ("/v1/chat/completions", "/api/chat", "/nothing"):
        status, headers, _ = ask(guarded, "OPTIONS", path, origin=SITE, **wanted)
        assert (status, headers["access-control-allow-origin"]) == (204, SITE)
        assert headers["access-control-allow-methods"] == "GET, POST"
        assert headers["access-control-allow-headers"] == "authorization"
        assert headers["access-control-allow-credentials"] == "true" and headers["vary"] == "origin"
    assert ask(guarded, "OPTIONS", "/api/chat", origin="https://evil.example", **wanted)[0] == 403
    status, headers, _ = ask(guarded, "GET", "/v1/models", origin=SITE)
    assert (status, headers["access-control-allow-origin"]) == (401, SITE), "a page may read why it was refused"


UNUSED = {
    "kvern.api.messages",
    "kvern.api.responses",
    "kvern.server.handlers.batches",
    "kvern.server.openapi",
    "kvern.server.stores",
    "kvern.tools.formats",
    "kvern.tools.answer_grammar",
}


def test_a_plain_chat_imports_nothing_for_calls_other_apis_and_what_is_kept() -> None:
    program = "import sys, kvern.server.app, kvern.server.handlers.completions; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "kvern.tools.chat" in done.stdout.split()
    assert set(done.stdout.split()) & UNUSED == set()


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # some of the calls in their client
def test_audio_and_images_are_refused_by_name(server: Served) -> None:
    """With and without /v1, also while a client still sends a file."""
    client, file = server.client(), b"RIFF" + bytes(1 << 20)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("audio", lambda: client.audio.speech.create(model="tts-1", voice="alloy", input="Hello")),
        ("audio", lambda: client.audio.transcriptions.create(model="whisper-1", file=("a.wav", file))),
        ("audio", lambda: client.audio.translations.create(model="whisper-1", file=("a.wav", file))),
        ("images", lambda: client.images.generate(prompt="A fox")),
        ("images", lambda: client.images.edit(image=("a.png", file), prompt="A fox")),
        ("images", lambda: client.images.create_variation(image=("a.png", file))),
    ]
    for what, call in calls:
        with pytest.raises(openai.NotFoundError, match=f"this server has no {what}: kvern-1m reads") as refused:
            call()
        assert refused.value.code == "not_supported"
    status, _, said = server.raw("POST", "/audio/speech", b"{}")
    assert (status, said["error"]["type"]) == (404, "not_found_error")
