"""Streams of a Triton Inference Server beside those of `kvern serve` itself, which answers both.

    make .triton-env
    python -m benchmarks.triton_streams --model kvern-12m [--streams 64] [--tokens 128] [--growth 10000]

    tokens_per_second   of so many streams at once, over gRPC and over kvern's own socket, in turns
    first_token_ms      from a request to its first piece, one stream at a time
    cancel_ms           from the cancellation of a gRPC stream to the end of the request in kvern
    responses           in which all texts of such a round came
    cpu_seconds         of each process while such a round runs: does not change with what else the machine does
    growth              resident memory and open files of Triton's processes over so many short streams

Clients are processes of their own: this file again, in Triton's Python (`--client`).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if "--client" not in sys.argv:  # Triton's Python has no kvern
    from tests.support.served import children_of, serving, worked
    from tests.support.triton_server import ENVIRONMENT, triton

    from kvern.bench.record import Case, figure, keep

SIDES = ("direct", "triton")
PROMPT = "Once upon a time there was a"
PARTS = 10
"""Moments at which memory is noted."""


class Counting(asyncio.Protocol):
    """One of kvern's streams, whose events are counted and not read: as little work as a client can have."""

    def __init__(self, tokens: int, began: list[float], ended: "asyncio.Future[int]") -> None:
        self._body = json.dumps({"prompt": PROMPT, "stream": True, "max_tokens": tokens, "ignore_eos": True}).encode()
        self._began = began
        self._ended = ended
        self._count = 0

    def connection_made(self, transport: Any) -> None:
        """Asks."""
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(self._body)
        transport.write(head + self._body)

    def data_received(self, data: bytes) -> None:
        """Counts."""
        self._count += data.count(b"data: {")
        if self._count and not self._began:
            self._began.append(time.monotonic())

    def connection_lost(self, error: Exception | None) -> None:
        """Tells the number of events."""
        self._ended.set_result(self._count)


async def direct(path: str, tokens: int, began: list[float]) -> int:
    """One of kvern's streams: appends the time of the first piece, and returns the number of events."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    await loop.create_unix_connection(lambda: Counting(tokens, began, ended), path)
    return await ended


async def over_grpc(client: Any, inputs: Any, began: list[float], cancel: bool = False) -> int:
    """One of Triton's streams, or its beginning."""

    async def asked() -> Any:
        yield {"model_name": "m", "inputs": inputs}

    stream = client.stream_infer(asked())
    count = 0
    async for _, error in stream:
        if error is not None:
            raise error
        if not count:
            began.append(time.monotonic())
        count += 1
        if cancel:
            stream.cancel()
            return count
    return count


def inputs_of(tokens: int) -> list[Any]:
    """The inputs of a request."""
    import numpy as np
    from tritonclient.grpc import aio

    sampling = json.dumps({"max_tokens": tokens, "ignore_eos": True})
    found = []
    for name, kind, value in (
        ("text_input", "BYTES", PROMPT),
        ("sampling_parameters", "BYTES", sampling),
        ("stream", "BOOL", True),
    ):
        found.append(aio.InferInput(name, [1], kind))
        found[-1].set_data_from_numpy(np.array([value], object if kind == "BYTES" else bool))
    return found


async def load_of(path: str) -> int:
    """The number of requests in kvern."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /load HTTP/1.0\r\n\r\n")
    content = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return int(json.loads(content)["server_load"])


async def until_idle(path: str) -> None:
    """Waits until kvern has no request."""
    while await load_of(path):
        await asyncio.sleep(0.001)


class Client:
    """The clients of both servers, in a process of their own."""

    def __init__(self, options: argparse.Namespace) -> None:
        from tritonclient.grpc import aio

        self._socket = options.socket
        self._triton = aio.InferenceServerClient(options.client)
        self._left = self._responses = 0
        self._first: list[float] = []
        self._waits: list[float] = []

    async def run(self) -> None:
        """Does what a line asks, and answers with a line of figures."""
        for line in sys.stdin:
            what, side, streams, tokens, self._left = json.loads(line)
            self._responses = 0
            self._first.clear()
            self._waits.clear()
            start = time.monotonic()
            await asyncio.gather(*(self._worker(what, side, tokens) for _ in range(streams)))
            seconds = time.monotonic() - start
            found = {"seconds": seconds, "first": self._first, "waits": self._waits, "responses": self._responses}
            print(json.dumps(found), flush=True)
        await self._triton.close()

    async def _worker(self, what: str, side: str, tokens: int) -> None:
        inputs = inputs_of(tokens)
        while self._left > 0:
            self._left -= 1
            start = time.monotonic()
            first: list[float] = []
            if side == "direct":
                count = await direct(self._socket, tokens, first)
            else:
                count = await over_grpc(self._triton, inputs, first, what == "cancel")
            self._responses += count
            self._first.append(first[0] - start)
            if what == "cancel":
                start = time.monotonic()
                await until_idle(self._socket)
                self._waits.append(time.monotonic() - start)


async def clients(options: argparse.Namespace) -> None:
    """Runs the clients, which belong to the event loop."""
    await Client(options).run()


def resident(pid: int) -> dict[str, int]:
    """Bytes and open files of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(list(Path(f"/proc/{pid}/fd").iterdir()))}


