"""Milliseconds of steps that verify drafts, against those of plain decodes of as many requests, as CUDA graphs.

    python benchmarks/verified_steps.py --model MODEL --load-format dummy --rows 1 32 --tokens 2 5 9 \\
        --draft-model DRAFT --drafts 1 5

Every request has `--context` tokens. With a draft model, how long it takes to guess so many tokens is told as well.
Times are those of the GPU, medians of 9 runs of 20 replays.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvern import LLM, SamplingParams
from kvern.drafting.device.draft_graphs import DraftGraphs
from kvern.request.step import ScheduledTokens
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.needs import SamplingNeeds
from kvern.runner.step_graphs import PlannedStep, StepSize


@torch.inference_mode()
def milliseconds(step: Callable[[], object]) -> float:
    """Of one step, on the GPU."""
    found = []
    step()
    for _ in range(9):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        for _ in range(20):
            step()
        ended.record()
        torch.cuda.synchronize()
        found.append(float(begun.elapsed_time(ended)) / 20)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hugging Face id")
    parser.add_argument("--draft-model", help="the same; none guesses if left out")
    parser.add_argument("--draft-quantization", choices=["int8", "fp8", "int4"], help="of the draft model's weights")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 5, 9], help="verified for each request")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 5], help="guessed for each request")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--options", action="store_true", help="requests filter what they sample from")
    arguments = parser.parse_args()
    most, context = max(arguments.rows), arguments.context
    llm = LLM(
        arguments.model,
        draft_model=arguments.draft_model,
        draft_quantization=arguments.draft_quantization,
        load_format=arguments.load_format,
        proposer=None if arguments.draft_model else "ngram",
        max_batch_requests=most,
        max_model_len=context + 256,
        prefix_cache=False,
    )
    top_p = 0.9 if arguments.options else 1.0
    params = SamplingParams(temperature=0.8, top_p=top_p, max_tokens=200, ignore_eos=True)
    dice = random.Random(0)
    for index in range(most):
        llm._engine.add(f"{index}", [dice.randrange(300, 2000) for _ in range(context)], params)
    engine: Any = llm._engine
    core = engine.core
    while len(core.scheduler.running) < most or any(request.output_length < 2 for request in core.scheduler.running):
        llm._engine.step()
    runner = core.executor._worker.runner
    assert isinstance(runner, DeviceRunner)
    decodes, verifies = runner.graphs[:2]
    drafts = next((graphs for graphs in runner._drafter.graphs if isinstance(graphs, DraftGraphs)), None)
    most_tokens = max(shape.tokens for shape in verifies.captured)
    needs = SamplingNeeds.FILTERS if arguments.options else SamplingNeeds.NOTHING
    for rows in arguments.rows:
        slots = list(range(rows))
        decoding = [ScheduledTokens(slot, context, 1, 1) for slot in slots]
        plain = milliseconds(partial(decodes.run, PlannedStep(decoding, StepSize(rows, 0), needs)))
        for tokens in arguments.tokens:
            if rows * tokens > most_tokens:
                continue
            scheduled = [ScheduledTokens(slot, context, tokens, tokens) for slot in slots]
            verified = milliseconds(partial(verifies.run, PlannedStep(scheduled, None, needs, drafting=True)))
            found = {"rows": rows, "tokens": tokens, "plain ms": round(plain, 3), "verified ms": round(verified, 3)}
            print(json.dumps(found | {"ratio": round(verified / plain, 3)}), flush=True)
        if drafts is not None:
            run = drafts.draft
            guessed = {count: round(milliseconds(partial(run, slots, [count] * rows)), 3) for count in arguments.drafts}
            print(json.dumps({"rows": rows, "ms of drafts": guessed}), flush=True)


if __name__ == "__main__":
    main()
