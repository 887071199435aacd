"""Requests made from the server's own description: every field, alone and with others, at values that break things.

A new field of the description is fuzzed without being listed here.
"""

import copy
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any
from urllib.parse import quote

import msgspec

from kvern.api import messages, ollama, responses, scores, text_pairs
from kvern.api.chat_fields import CHAT_FIELDS
from kvern.api.completions import CHAT, COMPLETIONS, ONLY_VALUES, OWN_FIELDS
from kvern.api.fields import WITHOUT_EFFECT
from kvern.request.sampling_params import SamplingParams
from tests.support import fuzz_bodies
from tests.support.served import Served

Schema = dict[str, Any]
Path = tuple[str | int, ...]

RAW = {"@digits": "9" * 5000, "@huge": "1e400", "@deep": "[" * 900 + "]" * 900}
"""Values that Python's JSON does not write, by the text that stands for them."""
# fmt: off
NUMBERS: list[Any] = [
    0, 1, -1, -0.0, 0.5, 1.5, 5e-324, 1e-300, 1e-46, 1e-38, 1e-37, 1e-6, 1e-5, -1e-46, 2, 1e6, 1e9, 1e39, 1e308, -1e308,
    2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -2**31,
    -2**63, -2**63 - 1, -2**64, 10**300, 10**4000, "@digits",
    "@huge", float("nan"), float("inf"),
]
TEXTS: list[Any] = [
    "", "\0", "a\0b", "\ud800", "a\udc00\ud800", "\U0001f600", "x" * 5000, "\x1b[31m\r\n", "../../etc/passwd", "%s{}\\",
    "NaN", "1e400",
]
OTHERS: list[Any] = [
    None, True, False, [], {}, [[]], [{}], {"": {}}, [None], [2**64], [-1], ["\ud800"], ["a", 1], [0] * 3000,
    {"a": 2**64}, {"\0": "\0"}, {"5": 1e-46}, {"5": 1e9}, {"5": -1e9}, {"99999999999999999999": 1}, {"-1": 1}, "@deep",
]
# fmt: on
GENTLE: dict[str, list[Any]] = {
    "integer": [0, 1, 2, 3, 5, 64, 2**31 - 1],
    "number": [0, 0.5, 1, -2, 2, 1e-37, 5e-324, 1e-5, 1e6],
    "string": ["a", "\0", "fox"],
    "array": [["a"], [5], [5, 5, 6]],
    "object": [{"5": 1e9, "6": -1e9}, {"5": 5e-324}, {}],
    "boolean": [True, False],
}
"""Values that are mostly accepted, for several fields at once."""
FEW = [-1, 2**64, 1e308, "\0", [], {}, [[]], True]
"""Values for fields of other types."""
EXAMPLES: dict[str, Any] = {
    "role": "user",
    "content": "Once",
    "max_tokens": 2,
    "max_output_tokens": 2,
    "name": "tool",
    "lora_name": "adapter",
    "lora_path": "adapter",
    "structured": {"choice": ["a"]},
    "input": "Once",
    "schema": {"type": "boolean"},
    "parameters": {},
    "input_schema": {},
}
EXTRA_FIELDS: dict[str, frozenset[str]] = {
    COMPLETIONS: frozenset(OWN_FIELDS | set(ONLY_VALUES) | WITHOUT_EFFECT) - CHAT_FIELDS,
    CHAT: frozenset(OWN_FIELDS | set(ONLY_VALUES) | WITHOUT_EFFECT | CHAT_FIELDS),
    "/v1/responses": responses.KNOWN,
    messages.MESSAGES: messages.KNOWN,
    ollama.CHAT: ollama.KNOWN,
    ollama.GENERATE: ollama.KNOWN,
    text_pairs.RERANK: text_pairs.RERANK_KNOWN,
    scores.SCORE: scores.KNOWN | text_pairs.KNOWN,
}
"""Fields of a route that its description lacks."""


@dataclass(frozen=True)
class Probe:
    """One request, and where it is answered."""

    method: str
    path: str
    body: bytes = b""
    route: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.method} {self.path[:300]} {dict(self.headers) or ''} {self.body[:2000]!r}"


def encoded(body: object) -> bytes:
    """JSON, with the values that only a text can hold."""
    text = json.dumps(body)
    for name, value in RAW.items():
        text = text.replace(f'"{name}"', value)
    return text.encode()


def minimal(schema: Schema, name: str = "", full: bool = False) -> Any:
    """A small valid value; of an object the fields that must be there, or all."""
    if name in EXAMPLES:
        return copy.deepcopy(EXAMPLES[name])
    for choice in schema.get("anyOf", ()):
        return minimal(choice, name, full)
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            fields = schema.get("properties", {})
            wanted = fields if full else schema.get("required", ())
            return {field: minimal(fields[field], field, full) for field in wanted}
        case "array":
            return [minimal(schema.get("items", {}), name, True)]
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return False
    return "Once"


REFERRED = msgspec.json.schema(SamplingParams)["$defs"]


