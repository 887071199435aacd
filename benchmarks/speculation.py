"""Answers with guesses at them and without, by two engines in turn: tokens a second, and how many guesses were right.

    python benchmarks/speculation.py                                    # the embedded model repeats texts

Every prompt is a run of random tokens, eight times: most models go on with it, as where a text is edited or quoted.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

from kvern import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face id; the embedded model if left out")
    parser.add_argument("--proposer", default="ngram")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--period", type=int, default=12, help="tokens of what is repeated in a prompt")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"threads": arguments.threads, "max_model_len": 1024}
    params = SamplingParams(temperature=arguments.temperature, seed=1, max_tokens=arguments.output, ignore_eos=True)
    dice = random.Random(0)
    with (
        LLM(arguments.model, **options) as plain,
        LLM(arguments.model, proposer=arguments.proposer, **options) as guessing,
    ):
        for count in arguments.requests:
            seconds: dict[str, list[float]] = {"plain": [], "guessing": []}
            before = guessing._engine.statistics()
            drafts, accepted = before.draft_tokens, before.accepted_tokens
            for turn in range(arguments.rounds + 1):
                prompts = [[dice.randrange(300, 2000) for _ in range(arguments.period)] * 8 for _ in range(count)]
                answers = []
                for name, llm in (("plain", plain), ("guessing", guessing)):
                    start = time.perf_counter()
                    outputs = llm.generate(prompts, params)
                    if turn:
                        seconds[name].append(time.perf_counter() - start)
                    answers.append([output.outputs[0].token_ids for output in outputs])
                same = sum(a == b for a, b in zip(*answers, strict=True))
            after = guessing._engine.statistics()
            rates = {name: count * arguments.output / statistics.median(values) for name, values in seconds.items()}
            found = {
                "requests": count,
                **{f"{name} tok/s": round(rate, 1) for name, rate in rates.items()},
                "ratio": round(rates["guessing"] / rates["plain"], 3),
                "drafts": after.draft_tokens - drafts,
                "right": after.accepted_tokens - accepted,
                "same answers in the last round": same,
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
