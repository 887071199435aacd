"""Seconds that requests all at once take engines beside each other, each with a GPU or its share of the processor.

    python benchmarks/data_parallel.py --model MODEL --load-format dummy --engines 2 --requests 512

Prompts of 100 to 1024 tokens and answers of as many, drawn evenly; 1 is an engine alone. Medians of the rounds behind
one to warm up.
"""

import argparse
import json
import random
import statistics
import time

from kvern import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, Hugging Face id, or name of an embedded model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt, and of an answer, at most")
    parser.add_argument("--vocabulary", type=int, default=128000, help="prompts are tokens from 1000 to below it")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    dice, longest = random.Random(0), arguments.longest
    prompts, params = [], []
    for _ in range(arguments.requests):
        prompt, answer = (dice.randint(longest // 10, longest) for _ in range(2))
        prompts.append([dice.randrange(1000, arguments.vocabulary) for _ in range(prompt)])
        params.append(SamplingParams(temperature=0.6, max_tokens=answer, ignore_eos=True))
    llm = LLM(
        arguments.model,
        load_format=arguments.load_format,
        data_parallel_size=arguments.engines,
        max_model_len=2 * longest,
        prefix_cache=False,
    )
    with llm:
        seconds = []
        for turn in range(arguments.rounds + 1):
            begun = time.perf_counter()
            llm.generate(prompts, params)
            if turn:
                seconds.append(time.perf_counter() - begun)
    tokens, taken = sum(item.max_tokens or 0 for item in params), statistics.median(seconds)
    found = {"engines": arguments.engines, "requests": len(prompts), "seconds": round(taken, 3)}
    spread = [round(each, 3) for each in sorted(seconds)]
    print(json.dumps(found | {"of rounds": spread, "generated tokens a second": round(tokens / taken, 1)}))


if __name__ == "__main__":
    main()
