"""Everything hostile that one client can send, as (name, act): for the soak, and for whoever wants to try it alone.

python benchmarks/attacks.py http://127.0.0.1:8000 KEY      # each once, with the answer's status and time
"""

import asyncio
import base64
import contextlib
import json
import random
import secrets
import ssl
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HOSTILE_HEADERS = 1 << 22
"""Bytes of one endless header."""


class Attacker:
    """Sends to a server on this machine, over raw connections; `seconds` is how long it waits for an answer."""

    def __init__(self, url: str, key: str, seconds: float = 20) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        if self._host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(f"{self._host} is not this machine: attack none but your own")
        self._key = key
        self._seconds = seconds
        self._random = random.Random(0)
        self.statuses: dict[str, dict[str, int]] = {}

    async def post(self, path: str, body: bytes, kind: str = "application/json", extra: str = "") -> str:
        """One request; the status, or what came instead."""
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: {kind}\r\n{extra}"
        head += f"Authorization: Bearer {self._key}\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self._send([head.encode() + body])

    async def _send(self, parts: list[bytes]) -> str:
        try:
            async with asyncio.timeout(self._seconds):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    with contextlib.suppress(ConnectionError):
                        for part in parts:
                            writer.write(part)
                            await writer.drain()
                    first = await reader.readline()
                    while await reader.read(1 << 16):
                        pass
                finally:
                    writer.close()
        except TimeoutError:
            return "left"
        except (ConnectionError, ssl.SSLError):
            return "closed"
        return first.split()[1].decode() if first.startswith(b"HTTP/") else "closed"

    async def act(self, name: str, what: Callable[["Attacker"], Awaitable[str]]) -> None:
        """Do it and count how it was answered."""
        status = await what(self)
        counts = self.statuses.setdefault(name, {})
        counts[status] = counts.get(status, 0) + 1

    async def endless_header(self) -> str:
        return await self._send([b"GET /health HTTP/1.1\r\nX-A: ", *[b"a" * 65536] * (HOSTILE_HEADERS // 65536)])

    async def endless_trailers(self) -> str:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._key}\r\n"
        head += "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        return await self._send([head.encode(), *[b"X-A: " + b"a" * 4000 + b"\r\n"] * 1000])

    async def pipeline(self) -> str:
        return await self._send([b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20_000])

    async def long_stream(self) -> str:
        """An ordinary one; many of them take all rows."""
        body = completion(prompt=f"Once {secrets.token_hex(4)}", max_tokens=1500, ignore_eos=True, stream=True)
        return await self.post(COMPLETIONS, body)

    async def leave(self, body: bytes) -> str:
        """Ask, and leave before the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._random.random() / 2):
                return await self.post(COMPLETIONS, body)
        return "left"


def fresh(body: bytes) -> bytes:
    """With a name that was not sent before in the place of NAME: what is remembered of a form helps nobody."""
    return body.replace(b"NAME", secrets.token_hex(4).encode())


def completion(**fields: Any) -> bytes:
    """A body that asks for little but for what it names."""
    return json.dumps({"prompt": "Once", "max_tokens": 4} | fields).encode()


def schemas() -> dict[str, Any]:
    """Forms that are dear to compile or to follow."""
    text = {"type": "string"}
    variants = [{"type": "object", "properties": {f"NAME{number}": text}} for number in range(3000)]
    optional = {f"NAME_{number}": text for number in range(10_000)}
    rules = "\n".join(f"r{number}: r{number + 1} | r{number + 1} r{number + 1}" for number in range(2000))
    return {
        "600 patternProperties": {"json": {"patternProperties": {f"^NAME{n}_": text for n in range(600)}}},
        "1000 patternProperties": {"json": {"patternProperties": {f"^NAME{n}_b": text for n in range(1000)}}},
        "10000 optional properties": {"json": {"type": "object", "properties": optional}},
        "anyOf of 3000": {"json": {"anyOf": variants}},
        "grammar of 2000 rules": {"grammar": f'start: r0\n{rules}\nr2000: "NAME"'},
        "a? 5000 times": {"regex": "NAME" + "a?" * 5000},
        "nested repetitions": {"regex": "NAME((a{0,100}){0,100}){0,100}b"},
        "choice of 5000": {"choice": [f"NAME {n} {'x' * (n % 50)}" for n in range(5000)]},
    }


def items() -> dict[str, Any]:
    """Bodies of responses whose items are little one by one."""
    packed = base64.urlsafe_b64encode(zlib.compress(bytes(5 << 20))).decode()
    bomb = {"type": "reasoning", "encrypted_content": f"kvern1.{packed}"}
    thought = {"type": "reasoning", "content": [{"type": "text", "text": "a" * 4000}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}
    changed = {f"field {number}": 0 for number in range(150_000)}
    return {
        "thinking that unpacks": {"input": [bomb] * 1500},
        "thinking before calls": {"input": [thought, call] * 3500},
        "configurations": {"input": [{"type": "configuration_update"}] * 6000, **changed},
    }


def numbers() -> dict[str, dict[str, Any]]:
    """Fields that ask for much, or for what cannot be."""
    return {
        "tiny top_p": {"temperature": 1, "top_p": 1e-46},
        "flat and tiny top_p": {"temperature": 1000, "top_p": 1e-300},
        "priority of 64 bits": {"priority": 2**64 - 1},
        "max_tokens of 70 bits": {"max_tokens": 2**70},
        "prompt_logprobs_from of 70 bits": {"prompt_logprobs": 1, "prompt_logprobs_from": 2**70},
        "800 answers": {"prompt": ["Once"] * 8, "n": 100, "max_tokens": 2},
        "log-probabilities of prompts": {"prompt": ["Once upon a time " * 20] * 200, "prompt_logprobs": 100},
        "answers with log-probabilities": {"prompt": ["Once"] * 8, "n": 100, "logprobs": 100},
        "100 log-probabilities of 1900 tokens": {"prompt": list(range(100, 290)) * 10, "prompt_logprobs": 100},
        "64 answers with 100 log-probabilities": {"prompt": ["Once"] * 8, "n": 8, "logprobs": 100, "max_tokens": 100},
        "long DRY breakers": {
            "prompt": [5, 6, 7] * 500,
            "dry_multiplier": 0.8,
            "dry_sequence_breakers": [f"{number:02}" + "ab " * 12 + "c" for number in range(32)],
            "max_tokens": 200,
        },
        "stop strings": {"stop": ["ab" * 500] * 64},
    }


Act = Callable[[Attacker], Awaitable[str]]


def attacks() -> Iterator[tuple[str, Act]]:
    """All of them, each with its name."""
    for name, fields in numbers().items():
        body = completion(**fields)
        yield name, lambda attacker, body=body: attacker.post(COMPLETIONS, body)
    for name, form in schemas().items():
        body = completion(structured_outputs=form, max_tokens=30)
        yield name, lambda attacker, body=body: attacker.post(COMPLETIONS, fresh(body))
        yield f"{name}, left", lambda attacker, body=body: attacker.leave(fresh(body))
    message = {"role": "user", "content": "a"}
    pin = json.dumps({"prompt": "The number is 4711", "max_tokens": 1}).encode()
    score = {"context": [5] * 1_000_000, "continuations": [[6]] * 1000}
    bodies: dict[str, tuple[str, bytes]] = {
        **{name: ("/v1/responses", json.dumps(body).encode()) for name, body in items().items()},
        "tiny messages": (CHAT, json.dumps({"messages": [message] * 400_000}).encode()),
        "token ids": (COMPLETIONS, json.dumps({"prompt": [7] * 5_000_000}).encode()),
        "one long word": (COMPLETIONS, completion(prompt="a" * 15_000_000)),
        "one long word counted": ("/tokenize", json.dumps({"prompt": "a" * 15_000_000}).encode()),
        "nested": (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "an endpoint that is an object": ("/v1/batches", b'{"endpoint": {}, "input_file_id": "file-x"}'),
        "a million scores": ("/v1/score", json.dumps(score).encode()),
        "large metadata": ("/v1/responses", json.dumps({"input": "a", "metadata": {"a": "b" * 10_000_000}}).encode()),
        "many responses": ("/v1/responses", b'{"input": "a", "max_output_tokens": 1}'),
        "many followed responses": ("/v1/responses", b'{"input": "a", "background": true, "stream": true}'),
        "many conversations": ("/v1/conversations", json.dumps({"items": [message] * 8000}).encode()),
        "the words of others": (COMPLETIONS, pin),
        "lone surrogates": (COMPLETIONS, b'{"prompt": "\\ud800", "user": "\\udfff", "stop": ["\\ud800"]}'),
    }
    for name, (path, body) in bodies.items():
        yield name, lambda attacker, path=path, body=body: attacker.post(path, body)
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"a" * 900_000 + b"\r\n--x--\r\n"
    )
    for charset in ("punycode", "unicode_escape", "utf-8"):
        kind = f"multipart/form-data; boundary=x; charset={charset}"
        yield f"a form in {charset}", lambda attacker, kind=kind: attacker.post("/v1/files", form, kind)
    yield (
        "a foreign page",
        lambda attacker: attacker.post(COMPLETIONS, pin, "text/plain", "Origin: http://evil.test\r\n"),
    )
    yield "an endless header", Attacker.endless_header
    yield "endless trailers", Attacker.endless_trailers
    yield "a pipeline that nobody reads", Attacker.pipeline


async def main(url: str, key: str) -> None:
    """Each once; a line for each."""
    attacker = Attacker(url, key, 120)
    for name, act in attacks():
        began = time.monotonic()
        print(f"{await act(attacker):>8} {time.monotonic() - began:7.2f} s  {name}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"))
