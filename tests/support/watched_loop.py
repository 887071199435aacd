"""A server on an event loop that is watched: how long its callbacks compute."""

import asyncio
import contextlib
import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn

from kvern.config import EngineConfig
from kvern.server.app import Server
from kvern.server.config import ServerConfig
from kvern.server.keys import KeyRing
from kvern.serving.client import EngineClient

Ask = Callable[[str, dict[str, Any]], Awaitable[list[bytes]]]


@contextlib.asynccontextmanager
async def watched_server(config: ServerConfig | None = None) -> AsyncIterator[tuple[Ask, list[float]]]:
    """A function that sends a request (path and body) and yields the answer in parts; and the seconds of all callbacks.

    Processor time of the loop's thread is measured, not the clock: other processes do not count. Who asks is on the
    same loop, of which it takes little.
    """
    times: list[float] = []
    run = asyncio.events.Handle._run  # type: ignore[attr-defined]

    def timed(handle: Any) -> None:
        began = time.thread_time()
        run(handle)
        times.append(time.thread_time() - began)

    async with EngineClient(EngineConfig(model="kvern-1m", threads=1)) as client:
        settings = config or ServerConfig()
        app = Server([client], settings, KeyRing(settings)).app()
        listener = socket.create_server(("127.0.0.1", 0))
        http = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
        serving_it = asyncio.create_task(http.serve(sockets=[listener]))
        port = listener.getsockname()[1]

        async def ask(path: str, body: dict[str, Any]) -> list[bytes]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = await asyncio.to_thread(lambda: json.dumps(body).encode())
            head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            parts = []
            while part := await reader.read(1 << 16):
                parts.append(part)
            writer.close()
            return parts

        gc.collect()
        gc.freeze()
        asyncio.events.Handle._run = timed  # type: ignore[attr-defined]
        try:
            yield ask, times
        finally:
            asyncio.events.Handle._run = run  # type: ignore[attr-defined]
            gc.unfreeze()
        http.should_exit = True
        await serving_it
