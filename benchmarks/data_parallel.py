"""What engines beside each other are worth, each with a GPU or its share of the processor: requests all at once.

    python benchmarks/data_parallel.py --model MODEL --load-format dummy --engines 2 --requests 512

Prompts of 100 to 1024 tokens and answers of as many, drawn evenly. Three measurements, medians of the rounds behind one
to warm up: the engines with all requests, one engine with all, and one with its share of them. Ratios are of generated
tokens a second. The second says what the division itself costs; the first is lower, as each engine reads all weights
for fewer rows, and is left out with `--share-alone`. An engine may have several GPUs.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from kvern import LLM, SamplingParams

Requests = Sequence[tuple[list[int], SamplingParams]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, Hugging Face id, or name of an embedded model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of each engine")
    parser.add_argument("--share-alone", action="store_true", help="do not measure one engine with all requests")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt, and of an answer, at most")
    parser.add_argument("--vocabulary", type=int, default=128000, help="prompts are tokens from 1000 to below it")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    dice, longest, engines = random.Random(0), arguments.longest, arguments.engines
    requests = []
    for _ in range(arguments.requests):
        prompt, answer = (dice.randint(longest // 10, longest) for _ in range(2))
        token_ids = [dice.randrange(1000, arguments.vocabulary) for _ in range(prompt)]
        requests.append((token_ids, SamplingParams(temperature=0.6, max_tokens=answer, ignore_eos=True)))
    options = {"load_format": arguments.load_format, "max_model_len": 2 * longest, "prefix_cache": False}
    options |= {"tensor_parallel_size": arguments.tensor_parallel_size}
    ratios = {}
    with LLM(arguments.model, data_parallel_size=engines, **options) as llm:  # first: their memory goes with them
        beside = measure(llm, engines, requests, arguments.rounds)
    with LLM(arguments.model, **options) as llm:
        if not arguments.share_alone:
            ratios["of one engine with all"] = beside / measure(llm, 1, requests, arguments.rounds)
        share = measure(llm, 1, requests[::engines], arguments.rounds)
    ratios[f"of {engines} x one with its share"] = beside / engines / share
    print(json.dumps({"engines": engines} | {name: round(ratio, 3) for name, ratio in ratios.items()}))


def measure(llm: LLM, engines: int, requests: Requests, rounds: int) -> float:
    """Generated tokens a second."""
    prompts, params = zip(*requests, strict=True)
    seconds = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        llm.generate(prompts, params)
        seconds.append(time.perf_counter() - begun)
    tokens, taken = sum(item.max_tokens or 0 for item in params), statistics.median(seconds[1:])
    found: dict[str, Any] = {"engines": engines, "requests": len(requests), "seconds": round(taken, 3)}
    spread = [round(each, 3) for each in sorted(seconds[1:])]
    print(json.dumps(found | {"of rounds": spread, "generated tokens": tokens}), flush=True)
    return tokens / taken


if __name__ == "__main__":
    main()
