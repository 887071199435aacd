"""What streams notice when a rank of their engine is killed: whether they end, and how long they stand still.

    python benchmarks/rank_killed.py --model kvern-12m -- -tp 2 --threads 2
    python benchmarks/rank_killed.py --model MODEL -- -tp 4 --load-format dummy --max-model-len 8192

Starts `kvern serve` with what stands behind `--`, sends streams, kills a rank in the middle of them with SIGKILL, and
waits until all have ended.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

RANK = "kvern.runner.ranks.rank_process"
WAIT = 0.01


@dataclass
class Stream:
    """When each of its chunks came, by the clock, and how many tokens the server says that it had."""

    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""

    @property
    def longest_gap(self) -> float:
        return max(later - sooner for sooner, later in zip(self.chunks, self.chunks[1:], strict=False))


def ranks() -> list[int]:
    """All ranks behind the first on this machine."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # others end meanwhile, and not all in it are processes
            if RANK in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


async def read(http: aiohttp.ClientSession, url: str, model: str, number: int, tokens: int, stream: Stream) -> None:
    body = {
        "model": model,
        "prompt": [300 + number + place for place in range(64)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            stream.error = stream.error or json.dumps(chunk.get("error") or "")
            if chunk.get("choices"):
                stream.chunks.append(time.monotonic())
            if chunk.get("usage"):
                stream.tokens = chunk["usage"]["completion_tokens"]


async def ready(http: aiohttp.ClientSession, url: str, server: asyncio.subprocess.Process) -> None:
    while server.returncode is None:
        try:
            async with http.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(WAIT)
    raise SystemExit(f"the server ended with exit code {server.returncode}")


async def measure(arguments: argparse.Namespace) -> None:
    url = f"http://127.0.0.1:{arguments.port}"
    command = [sys.executable, "-m", "kvern", "serve", "--model", arguments.model, "--port", str(arguments.port)]
    before = set(ranks())
    server = await asyncio.create_subprocess_exec(*command, *arguments.options)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            begun = time.monotonic()
            await ready(http, url, server)
            started = time.monotonic() - begun
            streams = [Stream() for _ in range(arguments.streams)]
            reading = [
                asyncio.create_task(read(http, url, arguments.model, number, arguments.tokens, stream))
                for number, stream in enumerate(streams)
            ]
            while sum(len(stream.chunks) for stream in streams) < arguments.streams * arguments.tokens // 5:
                await asyncio.sleep(WAIT)
            os.kill(min(set(ranks()) - before), signal.SIGKILL)
            await asyncio.gather(*reading)
    finally:
        server.send_signal(signal.SIGTERM)
        await server.wait()
    found = {
        "seconds of the start": round(started, 2),
        "streams": len(streams),
        "with all tokens": sum(stream.tokens == arguments.tokens for stream in streams),
        "with errors": sum(stream.error not in ("", '""') for stream in streams),
        "longest gap, seconds": round(max(stream.longest_gap for stream in streams), 2),
    }
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("options", nargs="*", help="of kvern serve, behind --")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
