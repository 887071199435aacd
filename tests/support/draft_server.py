"""A server of drafts that answers whatever a test wants it to."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
MODELS = {"data": [{"id": "small", "max_model_len": 64}]}


def counting(body: Body) -> Body:
    """Guesses that each token is one more than the one before."""
    return {
        "choices": [
            {"index": index, "token_ids": [prompt[-1] + 1 + ahead for ahead in range(body["max_tokens"])]}
            for index, prompt in enumerate(body["prompt"])
        ]
    }


class Drafts:
    """A server of drafts: what `answer` makes of a body is sent, as JSON unless it is bytes, once `gate` is open."""

    def __init__(self) -> None:
        self.answer: Callable[[Body], Any] = counting
        self.status, self.headers = 200, {"Content-Type": "application/json"}
        self.gate = threading.Event()
        self.gate.set()
        self.models: Any = MODELS
        self.bodies: list[Body] = []


@contextmanager
def drafts_served() -> Iterator[tuple[Drafts, str]]:
    drafts = Drafts()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(drafts.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            drafts.bodies.append(body)
            drafts.gate.wait(240)
            self._send(drafts.answer(body))

        def _send(self, found: Any) -> None:
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(drafts.status)
            for name, value in {"Content-Length": str(len(data)), **drafts.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Nobody reads it."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that has gone is what is tested."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield drafts, f"http://127.0.0.1:{server.server_port}"
    finally:
        drafts.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