def choices_of(schema: Schema) -> list[Schema]:
    """The alternatives of a schema, with references resolved."""
    choices = [schema, *schema.get("anyOf", ())]
    return [REFERRED[choice["$ref"].rpartition("/")[2]] if "$ref" in choice else choice for choice in choices]


def places(schema: Schema, path: Path = ()) -> Iterator[tuple[Path, set[str]]]:
    """Every place in a body below its root, and the kinds of value that it takes."""
    choices = choices_of(schema)
    if path:
        yield path, {choice["type"] for choice in choices if isinstance(choice.get("type"), str)}
    if len(path) >= 6:
        return
    for choice in choices:
        for name, inner in choice.get("properties", {}).items():
            yield from places(inner, (*path, name))
        if isinstance(choice.get("items"), dict):
            yield from places(choice["items"], (*path, 0))


def values_for(kinds: set[str], thorough: bool) -> list[Any]:
    """Values for a place of these types."""
    if thorough:
        return [*NUMBERS, *TEXTS, *OTHERS]
    numbers = NUMBERS if kinds & {"integer", "number"} else []
    texts = TEXTS if "string" in kinds else []
    others = OTHERS if kinds & {"array", "object"} or not kinds else []
    return [*numbers, *texts, *others, *FEW]


def put(body: Any, schema: Schema, path: Path, value: object) -> bool:
    """Set a place, making what is above it; whether that was possible."""
    for depth, step in enumerate(path):
        last = depth + 1 == len(path)
        choices = choices_of(schema)
        if isinstance(step, int):
            schema = next((choice["items"] for choice in choices if "items" in choice), {})
            if not isinstance(body, list) or not body:
                return False
        else:
            schema = next(
                (choice["properties"][step] for choice in choices if step in choice.get("properties", {})), {}
            )
            if not isinstance(body, dict):
                return False
        if last:
            body[step] = copy.deepcopy(value)
            return True
        following = path[depth + 1]
        wanted = list if isinstance(following, int) else dict
        if isinstance(step, str) and not isinstance(body.get(step), wanted):
            body[step] = [] if wanted is list else {}
        inner = body[step]
        if isinstance(inner, list) and not inner:
            inner.append({} if depth + 2 < len(path) and isinstance(path[depth + 2], str) else None)
        if isinstance(inner, list) and depth + 2 < len(path) and not isinstance(inner[0], dict | list):
            inner[0] = {}
        body = inner
    return False


PROCESSES = ("/v1/add_engine", "/v1/remove_engine")
"""Routes that start and end processes of the server, as many as the machine has room for."""


class Requests:
    """Makes them from a description (OpenAPI); `fixed` are fields that a route needs to be of use."""

    def __init__(self, document: Schema, fixed: dict[str, dict[str, Any]]) -> None:
        self._fixed = fixed
        self.bodies: dict[str, Schema] = {}
        self._methods: dict[str, str] = {}
        self.others: list[tuple[str, str, list[Schema]]] = []
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                content = operation.get("requestBody", {}).get("content", {})
                if path in PROCESSES:
                    continue
                if "application/json" in content:
                    schema = copy.deepcopy(content["application/json"]["schema"])
                    first = schema.get("anyOf", [schema])[0]
                    for name in EXTRA_FIELDS.get(path, ()):
                        first["properties"].setdefault(name, {})
                    self.bodies[path], self._methods[path] = schema, method.upper()
                elif not content:
                    self.others.append((method.upper(), path, operation["parameters"]))

    def plain(self, route: str) -> dict[str, Any]:
        """The small valid body of a route."""
        return {**minimal(self.bodies[route]), **copy.deepcopy(self._fixed.get(route, {}))}

    def singles(self, thorough: bool = False) -> Iterator[Probe]:
        """Every place of every body at every value, alone, and of nested ones; then paths, queries and headers."""
        for route, nested in fuzz_bodies.BODIES.items():
            body = {**self.plain(route), **nested}
            for place in fuzz_bodies.places(nested):
                for value in values_for(set(), True) if thorough else [*FEW, "@deep"]:
                    yield Probe("POST", route, encoded(fuzz_bodies.replaced(body, place, value)), route)
        for route, schema in self.bodies.items():
            for path, kinds in places(schema):
                for value in values_for(kinds, thorough):
                    body = self.plain(route)
                    if put(body, schema, path, value):
                        yield Probe(self._methods[route], _spelled(route), encoded(body), route)
            for value in (*NUMBERS, *TEXTS, *OTHERS):
                yield Probe(self._methods[route], _spelled(route), encoded(value), route)
        yield from self._without_body()

    def _without_body(self) -> Iterator[Probe]:
        spelled = [quote(text.encode("utf-8", "surrogatepass"), safe="") for text in TEXTS]
        spelled += [quote(json.dumps(number)) for number in NUMBERS] + [
            "9" * 5000,
            "%ff%fe",
            "%ed%a0%80",
            "%2e%2e",
            "%C2%B2",
        ]
        for method, path, parameters in self.others:
            yield Probe(method, path.replace("{", "").replace("}", ""), route=path)
            for parameter in parameters:
                for text in spelled:
                    if parameter["in"] == "path":
                        yield Probe(method, path.replace("{" + parameter["name"] + "}", text), route=path)
                    else:
                        yield Probe(method, f"{path}?{parameter['name']}={text}", route=path)
        for name in ("x-request-id", "content-type", "accept", "authorization", "user-agent", "x-api-key"):
            for header in ("", "\xff", "x" * 5000, "9" * 20, "Basic \xff", "Bearer", "application/json; charset=x"):
                body = encoded(self.plain(COMPLETIONS))
                yield Probe("POST", COMPLETIONS, body, "headers", ((name, header),))

    def several(self, chance: random.Random, thorough: bool = True) -> Iterator[Probe]:
        """Two or three places at once, for ever."""
        found = {route: list(places(schema)) for route, schema in self.bodies.items()}
        weights = [len(found[route]) for route in found]
        while True:
            [route] = chance.choices(list(found), weights)
            body = self.plain(route)
            for _ in range(chance.choice((2, 2, 3))):
                path, kinds = chance.choice(found[route])
                put(body, self.bodies[route], path, self._value(chance, kinds, thorough))
            yield Probe(self._methods[route], _spelled(route), encoded(body), route)

    def _value(self, chance: random.Random, kinds: set[str], thorough: bool) -> Any:
        gentle = [value for kind in sorted(kinds) for value in GENTLE.get(kind, ())]
        if gentle and chance.random() < 0.7:
            return chance.choice(gentle)
        return chance.choice(values_for(kinds, thorough and chance.random() < 0.3))


