"""The first steps of a new user, in the environment that `make demo` makes and no other: `make smoke`.

The demo twice, the second time with kernels that are built; README's first example; a server that chats and
streams; every way to quantize, a GGUF file and an embedding model. Fails with what failed: an exit code, a traceback, a
row without an answer, an empty text. Needs what kvern depends on alone.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KVERN = str(Path(sys.executable).with_name("kvern"))
TRACEBACK = "Traceback (most recent call last)"
SECONDS = 600.0
"""The limit of one step, on a busy machine."""


class Smoke(Exception):
    """Raised for a failure that a new user would see."""


def run(*command: str) -> str:
    """The output of a command. Raises Smoke if it fails or prints a traceback."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode or TRACEBACK in done.stdout + done.stderr:
        said = (done.stdout + done.stderr)[-3000:]
        raise Smoke(f"{' '.join(command)[:300]} ended with {done.returncode} and said:\n{said}")
    return done.stdout


def demo(answers: Path) -> None:
    """Runs the commands of `make demo`; each request must have an answer."""
    run(KVERN, "run", "examples/requests.jsonl", str(answers), "--overwrite")
    asked = (ROOT / "examples" / "requests.jsonl").read_text().splitlines()
    if len(answers.read_text().splitlines()) != len(asked) or answers.with_name("answers.errors.jsonl").exists():
        raise Smoke(f"of {len(asked)} rows of the demo some have no answer: {list(answers.parent.iterdir())}")


def build(cache: Path) -> None:
    """Wait for the kernels that the first demo began to build; where there is no compiler, there are none."""
    command = [sys.executable, "-m", "kvern.cpu.ready", str(cache / "kvern")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS)
    if TRACEBACK in done.stderr:
        raise Smoke(f"kernels are not built:\n{done.stderr[-3000:]}")
    print(done.stderr, end="")


def first_example() -> None:
    """README's first example prints what README says that it prints."""
    match = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if match is None:
        raise Smoke("README has no example with its output")
    if (said := run(sys.executable, "-c", match[1])) != match[2]:
        raise Smoke(f"README's first example prints {said!r}, not {match[2]!r}")


def asked(url: str, body: dict[str, Any]) -> str:
    """The answer of a server to JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        text: str = response.read().decode()
    return text


def serve(folder: Path) -> None:
    """A server chats and streams, and ends when it is told to."""
    with (folder / "server.log").open("w+") as log:
        process = subprocess.Popen([KVERN, "serve", "--port", "0"], cwd=ROOT, stdout=log, stderr=log)
        try:
            end = time.monotonic() + SECONDS
            while (found := re.search(r"http://127\.0\.0\.1:\d+", Path(log.name).read_text())) is None:
                if process.poll() is not None or time.monotonic() > end:
                    raise Smoke(f"kvern serve does not start: {Path(log.name).read_text()[-3000:]}")
                time.sleep(0.2)
            body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 16}
            answer = json.loads(asked(f"{found[0]}/v1/chat/completions", body))
            streamed = asked(f"{found[0]}/v1/chat/completions", body | {"stream": True})
            if not answer["choices"][0]["message"]["content"] or "data: [DONE]" not in streamed:
                raise Smoke(f"a server answers {answer}, {streamed[-300:]}")
            process.terminate()
            code = process.wait(SECONDS)
        finally:
            process.kill()
        said = Path(log.name).read_text()
        if code or TRACEBACK in said:
            raise Smoke(f"kvern serve ended with {code} and said:\n{said[-3000:]}")


def main() -> int:
    """Do it all; the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        steps = {
            "the demo, without kernels": lambda: demo(folder / "answers.jsonl"),
            "kernels are built": lambda: build(folder / "cache"),
            "the demo again": lambda: demo(folder / "answers.jsonl"),
            "README's first example": first_example,
            "a server": lambda: serve(folder),
            "quantized, GGUF and embedding models": lambda: run(sys.executable, "-m", "tests.support.plain_install"),
        }
        failed = 0
        for step, do in steps.items():
            begun = time.monotonic()
            try:
                do()
                outcome = "works"
            except Exception as error:
                failed, outcome = failed + 1, f"FAILS: {type(error).__name__}: {error}"
            print(f"{step}: {outcome} ({time.monotonic() - begun:.0f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
