"""Forms that nobody can follow, sent to a server with eight streams: each is refused, and no stream notices."""

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from kvern import LLM, SamplingParams
from tests.support.served import PATIENCE, Served

STREAMS = 8
TOKENS = 24


def nested(schema: Any, levels: int) -> Any:
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def parts(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"], "$defs": value}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"guided_json": {"type": "bogus"}}, "Invalid type: bogus"),
    "a type that is a number": ({"guided_json": {"type": 5}}, "type"),
    "a schema that is a number": ({"guided_json": 5}, "structured.json"),
    "a schema that is no JSON": ({"guided_json": "{"}, "guided_json is not valid JSON"),
    "a deep schema as text": ({"guided_json": "[" * 5000}, "guided_json is not valid JSON"),
    "a broken expression in a schema": ({"guided_json": {"type": "string", "pattern": "a("}}, "unclosed group"),
    "a reference to nothing": ({"guided_json": {"$ref": "#/$defs/none"}}, "/$defs/none"),
    "a reference to itself": ({"guided_json": {"$ref": "#"}}, "$ref '#' leads back to itself"),
    "a circle of two": (
        {"guided_json": parts({"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}})},
        "leads back to itself",
    ),
    "a circle through anyOf": ({"guided_json": parts({"a": {"anyOf": [{"$ref": "#/$defs/a"}]}})}, "'#/$defs/a'"),
    "a circle through a pointer into a list": (
        {"guided_json": {"allOf": [{"$ref": "#/allOf/0"}]}},
        "$ref '#/allOf/0' leads back",
    ),
    "minimum above maximum": (
        {"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}},
        "minimum (5) is greater than maximum (3)",
    ),
    "two types at once": ({"guided_json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "incompatible types"),
    "no choice at all": ({"guided_json": {"enum": []}}, "anyOf is empty"),
    "no multiple in the range": (
        {"guided_json": {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9}},
        "does not contain a multiple of 10",
    ),
    "a property that must and may not be": (
        {"guided_json": {"type": "object", "properties": {"a": False}, "required": ["a"]}},
        "# has a required property 'a' that may not be there",
    ),
    "an expression that matches nothing": ({"guided_regex": r"[^\s\S]"}, "no text has this form"),
    "rules that lead nowhere": ({"guided_grammar": "start: a\na: b\nb: a"}, "no text has this form"),
    "an unknown rule": ({"guided_grammar": "start: missing"}, "unknown name"),
    "an unknown rule of GBNF": ({"guided_grammar": "root ::= missing"}, "the grammar has no rule 'missing'"),
    "an expression that looks ahead": ({"guided_regex": "(?=a)b"}, "look-ahead"),
    "an expression that looks back": ({"guided_regex": r"(a)\1"}, "backreferences"),
    "an unclosed expression": ({"guided_regex": "(a"}, "unclosed group"),
    "a deep and unclosed expression": ({"guided_regex": "(" * 20_000}, "invalid regex"),
    "a deep expression": ({"guided_regex": "(" * 20_000 + ")" * 20_000}, "structured"),
    "ten megabytes": ({"guided_grammar": "x" * (10 << 20)}, "at most 1048576"),
    "ten megabytes of a schema": ({"guided_json": {"enum": ["x" * (10 << 20)]}}, "at most 1048576"),
    "a deep schema": ({"guided_json": nested({"type": "integer"}, 200)}, "recursion limit exceeded at line 1 column"),
    "a deep grammar": ({"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
    "a deep grammar of GBNF": ({"guided_grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply"),
    "too many combinations": (
        {
            "guided_json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"{name}{number}": {"type": "null"}}} for name in "ab"]}
                    for number in range(24)
                ]
            }
        },
        "too large",
    ),
}
CATASTROPHIC = [
    "(a+)+$",
    "(a|aa)+c",
    "(x+x+)+y",
    "((a{1,100}){1,100}){1,100}",
    ".*a.{20}",
    "(.*a.{40}){3}",
    "a{100000000}",
]
"""Expressions at which a matcher that tries everything does not end."""


@pytest.fixture(scope="module")
def alone() -> list[list[str]]:
    """The tokens of each stream, generated one after the other."""
    with LLM("kvern-1m", threads=1, max_model_len=512, dtype="float32") as llm:
        found = []
        for number in range(STREAMS):
            [output] = llm.generate(prompt_of(number), SamplingParams(**options_of(number), logprobs=0))
            tables = output.outputs[0].logprobs or []
            found.append([next(iter(table.values())).token or "" for table in tables])
        return found


def prompt_of(number: int) -> str:
    return f"Story number {number}: once upon a time"


def options_of(number: int) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "seed": number, "temperature": 1.0, "ignore_eos": True}


class Streams:
    """Streams that begin anew until the block ends; their tokens are always those of `alone`."""

    def __init__(self, server: Served, alone: list[list[str]]) -> None:
        self._server, self._alone = server, alone
        self._threads = ThreadPoolExecutor(STREAMS)
        self._begun, self._enough = threading.Barrier(STREAMS + 1), threading.Event()

    def _run(self, number: int) -> None:
        client = self._server.client()
        wait: Callable[[float], int] | None = self._begun.wait
        while not self._enough.is_set():
            assert self._tokens(client, number, wait) == self._alone[number]
            wait = None

    def _tokens(self, client: openai.OpenAI, number: int, wait: Callable[[float], int] | None) -> list[str]:
        """Of one stream, whose rest is read after a wait."""
        options = options_of(number)
        ignore = {"ignore_eos": options.pop("ignore_eos")}
        stream = client.completions.create(
            model="kvern-1m", prompt=prompt_of(number), stream=True, logprobs=0, extra_body=ignore, **options
        )
        tokens = list(next(stream).choices[0].logprobs.tokens)
        if wait is not None:
            wait(PATIENCE)
        return tokens + [token for chunk in stream for token in chunk.choices[0].logprobs.tokens]

    def __enter__(self) -> None:
        self._running = [self._threads.submit(self._run, number) for number in range(STREAMS)]
        self._begun.wait(PATIENCE)

    def __exit__(self, *error: object) -> None:
        self._enough.set()
        with self._threads:
            for future in self._running:
                future.result()


def ask(server: Served, body: dict[str, Any] | bytes) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps({"prompt": "a", "max_tokens": 8, **body}).encode()
    status, _, answer = server.raw("POST", "/v1/completions", data)
    return status, answer


@pytest.mark.nightly
def test_bad_forms_beside_streams(server: Served, alone: list[list[str]]) -> None:
    wrong = []
    with Streams(server, alone):
        for name, (body, said) in BAD.items():
            status, answer = ask(server, body)
            if status != 400 or said not in answer["error"]["message"]:
                wrong.append((name, status, str(answer)[:300]))
    assert not wrong


def test_bodies_nested_without_end(server: Served, alone: list[list[str]]) -> None:
    with Streams(server, alone):
        for body in (b'{"guided_json": ' + b'{"items": ' * 100_000, b"[" * 1_000_000, b'{"prompt": ' + b"[" * 5000):
            status, answer = ask(server, body)
            assert status == 400 and answer["error"]["message"].startswith("the body ")


def test_nothing_is_fetched(server: Served, alone: list[list[str]]) -> None:
    """Somebody listens where the references point, and nobody comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        schemas: list[dict[str, Any]] = [
            {"$ref": url},
            {"$id": url, "$ref": "other.json"},
            {"type": "object", "properties": {"a": {"$ref": f"{url}#/$defs/a"}}},
            {"$ref": "file:///etc/passwd"},
        ]
        bodies: list[dict[str, Any]] = [{"guided_json": schema} for schema in schemas]
        bodies += [{"response_format": {"type": "json_schema", "json_schema": {"schema": schemas[0]}}}]
        bodies += [{"guided_grammar": f"start: %json {json.dumps(schemas[0])}"}]
        with Streams(server, alone):
            assert ask(server, {"guided_json": {"$schema": url, "type": "integer"}})[0] == 200
            for body in bodies:
                status, answer = ask(server, body)
                said = answer["error"]["message"]
                assert status == 400 and ("never fetched" in said or "not present in a registry" in said), said
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_expressions_that_explode_elsewhere(server: Served, alone: list[list[str]]) -> None:
    """They are followed, refused, or end with an error that says why; others go on in any case."""
    with Streams(server, alone):
        for expression in CATASTROPHIC:
            status, answer = ask(server, {"guided_regex": expression})
            said = "" if status == 200 else answer["error"]["message"]
            assert {200: "", 400: "use fewer properties", 500: "grammar"}[status] in said, expression
