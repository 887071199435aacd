"""Tokens a second with a draft model whose drafts are right as often as is asked, and without drafts, in one engine.

    python benchmarks/synthetic_acceptance.py --model MODEL --draft-model DRAFT --load-format dummy \\
        --requests 1 32 256 --drafts 5 auto

The model's head is zeroed, so that it always says token 0, as fast as before, however steps are rounded. The draft
model guesses as it would, and then each of its drafts becomes right or wrong by a die that is cast once for each
position: what is timed is all that drafting and verifying take. Only the time counts in which all requests decode.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from kvern import LLM, SamplingParams
from kvern.device.transfer import upload
from kvern.drafting.device.drafter import Captures, ComputedStep, Drafter, GuardedDrafter
from kvern.request.request import Request
from kvern.request.step import SchedulerOutput
from kvern.runner.device_runner import DeviceRunner

RIGHT, WRONG = 0, 1


class SyntheticDrafter:
    """What `drafter` guesses takes its time, and is overwritten by drafts of this accuracy."""

    def __init__(self, drafter: Drafter, runner: DeviceRunner, accuracy: float) -> None:
        self._drafter, self._rows = drafter, runner._rows
        self.caches = drafter.caches
        self.reads_hidden, self.inputs = drafter.reads_hidden, drafter.inputs
        dice = torch.rand(runner._rows.tokens.shape, generator=torch.Generator().manual_seed(0))
        self._drafts = torch.where(dice < accuracy, RIGHT, WRONG).int().to(runner._rows.device)

    @property
    def graphs(self) -> Sequence[Captures]:
        return self._drafter.graphs

    def prepare(self, output: SchedulerOutput) -> None:
        self._drafter.prepare(output)

    def draft(self, step: ComputedStep) -> None:
        self._drafter.draft(step)
        asked = [(item.slot, item.guesses) for item in step.scheduled if item.sampled and item.guesses]
        if not asked:
            return
        rows, most = self._rows, max(guesses for _, guesses in asked)
        numbers = [slot for slot, _ in asked] + [guesses for _, guesses in asked]
        slots, guesses = upload(numbers, torch.int64, rows.device).view(2, -1, 1)
        places = torch.arange(1, most + 1, device=rows.device)[None].minimum(guesses)
        places = rows.num_computed_tokens[slots] + places
        rows.tokens[slots, places] = self._drafts[slots, places]


def rate(llm: LLM, requests: int, context: int, output: int) -> float:
    """Tokens a second while all of so many requests decode."""
    core = cast("Any", llm._engine).core
    dice = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for index in range(requests):
        llm._engine.add(f"{index}", [dice.randrange(300, 2000) for _ in range(context)], params)
    running = core.scheduler.running
    while len(running) < requests or any(request.output_length < 8 for request in running):
        llm._engine.step()
    begun, first = time.perf_counter(), sum(request.output_length for request in running)
    while all(request.output_length < output - 24 for request in running):
        llm._engine.step()
    tokens, seconds = sum(request.output_length for request in running) - first, time.perf_counter() - begun
    llm._engine.abort(llm._engine.request_ids)
    while core.has_work:
        llm._engine.step()
    return float(tokens / seconds)


def always(drafts: int, running: int) -> Callable[[Request], int]:
    """Asks for so many."""
    return lambda _: drafts


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hugging Face id, with a head of its own")
    parser.add_argument("--draft-model", required=True, help="the same")
    parser.add_argument("--draft-quantization", choices=["int8", "fp8", "int4"], help="of the draft model's weights")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--drafts", nargs="+", default=["auto"], help="of each step; auto: as many as pay")
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    llm = LLM(
        arguments.model,
        draft_model=arguments.draft_model,
        draft_quantization=arguments.draft_quantization,
        load_format=arguments.load_format,
        max_batch_requests=max(arguments.requests),
        max_model_len=arguments.context + arguments.output + 32,
        prefix_cache=False,
    )
    core = cast("Any", llm._engine).core
    runner = core.executor._worker.runner
    weights = list(runner._decoder.lm_head.parameters())
    if runner._decoder.spec.tie_word_embeddings or not weights:
        raise SystemExit(f"{arguments.model} has no plain head of its own on this device: take another model, on a GPU")
    with torch.inference_mode():
        for weight in weights:
            weight.zero_()
    real = runner._drafter
    runner._drafter = GuardedDrafter(SyntheticDrafter(real._drafter, runner, arguments.accuracy))
    wanted = {"none": partial(always, 0), "auto": core.drafting.wanted}
    wanted |= {count: partial(always, int(count)) for count in arguments.drafts if count != "auto"}
    for requests in arguments.requests:
        rates: dict[str, list[float]] = {"none": []} | {count: [] for count in arguments.drafts}
        drafts, accepted = dict.fromkeys(rates, 0), dict.fromkeys(rates, 0)
        for turn in range(arguments.rounds + 1):
            for name, found in rates.items():
                core.drafting.wanted = wanted[name]
                before = llm.statistics()
                drafts[name] -= before.draft_tokens
                accepted[name] -= before.accepted_tokens
                measured = rate(llm, requests, arguments.context, arguments.output)
                after = llm.statistics()
                drafts[name] += after.draft_tokens
                accepted[name] += after.accepted_tokens
                if turn:
                    found.append(measured)
        plain = statistics.median(rates.pop("none"))
        for name, found in rates.items():
            measured = statistics.median(found)
            shown = {
                "requests": requests,
                "drafts of a step": name,
                "plain tok/s": round(plain, 1),
                "drafting tok/s": round(measured, 1),
                "ratio": round(measured / plain, 3),
                "drafts": drafts[name],
                "right": round(accepted[name] / max(1, drafts[name]), 3),
            }
            print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