@dataclass
class Findings:
    """Counts of answers, and answers that are wrong."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)

    def add(self, probe: Probe, status: int, content_type: str, content: bytes, seconds: float) -> None:
        """Judge an answer."""
        self.statuses[probe.route, status] += 1
        self.slowest = sorted([*self.slowest, (seconds, str(probe)[:200])], reverse=True)[:10]
        problem = problem_of(probe, status, content_type, content)
        if problem:
            self.wrong.append(f"{status} {problem}: {content[:300]!r} to {probe}")


def problem_of(probe: Probe, status: int, content_type: str, content: bytes) -> str | None:
    """The fault of an answer."""
    if not (200 <= status < 300 or status == 307 or 400 <= status < 500):
        return "the status is neither done nor refused"
    if content_type.startswith("application/x-ndjson"):
        return "the stream tells of an error" if b'{"error"' in content and b"timeout has" not in content else None
    if content_type.startswith("text/event-stream"):
        faulty = b'"server_error"' in content or b'"api_error"' in content
        return "the stream tells of a fault" if faulty and b"timeout has passed" not in content else None
    if not content_type.startswith("application/json"):
        return None if status in (200, 307, 405) else "it is no JSON"
    try:
        answer = json.loads(content.decode())
    except ValueError:
        return "it is not valid JSON"
    if status < 300:
        return None
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error  # a text in ollama's API
    if not isinstance(message, str) or not message or "\n" in message:
        return "the error has no message of one line"
    return "the message is long" if len(message) > 1500 else None


def send(address: tuple[str, int], probes: Iterable[Probe], findings: Findings, key: str, width: int = 8) -> None:
    """Send all, `width` at a time over connections that are kept."""
    queue: Queue[Probe] = Queue()
    for probe in probes:
        queue.put(probe)
    lock = threading.Lock()

    def work() -> None:
        connection = http.client.HTTPConnection(*address, timeout=240)
        while not queue.empty():
            try:
                probe = queue.get_nowait()
            except Empty:
                break
            began = time.monotonic()
            try:
                connection.putrequest(probe.method, probe.path, skip_accept_encoding=True)
                named = {name for name, _ in probe.headers}
                for name, value in (("content-type", "application/json"), ("authorization", f"Bearer {key}")):
                    if name not in named:
                        connection.putheader(name, value)
                connection.putheader("content-length", str(len(probe.body)))
                for name, value in probe.headers:
                    connection.putheader(name, value)
                connection.endheaders(probe.body)
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                with lock:
                    findings.wrong.append(f"{type(error).__name__} {error}: to {probe}")
                continue
            with lock:
                kind = answer.headers.get("content-type", "")
                findings.add(probe, answer.status, kind, content, time.monotonic() - began)
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(width)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _spelled(route: str) -> str:
    """The path of a route; the model of one is the server's."""
    return route.replace("{model}", "kvern-1m")


FIXED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"max_tokens": 1, "temperature": 1},
    "/v1/chat/completions": {"max_tokens": 1, "temperature": 1},
    "/v1/responses": {"max_output_tokens": 1, "temperature": 1},
    "/v1/messages": {"max_tokens": 1, "temperature": 1},
    "/v1/profile": {"steps": 1, "seconds": 0.1},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 1, "temperature": 1}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 1, "temperature": 1}},
}
"""Short, and drawn: where the checkpoint says to take the best token, the filters would have nothing to do."""


def plain_answer(server: Served) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 20, "seed": 4}
    status, _, answer = server.raw("POST", "/v1/completions", json.dumps(body).encode())
    assert status == 200
    return json.dumps(answer["choices"])