class Measurement:
    """Both servers, the client, and what was measured."""

    def __init__(self, options: argparse.Namespace, client: "subprocess.Popen[str]", processes: dict[str, int]) -> None:
        self._options = options
        self._client = client
        self._processes = processes
        self.cpu: dict[str, dict[str, list[float]]] = {side: {name: [] for name in processes} for side in SIDES}
        self.rates: dict[str, list[float]] = {side: [] for side in SIDES}
        self.firsts: dict[str, list[float]] = {side: [] for side in SIDES}
        self.responses: dict[str, list[float]] = {side: [] for side in SIDES}
        self.findings: dict[str, Any] = {}

    def _ask(self, what: str, side: str, streams: int, tokens: int, total: int) -> dict[str, Any]:
        assert self._client.stdin is not None and self._client.stdout is not None
        self._client.stdin.write(json.dumps([what, side, streams, tokens, total]) + "\n")
        self._client.stdin.flush()
        return json.loads(self._client.stdout.readline())  # type: ignore[no-any-return]

    def speed(self) -> None:
        """Measures rates and first tokens, in turns."""
        options = self._options
        for number in range(options.rounds + 1):
            for side in SIDES if number % 2 else SIDES[::-1]:
                before = {name: worked(pid) for name, pid in self._processes.items()}
                found = self._ask("rate", side, options.streams, options.tokens, options.streams)
                spent = {name: worked(pid) - before[name] for name, pid in self._processes.items()}
                alone = self._ask("first", side, 1, 2, 20)
                if number:  # the first round warms up
                    self.rates[side].append(options.streams * options.tokens / found["seconds"])
                    self.firsts[side].append(1e3 * statistics.median(alone["first"]))
                    self.responses[side].append(found["responses"])
                    for name, seconds in spent.items():
                        self.cpu[side][name].append(seconds)
                    print(number, side, self.rates[side][-1], self.firsts[side][-1], spent, flush=True)
        waits = [1e3 * wait for wait in self._ask("cancel", "triton", 1, 400, options.cancelled)["waits"]]
        self.findings["cancel_ms"] = {"median": statistics.median(waits), "most": max(waits)}

    def growth(self) -> None:
        """Notes what processes hold after a thousand streams, and after each tenth of many more."""
        processes = {name: self._processes[name] for name in ("triton", "model")}
        self._ask("growth", "triton", 64, 4, 1000)
        found = {"0": {name: resident(pid) for name, pid in processes.items()}}
        part = self._options.growth // PARTS
        for number in range(1, PARTS + 1):
            self._ask("growth", "triton", 64, 4, part)
            found[f"{number * part}"] = {name: resident(pid) for name, pid in processes.items()}
            print(f"after {number * part} streams: {found[f'{number * part}']}", flush=True)
        self.findings["growth"] = found


def measure(options: argparse.Namespace) -> None:
    """Starts both servers, measures and keeps the record."""
    serve = [options.model, "--dtype", "float32", *options.serve.split()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = [sys.executable, "-m", "kvern", "triton", options.model, "--out", str(folder / "models")]
        subprocess.run([*written, "--name", "m", "--socket", str(folder / "socket")], check=True)
        with (
            serving(*serve, "--uds", str(folder / "socket")) as kvern,
            triton(folder / "models", folder) as server,
        ):
            server.wait()
            server.load("m")
            command = [str(ENVIRONMENT / "bin/python"), __file__, "--client", f"127.0.0.1:{server.grpc}"]
            command += ["--socket", str(folder / "socket")]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                (stub,) = children_of(server.process.pid)
                processes = {"engine": kvern.engine_pid(), "server": kvern.process.pid, "model": stub}
                found = Measurement(options, client, processes | {"triton": server.process.pid, "client": client.pid})
                found.speed()
                if options.growth:
                    found.growth()
    cases = [
        Case(
            side,
            {
                "tokens_per_second": figure(found.rates[side], "tokens/s", "higher"),
                "first_token_ms": figure(found.firsts[side], "ms"),
                "responses": figure(found.responses[side], "responses"),
                **{f"cpu_seconds_{name}": figure(runs, "s") for name, runs in found.cpu[side].items()},
            },
        )
        for side in SIDES
    ]
    for case in cases:
        print(case.name, {name: (item.median, item.spread) for name, item in case.figures.items()})
    print(json.dumps(found.findings))
    keep(options.output, "triton_streams", options.model, vars(options), cases, found.findings)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-12m")
    parser.add_argument("--serve", default="--threads 1")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cancelled", type=int, default=30)
    parser.add_argument("--growth", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--client")
    parser.add_argument("--socket")
    options = parser.parse_args()
    if options.client:
        asyncio.run(clients(options))
    else:
        measure(options)


if __name__ == "__main__":
    main()
