"""What a long prompt costs an agent whose conversation is cached: time to the first token over HTTP, by one server.

    python benchmarks/agent_prompt.py                                             # a small random model, on a CPU
    python benchmarks/agent_prompt.py --model FOLDER -- --load-format dummy       # further options are the server's

    short     a prompt of a few tokens: what any request costs
    alone     the 6,000 new tokens of a turn as a prompt of their own
    cached    20,000 tokens that are cached, and 6,000 new ones behind them
    ids       the same as token ids: no chat template, and nothing to tokenize
    resumed   26,000 tokens that are all cached, and a few new ones: what a long prompt costs beside its new tokens
    whole     26,000 tokens of which none is cached

Every round has all of them in turn, with new words; figures are medians. `cached / alone` holds two things: what a long
prompt costs beside its new tokens (resumed - short), and the attention of the new tokens over the cached ones, which no
engine is spared (the rest). `(alone + resumed - short) / alone` is the ratio without the second.
"""

import argparse
import contextlib
import http.client
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvern.models.hub import resolve_model
from kvern.text.tokenizer import Tokenizer

CACHED, NEW, FEW, TURNS = 20_000, 6_000, 16, 8
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
"""Little attention, as in models whose layers are wide."""

Conversation = list[dict[str, Any]]


class Client:
    """Asks for one token, and tells how long it took."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def post(self, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode()
        self._connection.request("POST", path, data, {"content-type": "application/json"})
        answer = json.loads(self._connection.getresponse().read())
        if "error" in answer:
            raise SystemExit(answer["error"]["message"])
        return answer

    def first_token(self, prompt: Conversation | list[int]) -> tuple[float, int, int]:
        """Seconds, tokens of the prompt, and how many of them were cached."""
        is_chat = isinstance(prompt[0], dict)
        path, name = ("/v1/chat/completions", "messages") if is_chat else ("/v1/completions", "prompt")
        start = time.perf_counter()
        usage = self.post(path, **{name: prompt}, max_tokens=1, ignore_eos=True)["usage"]
        return time.perf_counter() - start, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Words:
    """Texts of about so many tokens, no two alike."""

    def __init__(self, tokenizer: Tokenizer, dice: random.Random) -> None:
        texts = (tokenizer.id_to_token(token) for token in range(tokenizer.vocab_size))
        self._words = [text for text in texts if re.fullmatch(" [a-z]{2,8}", text)]
        self._dice = dice

    def text(self, tokens: int) -> str:
        return "".join(self._dice.choices(self._words, k=tokens)).strip()


def small_model(folder: Path) -> Path:
    """A shape for random weights, with the tokenizer and chat template of the embedded model."""
    embedded = Path(resolve_model("kvern-1m"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded / name, folder / name)
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


@contextlib.contextmanager
def server(folder: Path, options: list[str]) -> Iterator[Client]:
    command = [sys.executable, "-m", "kvern", "serve", "--model", str(folder), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"on http://[\d.]+:(\d+)", line):
                yield Client(int(found[1]))
                return
            print(line, end="", file=sys.stderr)
        raise SystemExit("the server has ended")
    finally:
        process.terminate()
        process.communicate()


def measure(client: Client, words: Words, figures: dict[str, list[tuple[float, int, int]]]) -> None:
    """One round."""
    turns: Conversation = [{"role": "system", "content": words.text(CACHED // 2)}]
    for number in range(TURNS):
        role = "assistant" if number % 2 else "user"
        turns.append({"role": role, "content": words.text(CACHED // 2 // TURNS)})
    new = {"role": "user", "content": words.text(NEW)}
    after = {"role": "user", "content": words.text(FEW)}
    client.first_token(turns)
    token_ids = client.post("/tokenize", messages=[*turns, {"role": "user", "content": words.text(NEW)}])["tokens"]
    conversations: dict[str, Conversation | list[int]] = {
        "short": [after],
        "alone": [new],
        "cached": [*turns, new],
        "ids": token_ids,
        "resumed": [*turns, new, after],
        "whole": [{"role": "system", "content": words.text(CACHED)}, {"role": "user", "content": words.text(NEW)}],
    }
    for name, conversation in conversations.items():
        figures.setdefault(name, []).append(client.first_token(conversation))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model with a context of 32,768 tokens or more")
    parser.add_argument("--rounds", type=int, default=3, help="after one that is not counted")
    parser.add_argument("options", nargs="*", help="of kvern serve")
    arguments = parser.parse_args()
    figures: dict[str, list[tuple[float, int, int]]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(resolve_model(arguments.model)) if arguments.model else small_model(Path(made))
        options = arguments.options if arguments.model else ["--load-format", "dummy", *arguments.options]
        words = Words(Tokenizer(folder), random.Random(1))
        with server(folder, options) as client:
            measure(client, words, {})
            for _ in range(arguments.rounds):
                measure(client, words, figures)
    seconds = {name: statistics.median(found[0] for found in times) for name, times in figures.items()}
    for name, times in figures.items():
        _, tokens, cached = times[-1]
        print(f"{name:8}{tokens:8} tokens{cached:8} cached{seconds[name] * 1000:10.1f} ms")
    beside = seconds["resumed"] - seconds["short"]
    print(f"cached / alone                      {seconds['cached'] / seconds['alone']:.2f}")
    print(f"(alone + resumed - short) / alone   {(seconds['alone'] + beside) / seconds['alone']:.2f}")
    print(f"a long prompt beside its new tokens {beside * 1000:.1f} ms")


if __name__ == "__main__":
    main()
