"""kvern on a CPU beside Hugging Face transformers and llama.cpp: the same random weights, the same requests, in turn.

    python benchmarks/cpu.py                    # everything; a quiet machine, please
    python benchmarks/cpu.py --only stream      # one stream of 64 tokens

The model has the shape of SmolLM2-135M (576 hidden, 30 layers, 9/3 heads, 1536 inner, 49152 vocabulary, tied) in
bfloat16. Each engine lives in a process of its own, with the same number of threads; they take turns, round after
round, so that whatever else the machine does hits all of them alike. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCABULARY = 49152
STREAM_TOKENS = 64
PREFIX = 512
SEED = 0

Work = tuple[list[list[int]], list[int]]
"""Prompts as token ids, and the tokens to generate for each."""


def requests(count: int, prefix: int = 0) -> Work:
    """`count` requests of 32-256 tokens in and 32-256 out, behind `prefix` common tokens."""
    rng = random.Random(SEED)
    head = [rng.randrange(100, VOCABULARY) for _ in range(prefix)]
    sizes = [(rng.randint(32, 256), rng.randint(32, 256)) for _ in range(count)]
    prompts = [head + [rng.randrange(100, VOCABULARY) for _ in range(size)] for size, _ in sizes]
    return prompts, [out for _, out in sizes]


def stream() -> Work:
    rng = random.Random(SEED)
    return [[rng.randrange(100, VOCABULARY) for _ in range(32)]], [STREAM_TOKENS]


WORKS: dict[str, Callable[[], Work]] = {
    "stream": stream,
    "batch": lambda: requests(32),
    "prefix": lambda: requests(32, PREFIX),
}

CASES = [
    # case, engine, the other engine, least ratio of tokens/s
    ("stream", "kvern", "transformers", 2.0),
    ("stream", "kvern", "llama.cpp", 0.7),
    ("batch", "kvern", "transformers", 3.0),
    ("prefix", "kvern", "kvern without prefix cache", 2.0),
]


def make_model(folder: Path) -> None:
    """Write the random checkpoint, once."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def make_gguf(folder: Path) -> Path:
    """The same weights as a BF16 GGUF file, with a vocabulary of placeholders."""
    path = folder / "model.gguf"
    if path.exists():
        return path
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{index}>".encode() for index in range(VOCABULARY)])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * VOCABULARY)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in load_file(str(folder / "model.safetensors")).items():
        stored = tensor
        if name == "model.embed_tokens.weight":
            target = "token_embd.weight"
        elif name == "model.norm.weight":
            target = "output_norm.weight"
        else:
            _, _, layer, rest = name.split(".", 3)
            target = f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"
            for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
                if part in name:  # GGUF rotates neighbouring rows, Hugging Face rows half a head apart
                    rows, columns = tensor.shape
                    stored = tensor.view(count, 2, rows // count // 2, columns).transpose(1, 2).reshape(rows, columns)
        if stored.dim() == 1:
            writer.add_tensor(target, stored.float().numpy())
        else:
            raw = stored.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- the engines: each returns a function from work to the tokens it generated --------------------------------------


def kvern_engine(folder: Path, threads: int, prefix_cache: bool = True) -> Callable[[Work], list[list[int]]]:
    from kvern import LLM, SamplingParams

    llm = LLM(str(folder), threads=threads, prefix_cache=prefix_cache)

    def run(work: Work) -> list[list[int]]:
        prompts, lengths = work
        # What an earlier round left in the prefix cache must not help this one.
        llm._engine.core.scheduler.cache.tree.clear()
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    return run


def transformers_engine(folder: Path, threads: int) -> Callable[[Work], list[list[int]]]:
    """`generate` on one static batch, padded on the left; it ends with the longest answer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]

    def run(work: Work) -> list[list[int]]:
        prompts, lengths = work
        width, longest = max(map(len, prompts)), max(lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
            )
        return [row[width : width + length].tolist() for row, length in zip(out, lengths, strict=True)]

    return run


def llama_cpp_engine(folder: Path, threads: int) -> Callable[[Work], list[list[int]]]:
    import llama_cpp

    llm = llama_cpp.Llama(str(make_gguf(folder)), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(work: Work) -> list[list[int]]:
        [prompt], [length] = work
        llm.reset()
        tokens: list[int] = []
        for token in llm.generate(prompt, temp=0.0, repeat_penalty=1.0):
            tokens.append(int(token))
            if len(tokens) == length:
                break
        return [tokens]

    return run


ENGINES: dict[str, Callable[[Path, int], Callable[[Work], list[list[int]]]]] = {
    "kvern": kvern_engine,
    "kvern without prefix cache": lambda folder, threads: kvern_engine(folder, threads, prefix_cache=False),
    "transformers": transformers_engine,
    "llama.cpp": llama_cpp_engine,
}


def serve(engine: str, folder: Path, threads: int) -> None:
    """A worker: a case a line on stdin, its seconds and tokens a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not reach the answers
    run = ENGINES[engine](folder, threads)
    for line in sys.stdin:
        work = WORKS[line.strip()]()
        started = time.perf_counter()
        tokens = run(work)
        seconds = time.perf_counter() - started
        assert [len(row) for row in tokens] == work[1], "an engine generated another number of tokens"
        answers.write(json.dumps({"seconds": seconds, "tokens": sum(work[1]), "head": tokens[0][:4]}) + "\n")
        answers.flush()


# --- the benchmark ---------------------------------------------------------------------------------------------------


@contextmanager
def worker(engine: str, folder: Path, threads: int) -> Iterator[Callable[[str], dict[str, Any]]]:
    environment = dict(
        os.environ, OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false", PYTHONWARNINGS="ignore"
    )
    command = [sys.executable, __file__, "--worker", engine, "--model", str(folder), "--threads", str(threads)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(case: str) -> dict[str, Any]:
        stdin.write(case + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit(f"{engine} failed; try: {' '.join(command)} <<< {case}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        yield ask
    finally:
        stdin.close()
        process.wait()


def measure(case: str, engines: list[str], folder: Path, threads: int, rounds: int) -> dict[str, list[float]]:
    """Tokens/s of each engine in each round, after one round to warm up."""
    from contextlib import ExitStack

    speeds: dict[str, list[float]] = {engine: [] for engine in engines}
    with ExitStack() as stack:
        ask = {engine: stack.enter_context(worker(engine, folder, threads)) for engine in engines}
        for number in range(rounds + 1):
            for engine in engines:
                answer = ask[engine](case)
                speed = answer["tokens"] / answer["seconds"]
                print(f"{case:8} round {number} {engine:28} {speed:8.1f} tokens/s  {answer['head']}", file=sys.stderr)
                if number:
                    speeds[engine].append(speed)
    return speeds


def command_seconds(command: list[str], rounds: int, until_output: bool = False) -> list[float]:
    """Seconds that a command takes, or until it writes its first character of an answer."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            if until_output:
                process.stdout.read(1)
                times.append(time.perf_counter() - started)
                process.stdout.read()
            else:
                process.wait()
                times.append(time.perf_counter() - started)
    return times


FIRST_TOKEN = """
import sys
from kvern import LLM
for output in LLM().stream_chat([{"role": "user", "content": "Who are you?"}]):
    sys.stdout.write(output.outputs[0].text)
    sys.stdout.flush()
"""

START_UP = [
    # what, command, until the first output, most seconds
    ("import kvern", [sys.executable, "-c", "import kvern"], False, 0.4),
    ("kvern --help", [sys.executable, "-m", "kvern", "--help"], False, 0.4),
    (
        "first token of the embedded model",
        [
            sys.executable,
            "-c",
            FIRST_TOKEN,
        ],
        True,
        4.0,
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*WORKS, "start"], action="append", help="these cases only; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one to warm up (default 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of each engine")
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "kvern-benchmark-135m")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", choices=list(ENGINES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.worker, arguments.model, arguments.threads)
        return

    from rich.console import Console
    from rich.table import Table

    table = Table("case", "beside", "kvern", "other", "ratio (min-max)", "target", "", title="kvern on this CPU")
    figures: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "threads": arguments.threads}
    figures["cases"] = []
    make_model(arguments.model)
    for case in [name for name in WORKS if not arguments.only or name in arguments.only]:
        rows = [row for row in CASES if row[0] == case]
        engines = list(dict.fromkeys(name for row in rows for name in row[1:3]))
        speeds = measure(case, engines, arguments.model, arguments.threads, arguments.rounds)
        for _, ours, other, target in rows:
            ratio = statistics.median(speeds[ours]) / statistics.median(speeds[other])
            each = [a / b for a, b in zip(speeds[ours], speeds[other], strict=True)]
            verdict = "reached" if ratio >= target else "missed"
            figures["cases"].append({"case": case, "other": other, "ratio": ratio, "rounds": each, "tokens/s": speeds})
            table.add_row(
                case,
                other,
                f"{statistics.median(speeds[ours]):.1f} tok/s",
                f"{statistics.median(speeds[other]):.1f} tok/s",
                f"{ratio:.2f} ({min(each):.2f}-{max(each):.2f})",
                f">= {target}",
                verdict,
            )
    if not arguments.only or "start" in arguments.only:
        for what, command, until_output, limit in START_UP:
            times = command_seconds(command, arguments.rounds, until_output)
            median = statistics.median(times)
            figures["cases"].append({"case": what, "seconds": times})
            spread = f"({min(times):.2f}-{max(times):.2f})"
            verdict = "reached" if median < limit else "missed"
            table.add_row(what, "-", f"{median:.2f} s", "-", spread, f"< {limit} s", verdict)
    Console().print(table)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
