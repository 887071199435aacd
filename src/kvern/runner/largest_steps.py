"""The largest steps of an engine on a GPU, run at start to find what memory steps take."""

from collections.abc import Sequence
from typing import Any

import torch

from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import NewRequest, ScheduledTokens, SchedulerOutput
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.memory import GRAPH_BYTES
from kvern.runner.step_graphs import StepKind


def run_largest_steps(runner: DeviceRunner, max_tokens: int, kinds: Sequence[StepKind[Any, Any]]) -> int:
    """Run the largest steps through a cache of one block: PyTorch keeps their memory for the steps to come.

    `max_tokens`: of a step; `kinds`: those that are captured. Returns the bytes that their graphs take besides.
    """
    rows = runner.model.rows
    device = rows.device
    slots = rows.scratch
    longest = rows.tokens.shape[1] - 1
    tokens = min(max_tokens, longest * slots)
    length = min(longest - 1, tokens)
    requests = min(slots, -(-tokens // length))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    params = ResolvedParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=0)
    asked = RequestSpec("", PromptInput([0]), params, 1)
    joined = [NewRequest(slot, asked, params, 0, [0], []) for slot in range(slots)]
    prompts = [ScheduledTokens(slot, 0, min(length, tokens - slot * length), 1) for slot in range(requests)]
    decodes = [ScheduledTokens(slot, 0, 1, 1) for slot in range(slots)]
    runner.execute(SchedulerOutput(0, joined=joined, scheduled=prompts)).result()
    torch.cuda.reset_peak_memory_stats(device)
    for number, step in enumerate([decodes, *(kind.largest_step() for kind in kinds)]):
        if step:
            runner.execute(SchedulerOutput(1 + number, scheduled=step)).result()
    if not kinds:
        return 0
    graphs = sum(len(kind.shapes) for kind in kinds)
    return torch.cuda.max_memory_allocated(device) - before + graphs * GRAPH_BYTES
