"""A fresh process that answers requests of all kinds for the first time: `python -m tests.support.first_time MODEL...`.

`MODEL+DRAFT` or `MODEL+DRAFT+int4` is a model for which another guesses, as it is or quantized, always as many drafts.

Every workload runs several times. Printed is JSON: for each model what was compiled, captured and imported in steps,
and which steps of the first run were far slower than the same steps later.
"""

import gc
import json
import random
import statistics
import sys
from typing import Any

import torch
from benchmarks.first_time import Step, StepWatch

from kvern import LLM, SamplingParams
from kvern.drafting.proposer import takes_drafts
from kvern.request.sampling_params import StructuredOutput
from tests.support.combined_features import ADAPTERS
from tests.support.internals import core_of

LONGEST = 504
"""Tokens of a sequence: rows of the block table are then no multiple of 16 long."""
RUNS = 4
FACTOR = 5
"""The factor of the median of later runs above which a step did something for the first time."""
LEAST_MILLISECONDS = 20.0
"""And above this: a pause of the host's is no first time."""
DRAFTS = 3
"""Drafts of a request in each step, if there is a drafter."""
FORM = StructuredOutput(regex="[a-z]{12}")

COMMON: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "seed": 1}
PARAMS = [
    SamplingParams(temperature=0, **COMMON),
    SamplingParams(temperature=0.8, **COMMON),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, **COMMON),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.1, **COMMON),
    SamplingParams(logprobs=5, prompt_logprobs=2, **COMMON),
    SamplingParams(typical_p=0.8, **COMMON),
    SamplingParams(n=3, temperature=1.0, **COMMON),
    SamplingParams(beam_width=4, n=2, max_tokens=8),
]
WITH_TEXT = [
    SamplingParams(logit_bias={5: 1.0, 6: -1.0}, bad_words=["the"], min_tokens=4, **COMMON),
    SamplingParams(dry_multiplier=0.8, xtc_probability=0.5, top_n_sigma=1.0, **COMMON),
    SamplingParams(max_tokens=20, seed=1, structured=FORM),
]
"""Prompts for models with a tokenizer."""
RARE = [
    PARAMS[-1],
    WITH_TEXT[1],
    SamplingParams(max_tokens=4, structured=StructuredOutput(regex="[0-9]{2}")),
]
"""Beams and rare filters are PyTorch's, whose kernels the driver loads at first use, some 50 ms each; grammars are
a library's, which is loaded for the first one."""
Batch = list[tuple[list[int], SamplingParams]]


def workloads(vocabulary: int, longest: int, kinds: list[SamplingParams] = PARAMS) -> list[Batch]:
    """Requests that arrive together: of every kind, alone and with all others; behind a prefix; of every number."""
    rng = random.Random(3)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(5, vocabulary) for _ in range(length)]

    prefix = prompt(270)
    return [
        [(prompt(70), PARAMS[1])],
        *([(prompt(9 + index), params)] for index, params in enumerate(kinds)),
        *([(prompt(9 + index), params) for index in range(6)] for params in kinds),
        [(prompt(10 + 3 * index), kinds[index % len(kinds)]) for index in range(40)],
        *([(prompt(rng.randrange(5, 90)), PARAMS[1]) for _ in range(count)] for count in (2, 3, 7, 13, 33, 64)),
        *([(prefix + prompt(index + 1), PARAMS[0]) for index in range(count)] for count in (4, 11, 30, 60)),
        [(prompt(longest - 20), PARAMS[1]), *((prompt(5), PARAMS[1]) for _ in range(3))],
    ]


def answer(llm: LLM, batches: list[Batch]) -> StepWatch:
    """All batches one after another, with an empty prefix cache, every other request with an adapter."""
    adapters = [None, *llm.adapters]
    core_of(llm).scheduler.cache.tree.clear()
    watch = StepWatch(core_of(llm))
    with watch.watching():
        for number, batch in enumerate(batches):
            used = adapters if number % 2 else adapters[:1]
            names = [used[index % len(used)] for index in range(len(batch))]
            for output in llm.generate([item for item, _ in batch], [params for _, params in batch], adapter=names):
                output.check()
    return watch


def far_slower(runs: list[list[Step]]) -> list[str]:
    """Steps of the first run beside the same steps of the others."""
    kinds = [[step.kind for step in steps] for steps in runs]
    assert all(other == kinds[0] for other in kinds), "the same requests are to take the same steps"
    found = []
    for index, (first, *later) in enumerate(zip(*runs, strict=True)):
        usual = statistics.median(step.milliseconds for step in later)
        if first.milliseconds > max(LEAST_MILLISECONDS, FACTOR * usual):
            found.append(f"step {index}, later {usual:.1f} ms: {first}")
    return found


def main(models: list[str]) -> None:
    found = {}
    for model in models:
        embedded = model == "kvern-1m"
        options: dict[str, Any] = {"adapters": ADAPTERS} if embedded else {}
        folder, *drafting = model.split("+")
        options |= dict(zip(("draft_model", "draft_quantization"), drafting, strict=False))
        with LLM(
            folder, device="cuda", dtype="bfloat16", max_model_len=LONGEST, kv_cache_tokens=65536, **options
        ) as llm:
            if drafting:
                core: Any = core_of(llm)
                core.drafting.wanted = lambda _: lambda request: DRAFTS * takes_drafts(request)
            batches = workloads(llm.spec.vocab_size, LONGEST, PARAMS + WITH_TEXT if embedded else PARAMS)
            for params in RARE if embedded else RARE[:1]:
                llm.generate([5, 6, 7], params)
            gc.collect()
            gc.disable()
            modules = set(sys.modules)
            watches = [answer(llm, batches) for _ in range(RUNS)]
            steps = [watch.steps for watch in watches]
            found[model] = {
                "steps": len(steps[0]),
                "compiled": [name for watch in watches for name in watch.compiled],
                "captured": [str(step) for run in steps for step in run if "captures a graph" in step.happened],
                "far slower": [] if drafting else far_slower(steps),  # runs differ by which drafts are right
                "imported": sorted(set(sys.modules) - modules),
            }
            gc.enable()
        torch.cuda.empty_cache()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
