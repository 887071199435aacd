"""What an idle `kvern serve` takes of a core: server, engine and all their children together (Linux).

python benchmarks/idle.py                            # the embedded model, 60 seconds before any request and after
python benchmarks/idle.py --seconds 30 --model FOLDER --load-format dummy     # other options go to the server
"""

import argparse
import json
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving import Server, serving

TARGET = 0.01
"""Of one core."""
QUESTION = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 32}
FORM = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"type": "integer"}}}


def processes(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from processes(int(child))


def worked(pid: int) -> float:
    """Seconds of a core that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(server: Server, seconds: float) -> tuple[float, int]:
    """The share of a core that is taken while nobody asks for anything, and the number of processes."""
    before = {pid: worked(pid) for pid in processes(server.process.pid)}
    began = time.monotonic()
    time.sleep(seconds)
    taken = sum(worked(pid) - before.get(pid, 0.0) for pid in processes(server.process.pid))
    return taken / (time.monotonic() - began), len(before)


def ask(server: Server, fields: dict[str, object]) -> None:
    body = json.dumps(QUESTION | fields).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to look, each time")
    arguments, options = parser.parse_known_args()
    with serving(options) as server:
        shares: list[float] = []
        for when in ("before any request", "after requests"):
            if shares:
                asked: list[dict[str, Any]] = [
                    {"stream": True},
                    {"response_format": FORM},
                    {"temperature": 1.0, "n": 4},
                ]
                for fields in asked:
                    ask(server, fields)
            time.sleep(5)  # what ends a start, or an answer, is not idle yet
            share, count = measure(server, arguments.seconds)
            shares.append(share)
            print(f"{when}: {share:.2%} of a core in {count} processes, over {arguments.seconds:g} seconds", flush=True)
    print(f"{max(shares) / TARGET:.2f} of the {TARGET:.0%} of a core that are allowed")
    raise SystemExit(max(shares) > TARGET)


if __name__ == "__main__":
    main()
