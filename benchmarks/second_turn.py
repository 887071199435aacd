"""The second turn of a long conversation: seconds until its first token, with the first turn cached and without.

    python benchmarks/second_turn.py                                                       # the embedded model
    python benchmarks/second_turn.py --model Qwen/Qwen3.6-35B-A3B --load-format dummy --input 16000

Every round is a conversation of its own, of random tokens: a prompt, its answer, and what a user adds. Beside the
second turn a prompt as long as what is added, on its own: what the turn would take if there were nothing before it.
"""

import argparse
import json
import random
import statistics
import time

from kvern import LLM, SamplingParams

SEED = 0


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds from the prompt to its first token."""
    start = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face id; the embedded model if left out")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--input", type=int, default=256, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of its answer")
    parser.add_argument("--added", type=int, default=100, help="tokens of the second prompt")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"first turn": [], "second turn": [], "added tokens alone": []}
    with LLM(arguments.model, load_format=arguments.load_format, max_model_len=arguments.max_model_len) as llm:
        dice = random.Random(SEED)

        def tokens(count: int) -> list[int]:
            return [dice.randrange(llm.spec.vocab_size) for _ in range(count)]

        for turn in range(arguments.rounds + 1):
            prompt, added = tokens(arguments.input), tokens(arguments.added)
            first = first_token(llm, tokens(arguments.input))
            answered = llm.generate([prompt], SamplingParams(max_tokens=arguments.answer, ignore_eos=True))[0]
            second = first_token(llm, [*prompt, *answered.outputs[0].token_ids, *added])
            alone = first_token(llm, tokens(arguments.added))
            if turn:
                for name, value in zip(seconds, (first, second, alone), strict=True):
                    seconds[name].append(value)
    for name, values in seconds.items():
        figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
        print(json.dumps({"what": name} | {key: round(1000 * value, 2) for key, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
