"""Beam search beside the same number of plain samples: tokens a second of both, by one engine, in turn.

    python benchmarks/beams.py                                                     # the embedded model
    python benchmarks/beams.py --model Qwen/Qwen3-0.6B --load-format dummy --prompts 8

Every prompt has random tokens and `--output` steps, whatever is sampled: end-of-sequence tokens are ignored. A search
of width B computes B tokens a step, as B samples of a prompt (`n` = B, temperature 1) do. Both take turns, round after
round; rates are medians, the ratio is of them.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

from kvern import LLM, SamplingParams

SEED = 0


def seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams, wanted: int) -> float:
    """How long it takes to answer all prompts, and check that all tokens came."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed = time.perf_counter() - start
    tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens came and {wanted} were asked for")
    return elapsed


def measure(llm: LLM, prompts: list[list[int]], width: int, output: int, rounds: int) -> dict[str, Any]:
    """Medians of tokens a second over rounds that take turns, after one that is not counted."""
    common = SamplingParams(n=width, max_tokens=output, ignore_eos=True)
    kinds = {"samples": common.replace(temperature=1.0), "beams": common.replace(beam_width=width)}
    tokens = len(prompts) * width * output
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, params in kinds.items():
            elapsed = seconds(llm, prompts, params, tokens)
            if turn:
                times[name].append(elapsed)
    rates = {name: tokens / statistics.median(values) for name, values in times.items()}
    return {"width": width, "prompts": len(prompts), **rates, "ratio": rates["beams"] / rates["samples"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face id; the embedded model if left out")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--prompts", type=int, default=1, help="at the same time")
    parser.add_argument("--input", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="steps")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with LLM(
        arguments.model,
        load_format=arguments.load_format,
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_model_len=arguments.max_model_len,
    ) as llm:
        dice = random.Random(SEED)
        vocabulary = llm.spec.vocab_size
        prompts = [[dice.randrange(vocabulary) for _ in range(arguments.input)] for _ in range(arguments.prompts)]
        for width in arguments.widths:
            found = measure(llm, prompts, width, arguments.output, arguments.rounds)
            print(json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()
