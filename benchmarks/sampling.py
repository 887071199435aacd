"""What a decode step takes with each kind of sampling, beside the same step without it.

    python benchmarks/sampling.py                                   # the embedded model
    python benchmarks/sampling.py --rows 64 --prompt 4096 --model FOLDER --load-format dummy     # more for the engine

Figures are of the fastest of some rounds, in which the kinds take turns. On a CPU they count the time that this process
gets, which others on the machine do not lengthen.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable

import torch
import tyro

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig

BASE = SamplingParams(temperature=0.8, seed=1, max_tokens=48, ignore_eos=True)
DRY = {"dry_multiplier": 0.8, "dry_allowed_length": 2}
IN_KERNELS = {
    "top_k, top_p": BASE.replace(top_k=40, top_p=0.95),
    "presence_penalty": BASE.replace(presence_penalty=0.5),
    "repetition_penalty": BASE.replace(repetition_penalty=1.1),
    "logit_bias": BASE.replace(logit_bias=dict.fromkeys(range(100, 400), 1.0)),
    "allowed tokens": BASE.replace(allowed_token_ids=list(range(100, 2000))),
    "logprobs": BASE.replace(logprobs=5),
    "min_p": BASE.replace(min_p=0.05),
    "min_tokens, 20 logprobs": BASE.replace(min_tokens=20, stop_token_ids=[5, 6, 7], logprobs=20),
}
KINDS = {
    "plain": [BASE],
    **{name: [params] for name, params in IN_KERNELS.items()},
    "each another of these": list(IN_KERNELS.values()),
    "all of these": [
        BASE.replace(
            top_k=40,
            top_p=0.95,
            min_p=0.01,
            presence_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias=dict.fromkeys(range(100, 400), 1.0),
            min_tokens=20,
            logprobs=5,
        )
    ],
    "typical_p": [BASE.replace(typical_p=0.9)],
    "DRY": [BASE.replace(**DRY)],
    "DRY without breakers": [BASE.replace(**DRY, dry_sequence_breakers=[])],
    "XTC": [BASE.replace(xtc_probability=0.5)],
    "top_n_sigma": [BASE.replace(top_n_sigma=1.5)],
    "dynamic temperature": [BASE.replace(dynatemp_range=0.5)],
    "the last four": [BASE.replace(**DRY, xtc_probability=0.5, top_n_sigma=1.5, dynatemp_range=0.5)],
}
"""What the requests of a batch ask for, in turn."""


def milliseconds(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], clock: Callable[[], float]) -> float:
    """Of one step: prompts are cached, so that nearly all steps decode."""
    steps = llm.statistics().steps
    began = clock()
    llm.generate(prompts, params)
    return 1000 * (clock() - began) / (llm.statistics().steps - steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="requests in the batch")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    arguments, options = parser.parse_known_args()
    llm = LLM(**vars(tyro.cli(EngineConfig, args=options)))
    rng = random.Random(0)
    phrases = [[rng.randrange(10, 2000) for _ in range(length)] for length in range(2, 30)]
    prompts = []
    for _ in range(arguments.rows):  # text that repeats itself
        text = [token for _ in range(arguments.prompt) for token in rng.choice(phrases)]
        prompts.append(text[: arguments.prompt])
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    kinds = {name: [kind[row % len(kind)] for row in range(len(prompts))] for name, kind in KINDS.items()}
    for params in kinds.values():
        llm.generate(prompts, params)  # caches prompts, compiles kernels
    for _ in range(arguments.rounds):
        for name, params in kinds.items():
            found[name].append(milliseconds(llm, prompts, params, clock))
    plain = min(found["plain"])
    print(f"{arguments.rows} rows, prompts of {arguments.prompt} tokens, {' '.join(options)}", file=sys.stderr)
    for name, times in found.items():
        print(f"{name:24} {min(times):8.2f} ms a step {plain / min(times):6.2f} of the plain rate")


if __name__ == "__main__":
    main()
